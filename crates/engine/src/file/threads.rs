//! Threads that do what would block: they start as they are needed, up to [`MAX_THREADS`], and
//! end with the engine, after all that was asked of them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::thread::CpuSet;

use super::image::Image;
use crate::AbortOnPanic;
use crate::{Completions, Operation, Request, Segment, Token};

/// Threads of one disk.
const MAX_THREADS: usize = 8;

/// A request on its way to a thread.
pub(super) struct Job {
    token: Token,
    operation: Operation,
    offset: u64,
    length: u64,
    segments: *const Segment,
    count: usize,
    completions: Arc<dyn Completions>,
}

// SAFETY: whoever started the request keeps its segments in place until it is told the result.
unsafe impl Send for Job {}

impl Job {
    pub(super) fn new(request: &Request<'_>, completions: &Arc<dyn Completions>) -> Self {
        Self {
            token: request.token,
            operation: request.operation,
            offset: request.offset,
            length: request.length,
            segments: request.segments.as_ptr(),
            count: request.segments.len(),
            completions: Arc::clone(completions),
        }
    }

    fn perform(self, image: &Image) {
        // SAFETY: the segments are still in place: the result is told below.
        let segments = unsafe { std::slice::from_raw_parts(self.segments, self.count) };
        let result = image.perform(&Request {
            token: self.token,
            operation: self.operation,
            offset: self.offset,
            length: self.length,
            segments,
            buffer: None,
            scratch: Segment::EMPTY,
        });
        self.completions.complete(self.token, result);
    }
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: Vec<JoinHandle<()>>,
    idle: usize,
    stopping: bool,
}

struct Shared {
    image: Arc<Image>,
    queue: Mutex<Queue>,
    more: Condvar,
    /// The processors of the thread that opened the disk. A thread inherits those of the
    /// IOThread that starts it, which may be pinned.
    cpus: Option<CpuSet>,
}

/// The threads.
pub(super) struct Threads(Arc<Shared>);

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").finish_non_exhaustive()
    }
}

impl Threads {
    pub(super) fn new(image: Arc<Image>) -> Self {
        Self(Arc::new(Shared {
            image,
            queue: Mutex::default(),
            more: Condvar::new(),
            cpus: rustix::thread::sched_getaffinity(None).ok(),
        }))
    }

    /// Has the job done. Its result comes through its completions.
    pub(super) fn submit(&self, job: Job) -> Result<(), Errno> {
        let mut queue = self.0.lock();
        queue.jobs.push_back(job);
        if queue.jobs.len() > queue.idle && queue.threads.len() < MAX_THREADS {
            let shared = Arc::clone(&self.0);
            let name = "disk-helper".to_owned();
            match std::thread::Builder::new().name(name).spawn(move || {
                let _fatal = AbortOnPanic::new();
                shared.work();
            }) {
                Ok(thread) => queue.threads.push(thread),
                Err(_) if queue.threads.is_empty() => {
                    queue.jobs.pop_back();
                    return Err(Errno::AGAIN);
                }
                Err(_) => {}
            }
        }
        drop(queue);
        self.0.more.notify_one();
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics under the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        if let Some(cpus) = &self.cpus {
            let _ = rustix::thread::sched_setaffinity(None, cpus);
        }
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                job.perform(&self.image);
                queue = self.lock();
            } else if queue.stopping {
                return;
            } else {
                queue.idle += 1;
                queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            }
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.stopping = true;
        let threads = std::mem::take(&mut queue.threads);
        drop(queue);
        self.0.more.notify_all();
        for thread in threads {
            // The last holder of a disk may be what a completion let go of, on a thread of its own.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
