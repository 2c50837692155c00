//! A thread that looks after the others: IOThreads and devices' threads that a front end's eventfd holds up, queues that a
//! driver broke, devices that stalled. It never waits for anybody who may wait for an IOThread.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use rtvirtio_engine::AbortOnPanic;
use rtvirtio_qos::Stalls;
use rtvirtio_spec::control::Event;
use rtvirtio_units::Name;

use super::iothreads::Core;
use super::mapped::MappedHost;

/// How often somebody looks whether an IOThread is stuck in a front end's eventfd.
const STUCK_PERIOD: Duration = Duration::from_millis(5);
/// The same while none of them does anything.
const IDLE_PERIOD: Duration = Duration::from_millis(100);

/// What it looks at.
struct Watched {
    hosts: Mutex<Vec<Weak<dyn MappedHost>>>,
    on: AtomicBool,
}

/// The thread; [`Watchdog::stop`] ends it.
pub(super) struct Watchdog {
    watched: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts it.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(super) fn start(core: Arc<Core>) -> std::io::Result<Self> {
        let watched = Arc::new(Watched { hosts: Mutex::default(), on: AtomicBool::new(true) });
        let of_thread = Arc::clone(&watched);
        let thread = std::thread::Builder::new()
            .name("watchdog".to_owned())
            .spawn(move || of_thread.run(&core))?;
        Ok(Self { watched, thread: Some(thread) })
    }

    /// From now on queues of this device that break are told of.
    pub(super) fn watch(&self, host: Weak<dyn MappedHost>) {
        self.watched.hosts().push(host);
    }

    /// Ends it.
    pub(super) fn stop(&mut self) {
        self.watched.on.store(false, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Watched {
    fn run(&self, core: &Core) {
        let _fatal = AbortOnPanic::new();
        let pool = Arc::clone(&core.pool);
        let mut before = HashMap::new();
        let mut stalls = HashMap::new();
        let watchdog = Arc::clone(pool.watchdog());
        watchdog.enter();
        let mut period = IDLE_PERIOD;
        while self.on.load(Relaxed) {
            std::thread::park_timeout(period);
            watchdog.set_idle(false);
            let mut busy = pool.unblock_stuck_iothreads(&mut before);
            self.look_at_devices();
            report_stalls(core, &mut stalls);
            if !busy {
                // From here on who calls a driver wakes it; who began before is seen.
                watchdog.set_idle(true);
                busy = pool.unblock_stuck_iothreads(&mut before);
            }
            period = if busy { STUCK_PERIOD } else { IDLE_PERIOD };
        }
    }

    fn hosts(&self) -> MutexGuard<'_, Vec<Weak<dyn MappedHost>>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_at_devices(&self) {
        self.hosts().retain(|host| {
            host.upgrade().is_some_and(|host| {
                host.free_caller();
                host.report_broken_queues();
                true
            })
        });
    }
}

/// Tells of stalls that came to those that were told of, by schedule.
fn report_stalls(core: &Core, told: &mut HashMap<Name, u64>) {
    for (schedule, Stalls { count, last, .. }) in core.stalls() {
        let before = told.insert(schedule.clone(), count).unwrap_or(0);
        // One that was made anew under the name counts from 0.
        let stalls = if count < before { count } else { count - before };
        if let Some(last) = last.filter(|_| stalls > 0) {
            core.tell(Event::DeviceStalled { schedule, stall: super::stall(last), stalls });
        }
    }
}
