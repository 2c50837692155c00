//! bfq's fair queueing: B-WF2Q+ over groups and queues (kernel `block/bfq-wf2q.c`).
//!
//! An *entity* is a queue (of a process) or a group (of a cgroup). Each group schedules the entities below
//! it: *eligible* is one whose virtual start is not after the group's virtual time, and the eligible one
//! with the least virtual finish is next. Service is sectors; virtual time runs at service over the sum of
//! the weights. A group's budget is its next entity's.
//!
//! Function by function the kernel's, with its names; classes real-time and best-effort only.

use super::segments::Segments;

/// Virtual time per sector and weight 1 (kernel `WFQ_SERVICE_SHIFT`).
const SERVICE_SHIFT: u32 = 22;
/// I/O classes: 0 is real-time, 1 best-effort.
pub(super) const CLASSES: usize = 2;
/// The class of groups.
const GROUP_CLASS: u8 = 1;
/// The group that all are in.
pub(super) const ROOT: usize = 0;

/// Where an entity is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tree {
    None,
    Active,
    Idle,
}

/// A queue or a group.
#[derive(Debug)]
pub(super) struct Entity {
    /// The group that schedules it.
    group: usize,
    /// Its place among that group's entities.
    slot: usize,
    /// If it is a group, which.
    own_group: Option<usize>,
    pub(super) class: u8,
    tree: Tree,
    /// Counted in its tree's sum of weights.
    on_tree: bool,
    start: u64,
    finish: u64,
    /// Sectors served since it was selected.
    pub(super) service: u64,
    /// Sectors that it may be served.
    pub(super) budget: u64,
    pub(super) weight: u32,
    /// Its weight while it is not raised.
    pub(super) plain_weight: u32,
    /// Times that its weight is raised; holds from its next activation, or when it is told to.
    pub(super) raise: u32,
    /// Requests that it and those below it have, queued or in the driver.
    allocated: u64,
}

/// Entities of one class in one group.
#[derive(Debug)]
struct ServiceTree {
    active: Segments,
    /// Those that are idle but still ahead of the virtual time. Kept by finish; the complement as start, so
    /// that the greatest finish is at hand as well.
    idle: Segments,
    vtime: u64,
    weights: u64,
}

/// A group's schedule.
#[derive(Debug)]
struct Group {
    trees: [ServiceTree; CLASSES],
    in_service: Option<usize>,
    next: Option<usize>,
    /// Its entity in its parent; none of the root.
    entity: Option<usize>,
    /// Its entities by slot.
    slots: Vec<usize>,
    active: usize,
}

/// All groups and entities.
#[derive(Debug)]
pub(super) struct Hierarchy {
    groups: Vec<Group>,
    pub(super) entities: Vec<Entity>,
    /// Queues in active trees, the one that came last first (`active_list`).
    newer: Vec<usize>,
    older: Vec<usize>,
    newest: usize,
}

/// No queue, in the list.
const END: usize = usize::MAX;

impl Hierarchy {
    /// `groups[g]` are (parent, weight) of group g + 1, whose parent comes before it; `queues` are (group,
    /// class, weight) of each queue, whose entity has the same index. Group 0 is the root.
    pub(super) fn new(groups: &[(usize, u32)], queues: &[(usize, u8, u32)]) -> Self {
        let mut h = Self {
            groups: Vec::new(),
            entities: Vec::new(),
            newer: vec![END; queues.len()],
            older: vec![END; queues.len()],
            newest: END,
        };
        for group in 0..=groups.len() {
            let below = groups.iter().filter(|g| g.0 == group).count();
            h.groups.push(Group::new(below + queues.iter().filter(|q| q.0 == group).count()));
        }
        for &(group, class, weight) in queues {
            h.add(group, None, class, weight);
        }
        for (index, &(parent, weight)) in groups.iter().enumerate() {
            let entity = h.add(parent, Some(index + 1), GROUP_CLASS, weight);
            h.groups[index + 1].entity = Some(entity);
        }
        h
    }

    fn add(&mut self, group: usize, own_group: Option<usize>, class: u8, weight: u32) -> usize {
        let index = self.entities.len();
        let slots = &mut self.groups[group].slots;
        self.entities.push(Entity {
            group,
            slot: slots.len(),
            own_group,
            class,
            tree: Tree::None,
            on_tree: false,
            start: 0,
            finish: 0,
            service: 0,
            budget: 0,
            weight,
            plain_weight: weight,
            raise: 1,
            allocated: 0,
        });
        slots.push(index);
        index
    }

    /// The group of a queue.
    pub(super) fn group_of(&self, queue: usize) -> usize {
        self.entities[queue].group
    }

