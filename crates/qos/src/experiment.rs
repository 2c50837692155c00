//! An experiment on all classes at once: pairs of epochs, with and without background.
//!
//! In one epoch of a pair, drawn at random, no background request is started. Since the order is random,
//! nothing that changes by itself passes for an effect. Each class is compared with itself, so one series of
//! pairs tries all classes that are short of their rates.

/// How often the scheduler looks at whether promises are kept, ns; also the length of an experiment's epoch.
pub(crate) const EPOCH_NS: u64 = 100_000_000;
/// The first part of an epoch is not counted: what a closed loop asks for then still follows from the
/// epoch before.
const SETTLE_NS: u64 = EPOCH_NS / 5;
/// The first decision is made after so many pairs, and the last after this many.
const MIN_PAIRS: u32 = 4;
const MAX_PAIRS: u32 = 16;
/// How many standard errors from zero a mean difference has to be, after [`MIN_PAIRS`] pairs and each further
/// one: Student's t, one-sided, at 0.0001 and for the last at 0.005. The level is low because each class is
/// looked at up to 13 times.
const SURE: [f64; 13] =
    [22.20, 13.03, 9.68, 8.02, 7.06, 6.44, 6.01, 5.69, 5.45, 5.26, 5.11, 4.99, 2.95];
/// After fewer pairs than this the difference has to be twice as far from zero. One that is half as far below
/// what matters is none: to leave a class alone for a while costs less than to give way to it for nothing.
const FEW_PAIRS: u32 = 8;
/// After a series without an answer, none begins for so many times the epochs that it withheld background
/// in: over time such series withhold background for 1/42 of the time.
const REST: u64 = 40;

/// A part of a pair of epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    First,
    Second,
}

/// An epoch that has ended, as the classes are told of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Epoch {
    /// When it began, ns.
    pub(crate) begin: u64,
    /// When it ended, ns.
    pub(crate) end: u64,
    /// The part of a pair that it was, if it was one.
    pub(crate) half: Option<Half>,
    /// No background was started.
    pub(crate) withheld: bool,
    /// There is background to withhold, and a series may begin or has just begun.
    pub(crate) has_background: bool,
    /// The rest after the last series without an answer is over, too.
    pub(crate) may_try: bool,
    /// How long background may take to fill the device again after it gave way, ns.
    pub(crate) recovery: u64,
}

impl Epoch {
    /// How long requests were counted, ns.
    pub(crate) fn span(&self) -> f64 {
        self.end.saturating_sub(self.begin).saturating_sub(SETTLE_NS).max(1) as f64
    }
}

/// The epochs of a scheduler, and which of them withhold background.
#[derive(Debug)]
pub(crate) struct Epochs {
    begin: u64,
    half: Option<Half>,
    withheld: bool,
    /// In how many epochs this series has withheld background.
    spent: u64,
    /// Whether a class has been found to answer in this series.
    answered: bool,
    /// Before this no series begins, ns.
    rest_until: u64,
    /// How long background was withheld in all, ns.
    total: u64,
    random: u64,
}

impl Epochs {
    pub(crate) const fn new() -> Self {
        Self {
            begin: 0,
            half: None,
            withheld: false,
            spent: 0,
            answered: false,
            rest_until: 0,
            total: 0,
            random: 0x9E37_79B9_7F4A_7C15,
        }
    }

    /// The present one is over.
    pub(crate) const fn is_over(&self, now: u64) -> bool {
        now.saturating_sub(self.begin) >= EPOCH_NS
    }

    /// Requests that arrive now follow from what is done in this epoch.
    pub(crate) const fn is_settled(&self, now: u64) -> bool {
        now.saturating_sub(self.begin) >= SETTLE_NS
    }

    /// When the present one ends, if no background is started in it.
    pub(crate) fn withheld_until(&self) -> Option<u64> {
        self.withheld.then(|| self.begin.saturating_add(EPOCH_NS))
    }

    pub(crate) const fn is_withheld(&self) -> bool {
        self.withheld
    }

