//! Whether a class that has less than its rate would take more.
//!
//! A task that waits for each of its requests asks for fewer if they are slow, so a rate that does not come
//! about looks like one that is not wanted. What tells the two apart is what the class asks for if its
//! requests are served sooner, so that is tried ([`experiment`](crate::experiment)) while a class is short
//! of its rate. A class that asks for more without background, by more than chance explains, *answers*:
//! background then gives way until the class has its rate, or as much of it as it asks for. A class that does
//! not answer is content: it is left alone, each time for twice as long, unless what it asks for changes.
//!
//! A class that has requests under way nearly all the time can hardly ask for less than it could, so it
//! is given way to without an experiment, for as long as its rate then comes about. If it asks for clearly more
//! from then on, that is an answer as well.

use crate::depth::MAX_FALL;
use crate::experiment::{Epoch, Findings, Pairs};

/// A rate comes about if no more than this part of it is not asked for.
const TOLERANCE: f64 = 1.0 / 60.0;
/// What is missing of a rate is made up for up to this part of an epoch's.
const MEMORY: f64 = 0.5;
/// A finding holds for this time, ns, and each further one of the kind for twice as long.
const KEEP_NS: u64 = 5_000_000_000;
const MAX_DOUBLINGS: u32 = 6;
/// A class that has requests under way for more of the time than this part is busy: background gives way to it
/// without an experiment.
const BUSY: f64 = 0.75;
/// A class that asks for this part of its rate, on average over some epochs, has come to it.
const COMES_ABOUT: f64 = 0.975;
/// Background gives way by so many times the part of the rate that is short.
const FALL: f64 = 4.0;
/// A busy class that asks for so much more of its rate since background gives way to it answers, if that is more than the
/// standard deviation of as many independent requests as the rate has in an epoch.
const GAIN: f64 = 0.1;
/// A class that was short of its rate and came to it again so often, as background gave way, goes on being found to
/// answer.
const RECOVERIES: u32 = 2;
/// A busy class that background gives way to has to come to its rate within this time, ns; else it is tried.
const PATIENCE_NS: u64 = 3_000_000_000;

/// What is known of a class.
#[derive(Debug, Clone, Copy, Default)]
enum Finding {
    /// Nothing is known.
    #[default]
    None,
    /// The class is being tried.
    Tried(Pairs),
    /// The class asks for more if background gives way.
    Answers {
        /// What it then asks for, as a part of its rate.
        most: f64,
        /// When this is looked at again, ns.
        until: u64,
    },
    /// The class does not ask for more.
    Content {
        /// What it asked for when that was found, as a part of its rate.
        had: f64,
        /// What it has asked for since, on average over some epochs.
        since: f64,
        /// The standard deviation of an epoch.
        deviation: f64,
        /// When this is looked at again, ns.
        until: u64,
    },
}

/// What a class asks for, and what is known of it.
#[derive(Debug, Default)]
pub(crate) struct Demand {
    /// Whether the class has been there since the beginning of the epoch.
    is_counted: bool,
    /// What the class has asked for in this epoch since it settled, ns of the rate.
    asked: u64,
    /// How long requests were under way in this epoch, ns, up to `busy_since`.
    busy: u64,
    /// Since when requests are under way, if they are.
    busy_since: u64,
    /// What is missing of the rate beyond the tolerance, in epochs: a cumulative sum (Page, 1954).
    missing: f64,
    /// What the class asked for, on average over some epochs, as a part of its rate.
    recent: f64,
    finding: Finding,
    /// How often the time that a finding holds for has been doubled.
    doublings: u32,
    /// How often in a row the class was found to answer; a finding that is beyond doubt counts twice.
    answers: u32,
    /// What the class asked for when background began to give way to it without an experiment, as a part of its rate.
    given_way_at: Option<f64>,
    /// The class was short of its rate when it was last looked at.
    was_short: bool,
    /// How often it has come to its rate again since it was found to answer.
    recoveries: u32,
    /// When the rate last came about.
    satisfied: u64,
    /// When background fills the device again at the latest, after it last gave way to this class.
    recovers: u64,
}

/// What a class has under way at the end of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backlog {
    /// Nothing waits or runs.
    None,
    /// Its requests are within its rate.
    WithinRate,
    /// Its next request waits because the class has had its rate.
    BeyondRate,
}

