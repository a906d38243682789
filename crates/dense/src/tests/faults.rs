//! Scenarios of public bug reports, with the numbers of the reports.

use plica_comm::{LaunchOptions, Mesh, RankContext, run_ranks};
use plica_folding::axis::Axis;
use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::{Category, Device, Tensor};

use super::model::{Model, ModelConfig, Rank, Run, batch_of, run, sequences};
use crate::optim::State;
use crate::tokens::IGNORED;
use crate::*;

fn launch<R: Send>(world: usize, f: impl Fn(RankContext) -> Result<R, Error> + Sync) -> Vec<R> {
    run_ranks(world, LaunchOptions::default(), f).unwrap_or_else(|error| panic!("{error}"))
}

/// Mesh, parameters and gradients of a rank for some declarations.
fn rank_of(
    context: &RankContext,
    layout: &LayoutSpec,
    specs: &ParamSpecs,
) -> Result<(Mesh, Params<f64>, Grads<f64>), Error> {
    let layout = Layout::new(layout).unwrap_or_else(|error| panic!("{error}"));
    let place = Place::new(&layout, context.rank);
    let mesh = Mesh::new(&context.world, layout)?;
    let params = Params::new(specs, &place, &context.device, 1)?;
    let grads = Grads::zeros(&params);
    Ok((mesh, params, grads))
}

fn fill(grads: &mut Grads<f64>, id: ParamId, values: &[f64]) {
    grads.grad(id).host_mut().expect("host memory").copy_from_slice(values);
}

fn expert_stack(experts: usize) -> ParamSpec {
    let spec = ParamSpec::replicated("experts.w", &[experts, 1], true, Init::Ones).expert();
    spec.cut(Slicing::even(0, Axis::Ep, experts))
}

#[test]
fn s10_expert_gradient_scale_does_not_depend_on_ep() {
    let mut specs = ParamSpecs::new();
    let id = specs.add(expert_stack(2));
    // y = w_e x, mean over 4 tokens: rank 0 has x = 1 -> e0, 2 -> e1; rank 1 has 3 -> e0, 4 -> e1.
    for ep in [1, 2] {
        let layout = LayoutSpec { world: 2, ep, ..LayoutSpec::default() };
        let gradients = launch(2, |context| {
            let (mesh, params, mut grads) = rank_of(&context, &layout, &specs)?;
            let own: Vec<f64> = match (ep, context.rank) {
                (1, 0) => vec![1.0 / 4.0, 2.0 / 4.0],
                (1, _) => vec![3.0 / 4.0, 4.0 / 4.0],
                // The owner of an expert has seen the tokens of both ranks.
                (_, 0) => vec![(1.0 + 3.0) / 4.0],
                (_, _) => vec![(2.0 + 4.0) / 4.0],
            };
            fill(&mut grads, id, &own);
            reduce_gradients(&params, &mut grads, &mesh, &Phases::new())?;
            Ok(grads.get(id).to_vec())
        });
        let expected = if ep == 1 { [vec![1.0, 1.5], vec![1.0, 1.5]] } else { [vec![1.0], vec![1.5]] };
        assert_eq!(gradients, expected, "EP {ep}");
    }
}

#[test]
fn gradients_of_powers_of_two_show_the_ranks_of_every_sum() {
    let mut specs = ParamSpecs::new();
    let cut =
        specs.add(ParamSpec::replicated("cut", &[4, 1], true, Init::Ones).cut(Slicing::even(0, Axis::Tp, 4)));
    let same = specs.add(ParamSpec::replicated("same", &[1], false, Init::Ones));
    let expert = specs.add(expert_stack(4));
    for (tp, etp, ep) in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2), (2, 1, 4), (4, 1, 2), (1, 1, 8 / 2)] {
        let spec = LayoutSpec { world: 8, tp, ep, etp: Some(etp), ..LayoutSpec::default() };
        let layout = Layout::new(&spec).expect("a valid layout");
        let sums = launch(8, |context| {
            let (mesh, params, mut grads) = rank_of(&context, &spec, &specs)?;
            for id in params.ids() {
                let n = params.value(id).len();
                fill(&mut grads, id, &vec![(1u64 << context.rank) as f64; n]);
            }
            reduce_gradients(&params, &mut grads, &mesh, &Phases::new())?;
            Ok([cut, same, expert].map(|id| grads.get(id).to_vec()[0]))
        });
        for (rank, sums) in sums.iter().enumerate() {
            let c = layout.coordinates(rank);
            let mask = |holds: &dyn Fn(usize) -> bool| -> f64 {
                (0..8).filter(|r| holds(*r)).map(|r| (1u64 << r) as f64).sum()
            };
            let expected = [
                mask(&|r| layout.coordinates(r).tp == c.tp),
                mask(&|_| true),
                mask(&|r| (layout.coordinates(r).ep, layout.coordinates(r).etp) == (c.ep, c.etp)),
            ];
            assert_eq!(sums, &expected, "rank {rank} of {layout}");
        }
    }
}

