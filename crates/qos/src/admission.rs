//! Whether promises fit a device, before they are made.
//!
//! # Terms
//! A *wish* is a promise that somebody asks for, to be kept for a part of the requests that its percentile
//! states, 99.9 or more. A device's *spread* is the 99.9th percentile of its
//! service time over the mean, its *overhead* what a response takes beyond that.
//!
//! # The test
//! VMs are heard in their order; the wishes of one fit if, with all that fitted before,
//!
//! 1. no more than [`USABLE`] of the device is needed ([`Rate::channels`](crate::Rate::channels));
//! 2. each task that waits for its requests, at most `depth` at a time, comes to its rate: the mean
//!    response, overhead + cost + `U² c / m` for the other promises (utilisation `U`, mean cost `c`, `m`
//!    channels), is no longer than `depth` periods. Who only just comes to its rate goes first, since
//!    it is due first ([`crate::Scheduler`]), and background gives way to it;
//! 3. each deadline is no shorter than [`Fit::least`]: the means of what a response is made of
//!    (overhead, service, the wait for a transfer of the background to end, that for other promises)
//!    and the root of the sum of the squares of what each is more than that in one of 1,000, or of as many as
//!    the wish's percentile states. The wait for other promises is at most all their bursts at once. What is
//!    known of a device ends at 99.9; beyond, its service time and the host's lateness are taken to grow by as
//!    much with each decade as they do from 99 to 99.9.
//!
//! It is a statistic, not a proof: `what_is_admitted_is_kept_and_what_is_refused_is_not` simulates
//! random sets, `rtvirtio-lab bench qos-admission` measures some.
//!
//! # Properties (tests of the same name)
//! - `what_is_admitted_is_kept_and_what_is_refused_is_not`, mostly;
//! - `what_is_admitted_for_one_in_10_000_is_kept`, mostly;
//! - `what_a_refusal_says_would_fit_does`;
//! - `wish_that_is_refused_does_not_count`;
//! - `fit_grows_worse_with_each_further_promise`;
//! - `of_equal_wishes_the_first_speaks_for_all`: a VM is tested against different wishes, however many VMs have them.

use std::cell::LazyCell;

use rtvirtio_units::{Iops, Nanos, Percentile};

use crate::{Device, Kind, MAX_TRANSFER, PAGE, Promise};

/// What promises may need of a device. The rest is what its channels are idle for between the end
/// of a request and the start of the next.
pub const USABLE: f64 = 0.97;

/// The rarest that is known of a device.
const ONE_IN_1000: f64 = 1e-3;

/// A device as the test sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Curve {
    /// Its service curve.
    pub device: Device,
    /// 99.9th percentile of its service time, of the mean; 1 or more.
    pub spread: f64,
    /// By how much that grows from the 99th to the 99.9th percentile.
    pub spread_decade: f64,
    /// Of a response, what is neither service nor wait for the device.
    pub overhead: Nanos,
    /// How much longer than its mean that is in one of 1,000: the host was busy.
    pub jitter: Nanos,
    /// By how much that grows from one in 100 to one in 1,000.
    pub jitter_decade: Nanos,
}

/// A promise that somebody asks for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wish {
    /// What is to be promised.
    pub promise: Promise,
    /// Most requests that the task has under way, if it waits for them.
    pub depth: Option<u32>,
    /// Of its requests, those that are to end by the deadline; none, and below: 99.9.
    pub percentile: Option<Percentile>,
}

impl Wish {
    /// The part of its requests that may be late, no more than [`ONE_IN_1000`].
    fn beyond(&self) -> f64 {
        self.percentile.map_or(ONE_IN_1000, |of| (1.0 - of.fraction()).min(ONE_IN_1000))
    }
}

/// What the test says of a wish.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fit {
    /// The shortest deadline that could be kept beside all that is admitted: the wish's percentile of the
    /// response, as expected.
    pub least: Nanos,
    /// Why it cannot be promised, if it cannot.
    pub refusal: Option<Refusal>,
}

