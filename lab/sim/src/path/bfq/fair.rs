//! B-WF²Q+ over a tree of groups: who is served next, by weight.
//!
//! The algorithm is that of Valente and Checconi, *High Throughput Disk Scheduling with Fair Bandwidth
//! Distribution* (IEEE Transactions on Computers 59(9), 2010), section 4: WF²Q+ (Bennett and Zhang,
//! *Hierarchical Packet Fair Queueing Algorithms*, IEEE/ACM Transactions on Networking 5(5), 1997) whose packets
//! are budgets of sectors, of which less may be used than was given. Within a group each child has a virtual start
//! time S and finish time F = S + budget / weight, and is eligible once the group's virtual time V has reached S; the
//! eligible child with the least F is served. A group's budget is that of its child which is next.

/// Virtual time, sectors by weight.
type Virtual = f64;

/// The class of best-effort queues, and of all groups; that of real-time ones is 0.
pub(super) const BEST_EFFORT: u8 = 1;

/// A queue or a group, as a child of its group.
#[derive(Debug)]
struct Node {
    parent: usize,
    weight: f64,
    class: u8,
    start: Virtual,
    finish: Virtual,
    /// What it may be served, and what it has been since it was chosen, sectors.
    budget: u64,
    served: u64,
    backlogged: bool,
    /// Tags that its requests hold.
    tags: u32,
}

#[derive(Debug, Default)]
struct Group {
    /// The group as a node of its own parent; none of the root.
    node: Option<usize>,
    /// Its backlogged children.
    children: Vec<usize>,
    /// Children without requests that have been served ahead of the others: until virtual time has reached their finish
    /// times, their weights count.
    ahead: Vec<usize>,
    now: Virtual,
    /// The child that is served, if one is.
    serving: Option<usize>,
}

/// The tree. Queues are nodes 0 to n - 1, group 0 is the root.
#[derive(Debug)]
pub(super) struct FairTree {
    nodes: Vec<Node>,
    groups: Vec<Group>,
    /// Which group a node is; of queues none.
    group_of: Vec<Option<usize>>,
}

impl FairTree {
    /// `groups[g]` are parent and weight of group g + 1; `queues` are group, class and weight of each.
    pub(super) fn new(groups: &[(usize, u32)], queues: &[(usize, u8, u32)]) -> Self {
        let node = |parent, weight: u32, class| Node {
            parent,
            weight: f64::from(weight),
            class,
            start: 0.0,
            finish: 0.0,
            budget: 0,
            served: 0,
            backlogged: false,
            tags: 0,
        };
        let mut tree = Self {
            nodes: queues
                .iter()
                .map(|&(group, class, weight)| node(group, weight, class))
                .collect(),
            groups: vec![Group::default()],
            group_of: vec![None; queues.len()],
        };
        for (index, &(parent, weight)) in groups.iter().enumerate() {
            tree.groups.push(Group { node: Some(tree.nodes.len()), ..Group::default() });
            tree.nodes.push(node(parent, weight, BEST_EFFORT));
            tree.group_of.push(Some(index + 1));
        }
        tree
    }

    pub(super) fn group(&self, queue: usize) -> usize {
        self.nodes[queue].parent
    }

    pub(super) fn class(&self, queue: usize) -> u8 {
        self.nodes[queue].class
    }

    pub(super) fn weight(&self, queue: usize) -> f64 {
        self.nodes[queue].weight
    }

    /// The weight of the queue's group; of a queue in the root its own.
    pub(super) fn group_weight(&self, queue: usize) -> f64 {
        let node = self.groups[self.nodes[queue].parent].node.unwrap_or(queue);
        self.nodes[node].weight
    }

    /// It counts from the next budget on.
    pub(super) fn set_weight(&mut self, queue: usize, weight: f64) {
        self.nodes[queue].weight = weight;
    }

    pub(super) fn served(&self, queue: usize) -> u64 {
        self.nodes[queue].served
    }

    pub(super) fn budget(&self, queue: usize) -> u64 {
        self.nodes[queue].budget
    }

    pub(super) fn left(&self, queue: usize) -> u64 {
        self.nodes[queue].budget.saturating_sub(self.nodes[queue].served)
    }

