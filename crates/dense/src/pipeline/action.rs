//! One step of a pipeline schedule: what is done, for which stage, with which micro-batch. The text form is that
//! of torch.distributed.pipelining: `2F0` is the forward of stage 2 on micro-batch 0, `1UNSHARD` gathers the
//! weights of stage 1, `(0F1;0B0)OVERLAP_F_B` is a forward and a backward that run together.

use std::fmt;
use std::str::FromStr;

use crate::pipeline::error::ScheduleError;

/// What an action does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `F`: the forward of a stage.
    Forward,
    /// `B`: the whole backward, input gradient and weight gradients.
    Backward,
    /// `I`: the part of the backward that the previous stage waits for, dX = dY·Wᵀ.
    InputGradient,
    /// `W`: the part of the backward that only the optimizer waits for, dW = Xᵀ·dY.
    WeightGradient,
    /// `UNSHARD`: gathers the sharded weights of a stage.
    Unshard,
    /// `RESHARD`: releases gathered weights.
    Reshard,
    /// `REDUCE_GRAD`: sums the gradients of a stage over its replicas.
    ReduceGradient,
    /// `SEND_F`: sends the output of this stage to the next one.
    SendForward,
    /// `RECV_F`: receives the input of this stage from the previous one.
    ReceiveForward,
    /// `SEND_B`: sends the input gradient of this stage to the previous one.
    SendBackward,
    /// `RECV_B`: receives the output gradient of this stage from the next one.
    ReceiveBackward,
    /// `OVERLAP_F_B`: a forward and a backward that run together; they are in [`Action::parts`].
    Overlap,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 12] = [
        Kind::Forward,
        Kind::Backward,
        Kind::InputGradient,
        Kind::WeightGradient,
        Kind::Unshard,
        Kind::Reshard,
        Kind::ReduceGradient,
        Kind::SendForward,
        Kind::ReceiveForward,
        Kind::SendBackward,
        Kind::ReceiveBackward,
        Kind::Overlap,
    ];

    /// Its word in the text form.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Forward => "F",
            Kind::Backward => "B",
            Kind::InputGradient => "I",
            Kind::WeightGradient => "W",
            Kind::Unshard => "UNSHARD",
            Kind::Reshard => "RESHARD",
            Kind::ReduceGradient => "REDUCE_GRAD",
            Kind::SendForward => "SEND_F",
            Kind::ReceiveForward => "RECV_F",
            Kind::SendBackward => "SEND_B",
            Kind::ReceiveBackward => "RECV_B",
            Kind::Overlap => "OVERLAP_F_B",
        }
    }

    /// Whether it is arithmetic of a stage: F, B, I, W or an overlap of them.
    pub fn is_compute(self) -> bool {
        use Kind::{Backward, Forward, InputGradient, Overlap, WeightGradient};
        matches!(self, Forward | Backward | InputGradient | WeightGradient | Overlap)
    }

    /// Whether it moves a tensor between neighbouring stages.
    pub fn is_transfer(self) -> bool {
        self.is_send() || matches!(self, Kind::ReceiveForward | Kind::ReceiveBackward)
    }

    /// Whether it is the sending half of a transfer.
    pub fn is_send(self) -> bool {
        matches!(self, Kind::SendForward | Kind::SendBackward)
    }

    /// Whether it concerns one micro-batch; the others concern a whole stage, an overlap its parts.
    pub fn has_micro_batch(self) -> bool {
        self.is_transfer() || (self.is_compute() && self != Kind::Overlap)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// One step of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Action {
    /// Stage, from 0; of an overlap the stage of its first part.
    pub stage: usize,
    /// What is done.
    pub kind: Kind,
    /// Micro-batch, from 0, where the kind has one.
    pub micro_batch: Option<usize>,
    /// The forward and the backward of an overlap; empty for every other kind.
    pub parts: Vec<Action>,
}

impl Action {
    /// An action on one micro-batch of a stage.
    ///
    /// # Panics
    /// When the kind has no micro-batch.
    pub fn new(stage: usize, kind: Kind, micro_batch: usize) -> Action {
        assert!(kind.has_micro_batch(), "{kind} has no micro-batch");
        Action { stage, kind, micro_batch: Some(micro_batch), parts: Vec::new() }
    }

    /// `F` of a stage and micro-batch.
    pub fn forward(stage: usize, micro_batch: usize) -> Action {
        Action::new(stage, Kind::Forward, micro_batch)
    }

    /// `B` of a stage and micro-batch.
    pub fn backward(stage: usize, micro_batch: usize) -> Action {
        Action::new(stage, Kind::Backward, micro_batch)
    }

