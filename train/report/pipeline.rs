//! The table of a pipeline: what each rank's stages cost, and the share of the time in which it did no arithmetic,
//! as measured and as simulated from the measured times.

use super::human;
use super::table::{Align, Table};
use crate::pipeline::{PipelineUse, StageTimes};

/// One row a rank, and the means. Times are of one micro-batch, all stages of the rank together.
pub fn pipeline_table(usage: &PipelineUse) -> String {
    let title = format!("pipeline {}, {} micro-batches", usage.schedule, usage.micro_batches);
    let headers = [title.as_str(), "stages", "forward", "backward", "idle", "simulated"];
    let mut table = Table::new(&headers).align(1, Align::Left);
    for (rank, stages) in usage.stages_of_rank.iter().enumerate() {
        let sum = |of: fn(&StageTimes) -> f64| -> String {
            human::time_ns((stages.iter().map(|s| of(&usage.stages[*s])).sum::<f64>() * 1e9) as u64)
        };
        let list: Vec<String> = stages.iter().map(usize::to_string).collect();
        table.row(vec![
            format!("rank {rank}"),
            list.join(" "),
            sum(|s| s.forward),
            sum(StageTimes::whole_backward),
            human::percent(usage.measured_idle[rank]),
            human::percent(usage.simulated_idle[rank]),
        ]);
    }
    let (measured, simulated) = (human::percent(usage.measured()), human::percent(usage.simulated()));
    table.row(vec!["mean".into(), String::new(), String::new(), String::new(), measured, simulated]);
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_and_simulated_stand_side_by_side() {
        let stage = StageTimes { forward: 1e-3, backward: 2e-3, ..StageTimes::default() };
        let split = StageTimes { backward: 0.0, input_gradient: 1.5e-3, weight_gradient: 0.5e-3, ..stage };
        let usage = PipelineUse {
            schedule: "1f1b".into(),
            micro_batches: 8,
            stages: vec![stage, split],
            stages_of_rank: vec![vec![0], vec![1]],
            measured_idle: vec![0.25, 0.35],
            simulated_idle: vec![0.2, 0.2],
        };
        let text = pipeline_table(&usage);
        for part in
            ["pipeline 1f1b, 8 micro-batches", "rank 0", "1.00 ms", "2.00 ms", "25.0 %", "30.0 %", "20.0 %"]
        {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert_eq!(text.matches("2.00 ms").count(), 2, "a split backward is the sum of its halves\n{text}");
    }
}
