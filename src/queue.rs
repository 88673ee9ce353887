//! The rule of the queue: who holds, and whom everyone else waits for.

#[cfg(test)]
use std::num::NonZeroU32;

use crate::name::{Entry, Kind};

/// The contenders of one lock in the order in which they are served, as one listing showed them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Queue {
    entries: Vec<Entry>,
}

/// What a listing means for one of its contenders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict<'a> {
    /// Nobody before it excludes it.
    Held,
    /// It has to wait for this one, the nearest of those before it that exclude it. `is_only`: of all that are
    /// before it, whether they exclude it or not, this is the only one.
    Wait { on: &'a Entry, is_only: bool },
    /// It is not in the queue (any more).
    Absent,
}

/// What a listing means for one of the contenders for several permits. Only the model uses it: no recipe does yet.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Permit<'a> {
    Held,
    /// It has to wait until one of these goes: as many as there are permits, the nearest before it, in their order.
    /// As long as all of them are there they leave it no permit; and if everybody else goes, whichever of them goes
    /// first leaves it one, so each has to be watched.
    Wait {
        nearest: &'a [Entry],
    },
    /// It is not in the queue (any more).
    Absent,
}

impl Queue {
    /// Orders the children of a lock's node; those that are no contenders are counted and left out.
    pub fn new<N: AsRef<str>>(children: impl IntoIterator<Item = N>) -> (Self, usize) {
        let mut foreign = 0;
        let mut entries = Vec::new();
        for child in children {
            match Entry::parse(child.as_ref()) {
                Some(entry) => entries.push(entry),
                None => foreign += 1,
            }
        }
        entries.sort_unstable_by(|a, b| a.place().cmp(&b.place()));
        (Self { entries }, foreign)
    }

    /// What this listing means for the contender with node `name` that asks for `kind`.
    pub fn verdict(&self, name: &str, kind: Kind) -> Verdict<'_> {
        let Some(position) = self.position(name) else {
            return Verdict::Absent;
        };
        let excluding = self.entries[..position].iter().rev().find(|earlier| excludes(earlier.kind, kind));
        excluding.map_or(Verdict::Held, |on| Verdict::Wait { on, is_only: position == 1 })
    }

    /// What this listing means for the contender with node `name`, where each takes one of so many permits.
    #[cfg(test)]
    pub fn permit(&self, name: &str, permits: NonZeroU32) -> Permit<'_> {
        let Some(position) = self.position(name) else {
            return Permit::Absent;
        };
        let others = position.checked_sub(permits.get() as usize);
        others.map_or(Permit::Held, |others| Permit::Wait { nearest: &self.entries[others..position] })
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn into_entries(self) -> Vec<Entry> {
        self.entries
    }

    fn position(&self, name: &str) -> Option<usize> {
        let sequence = Entry::parse(name)?.sequence;
        self.entries.binary_search_by(|entry| entry.place().cmp(&(sequence, name))).ok()
    }
}

