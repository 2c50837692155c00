//! What a request of 4 KiB costs where engines answer at once.

use std::fs::File;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use io_uring::IoUring;
use rtvirtio_engine::file::{Aio, FileConfig, FileEngine, FileSource};
use rtvirtio_engine::ram::RamEngine;
use rtvirtio_engine::{
    Completions, Engine, Operation, Outcome, Request, Segment, SubmitContext, Token,
};
use rtvirtio_units::Bytes;
use rustix::io::Errno;

const SIZE: u64 = 64 << 20;

struct Nobody;

impl Completions for Nobody {
    fn complete(&self, _: Token, _: Result<(), Errno>) {}
}

fn requests(c: &mut Criterion, name: &str, engine: &dyn Engine) {
    let mut ring = IoUring::new(8).unwrap();
    let completions: Arc<dyn Completions> = Arc::new(Nobody);
    let mut memory = vec![1_u8; 4096];
    let segments = [Segment::new(memory.as_mut_ptr(), memory.len())];
    for (verb, operation) in
        [("write", Operation::Write { durable: false }), ("read", Operation::Read)]
    {
        let mut block = 0;
        c.bench_function(&format!("{name} {verb} 4 KiB"), |b| {
            b.iter(|| {
                // A stride that visits every block, in no order that a prefetcher knows.
                block = (block + 7919) % (SIZE / 4096);
                let request = Request {
                    token: Token(1),
                    operation,
                    offset: block * 4096,
                    length: 4096,
                    segments: &segments,
                    buffer: None,
                    scratch: Segment::EMPTY,
                };
                let mut submission = ring.submission();
                let submission = &mut submission;
                let completions = &completions;
                let mut lent =
                    SubmitContext { submission, commands: None, file: None, completions };
                assert_eq!(
                    black_box(engine.start(black_box(&request), &mut lent)),
                    Outcome::Done(Ok(()))
                );
            });
        });
    }
}

fn engines(c: &mut Criterion) {
    let ram = RamEngine::new(Bytes::new(SIZE), Duration::ZERO).unwrap();
    requests(c, "ram", &ram);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("disk");
    File::create(&path).unwrap().set_len(SIZE).unwrap();
    let file = FileEngine::open(FileConfig {
        source: FileSource::Path(path),
        direct: false,
        read_only: false,
        explicit_raw: false,
        block_size: None,
        aio: Aio::Auto,
    })
    .unwrap();
    requests(c, "inline", &file);
}

criterion_group! {
    name = benches;
    config = Criterion::default().noise_threshold(0.05);
    targets = engines
}
criterion_main!(benches);