#[test]
fn s11_global_norm_is_13_and_counts_everything_once() {
    let mut specs = ParamSpecs::new();
    let dense = specs.add(ParamSpec::replicated("dense", &[1], true, Init::Ones));
    let expert = specs.add(expert_stack(2));
    let layout = LayoutSpec { world: 2, ep: 2, ..LayoutSpec::default() };
    let results = launch(2, |context| {
        let (mesh, mut params, mut grads) = rank_of(&context, &layout, &specs)?;
        // After the reduction: the dense gradient is the same on both ranks, each expert is on its own.
        fill(&mut grads, dense, &[3.0]);
        fill(&mut grads, expert, &[if context.rank == 0 { 4.0 } else { 12.0 }]);
        let mut optimizer = Optimizer::new(OptimizerConfig::default(), &params);
        let report = optimizer.step(&mut params, &grads, &mesh, &Phases::new(), 0.1)?;
        Ok((report, params.value(dense).to_vec()))
    });
    for (report, _) in &results {
        assert_eq!(report.grad_norm, 13.0);
        assert_eq!(report.clip_coefficient, 1.0 / (13.0 + 1e-6));
        assert!((report.clip_coefficient - 0.076_923_1).abs() < 5e-8);
    }
    assert_eq!(results[0].1, results[1].1, "replicas keep the same bits");
}

#[test]
fn the_norm_counts_each_distinct_element_once_in_every_layout() {
    let mut specs = ParamSpecs::new();
    let vocabulary = Slicing::padded(0, Axis::Tp, 10);
    specs.add(ParamSpec::replicated("table", &[10, 3], true, Init::Normal { std: 1.0 }).cut(vocabulary));
    specs.add(ParamSpec::replicated("norm", &[5], false, Init::Normal { std: 1.0 }));
    let stack = ParamSpec::replicated("experts.up", &[4, 4, 3], true, Init::Normal { std: 1.0 }).expert();
    specs.add(stack.cut(Slicing::even(0, Axis::Ep, 4)).cut(Slicing::even(1, Axis::Etp, 4)));
    let norm_of = |spec: LayoutSpec| {
        let norms = launch(spec.world, |context| {
            let (mesh, params, mut grads) = rank_of(&context, &spec, &specs)?;
            // The weights themselves serve as reduced gradients: replicas agree by construction.
            for id in params.ids() {
                fill(&mut grads, id, &params.value(id).to_vec());
            }
            gradient_norm(&params, &grads, &mesh)
        });
        assert!(norms.iter().all(|n| n == &norms[0]), "the same bits on every rank: {norms:?}");
        norms[0]
    };
    let one = norm_of(LayoutSpec::default());
    for (tp, etp, ep) in [(1, 1, 1), (2, 1, 1), (4, 2, 2), (2, 4, 1), (1, 2, 4), (8, 1, 4), (4, 4, 2)] {
        let norm = norm_of(LayoutSpec { world: 8, tp, ep, etp: Some(etp), ..LayoutSpec::default() });
        assert!((norm - one).abs() < 1e-13 * one, "tp {tp} etp {etp} ep {ep}: {norm} and {one}");
    }
}

