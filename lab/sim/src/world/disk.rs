//! Devices: emulated SSDs that VMs share, under the data plane's scheduler or not.

use rtvirtio_qos::{ClassId, Device, Kind, Running, Scheduler, Share};
use rtvirtio_ssd::{Ssd, SsdConfig};
use rtvirtio_units::{Bytes, Nanos, Weight};

use super::{Request, Simulation};
use crate::cpus::Waker;
use crate::events::Event;
use crate::machine::{Backend, Machine, SimError};
use crate::scenario::Scenario;

/// A request on a device, or waiting for it.
#[derive(Debug)]
struct Slot {
    queue: u32,
    request: Request,
    running: Option<Running>,
}

/// A device.
#[derive(Debug)]
pub(super) struct Disk {
    ssd: Ssd,
    /// With the class of each VM that uses it, by its place among those.
    schedule: Option<(Scheduler, Vec<ClassId>)>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// When it is to be asked again.
    asks_at: u64,
}

impl Disk {
    /// The devices of a machine; none, if its disks are null.
    pub(super) fn all(machine: &Machine, scenario: &Scenario) -> Result<Vec<Self>, SimError> {
        let Backend::Ssd { config, devices, schedule } = machine.backend else {
            return Ok(Vec::new());
        };
        if !(1..=1024).contains(&devices) {
            return Err(SimError::Devices(devices));
        }
        let one = |disk: u16| {
            let users = scenario.vms.len().saturating_sub(usize::from(disk));
            let users = users.div_ceil(usize::from(devices));
            Ok(Self {
                // Of sequences of their own: the first client's is the seed's, and its gaps would go with service times.
                ssd: Ssd::new(config, !scenario.seed ^ (u64::from(disk) << 32))?,
                schedule: schedule.then(|| scheduler(&config, users)),
                slots: Vec::new(),
                free: Vec::new(),
                asks_at: u64::MAX,
            })
        };
        (0..devices).map(one).collect()
    }

    fn slot(&mut self, slot: Slot) -> u32 {
        if let Some(free) = self.free.pop() {
            self.slots[free as usize] = slot;
            return free;
        }
        self.slots.push(slot);
        self.slots.len() as u32 - 1
    }
}

/// A scheduler for a device, with a flow for each VM.
fn scheduler(config: &SsdConfig, vms: usize) -> (Scheduler, Vec<ClassId>) {
    let four_kib = config.mean_service.scale(config.length_slope);
    let mut scheduler = Scheduler::new(Device {
        channels: u32::from(config.channels),
        request: config.mean_service.saturating_sub(four_kib),
        kib: four_kib.scale(0.25),
        flush: config.mean_service,
    });
    let share = Weight::new(100).map(|weight| Share { weight, limit: None });
    let class = |_| {
        let flow = scheduler.add_flow(share.clone().ok()?);
        scheduler.add_class(flow, None)
    };
    let classes = (0..vms).filter_map(class).collect();
    (scheduler, classes)
}

impl Simulation<'_> {
    /// An IOThread starts a request on its device.
    pub(super) fn start(&mut self, queue: u32, request: Request) {
        let vm = self.queues[queue as usize].vm as usize;
        let (at, user) = (vm % self.disks.len(), vm / self.disks.len());
        let now = Nanos::new(self.events.now);
        let disk = &mut self.disks[at];
        let bytes = Bytes::new(u64::from(request.bytes));
        let slot = disk.slot(Slot { queue, request, running: None });
        if let Some((scheduler, classes)) = &mut disk.schedule {
            scheduler.submit(classes[user], (u64::from(slot), Kind::Read, bytes), now);
            self.next_of(at as u16);
        } else {
            let end = disk.ssd.submit(now, bytes);
            self.events.push(end.get(), Event::Ended { disk: at as u16, slot });
        }
    }

    /// Starts what the device's schedule has chosen.
    fn next_of(&mut self, at: u16) {
        let now = Nanos::new(self.events.now);
        let Disk { ssd, schedule, slots, asks_at, .. } = &mut self.disks[at as usize];
        let Some((scheduler, _)) = schedule else { return };
        while let Some(started) = scheduler.next(now) {
            let slot = started.ticket as u32;
            let of = &mut slots[slot as usize];
            of.running = Some(started.running);
            let end = ssd.submit(now, Bytes::new(u64::from(of.request.bytes)));
            self.events.push(end.get(), Event::Ended { disk: at, slot });
        }
        if let Some(wake) = scheduler.wake_at().map(Nanos::get)
            && (wake < *asks_at || *asks_at <= now.get())
        {
            *asks_at = wake;
            self.events.push(wake, Event::Ask { disk: at });
        }
    }

    pub(super) fn ask_disk(&mut self, at: u16) {
        let disk = &mut self.disks[at as usize];
        if disk.asks_at <= self.events.now {
            disk.asks_at = u64::MAX;
            self.next_of(at);
        }
    }

    /// A device has done a request.
    pub(super) fn disk_ended(&mut self, at: u16, slot: u32) {
        let now = Nanos::new(self.events.now);
        let disk = &mut self.disks[at as usize];
        let Slot { queue, request, ref mut running } = disk.slots[slot as usize];
        let running = running.take();
        disk.free.push(slot);
        if let (Some(running), Some((scheduler, _))) = (running, &mut disk.schedule) {
            scheduler.complete(running, now);
            self.next_of(at);
        }
        let of = &mut self.queues[queue as usize];
        of.ended.push_back(request);
        if of.ended.len() == 1
            && let Some(io) = of.owner
        {
            self.ios[io as usize].ended.push(queue);
            self.ring(io, Waker::Device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_does_not_draw_what_the_first_client_draws() {
        let config: SsdConfig = "ref-4x250".parse().unwrap();
        let mut machine = Machine::new(2, 1);
        machine.backend = Backend::Ssd { config, devices: 1, schedule: false };
        let scenario = Scenario { seed: 7, phases: Vec::new(), vms: Vec::new() };
        let mut disks = Disk::all(&machine, &scenario).unwrap();
        // Of the first client's sequence.
        let mut same = Ssd::new(config, scenario.seed).unwrap();
        let end = |ssd: &mut Ssd| ssd.submit(Nanos::ZERO, Bytes::from_kib(4));
        assert_ne!(end(&mut disks[0].ssd), end(&mut same));
    }
}
