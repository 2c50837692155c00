//! What the data plane tells its operator, by priority.

use rtvirtio_dataplane::plane::Notice;
use rtvirtio_spec::control::{Event, Outcome, StallState};
use tracing::{debug, error, info, warn};

/// What should be looked at.
pub(super) fn notice(device: &str, notice: Notice<'_>) {
    match notice {
        Notice::Ended(ended) => {
            if let Some(error) = ended.error.as_ref().or(ended.first_refused.as_ref()) {
                let causes =
                    std::iter::successors(std::error::Error::source(error), |e| e.source());
                let causes: String = causes.map(|cause| format!(": {cause}")).collect();
                warn!(about = %device, "front end: {error}{causes}");
            }
        }
        Notice::NoFixedBuffers(error) => {
            info!(
                about = %device,
                "guest memory is not registered with the rings, which costs some CPU and nothing else: {error} \
                 (LimitMEMLOCK= in the unit allows more)"
            );
        }
        Notice::NoPositions(error) => {
            info!(
                about = %device,
                "where packed rings are is not kept: a guest that has them (QEMU: packed=on) loses its network when \
                 this process is killed: {error}"
            );
        }
        // Of the service manager.
        Notice::KeepTap { .. } | Notice::ReleaseTap { .. } => {}
        Notice::EmptyRing { queue } => {
            warn!(
                about = %device,
                "the driver of queue {queue} kicks, and its ring stays empty: is the guest's memory shared? \
                 (QEMU: -object memory-backend-memfd,share=on; libvirt: <access mode='shared'/>)"
            );
        }
    }
}

/// What has happened.
pub(super) fn event(event: &Event) {
    match event {
        Event::DeviceAdded { device } => info!("device {device} is there"),
        Event::DeviceRemoved { device } => info!("device {device} is gone"),
        Event::DeviceResized { device, capacity } => {
            info!(about = %device, "has {capacity} now");
        }
        Event::FrontEndConnected { device } => info!(about = %device, "a front end has connected"),
        Event::FrontEndDisconnected { device } => info!(about = %device, "the front end has left"),
        Event::QueueMoved { device, queue, from, to, pause_ns } => {
            debug!(about = %device, "queue {queue} went from {from} to {to}, {pause_ns} without service");
        }
        Event::QueueBroken { device, queue, reason } => {
            warn!(about = %device, "queue {queue} is broken by its driver: {reason}");
        }
        Event::DeviceStalled { schedule, stall, stalls } => {
            let StallState { length_ns, in_flight, .. } = stall;
            warn!(
                about = %schedule,
                "its device, or this host, ended nothing for {length_ns} with {in_flight} requests in flight \
                 ({stalls} times)"
            );
        }
        Event::IothreadAdded { iothread } => info!("IOThread {iothread} is there"),
        Event::IothreadRemoved { iothread } => info!("IOThread {iothread} is gone"),
        Event::PolicySet { policy } => info!("policy {policy} is in force"),
        Event::PolicyFailed { policy, reason } => {
            error!("policy {policy} has ended, and the data plane serves on: {reason}");
        }
        Event::Decision { action, reason, outcome: Outcome::Failed, .. } => {
            warn!(about = "policy", "could not {action} ({reason})");
        }
        Event::Decision { action, reason, outcome, .. } => {
            info!(about = "policy", "{action}: {outcome} ({reason})");
        }
        Event::DecisionMeasured { .. } => {}
        Event::EventsLost { count } => info!("{count} events came too fast to be written down"),
    }
}