#[test]
fn s12_replicated_weights_stay_the_same_bits_and_their_gradients_are_right() {
    let config = ModelConfig { qk_norm: QkNorm::Head, ..ModelConfig::default() };
    let batches = vec![sequences(4, 8, config.vocabulary, 2)];
    // Gathering the pieces of all ranks asserts that replicas have the same bits.
    let two = run::<f32>(&config, &Run::of(2, 1, 3), &batches);
    let exact = run::<f64>(&config, &Run::one(1), &batches);
    let one = run::<f32>(&config, &Run::of(1, 1, 1), &batches);
    for (name, reference) in &one.grads {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let ratio = dot(&two.grads[name], reference) / dot(reference, reference);
        assert!((ratio - 1.0).abs() < 1e-5, "{name}: ratio {ratio} to one rank");
        let ratio = dot(&two.grads[name], &exact.grads[name]) / dot(&exact.grads[name], &exact.grads[name]);
        assert!((ratio - 1.0).abs() < 1e-5, "{name}: ratio {ratio} to f64");
    }
}

#[test]
fn s13_a_gradient_of_zero_still_decays() {
    let mut specs = ParamSpecs::new();
    let idle = specs.add(expert_stack(2));
    let vector = specs.add(ParamSpec::replicated("vector", &[1], false, Init::Ones));
    let device = Device::cpu(1);
    let mut params = Params::<f64>::new(&specs, &Place::one(), &device, 1).expect("legal");
    let mut grads = Grads::zeros(&params);
    fill(&mut grads, idle, &[0.0, 0.5]);
    let mut optimizer = Optimizer::new(OptimizerConfig::default(), &params);
    let mesh = Mesh::single(&device);
    optimizer.step(&mut params, &grads, &mesh, &Phases::new(), 0.1).expect("one rank");
    let w = params.value(idle).to_vec();
    assert_eq!(w[0], 0.99, "1 - lr * decay");
    assert!(w[1] < 0.99, "the busy expert moved by its gradient too");
    assert_eq!((params.value(vector).to_vec()[0], optimizer.steps()), (1.0, 1), "vectors do not decay");
    assert_eq!(optimizer.held(&params, State::M, idle).tensor.to_vec()[0], 0.0);
}

/// A head of two classes and width 1 whose class 0 has the logit x: nll = ln(1 + e^-x) for target 0.
fn two_classes() -> (Head, ParamSpecs) {
    let mut specs = ParamSpecs::new();
    let head = Head::new(&mut specs, "head", 2, 1, Init::Zeros);
    (head, specs)
}

/// Logit of the target for which its nll is `mean`.
fn logit_for(mean: f64) -> f64 {
    -(mean.exp() - 1.0).ln()
}

/// Runs the head over micro-batches of (tokens, valid, mean); returns the loss sum and each token's gradient.
fn head_run(
    context: &RankContext,
    layout: &LayoutSpec,
    micro_batches: &[(usize, usize, f64)],
    global_valid_targets: u64,
) -> Result<(LossSum, Vec<f64>), Error> {
    let (head, specs) = two_classes();
    let (mesh, mut params, mut grads) = rank_of(context, layout, &specs)?;
    let weight = params.value_mut(head.table());
    weight.host_mut().expect("host memory").copy_from_slice(&[1.0, 0.0]);
    let (phases, mut sum, mut dx) = (Phases::new(), LossSum::default(), Vec::new());
    for &(tokens, valid, mean) in micro_batches {
        let targets = (0..tokens).map(|i| if i < valid { 0 } else { IGNORED }).collect();
        let mut batch = TokenBatch::whole(tokens, vec![0; tokens], targets);
        batch.global_valid_targets = global_valid_targets;
        let info = TokenInfo::new(&context.device, &batch, params.place())?;
        let x = Tensor::full(&context.device, [tokens, 1], logit_for(mean), Category::Activation);
        let mut cx = Cx {
            mesh: &mesh,
            device: &context.device,
            params: &params,
            grads: &mut grads,
            tokens: &info,
            phases: &phases,
            seed: 1,
            step: 0,
            recompute: RecomputePolicy::NONE,
        };
        let (loss, dx_td) = head.forward_backward(&x, &mut cx)?;
        sum.add(loss.reduced(&cx)?);
        dx.extend(dx_td.to_vec());
    }
    Ok((sum, dx))
}

/// The gradient of one token's logit: (p - 1) / valid with p = e^-mean.
fn token_gradient(mean: f64, valid: f64) -> f64 {
    ((-mean).exp() - 1.0) / valid
}

