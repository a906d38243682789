//! Entries are read back whole, and damaged ones not at all.

use super::*;

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("plica-kernels-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

#[test]
fn an_entry_is_there_for_the_next_process_and_a_damaged_one_is_not() {
    let folder = folder("damage");
    let load = || KernelCache::new(&folder).load("norm-sm_90a");
    assert_eq!(load(), None);
    let bytes: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
    KernelCache::new(&folder).save("norm-sm_90a", &bytes);
    assert_eq!(load().as_deref(), Some(&bytes[..]));
    let path = folder.join("norm-sm_90a.kernel");
    let whole = std::fs::read(&path).expect("the file");
    for at in [0, 9, 13, 16, 500, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        std::fs::write(&path, damaged).expect("written");
        assert_eq!(load(), None, "byte {at}");
    }
    for len in [0, 15, 16, whole.len() - 1] {
        std::fs::write(&path, &whole[..len]).expect("written");
        assert_eq!(load(), None, "cut to {len}");
    }
    KernelCache::new(&folder).save("norm-sm_90a", &bytes);
    assert_eq!(load(), Some(bytes), "replaced");
    let names: Vec<_> =
        std::fs::read_dir(&folder).expect("listed").flatten().map(|e| e.file_name()).collect();
    assert_eq!(names, ["norm-sm_90a.kernel"], "nothing unfinished stays");
    std::fs::remove_dir_all(&folder).expect("own folder");
}

#[test]
fn any_key_is_a_file_of_its_own_in_the_folder() {
    let folder = folder("names");
    let cache = KernelCache::new(&folder);
    let keys = ["choice-H200 / bf16", "choice-H200%20", "../up", ".hidden", "a.b-c_d", ""];
    for (i, key) in keys.iter().enumerate() {
        cache.save(key, &[i as u8]);
    }
    for (i, key) in keys.iter().enumerate() {
        assert_eq!(KernelCache::new(&folder).load(key), Some(vec![i as u8]), "{key}");
    }
    assert_eq!(std::fs::read_dir(&folder).expect("listed").count(), keys.len());
    std::fs::remove_dir_all(&folder).expect("own folder");
}

#[test]
fn without_a_folder_to_write_in_entries_live_as_long_as_the_process() {
    let file = folder("file");
    std::fs::write(&file, "a file where the folder should be").expect("written");
    let cache = KernelCache::new(&file);
    cache.save("a", &[1, 2]);
    assert_eq!(cache.load("a"), Some(vec![1, 2]));
    assert_eq!(KernelCache::new(&file).load("a"), None);
    std::fs::remove_file(&file).expect("own file");
}