fn excludes(earlier: Kind, later: Kind) -> bool {
    earlier == Kind::Exclusive || later == Kind::Exclusive
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn queue(children: &[&str]) -> Queue {
        Queue::new(children).0
    }

    #[test]
    fn the_lowest_number_holds_and_the_others_wait_for_the_one_before() {
        let children = ["_c_a-lock-0000000012", "_c_b-lock-0000000009", "_c_c-lock-0000000010"];
        let queue = queue(&children);
        assert_eq!(queue.verdict("_c_b-lock-0000000009", Kind::Exclusive), Verdict::Held);
        let waits_for = |name| match queue.verdict(name, Kind::Exclusive) {
            Verdict::Wait { on, .. } => on.name.clone(),
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(waits_for("_c_c-lock-0000000010"), "_c_b-lock-0000000009");
        assert_eq!(waits_for("_c_a-lock-0000000012"), "_c_c-lock-0000000010");
    }

    #[test]
    fn numbers_are_compared_as_numbers_whatever_stands_before_them() {
        let queue = queue(&["zzz__lock__0000000001", "_c_a-lock-10000000000", "lock-2147483647", "x-5--000000003"]);
        let order: Vec<i64> = queue.entries.iter().map(|entry| entry.sequence).collect();
        assert_eq!(order, [-3, 1, 2147483647, 10000000000]);
    }

    #[test]
    fn a_reader_waits_for_the_nearest_earlier_writer_and_a_writer_for_everyone() {
        let queue =
            queue(&["a__WRIT__0000000001", "b__READ__0000000002", "c__READ__0000000003", "d__WRIT__0000000004"]);
        let waits_for = |name, kind| match queue.verdict(name, kind) {
            Verdict::Wait { on, .. } => on.sequence,
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(waits_for("c__READ__0000000003", Kind::Shared), 1);
        assert_eq!(waits_for("d__WRIT__0000000004", Kind::Exclusive), 3);
    }

    #[test]
    fn a_contender_whose_node_is_gone_is_told_so() {
        assert_eq!(queue(&["lock-0000000001"]).verdict("lock-0000000002", Kind::Exclusive), Verdict::Absent);
        assert_eq!(queue(&[]).verdict("lock-0000000002", Kind::Exclusive), Verdict::Absent);
    }

    fn any_child() -> impl Strategy<Value = String> {
        let number = prop_oneof![
            any::<i32>().prop_map(|n| format!("{n:010}")),
            (-3i32..3).prop_map(|n| format!("{n:010}")),
            (0i64..1 << 60).prop_map(|n| format!("{n:019}")),
        ];
        let prefix = prop_oneof![
            Just("lock-".to_owned()),
            "[0-9a-f]{4}".prop_map(|hex| format!("_c_{hex}-lock-")),
            "[0-9a-f]{4}".prop_map(|hex| format!("_c_{hex}-__READ__")),
            "[0-9a-f]{4}".prop_map(|hex| format!("_c_{hex}-__WRIT__")),
            "[0-9a-f]{4}".prop_map(|hex| format!("{hex}__lock__")),
            "[0-9a-f]{4}".prop_map(|hex| format!("{hex}__rlock__")),
            any::<i64>().prop_map(|session| format!("x-{session}-")),
            Just("config-".to_owned()),
            "\\PC{0,6}",
        ];
        (prefix, number).prop_map(|(prefix, number)| prefix + &number)
    }

    proptest! {
        /// The same order for everyone, whoever lists and however the server orders the children.
        #[test]
        fn the_order_does_not_depend_on_the_listing(
            mut children in prop::collection::hash_set(any_child(), 0..40)
                .prop_map(|set| set.into_iter().collect::<Vec<_>>()),
        ) {
            let before = Queue::new(&children);
            children.reverse();
            prop_assert_eq!(before, Queue::new(&children));
        }

        /// Exactly one exclusive contender can hold at a time, and never beside anyone else.
        #[test]
        fn holders_never_exclude_each_other(children in prop::collection::hash_set(any_child(), 0..40)) {
            let (queue, foreign) = Queue::new(&children);
            prop_assert_eq!(queue.entries.len() + foreign, children.len());
            let holders: Vec<&Entry> =
                queue.entries.iter().filter(|e| queue.verdict(&e.name, e.kind) == Verdict::Held).collect();
            prop_assert_eq!(holders.is_empty(), queue.is_empty());
            if holders.iter().any(|holder| holder.kind == Kind::Exclusive) {
                prop_assert_eq!(holders.len(), 1);
            }
        }

        /// Permits go to the first in the queue. A waiter's turn has not come as long as all that it watches are there,
        /// whoever else goes; and any one of them can be the one whose going makes it its turn.
        #[test]
        fn a_waiter_for_a_permit_watches_those_whose_going_can_make_it_its_turn_and_nobody_else(
            numbers in prop::collection::btree_set(0..1000, 0..12),
            permits in 1u32..5,
            going in any::<u16>(),
        ) {
            let permits = NonZeroU32::new(permits).unwrap();
            let names: Vec<String> = numbers.iter().map(|number| format!("lock-{number:010}")).collect();
            let (all, _) = Queue::new(&names);
            for (position, name) in names.iter().enumerate() {
                let nearest: Vec<&str> = match all.permit(name, permits) {
                    Permit::Held => {
                        prop_assert!(position < permits.get() as usize);
                        continue;
                    }
                    Permit::Wait { nearest } => nearest.iter().map(|entry| entry.name.as_str()).collect(),
                    Permit::Absent => return Err(TestCaseError::fail("it is in the queue")),
                };
                let without = |is_going: &dyn Fn(usize, &str) -> bool| {
                    let staying = names.iter().enumerate().filter(|(i, other)| *other == name || !is_going(*i, other));
                    Queue::new(staying.map(|(_, other)| other)).0
                };
                let others_go = without(&|i, other| going >> i & 1 == 1 && !nearest.contains(&other));
                prop_assert_eq!(others_go.permit(name, permits), all.permit(name, permits));
                for last in &nearest {
                    let one_is_enough = without(&|_, other| other == *last || !nearest.contains(&other));
                    prop_assert_eq!(one_is_enough.permit(name, permits), Permit::Held);
                }
            }
        }

        /// Each waiter waits for an earlier one that excludes it, with none between them that does.
        #[test]
        fn everyone_waits_for_the_nearest_that_excludes(children in prop::collection::hash_set(any_child(), 0..40)) {
            let (queue, _) = Queue::new(&children);
            for (position, entry) in queue.entries.iter().enumerate() {
                match queue.verdict(&entry.name, entry.kind) {
                    Verdict::Held => {
                        prop_assert!(queue.entries[..position].iter().all(|e| !excludes(e.kind, entry.kind)));
                    }
                    Verdict::Wait { on, is_only } => {
                        prop_assert_eq!(is_only, position == 1);
                        let at = queue.entries.iter().position(|e| e == on).unwrap();
                        prop_assert!(at < position && excludes(on.kind, entry.kind));
                        prop_assert!(queue.entries[at + 1..position].iter().all(|e| !excludes(e.kind, entry.kind)));
                    }
                    Verdict::Absent => prop_assert!(false, "{} is absent from its own queue", entry.name),
                }
            }
        }
    }
}