    /// Ends the present one; `served`: when background was last started.
    pub(crate) fn end(&mut self, served: u64, recovery: u64, now: u64) -> Epoch {
        // Where nothing has come or ended for long, both halves of a pair say little.
        if now.saturating_sub(self.begin) > 2 * EPOCH_NS {
            self.half = None;
        }
        if self.withheld {
            self.total += now.saturating_sub(self.begin).min(EPOCH_NS);
        }
        let has_background = served >= self.begin || self.half == Some(Half::Second);
        let has_background = has_background && self.spent < u64::from(MIN_PAIRS);
        Epoch {
            begin: self.begin,
            end: now,
            half: self.half,
            withheld: self.withheld,
            has_background,
            may_try: has_background && now >= self.rest_until,
            recovery,
        }
    }

    /// How long background was withheld in all epochs that are over, ns.
    pub(crate) const fn withheld(&self) -> u64 {
        self.total
    }

    /// Begins the next one. A class `is_tried` further, or one has been found to answer.
    pub(crate) fn begin(&mut self, is_tried: bool, answers: bool, now: u64) {
        self.begin = now;
        self.answered |= answers;
        if self.half == Some(Half::First) {
            self.half = Some(Half::Second);
            self.withheld = !self.withheld;
        } else if is_tried {
            self.half = Some(Half::First);
            // xorshift64 (Marsaglia, 2003).
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            self.withheld = self.random >> 63 == 1;
            self.spent += 1;
        } else {
            if !self.answered && self.spent > 0 {
                self.rest_until = now.saturating_add(self.spent * REST * EPOCH_NS);
            }
            (self.half, self.withheld, self.spent, self.answered) = (None, false, 0, false);
        }
    }
}

/// What a class asked for in a series of pairs, in parts of its rate.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pairs {
    first: Option<f64>,
    count: u32,
    sum: f64,
    squares: f64,
    withheld: f64,
    as_is: f64,
}

/// What a series of pairs has shown of a class.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Findings {
    /// It asks for more without background.
    pub(crate) answers: bool,
    /// Beyond doubt.
    pub(crate) is_clear: bool,
    /// What it asked for without background, on average, in parts of its rate.
    pub(crate) withheld: f64,
    /// The same with background.
    pub(crate) as_is: f64,
    /// The standard error of both.
    pub(crate) error: f64,
    /// The standard deviation of an epoch.
    pub(crate) deviation: f64,
}

impl Pairs {
    /// An epoch has ended in which the class asked for this part of its rate.
    pub(crate) fn add(&mut self, epoch: &Epoch, asked: f64) {
        match epoch.half {
            None => self.first = None,
            Some(Half::First) => self.first = Some(asked),
            Some(Half::Second) => {
                let Some(first) = self.first.take() else { return };
                let (withheld, as_is) =
                    if epoch.withheld { (asked, first) } else { (first, asked) };
                self.count += 1;
                self.sum += withheld - as_is;
                self.squares += (withheld - as_is).powi(2);
                self.withheld += withheld;
                self.as_is += as_is;
            }
        }
    }

    /// The least difference that a series can show, where a request is such a part of what the rate has in an
    /// epoch.
    pub(crate) fn least(request: f64) -> f64 {
        let n = f64::from(MAX_PAIRS);
        SURE[SURE.len() - 1] * (min_variance(request) / n).sqrt()
    }

    /// What was found, once that is known. A difference matters if it is more than `matters`; a class whose
    /// rate `comes_about` in this part has no need of more.
    pub(crate) fn findings(
        &self,
        request: f64,
        matters: f64,
        comes_about: f64,
    ) -> Option<Findings> {
        let sure = *SURE.get(self.count.checked_sub(MIN_PAIRS)? as usize)?;
        let n = f64::from(self.count);
        let mean = self.sum / n;
        let variance = (self.squares - n * mean * mean) / (n - 1.0);
        let variance = variance.max(min_variance(request));
        let error = (variance / n).sqrt();
        let as_is = self.as_is / n;
        let is_clear = mean > matters && mean > 2.0 * sure * error;
        let is_likely = mean > matters && mean > sure * error;
        let answers = is_clear || is_likely && self.count >= FEW_PAIRS;
        let is_last = self.count >= MAX_PAIRS;
        let is_none = is_last || as_is >= comes_about || mean + 0.5 * sure * error < matters;
        (answers || is_none).then(|| Findings {
            answers,
            is_clear,
            withheld: self.withheld / n,
            as_is,
            error: error / 2f64.sqrt(),
            deviation: (variance / 2.0).sqrt(),
        })
    }
}

