//! Slices of every layout, laid together, are the one-rank parameter; every element is held where it should be.

use std::collections::BTreeMap;

use plica_folding::axis::Axis;
use plica_folding::groups;
use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::{Category, Device, Tensor};

use super::*;
use crate::error::Error;
use crate::place::Place;

fn specs() -> ParamSpecs {
    let mut specs = ParamSpecs::new();
    let normal = Init::Normal { std: 0.5 };
    let qkv = Slicing::fused(0, Axis::Tp, &[("q", 8), ("k", 4), ("v", 4)]);
    specs.add(ParamSpec::replicated("layers.0.attention.qkv", &[16, 6], true, normal).cut(qkv));
    let row = Slicing::even(1, Axis::Tp, 8);
    specs.add(ParamSpec::replicated("layers.0.attention.o", &[6, 8], true, normal).cut(row));
    specs.add(ParamSpec::replicated("layers.0.norm", &[6], false, Init::Ones));
    specs.add(ParamSpec::replicated("router", &[4, 6], true, Init::Uniform { bound: 0.1 }));
    let vocabulary = Slicing::padded(0, Axis::Tp, 10);
    specs.add(ParamSpec::replicated("embedding", &[10, 6], true, normal).cut(vocabulary));
    let experts = ParamSpec::replicated("layers.0.moe.experts.gate_up", &[4, 8, 6], true, normal).expert();
    let gate_up = Slicing::fused(1, Axis::Etp, &[("gate", 4), ("up", 4)]);
    specs.add(experts.cut(Slicing::even(0, Axis::Ep, 4)).cut(gate_up));
    let down = ParamSpec::replicated("layers.0.moe.experts.down", &[4, 6, 4], true, normal).expert();
    specs.add(down.cut(Slicing::even(0, Axis::Ep, 4)).cut(Slicing::even(2, Axis::Etp, 4)));
    specs
}

/// The layout-free tensors of a whole world, and how often each element was written by first replicas.
fn gather(layout: &Layout, device: &Device) -> BTreeMap<String, (Vec<f64>, Vec<usize>)> {
    let mut all: BTreeMap<String, (Vec<f64>, Vec<usize>)> = BTreeMap::new();
    for rank in 0..layout.world() {
        let params =
            Params::<f64>::new(&specs(), &Place::new(layout, rank), device, 7).expect("a legal layout");
        for (id, piece, values) in params.export() {
            let n = piece.shape.iter().product();
            let (data, count) = all.entry(piece.name.clone()).or_insert((vec![f64::NAN; n], vec![0; n]));
            let old = piece.select(data);
            assert!(old.iter().zip(&values).all(|(o, v)| o.is_nan() || o == v), "replicas of {}", piece.name);
            piece.place(data, &values);
            if params.is_first_replica(id) {
                let counted: Vec<usize> = piece.select(count).iter().map(|c| c + 1).collect();
                piece.place(count, &counted);
            }
        }
    }
    all
}

/// Number of the layouts below that are legal: over the worlds 1, 2, .. 8, the choices of TP in {1, 2, 4} times
/// those of (EP, ETP) that divide the world: 1, 6, 1, 18, 1, 6, 1, 24.
const LEGAL_LAYOUTS: usize = 58;

/// Worlds of up to 8 ranks with TP, EP, ETP of 1, 2 or 4.
fn every_layout() -> Vec<[usize; 4]> {
    let sizes = [1, 2, 4];
    let mut all = Vec::new();
    for world in 1..=8 {
        for tp in sizes {
            for ep in sizes {
                all.extend(sizes.map(|etp| [world, tp, ep, etp]));
            }
        }
    }
    all
}