impl Fit {
    /// What the wish's percentile stays below, if it is admitted with this deadline. Who has time is
    /// let wait for who has not: up to its deadline, but hardly twice as long as it must.
    #[must_use]
    pub fn bound(&self, deadline: Nanos) -> Nanos {
        self.least.scale(2.0).min(deadline.max(self.least))
    }
}

/// Why a wish cannot be promised, and what could be.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// With those before it, its VM needs too much.
    #[error(
        "{:.1} % of the device would be promised, and {:.0} % can be; {} of its rates would fit",
        needed * 100.0, USABLE * 100.0, Percent(*most)
    )]
    Overload {
        /// Of the device, what would be promised.
        needed: f64,
        /// Of the VM's rates, what would fit, 0 to 1.
        most: f64,
    },
    /// A task that waits for its requests would not come to its rate.
    #[error("with {depth} at a time it comes to {:.0} requests a second at most", most.get())]
    Rate {
        /// Requests at a time.
        depth: u32,
        /// The most that it comes to.
        most: Iops,
    },
    /// The deadline is too short.
    #[error("the shortest deadline that can be kept is {least}")]
    Deadline {
        /// The shortest that can be kept.
        least: Nanos,
    },
    /// It fits, but what was promised to a VM before it would not be kept any more.
    #[error("beside it, what was promised before would not be kept: {broken}")]
    Other {
        /// Whose promise, in the order of the VMs.
        vm: usize,
        /// What of it.
        broken: Broken,
    },
}

/// What of a promise would not be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// Its rate.
    #[error("a rate")]
    Rate,
    /// Its deadline.
    #[error("a deadline")]
    Deadline,
}

struct Percent(f64);

impl std::fmt::Display for Percent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.0} %", (self.0 * 100.0).floor())
    }
}

/// Requests that a task may have at the device at once.
fn at_once(wish: &Wish) -> u32 {
    wish.depth.map_or(wish.promise.rate.burst, |depth| depth.min(wish.promise.rate.burst)).max(1)
}

/// A wish in seconds and channels.
#[derive(Debug, Clone, Copy)]
struct Need {
    channels: f64,
    /// Of a channel, by one request.
    cost: f64,
    at_once: f64,
}

impl Need {
    fn of(wish: &Wish, device: &Device) -> Self {
        let rate = &wish.promise.rate;
        let channels = rate.channels(device);
        let bytes = if rate.iops.is_none() { MAX_TRANSFER } else { PAGE };
        let cost = match (rate.iops, rate.bandwidth) {
            (Some(iops), Some(_)) => channels / iops.get(),
            _ => device.cost(Kind::Read, bytes).as_secs_f64(),
        };
        Self { channels, cost, at_once: at_once(wish).into() }
    }
}

/// What promises do to each other.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    channels: f64,
    /// Σ channels × cost.
    weighted: f64,
    /// Of a channel, by all that may come at once.
    backlog: f64,
}

impl Sum {
    fn with(self, need: &Need) -> Self {
        Self {
            channels: self.channels + need.channels,
            weighted: self.weighted + need.channels * need.cost,
            backlog: self.backlog + need.at_once * need.cost,
        }
    }
}

/// What of the rates and deadlines of one wish holds beside all in a sum, itself among them.
struct Outlook {
    least: Nanos,
    /// Requests a second that a task of its depth comes to.
    most: Option<f64>,
}

/// What is promised already: of equal wishes only the first, since the others fare as it does whatever comes. There may be
/// thousands of VMs, and each further one is tested against all of these.
#[derive(Debug, Default)]
struct Promised<'a>(Vec<(usize, &'a Wish)>);

impl<'a> Promised<'a> {
    fn add(&mut self, vm: usize, wishes: &'a [Wish]) {
        for wish in wishes {
            if !self.0.iter().any(|(_, known)| *known == wish) {
                self.0.push((vm, wish));
            }
        }
    }
}

