//! With the feature `emulator`: compiles every kernel text for the CPU, one object a text, and the scheduler that runs
//! them. Without it there is nothing to build.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "emulator")]
    emulator::build();
}

#[cfg(feature = "emulator")]
mod emulator {
    use std::path::{Path, PathBuf};

    /// Kernel texts below `folder`.
    fn texts(folder: &Path, out: &mut Vec<PathBuf>) {
        println!("cargo::rerun-if-changed={}", folder.display());
        for entry in std::fs::read_dir(folder).expect("a source folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                texts(&path, out);
            } else if path.extension().is_some_and(|e| e == "cu") {
                out.push(path);
            }
        }
    }

    pub fn build() {
        let architecture = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
        assert!(
            architecture == "x86_64",
            "the feature `emulator` switches stacks with x86-64 instructions; build for {architecture} without it"
        );
        let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").expect("set by cargo"));
        let out = PathBuf::from(std::env::var("OUT_DIR").expect("set by cargo"));
        let platform = root.join("src/cuda/platform.cuh");
        let emulator = root.join("src/cuda/emulator");
        let mut all = Vec::new();
        texts(&root.join("src"), &mut all);
        all.sort();
        println!("cargo::rerun-if-changed={}", platform.display());
        println!("cargo::rerun-if-changed={}", emulator.display());
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .std("c++17")
            .opt_level(2)
            .flag("-fno-strict-aliasing")
            .flag("-march=native")
            .warnings(false);
        build.include(&emulator).file(emulator.join("emulator.cc"));
        let mut links = String::new();
        for text in &all {
            let stem = text.file_stem().expect("a name").to_string_lossy().to_string();
            println!("cargo::rerun-if-changed={}", text.display());
            let unit = out.join(format!("{stem}.cc"));
            // The last function gives the linker a reason to keep the object, whose entries register themselves.
            let body = format!(
                "#define PLICA_EMULATOR 1\n#include \"emulator.h\"\n#include \"{}\"\n#line 1 \"{}\"\n#include \"{}\"\n\
                 extern \"C\" void plica_link_{stem}() {{}}\n",
                platform.display(),
                text.display(),
                text.display()
            );
            std::fs::write(&unit, body).expect("the output folder can be written");
            build.file(&unit);
            links += &format!("extern \"C\" void plica_link_{stem}();\n");
        }
        let calls: String = all
            .iter()
            .map(|text| format!("plica_link_{}(); ", text.file_stem().expect("a name").to_string_lossy()))
            .collect();
        let table = out.join("table.cc");
        std::fs::write(&table, format!("{links}extern \"C\" void plica_emulator_link() {{ {calls}}}\n"))
            .expect("the output folder can be written");
        build.file(&table).compile("plica_emulator");
    }
}