    /// The weight that counts between queues of different groups.
    pub(super) fn outer_weight(&self, queue: usize) -> u32 {
        let parent = self.parent(queue);
        self.entities[parent.unwrap_or(queue)].weight
    }

    /// A queue's process gets a request, or (-1) gives one back.
    pub(super) fn allocate(&mut self, queue: usize, change: i64) {
        let mut entity = Some(queue);
        while let Some(e) = entity {
            self.entities[e].allocated = self.entities[e].allocated.saturating_add_signed(change);
            entity = self.parent(e);
        }
    }

    /// Whether a queue or a group around it has all its part of `limit` requests (`bfqq_request_over_limit`).
    pub(super) fn over_limit(&self, queue: usize, limit: u64) -> bool {
        self.part_left(queue, limit) == Some(0)
    }

    /// An entity's part of `limit` requests by its weight, 0 if it has them all; none if it takes part in nothing.
    fn part_left(&self, entity: usize, limit: u64) -> Option<u64> {
        let e = &self.entities[entity];
        if !e.on_tree {
            return None;
        }
        let limit = match self.parent(entity) {
            Some(parent) => self.part_left(parent, limit)?,
            None => limit,
        };
        let trees = &self.groups[e.group].trees;
        let weights = match e.own_group {
            Some(_) => self.tree(entity).weights,
            // Those of a better class count 8 times.
            None => trees[..=usize::from(e.class)].iter().fold(0, |sum, t| sum * 8 + t.weights),
        };
        let part = (limit * u64::from(e.weight) + weights / 2) / weights.max(1);
        Some(if e.allocated >= part { 0 } else { part })
    }

