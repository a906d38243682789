//! When complete weights of a unit existed: from the start of their gather over its end to their release. Kept only
//! while somebody asks for it.

use std::time::Instant;

use crate::shard::plan::UnitId;

/// One life of a unit's complete weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightSpan {
    /// Which unit.
    pub unit: UnitId,
    /// Its gather was started.
    pub started: Instant,
    /// The weights were complete; none where nobody waited for them.
    pub complete: Option<Instant>,
    /// They were released.
    pub released: Instant,
    /// Bytes of the complete tensors; 0 where nobody waited for them.
    pub bytes: u64,
}

/// Lives of all units of a rank.
#[derive(Debug, Default)]
pub(crate) struct Lives {
    /// While somebody asks; lives that have ended.
    ended: Option<Vec<WeightSpan>>,
    alive: Vec<WeightSpan>,
}

impl Lives {
    /// Keeps lives that begin from now on.
    pub(crate) fn start(&mut self) {
        (self.ended, self.alive) = (Some(Vec::new()), Vec::new());
    }

    /// What has ended since; nothing is kept from now on.
    pub(crate) fn take(&mut self) -> Vec<WeightSpan> {
        self.alive.clear();
        self.ended.take().unwrap_or_default()
    }

    /// A gather starts.
    pub(crate) fn begin(&mut self, unit: UnitId) {
        if self.ended.is_some() {
            let started = Instant::now();
            self.alive.push(WeightSpan { unit, started, complete: None, released: started, bytes: 0 });
        }
    }

    /// The weights are complete.
    pub(crate) fn complete(&mut self, unit: UnitId, bytes: u64) {
        if let Some(life) = self.alive.iter_mut().find(|life| life.unit == unit) {
            (life.complete, life.bytes) = (Some(Instant::now()), bytes);
        }
    }

    /// They are released, or their gather is given up.
    pub(crate) fn end(&mut self, unit: UnitId) {
        let Some(at) = self.alive.iter().position(|life| life.unit == unit) else { return };
        let life = self.alive.swap_remove(at);
        self.ended.iter_mut().for_each(|ended| ended.push(WeightSpan { released: Instant::now(), ..life }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_goes_from_gather_to_release_and_is_kept_on_request() {
        let mut lives = Lives::default();
        lives.begin(UnitId(0));
        lives.complete(UnitId(0), 8);
        lives.start();
        lives.begin(UnitId(1));
        lives.begin(UnitId(2));
        lives.complete(UnitId(1), 12);
        for unit in [0, 1, 2] {
            lives.end(UnitId(unit));
        }
        lives.begin(UnitId(1));
        let spans = lives.take();
        let seen: Vec<_> = spans.iter().map(|s| (s.unit, s.bytes, s.complete.is_some())).collect();
        assert_eq!(seen, [(UnitId(1), 12, true), (UnitId(2), 0, false)], "the first began too early");
        assert!(
            spans.iter().all(|s| s.started <= s.complete.unwrap_or(s.started) && s.started <= s.released)
        );
        lives.end(UnitId(1));
        assert!(lives.take().is_empty());
    }
}
