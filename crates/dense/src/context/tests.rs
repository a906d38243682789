//! The three ways against one rank that has all rows, in f64: outputs and gradients, over grouped queries, packed
//! documents, windows and lengths that do not divide. Work, bytes and memory, counted. Slow and failing ranks.

use std::time::Duration;

use plica_comm::launch::LaunchError;
use plica_comm::record::{Delay, Failure, FailureKind, RecordOptions};
use plica_comm::{LaunchOptions, Mesh, Purpose as Traffic, RankContext, run_ranks};
use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::check::assert_close;
use plica_kernels::ledger::Snapshot;
use plica_kernels::rng::{Purpose, Stream};
use plica_kernels::{Category, Device};

use super::*;
use crate::{Grads, ParamSpecs, Params, Phases, RecomputePolicy, TokenBatch, TokenInfo};

/// Heads, documents and lengths of a case.
#[derive(Clone, Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    window: Option<usize>,
    /// Lengths of the documents of each sequence.
    documents: Vec<Vec<usize>>,
}

const HEAD_DIM: usize = 4;

impl Case {
    fn sequence(&self) -> usize {
        self.documents.first().map_or(4, |lengths| lengths.iter().sum())
    }

    fn tokens(&self) -> usize {
        self.documents.len() * self.sequence()
    }

    fn batch(&self) -> TokenBatch {
        let ids = vec![0; self.tokens()];
        let mut documents = vec![0];
        for length in self.documents.iter().flatten() {
            documents.push(documents[documents.len() - 1] + length);
        }
        TokenBatch { documents, ..TokenBatch::whole(self.sequence(), ids.clone(), ids) }
    }

    /// Values of all tokens, of which a rank takes its own rows; what fills a sequence up is NaN-free noise.
    fn rows<T: Float>(&self, what: &str, heads: usize, tokens: &TokenInfo, device: &Device) -> Tensor<T> {
        let stream = Stream::new(5, Purpose::Named(what));
        let width = heads * HEAD_DIM;
        let values: Vec<T> = filled_rows(tokens)
            .flat_map(|row| {
                let first = tokens.cut().token_of(row).unwrap_or(1000 + row) * width;
                (first..first + width).map(|i| T::from_f64(stream.normal(i as u64)))
            })
            .collect();
        let rows = values.len() / width;
        Tensor::from_slice(device, [rows, heads, HEAD_DIM], &values, Category::Activation)
    }
}

fn filled_rows(tokens: &TokenInfo) -> impl Iterator<Item = usize> + '_ {
    tokens.runs.iter().cloned().flatten()
}

/// Output and gradients by q, k, v of each token that a rank holds, in f64; and what was counted.
struct Found {
    tokens: Vec<Option<usize>>,
    rows: [Vec<f64>; 4],
    forward_bytes: u64,
    backward_bytes: u64,
    before: Snapshot,
    after: Snapshot,
    peak_buffers: u64,
    operations: u64,
}

fn attend<T: Trainable>(
    case: &Case,
    method: ContextMethod,
    layout: &LayoutSpec,
    context: &RankContext,
) -> Result<Found, Error> {
    let layout = Layout::new(layout).expect("a valid layout");
    let (device, place) = (&context.device, Place::new(&layout, context.rank));
    let mesh = Mesh::new(&context.world, layout)?;
    let params = Params::<T>::new(&ParamSpecs::new(), &place, device, 1)?;
    let (mut grads, phases) = (Grads::zeros(&params), Phases::new());
    let tokens = TokenInfo::new(device, &case.batch(), &place)?;
    let cx = Cx {
        mesh: &mesh,
        device,
        params: &params,
        grads: &mut grads,
        tokens: &tokens,
        phases: &phases,
        seed: 1,
        step: 0,
        recompute: RecomputePolicy::NONE,
    };
    let way = method.attention::<T>(place.size(Axis::Cp));
    let mask = Mask { scale: 0.6, window: case.window };
    let before = device.ledger().now();
    device.ledger().reset_peak();
    context.recorder.reset_traffic();
    let heads = Heads {
        q_thd: case.rows("q", case.heads, &tokens, device),
        k_thd: case.rows("k", case.kv_heads, &tokens, device),
        v_thd: case.rows("v", case.kv_heads, &tokens, device),
    };
    let sent = || context.recorder.by_purpose(Traffic::ContextRing).sent_bytes;
    let (out_thd, saved) = way.forward(heads, &mask, &cx)?;
    let (forward_bytes, out) = (sent(), out_thd.to_vec());
    drop(out_thd);
    let dout_thd = case.rows("dout", case.heads, &tokens, device);
    let Heads { q_thd, k_thd, v_thd } = way.backward(saved, dout_thd, &mask, &cx)?;
    let wide = |values: Vec<T>| values.iter().map(|x| x.to_f64()).collect::<Vec<f64>>();
    let rows = [wide(out), wide(q_thd.to_vec()), wide(k_thd.to_vec()), wide(v_thd.to_vec())];
    drop((q_thd, k_thd, v_thd));
    Ok(Found {
        tokens: filled_rows(&tokens).map(|row| tokens.cut().token_of(row)).collect(),
        rows,
        forward_bytes,
        backward_bytes: sent() - forward_bytes,
        before,
        after: device.ledger().now(),
        operations: context.recorder.operations(),
        peak_buffers: device.ledger().peak().get(Category::CommBuffer),
    })
}

