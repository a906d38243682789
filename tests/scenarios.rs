//! The index of the scenarios: for each number of the public reports the tests that hold its stated values, in
//! whatever crate they are; a listed test that does not exist fails. Behind it the scenarios of the whole engine
//! that need no weights set by hand.

use std::path::{Path, PathBuf};

use plica_dense::param::Piece;
use plica_folding::{Layout, LayoutSpec};

use crate::runs::{FOLDED, ONE, ROUTER, Runs, largest_relative, losses, on_engines, plan, quick, step};

/// Number, folder of the tests relative to the project, names.
const INDEX: &[(&str, &str, &[&str])] = &[
    ("S01", "crates/moe", &["s01_padding_is_in_no_sum", "s01_padding_changes_no_bit_of_the_layer"]),
    ("S02", "crates/moe", &["s02_the_constant_of_the_loss"]),
    (
        "S03",
        "crates/moe",
        &["s03_micro_and_global_mode", "s03_the_global_loss_is_the_one_of_all_micro_batches"],
    ),
    ("S03", "tests", &["s03_balance_loss_over_micro_batches_and_data_parallel_ranks"]),
    (
        "S04",
        "crates/moe",
        &[
            "s04_counts_5_3_2_2",
            "s04_a_setting_without_effect_is_refused_with_both_names",
            "s04_recomputation_and_put_off_gradients_change_no_bit_and_no_count",
        ],
    ),
    ("S04", "train", &["s04_coefficients_without_effect"]),
    ("S04", "tests", &["s04_recomputation_and_evaluation_count_nothing_twice"]),
    ("S05", "crates/dispatch", &["s05_capacity_table"]),
    ("S05", "train", &["s05_capacity_and_expert_counts"]),
    ("S06", "crates/dispatch", &["s06a_who_stays", "s06b_the_least_capacity", "s06c_padding_takes_no_place"]),
    ("S06", "crates/moe", &["s06_drop_order_and_a_dropped_token", "s06_padding_takes_no_place"]),
    (
        "S07",
        "crates/kernels",
        &[
            "s07_ties_go_to_the_lowest_expert_and_selection_is_not_rounded",
            "s07_ties_go_to_the_lowest_index_and_close_logits_are_told_apart",
        ],
    ),
    ("S07", "crates/moe", &["s07_ties_choose_the_lowest_experts_in_every_layout"]),
    (
        "S08",
        "crates/moe",
        &["s08_nan_is_named_with_layer_and_token", "s08_nan_ends_the_step_with_layer_and_token"],
    ),
    ("S08", "crates/kernels", &["s08_a_nan_row_is_refused_with_its_number"]),
    ("S08", "tests", &["s08_weights_that_are_nan_stop_the_run_and_the_checkpoint_stays"]),
    ("S09", "crates/moe", &["s09_a_top_1_router_that_cannot_learn_is_refused"]),
    ("S09", "crates/kernels", &["s09_top_1_and_the_two_orders"]),
    ("S09", "train", &["s09_one_expert_with_renormalisation"]),
    ("S10", "crates/dense", &["s10_expert_gradient_scale_does_not_depend_on_ep"]),
    ("S10", "tests", &["s10_expert_gradients_of_the_engine_do_not_depend_on_ep"]),
    ("S11", "crates/dense", &["s11_global_norm_is_13_and_counts_everything_once"]),
    ("S12", "crates/dense", &["s12_replicated_weights_stay_the_same_bits_and_their_gradients_are_right"]),
    ("S12", "tests", &["s12_the_router_and_the_norms_under_tp"]),
    ("S13", "crates/dispatch", &["s13_idle_experts"]),
    ("S13", "crates/moe", &["s13_idle_experts_have_zero_gradients_and_the_others_are_right"]),
    ("S13", "crates/kernels", &["s13_a_parameter_without_gradient_still_decays"]),
    ("S14", "crates/dispatch", &["s14a_a_rank_that_receives_nothing", "s14b_seventy_two_rows"]),
    ("S14", "crates/moe", &["s14_all_tokens_on_one_rank", "s14_a_rank_without_tokens_owns_all_the_work"]),
    ("S15", "crates/dispatch", &["s15a_capacity_with_unequal_tokens", "s15b_count_exchange"]),
    ("S15", "crates/dispatch", &["s15c_wrong_row_counts_are_refused"]),
    ("S14", "crates/comm", &["s14_b"]),
    ("S14", "tests", &["s14a_processes_of_which_one_receives_nothing"]),
    ("S15", "tests", &["s15a_processes_with_unequal_tokens_and_capacities"]),
    ("S15", "crates/comm", &["s15_b", "s15_c"]),
    ("S15", "tests", &["s15a_five_and_three_tokens_have_capacities_3_and_2"]),
    (
        "S16",
        "crates/dense",
        &["s16_unequal_valid_tokens_over_ranks_and_micro_batches", "s16_no_valid_tokens"],
    ),
    ("S16", "crates/dense", &["s18_micro_batches_of_any_size_give_the_same_gradient"]),
    ("S16", "tests", &["s16_ten_and_thirty_valid_tokens_over_ranks_and_micro_batches"]),
    ("S17", "tests", &["s17_context_ranks_with_unequal_masks"]),
    ("S18", "crates/dense", &["s18_micro_batches_of_any_size_give_the_same_gradient"]),
    ("S18", "tests", &["s18_accumulation_over_passes_of_four_micro_batches"]),
    (
        "S19",
        "crates/dense",
        &[
            "s19_a_crossed_send_and_receive_is_found_without_running",
            "s19_four_ranks_with_one_to_five_micro_batches_and_random_delays",
        ],
    ),
    ("S19", "tests", &["s19_one_to_five_micro_batches_over_four_stages_with_random_delays"]),
    ("S20", "tests", &["s20_thirty_layers_over_four_stages_are_all_there_once"]),
    ("S20", "crates/folding", &["s20_layers_over_stages", "s20_mesh_table", "s20_megatron_1628_batch"]),
    ("S20", "train", &["s20_mesh_arithmetic_comes_from_folding"]),
    ("S21", "crates/dense", &["s21_padded_vocabulary_never_counts"]),
    ("S21", "crates/dense", &["s21_a_checkpoint_of_ten_rows_loads_under_any_tp"]),
    ("S21", "tests", &["s21_tied_tables_on_two_stages_are_one_parameter"]),
    ("S21", "tests", &["s21_equal_logits_over_a_padded_vocabulary_cost_ln_10_and_ten_rows_are_stored"]),
    (
        "S22",
        "crates/dense",
        &[
            "s22_rows_of_two_ranks",
            "s22_causal_work_is_equal_on_all_ranks",
            "s22_a_changed_token_leaves_the_other_document_bit_unchanged",
            "s22_documents_of_a_sequence_do_not_see_each_other",
            "every_way_equals_one_rank",
        ],
    ),
    ("S22", "crates/kernels", &["s22_eight_tokens_over_two_ranks_are_18_and_18_pairs"]),
    ("S22", "tests", &["s22_lengths_that_do_not_divide_train_along_the_curve_of_one_rank"]),
    (
        "S23",
        "crates/kernels",
        &[
            "s23_merging_partial_attention",
            "s23_a_query_without_keys_has_gradient_zero",
            "shares_of_several_runs_merge_to_the_whole_forward_and_backward",
        ],
    ),
    ("S24", "tests", &["s24_constants_stay_with_their_expert_in_every_layout"]),
    ("S24", "tests", &["s24_another_layout_continues_the_same_curve"]),
    ("S25", "tests", &["s25_every_difference_is_named_before_training_starts"]),
    ("S25", "tests", &["s25_nothing_keeps_its_value_from_before_the_load"]),
    (
        "S26",
        "tests",
        &["s26_every_moment_of_a_save", "s26_kill_9_at_any_moment_leaves_a_complete_checkpoint"],
    ),
    ("S26", "tests", &["s26_a_full_disk_names_path_and_bytes_and_keeps_the_previous_checkpoint"]),
    ("S26", "tests", &["s26_a_file_that_cannot_be_written_is_an_error_with_path_and_bytes"]),
    ("S26", "tests", &["s26_saving_a_step_again_never_leaves_a_moment_without_it"]),
    ("S26", "tests", &["s26_killed_at_twenty_random_moments_a_run_has_never_stopped"]),
    ("S27", "tests", &["s27_a_resume_round_a_step_that_was_left_out_has_never_stopped"]),
    ("S27", "tests", &["s27_straight_is_two_parts_on_one_rank", "s27_straight_is_two_parts_on_folded_ranks"]),
    ("S27", "tests", &["s27_an_older_checkpoint_of_the_run_is_continued_as_if_the_rest_had_not_been"]),
    ("S28", "train", &["s28_counts_are_exact", "s28_more_tokens_than_31_bits", "s28_counts_beyond_32_bits"]),
    ("S28", "train", &["s28_too_few_tokens_are_refused_with_both_numbers"]),
    ("S28", "train", &["s28_five_samples_micro_batch_two_two_ranks"]),
    ("S28", "tests", &["s28_too_little_data_is_refused_before_anything_is_written"]),
    ("S29", "train", &["s29_text_bytes_have_one_documented_meaning", "s29_mark_and_line_ends"]),
    ("S29", "train", &["s29_jsonl_counts_the_same_records_for_both_line_ends"]),
    ("S29", "train", &["s29_an_id_equal_to_the_vocabulary_is_refused_at_load"]),
    ("S29", "tests", &["s29_an_id_outside_the_vocabulary_is_refused_at_load_under_tp_too"]),
    (
        "S30",
        "crates/comm",
        &[
            "s30_missing_variables_are_named",
            "s30_empty_and_wrong_values_are_named",
            "s30_launchers_that_disagree_are_refused_unless_one_started_the_other",
            "s30_a_rank_that_never_comes_is_named_on_every_rank",
            "s30_ranks_that_do_not_fit_end_the_meeting_everywhere_with_one_text",
            "s30_a_second_rank_0_is_told_that_the_port_is_taken_and_the_first_goes_on",
            "s30_a_port_of_another_program_is_told_on_both_sides",
            "s30_a_first_rank_that_is_not_there_is_told_with_its_place",
        ],
    ),
    (
        "S30",
        "tests",
        &[
            "s30_variables_of_launchers_that_are_wrong_end_the_process_with_name_and_value",
            "s30_a_rank_that_never_comes_is_named_by_all_that_have_come",
            "s30_two_processes_of_one_rank_and_a_taken_port",
        ],
    ),
    ("S32a", "crates/moe", &["s32_nothing_of_a_step_outlives_its_backward"]),
    ("S32c", "crates/dense", &["s32c_prefetched_units_are_all_that_is_complete"]),
    ("S32a", "tests", &["s32a_live_bytes_are_constant_over_300_steps_of_changing_imbalance"]),
    ("user configurations", "train", &["configurations_seen_in_reports"]),
    (
        "user configurations",
        "tests",
        &["reported_layouts_have_the_stated_sizes", "reported_runs_do_not_hang"],
    ),
];