/// The variance of a pair's difference where everything is as regular as can be: each of both counts is off
/// by up to one request, wherever its epoch begins, so by 1/12 of a request's square.
fn min_variance(request: f64) -> f64 {
    request * request / 6.0
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_pcg::Pcg64Mcg;

    use super::*;

    const MATTERS: f64 = 1.0 / 60.0;

    /// What independent arrivals ask for in an epoch, of a rate that has so many requests in it.
    fn asked(requests: f64, random: &mut Pcg64Mcg) -> f64 {
        let mut count = 0.0;
        let mut time = 0.0;
        loop {
            time -= (1.0 - random.random::<f64>()).ln();
            if time > requests {
                return count / requests;
            }
            count += 1.0;
        }
    }

    /// Of series of such classes, the part that is found to answer; without background they ask for so much
    /// more.
    fn answering(requests: f64, more: f64) -> f64 {
        let mut random = Pcg64Mcg::seed_from_u64(requests as u64);
        let series = 1_000;
        let answers = (0..series).filter(|_| {
            let mut pairs = Pairs::default();
            loop {
                let first: bool = random.random();
                for half in [Half::First, Half::Second] {
                    let withheld = first == (half == Half::First);
                    let epoch = Epoch { half: Some(half), withheld, ..Epochs::new().end(0, 0, 0) };
                    let asked = 0.8 * asked(requests, &mut random);
                    pairs.add(&epoch, if withheld { asked * (1.0 + more) } else { asked });
                }
                if let Some(findings) = pairs.findings(1.0 / requests, MATTERS, 1.0) {
                    break findings.answers;
                }
            }
        });
        answers.count() as f64 / f64::from(series)
    }

    #[test]
    fn class_that_does_not_answer_is_rarely_found_to_and_one_that_does_mostly() {
        for requests in [4.0, 10.0, 40.0, 150.0] {
            let wrong = answering(requests, 0.0);
            assert!(wrong <= 0.015, "{requests} requests: {wrong}");
        }
        for (requests, more, least) in [(150.0, 0.15, 0.9), (40.0, 0.3, 0.9), (40.0, 0.5, 0.99)] {
            let right = answering(requests, more);
            assert!(right >= least, "{requests} requests and {more} more: {right}");
        }
    }

    #[test]
    fn series_without_an_answer_take_little_from_background() {
        let mut epochs = Epochs::new();
        let (mut withheld, mut pairs, mut series) = (0, 0, 0);
        let number = 20_000;
        for now in (1..=number).map(|epoch| epoch * EPOCH_NS) {
            let epoch = epochs.end(now, 0, now);
            withheld += u64::from(epoch.withheld);
            assert_eq!(epochs.withheld(), withheld * EPOCH_NS);
            // Whoever is tried is tried for as long as can be.
            pairs += u32::from(epoch.half == Some(Half::Second));
            let is_tried = if pairs == 0 { epoch.may_try } else { pairs < MAX_PAIRS };
            if pairs == MAX_PAIRS {
                (pairs, series) = (0, series + 1);
            }
            epochs.begin(is_tried, false, now);
        }
        assert!(series > 20, "{series}");
        assert!(withheld * 100 <= number * 3, "{withheld} of {number}");
    }

    #[test]
    fn order_within_pairs_is_no_pattern() {
        let mut epochs = Epochs::new();
        let mut firsts = Vec::new();
        for now in (1..=2_000).map(|epoch| epoch * EPOCH_NS) {
            let epoch = epochs.end(now, 0, now);
            if epoch.half == Some(Half::First) {
                firsts.push(epoch.withheld);
            }
            epochs.begin(true, false, now);
        }
        let part = |of: usize, all: usize| (of as f64 / all as f64 - 0.5).abs();
        let withheld = firsts.iter().filter(|withheld| **withheld).count();
        assert!(part(withheld, firsts.len()) < 0.08, "{withheld} of {}", firsts.len());
        let same = firsts.windows(2).filter(|two| two[0] == two[1]).count();
        assert!(part(same, firsts.len()) < 0.08, "{same} of {}", firsts.len());
    }
}
