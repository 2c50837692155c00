//! What an IOThread does for an engine, one ring and no virtqueue.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use io_uring::IoUring;
use rtvirtio_engine::ram::RamEngine;
use rtvirtio_engine::{
    CommandRing, Completions, Engine, Operation, Outcome, Request, SCRATCH_BYTES, Segment,
    SubmitContext, Token, nvme,
};
use rtvirtio_units::Bytes;
use rustix::io::Errno;

/// Longer than any request takes.
const LONG: Duration = Duration::from_secs(20);

#[derive(Default)]
pub(crate) struct Results {
    told: Mutex<HashMap<u64, Result<(), Errno>>>,
    more: Condvar,
}

impl Completions for Results {
    fn complete(&self, token: Token, result: Result<(), Errno>) {
        let twice = self.told.lock().unwrap().insert(token.0, result);
        assert!(twice.is_none(), "told twice");
        self.more.notify_all();
    }
}

impl Results {
    fn take(&self, token: u64) -> Result<(), Errno> {
        let told = self.told.lock().unwrap();
        let (mut told, timeout) =
            self.more.wait_timeout_while(told, LONG, |t| !t.contains_key(&token)).unwrap();
        assert!(!timeout.timed_out(), "request {token} hangs");
        told.remove(&token).unwrap()
    }
}

pub(crate) struct Driver {
    pub(crate) engine: Box<dyn Engine>,
    ring: IoUring,
    /// For engines that need one.
    pub(crate) commands: Option<CommandRing>,
    /// Of the one request that may need it.
    scratch: Box<[u64; SCRATCH_BYTES / 8]>,
    file: Option<u32>,
    results: Arc<dyn Completions>,
    told: Arc<Results>,
    next: u64,
    in_ring: HashMap<u64, u64>,
    elsewhere: Vec<u64>,
}

/// A request's memory: it stays in place until the result is known.
pub(crate) struct Memory(Vec<Vec<u8>>, usize);

impl Memory {
    /// Pieces of these lengths, `misaligned` bytes off an aligned address.
    pub(crate) fn new(lengths: &[usize], misaligned: usize) -> Self {
        let piece = |&length: &usize| {
            let mut bytes = vec![0xee_u8; length + 4096 + misaligned];
            // Vec<u8> has any alignment: start where it has 4096.
            let skip = bytes.as_ptr().align_offset(4096);
            bytes.truncate(skip + misaligned + length);
            bytes
        };
        Self(lengths.iter().map(piece).collect(), misaligned)
    }

    pub(crate) fn segments(&mut self) -> Vec<Segment> {
        let off = self.1;
        let segment = |bytes: &mut Vec<u8>| {
            let start = bytes.as_ptr().align_offset(4096) + off;
            Segment::new(bytes.as_mut_ptr().wrapping_add(start), bytes.len() - start)
        };
        self.0.iter_mut().map(segment).collect()
    }

    pub(crate) fn fill(&mut self, data: &[u8]) {
        let mut data = data.iter();
        for bytes in &mut self.0 {
            let start = bytes.as_ptr().align_offset(4096) + self.1;
            bytes[start..].iter_mut().zip(data.by_ref()).for_each(|(to, from)| *to = *from);
        }
    }

    pub(crate) fn content(&self) -> Vec<u8> {
        let piece = |bytes: &Vec<u8>| bytes[bytes.as_ptr().align_offset(4096) + self.1..].to_vec();
        self.0.iter().flat_map(piece).collect()
    }
}

/// So many bytes at their front.
fn first_of(segments: &[Segment], mut bytes: usize) -> Vec<Segment> {
    let cut = |segment: &Segment| {
        let part = bytes.min(segment.len());
        bytes -= part;
        Segment::new(segment.base(), part)
    };
    segments.iter().map(cut).filter(|segment| !segment.is_empty()).collect()
}

/// Drops so many bytes at their front.
fn advance(segments: &mut Vec<Segment>, mut bytes: usize) {
    for segment in segments.iter_mut() {
        let step = bytes.min(segment.len());
        segment.advance(step);
        bytes -= step;
    }
    segments.retain(|segment| !segment.is_empty());
}