fn sources(folder: &Path, out: &mut Vec<PathBuf>) {
    for path in std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()) {
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

#[test]
fn every_scenario_has_its_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut missing = Vec::new();
    for (number, folder, tests) in INDEX {
        let mut files = Vec::new();
        sources(&root.join(folder), &mut files);
        let text: String = files.iter().map(|f| std::fs::read_to_string(f).expect("a source")).collect();
        for test in *tests {
            // The suite of comm runs its cases by name; they are functions without the attribute.
            let attribute = if *folder == "crates/comm" { "" } else { "#[test]" };
            let exists = text.match_indices(&format!("fn {test}(")).any(|(at, _)| {
                let before = text[..at].trim_end().trim_end_matches("pub(super)").trim_end();
                before.ends_with(attribute) || before.ends_with("#[cfg(unix)]\n#[test]")
            });
            if !exists {
                missing.push(format!("{number}: {folder} has no test {test}"));
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    let wanted = (1..=16)
        .chain([20, 21])
        .chain(24..=29)
        .map(|n| format!("S{n:02}"))
        .chain(["S32a".into(), "S32c".into()]);
    for number in wanted {
        assert!(INDEX.iter().any(|(n, _, _)| *n == number), "{number} has no test");
    }
}

#[test]
fn s04_recomputation_and_evaluation_count_nothing_twice() {
    let runs = Runs::new("s04");
    let run = |sets: &[&str], evaluate: bool| {
        let config = runs.config(&[FOLDED, ROUTER, &["train.precision=f64"], sets]);
        on_engines::<f64, _>(&config, quick(), |_, engine, data| {
            let mut layers = Vec::new();
            for number in 0..3 {
                if evaluate {
                    let split = plica::data::Split::Train;
                    let micros =
                        plica::batch::load(data, split, 7, &plan(&config), &engine.mesh, &engine.device)?;
                    engine.evaluate(number, &micros)?;
                }
                layers.push(step(engine, &config, data, number)?.layers);
            }
            let bias = engine
                .model
                .moe_layers()
                .map(|(_, m)| m.router().bias_e().unwrap().to_vec())
                .collect::<Vec<_>>();
            Ok((layers, bias))
        })
        .unwrap()
    };
    let plain = run(&[], false);
    for (layers, _) in &plain {
        for (_, report) in layers.iter().flatten() {
            // T * K: 4 sequences of 16 tokens, the last of an epoch may end in padding.
            assert_eq!(report.counts_e.iter().sum::<i64>() as u64, report.tokens * 2);
            assert!(report.tokens > 48 && report.tokens <= 64);
        }
    }
    assert!(plain.iter().all(|rank| rank == &plain[0]), "the same on all ranks");
    for recompute in ["full", "moe", "expert-activation", "attention"] {
        assert!(run(&[&format!("train.recompute={recompute}")], false) == plain, "{recompute}");
    }
    assert!(run(&[], true) == plain, "evaluation touches nothing");
}

/// Pieces and their gradients of every rank after one forward and backward.
fn gradients(runs: &Runs, sets: &[&[&str]]) -> Vec<Vec<(Piece, bool, Vec<f64>)>> {
    let config = runs.config(sets);
    let ranks = on_engines::<f64, _>(&config, quick(), |_, engine, data| {
        let split = plica::data::Split::Train;
        let micros = plica::batch::load(data, split, 0, &plan(&config), &engine.mesh, &engine.device)?;
        engine.forward_backward(0, &micros)?;
        let all = engine.params.ids().flat_map(|id| {
            let (grad, spec) = (engine.grads.get(id), engine.params.spec(id));
            let cut = spec.is_cut_over(plica_folding::axis::Axis::Tp);
            engine.params.pieces(id).iter().map(move |p| (p.clone(), cut, p.copy_out(grad)))
        });
        Ok(all.collect())
    });
    ranks.unwrap_or_else(|e| panic!("{sets:?}: {e}"))
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

#[test]
fn s10_expert_gradients_of_the_engine_do_not_depend_on_ep() {
    let runs = Runs::new("s10");
    let sets = ["train.precision=f64", "train.clip=0"];
    let one = gradients(&runs, &[ONE, &sets]).remove(0);
    for layout in [
        &["layout.ranks=2", "layout.dp=2", "layout.ep=1"][..],
        &["layout.ranks=2", "layout.dp=2", "layout.ep=2"],
        &["layout.ranks=4", "layout.dp=4", "layout.ep=2"],
        &["layout.ranks=4", "layout.dp=4", "layout.ep=4"],
        &["layout.ranks=4", "layout.tp=2", "layout.ep=2", "layout.etp=2"],
    ] {
        let mut checked = 0;
        for (piece, _, values) in gradients(&runs, &[layout, &sets]).iter().flatten() {
            let (whole, _, reference) = one.iter().find(|(p, _, _)| p.name == piece.name).unwrap();
            assert_eq!(whole.shape, piece.shape);
            let (a, b) = (norm(values), norm(&piece.select(reference)));
            assert!(
                (a - b).abs() <= 1e-12 * norm(reference).max(1e-300),
                "{layout:?} {}: {a} {b}",
                piece.name
            );
            checked += usize::from(piece.name.contains("experts") && b > 0.0);
        }
        assert!(checked >= 12, "{layout:?}: {checked} expert tensors");
    }
}

#[test]
fn s12_the_router_and_the_norms_under_tp() {
    let runs = Runs::new("s12");
    // Without any balance loss: what the router learns comes from the loss alone.
    let sets = ["train.precision=f64", "moe.balance=none", "moe.balance_coefficient=0"];
    let tp2 = ["layout.ranks=2", "layout.tp=2", "layout.etp=1", "layout.ep=2"];
    let (one, two) = (gradients(&runs, &[ONE, &sets]).remove(0), gradients(&runs, &[&tp2, &sets]));
    let router = |g: &[(Piece, bool, Vec<f64>)]| {
        norm(&g.iter().find(|(p, _, _)| p.name.ends_with("router")).unwrap().2)
    };
    assert!(router(&one) > 1e-6, "the router learns without a balance loss");
    for (piece, cut, values) in two.iter().flatten().filter(|(_, cut, _)| !cut) {
        let reference = &one.iter().find(|(p, _, _)| p.name == piece.name).unwrap().2;
        let ratio = norm(values) / norm(&piece.select(reference));
        assert!((1.0 - 1e-10..1.0 + 1e-10).contains(&ratio), "{} (cut {cut}): {ratio}", piece.name);
    }
    for precision in ["train.precision=f32", "train.precision=f64"] {
        let config = runs.config(&[&tp2, &[precision, "moe.jitter=0.05"]]);
        let replicated = match precision {
            "train.precision=f32" => replicated_bits::<f32>(&config),
            _ => replicated_bits::<f64>(&config),
        };
        assert!(
            replicated[0].len() > 4 && replicated[0] == replicated[1],
            "{precision}: the same bits on both ranks"
        );
    }
}

/// Weights that TP does not cut, after three steps, as bits.
fn replicated_bits<T: plica_dense::Trainable>(config: &plica::config::Config) -> Vec<Vec<u64>> {
    on_engines::<T, _>(config, quick(), |_, engine, data| {
        for number in 0..3 {
            step(engine, config, data, number)?;
        }
        let same = |id: &plica_dense::ParamId| {
            let spec = engine.params.spec(*id);
            spec.reduce_family() == plica_folding::groups::Family::TpDpCp
        };
        let ids = engine.params.ids().filter(same);
        Ok(ids.flat_map(|id| engine.params.value(id).to_vec()).map(|v| v.to_f64().to_bits()).collect())
    })
    .unwrap()
}

#[test]
fn s28_too_little_data_is_refused_before_anything_is_written() {
    let runs = Runs::new("s28");
    let source = runs.path().join("little");
    let path = format!("data.source={}", source.display());
    for (contents, validation, wanted) in [
        ("", "data.validation=0", &["empty"][..]),
        ("abc", "data.validation=0", &["the train split has 4 tokens", "train.seq_len = 16", "18"]),
        ("0123456789abcdef", "data.validation=0", &["the train split has 17 tokens", "18"]),
        // Megatron#957: a share so small that the held-out part is empty.
        (&"x".repeat(200), "data.validation=0.002", &["the validation split has ", "18"]),
    ] {
        std::fs::write(&source, contents).unwrap();
        let text = format!("{:#}", runs.train("run", &[&[&path, validation]]).unwrap_err());
        wanted.iter().for_each(|part| assert!(text.contains(part), "{part}: {text}"));
        assert!(!runs.run("run").exists(), "nothing is written");
    }
    // Micro-batch 2, DP 2: a batch of 6 is 2 and 1 sequences on both ranks; one of 5 cannot be shared, one of 2 fills
    // no micro-batch.
    std::fs::write(&source, "y".repeat(5 * 16)).unwrap();
    let two = ["layout.ranks=2", "layout.dp=2", "train.micro_batch=2"];
    assert!(runs.try_config(&[&two, &[&path, "train.global_batch=6"]]).is_ok());
    for (batch, remainder) in [(5, "5 % 2 = 1"), (2, "2 % 2 = 0")] {
        let text = runs.try_config(&[&two, &[&path, &format!("train.global_batch={batch}")]]).unwrap_err();
        assert!(text.contains("micro batch·DP = 2·2 = 4") && text.contains(remainder), "{text}");
    }
    let records = runs.train("run", &[&two, &[&path, "run.steps=5"]]).unwrap().report.loss.len();
    assert_eq!(records, 5, "all ranks run the same steps");
}

#[test]
fn s29_an_id_outside_the_vocabulary_is_refused_at_load_under_tp_too() {
    let runs = Runs::new("s29");
    let ids: Vec<u8> =
        (0..600u16).map(|i| if i == 411 { 320 } else { i % 320 }).flat_map(u16::to_le_bytes).collect();
    let path = runs.path().join("ids.u16");
    std::fs::write(&path, ids).unwrap();
    let source = format!("data.source={}", path.display());
    for layout in [ONE, FOLDED] {
        let text = format!("{:#}", runs.train("run", &[layout, &[&source, "model.vocab=320"]]).unwrap_err());
        for part in ["ids.u16", "token id 320 at token offset 411", "vocabulary of 320 (ids 0..=319)"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!runs.run("run").exists());
    }
    runs.train("run", &[FOLDED, &[&source, "model.vocab=321", "run.steps=2"]]).unwrap();
}

#[test]
fn reported_layouts_have_the_stated_sizes() {
    let layout = |world, [tp, cp, pp, ep, etp]: [usize; 5]| {
        let spec = LayoutSpec { world, tp, cp, pp, ep, etp: Some(etp), ..LayoutSpec::default() };
        Layout::new(&spec).unwrap_or_else(|e| panic!("{e}"))
    };
    // NeMo-RL#2319: DP 4, 64 of 256 experts a rank, EDP by ETP.
    for (etp, edp) in [(1, 2), (2, 1)] {
        let found = layout(8, [2, 1, 1, 4, etp]);
        assert_eq!((found.dp(), found.edp(), 256 / found.ep()), (4, edp, 64));
    }
    // Speech#14838: DP 2, 512 / (1 * 2) = 256 micro-batches.
    let speech = layout(4, [1, 1, 2, 2, 1]);
    assert_eq!((speech.dp(), 512 / speech.dp(), speech.edp()), (2, 256, 1));
    // Megatron-Bridge#546 on 4 and 8 ranks.
    assert_eq!([4, 8].map(|world| layout(world, [4, 1, 1, 4, 1]).dp()), [1, 2]);
    // NVIDIA/Megatron-LM#4342: EDP is known before the start.
    assert_eq!(layout(8, [2, 1, 1, 2, 1]).edp(), 4);
    // marin#8953: 26 layers, top-4, padding excluded.
    assert_eq!(26 * (68_160 - 42_435) * 4, 2_675_400);
}

#[test]
fn reported_runs_do_not_hang() {
    let runs = Runs::new("reported");
    // Megatron#1628 with global batch 8: experts over EP 4 or cut over ETP 4, one curve.
    let eight = [
        "layout.ranks=8",
        "moe.experts=8",
        "train.global_batch=8",
        "train.precision=f64",
        "model.dense_layers=[]",
    ];
    let (ep, etp) = (["layout.ep=4", "layout.etp=1"], ["layout.ep=1", "layout.etp=4"]);
    let [a, b] = [&ep, &etp].map(|sizes| losses::<f64>(&runs.config(&[&eight, sizes]), 3));
    assert!(largest_relative(&a, &b) < 1e-10, "{a:?} {b:?}");
    // DeepSpeed#5794: 4 experts, EP 4, no dense feed-forward left. LlamaFactory#1998: eight processes, micro 1, and
    // a router so sure that most ranks receive nothing.
    let forced = ["moe.force=biased=40"];
    let four = ["layout.ranks=4", "layout.ep=4", "model.dense_layers=[]"];
    let mixtral =
        ["layout.ranks=8", "layout.ep=8", "moe.experts=8", "moe.order=topk-softmax", "train.global_batch=8"];
    for sets in [&[&four[..], &forced], &[&mixtral[..], &forced]] {
        for dispatcher in ["moe.dispatcher=all-to-all", "moe.dispatcher=direct"] {
            let mut all = sets.to_vec();
            let dispatcher = [dispatcher];
            all.push(&dispatcher);
            assert_eq!(losses::<f32>(&runs.config(&all), 2).len(), 2);
        }
    }
}
