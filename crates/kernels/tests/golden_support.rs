//! Reader of the operator goldens: `ops/<op>.safetensors` and the numeric parameters of `ops/ops.json`, from the
//! folder in `PLICA_GOLDEN` (default: `shared/golden` beside the workspace). Included as a module by the tests
//! of each family. Integers and f32 values are widened to f64, exactly.

use std::collections::BTreeMap;
use std::path::PathBuf;

use plica_kernels::Device;
use safetensors::{Dtype, SafeTensors};

/// Tensors and numeric parameters of one operator: `case/name` -> (shape, values). A number of `ops.json` has
/// the shape `[]`, a list of numbers `[n]`; a tensor of the same name wins.
pub type Goldens = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

/// What the goldens are held against: the CPU and, with the feature `emulator`, an emulated GPU.
pub fn devices(threads: usize) -> Vec<Device> {
    [
        Device::cpu(threads),
        #[cfg(feature = "emulator")]
        plica_kernels::cuda::emulator::device(Default::default(), 1, None),
    ]
    .into()
}

/// Goldens of the operator `op`, or `None` (with a line that says so) where the data is not on this machine.
///
/// # Panics
/// When a file is there and cannot be understood.
pub fn load(op: &str) -> Option<Goldens> {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden");
    let folder = std::env::var_os("PLICA_GOLDEN").map_or_else(|| PathBuf::from(default), PathBuf::from);
    let path = folder.join("ops").join(format!("{op}.safetensors"));
    let Ok(bytes) = std::fs::read(&path) else {
        println!("skipped: {op}: no golden data at {}", path.display());
        return None;
    };
    let mut goldens = parameters(&folder, op);
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    for (name, view) in file.tensors() {
        let data = view.data();
        let values: Vec<f64> = match view.dtype() {
            Dtype::F32 => words(data).map(|b| f64::from(f32::from_le_bytes(b))).collect(),
            Dtype::F64 => words(data).map(f64::from_le_bytes).collect(),
            Dtype::I64 => words(data).map(|b| i64::from_le_bytes(b) as f64).collect(),
            other => panic!("{name}: unexpected element type {other:?}"),
        };
        goldens.insert(name.clone(), (view.shape().to_vec(), values));
    }
    Some(goldens)
}

fn words<const N: usize>(data: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    data.chunks_exact(N).map(|chunk| chunk.try_into().expect("chunks of N bytes"))
}

fn parameters(folder: &std::path::Path, op: &str) -> Goldens {
    let path = folder.join("ops").join("ops.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let json: serde_json::Value =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut found = Goldens::new();
    for (case, entries) in json[op].as_object().into_iter().flatten() {
        for (name, value) in entries.as_object().into_iter().flatten() {
            let list =
                value.as_array().and_then(|a| a.iter().map(|x| x.as_f64()).collect::<Option<Vec<_>>>());
            if let Some(values) = list {
                found.insert(format!("{case}/{name}"), (vec![values.len()], values));
            } else if let Some(x) = value.as_f64() {
                found.insert(format!("{case}/{name}"), (Vec::new(), vec![x]));
            }
        }
    }
    found
}

#[test]
fn shapes_and_parameters_are_read() {
    let Some(goldens) = load("attention") else { return };
    assert_eq!(goldens["causal_gqa/scale"], (vec![], vec![0.25]));
    assert_eq!(goldens["varlen/cu_seqlens"].1, [0.0, 5.0, 6.0, 6.0, 21.0, 32.0]);
    for (name, (shape, values)) in &goldens {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
    }
}