#[test]
fn every_layout_starts_with_the_same_layout_free_tensors() {
    let device = Device::cpu(1);
    let one = gather(&Layout::one(), &device);
    let names: Vec<&str> = one.keys().map(String::as_str).collect();
    for name in ["layers.0.attention.q", "layers.0.moe.experts.3.up", "layers.0.moe.experts.0.down", "router"]
    {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    assert_eq!(one["embedding"].0.len(), 60, "a checkpoint holds the 10 rows, not the padded 12");
    // Every legal layout of 1 to 8 ranks whose axes these shapes divide over.
    let mut seen = 0;
    for [world, tp, ep, etp] in every_layout() {
        let spec = LayoutSpec { world, tp, ep, etp: Some(etp), ..LayoutSpec::default() };
        let Ok(layout) = Layout::new(&spec) else { continue };
        seen += 1;
        let all = gather(&layout, &device);
        assert_eq!(all.len(), one.len());
        for (name, (data, count)) in &all {
            assert_eq!(data, &one[name].0, "{name} under {layout}");
            assert!(
                count.iter().all(|c| *c == 1),
                "{name} under {layout}: each element has one first replica"
            );
        }
    }
    assert_eq!(seen, LEGAL_LAYOUTS);
}

#[test]
fn import_undoes_export_and_padding_stays_zero() {
    let device = Device::cpu(1);
    let layout =
        Layout::new(&LayoutSpec { world: 4, tp: 4, etp: Some(1), ..LayoutSpec::default() }).expect("valid");
    let place = Place::new(&layout, 3);
    let source = Params::<f64>::new(&specs(), &place, &device, 7).expect("legal");
    let mut target = Params::<f64>::new(&specs(), &place, &device, 8).expect("legal");
    let saved: BTreeMap<String, Vec<f64>> = source.export().map(|(_, p, v)| (p.name.clone(), v)).collect();
    let read = |_, piece: &Piece| saved.get(&piece.name).cloned().ok_or(());
    target.import(read).expect("every piece is there");
    for id in source.ids() {
        assert_eq!(source.value(id).to_vec(), target.value(id).to_vec());
    }
    let embedding = source.find("embedding").expect("declared");
    let piece = &source.pieces(embedding)[0];
    assert_eq!((source.value(embedding).dims(), piece.ranges[0].clone()), (&[3, 6][..], 9..10));
    assert!(source.value(embedding).to_vec()[6..].iter().all(|x| *x == 0.0));
}

#[test]
fn reduce_groups_are_declared_not_inferred() {
    let specs = specs();
    let family = |name: &str| specs.list().iter().find(|s| s.name == name).expect("declared").reduce_family();
    assert_eq!(family("layers.0.attention.qkv"), groups::Family::DpCp);
    assert_eq!(family("layers.0.norm"), groups::Family::TpDpCp);
    assert_eq!(family("router"), groups::Family::TpDpCp);
    assert_eq!(family("layers.0.moe.experts.down"), groups::Family::Edp);
}

#[test]
fn what_does_not_divide_is_refused_with_both_numbers_and_the_axis() {
    let mut specs = ParamSpecs::new();
    let cut = Slicing::even(0, Axis::Tp, 10);
    specs.add(ParamSpec::replicated("w", &[10, 2], true, Init::Ones).cut(cut));
    let layout = Layout::new(&LayoutSpec { world: 4, tp: 4, ..LayoutSpec::default() }).expect("valid");
    let device = Device::cpu(1);
    let error = Params::<f32>::new(&specs, &Place::new(&layout, 0), &device, 1).expect_err("10 over 4");
    assert!(matches!(error, Error::Indivisible { count: 10, parts: 4, axis: Axis::Tp, .. }));
    let text = error.to_string();
    assert!(["10", "TP = 4", "w"].iter().all(|part| text.contains(part)), "{text}");
    assert_eq!(device.ledger().now().total_bytes(), 0);
}

#[test]
fn put_off_weight_gradients_give_the_same_bits() {
    let device = Device::cpu(1);
    let params = Params::<f32>::new(&specs(), &Place::one(), &device, 1).expect("legal");
    let id = params.find("layers.0.norm").expect("declared");
    let mut results = Vec::new();
    for put_off in [false, true] {
        let mut grads = Grads::<f32>::zeros(&params);
        grads.put_off(put_off.then(PutOffKey::default));
        for add in [0.1f32, 1e8, -1e8, 0.3] {
            let kept = Tensor::full(&device, [1], add, Category::Activation);
            grads.run_or_put_off(id, move |grad| {
                let add = kept.item();
                grad.host_mut().expect("host").iter_mut().for_each(|g| *g += add);
            });
        }
        assert_eq!(grads.waiting(), if put_off { 4 } else { 0 });
        let live = device.ledger().now().get(Category::Activation);
        assert_eq!(live, if put_off { 16 } else { 0 }, "what waits stands in the ledger");
        grads.run_waiting(1);
        grads.run_waiting(usize::MAX);
        results.push(grads.get(id).to_vec());
        grads.clear();
        assert!(grads.get(id).to_vec().iter().all(|g| *g == 0.0));
    }
    assert_eq!(results[0], results[1]);
}

#[test]
fn put_off_weight_gradients_run_by_key() {
    let device = Device::cpu(1);
    let params = Params::<f64>::new(&specs(), &Place::one(), &device, 1).expect("legal");
    let id = params.find("layers.0.norm").expect("declared");
    let mut grads = Grads::<f64>::zeros(&params);
    let key = |stage, micro_batch| PutOffKey { stage, micro_batch };
    for (at, key) in [key(0, 0), key(1, 0), key(0, 1), key(1, 0)].into_iter().enumerate() {
        grads.put_off(Some(key));
        // The result tells the order: 10 times what was there, and the own digit.
        grads.run_or_put_off(id, move |grad| {
            grad.host_mut().expect("host").iter_mut().for_each(|g| *g = 10.0 * *g + at as f64 + 1.0);
        });
    }
    assert_eq!(grads.waiting_keys(), [key(0, 0), key(1, 0), key(0, 1)]);
    grads.run_waiting_of(key(1, 0));
    assert_eq!((grads.get(id).to_vec()[0], grads.waiting()), (24.0, 2));
    grads.run_waiting_of(key(7, 7));
    grads.run_waiting_of(key(0, 1));
    grads.run_waiting_of(key(0, 0));
    assert_eq!((grads.get(id).to_vec()[0], grads.waiting()), (2431.0, 0));
}