impl Driver {
    pub(crate) fn new(engine: Box<dyn Engine>) -> Self {
        let why = "io_uring, which sysctl kernel.io_uring_disabled or a seccomp filter may refuse";
        let ring = IoUring::new(64).expect(why);
        let file = engine.file().map(|fd| {
            use std::os::fd::AsRawFd;
            ring.submitter().register_files(&[fd.as_raw_fd()]).unwrap();
            0
        });
        let told = Arc::new(Results::default());
        let commands = engine.commands().map(|kind| CommandRing::new(kind, 64, 128).unwrap());
        Self {
            engine,
            ring,
            commands,
            scratch: Box::default(),
            file,
            results: Arc::clone(&told) as _,
            told,
            next: 0,
            in_ring: HashMap::new(),
            elsewhere: Vec::new(),
        }
    }

    /// From here on, the engine's file is named by its descriptor.
    pub(crate) fn unregister_file(&mut self) {
        self.file = None;
    }

    /// Submits what has been started, and takes the file from the ring's table.
    pub(crate) fn submit_and_withdraw_file(&mut self) {
        self.ring.submit().unwrap();
        self.ring.submitter().register_files_update(0, &[-1]).unwrap();
    }

    /// Drops the engine for one of no use.
    pub(crate) fn drop_engine(&mut self) {
        let nothing = RamEngine::new(Bytes::new(0), Duration::ZERO).unwrap();
        drop(std::mem::replace(&mut self.engine, Box::new(nothing)));
    }

    /// Registers the only segment as fixed buffer 0.
    pub(crate) fn register(&mut self, segment: Segment) {
        let buffer = libc::iovec { iov_base: segment.base().cast(), iov_len: segment.len() };
        // SAFETY: the caller keeps the memory as long as the driver.
        unsafe { self.ring.submitter().register_buffers(&[buffer]) }.unwrap();
    }

    pub(crate) fn start(
        &mut self,
        token: u64,
        operation: Operation,
        offset: u64,
        length: u64,
        segments: &[Segment],
        buffer: Option<u16>,
    ) -> Outcome {
        let token = Token(token);
        let scratch = Segment::new(self.scratch.as_mut_ptr().cast(), SCRATCH_BYTES);
        let request = Request { token, operation, offset, length, segments, buffer, scratch };
        let mut submission = self.ring.submission();
        let mut commands = self.commands.as_mut().map(CommandRing::submission);
        let mut lent = SubmitContext {
            submission: &mut submission,
            commands: commands.as_mut(),
            file: self.file,
            completions: &self.results,
        };
        self.engine.start(&request, &mut lent)
    }

    /// Waits for a completion queue entry: token and result.
    pub(crate) fn reap(&mut self) -> (u64, i32) {
        self.ring.submit_and_wait(1).unwrap();
        let entry = self.ring.completion().next().unwrap();
        (entry.user_data(), entry.result())
    }

    /// Waits for a command: token and result.
    fn reap_command(&mut self) -> (u64, Result<(), Errno>) {
        let commands = self.commands.as_mut().unwrap();
        commands.wait().unwrap();
        let (token, raw) = commands.take().unwrap();
        (token, nvme::result(raw))
    }

    pub(crate) fn told(&self, token: u64) -> Result<(), Errno> {
        self.told.take(token)
    }

    /// Starts a request, of which there may be several: see [`Self::finish_all`].
    pub(crate) fn run_later(
        &mut self,
        token: u64,
        operation: Operation,
        offset: u64,
        length: u64,
        segments: &[Segment],
    ) {
        let before = self.ring.submission().len();
        match self.start(token, operation, offset, length, segments, None) {
            Outcome::Done(result) => result.unwrap(),
            Outcome::Busy => panic!("request {token} is one too many"),
            Outcome::Started if self.ring.submission().len() > before => {
                self.in_ring.insert(token, length);
            }
            Outcome::Started => self.elsewhere.push(token),
        }
    }

