//! What does not fit is refused before any work, with both numbers and the axis.

use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::Device;

use super::model::{Model, ModelConfig};
use crate::{Error, Place, TokenBatch, TokenInfo};

fn refusal(config: ModelConfig, tp: usize) -> String {
    let spec = LayoutSpec { world: tp, tp, ..LayoutSpec::default() };
    let place = Place::new(&Layout::new(&spec).expect("a valid layout"), 0);
    match Model::<f32>::new(&config, &place, &Device::cpu(1)) {
        Ok(_) => panic!("{config:?} over TP {tp} was not refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn heads_and_widths_that_do_not_divide() {
    let base = ModelConfig::default();
    let cases = [
        // 6 heads of width 4: 24 columns would divide over 4, the heads do not.
        (ModelConfig { heads: 6, kv_heads: 2, ..base }, 4, ["query heads", "6", "TP = 4"]),
        (ModelConfig { heads: 8, kv_heads: 2, ..base }, 4, ["key/value heads", "2", "TP = 4"]),
        (ModelConfig { ffn: 10, ..base }, 4, ["ffn width", "10", "TP = 4"]),
        (
            ModelConfig { heads: 6, kv_heads: 4, ..base },
            1,
            ["6 query heads", "4 key/value heads", "layers.0"],
        ),
        (ModelConfig { head_dim: 3, ..base }, 1, ["head width 3", "even", "layers.0"]),
        (ModelConfig { kv_heads: 0, ..base }, 1, ["8 query heads", "0 key/value heads", "layers.0"]),
    ];
    for (config, tp, parts) in cases {
        let text = refusal(config, tp);
        for part in parts {
            assert!(text.contains(part), "{part:?} in {text:?}");
        }
    }
}

#[test]
fn batches_whose_parts_do_not_fit() {
    let device = Device::cpu(1);
    let good = TokenBatch::whole(2, vec![1, 2, 3, 4], vec![2, 3, 4, 5]);
    let cases = [
        TokenBatch { documents: vec![0, 3], ..good.clone() },
        TokenBatch { documents: vec![0, 3, 2, 4], ..good.clone() },
        TokenBatch { documents: vec![], ..good.clone() },
        TokenBatch { targets: vec![1], ..good.clone() },
        TokenBatch { padding: vec![], ..good.clone() },
    ];
    for case in cases {
        let error = TokenInfo::new(&device, &case, &Place::one()).expect_err("does not fit");
        assert!(matches!(error, Error::Setting(_)) && error.to_string().contains('4'), "{error}");
    }
    let tokens = TokenInfo::new(&device, &good, &Place::one()).expect("fits");
    assert_eq!(tokens.positions.to_vec(), [0, 1, 0, 1], "positions restart with the document");
}
