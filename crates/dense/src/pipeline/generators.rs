//! Schedules by name: from ranks p, chunks a rank v and micro-batches m to the actions of every rank. All of them
//! take any number of micro-batches, also fewer than stages: a V-shaped schedule is then made for the fewest
//! micro-batches that it is defined for, and what belongs to the others is left out, which takes away waits only.
//!
//! | kind | source | chunks |
//! |---|---|---|
//! | GPipe | Huang et al. 2018, "GPipe"; with chunks: breadth-first, Lamy-Poirier 2022 | any |
//! | 1F1B | Narayanan et al. 2019, "PipeDream"; 2020, PipeDream-Flush | 1 |
//! | interleaved 1F1B | Narayanan et al. 2021, "Efficient large-scale language model training", section 2.2 | any |
//! | zero-bubble H1 | Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.3 | 1 |
//! | ZB-V | the same, section 6 | 2 |
//! | DualPipe-V | DeepSeek-AI 2024, "DeepSeek-V3", and Qi et al. 2025 ("cut-in-half") | 2 |
//!
//! In every schedule the micro-batches of a stage go through each kind of work in ascending order. So gradients add
//! in one order, and the bits of a step do not depend on the schedule.

mod looped;
mod v_shaped;

use std::fmt;
use std::str::FromStr;

use crate::pipeline::action::{Action, Kind};
use crate::pipeline::error::ScheduleError;
use crate::pipeline::schedule::{PAIRS_MAX, Schedule};

/// The schedules that can be generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScheduleKind {
    /// All forwards, then all backwards.
    GPipe,
    /// One forward, one backward.
    OneFOneB,
    /// 1F1B with several chunks of layers a rank, in a loop over the ranks.
    Interleaved,
    /// 1F1B whose weight gradients fill the drain; memory of 1F1B.
    ZeroBubbleH1,
    /// Two chunks a rank in a V, backward split throughout.
    ZeroBubbleV,
    /// Two chunks a rank in a V, a forward and a backward at the same time.
    DualPipeV,
}

impl ScheduleKind {
    /// Every kind.
    pub const ALL: [ScheduleKind; 6] = [
        ScheduleKind::GPipe,
        ScheduleKind::OneFOneB,
        ScheduleKind::Interleaved,
        ScheduleKind::ZeroBubbleH1,
        ScheduleKind::ZeroBubbleV,
        ScheduleKind::DualPipeV,
    ];