    /// Queues in active trees, the one that came last first.
    pub(super) fn active_queues(&self) -> impl Iterator<Item = usize> + '_ {
        let some = |q| (q != END).then_some(q);
        std::iter::successors(some(self.newest), move |&q| some(self.older[q]))
    }

    /// Whether the root would select another entity than the one that it serves.
    pub(super) fn next_may_preempt(&self) -> bool {
        let root = &self.groups[ROOT];
        root.next != root.in_service
    }

    fn parent(&self, entity: usize) -> Option<usize> {
        self.groups[self.entities[entity].group].entity
    }

    fn tree(&self, entity: usize) -> &ServiceTree {
        let e = &self.entities[entity];
        &self.groups[e.group].trees[usize::from(e.class)]
    }

    fn tree_mut(&mut self, entity: usize) -> &mut ServiceTree {
        let e = &self.entities[entity];
        &mut self.groups[e.group].trees[usize::from(e.class)]
    }

    fn calc_finish(&mut self, entity: usize, service: u64) {
        let e = &mut self.entities[entity];
        e.finish = e.start + delta(service, u64::from(e.weight));
    }

    fn active_insert(&mut self, entity: usize) {
        let Entity { slot, start, finish, group, own_group, .. } = self.entities[entity];
        self.tree_mut(entity).active.insert(slot, start, finish);
        self.entities[entity].tree = Tree::Active;
        self.groups[group].active += 1;
        if own_group.is_none() {
            self.older[entity] = self.newest;
            self.newer[entity] = END;
            if self.newest != END {
                self.newer[self.newest] = entity;
            }
            self.newest = entity;
        }
    }

    fn active_extract(&mut self, entity: usize) {
        let Entity { slot, group, own_group, .. } = self.entities[entity];
        self.tree_mut(entity).active.remove(slot);
        self.entities[entity].tree = Tree::None;
        self.groups[group].active -= 1;
        if own_group.is_none() {
            let (newer, older) = (self.newer[entity], self.older[entity]);
            if newer == END {
                self.newest = older
            } else {
                self.older[newer] = older
            }
            if older != END {
                self.newer[older] = newer;
            }
        }
    }

    fn idle_extract(&mut self, entity: usize) {
        let slot = self.entities[entity].slot;
        self.tree_mut(entity).idle.remove(slot);
        self.entities[entity].tree = Tree::None;
    }

    fn forget(&mut self, entity: usize) {
        self.entities[entity].on_tree = false;
        let weight = u64::from(self.entities[entity].weight);
        self.tree_mut(entity).weights -= weight;
    }

    /// Takes one idle entity out that the virtual time has passed (`bfq_forget_idle`).
    fn forget_idle(&mut self, group: usize, class: usize) {
        let tree = &mut self.groups[group].trees[class];
        if tree.idle.is_empty() {
            return;
        }
        let last_finish = !tree.idle.min_start();
        if tree.active.is_empty() && last_finish <= tree.vtime {
            tree.vtime = last_finish;
        }
        let vtime = tree.vtime;
        let Some(slot) = tree.idle.first() else { return };
        let entity = self.groups[group].slots[slot];
        if self.entities[entity].finish <= vtime {
            self.idle_extract(entity);
            self.forget(entity);
        }
    }

    /// Gives `entity` the weight that it should have. Returns whether that changed it.
    pub(super) fn update_weight(&mut self, entity: usize) -> bool {
        let Entity { weight, plain_weight, raise, on_tree, .. } = self.entities[entity];
        let new = plain_weight * raise;
        if new == weight {
            return false;
        }
        self.entities[entity].weight = new;
        if on_tree {
            let tree = self.tree_mut(entity);
            tree.weights = tree.weights - u64::from(weight) + u64::from(new);
        }
        true
    }

    fn update_finish_and_enqueue(&mut self, entity: usize, backshifted: bool) {
        self.update_weight(entity);
        let budget = self.entities[entity].budget;
        self.calc_finish(entity, budget);
        let vtime = self.tree(entity).vtime;
        let e = &mut self.entities[entity];
        if backshifted && vtime > e.finish {
            // Not too far behind; one that is raised less.
            let push = (vtime - e.finish) / u64::from(e.raise);
            e.start += push;
            e.finish += push;
        }
        self.active_insert(entity);
    }

    fn activate_entity(&mut self, entity: usize, recovers: bool) {
        let vtime = self.tree(entity).vtime;
        let finish = self.entities[entity].finish;
        let backshifted = recovers && vtime > finish;
        let least_start = if backshifted { finish } else { vtime };
        if self.entities[entity].tree == Tree::Idle {
            self.idle_extract(entity);
            self.entities[entity].start = least_start.max(finish);
        } else {
            self.entities[entity].start = least_start;
            let weight = u64::from(self.entities[entity].weight);
            self.tree_mut(entity).weights += weight;
            self.entities[entity].on_tree = true;
        }
        self.update_finish_and_enqueue(entity, backshifted);
    }

    fn requeue_entity(&mut self, entity: usize) {
        let group = self.entities[entity].group;
        if self.groups[group].in_service == Some(entity) {
            let service = self.entities[entity].service;
            self.calc_finish(entity, service);
            self.entities[entity].start = self.entities[entity].finish;
            if self.entities[entity].tree == Tree::Active {
                self.active_extract(entity);
            }
        } else {
            self.active_extract(entity);
        }
        self.update_finish_and_enqueue(entity, false);
    }

    /// `bfq_activate_requeue_entity`: `recovers` if the queue waited for a request without blocking, `requeue`
    /// if it is the queue in service, `expiration` if that ends.
    fn activate_requeue(&mut self, queue: usize, recovers: bool, requeue: bool, expiration: bool) {
        let mut entity = Some(queue);
        while let Some(e) = entity {
            let group = self.entities[e].group;
            if self.groups[group].in_service == Some(e) || self.entities[e].tree == Tree::Active {
                self.requeue_entity(e);
            } else {
                self.activate_entity(e, recovers);
            }
            if !self.update_next(group, Some(e), expiration) && !requeue {
                break;
            }
            entity = self.parent(e);
        }
    }

    /// A queue has requests again.
    pub(super) fn activate(&mut self, queue: usize, recovers: bool) {
        self.activate_requeue(queue, recovers, false, false);
    }

    /// A queue's budget has changed, or (`in_service`) it is to be served later.
    pub(super) fn requeue(&mut self, queue: usize, in_service: bool, expiration: bool) {
        self.activate_requeue(queue, false, in_service, expiration);
    }

    /// A queue has no requests any more (`bfq_deactivate_entity`).
    pub(super) fn deactivate(&mut self, queue: usize, expiration: bool) {
        let mut entity = Some(queue);
        let mut rest = None;
        while let Some(e) = entity {
            rest = self.parent(e);
            let group = self.entities[e].group;
            if !self.deactivate_entity(e) {
                return;
            }
            if self.groups[group].next == Some(e) {
                self.update_next(group, None, expiration);
            }
            if self.groups[group].next.is_some() || self.groups[group].in_service.is_some() {
                break;
            }
            entity = rest;
        }
        let mut entity = rest;
        while let Some(e) = entity {
            self.requeue_entity(e);
            let group = self.entities[e].group;
            if !self.update_next(group, Some(e), expiration) && !expiration {
                break;
            }
            entity = self.parent(e);
        }
    }

    fn deactivate_entity(&mut self, entity: usize) -> bool {
        if !self.entities[entity].on_tree {
            return false;
        }
        let group = self.entities[entity].group;
        let in_service = self.groups[group].in_service == Some(entity);
        let service = self.entities[entity].service;
        self.calc_finish(entity, service);
        if in_service {
            self.groups[group].in_service = None;
        } else {
            self.entities[entity].service = 0;
        }
        match self.entities[entity].tree {
            Tree::Active => self.active_extract(entity),
            Tree::Idle if !in_service => self.idle_extract(entity),
            Tree::Idle | Tree::None => {}
        }
        let Entity { finish, slot, .. } = self.entities[entity];
        let tree = self.tree_mut(entity);
        if finish > tree.vtime {
            tree.idle.insert(slot, !finish, finish);
            self.entities[entity].tree = Tree::Idle;
        } else {
            self.forget(entity);
        }
        true
    }

    /// Charges `sectors` to a queue and all above it (`bfq_bfqq_served`).
    pub(super) fn serve(&mut self, queue: usize, sectors: u64) {
        let mut entity = Some(queue);
        while let Some(e) = entity {
            self.entities[e].service += sectors;
            let Entity { group, class, .. } = self.entities[e];
            let tree = self.tree_mut(e);
            tree.vtime += delta(sectors, tree.weights.max(1));
            self.forget_idle(group, usize::from(class));
            entity = self.parent(e);
        }
    }

    /// Selects the next queue and sets it in service (`bfq_get_next_queue`).
    pub(super) fn select(&mut self) -> Option<usize> {
        let mut group = ROOT;
        let queue = loop {
            let entity = self.groups[group].next?;
            self.groups[group].in_service = Some(entity);
            let own = self.entities[entity].own_group;
            // A group with others that are active stays a candidate.
            if own.is_none_or(|g| self.groups[g].active == 1) {
                self.active_extract(entity);
            }
            match own {
                None => break entity,
                Some(own) => group = own,
            }
        };
        let mut entity = Some(queue);
        while let Some(e) = entity {
            if !self.update_next(self.entities[e].group, None, false) {
                break;
            }
            entity = self.parent(e);
        }
        Some(queue)
    }

    /// Nothing is in service any more on the way to `queue` (`__bfq_bfqd_reset_in_service`). Groups' service is
    /// counted anew.
    pub(super) fn reset_in_service(&mut self, queue: usize) {
        let mut entity = Some(queue);
        while let Some(e) = entity {
            let group = self.entities[e].group;
            self.groups[group].in_service = None;
            entity = self.parent(e);
            if let Some(parent) = entity {
                self.entities[parent].service = 0;
            }
        }
    }

    /// `bfq_update_next_in_service`. Returns whether the parent may have to change its choice.
    fn update_next(&mut self, group: usize, changed: Option<usize>, expiration: bool) -> bool {
        let current = self.groups[group].next;
        let direct = match (changed, current) {
            (Some(new), Some(next)) if new != next => {
                let (n, c) = (&self.entities[new], &self.entities[next]);
                n.class == c.class && n.start <= self.tree(new).vtime && c.finish > n.finish
            }
            (Some(_), None) => true,
            _ => false,
        };
        let next = if direct { changed } else { self.lookup(group, expiration) };
        let parent_may_change =
            next.is_some_and(|next| current.is_none() | self.update_parent_budget(group, next));
        self.groups[group].next = next;
        parent_may_change
    }

    fn update_parent_budget(&mut self, group: usize, next: usize) -> bool {
        let budget = self.entities[next].budget;
        let Some(parent) = self.groups[group].entity else { return false };
        let shrinks = self.entities[parent].budget > budget;
        self.entities[parent].budget = budget;
        shrinks
    }

    /// `bfq_lookup_next_entity`.
    fn lookup(&mut self, group: usize, expiration: bool) -> Option<usize> {
        let serves = self.groups[group].in_service.is_some() && !expiration;
        for class in 0..CLASSES {
            let tree = &mut self.groups[group].trees[class];
            if tree.active.is_empty() {
                continue;
            }
            let vtime = tree.vtime.max(tree.active.min_start());
            if !serves && vtime > tree.vtime {
                tree.vtime = vtime;
                self.forget_idle(group, class);
            }
            let slot = self.groups[group].trees[class].active.first_started(vtime)?;
            return Some(self.groups[group].slots[slot]);
        }
        None
    }
}

impl Group {
    fn new(children: usize) -> Self {
        let tree = || ServiceTree {
            active: Segments::new(children),
            idle: Segments::new(children),
            vtime: 1,
            weights: 0,
        };
        Self {
            trees: [tree(), tree()],
            in_service: None,
            next: None,
            entity: None,
            slots: Vec::with_capacity(children),
            active: 0,
        }
    }
}

/// Service in virtual time (`bfq_delta`).
const fn delta(service: u64, weight: u64) -> u64 {
    (service << SERVICE_SHIFT) / weight
}
