use super::*;
use crate::costs::Interrupt;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SLICE: u64 = 2_800_000;
/// Nobody is far.
fn free() -> Costs {
    let none = Interrupt::default();
    Costs { resume: Nanos::ZERO, far: Nanos::ZERO, idle: none, busy: none, ..Costs::default() }
}

/// Runs CPUs until `until`; `ended` says what a thread does whose burst has ended: goes on for so
/// long, or sleeps for so long (0: for ever) until its next one of 0.1 ms.
fn run(
    cpus: &mut Cpus,
    events: &mut Events<Event>,
    until: u64,
    ended: impl Fn(u32) -> Result<u64, u64>,
) {
    events.push(10 * MS, Event::Sample);
    while let Some(event) = events.next(until) {
        match event {
            Event::Cpu { cpu, stamp } => {
                let Some(thread) = cpus.ends(cpu, stamp, events) else { continue };
                match ended(thread) {
                    Ok(burst) => cpus.burst(thread, burst, events),
                    Err(pause) => {
                        cpus.sleep(thread, events);
                        if pause > 0 {
                            events.after(pause, Event::Burn { burner: thread, stamp: 100 });
                        }
                    }
                }
            }
            Event::Burn { burner, stamp } => {
                cpus.wake(burner, u64::from(stamp) * US, Waker::Timer, events);
            }
            Event::Wake { thread } => cpus.arrive(thread, events),
            _ => {
                cpus.balance(events);
                events.after(10 * MS, Event::Sample);
            }
        }
    }
    events.now = until;
}

fn machine(count: u16, allowed: &[u128]) -> (Cpus, Events<Event>, Vec<u32>) {
    let (mut cpus, mut events) = (Cpus::new(count, SLICE, free()), Events::default());
    let threads: Vec<u32> =
        allowed.iter().map(|&allowed| cpus.spawn(Who::Burner(0), allowed)).collect();
    for &thread in &threads {
        cpus.wake(thread, ENDLESS, Waker::Timer, &mut events);
    }
    (cpus, events, threads)
}

#[test]
fn two_that_never_sleep_share_a_cpu_half_and_half() {
    let (mut cpus, mut events, threads) = machine(1, &[1, 1]);
    run(&mut cpus, &mut events, 1_000 * MS, |_| Ok(ENDLESS));
    for thread in threads {
        let (ran, waited) = cpus.times(thread, 1_000 * MS);
        // To within two slices.
        assert!(ran.abs_diff(500 * MS) <= 6 * MS, "{ran}");
        assert_eq!(ran + waited, 1_000 * MS);
    }
}

/// Has a thread wake up at `at` for a burst.
fn wakes(events: &mut Events<Event>, thread: u32, at: u64, burst: u64) {
    events.push(at, Event::Burn { burner: thread, stamp: (burst / US) as u32 });
}

#[test]
fn thread_that_wakes_waits_for_the_slice_of_one_that_has_just_begun() {
    let (mut cpus, mut events, threads) = machine(1, &[1]);
    let sleeper = cpus.spawn(Who::Burner(1), 1);
    wakes(&mut events, sleeper, MS, 100 * US);
    run(&mut cpus, &mut events, 6 * MS, |_| Err(0));
    // The slice is over at 2.8 ms; that is noticed at the tick, at 4.
    assert_eq!(cpus.times(sleeper, 6 * MS), (100 * US, 3 * MS));
    assert_eq!(cpus.times(threads[0], 6 * MS), (6 * MS - 100 * US, 100 * US));
}

#[test]
fn thread_that_wakes_takes_the_cpu_at_once_if_it_has_had_less() {
    let (mut cpus, mut events, threads) = machine(1, &[1]);
    let sleeper = cpus.spawn(Who::Burner(1), 1);
    wakes(&mut events, sleeper, MS, 100 * US);
    // At 4.1 ms it sleeps, 1.45 ms short of the mean of 1.1 and 4 ms.
    run(&mut cpus, &mut events, 8 * MS, |_| Err(900 * US));
    // So it has waited no longer when it ran at 5, 6 and 7 ms.
    assert_eq!(cpus.times(sleeper, 8 * MS), (400 * US, 3 * MS));
    assert_eq!(cpus.times(threads[0], 8 * MS).1, 400 * US);
}

