//! What outlives a single test: each `#[tokio::test]` has a runtime of its own and takes its tasks
//! with it, so servers, proxies and clean-up run on this one.

use std::collections::BinaryHeap;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("zklock-support")
            .enable_all()
            .build()
            .expect("a tokio runtime for servers and proxies")
    })
}

/// Says something to whoever watches the tests run, even where libtest captures the output.
pub(crate) fn say(message: std::fmt::Arguments<'_>) {
    use std::io::Write;
    // Capturing is a matter of `eprint!`; there is nobody to tell if stderr is closed.
    let _ = std::io::stderr().write_all(format!("{message}\n").as_bytes());
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What our mutexes guard is whole between any two statements; a panic elsewhere spoils nothing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sleeps more finely than tokio, whose clock ticks in milliseconds: delays of a few milliseconds
/// are what the proxy is for.
pub(crate) async fn sleep_until(due: Instant) {
    if due <= Instant::now() {
        return;
    }
    let (wake, woken) = oneshot::channel();
    let alarms = Alarms::get();
    lock(&alarms.pending).push(Alarm { due, wake });
    alarms.changed.notify_one();
    // The thread lives as long as the process.
    let _ = woken.await;
}

struct Alarms {
    pending: Mutex<BinaryHeap<Alarm>>,
    changed: Condvar,
}

struct Alarm {
    due: Instant,
    wake: oneshot::Sender<()>,
}

impl Alarms {
    fn get() -> &'static Alarms {
        static ALARMS: OnceLock<&'static Alarms> = OnceLock::new();
        ALARMS.get_or_init(|| {
            let alarms: &Alarms = Box::leak(Box::new(Alarms { pending: Mutex::default(), changed: Condvar::new() }));
            std::thread::Builder::new()
                .name("zklock-support-alarms".into())
                .spawn(|| alarms.run())
                .expect("a thread for the proxy's delays");
            alarms
        })
    }

    fn run(&self) {
        let mut pending = lock(&self.pending);
        loop {
            let now = Instant::now();
            while pending.peek().is_some_and(|alarm| alarm.due <= now) {
                let alarm = pending.pop().expect("one was just seen");
                let _ = alarm.wake.send(());
            }
            pending = match pending.peek() {
                None => self.changed.wait(pending).unwrap_or_else(PoisonError::into_inner),
                Some(next) => {
                    let left = next.due.saturating_duration_since(Instant::now());
                    let woken = self.changed.wait_timeout(pending, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

// The heap gives its greatest first, which is to be the earliest.
impl Ord for Alarm {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.due.cmp(&self.due)
    }
}

impl PartialOrd for Alarm {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Alarm {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}

impl Eq for Alarm {}
