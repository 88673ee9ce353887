//! What a server counts.

use std::collections::BTreeMap;

/// A server's own counters, its answer to the four-letter word `mntr`.
///
/// They are of the whole server: what other tests of the same binary do shows too. To count
/// exactly, use a server of your own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mntr {
    counts: BTreeMap<String, i64>,
}

impl Mntr {
    /// The value of one counter, say `zk_packets_received`.
    ///
    /// # Panics
    ///
    /// If the server has no such counter: a misspelt name would otherwise read as "nothing happened".
    pub fn count(&self, name: &str) -> u64 {
        match self.counts.get(name) {
            Some(count) => (*count).max(0) as u64,
            None => panic!("the server has no counter '{name}'; it has {:?}", self.counts.keys()),
        }
    }

    /// Watches fired because a node's data changed.
    pub fn node_changed(&self) -> u64 {
        self.count("zk_sum_node_changed_watch_count")
    }

    /// Watches fired because a node was deleted.
    pub fn node_deleted(&self) -> u64 {
        self.count("zk_sum_node_deleted_watch_count")
    }

    /// Watches fired because a node got or lost a child.
    pub fn node_children(&self) -> u64 {
        self.count("zk_sum_node_children_watch_count")
    }

    /// Watches fired because a node was created.
    pub fn node_created(&self) -> u64 {
        self.count("zk_sum_node_created_watch_count")
    }

    /// Watches fired, of every kind.
    pub fn watches_fired(&self) -> u64 {
        self.node_changed() + self.node_deleted() + self.node_children() + self.node_created()
    }

    /// Packets sent to clients: answers, pings' answers and notifications.
    pub fn packets_sent(&self) -> u64 {
        self.count("zk_packets_sent")
    }

    /// Packets received from clients: requests, pings and four-letter words, `mntr` itself included.
    pub fn packets_received(&self) -> u64 {
        self.count("zk_packets_received")
    }

    /// Watches that are set now.
    pub fn watch_count(&self) -> u64 {
        self.count("zk_watch_count")
    }

    /// How much each counter rose since an earlier look. One that fell, as gauges do, is 0.
    pub fn since(&self, earlier: &Mntr) -> Mntr {
        let rise = |(name, count): (&String, &i64)| {
            let before = earlier.counts.get(name).unwrap_or(&0);
            (name.clone(), (count - before).max(0))
        };
        Mntr { counts: self.counts.iter().map(rise).collect() }
    }

    /// Reads the answer's lines, `name<TAB>value`; those whose value is no integer are left out.
    pub(crate) fn parse(answer: &str) -> Mntr {
        let count = |line: &str| {
            let (name, value) = line.split_once('\t')?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        };
        Mntr { counts: answer.lines().filter_map(count).collect() }
    }

    /// Adds up the counters of an ensemble's servers.
    pub(crate) fn add(&mut self, other: Mntr) {
        for (name, count) in other.counts {
            *self.counts.entry(name).or_default() += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = "zk_version\t3.9.3-x, built on 2026-03-08\nzk_avg_latency\t0.25\nzk_packets_received\t7\n\
         zk_sum_node_deleted_watch_count\t3\n";

    #[test]
    fn integers_are_counters_and_the_rest_is_left_out() {
        let mntr = Mntr::parse(ANSWER);
        assert_eq!(mntr.packets_received(), 7);
        assert_eq!(mntr.node_deleted(), 3);
        assert_eq!(mntr.counts.len(), 2);
    }

    #[test]
    fn a_difference_counts_what_rose() {
        let earlier = Mntr::parse("zk_packets_received\t5\nzk_sum_node_deleted_watch_count\t4\n");
        let rise = Mntr::parse(ANSWER).since(&earlier);
        assert_eq!((rise.packets_received(), rise.node_deleted()), (2, 0));
    }

    #[test]
    #[should_panic(expected = "no counter 'zk_packets_recieved'")]
    fn a_misspelt_counter_is_no_zero() {
        Mntr::parse(ANSWER).count("zk_packets_recieved");
    }
}