/// How much background there may be beside a class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wants {
    /// The class does not mind.
    #[default]
    Any,
    /// No more than there is now, until the class has made up for what it missed.
    NoMore,
    /// Less than there is now, by so many thousandths.
    Less(u32),
}

/// What follows from an epoch for a class.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Look {
    /// How much background there may be.
    pub(crate) wants: Wants,
    /// The class needs another pair of epochs.
    pub(crate) is_tried: bool,
    /// The class has just been found to answer.
    pub(crate) answers: bool,
}

impl Demand {
    /// What is known, for others.
    pub(crate) const fn known(&self) -> crate::Demand {
        match self.finding {
            Finding::None => crate::Demand::Unknown,
            Finding::Tried(_) => crate::Demand::Tried,
            Finding::Answers { .. } => crate::Demand::More,
            Finding::Content { .. } => crate::Demand::NoMore,
        }
    }

    /// A request is the first under way.
    pub(crate) const fn begin(&mut self, now: u64) {
        self.busy_since = now;
    }

    /// The last request under way has ended.
    pub(crate) const fn end(&mut self, now: u64) {
        self.busy += now.saturating_sub(self.busy_since);
    }

    /// A request of so many ns of the rate has arrived in a settled epoch.
    pub(crate) const fn ask(&mut self, step: u64) {
        self.asked = self.asked.saturating_add(step);
    }

    /// An epoch has ended. A request is `request` ns of the rate, and so many may come at once as are
    /// `burst` ns.
    pub(crate) fn end_epoch(
        &mut self,
        epoch: &Epoch,
        (request, burst): (u64, u64),
        backlog: Backlog,
    ) -> Look {
        if backlog != Backlog::None {
            self.end(epoch.end);
        }
        let asked = self.asked as f64 / epoch.span();
        let busy = self.busy as f64 / (epoch.end - epoch.begin).max(1) as f64;
        (self.asked, self.busy, self.busy_since) = (0, 0, epoch.end);
        if !std::mem::replace(&mut self.is_counted, true) {
            self.satisfied = epoch.end;
            return Look::default();
        }
        let request = request as f64 / epoch.span();
        if let Finding::Tried(pairs) = &mut self.finding {
            pairs.add(epoch, asked);
            let findings = pairs.findings(request, TOLERANCE, COMES_ABOUT);
            if let Some(findings) = &findings {
                self.conclude(findings, epoch.end);
            } else if epoch.half.is_none() && !epoch.may_try {
                self.finding = Finding::None;
            }
            let is_tried = matches!(self.finding, Finding::Tried(_));
            let answers = findings.is_some_and(|findings| findings.answers);
            return Look { is_tried, answers, ..Look::default() };
        }
        if epoch.withheld {
            return Look::default();
        }
        if let Finding::Content { had, since, deviation, until } = &mut self.finding {
            // A change of what it asks for is a reason to look again.
            *since += (asked - *since) / 8.0;
            let error = *deviation / 15f64.sqrt();
            let has_changed = (*since - *had).abs() > *had / 8.0 + 4.0 * error;
            if has_changed {
                (self.doublings, self.satisfied) = (0, epoch.end);
            }
            if has_changed || epoch.end > *until {
                self.finding = Finding::None;
            }
            return Look::default();
        }
        let goal = if let Finding::Answers { most, .. } = self.finding { most } else { 1.0 };
        let slack = 2.0 * request + burst as f64 / epoch.span();
        self.missing = self.missing + goal * (1.0 - TOLERANCE) - asked;
        self.missing = self.missing.clamp(0.0, slack + MEMORY);
        // A closed loop whose responses took no time would ask for no more than so much beyond this.
        let more = asked * busy / (1.0 - busy).max(1e-3);
        let is_limited = more >= TOLERANCE.max(Pairs::least(request));
        if !is_limited || backlog == Backlog::BeyondRate {
            self.missing = 0.0;
        }
        let is_short = self.missing > slack;
        self.recent += (asked - self.recent) / 8.0;
        if !is_short || self.recent >= goal * COMES_ABOUT {
            self.satisfied = epoch.end;
        }
        let gain = self.recent - self.given_way_at.unwrap_or(self.recent);
        if gain > GAIN.max(request.sqrt()) && matches!(self.finding, Finding::None) {
            self.answer(1.0, epoch.end.saturating_add(KEEP_NS), epoch.end);
            self.answers = self.answers.max(1);
        }
        let mut look = self.look(epoch, is_short, busy);
        if let Wants::Less(_) = look.wants {
            if matches!(self.finding, Finding::None) {
                self.given_way_at.get_or_insert(asked.max(self.recent));
            }
            // A single epoch may be low by chance, and the average still is while the rate already comes about.
            let short = goal * (1.0 - TOLERANCE) - asked.max(self.recent);
            let fall = (short * FALL * 1000.0).clamp(0.0, f64::from(MAX_FALL)) as u32;
            look.wants = if fall > 0 { Wants::Less(fall) } else { Wants::NoMore };
        }
        look
    }