#[test]
fn thread_that_gave_way_goes_on_for_what_that_cost() {
    let costs = Costs { resume: Nanos::from_micros(7), ..free() };
    let (mut cpus, mut events) = (Cpus::new(1, SLICE, costs), Events::default());
    let threads = [0, 1].map(|burner| cpus.spawn(Who::Burner(burner), 1));
    wakes(&mut events, threads[0], 0, 5 * MS);
    // It comes within the other one's slice, and gets the CPU at the end of it.
    wakes(&mut events, threads[1], MS, 100 * US);
    run(&mut cpus, &mut events, 9 * MS, |_| Err(0));
    assert_eq!(threads.map(|thread| cpus.times(thread, 9 * MS).0), [5_007 * US, 100 * US]);
}

#[test]
fn slice_that_is_over_ends_when_a_thread_comes() {
    let (mut cpus, mut events, _) = machine(1, &[1]);
    let sleepers: Vec<u32> = (0..2).map(|_| cpus.spawn(Who::Burner(1), 1)).collect();
    wakes(&mut events, sleepers[0], MS, 100 * US);
    wakes(&mut events, sleepers[1], 3 * MS, 100 * US);
    run(&mut cpus, &mut events, 4 * MS, |_| Err(0));
    // The first has the earlier deadline, the second follows it: neither waits for the tick.
    assert_eq!(cpus.times(sleepers[0], 4 * MS), (100 * US, 2 * MS));
    assert_eq!(cpus.times(sleepers[1], 4 * MS), (100 * US, 100 * US));
}

#[test]
fn thread_that_had_too_much_is_woken_where_it_was() {
    let (mut cpus, mut events) = (Cpus::new(2, SLICE, free()), Events::default());
    let own = cpus.spawn(Who::Burner(0), 0b01);
    let moving = cpus.spawn(Who::Burner(1), 0b11);
    wakes(&mut events, moving, 0, 2 * MS);
    wakes(&mut events, own, MS, 100 * MS);
    // It has had 2 ms where the mean is 1.5, and the other CPU is idle.
    wakes(&mut events, moving, 2 * MS + 500 * US, MS);
    run(&mut cpus, &mut events, 6 * MS, |_| Err(0));
    // At the tick, at 4 ms, the idle CPU takes it.
    assert_eq!(cpus.times(moving, 6 * MS), (3 * MS, 1_500 * US));
    assert_eq!(cpus.idle(1, 6 * MS), 5 * MS);
}

#[test]
fn thread_that_has_just_run_is_not_pulled() {
    for (ran_until, waited) in [(300 * US, 100 * US), (800 * US, 3_100 * US)] {
        let (mut cpus, mut events) = (Cpus::new(2, SLICE, free()), Events::default());
        cpus.cpus.iter_mut().for_each(|cpu| cpu.pulls = Pulls::always());
        let moving = cpus.spawn(Who::Burner(0), 0b11);
        let own = [0b01, 0b10].map(|allowed| cpus.spawn(Who::Burner(1), allowed));
        wakes(&mut events, moving, 0, ran_until);
        wakes(&mut events, own[0], 850 * US, 100 * MS);
        wakes(&mut events, own[1], 0, MS);
        wakes(&mut events, moving, 900 * US, 100 * US);
        run(&mut cpus, &mut events, 5 * MS, |_| Err(0));
        // The second CPU is idle from 1 ms on: it takes what ran 0.7 ms ago, not what ran 0.2 ms ago.
        assert_eq!(cpus.times(moving, 5 * MS).1, waited);
    }
}

