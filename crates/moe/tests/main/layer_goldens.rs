//! The whole layer and the drop policies against the operator goldens: on one rank, and with attention over
//! TP 4 and experts over EP 2 x ETP 2. Outputs and all gradients within 5e-6 * max(1, max|reference|), in
//! f32.

use plica_comm::{LaunchOptions, RankContext, run_ranks};
use plica_dense::{Error, FeedForward, TokenInfo, param::Piece};
use plica_dispatch::capacity::keep_with_capacities;
use plica_dispatch::{Capacity, DispatcherKind, Policy};
use plica_kernels::check::assert_close;
use plica_moe::MoeConfig;
use plica_moe::config::CapacityScope;
use plica_moe::topk::select_top_k;
use plica_moe::weighting::Weigh;

use crate::golden_support::{Goldens, load};
use crate::goldens::{TOLERANCE, f32s, ids_of, softmax_rule, wide};
use crate::world::{Cut, Named, Problem, Rank, complete, laid};

fn policy_of(case: &str) -> Policy {
    match case.split('_').find(|part| ["prob", "position", "choice"].contains(part)) {
        Some("position") => Policy::Position,
        Some("choice") => Policy::Choice,
        _ => Policy::Probability,
    }
}

#[test]
fn capacity_with_gradients() {
    let Some(goldens) = load("capacity") else { return };
    let names: Vec<&str> = goldens.keys().filter_map(|name| name.strip_suffix("/keep")).collect();
    assert!(names.len() >= 12, "{names:?}");
    for case in names {
        let at = |name: &str| &goldens[&format!("{case}/{name}")];
        let logits = f32s(&goldens, &format!("{case}/logits"));
        let (tokens, experts) = (at("logits").0[0], at("logits").0[1]);
        let k = at("topk_ids").0[1];
        let rule = softmax_rule(case.contains("renorm"));
        let mut ranked = vec![0.0; logits.len()];
        logits.chunks(experts).zip(ranked.chunks_mut(experts)).for_each(|(l, r)| rule.ranked(l, r));
        let ids = select_top_k(&ranked, experts, k, None, &vec![false; tokens]);
        assert_eq!(ids_of(&ids), at("topk_ids").1, "{case}");
        let weights = rule.weights_forward(&logits, experts, &ids, k);
        assert_close(case, &wide(&weights), &at("topk_weights").1, TOLERANCE);
        let capacity = at("capacity").1[0] as usize;
        let kept =
            keep_with_capacities(&ids, &weights, k, experts, &[0, tokens], &[capacity], policy_of(case))
                .expect(case);
        let keep: Vec<f64> = kept.keep_tk.iter().map(|&keep| f64::from(u8::from(keep))).collect();
        assert_eq!(keep, at("keep").1, "{case}");
        let kept_weights: Vec<f64> = wide(&weights).iter().zip(&keep).map(|(w, k)| w * k).collect();
        assert_close(case, &kept_weights, &at("kept_weights").1, TOLERANCE);
        let mut upstream = f32s(&goldens, &format!("{case}/d_kept_weights"));
        upstream.iter_mut().zip(&keep).for_each(|(d, k)| *d *= *k as f32);
        let mut grad = vec![0.0; logits.len()];
        rule.weights_backward(&logits, experts, &ids, k, &upstream, &mut grad);
        assert_close(case, &wide(&grad), &at("grad_logits").1, TOLERANCE);
    }
}

/// The golden tensor that a piece belongs to, its own part of a stack of experts.
fn golden_of(goldens: &Goldens, case: &str, prefix: &str, piece: &Piece) -> Vec<f64> {
    let last: Vec<&str> = piece.name.rsplit('.').take(2).collect();
    if last[0] == "router" {
        return goldens[&format!("{case}/{prefix}w_router")].1.clone();
    }
    let expert: usize = last[1].parse().expect("an expert id");
    let size = piece.shape.iter().product::<usize>();
    goldens[&format!("{case}/{prefix}w_{}", last[0])].1[expert * size..][..size].to_vec()
}

struct Part {
    first: usize,
    y: Vec<f64>,
    dx: Vec<f64>,
    ids: Vec<f64>,
    logits: Vec<f64>,
    weights: Vec<f64>,
    grads: Vec<(Piece, Vec<f64>)>,
}