fn on_ranks<T: Trainable>(case: &Case, method: ContextMethod, ranks: usize) -> Vec<Found> {
    try_on_ranks::<T>(case, method, ranks, RecordOptions::default())
        .unwrap_or_else(|error| panic!("{case:?}, {method:?} over {ranks}: {error}"))
}

fn try_on_ranks<T: Trainable>(
    case: &Case,
    method: ContextMethod,
    ranks: usize,
    record: RecordOptions,
) -> Result<Vec<Found>, LaunchError> {
    let layout = LayoutSpec { world: ranks, cp: ranks, ..LayoutSpec::default() };
    let options = LaunchOptions { record, ..LaunchOptions::default() };
    run_ranks(ranks, options, |context| attend::<T>(case, method, &layout, &context))
}

/// The rows of all tokens in order, from the ranks that hold them.
fn laid(case: &Case, found: &[Found], which: usize, heads: usize) -> Vec<f64> {
    let width = heads * HEAD_DIM;
    let mut all = vec![f64::NAN; case.tokens() * width];
    for rank in found {
        assert_eq!(rank.rows[which].len(), rank.tokens.len() * width);
        for (token, row) in rank.tokens.iter().zip(rank.rows[which].chunks(width)) {
            assert!(row.iter().all(|x| x.is_finite()), "a row is not finite");
            if let Some(token) = token {
                all[token * width..(token + 1) * width].copy_from_slice(row);
            }
        }
    }
    all
}

fn cases() -> Vec<Case> {
    let case = |heads, kv_heads, window, documents: &[&[usize]]| Case {
        heads,
        kv_heads,
        window,
        documents: documents.iter().map(|lengths| lengths.to_vec()).collect(),
    };
    vec![
        case(2, 2, None, &[&[8]]),
        // S22: 7 tokens over two ranks, and documents of 4 and 3 tokens.
        case(4, 2, None, &[&[7]]),
        case(4, 4, None, &[&[4, 3], &[7]]),
        case(6, 6, None, &[&[5, 5, 3], &[13], &[1, 0, 12]]),
        case(12, 6, Some(3), &[&[17], &[4, 13]]),
        case(4, 1, Some(5), &[&[24], &[6, 12, 6]]),
        case(2, 2, None, &[&[1], &[1]]),
        case(4, 2, None, &[&[130, 200, 40]]),
        case(2, 1, None, &[]),
    ]
}

#[test]
fn every_way_equals_one_rank() {
    for case in cases() {
        let one = on_ranks::<f64>(&case, ContextMethod::Ring, 1);
        for ranks in [2, 3, 4] {
            for method in ContextMethod::ALL {
                if method == ContextMethod::Ulysses && !case.kv_heads.is_multiple_of(ranks) {
                    continue;
                }
                let found = on_ranks::<f64>(&case, method, ranks);
                let names = ["out", "dq", "dk", "dv"];
                for (which, heads) in
                    [case.heads, case.heads, case.kv_heads, case.kv_heads].into_iter().enumerate()
                {
                    let what = format!("{} of {case:?}, {method:?} over {ranks}", names[which]);
                    let expected = laid(&case, &one, which, heads);
                    assert_close(&what, &laid(&case, &found, which, heads), &expected, 1e-12);
                }
            }
        }
    }
}

#[test]
fn bf16_parts_are_merged_and_added_in_f32() {
    let case = Case { heads: 4, kv_heads: 4, window: None, documents: vec![vec![60, 68]] };
    let exact = on_ranks::<f64>(&case, ContextMethod::Ring, 1);
    let one = on_ranks::<plica_kernels::bf16>(&case, ContextMethod::Ring, 1);
    for method in ContextMethod::ALL {
        let four = on_ranks::<plica_kernels::bf16>(&case, method, 4);
        for (which, heads) in [4, 4, 4, 4].into_iter().enumerate() {
            let worst = |found: &[Found]| {
                let (found, exact) = (laid(&case, found, which, heads), laid(&case, &exact, which, heads));
                plica_kernels::check::max_difference(&found, &exact).0
            };
            // Rounded once at the end, as on one rank; parts rounded by themselves would add up.
            assert!(
                worst(&four) <= 1.2 * worst(&one),
                "{method:?} {which}: {} {}",
                worst(&four),
                worst(&one)
            );
        }
    }
}

