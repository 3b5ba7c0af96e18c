//! Which forward pass starts next, of engines that share the processors: older weights go first.

use crate::panics::lock;
use std::sync::{Condvar, Mutex, PoisonError};

/// Lets only as many forward passes run as one engine has workers. Among passes that wait, those of the
/// oldest weights go first.
#[derive(Default)]
pub struct PassScheduler {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of passes that run.
    running: usize,
    /// The version of the weights of each pass that waits.
    waiting: Vec<u64>,
}

/// A pass that runs. Its end is the end of the pass.
pub(super) struct RunningPass<'a>(&'a PassScheduler);

impl PassScheduler {
    /// Waits until fewer than `passes_max` passes run and none of older weights than `version` waits.
    pub(super) fn start(&self, version: u64, passes_max: usize) -> RunningPass<'_> {
        let mut state = lock(&self.state);
        state.waiting.push(version);
        while state.running >= passes_max || state.waiting.iter().any(|&waiting| waiting < version) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(own) = state.waiting.iter().position(|&waiting| waiting == version) {
            state.waiting.swap_remove(own);
        }
        state.running += 1;
        // A pass of newer weights may have waited for this one alone.
        self.changed.notify_all();
        RunningPass(self)
    }
}

impl Drop for RunningPass<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).running -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_passes_of_older_weights_go_first_and_all_places_are_used() {
        let (scheduler, order) = (PassScheduler::default(), Mutex::new(vec![]));
        let (first, second) = (scheduler.start(7, 2), scheduler.start(8, 2));
        std::thread::scope(|scope| {
            let start = |version| {
                let _pass = scheduler.start(version, 2);
                order.lock().unwrap().push(version);
            };
            let wait_for = |passes: usize| {
                while lock(&scheduler.state).waiting.len() < passes {
                    std::thread::yield_now();
                }
            };
            // The newer weights ask first.
            scope.spawn(move || start(8));
            wait_for(1);
            scope.spawn(move || start(7));
            wait_for(2);
            drop(first);
        });
        assert_eq!(*order.lock().unwrap(), [7, 8]);
        drop(second);
        let all = [scheduler.start(8, 2), scheduler.start(8, 2)];
        assert_eq!(lock(&scheduler.state).running, 2);
        drop(all);
        assert_eq!(lock(&scheduler.state).running, 0);
    }
}