#[test]
fn other_cpu_has_to_be_interrupted_if_it_is_idle_or_gives_way() {
    let costs = |sender, delay, receiver| Interrupt {
        sender: Nanos::from_micros(sender),
        delay: Nanos::from_micros(delay),
        receiver: Nanos::from_micros(receiver),
    };
    let (idle, busy) = (costs(1, 10, 2), costs(3, 20, 4));
    let mut cpus = Cpus::new(2, SLICE, Costs { far: Nanos::from_micros(5), idle, busy, ..free() });
    let mut events = Events::default();
    let [here, there, waker] =
        [0b10, 0b01, 0b10].map(|allowed| cpus.spawn(Who::Burner(0), allowed));
    let burner = cpus.spawn(Who::Burner(1), 0b01);
    cpus.wake(waker, ENDLESS, Waker::Timer, &mut events);
    let waker = Waker::Thread(waker);
    assert_eq!(cpus.wake(there, 100 * US, waker, &mut events), US, "it is idle");
    run(&mut cpus, &mut events, MS, |_| Err(0));
    // It has needed 5 and 2 more, and its CPU was idle for the 10 before.
    assert_eq!((cpus.times(there, MS), cpus.idle(0, MS)), ((107 * US, 0), 893 * US));
    // Now the CPU is taken, by one whose slice has begun, and is over.
    cpus.wake(burner, ENDLESS, Waker::Timer, &mut events);
    assert_eq!(cpus.wake(there, 100 * US, waker, &mut events), 0, "its slice has begun");
    run(&mut cpus, &mut events, 9 * MS, |_| Err(0));
    let before = cpus.times(there, 9 * MS);
    assert_eq!(before.0, 212 * US, "it is far all the same");
    assert_eq!(cpus.wake(there, 100 * US, waker, &mut events), 3 * US, "it has had more");
    run(&mut cpus, &mut events, 10 * MS, |_| Err(0));
    assert_eq!(cpus.times(there, 10 * MS), (before.0 + 109 * US, before.1 + 20 * US));
    // On its own CPU nobody is interrupted, and nothing is far.
    assert_eq!(cpus.wake(here, 100 * US, waker, &mut events), 0);
    assert_eq!(cpus.threads[here as usize].left, 100 * US);
    // Its own timer comes to where it is; a device's interrupt does not.
    assert_eq!(cpus.wake(there, 100 * US, Waker::Timer, &mut events), 0);
}

#[test]
fn busier_cpus_are_searched_less_for_an_idle_one() {
    let scan = |cpus: u16, busy: usize| {
        let allowed: Vec<u128> = (0..busy).map(bit).collect();
        let (mut cpus, mut events, _) = machine(cpus, &allowed);
        run(&mut cpus, &mut events, 1_000 * MS, |_| Ok(ENDLESS));
        cpus.scan
    };
    // Of n CPUs that are used u in the mean: n (1 - (1.17 u)^2).
    assert_eq!([scan(2, 0), scan(2, 1), scan(2, 2)], [2, 1, 0]);
    assert_eq!([scan(8, 4), scan(8, 6), scan(8, 7)], [5, 1, 0]);
    // Who finds none goes where it was, though another one is idle.
    let (mut cpus, mut events, _) = machine(8, &[1, 2, 4, 8, 16, 32, 64]);
    let sleeper = cpus.spawn(Who::Burner(1), 0xFF);
    run(&mut cpus, &mut events, 1_000 * MS, |_| Ok(ENDLESS));
    cpus.wake(sleeper, MS, Waker::Timer, &mut events);
    assert_eq!((cpus.threads[sleeper as usize].cpu, cpus.idle & bit(7)), (0, bit(7)));
}

#[test]
fn idle_cpu_takes_what_waits_elsewhere() {
    let (mut cpus, mut events) = (Cpus::new(2, SLICE, free()), Events::default());
    cpus.cpus.iter_mut().for_each(|cpu| cpu.pulls = Pulls::always());
    let short = cpus.spawn(Who::Burner(0), 0b10);
    cpus.wake(short, MS, Waker::Timer, &mut events);
    let long: Vec<u32> = (0..2).map(|_| cpus.spawn(Who::Burner(0), 0b11)).collect();
    for &thread in &long {
        cpus.wake(thread, ENDLESS, Waker::Timer, &mut events);
    }
    run(&mut cpus, &mut events, 9 * MS, |_| Err(0));
    // Both wait for the first CPU until the other is idle, at 1 ms.
    let ran: u64 = long.iter().map(|&thread| cpus.times(thread, 9 * MS).0).sum();
    assert_eq!(ran, 9 * MS + 8 * MS);
    assert_eq!((cpus.idle(0, 9 * MS), cpus.idle(1, 9 * MS)), (0, 0));
}