fn golden_step(
    goldens: &Goldens,
    case: &str,
    problem: &Problem,
    cut: &Cut,
    context: RankContext,
) -> Result<Part, Error> {
    let mut rank = Rank::<f32>::new(problem, cut, &context)?;
    rank.params.import(|_, piece| {
        let whole = golden_of(goldens, case, "", piece);
        Ok::<_, Error>(piece.select(&whole).iter().map(|&x| x as f32).collect())
    })?;
    let tokens = TokenInfo::new(&rank.device, &problem.batch(0..1), &rank.place)?;
    let rows = tokens.local_range();
    let width = problem.width;
    let part = |name: &str| &goldens[&format!("{case}/{name}")].1[rows.start * width..rows.end * width];
    let (x_td, dy_td) = (rank.tensor(width, part("x")), rank.tensor(width, part("d_y")));
    let (layer, mut cx) = rank.cx(&tokens, cut, 0, 1);
    let (routing, router, _) = layer.router().forward(&x_td, &cx)?;
    let (logits, weights) = (wide(&router.logits_te().to_vec()), wide(&routing.weights_tk.to_vec()));
    let (y_td, saved, _) = layer.forward(&x_td, &mut cx)?;
    let ids = ids_of(&saved.choice().kept_ids_tk().to_vec());
    let dx_td = layer.backward(saved, &dy_td, &mut cx)?;
    rank.reduce()?;
    let mut grads = Vec::new();
    for id in rank.params.ids() {
        for piece in rank.params.pieces(id) {
            grads.push((piece.clone(), wide(&piece.copy_out(rank.grads.get(id)))));
        }
    }
    let (y, dx) = (wide(&y_td.to_vec()), wide(&dx_td.to_vec()));
    Ok(Part { first: rows.start, y, dx, ids, logits, weights, grads })
}

fn check_case(goldens: &Goldens, case: &str, cut: &Cut) {
    let at = |name: &str| &goldens[&format!("{case}/{name}")];
    let (tokens, width) = (at("x").0[0], at("x").0[1]);
    let (experts, ffn) = (at("w_gate").0[0], at("w_gate").0[1]);
    let mut config = MoeConfig::new(experts, at("k").1[0] as usize, ffn);
    config.weighting.renormalize = false;
    config.capacity_scope = CapacityScope::Sequence;
    config.capacity = goldens.get(&format!("{case}/capacity_factor")).map(|factor| Capacity {
        factor: factor.1[0].to_string().parse().expect("a factor"),
        min: 0,
        policy: policy_of(case),
        pad: false,
    });
    let mut problem = Problem::new(config);
    problem.width = width;
    problem.sequence = tokens;
    problem.cut_at(&[0, 1]);
    problem.padding_share = 0.0;
    let step = |context| golden_step(goldens, case, &problem, cut, context);
    let parts =
        run_ranks(cut.layout.world, LaunchOptions::default(), step).unwrap_or_else(|e| panic!("{case}: {e}"));
    let k = problem.config.top_k;
    let y: Vec<_> = parts.iter().map(|p| (p.first * width, p.y.clone())).collect();
    let dx: Vec<_> = parts.iter().map(|p| (p.first * width, p.dx.clone())).collect();
    let ids: Vec<_> = parts.iter().map(|p| (p.first * k, p.ids.clone())).collect();
    let dropped = goldens.get(&format!("{case}/keep"));
    let expected: Vec<f64> = (0..tokens * k)
        .map(|i| if dropped.is_some_and(|keep| keep.1[i] == 0.0) { -1.0 } else { at("topk_ids").1[i] })
        .collect();
    assert_eq!(laid(tokens * k, ids.iter()), expected, "{case}: experts");
    let logits: Vec<_> = parts.iter().map(|p| (p.first * experts, p.logits.clone())).collect();
    let weights: Vec<_> = parts.iter().map(|p| (p.first * k, p.weights.clone())).collect();
    let name = |part: &str| format!("{case} {part}");
    assert_close(&name("logits"), &laid(tokens * experts, logits.iter()), &at("logits").1, TOLERANCE);
    // The weight of a dropped assignment is 0.
    let kept: Vec<f64> =
        at("topk_weights").1.iter().zip(&expected).map(|(w, id)| if *id < 0.0 { 0.0 } else { *w }).collect();
    assert_close(&name("weights"), &laid(tokens * k, weights.iter()), &kept, TOLERANCE);
    assert_close(&format!("{case} y"), &laid(tokens * width, y.iter()), &at("y").1, TOLERANCE);
    assert_close(&format!("{case} dx"), &laid(tokens * width, dx.iter()), &at("grad_x").1, TOLERANCE);
    let pieces: Vec<Piece> = parts.iter().flat_map(|p| &p.grads).map(|(piece, _)| piece.clone()).collect();
    let grads: Named = complete(parts.into_iter().flat_map(|p| p.grads));
    for piece in pieces {
        let expected = golden_of(goldens, case, "grad_", &piece);
        let grad = &grads[&piece.name];
        assert_close(&format!("{case} {}", piece.name), grad, &expected, TOLERANCE);
        if expected.iter().all(|g| *g == 0.0) {
            assert!(grad.iter().all(|g| *g == 0.0), "{case} {}: exactly 0", piece.name);
        }
    }
}

#[test]
fn the_whole_layer() {
    let Some(goldens) = load("moe_layer") else { return };
    let names: Vec<&str> = goldens.keys().filter_map(|name| name.strip_suffix("/grad_x")).collect();
    assert_eq!(names.len(), 4, "{names:?}");
    for case in names {
        check_case(&goldens, case, &Cut::one());
        for kind in DispatcherKind::ALL {
            check_case(&goldens, case, &Cut::of(4, 4, 2, 2, kind));
        }
    }
}