#[test]
fn s16_unequal_valid_tokens_over_ranks_and_micro_batches() {
    let two = LayoutSpec { world: 2, ..LayoutSpec::default() };
    let parts = [(32, 10, 2.0), (32, 30, 4.0)];
    let ranks = launch(2, |context| head_run(&context, &two, &parts[context.rank..=context.rank], 40));
    let one = launch(1, |context| head_run(&context, &LayoutSpec::default(), &parts, 40));
    for (loss, _) in ranks.iter().chain(&one) {
        assert_eq!(loss.valid_targets, 40);
        assert!((loss.mean() - 3.5).abs() < 1e-12, "{}", loss.mean());
    }
    let gradients: Vec<f64> = ranks.iter().flat_map(|(_, dx)| dx.clone()).collect();
    assert_eq!(gradients, one[0].1, "two ranks and two micro-batches");
    for (i, gradient) in gradients.iter().enumerate() {
        let (_, valid, mean) = parts[i / 32];
        let expected = if i % 32 < valid { token_gradient(mean, 40.0) } else { 0.0 };
        assert!((gradient - expected).abs() < 1e-15, "token {i} weighs 1/40: {gradient} and {expected}");
    }
}

#[test]
fn s16_no_valid_tokens() {
    let two = LayoutSpec { world: 2, ..LayoutSpec::default() };
    let parts = [(16, 10, 2.0), (16, 0, 4.0)];
    for (loss, dx) in launch(2, |context| head_run(&context, &two, &parts[context.rank..=context.rank], 10)) {
        assert!((loss.mean() - 2.0).abs() < 1e-12 && dx.iter().all(|g| g.is_finite()));
    }
    let (loss, dx) = launch(1, |c| head_run(&c, &LayoutSpec::default(), &[(16, 0, 4.0)], 0)).remove(0);
    assert_eq!((loss.mean(), loss.valid_targets), (0.0, 0));
    assert!(dx.iter().all(|g| *g == 0.0), "no target, no gradient, no NaN");
}

#[test]
fn s18_accumulation_gives_2_for_every_number_of_passes() {
    let (head, specs) = two_classes();
    for passes in [1, 2, 4] {
        let gradient = launch(1, |context| {
            let (mesh, params, mut grads) = rank_of(&context, &LayoutSpec::default(), &specs)?;
            let phases = Phases::new();
            for _ in 0..4 * passes {
                // Weights 0: both classes have p = 1/2, so dW[0] = x / 2 = 2 for a target of class 1.
                let mut batch = TokenBatch::whole(1, vec![0], vec![1]);
                batch.global_valid_targets = 4 * passes;
                let tokens = TokenInfo::new(&context.device, &batch, params.place())?;
                let x = Tensor::full(&context.device, [1, 1], 4.0, Category::Activation);
                let mut cx = Cx {
                    mesh: &mesh,
                    device: &context.device,
                    params: &params,
                    grads: &mut grads,
                    tokens: &tokens,
                    phases: &phases,
                    seed: 1,
                    step: 0,
                    recompute: RecomputePolicy::NONE,
                };
                head.forward_backward(&x, &mut cx)?;
            }
            reduce_gradients(&params, &mut grads, &mesh, &phases)?;
            Ok(grads.get(head.table()).to_vec())
        });
        assert_eq!(gradient, [[2.0, -2.0]], "{passes} passes");
    }
}

#[test]
fn s21_padded_vocabulary_never_counts() {
    let config = ModelConfig { layers: 1, ..ModelConfig::default() };
    let all = sequences(2, 8, config.vocabulary, 4);
    let layout = LayoutSpec { world: 4, tp: 4, ..LayoutSpec::default() };
    let ranks = launch(4, |context| {
        let mut rank = Rank::<f64>::new(&config, &layout, &context)?;
        let head = rank.model.head.table();
        // Equal logits; the padded rows hold something that would show if it counted.
        let weight = rank.params.value_mut(head).host_mut().expect("host memory");
        weight.fill(0.0);
        let padded = if context.rank == 3 { 1 } else { 3 };
        weight[padded * config.width..].fill(5.0);
        let loss = rank.micro_step(&batch_of(&all, 0..2), RecomputePolicy::NONE)?;
        let grad = rank.grads.get(head).to_vec();
        let pieces: Vec<_> = rank.params.pieces(head).to_vec();
        Ok((loss.mean(), grad, pieces, padded * config.width))
    });
    for (rank, (loss, grad, pieces, valid)) in ranks.iter().enumerate() {
        assert!((loss - 10f64.ln()).abs() < 1e-12, "{loss} is ln 10 = 2.302585, ln 12 = 2.484907 leaks");
        assert_eq!(grad.len(), 3 * config.width, "12 rows over 4 ranks");
        assert!(grad[*valid..].iter().all(|g| *g == 0.0), "rank {rank}: padded rows have no gradient");
        assert!(grad[..*valid].iter().any(|g| *g != 0.0), "rank {rank}: real rows have one");
        assert_eq!(
            (pieces[0].shape[0], pieces[0].ranges[0].start),
            (10, 3 * rank),
            "10 rows in a checkpoint"
        );
    }
}