#[test]
fn cpu_looks_the_less_often_the_less_often_it_finds_a_thread() {
    let (mut cpus, mut events) = (Cpus::new(2, SLICE, free()), Events::default());
    // Where one waits that has just run.
    let own = [0b01, 0b10].map(|allowed| cpus.spawn(Who::Burner(0), allowed));
    let moving = cpus.spawn(Who::Burner(0), 0b01);
    events.now = MS;
    cpus.wake(own[0], ENDLESS, Waker::Timer, &mut events);
    cpus.wake(moving, ENDLESS, Waker::Timer, &mut events);
    cpus.allow(moving, 0b11, &mut events);
    cpus.threads[moving as usize].left_at = events.now.max(1);
    let ratios = [0, 3_000, 20_000].map(|times| {
        for _ in 0..times {
            cpus.pull(1, &mut events);
        }
        cpus.cpus[1].pulls.ratio()
    });
    assert_eq!((ratios[0], ratios[2]), (512, 0));
    assert!((1..200).contains(&ratios[1]), "{ratios:?}");
}

#[test]
fn three_on_two_cpus_have_two_thirds_each() {
    // In the long run: who moves is who waits at that moment.
    let (mut cpus, mut events, threads) = machine(2, &[3, 3, 3]);
    run(&mut cpus, &mut events, 60_000 * MS, |_| Ok(ENDLESS));
    for thread in threads {
        let ran = cpus.times(thread, 60_000 * MS).0;
        assert!((38_000 * MS..42_000 * MS).contains(&ran), "{ran}");
    }
}

#[test]
fn loads_are_evened_out_among_cpus_that_threads_may_run_on() {
    // The third one is idle, and nobody's.
    let (mut cpus, mut events, threads) = machine(3, &[1, 1, 1, 1, 0b010]);
    for &thread in &threads[..4] {
        cpus.allow(thread, 0b011, &mut events);
    }
    run(&mut cpus, &mut events, 6_000 * MS, |_| Ok(ENDLESS));
    for &thread in &threads[..4] {
        // Of one CPU they would have a quarter.
        let ran = cpus.times(thread, 6_000 * MS).0;
        assert!(ran > 1_800 * MS, "{ran}");
    }
    assert_eq!(cpus.idle(2, 6_000 * MS), 6_000 * MS);
}

#[test]
fn thread_that_may_no_longer_run_there_goes_elsewhere() {
    let (mut cpus, mut events, threads) = machine(2, &[3, 3]);
    run(&mut cpus, &mut events, 10 * MS, |_| Ok(ENDLESS));
    for &thread in &threads {
        cpus.allow(thread, 0b10, &mut events);
    }
    run(&mut cpus, &mut events, 110 * MS, |_| Ok(ENDLESS));
    assert_eq!(cpus.idle(0, 110 * MS), 100 * MS);
    assert_eq!(cpus.idle(1, 110 * MS), 0);
    let ran: u64 = threads.iter().map(|&thread| cpus.times(thread, 110 * MS).0).sum();
    assert_eq!(ran, 120 * MS);
}

#[test]
fn times_of_a_cpu_add_up() {
    let (mut cpus, mut events) = (Cpus::new(3, SLICE, free()), Events::default());
    let threads: Vec<u32> = (0..7).map(|_| cpus.spawn(Who::Burner(0), 0b111)).collect();
    for &thread in &threads {
        wakes(&mut events, thread, u64::from(thread) * MS / 3, 100 * US);
    }
    run(&mut cpus, &mut events, 500 * MS, |thread| Err(u64::from(thread) * MS / 10 + 1));
    let ran: u64 = threads.iter().map(|&thread| cpus.times(thread, 500 * MS).0).sum();
    let idle: u64 = (0..3).map(|cpu| cpus.idle(cpu, 500 * MS)).sum();
    assert_eq!(ran + idle, 1_500 * MS);
}