    /// Its word on the command line and in settings.
    pub fn word(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneFOneB => "1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::ZeroBubbleH1 => "zb-h1",
            ScheduleKind::ZeroBubbleV => "zb-v",
            ScheduleKind::DualPipeV => "dualpipe-v",
        }
    }

    /// Chunks a rank where nothing else is asked for.
    pub fn default_chunks(self) -> usize {
        match self {
            ScheduleKind::GPipe | ScheduleKind::OneFOneB | ScheduleKind::ZeroBubbleH1 => 1,
            ScheduleKind::Interleaved | ScheduleKind::ZeroBubbleV | ScheduleKind::DualPipeV => 2,
        }
    }

    /// Whether it can be made with this number of chunks a rank.
    pub fn takes_chunks(self, chunks: usize) -> bool {
        match self {
            ScheduleKind::GPipe | ScheduleKind::Interleaved => chunks >= 1,
            _ => chunks == self.default_chunks(),
        }
    }

    /// Whether stages lie in a V: stage s on rank s for s < p, on rank 2p-1-s after that.
    pub fn is_v_shaped(self) -> bool {
        matches!(self, ScheduleKind::ZeroBubbleV | ScheduleKind::DualPipeV)
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

impl FromStr for ScheduleKind {
    type Err = ScheduleError;

    /// Reads the word, or the class name of torch.distributed.pipelining, in upper or lower case.
    fn from_str(text: &str) -> Result<ScheduleKind, ScheduleError> {
        let lower = text.to_ascii_lowercase();
        let found = ScheduleKind::ALL.into_iter().find(|kind| kind.word() == lower);
        found
            .or(match lower.as_str() {
                "loopedbfs" => Some(ScheduleKind::GPipe),
                "interleaved1f1b" => Some(ScheduleKind::Interleaved),
                "zbvzerobubble" => Some(ScheduleKind::ZeroBubbleV),
                "dualpipev" => Some(ScheduleKind::DualPipeV),
                _ => None,
            })
            .ok_or_else(|| {
                let words = ScheduleKind::ALL.map(ScheduleKind::word).join(", ");
                ScheduleError::Rows(format!("`{text}` is no schedule; there are {words}"))
            })
    }
}

/// The schedule of a kind for `ranks` ranks with `chunks` stages each and `micro_batches` micro-batches: arithmetic
/// only, without idle slots. See [`crate::pipeline::lower()`] for transfers.
///
/// # Errors
/// A number that is 0 or absurdly large; a number of chunks that the kind cannot have.
pub fn generate(
    kind: ScheduleKind,
    ranks: usize,
    chunks: usize,
    micro_batches: usize,
) -> Result<Schedule, ScheduleError> {
    let wrong = |text: String| Err(ScheduleError::Rows(text));
    for (what, count) in [("ranks", ranks), ("chunks a rank", chunks), ("micro-batches", micro_batches)] {
        if count == 0 {
            return wrong(format!("{kind}: 0 {what}; at least 1 is needed"));
        }
    }
    if !kind.takes_chunks(chunks) {
        let (has, remedy) = match kind.default_chunks() {
            1 => ("one stage", "choose interleaved or gpipe for more"),
            _ => ("two stages", "choose interleaved for another number"),
        };
        let one = if chunks == 1 { "chunk" } else { "chunks" };
        return wrong(format!("{kind} has {has} a rank, and {chunks} {one} a rank were asked for; {remedy}"));
    }
    let pairs = ranks.checked_mul(chunks).and_then(|stages| stages.checked_mul(micro_batches));
    if pairs.is_none_or(|pairs| pairs > PAIRS_MAX) {
        return wrong(format!(
            "{ranks} ranks x {chunks} chunks x {micro_batches} micro-batches are more than {PAIRS_MAX}"
        ));
    }
    let row = |rank: usize| match kind {
        ScheduleKind::GPipe => looped::fill_and_drain(rank, ranks, chunks, micro_batches),
        ScheduleKind::Interleaved if chunks > 1 => looped::interleaved(rank, ranks, chunks, micro_batches),
        ScheduleKind::OneFOneB | ScheduleKind::Interleaved => looped::one_f_one_b(rank, ranks, micro_batches),
        ScheduleKind::ZeroBubbleH1 => looped::zero_bubble_h1(rank, ranks, micro_batches),
        ScheduleKind::ZeroBubbleV => v_shaped::zero_bubble_v(rank, ranks, micro_batches),
        ScheduleKind::DualPipeV => v_shaped::dual_pipe_v(rank, ranks, micro_batches),
    };
    Schedule::new((0..ranks).map(|rank| row(rank).into_iter().map(Some).collect()).collect())
}

/// The actions of one rank while they are made: the next micro-batch of each kind of work of each of its chunks,
/// and the weight gradients that were put off.
struct Row {
    stages: Vec<usize>,
    forwards: Vec<usize>,
    backwards: Vec<usize>,
    put_off: std::collections::VecDeque<(usize, usize)>,
    actions: Vec<Action>,
}

impl Row {
    fn new(stages: Vec<usize>) -> Row {
        let zeros = vec![0; stages.len()];
        let (forwards, backwards) = (zeros.clone(), zeros);
        Row { stages, forwards, backwards, put_off: Default::default(), actions: Vec::new() }
    }

    /// Forwards of a chunk that were added.
    fn forwards(&self, chunk: usize) -> usize {
        self.forwards[chunk]
    }

    /// Backwards of a chunk, whole or only their input half, that were added.
    fn backwards(&self, chunk: usize) -> usize {
        self.backwards[chunk]
    }

    fn next_forward(&mut self, chunk: usize) -> Action {
        self.forwards[chunk] += 1;
        Action::forward(self.stages[chunk], self.forwards[chunk] - 1)
    }

    fn next_backward(&mut self, chunk: usize) -> Action {
        self.backwards[chunk] += 1;
        Action::backward(self.stages[chunk], self.backwards[chunk] - 1)
    }

    fn forward(&mut self, chunk: usize) {
        let action = self.next_forward(chunk);
        self.actions.push(action);
    }

    fn backward(&mut self, chunk: usize) {
        let action = self.next_backward(chunk);
        self.actions.push(action);
    }

    /// The input half of a backward; its weight half is put off.
    fn input_gradient(&mut self, chunk: usize) {
        let whole = self.next_backward(chunk);
        let micro_batch = self.backwards[chunk] - 1;
        self.put_off.push_back((chunk, micro_batch));
        self.actions.push(Action { kind: Kind::InputGradient, ..whole });
    }

    /// The oldest weight half that was put off, of any chunk; nothing where none waits.
    fn weight_gradient(&mut self) {
        if let Some((chunk, micro_batch)) = self.put_off.pop_front() {
            self.actions.push(Action::weight_gradient(self.stages[chunk], micro_batch));
        }
    }

    /// The oldest weight half of one chunk.
    fn weight_gradient_of(&mut self, chunk: usize) {
        if let Some(place) = self.put_off.iter().position(|(c, _)| *c == chunk) {
            let micro_batch = self.put_off.remove(place).map_or(0, |(_, m)| m);
            self.actions.push(Action::weight_gradient(self.stages[chunk], micro_batch));
        }
    }

    /// A forward of one chunk and a backward of another at the same time.
    fn overlap(&mut self, forward: usize, backward: usize) {
        let (forward, backward) = (self.next_forward(forward), self.next_backward(backward));
        self.actions.push(Action::overlap(forward, backward));
    }

    /// The actions, without those of micro-batches from `micro_batches` on.
    fn finish(self, micro_batches: usize) -> Vec<Action> {
        let kept = |action: &Action| action.micro_batch.is_some_and(|m| m < micro_batches);
        let cut = |action: Action| match action.simple().iter().filter(|part| kept(part)).count() {
            0 => None,
            1 => action.simple().iter().find(|part| kept(part)).cloned(),
            _ => Some(action),
        };
        self.actions.into_iter().filter_map(cut).collect()
    }
}
