//! `/metrics`: OpenMetrics text, in seconds and bytes.
//!
//! A queue's series have the labels `vm`, `device` and `queue`; histograms have an edge at each
//! power of two of nanoseconds from 1 µs to 8.6 s, and are left out while they are empty: a
//! thousand idle queues cost no megabytes.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text as openmetrics};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use rtvirtio_spec::control::{
    Activity, Had, NicQueueState, NicState, PromisedFrames, QueueDirection, ScheduleState,
};
use rtvirtio_spec::serve::Policy;
use rtvirtio_units::Nanos;

use crate::plane::{Observation, ObservedDevice};
use crate::stats::{Latencies, QueueSnapshot, QueueStats};

/// What the text is.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The edges of histograms: 2^10 ns to 2^33 ns.
const EDGES: std::ops::RangeInclusive<u32> = 10..=33;

/// All metrics.
pub(super) fn text(observation: Observation) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("rtvirtio");
    registry.register_collector(Box::new(Metrics::new(observation)));
    let mut text = String::new();
    openmetrics::encode(&mut text, &registry)?;
    Ok(text)
}

type Labels = Vec<(&'static str, String)>;

#[derive(Debug)]
struct Metrics {
    observation: Observation,
    queues: Vec<Queue>,
}

#[derive(Debug)]
struct Queue {
    labels: Labels,
    activity: Activity,
    stats: QueueSnapshot,
}

impl Metrics {
    fn new(observation: Observation) -> Self {
        let mut queues = Vec::new();
        for device in &observation.devices {
            for (index, queue) in device.queues.iter().enumerate() {
                queues.push(Queue {
                    labels: vec![
                        ("vm", device.vm.to_string()),
                        ("device", device.name.to_string()),
                        ("queue", index.to_string()),
                    ],
                    activity: queue.activity,
                    stats: queue.stats.snapshot(),
                });
            }
        }
        Self { observation, queues }
    }
}

fn seconds(time: Nanos) -> f64 {
    time.as_secs_f64()
}

/// A family of counters.
fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, unit): (&str, &str, Option<Unit>),
    series: impl Iterator<Item = (Labels, f64)>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
    for (labels, value) in series {
        // Of a single one, no empty set of labels.
        if labels.is_empty() {
            family.encode_counter::<Labels, _, u64>(&value, None)?;
        } else {
            family.encode_family(&labels)?.encode_counter::<Labels, _, u64>(&value, None)?;
        }
    }
    Ok(())
}

/// A family of gauges.
fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, unit): (&str, &str, Option<Unit>),
    series: impl Iterator<Item = (Labels, f64)>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
    for (labels, value) in series {
        if labels.is_empty() {
            family.encode_gauge(&value)?;
        } else {
            family.encode_family(&labels)?.encode_gauge(&value)?;
        }
    }
    Ok(())
}

fn device_labels(device: &ObservedDevice) -> Labels {
    vec![("vm", device.vm.to_string()), ("device", device.name.to_string())]
}

fn with(labels: &Labels, label: &'static str, value: &str) -> Labels {
    let mut labels = labels.clone();
    labels.push((label, value.to_owned()));
    labels
}

impl Metrics {
    fn iothreads(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let threads = || self.observation.iothreads.iter();
        let label = |name: &rtvirtio_units::IoThreadName| vec![("iothread", name.to_string())];
        let times = threads().flat_map(|t| {
            let times = [("busy", t.busy_ns), ("poll", t.poll_ns), ("sleep", t.sleep_ns)];
            times.map(|(activity, time)| {
                (with(&label(&t.name), "activity", activity), seconds(time))
            })
        });
        let help = "Time of an IOThread at work, in polls that found nothing, and asleep";
        counters(encoder, ("iothread_time", help, Some(Unit::Seconds)), times)?;
        let cpu = threads().map(|t| (label(&t.name), seconds(t.cpu_ns)));
        counters(encoder, ("iothread_cpu", "CPU time of an IOThread", Some(Unit::Seconds)), cpu)?;
        let waited = threads().map(|t| (label(&t.name), seconds(t.runqueue_ns)));
        let help = "Time in which an IOThread could have run and had no CPU";
        counters(encoder, ("iothread_runqueue", help, Some(Unit::Seconds)), waited)?;
        let locked = threads().map(|t| (label(&t.name), seconds(t.lock_ns)));
        let help = "Time in which an IOThread waited for schedules that others had";
        counters(encoder, ("iothread_lock", help, Some(Unit::Seconds)), locked)?;
        let ended = threads().flat_map(|t| {
            let reasons = [("refused", t.poll_refused), ("preempted", t.poll_gaps)];
            reasons.map(|(reason, count)| (with(&label(&t.name), "reason", reason), count as f64))
        });
        let help = "Times that an IOThread did not poll, or not any more, since others need CPUs";
        counters(encoder, ("iothread_polls_given_up", help, None), ended)?;
        let count = [(Labels::new(), threads().count() as f64)];
        gauges(encoder, ("iothreads", "IOThreads", None), count.into_iter())?;
        let queues = threads().map(|t| (label(&t.name), f64::from(t.queues)));
        gauges(encoder, ("iothread_queues", "Virtqueues of an IOThread", None), queues)
    }