    /// `I` of a stage and micro-batch.
    pub fn input_gradient(stage: usize, micro_batch: usize) -> Action {
        Action::new(stage, Kind::InputGradient, micro_batch)
    }

    /// `W` of a stage and micro-batch.
    pub fn weight_gradient(stage: usize, micro_batch: usize) -> Action {
        Action::new(stage, Kind::WeightGradient, micro_batch)
    }

    /// An action on the weights or gradients of a stage: `UNSHARD`, `RESHARD`, `REDUCE_GRAD`.
    ///
    /// # Panics
    /// When the kind is another.
    pub fn of_stage(stage: usize, kind: Kind) -> Action {
        assert!(!kind.has_micro_batch() && kind != Kind::Overlap, "{kind} is not of a whole stage");
        Action { stage, kind, micro_batch: None, parts: Vec::new() }
    }

    /// A forward and a backward that run together.
    ///
    /// # Panics
    /// When the first is no `F` or the second neither `B` nor `I`.
    pub fn overlap(forward: Action, backward: Action) -> Action {
        assert!(
            pair(&forward, &backward),
            "an overlap is of an F and a B or I, not {forward} and {backward}"
        );
        Action {
            stage: forward.stage,
            kind: Kind::Overlap,
            micro_batch: None,
            parts: vec![forward, backward],
        }
    }

    /// The parts of an overlap, or the action itself.
    pub fn simple(&self) -> &[Action] {
        if self.kind == Kind::Overlap { &self.parts } else { std::slice::from_ref(self) }
    }
}

fn pair(forward: &Action, backward: &Action) -> bool {
    forward.kind == Kind::Forward && matches!(backward.kind, Kind::Backward | Kind::InputGradient)
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == Kind::Overlap {
            let parts: Vec<String> = self.parts.iter().map(Action::to_string).collect();
            return f.pad(&format!("({}){}", parts.join(";"), self.kind));
        }
        let micro_batch = self.micro_batch.map(|m| m.to_string()).unwrap_or_default();
        f.pad(&format!("{}{}{micro_batch}", self.stage, self.kind))
    }
}

impl FromStr for Action {
    type Err = ScheduleError;

    /// Reads the text form; spaces around it, and around the parts of an overlap, do not count.
    fn from_str(text: &str) -> Result<Action, ScheduleError> {
        let text = text.trim();
        let wrong = |expected: &str| ScheduleError::Action { text: text.into(), expected: expected.into() };
        let Some(inner) = text.strip_prefix('(') else { return simple(text) };
        let (inner, word) = inner.split_once(')').ok_or_else(|| wrong("a closing parenthesis"))?;
        if word.trim() != Kind::Overlap.word() {
            return Err(wrong("OVERLAP_F_B after the parenthesis"));
        }
        let parts = inner.split(';').map(|part| simple(part.trim())).collect::<Result<Vec<_>, _>>()?;
        match <[Action; 2]>::try_from(parts) {
            Ok([forward, backward]) if pair(&forward, &backward) => Ok(Action::overlap(forward, backward)),
            _ => Err(wrong("an F, a semicolon and a B or I in the parentheses, e.g. (0F1;0B0)OVERLAP_F_B")),
        }
    }
}

/// Reads an action without parts.
fn simple(text: &str) -> Result<Action, ScheduleError> {
    let wrong = |expected: &str| ScheduleError::Action { text: text.into(), expected: expected.into() };
    let after_stage = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let word = after_stage.trim_end_matches(|c: char| c.is_ascii_digit());
    let (stage, micro_batch) = (&text[..text.len() - after_stage.len()], &after_stage[word.len()..]);
    if stage.is_empty() {
        return Err(wrong("a stage number first, e.g. 2F0"));
    }
    let number = |digits: &str| digits.parse::<u32>().map_err(|_| wrong("numbers below 4294967296"));
    let stage = number(stage)? as usize;
    let kinds = || Kind::ALL.into_iter().filter(|kind| *kind != Kind::Overlap);
    let Some(kind) = kinds().find(|kind| kind.word() == word) else {
        let words: Vec<&str> = kinds().map(Kind::word).collect();
        return Err(wrong(&format!("one of {} after the stage number, e.g. 2F0", words.join(", "))));
    };
    match (kind.has_micro_batch(), micro_batch.is_empty()) {
        (true, false) => Ok(Action::new(stage, kind, number(micro_batch)? as usize)),
        (false, true) => Ok(Action::of_stage(stage, kind)),
        (true, true) => Err(wrong(&format!("a micro-batch number after {kind}, e.g. {stage}{kind}0"))),
        (false, false) => {
            Err(wrong(&format!("no micro-batch number after {kind}, which is of a whole stage")))
        }
    }
}
