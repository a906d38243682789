//! How a rank waits for something that no event announces: it looks again and again, at first at once (where
//! every rank has a core), then after the others had the core, then after sleeps that grow. So two ranks on two
//! cores answer each other within microseconds, and many ranks on few cores leave them to those that compute.

use std::time::{Duration, Instant};

/// Longest sleep between two looks.
const LONGEST: Duration = Duration::from_micros(200);
/// First sleep.
const SHORTEST: Duration = Duration::from_micros(20);
/// How long the core is only lent, before the first sleep.
const YIELDING: Duration = Duration::from_micros(100);
/// The same while bytes move: they may need this rank's calls to go on.
const YIELDING_WHILE_MOVING: Duration = Duration::from_millis(2);

/// A wait.
pub(super) struct Pause {
    spin: Duration,
    since: Instant,
    sleep: Duration,
}

impl Pause {
    pub(super) fn new(spin: Duration) -> Pause {
        Pause { spin, since: Instant::now(), sleep: SHORTEST }
    }

    /// Something has happened: the next waits are short again.
    pub(super) fn reset(&mut self) {
        (self.since, self.sleep) = (Instant::now(), SHORTEST);
    }

    /// Waits a little, longer each time; `is_moving` where bytes are known to be under way.
    pub(super) fn rest(&mut self, is_moving: bool) {
        let quiet = self.since.elapsed();
        let yielding = if is_moving { YIELDING_WHILE_MOVING } else { YIELDING };
        if quiet < self.spin {
            // Where another program has the other core, whom we wait for may need this one.
            if quiet > self.spin / 4 {
                std::thread::yield_now();
            }
            (0..16).for_each(|_| std::hint::spin_loop());
        } else if quiet < self.spin + yielding {
            std::thread::yield_now();
        } else {
            std::thread::sleep(self.sleep);
            self.sleep = (2 * self.sleep).min(LONGEST);
        }
    }
}
