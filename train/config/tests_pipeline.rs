//! Rules of `[pipeline]`: which schedules and cuts are taken, and what the refusals say.

use super::Config;

fn read(sets: &str) -> Result<Config, String> {
    let base = ["layout.ranks=4", "layout.pp=4", "model.layers=8", "train.global_batch=8"];
    let sets: Vec<String> = base.iter().copied().chain(sets.split(' ')).map(str::to_string).collect();
    let sets: Vec<String> = sets.into_iter().filter(|set| !set.is_empty()).collect();
    Config::from_sources(None, None, &sets).map_err(|errors| errors.to_string())
}

fn layers(sets: &str) -> Vec<usize> {
    let config = read(sets).unwrap_or_else(|text| panic!("{sets}: {text}"));
    let plan = config.pipeline.expect("a pipeline");
    assert_eq!(plan.schedule().ranks().len(), config.layout.pp());
    assert_eq!(plan.schedule().micro_batches(), config.train.micro_batches);
    plan.parts().iter().map(|part| part.layers.len()).collect()
}

#[test]
fn every_schedule_is_taken_and_layers_are_shared_out() {
    for (sets, expected) in [
        ("", &[2, 2, 2, 2][..]),
        ("model.layers=30", &[8, 8, 7, 7]),
        ("model.layers=30 pipeline.count_head=true", &[8, 8, 8, 6]),
        ("model.layers=30 pipeline.count_embedding=true pipeline.count_head=true", &[7, 8, 8, 7]),
        ("pipeline.layers=[0,3,5,0]", &[0, 3, 5, 0]),
        ("pipeline.schedule=gpipe", &[2, 2, 2, 2]),
        ("pipeline.schedule=gpipe pipeline.chunks=2", &[1; 8]),
        ("pipeline.schedule=interleaved", &[1; 8]),
        ("pipeline.schedule=interleaved pipeline.layers=[1,1,2,1,1,1,1,0]", &[1, 1, 2, 1, 1, 1, 1, 0]),
        ("pipeline.schedule=zb-h1", &[2, 2, 2, 2]),
        ("pipeline.schedule=zb-v", &[1; 8]),
        ("pipeline.schedule=dualpipe-v", &[1; 8]),
        ("pipeline.schedule=dualpipe-v train.global_batch=1", &[1; 8]),
        ("train.global_batch=7 train.micro_batch=2", &[2, 2, 2, 2]),
    ] {
        assert_eq!(layers(sets), expected, "{sets}");
    }
    let config = read("pipeline.schedule=zb-v").expect("valid");
    assert!(config.to_toml().contains("chunks = 2"), "auto is written out");
    assert!(read("layout.pp=1").expect("valid").pipeline.is_none());
}

#[test]
fn what_cannot_run_is_refused_with_numbers_and_remedy() {
    for (sets, parts) in [
        ("pipeline.layers=[2,2,2]", &["it has 3 numbers", "4 stages", "[2, 2, 2, 2]"][..]),
        ("pipeline.layers=[2,2,2,3]", &["its sum is 9", "model.layers = 8"]),
        ("pipeline.layers=[4,0,2,2]", &["stages [1] without a layer"]),
        ("pipeline.chunks=2", &["pipeline.chunks = 2", "1f1b has one stage a rank"]),
        ("pipeline.schedule=zb-v pipeline.chunks=3", &["pipeline.chunks = 3", "two stages"]),
        ("pipeline.schedule=interleaved pipeline.chunks=0", &["0 chunks a rank"]),
        (
            "pipeline.schedule=interleaved pipeline.chunks=3",
            &["layers = 8 is not divisible by PP·V = 4·3 = 12", "pipeline.layers"],
        ),
        ("pipeline.schedule=custom", &["pipeline.csv = none", "one row a rank"]),
        (
            "pipeline.schedule=custom pipeline.csv=nowhere.csv",
            &["pipeline.csv = nowhere.csv", "No such file"],
        ),
        ("pipeline.csv=some.csv", &["pipeline.schedule = 1f1b is generated"]),
        ("layout.pp=1 pipeline.layers=[8]", &["layout.pp = 1 has no stages"]),
        (
            "moe.experts=4 moe.balance=global moe.balance_coefficient=0.1",
            &["pipeline.schedule = 1f1b", "before the first backward", "pipeline.schedule = gpipe"],
        ),
        ("pipeline.schedule=1f1", &["did you mean \"1f1b\"?"]),
    ] {
        let text = read(sets).expect_err(sets);
        parts.iter().for_each(|part| assert!(text.contains(part), "{sets}\nwant {part}\n{text}"));
    }
    let global = "moe.experts=4 moe.balance=global moe.balance_coefficient=0.1 pipeline.schedule=gpipe";
    assert!(read(global).is_ok() && read(&format!("{global} pipeline.chunks=2")).is_ok());
}