impl Curve {
    /// What the test says of each wish. VMs are heard in this order, each with all its wishes: they
    /// fit together, or the VM gets nothing.
    #[must_use]
    pub fn admit<V: AsRef<[Wish]>>(&self, vms: &[V]) -> Vec<Vec<Fit>> {
        let mut sum = Sum::default();
        let mut promised = Promised::default();
        let mut heard = Vec::with_capacity(vms.len());
        for (vm, wishes) in vms.iter().enumerate() {
            let wishes = wishes.as_ref();
            let with = self.sum(sum, wishes);
            let refusals = self.refusals((sum, &promised.0), (with, wishes));
            let fits = refusals.iter().all(Option::is_none);
            if fits {
                sum = with;
                promised.add(vm, wishes);
            }
            heard.push((wishes, refusals, with, fits));
        }
        let fits = |(wishes, refusals, with, fits): (&[Wish], Vec<Option<Refusal>>, Sum, bool)| {
            let beside = if fits { sum } else { with };
            let fit = |(wish, refusal)| Fit { least: self.outlook(wish, &beside).least, refusal };
            wishes.iter().zip(refusals).map(fit).collect()
        };
        heard.into_iter().map(fits).collect()
    }

    /// Why one VM's wishes do not fit beside what others are promised, whether that fits or not.
    #[must_use]
    pub fn refusal<V: AsRef<[Wish]>>(&self, promised: &[V], wishes: &[Wish]) -> Option<Refusal> {
        let of_vm = |(vm, of): (usize, &V)| -> Vec<(usize, Wish)> {
            of.as_ref().iter().map(|wish| (vm, *wish)).collect()
        };
        let promised: Vec<_> = promised.iter().enumerate().flat_map(of_vm).collect();
        let known: Vec<(usize, &Wish)> = promised.iter().map(|(vm, wish)| (*vm, wish)).collect();
        let sum = known.iter().fold(Sum::default(), |sum, (_, wish)| self.sum(sum, &[**wish]));
        let with = self.sum(sum, wishes);
        self.refusals((sum, &known), (with, wishes)).into_iter().flatten().next()
    }

    fn sum(&self, sum: Sum, wishes: &[Wish]) -> Sum {
        wishes.iter().fold(sum, |sum, wish| sum.with(&Need::of(wish, &self.device)))
    }

    /// Of each of a VM's wishes, beside what is promised; both with their sums.
    fn refusals(
        &self,
        (sum, promised): (Sum, &[(usize, &Wish)]),
        (with, wishes): (Sum, &[Wish]),
    ) -> Vec<Option<Refusal>> {
        let usable = USABLE * f64::from(self.device.channels.max(1));
        // One answer for all of them, as they are asked for together: there may be thousands of promises.
        let broken = LazyCell::new(|| {
            let broken = |&(vm, wish): &(usize, &Wish)| self.outlook(wish, &with).broken(wish, vm);
            promised.iter().find_map(broken)
        });
        let refusal = |wish: &Wish| {
            if with.channels > usable {
                let wanted = with.channels - sum.channels;
                let most = ((usable - sum.channels) / wanted).clamp(0.0, 1.0);
                let needed = with.channels / usable * USABLE;
                return Some(Refusal::Overload { needed, most });
            }
            self.outlook(wish, &with).refusal(wish).or_else(|| *broken)
        };
        wishes.iter().map(refusal).collect()
    }

    fn outlook(&self, wish: &Wish, sum: &Sum) -> Outlook {
        let device = &self.device;
        let m = f64::from(device.channels.max(1));
        let need = Need::of(wish, device);
        let overhead = self.overhead.as_secs_f64();
        // Others' requests as one that arrives meets them.
        let cost = sum.weighted / sum.channels;
        let others = ((sum.channels - need.channels) / m).clamp(0.0, 1.0);
        let busy = others * others;
        let wait = busy * cost / m;
        let backlog = (sum.backlog - need.cost).max(0.0) / m;
        // Beyond that exponential: many arrivals, each even, at services nearly even.
        let beyond = wish.beyond();
        let decades = (ONE_IN_1000 / beyond).log10();
        let queue = 0.6 * cost * (busy / beyond).max(1.0).ln() / (m * (1.0 - others).max(1e-9));
        let transfer = device.cost(Kind::Write, MAX_TRANSFER).as_secs_f64();
        // The first of m transfers to end, each at any point of its own: its mean, and what it is
        // longer than in one of so many.
        let spread = (self.spread + decades * self.spread_decade.max(0.0)).max(1.0);
        let blocked = transfer / (m + 1.0);
        let blocked_long = transfer * spread.powf(1.0 / m) * (1.0 - beyond.powf(1.0 / m));
        let excess = [
            need.cost * (spread - 1.0),
            blocked_long - blocked,
            (queue.min(backlog) - wait).max(0.0),
            self.jitter.as_secs_f64() + decades * self.jitter_decade.as_secs_f64(),
        ];
        let excess = excess.into_iter().map(|x| x * x).sum::<f64>().sqrt();
        let mean = overhead + need.cost + wait;
        Outlook {
            least: Nanos::from_secs_f64(mean + blocked + excess),
            most: wish.depth.map(|depth| f64::from(depth) / mean),
        }
    }
}