    fn policy(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Observation { policy, decisions, moves, .. } = &self.observation;
        let is_in_force = |of: Policy| f64::from(u8::from(of == *policy));
        let policies = Policy::ALL.iter();
        let policies = policies.map(|of| (vec![("policy", of.to_string())], is_in_force(*of)));
        let help = "Which policy decides about IOThreads";
        gauges(encoder, ("policy", help, None), policies)?;
        let decisions = decisions.iter().map(|((kind, outcome), count)| {
            let labels = vec![("kind", (*kind).to_owned()), ("outcome", outcome.to_string())];
            (labels, *count as f64)
        });
        counters(encoder, ("decisions", "What policies have decided", None), decisions)?;
        let moves = [(Labels::new(), *moves as f64)].into_iter();
        counters(encoder, ("queue_moves", "Queues that went to another IOThread", None), moves)
    }

    fn devices(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let devices = || self.observation.devices.iter();
        let connected = devices().map(|d| (device_labels(d), f64::from(u8::from(d.connected))));
        gauges(encoder, ("connected", "Whether a front end is connected", None), connected)?;
        let capacity = devices().map(|d| (device_labels(d), d.capacity.get() as f64));
        gauges(encoder, ("capacity", "Size of a device", Some(Unit::Bytes)), capacity)
    }

    fn nics(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let nics = || self.observation.nics.iter().map(|nic| &nic.state);
        if nics().next().is_none() {
            return Ok(());
        }
        let connected = nics().map(|nic| (nic_labels(nic), f64::from(u8::from(nic.connected))));
        let help = "Whether a network device's front end is connected";
        gauges(encoder, ("nic_connected", help, None), connected)?;
        let each = |of: fn(&NicQueueState) -> u64| {
            let one = move |nic, queue| (nic_queue_labels(nic, queue), of(queue) as f64);
            nics().flat_map(move |nic| nic.queues.iter().map(move |queue| one(nic, queue)))
        };
        let help = "Frames that were handed on";
        counters(encoder, ("nic_frames", help, None), each(|q| q.frames))?;
        let help = "Bytes of these";
        counters(encoder, ("nic_transferred", help, Some(Unit::Bytes)), each(|q| q.bytes.get()))?;
        let help = "Frames that were not, by reason";
        let dropped = nics().flat_map(|nic| {
            nic.queues.iter().flat_map(move |queue| {
                let labels = nic_queue_labels(nic, queue);
                let reasons = queue.drops.by_reason().into_iter();
                reasons.map(move |(reason, count)| (with(&labels, "reason", reason), count as f64))
            })
        });
        counters(encoder, ("nic_dropped", help, None), dropped)?;
        let of_queues = |of: fn(&QueueSnapshot) -> &Latencies| {
            self.observation.nics.iter().flat_map(move |nic| {
                let queues = nic.state.queues.iter().zip(&nic.stats);
                let one = move |(queue, stats): (_, &Arc<QueueStats>)| {
                    (nic_queue_labels(&nic.state, queue), of(&stats.snapshot()).clone())
                };
                queues.map(one)
            })
        };
        let help = "From when frames were found to the turn of an IOThread that took them";
        histograms(encoder, ("nic_wait", help), of_queues(|s| &s.wait))?;
        let help = "From that turn to when frames had been handed on";
        histograms(encoder, ("nic_service", help), of_queues(|s| &s.service))?;
        let promised = || {
            nics().flat_map(|nic| {
                let of = move |queue| Some((nic_queue_labels(nic, queue), queue.promised?));
                nic.queues.iter().filter_map(of)
            })
        };
        let frames = promised().flat_map(|(labels, PromisedFrames { kept, late, .. })| {
            let outcomes = [("kept", kept), ("late", late)];
            outcomes.map(|(outcome, n)| (with(&labels, "outcome", outcome), n as f64))
        });
        let help = "Frames within the promised rate, by whether they waited for their IOThread for no longer than is promised";
        counters(encoder, ("nic_promised_frames", help, None), frames)?;
        let kept = promised().filter_map(|(labels, of)| Some((labels, of.kept_at_least()?)));
        let help = "The share that did not wait longer, at least, at 95 % confidence";
        gauges(encoder, ("nic_promised_kept_lower_limit", help, Some(Unit::Ratios)), kept)
    }