    /// The node and all that it is in, from the inside.
    fn path(&self, node: usize) -> impl Iterator<Item = usize> + use<'_> {
        std::iter::successors(Some(node), |&node| self.groups[self.nodes[node].parent].node)
    }

    /// The queue, and groups that it is the first backlogged child of, become backlogged. One that `resumes` has made
    /// its device wait for less than a process needs to think: it goes on where it ended, as if it had always been
    /// backlogged, but no later than now.
    pub(super) fn activate(&mut self, queue: usize, budget: u64, resumes: bool) {
        let mut node = Some(queue);
        while let Some(child) = node {
            let group = self.nodes[child].parent;
            let now = self.groups[group].now;
            let n = &mut self.nodes[child];
            if n.backlogged {
                break;
            }
            n.backlogged = true;
            n.budget = budget;
            n.served = 0;
            n.start = if resumes { n.finish } else { n.finish.max(now) };
            n.finish = n.start + budget as f64 / n.weight;
            if n.finish < now {
                n.start += now - n.finish;
                n.finish = now;
            }
            self.groups[group].ahead.retain(|&other| other != child);
            self.groups[group].children.push(child);
            node = self.groups[group].node;
        }
    }

    /// A queue that is not served gets another budget.
    pub(super) fn set_budget(&mut self, queue: usize, budget: u64) {
        let n = &mut self.nodes[queue];
        n.budget = budget;
        n.finish = n.start + budget as f64 / n.weight;
    }

    /// A queue that is served may be served this much in all.
    pub(super) fn extend(&mut self, queue: usize, budget: u64) {
        let n = &mut self.nodes[queue];
        n.budget = n.budget.max(budget);
    }

    /// The queue that is next, which is served from now on.
    pub(super) fn select(&mut self) -> Option<usize> {
        let mut group = 0;
        loop {
            let child = self.next_of(group)?;
            let least = self.min_start(group)?;
            let g = &mut self.groups[group];
            // One that begins alone is served as it comes.
            if g.children.len() > 1 {
                g.now = g.now.max(least);
            }
            g.serving = Some(child);
            match self.group_of[child] {
                Some(inner) => group = inner,
                None => break,
            }
        }
        self.groups.iter().find_map(|g| g.serving.filter(|&c| self.group_of[c].is_none()))
    }

    fn min_start(&self, group: usize) -> Option<Virtual> {
        let starts = self.groups[group].children.iter().map(|&c| self.nodes[c].start);
        starts.min_by(f64::total_cmp)
    }

    /// The eligible child of the lowest class with the least finish time.
    fn next_of(&self, group: usize) -> Option<usize> {
        let g = &self.groups[group];
        let class = g.children.iter().map(|&c| self.nodes[c].class).min()?;
        let children = || g.children.iter().copied().filter(|&c| self.nodes[c].class == class);
        let least = children().map(|c| self.nodes[c].start).min_by(f64::total_cmp)?;
        let now = g.now.max(least);
        children()
            .filter(|&c| self.nodes[c].start <= now)
            .min_by(|&a, &b| self.nodes[a].finish.total_cmp(&self.nodes[b].finish))
    }

    /// Another child of the root than the one that is served would be next.
    pub(super) fn root_would_change(&self) -> bool {
        self.next_of(0) != self.groups[0].serving
    }

    /// `queue` is served `sectors`, whether it is its turn or not.
    pub(super) fn charge(&mut self, queue: usize, sectors: u64) {
        let mut node = Some(queue);
        while let Some(child) = node {
            let group = self.nodes[child].parent;
            self.nodes[child].served += sectors;
            let weights = self.weights(group);
            let g = &mut self.groups[group];
            g.now += sectors as f64 / weights.max(1.0);
            let now = g.now;
            g.ahead.retain(|&other| self.nodes[other].finish > now);
            node = g.node;
        }
    }

    /// The weights that share a group's service.
    fn weights(&self, group: usize) -> f64 {
        let g = &self.groups[group];
        g.children.iter().chain(&g.ahead).map(|&child| self.nodes[child].weight).sum()
    }

    /// The child has no more requests.
    fn leave(&mut self, child: usize) {
        let n = &mut self.nodes[child];
        n.backlogged = false;
        let g = &mut self.groups[n.parent];
        g.children.retain(|&other| other != child);
        if n.finish > g.now {
            g.ahead.push(child);
        }
    }

    /// The queue is not served any more; it gets this budget for the next time, or has nothing to be served.
    pub(super) fn expire(&mut self, queue: usize, budget: Option<u64>) {
        self.settle(queue, budget);
        for group in &mut self.groups {
            group.serving = None;
        }
    }

    /// Nodes from the queue up are charged what they were served, in the place of their budgets.
    fn settle(&mut self, queue: usize, budget: Option<u64>) {
        let path: Vec<_> = self.path(queue).collect();
        let mut next = budget;
        for node in path {
            let parent = self.nodes[node].parent;
            let n = &mut self.nodes[node];
            n.finish = n.start + n.served as f64 / n.weight;
            n.served = 0;
            match next {
                Some(budget) => {
                    n.budget = budget;
                    n.start = n.finish;
                    n.finish = n.start + budget as f64 / n.weight;
                }
                None => self.leave(node),
            }
            next = self.next_of(parent).map(|child| self.nodes[child].budget);
        }
    }

    /// A queue that is not in service has had its last request served.
    pub(super) fn deactivate(&mut self, queue: usize) {
        let mut node = Some(queue);
        while let Some(child) = node {
            let group = self.nodes[child].parent;
            let n = &mut self.nodes[child];
            n.finish = n.start + n.served as f64 / n.weight;
            n.served = 0;
            self.leave(child);
            let g = &self.groups[group];
            node = if g.children.is_empty() && g.serving.is_none() { g.node } else { None };
        }
    }

    /// A request of the queue got a tag, or gave it back.
    pub(super) fn hold_tags(&mut self, queue: usize, change: i32) {
        let path: Vec<_> = self.path(queue).collect();
        for node in path {
            self.nodes[node].tags = self.nodes[node].tags.saturating_add_signed(change);
        }
    }

    /// Whether the queue, or a group that it is in, holds its share of `tags` among those that are backlogged.
    pub(super) fn has_its_tags(&self, queue: usize, tags: f64) -> bool {
        let path: Vec<_> = self.path(queue).collect();
        let mut share = tags;
        for &node in path.iter().rev() {
            let n = &self.nodes[node];
            let g = &self.groups[n.parent];
            let others = g.children.iter().chain(&g.ahead).filter(|&&other| other != node);
            let sum = n.weight + others.map(|&c| self.nodes[c].weight).sum::<f64>();
            share = (share * n.weight / sum).round();
            if f64::from(n.tags) >= share {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves whoever is next, budget after budget; what each got.
    fn served(tree: &mut FairTree, queues: usize, rounds: u32) -> Vec<u64> {
        let mut got = vec![0; queues];
        for _ in 0..rounds {
            let queue = tree.select().unwrap();
            let budget = tree.budget(queue);
            tree.charge(queue, budget);
            got[queue] += budget;
            tree.expire(queue, Some(budget));
        }
        got
    }

    #[test]
    fn queues_are_served_by_the_weights_of_their_groups_whatever_their_budgets() {
        let mut tree = FairTree::new(&[(0, 300), (0, 100)], &[(1, 1, 40), (1, 1, 40), (2, 1, 40)]);
        for (queue, budget) in [(0, 64), (1, 512), (2, 128)] {
            tree.activate(queue, budget, false);
        }
        let got = served(&mut tree, 3, 4_000);
        let ratio = (got[0] + got[1]) as f64 / got[2] as f64;
        assert!((2.9..3.1).contains(&ratio), "{got:?}");
        assert!((0.95..1.05).contains(&(got[0] as f64 / got[1] as f64)), "{got:?}");
    }

    #[test]
    fn real_time_queues_of_a_group_come_first() {
        let mut tree = FairTree::new(&[(0, 100)], &[(1, 1, 40), (1, 0, 40)]);
        tree.activate(0, 64, false);
        tree.activate(1, 64, false);
        assert_eq!(served(&mut tree, 2, 10), [0, 640]);
    }

    #[test]
    fn who_comes_back_has_saved_nothing_up() {
        let mut tree = FairTree::new(&[], &[(0, 1, 100), (0, 1, 100)]);
        tree.activate(0, 100, false);
        served(&mut tree, 2, 1_000);
        tree.activate(1, 100, false);
        let got = served(&mut tree, 2, 100);
        assert!(got[0].abs_diff(got[1]) <= 200, "{got:?}");
    }

    #[test]
    fn tags_are_shared_by_weight_among_those_with_requests() {
        let mut tree = FairTree::new(&[(0, 300), (0, 100)], &[(1, 1, 40), (2, 1, 40)]);
        tree.activate(0, 64, false);
        tree.hold_tags(0, 100);
        assert!(!tree.has_its_tags(0, 128.0));
        tree.activate(1, 64, false);
        assert!(tree.has_its_tags(0, 128.0) && !tree.has_its_tags(1, 128.0));
        tree.hold_tags(0, -10);
        assert!(!tree.has_its_tags(0, 128.0));
    }
}
