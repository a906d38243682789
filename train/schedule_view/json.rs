//! A schedule and its simulation as JSON.

use serde_json::{Value, json as object};

use super::ScheduleView;

/// Everything that [`ScheduleView`] knows; `actions` of a rank have the text form, begin and end.
pub(super) fn json(view: &ScheduleView) -> Value {
    let (schedule, simulation) = (&view.schedule, &view.simulation);
    let rank = |rank: usize| {
        let used = &simulation.ranks[rank];
        let row = &schedule.ranks()[rank];
        let actions = used.spans.iter().filter_map(|span| {
            let action = row[span.action_index].as_ref()?.to_string();
            Some(object!({ "action": action, "start": span.start, "end": span.end }))
        });
        object!({
            "stages": schedule.stages_of_rank(rank),
            "work": used.work,
            "idle_share": simulation.idle_share_of(rank),
            "in_flight_peak": used.in_flight_peak,
            "put_off_peak": view.validated.put_off_peak[rank],
            "memory_peak": used.memory_peak,
            "actions": actions.collect::<Vec<_>>(),
        })
    };
    let published = view.published.as_ref().map(|published| {
        object!({
            "formula": published.formula,
            "bubble": published.bubble,
            "condition": published.condition,
            "is_exact": published.is_exact,
            "in_flight_bound": published.in_flight_bound,
        })
    });
    object!({
        "schedule": view.name,
        "stages": schedule.stages(),
        "micro_batches": schedule.micro_batches(),
        "makespan": simulation.makespan,
        "bubble": simulation.bubble(),
        "bubble_share": simulation.bubble_share(),
        "idle_share": simulation.idle_share(),
        "utilisation": simulation.utilisation(),
        "published": published,
        "ranks": (0..schedule.ranks().len()).map(rank).collect::<Vec<_>>(),
    })
}