    fn schedules(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let each = |of: fn(&ScheduleState) -> f64| {
            let schedules = self.observation.schedules.iter();
            schedules.map(move |s| (vec![("schedule", s.name.to_string())], of(s)))
        };
        let help = "Requests that wait for their time";
        gauges(encoder, ("schedule_waiting", help, None), each(|s| s.waiting as f64))?;
        let help = "Requests on a physical device";
        gauges(encoder, ("schedule_running", help, None), each(|s| s.running.into()))?;
        let help = "Of those, requests that nothing promises";
        gauges(encoder, ("schedule_background", help, None), each(|s| s.background.into()))?;
        let help = "How many of these may be there while promises are to be kept";
        let bound = each(|s| s.background_bound.into());
        gauges(encoder, ("schedule_background_bound", help, None), bound)?;
        let help = "How long these were withheld, to find out whether promised rates are wanted";
        let withheld = each(|s| seconds(s.withheld_ns));
        counters(encoder, ("schedule_background_withheld", help, Some(Unit::Seconds)), withheld)?;
        let times = self.observation.schedules.iter().flat_map(|s| {
            let times = [("used", s.usage.used_ns), ("charged", s.usage.cost_ns)];
            let label = vec![("schedule", s.name.to_string())];
            times.map(|(of, time)| (with(&label, "of", of), seconds(time)))
        });
        let help =
            "Time that a device's channels were in use, and what its service curve says of it";
        counters(encoder, ("schedule_channel_time", help, Some(Unit::Seconds)), times)?;
        let help =
            "Times in which a physical device, or the host, ended nothing of what the device had";
        counters(encoder, ("schedule_stalls", help, None), each(|s| s.stalls.count as f64))?;
        let help = "How long these were";
        let time = each(|s| seconds(s.stalls.time_ns));
        counters(encoder, ("schedule_stall_time", help, Some(Unit::Seconds)), time)?;
        let help = "How long nothing has ended by now, from 50 ms on";
        let ongoing = each(|s| s.stalls.ongoing_ns.map_or(0.0, seconds));
        gauges(encoder, ("schedule_stalled", help, Some(Unit::Seconds)), ongoing)?;
        let of_devices = || {
            let devices = self.observation.devices.iter();
            devices.filter_map(|d| Some((device_labels(d), d.qos.as_ref()?.had)))
        };
        let responses = of_devices().flat_map(|(labels, Had { kept, late, .. })| {
            let outcomes = [("kept", kept), ("late", late)];
            outcomes.map(|(outcome, n)| (with(&labels, "outcome", outcome), n as f64))
        });
        let help = "Requests within the promised rate, by whether they met their deadline";
        counters(encoder, ("promised_responses", help, None), responses)?;
        let kept = of_devices().filter_map(|(labels, had)| Some((labels, had.kept_at_least()?)));
        let help = "The share that met its deadline, at least, at 95 % confidence";
        gauges(encoder, ("promised_kept_lower_limit", help, Some(Unit::Ratios)), kept)?;
        let excused = of_devices().map(|(labels, had)| (labels, had.late_in_stalls as f64));
        let help = "Of the late ones, those that only a stall of the device made late";
        counters(encoder, ("promised_responses_late_in_stalls", help, None), excused)?;
        let cost = of_devices().flat_map(|(labels, had)| {
            let Had { reads, writes, flushes, discards, .. } = had;
            let by_kind =
                [("read", reads), ("write", writes), ("flush", flushes), ("discard", discards)];
            by_kind.map(|(kind, had)| (with(&labels, "kind", kind), seconds(had.cost_ns)))
        });
        let help = "What a device's requests took of its physical device's channels";
        counters(encoder, ("channel_time", help, Some(Unit::Seconds)), cost)
    }

