//! How a rank sleeps until something that concerns it has happened: a counter of events that others raise,
//! looked at for a few microseconds, then a condition variable. Nobody spins for long, so that many more ranks
//! than cores make progress.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Events of one rank.
#[derive(Debug, Default)]
pub(super) struct Signal {
    events: AtomicU64,
    sleepers: AtomicUsize,
    mutex: Mutex<()>,
    condvar: Condvar,
}

impl Signal {
    /// The number of events so far; taken before the condition is looked at.
    pub(super) fn events(&self) -> u64 {
        self.events.load(Ordering::SeqCst)
    }

    /// Raises an event.
    pub(super) fn raise(&self) {
        self.events.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // The lock orders this with a sleeper that has looked at the counter but does not wait yet.
            drop(self.mutex.lock().unwrap_or_else(PoisonError::into_inner));
            self.condvar.notify_all();
        }
    }

    /// Returns when there were more events than `seen`, or at `until`.
    pub(super) fn wait(&self, seen: u64, spin: Duration, until: Instant) {
        let started = Instant::now();
        while self.events() == seen && started.elapsed() < spin {
            // Where another program has the other core, whom we wait for may need this one.
            if started.elapsed() > spin / 16 {
                std::thread::yield_now();
            }
            for _ in 0..32 {
                std::hint::spin_loop();
            }
        }
        if self.events() != seen {
            return;
        }
        let mut guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.events() == seen {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()) else {
                break;
            };
            guard = self.condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_before_the_wait_is_not_lost_and_a_missing_one_ends_at_the_deadline() {
        let signal = Signal::default();
        let seen = signal.events();
        signal.raise();
        signal.wait(seen, Duration::ZERO, Instant::now() + Duration::from_secs(60));
        let started = Instant::now();
        signal.wait(signal.events(), Duration::ZERO, started + Duration::from_millis(20));
        assert!(
            started.elapsed() >= Duration::from_millis(20) && started.elapsed() < Duration::from_secs(30)
        );
    }

    #[test]
    fn a_sleeper_is_woken() {
        let signal = Signal::default();
        std::thread::scope(|scope| {
            let (signal, seen) = (&signal, signal.events());
            let sleeper = scope.spawn(move || {
                let started = Instant::now();
                signal.wait(seen, Duration::ZERO, started + Duration::from_secs(60));
                started.elapsed()
            });
            std::thread::sleep(Duration::from_millis(10));
            signal.raise();
            assert!(sleeper.join().expect("no panic") < Duration::from_secs(30));
        });
    }
}
