//! What a completion costs: a round trip through two slots, spun and parked on both sides; a token;
//! a wait that spins.

use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use rtvirtio_completion::{Costs, Gate, Mode, Slot, Spinner, Ticket, Tokens, Wakes};

/// How a side waits for its slot.
type Wait = fn(&Slot, Ticket) -> i32;

fn spun(slot: &Slot, ticket: Ticket) -> i32 {
    loop {
        if let Some(result) = slot.take(ticket) {
            return result;
        }
        spin_loop();
    }
}

fn parked(slot: &Slot, ticket: Ticket) -> i32 {
    slot.wait(ticket, None).unwrap_or(0)
}

/// What both sides of a round trip have.
struct Echo {
    /// The request's slot, which the echo waits on, and the answer's.
    slots: [Slot; 2],
    /// Requests whose ticket the echo has.
    ready: AtomicU32,
}

/// So many round trips.
fn round_trips(wait: Wait, count: u64) -> Duration {
    let echo = Arc::new(Echo { slots: [Slot::new(), Slot::new()], ready: AtomicU32::new(0) });
    let (to_echo, tickets) = std::sync::mpsc::channel::<(Ticket, Ticket)>();
    let other = Arc::clone(&echo);
    let thread = std::thread::spawn(move || {
        // Tickets for all of it come first: only slots carry what is measured.
        while let Ok((asked, answered)) = tickets.recv() {
            other.ready.fetch_add(1, Ordering::Release);
            let result = wait(&other.slots[0], asked);
            let _ = Wakes::default().complete(&other.slots[1], answered, result);
        }
    });
    let mut spent = Duration::ZERO;
    for turn in 0..count as u32 {
        let (Some(asked), Some(answered)) = (echo.slots[0].submit(), echo.slots[1].submit()) else {
            unreachable!("both were taken")
        };
        to_echo.send((asked, answered)).unwrap();
        while echo.ready.load(Ordering::Acquire) == turn {
            std::thread::yield_now();
        }
        // Time to fall asleep, if it does.
        std::thread::sleep(Duration::from_micros(20));
        let began = Instant::now();
        Wakes::default().complete(&echo.slots[0], asked, 1).unwrap();
        black_box(wait(&echo.slots[1], answered));
        spent += began.elapsed();
    }
    drop(to_echo);
    thread.join().unwrap();
    spent
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("round trip");
    for (name, wait) in [("spun", spun as Wait), ("parked", parked as Wait)] {
        group.bench_function(name, |b| b.iter_custom(|count| round_trips(wait, count)));
    }
    group.finish();

    let costs = Costs::calibrate();
    println!("{costs:?}");
    let tokens = Arc::new(Tokens::new().unwrap());
    let start = Instant::now();
    let ns = || start.elapsed().as_nanos() as u64 + 1;
    let mut gate = Gate::new(Arc::clone(&tokens), &costs);
    criterion.bench_function("token: enter and leave", |b| {
        b.iter(|| {
            let now = ns();
            black_box(gate.enter(now));
            gate.leave(now);
        });
    });
    criterion.bench_function("token: enter again", |b| {
        b.iter(|| black_box(gate.enter(ns())));
    });
    drop(gate);
    let mut spinner = Spinner::new(tokens, Mode::Adaptive, costs);
    criterion.bench_function("wait that ends at the second look", |b| {
        b.iter(|| {
            let mut looks = 0;
            spinner.wait(
                || {
                    looks += 1;
                    (looks == 2).then_some(looks)
                },
                || 0,
            )
        });
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().noise_threshold(0.05).sample_size(20);
    targets = bench
}
criterion_main!(benches);