impl Outlook {
    /// What does not hold of `wish`, if anything.
    fn refusal(&self, wish: &Wish) -> Option<Refusal> {
        let too_slow =
            self.most.zip(wish.promise.rate.iops).filter(|(most, iops)| *most < iops.get());
        if let Some((most, _)) = too_slow {
            let depth = wish.depth.unwrap_or(1);
            return Iops::new(most).ok().map(|most| Refusal::Rate { depth, most });
        }
        let is_late = self.least > wish.promise.deadline;
        is_late.then_some(Refusal::Deadline { least: self.least })
    }

    /// The same of one that was admitted before.
    fn broken(&self, wish: &Wish, vm: usize) -> Option<Refusal> {
        let broken = match self.refusal(wish)? {
            Refusal::Rate { .. } => Broken::Rate,
            _ => Broken::Deadline,
        };
        Some(Refusal::Other { vm, broken })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rate;
    use proptest::prelude::*;
    use rtvirtio_units::BytesPerSecond;

    fn reference() -> Curve {
        let device = Device {
            channels: 4,
            request: Nanos::new(212_500),
            kib: Nanos::new(9_375),
            flush: Nanos::from_micros(250),
        };
        Curve {
            device,
            spread: 2.4,
            spread_decade: 0.5,
            overhead: Nanos::from_micros(80),
            jitter: Nanos::ZERO,
            jitter_decade: Nanos::ZERO,
        }
    }

    fn wish(kib: u64, iops: f64, deadline_us: u64) -> Wish {
        let rate = Rate {
            iops: Some(Iops::new(iops).unwrap()),
            bandwidth: Some(BytesPerSecond::new((iops * kib as f64 * 1024.0) as u64)),
            burst: 2,
        };
        let deadline = Nanos::from_micros(deadline_us);
        Wish { promise: Promise { deadline, rate }, depth: Some(1), percentile: None }
    }

    /// Each of a VM of its own.
    fn alone(wishes: &[Wish]) -> Vec<Fit> {
        let vms: Vec<_> = wishes.iter().map(|wish| [*wish]).collect();
        reference().admit(&vms).into_iter().flatten().collect()
    }

    fn wishes() -> impl Strategy<Value = Vec<Wish>> {
        let kib = prop::sample::select(vec![4u64, 8, 16, 32, 64]);
        let one =
            (kib, 50.0..1_500.0, 1_000u64..40_000).prop_map(|(kib, iops, us)| wish(kib, iops, us));
        prop::collection::vec(one, 1..20)
    }

    /// VMs whose wishes are of few kinds.
    fn vms_of_few_kinds() -> impl Strategy<Value = Vec<Vec<Wish>>> {
        let kib = prop::sample::select(vec![4u64, 16, 64]);
        let kind =
            (kib, 20.0..400.0, 1_000u64..4_000).prop_map(|(kib, iops, us)| wish(kib, iops, us));
        let kinds = prop::collection::vec(kind, 1..4);
        let vm = prop::collection::vec(any::<prop::sample::Index>(), 1..3);
        (kinds, prop::collection::vec(vm, 1..30)).prop_map(|(kinds, vms)| {
            let of = |vm: Vec<prop::sample::Index>| -> Vec<Wish> {
                vm.iter().map(|kind| *kind.get(&kinds)).collect()
            };
            vms.into_iter().map(of).collect()
        })
    }

    /// As [`Curve::admit`] is defined: each VM beside all that is promised before it, wish by wish.
    fn admit_wish_by_wish(curve: &Curve, vms: &[Vec<Wish>]) -> Vec<Vec<Fit>> {
        let mut sum = Sum::default();
        let (mut promised, mut heard) = (Vec::new(), Vec::new());
        for (vm, wishes) in vms.iter().enumerate() {
            let with = curve.sum(sum, wishes);
            let refusals = curve.refusals((sum, &promised), (with, wishes));
            let fits = refusals.iter().all(Option::is_none);
            if fits {
                sum = with;
                promised.extend(wishes.iter().map(|wish| (vm, wish)));
            }
            heard.push((wishes, refusals, (!fits).then_some(with)));
        }
        let fits = |(wishes, refusals, with): (&Vec<Wish>, Vec<Option<Refusal>>, Option<Sum>)| {
            let beside = with.unwrap_or(sum);
            let fit = |(wish, refusal)| Fit { least: curve.outlook(wish, &beside).least, refusal };
            wishes.iter().zip(refusals).map(fit).collect()
        };
        heard.into_iter().map(fits).collect()
    }

    proptest! {
        #[test]
        fn of_equal_wishes_the_first_speaks_for_all(vms in vms_of_few_kinds()) {
            let curve = reference();
            prop_assert_eq!(curve.admit(&vms), admit_wish_by_wish(&curve, &vms));
            let mut promised = Promised::default();
            vms.iter().enumerate().for_each(|(vm, wishes)| promised.add(vm, wishes));
            prop_assert!(promised.0.len() <= 3, "{promised:?}");
        }

        #[test]
        fn what_a_refusal_says_would_fit_does(mut wishes in wishes()) {
            let fits = alone(&wishes);
            for (index, fit) in fits.iter().enumerate() {
                let promise = &mut wishes[index].promise;
                match fit.refusal {
                    Some(Refusal::Overload { most, .. }) if most > 0.01 => {
                        let part = |n: f64| n * most * 0.999;
                        promise.rate.iops = promise.rate.iops.map(|n| Iops::new(part(n.get())).unwrap());
                        let bandwidth = promise.rate.bandwidth.map(|n| part(n.get() as f64) as u64);
                        promise.rate.bandwidth = bandwidth.map(BytesPerSecond::new);
                    }
                    Some(Refusal::Deadline { least }) => promise.deadline = least,
                    _ => continue,
                }
                let again = alone(&wishes[..=index])[index].refusal;
                let is_another = !matches!(
                    (fit.refusal, again),
                    (Some(Refusal::Overload { .. }), Some(Refusal::Overload { .. }))
                        | (Some(Refusal::Deadline { .. }), Some(Refusal::Deadline { .. }))
                );
                prop_assert!(is_another, "{:?} and then {again:?}", fit.refusal);
                break;
            }
        }

        #[test]
        fn wish_that_is_refused_does_not_count(wishes in wishes()) {
            let fits = alone(&wishes);
            let is_admitted = |fit: &Fit| fit.refusal.is_none();
            let only: Vec<Wish> =
                wishes.iter().zip(&fits).filter(|(_, fit)| is_admitted(fit)).map(|(w, _)| *w).collect();
            let again = alone(&only);
            prop_assert!(again.iter().all(is_admitted));
            let before: Vec<Nanos> = fits.iter().filter(|f| is_admitted(f)).map(|f| f.least).collect();
            prop_assert_eq!(before, again.iter().map(|fit| fit.least).collect::<Vec<_>>());
        }

        #[test]
        fn fit_grows_worse_with_each_further_promise(wishes in wishes()) {
            let mut before = Nanos::ZERO;
            for number in 1..=wishes.len() {
                let fit = alone(&wishes[..number])[0];
                if fit.refusal.is_none() {
                    // Cheap ones among dear ones make the mean one cheaper.
                    prop_assert!(fit.least.get() * 10 >= before.get() * 9, "{} < {before}", fit.least);
                    before = fit.least;
                }
            }
        }
    }

    #[test]
    fn rarer_misses_need_longer_deadlines() {
        let wishes = vec![wish(4, 1_000.0, 10_000); 8];
        let least = |percentile: f64| {
            let percentile = Some(Percentile::new(percentile).unwrap());
            let wishes: Vec<_> = wishes.iter().map(|wish| Wish { percentile, ..*wish }).collect();
            alone(&wishes)[0].least
        };
        assert_eq!(least(99.0), least(99.9));
        let [three, four, five] = [99.9, 99.99, 99.999].map(least);
        assert!(three < four && four < five && five < three.scale(2.0), "{three}, {four}, {five}");
    }

    #[test]
    fn vm_gets_all_that_it_wishes_or_nothing() {
        let impossible = vec![wish(4, 500.0, 10_000), wish(4, 10.0, 100)];
        let vms =
            [impossible, vec![wish(4, 1_500.0, 10_000); 8], vec![wish(4, 1_500.0, 10_000); 2]];
        let fits = reference().admit(&vms);
        let said: Vec<Vec<bool>> =
            fits.iter().map(|vm| vm.iter().map(|fit| fit.refusal.is_none()).collect()).collect();
        assert_eq!(said, [vec![true, false], vec![true; 8], vec![true; 2]]);
        assert!(reference().admit(&[vms[1].clone(), vms[1].clone()])[1][0].refusal.is_some());
    }

    #[test]
    fn what_is_promised_counts_though_it_does_not_fit() {
        let small = [wish(4, 100.0, 10_000)];
        let too_much = vec![wish(4, 1_500.0, 10_000); 12];
        assert!(reference().admit(&[&too_much[..], &small])[1][0].refusal.is_none());
        let refusal = reference().refusal(&[&too_much], &small);
        assert!(matches!(refusal, Some(Refusal::Overload { most: 0.0, .. })), "{refusal:?}");
        assert_eq!(reference().refusal(&[&too_much[..6]], &small), None);
    }

    #[test]
    fn promise_that_would_be_broken_is_named_for_each_wish() {
        let mut first = wish(4, 500.0, 10_000);
        first.promise.deadline = alone(&[first])[0].least.scale(1.01);
        let many = vec![wish(4, 1_500.0, 10_000); 6];
        assert!(alone(&many).iter().all(|fit| fit.refusal.is_none()));
        // Of two VMs with the same promise it is the first.
        let mut twin = wish(4, 500.0, 10_000);
        twin.promise.deadline = alone(&[many[0], twin, twin])[1].least.scale(1.01);
        let of_twins =
            &reference().admit(&[vec![many[0]], vec![twin], vec![twin], many.clone()])[3];
        assert_eq!(of_twins[0].refusal, Some(Refusal::Other { vm: 1, broken: Broken::Deadline }));
        let of_many = &reference().admit(&[vec![first], many])[1];
        let expected = Some(Refusal::Other { vm: 0, broken: Broken::Deadline });
        let refusals: Vec<_> = of_many.iter().map(|fit| fit.refusal).collect();
        assert_eq!(refusals, [expected; 6]);
    }

    #[test]
    fn refusal_says_what_would_fit() {
        let mut all = vec![wish(4, 1_500.0, 10_000); 9];
        all.push(wish(4, 3_000.0, 10_000));
        all.push(wish(4, 10.0, 500));
        all.push(wish(4, 4_000.0, 10_000));
        let said: Vec<_> = alone(&all).iter().map(|fit| fit.refusal).collect();
        assert!(said[..9].iter().all(Option::is_none), "{said:?}");
        let texts: Vec<_> = said[9..].iter().map(|refusal| refusal.unwrap().to_string()).collect();
        assert!(
            texts[0].starts_with("103.1 % of the device would be promised, and 97 % can be; 6"),
            "{texts:?}"
        );
        assert!(texts[1].starts_with("the shortest deadline that can be kept is 1."), "{texts:?}");
        let fast = alone(&[wish(4, 4_000.0, 10_000)])[0].refusal.unwrap();
        assert_eq!(fast.to_string(), "with 1 at a time it comes to 3030 requests a second at most");
    }
}