    fn counts(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let requests = self.queues.iter().flat_map(|q| {
            let n = q.stats.operations;
            let by_operation = [
                ("read", n.reads),
                ("write", n.writes),
                ("flush", n.flushes),
                ("discard", n.discards),
                ("write_zeroes", n.write_zeroes),
                ("other", n.others),
            ];
            by_operation.map(|(op, n)| (with(&q.labels, "operation", op), n as f64))
        });
        counters(encoder, ("requests", "Requests that have ended", None), requests)?;
        let busy = self.queues.iter().map(|q| (q.labels.clone(), seconds(q.stats.busy)));
        let help = "Time of IOThreads at work that was for a queue";
        counters(encoder, ("queue_busy", help, Some(Unit::Seconds)), busy)?;
        let transferred = self.queues.iter().flat_map(|q| {
            let bytes = [("read", q.stats.read_bytes), ("write", q.stats.written_bytes)];
            bytes.map(|(op, n)| (with(&q.labels, "operation", op), n.get() as f64))
        });
        let help = "Bytes read and written";
        counters(encoder, ("transferred", help, Some(Unit::Bytes)), transferred)?;
        let each = |of: fn(&QueueSnapshot) -> u64| {
            self.queues.iter().map(move |q| (q.labels.clone(), of(&q.stats) as f64))
        };
        let help = "Requests that ended with an error";
        counters(encoder, ("errors", help, None), each(|s| s.errors))?;
        counters(encoder, ("kicks", "Kicks by the driver", None), each(|s| s.kicks))?;
        counters(encoder, ("calls", "Calls of the driver", None), each(|s| s.calls))?;
        gauges(encoder, ("in_flight", "Requests in flight", None), each(|s| s.in_flight))?;
        let broken = self
            .queues
            .iter()
            .map(|q| (q.labels.clone(), f64::from(u8::from(q.activity == Activity::Broken))));
        let help = "Whether a queue rests because its ring is not valid";
        gauges(encoder, ("broken", help, None), broken)
    }

    fn latencies(
        &self,
        of: fn(&QueueSnapshot) -> &Latencies,
    ) -> impl Iterator<Item = (Labels, Latencies)> {
        self.queues.iter().map(move |queue| (queue.labels.clone(), of(&queue.stats).clone()))
    }
}

fn nic_labels(nic: &NicState) -> Labels {
    vec![("vm", nic.vm.to_string()), ("nic", nic.name.to_string())]
}

fn nic_queue_labels(nic: &NicState, queue: &NicQueueState) -> Labels {
    let direction = match queue.direction {
        QueueDirection::Receive => "receive",
        QueueDirection::Transmit => "transmit",
    };
    let labels = with(&nic_labels(nic), "queue", &queue.index.to_string());
    with(&labels, "direction", direction)
}

fn histograms(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    each: impl Iterator<Item = (Labels, Latencies)>,
) -> fmt::Result {
    let unit = Some(&Unit::Seconds);
    let mut family = encoder.encode_descriptor(name, help, unit, MetricType::Histogram)?;
    let edges: Vec<Nanos> = EDGES.map(|power| Nanos::new(1 << power)).collect();
    for (labels, latencies) in each {
        let count = latencies.count();
        if count == 0 {
            continue;
        }
        // The library wants each bucket's own requests and adds them up.
        let below = latencies.below(&edges);
        let mut before = 0;
        let mut buckets = Vec::with_capacity(edges.len() + 1);
        for (edge, below) in edges.iter().zip(below) {
            buckets.push((seconds(*edge), below - before));
            before = below;
        }
        buckets.push((f64::INFINITY, count - before));
        let sum = seconds(latencies.sum());
        let mut series = family.encode_family(&labels)?;
        series.encode_histogram::<Labels>(sum, count, &buckets, None)?;
    }
    Ok(())
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        self.iothreads(&mut encoder)?;
        self.policy(&mut encoder)?;
        self.devices(&mut encoder)?;
        self.nics(&mut encoder)?;
        self.schedules(&mut encoder)?;
        self.counts(&mut encoder)?;
        let wait = ("wait", "From a request's kick to its start in the engine");
        histograms(&mut encoder, wait, self.latencies(|s| &s.wait))?;
        let service = ("service", "From a request's start in the engine to its completion");
        histograms(&mut encoder, service, self.latencies(|s| &s.service))?;
        let response = ("response", "From a request's kick to its completion");
        histograms(&mut encoder, response, self.latencies(|s| &s.response))
    }
}