    fn look(&mut self, epoch: &Epoch, is_short: bool, busy: f64) -> Look {
        let now = epoch.end;
        let mut look = Look::default();
        match &mut self.finding {
            Finding::None if is_short => {
                let is_patient = now.saturating_sub(self.satisfied) < PATIENCE_NS;
                let gives_way = now < self.recovers;
                let was_tried = self.doublings > 0;
                let is_busy = busy > BUSY;
                let is_series = epoch.half.is_some() && epoch.may_try;
                if is_busy && !is_series && (is_patient || !epoch.may_try && !was_tried) {
                    look.wants = Wants::Less(MAX_FALL);
                } else if is_patient && gives_way && !is_series {
                    // It has just been given way to.
                    look.wants = Wants::NoMore;
                } else if (is_series || !gives_way)
                    && self.recent < COMES_ABOUT
                    && (epoch.may_try || self.answers > 0 && epoch.has_background)
                {
                    self.finding = Finding::Tried(Pairs::default());
                    self.given_way_at = None;
                    look.is_tried = true;
                }
            }
            Finding::Answers { most, until } => {
                if is_short {
                    look.wants = Wants::Less(MAX_FALL);
                } else {
                    // That it comes to its rate each time that background gives way is an answer, too.
                    self.recoveries += u32::from(self.was_short);
                    if self.answers > 1 || self.recoveries >= RECOVERIES {
                        *until = (*until).max(now.saturating_add(KEEP_NS));
                    }
                }
                self.was_short = is_short;
                // What the class asks for changes. In the experiment it may have asked for more than it does
                // in the long run, to make up for the epochs with background.
                if now.saturating_sub(self.satisfied) > PATIENCE_NS {
                    *most = self.recent;
                    // It did not come to its rate, but the rate to it.
                    (self.was_short, self.recoveries) = (false, 0);
                } else {
                    *most = most.max(self.recent.min(1.0));
                }
                if now > *until && epoch.has_background {
                    self.finding = Finding::None;
                }
            }
            Finding::None => self.given_way_at = None,
            Finding::Tried(_) | Finding::Content { .. } => {}
        }
        if let Wants::Less(_) = look.wants {
            self.recovers = now.saturating_add(epoch.recovery);
        }
        look
    }

    /// Background gives way to the class until then whenever it is short of this part of its rate.
    fn answer(&mut self, most: f64, until: u64, now: u64) {
        (self.satisfied, self.was_short, self.recoveries) = (now, false, 0);
        self.given_way_at = None;
        self.finding = Finding::Answers { most, until };
    }

    fn conclude(&mut self, findings: &Findings, now: u64) {
        let until = now.saturating_add(KEEP_NS << self.doublings);
        self.doublings = (self.doublings + 1).min(MAX_DOUBLINGS);
        let &Findings { answers, is_clear, withheld, as_is, error, deviation } = findings;
        self.missing = 0.0;
        let has_its_rate = as_is >= COMES_ABOUT;
        if answers {
            self.answers += 1 + u32::from(is_clear);
        }
        // One that answered before, and has its rate because another class is given way to meanwhile, has not shown
        // that it would not answer.
        if answers || has_its_rate && self.answers > 0 {
            self.answer((withheld + 2.0 * error).min(1.0), until, now);
        } else if has_its_rate {
            self.satisfied = now;
            self.finding = Finding::None;
        } else {
            (self.satisfied, self.answers) = (0, 0);
            self.finding = Finding::Content { had: as_is, since: as_is, deviation, until };
        }
    }
}