    /// Waits for all that [`Self::run_later`] started; none is short.
    pub(crate) fn finish_all(&mut self) {
        if self.commands.is_some() {
            let mut left: HashSet<u64> = self.elsewhere.drain(..).collect();
            while !left.is_empty() {
                let (token, result) = self.reap_command();
                assert!(left.remove(&token), "request {token} ends once");
                assert_eq!(result, Ok(()));
            }
        }
        while !self.in_ring.is_empty() {
            let (token, result) = self.reap();
            let length = self.in_ring.remove(&token).expect("ends once");
            assert_eq!(u64::try_from(result), Ok(length));
        }
        for token in std::mem::take(&mut self.elsewhere) {
            assert_eq!(self.told(token), Ok(()));
        }
    }

    /// One request, from start to end.
    pub(crate) fn run(
        &mut self,
        operation: Operation,
        mut offset: u64,
        length: u64,
        segments: &[Segment],
        buffer: Option<u16>,
    ) -> Result<(), Errno> {
        let mut left = length;
        let mut segments = segments.to_vec();
        let most = self.engine.transfer_limits().of(operation);
        loop {
            self.next += 1;
            let token = self.next;
            if self.commands.is_some() {
                // Cut as the engine says; a part ends whole.
                let part = left.min(most);
                let first = first_of(&segments, part as usize);
                match self.start(token, operation, offset, part, &first, buffer) {
                    Outcome::Done(result) => result?,
                    Outcome::Busy => panic!("an empty queue is not busy"),
                    Outcome::Started => {
                        let (of, result) = self.reap_command();
                        assert_eq!(of, token);
                        result?;
                    }
                }
                if part == left {
                    return Ok(());
                }
                offset += part;
                left -= part;
                advance(&mut segments, part as usize);
                continue;
            }
            match self.start(token, operation, offset, left, &segments, buffer) {
                Outcome::Done(result) => return result,
                Outcome::Busy => panic!("an empty queue is not busy"),
                Outcome::Started => {}
            }
            let in_ring = !self.ring.submission().is_empty();
            if !in_ring {
                return self.told(token);
            }
            let (of, result) = self.reap();
            assert_eq!(of, token);
            match u64::try_from(result) {
                Err(_) => return Err(Errno::from_raw_os_error(-result)),
                Ok(bytes) if bytes == left => return Ok(()),
                Ok(0) => return Err(Errno::IO),
                Ok(bytes) => {
                    // Short: the rest anew.
                    offset += bytes;
                    left -= bytes;
                    advance(&mut segments, bytes as usize);
                }
            }
        }
    }

    pub(crate) fn read(&mut self, offset: u64, lengths: &[usize]) -> Result<Vec<u8>, Errno> {
        self.read_at(offset, lengths, 0)
    }

    pub(crate) fn read_at(
        &mut self,
        offset: u64,
        lengths: &[usize],
        misaligned: usize,
    ) -> Result<Vec<u8>, Errno> {
        let mut memory = Memory::new(lengths, misaligned);
        let length = lengths.iter().sum::<usize>() as u64;
        let segments = memory.segments();
        self.run(Operation::Read, offset, length, &segments, None)?;
        Ok(memory.content())
    }

    pub(crate) fn write(
        &mut self,
        offset: u64,
        data: &[u8],
        lengths: &[usize],
    ) -> Result<(), Errno> {
        self.write_at(offset, data, lengths, 0, false)
    }

    pub(crate) fn write_at(
        &mut self,
        offset: u64,
        data: &[u8],
        lengths: &[usize],
        misaligned: usize,
        durable: bool,
    ) -> Result<(), Errno> {
        assert_eq!(lengths.iter().sum::<usize>(), data.len());
        let mut memory = Memory::new(lengths, misaligned);
        memory.fill(data);
        let segments = memory.segments();
        self.run(Operation::Write { durable }, offset, data.len() as u64, &segments, None)
    }

    pub(crate) fn range(
        &mut self,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Result<(), Errno> {
        self.run(operation, offset, length, &[], None)
    }
}