#[test]
fn s21_a_checkpoint_of_ten_rows_loads_under_any_tp() {
    let config = ModelConfig::default();
    let device = Device::cpu(1);
    let weights = run::<f64>(&config, &Run::one(0), &[]).weights;
    assert_eq!(weights["embedding"].len(), 10 * config.width);
    for tp in [1, 2, 4] {
        let layout = Layout::new(&LayoutSpec { world: tp, tp, ..LayoutSpec::default() }).expect("valid");
        for rank in 0..tp {
            let place = Place::new(&layout, rank);
            let (_, specs) = Model::<f64>::new(&config, &place, &device).expect("legal");
            // Another seed, so that every value has to come from the import.
            let mut params = Params::<f64>::new(&specs, &place, &device, 999).expect("legal");
            params.import(|_, piece| Ok::<_, Error>(piece.select(&weights[&piece.name]))).expect("all there");
            for (_, piece, values) in params.export() {
                assert_eq!(values, piece.select(&weights[&piece.name]), "{}", piece.name);
            }
        }
    }
}

#[test]
fn optimizer_state_moves_between_layouts() {
    let config = ModelConfig::default();
    let device = Device::cpu(1);
    let layout = Layout::new(&LayoutSpec { world: 2, tp: 2, ..LayoutSpec::default() }).expect("valid");
    let value =
        |name: &str, state: State, i: usize| (name.len() * 1000 + state as usize * 100_000 + i) as f32;
    for rank in 0..2 {
        let place = Place::new(&layout, rank);
        let (_, specs) = Model::<plica_kernels::bf16>::new(&config, &place, &device).expect("legal");
        let params = Params::<plica_kernels::bf16>::new(&specs, &place, &device, 1).expect("legal");
        let mut optimizer = Optimizer::new(OptimizerConfig::default(), &params);
        let read = |_, state, piece: &param::Piece| {
            let complete: Vec<f32> =
                (0..piece.shape.iter().product()).map(|i| value(&piece.name, state, i)).collect();
            Ok::<_, Error>(piece.select(&complete))
        };
        optimizer.import(&params, read).expect("all there");
        let mut seen = 0;
        for (_, state, piece, values) in optimizer.export(&params) {
            seen += 1;
            let size: usize = piece.shape.iter().product();
            let complete: Vec<f32> = (0..size).map(|i| value(&piece.name, state, i)).collect();
            assert_eq!(values, piece.select(&complete), "{} {}", piece.name, state.name());
        }
        assert_eq!(seen, 3 * params.export().count(), "m, v and master of every piece");
    }
}

#[test]
fn a_gradient_that_is_not_finite_ends_the_run_before_an_update() {
    let mut specs = ParamSpecs::new();
    let id = specs.add(ParamSpec::replicated("w", &[1], true, Init::Ones));
    let device = Device::cpu(1);
    let mut params = Params::<f64>::new(&specs, &Place::one(), &device, 1).expect("legal");
    let mut grads = Grads::zeros(&params);
    fill(&mut grads, id, &[f64::NAN]);
    let mut optimizer = Optimizer::new(OptimizerConfig::default(), &params);
    let error = optimizer.step(&mut params, &grads, &Mesh::single(&device), &Phases::new(), 0.1);
    let error = error.expect_err("NaN");
    assert!(matches!(error, Error::Diverged { update: 1, .. }));
    let text = error.to_string();
    assert!(text.contains("NaN") && text.contains("learning rate"), "{text}");
    assert_eq!(params.value(id).to_vec(), [1.0]);
}