/// Pairs of queries and keys that a rank works on in all hops of the ring.
fn pairs_of(case: &Case, ranks: usize, rank: usize) -> u64 {
    let spec = LayoutSpec { world: ranks, cp: ranks, ..LayoutSpec::default() };
    let place = Place::new(&Layout::new(&spec).expect("a valid layout"), rank);
    let tokens = TokenInfo::new(&Device::cpu(1), &case.batch(), &place).expect("a batch");
    let hop = |owner: usize| {
        let runs = tokens.cut().runs(owner);
        let spec = AttentionSpec {
            queries: Rows::Runs(&tokens.runs),
            keys: Rows::Runs(&runs),
            window: case.window,
            ..AttentionSpec::causal(1.0, &tokens.documents)
        };
        spec.visible_pairs(tokens.len(), tokens.len())
    };
    (0..ranks).map(hop).sum()
}

#[test]
fn s22_causal_work_is_equal_on_all_ranks() {
    let case = |length| Case { heads: 1, kv_heads: 1, window: None, documents: vec![vec![length]] };
    assert_eq!([0, 1].map(|rank| pairs_of(&case(8), 2, rank)), [18, 18]);
    for (length, ranks) in [(1024, 2), (1024, 4), (4096, 8), (1000, 3), (8190, 4)] {
        let pairs: Vec<u64> = (0..ranks).map(|rank| pairs_of(&case(length), ranks, rank)).collect();
        let mean = pairs.iter().sum::<u64>() as f64 / ranks as f64;
        assert!(pairs.iter().all(|p| (*p as f64 / mean - 1.0).abs() < 0.02), "{length} {ranks}: {pairs:?}");
    }
}

#[test]
fn s22_a_changed_token_leaves_the_other_document_bit_unchanged() {
    let case = Case { heads: 2, kv_heads: 1, window: None, documents: vec![vec![4, 4]] };
    let layout = LayoutSpec { world: 2, cp: 2, ..LayoutSpec::default() };
    let run = |change: bool| {
        let ranks = run_ranks(2, LaunchOptions::default(), |context| {
            let layout = Layout::new(&layout).expect("a valid layout");
            let (device, place) = (&context.device, Place::new(&layout, context.rank));
            let mesh = Mesh::new(&context.world, layout)?;
            let params = Params::<f32>::new(&ParamSpecs::new(), &place, device, 1)?;
            let (mut grads, phases) = (Grads::zeros(&params), Phases::new());
            let tokens = TokenInfo::new(device, &case.batch(), &place)?;
            let mut heads = Heads {
                q_thd: case.rows("q", 2, &tokens, device),
                k_thd: case.rows("k", 1, &tokens, device),
                v_thd: case.rows("v", 1, &tokens, device),
            };
            if change && context.rank == 0 {
                let first = |x: &mut Tensor<f32>| x.host_mut().expect("host memory")[..HEAD_DIM].fill(9.0);
                [&mut heads.q_thd, &mut heads.k_thd, &mut heads.v_thd].into_iter().for_each(first);
            }
            let recompute = RecomputePolicy::NONE;
            let (grads, mesh, params, tokens, phases) = (&mut grads, &mesh, &params, &tokens, &phases);
            let cx = Cx { mesh, device, params, grads, tokens, phases, seed: 1, step: 0, recompute };
            let out = Ring.forward(heads, &Mask { scale: 0.6, window: None }, &cx)?.0;
            Ok::<_, Error>((tokens.positions.to_vec(), out.to_vec()))
        });
        ranks.expect("two ranks")
    };
    let (plain, changed) = (run(false), run(true));
    assert_eq!((&plain[0].0, &plain[1].0), (&vec![0, 1, 2, 3], &vec![2, 3, 0, 1]), "positions restart");
    let width = 2 * HEAD_DIM;
    // Rank 0 holds tokens 0, 1, 6, 7; rank 1 holds 2, 3, 4, 5.
    for rank in 0..2 {
        assert_eq!(plain[rank].1[2 * width..], changed[rank].1[2 * width..], "tokens 4 to 7, rank {rank}");
        assert_ne!(plain[rank].1[..2 * width], changed[rank].1[..2 * width], "tokens 0 to 3, rank {rank}");
    }
}

#[test]
fn traffic_is_what_the_formulas_say() {
    let case = Case { heads: 8, kv_heads: 4, window: None, documents: vec![vec![16, 16], vec![32]] };
    fn check<T: Trainable>(case: &Case, acc_bytes: u64) {
        for ranks in [2, 4] {
            let rows = (case.tokens() / ranks) as u64;
            let (hops, q) = (ranks as u64 - 1, size_of::<T>() as u64);
            let n = rows * (case.kv_heads * HEAD_DIM) as u64;
            for method in [ContextMethod::Ring, ContextMethod::AllGather] {
                for found in on_ranks::<T>(case, method, ranks) {
                    assert_eq!(found.forward_bytes, hops * 2 * n * q, "{method:?}");
                    assert_eq!(found.backward_bytes, hops * (2 * n * q + 2 * n * acc_bytes), "{method:?}");
                }
            }
            let all = rows * (2 * (case.heads + case.kv_heads) * HEAD_DIM) as u64 * q;
            for found in on_ranks::<T>(case, ContextMethod::Ulysses, ranks) {
                assert_eq!(found.forward_bytes, all * hops / ranks as u64);
                assert_eq!(found.backward_bytes, all * hops / ranks as u64);
            }
        }
    }
    check::<f32>(&case, 4);
    check::<plica_kernels::bf16>(&case, 4);
}

#[test]
fn nothing_stays_and_the_ring_holds_few_blocks_in_flight() {
    let case = Case { heads: 4, kv_heads: 4, window: None, documents: vec![vec![64]] };
    for ranks in [2, 4] {
        for method in ContextMethod::ALL {
            for found in on_ranks::<f32>(&case, method, ranks) {
                assert_eq!(found.after, found.before, "{method:?}");
                // Keys and values: the block here and the one that arrives; their gradients the same.
                let block = (64 / ranks * 4 * HEAD_DIM * 4 * 2) as u64;
                let in_flight = found.peak_buffers;
                let few = (block..=4 * block).contains(&in_flight);
                assert!(few || method != ContextMethod::Ring, "{in_flight} bytes, blocks of {block}");
            }
        }
    }
}

#[test]
fn slow_ranks_change_no_bit_and_a_failed_message_ends_all_ranks() {
    let case = Case { heads: 6, kv_heads: 3, window: None, documents: vec![vec![9, 8], vec![17]] };
    for method in ContextMethod::ALL {
        let plain = on_ranks::<f32>(&case, method, 3);
        let operations = plain.iter().map(|rank| rank.operations).max().expect("ranks");
        for seed in 0..3 {
            let delay = Some(Delay { seed, max: Duration::from_millis(3) });
            let slow =
                try_on_ranks::<f32>(&case, method, 3, RecordOptions { delay, ..RecordOptions::default() });
            for (slow, plain) in slow.expect("it finishes").iter().zip(&plain) {
                assert!(slow.rows == plain.rows, "{method:?}, delays of seed {seed}");
            }
        }
        for (rank, operation_index) in (0..3).flat_map(|r| (0..operations).step_by(3).map(move |o| (r, o))) {
            let failure = Some(Failure { rank, operation_index, kind: FailureKind::Error });
            let record = RecordOptions { failure, ..RecordOptions::default() };
            let Err(error) = try_on_ranks::<f32>(&case, method, 3, record) else {
                panic!("{method:?}: operation {operation_index} of rank {rank} did not fail");
            };
            let want = format!("injected failure: rank {rank}, operation {operation_index} (");
            assert!(error.to_string().contains(&want), "{method:?}: {error}");
        }
    }
}

#[test]
fn ulysses_refuses_heads_that_do_not_divide() {
    let place = |tp, cp| {
        let spec = LayoutSpec { world: tp * cp, tp, cp, ..LayoutSpec::default() };
        Place::new(&Layout::new(&spec).expect("a valid layout"), 0)
    };
    let error =
        ContextMethod::Ulysses.check("layers.0.attention", 4, &place(2, 4)).expect_err("2 heads over 4");
    for part in ["layers.0.attention", "4 over TP = 2 leave 2", "CP = 4", "choose ring or all-gather"] {
        assert!(error.to_string().contains(part), "{part:?} in {error}");
    }
    for (method, tp, cp) in [(ContextMethod::Ulysses, 2, 2), (ContextMethod::Ring, 2, 4)] {
        method.check("a", 4, &place(tp, cp)).expect("it divides");
    }
}

#[test]
fn batches_that_ranks_cannot_share_are_refused() {
    let spec = LayoutSpec { world: 2, cp: 2, ..LayoutSpec::default() };
    let place = Place::new(&Layout::new(&spec).expect("a valid layout"), 1);
    let refused = |batch: TokenBatch| {
        TokenInfo::new(&Device::cpu(1), &batch, &place).expect_err("cannot be shared").to_string()
    };
    let good = TokenBatch::whole(4, vec![0; 8], vec![0; 8]);
    let text = refused(TokenBatch { documents: vec![0, 6, 8], ..good.clone() });
    assert!(
        text.contains("from sequence 0 into sequence 1 (at token 4)") && text.contains("CP = 2"),
        "{text}"
    );
    let text = refused(TokenBatch { sequence: 3, ..good });
    assert!(text.contains("8 tokens are no whole sequences of 3"), "{text}");
}
