//! The rule of a semaphore, with all that can happen to a few contenders: which of those before it a waiter watches.
//!
//! This is the rule alone; there is no recipe for it yet. Servers that lag behind are left out: what they show has
//! been true, and of those that are before a contender there are only ever fewer.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use stateright::{Checker, Model, Property};

use crate::queue::{Permit, Queue};

/// Contenders for some permits, each of whom takes one. They come in the order of their numbers.
struct Universe {
    contenders: usize,
    permits: NonZeroU32,
    rule: Rule,
}

/// Whom a waiter watches.
#[derive(Clone, Copy, Debug)]
enum Rule {
    /// As many as there are permits, the nearest before it.
    AllOfTheNearest,
    /// Of these the farthest alone, as Curator does.
    TheFarthest,
    /// Of these all but the farthest.
    AllButTheFarthest,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Room {
    contenders: Vec<Contender>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Contender {
    phase: Phase,
    watched: BTreeSet<usize>,
    /// A watch has fired, of which it has not heard yet.
    is_told: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Outside,
    /// Its node is in the queue, and it asks for a list.
    Listing,
    /// Those that it has yet to watch, one request for each.
    Arming(Vec<usize>),
    Waiting,
    Holding,
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Action {
    Join(usize),
    List(usize),
    Arm(usize),
    Hear(usize),
    /// It lets go of its permit, gives up or dies: its node goes, and those who watch it are told.
    Leave(usize),
}

impl Model for Universe {
    type State = Room;
    type Action = Action;

    fn init_states(&self) -> Vec<Room> {
        let outside = Contender { phase: Phase::Outside, watched: BTreeSet::new(), is_told: false };
        vec![Room { contenders: vec![outside; self.contenders] }]
    }

    fn actions(&self, room: &Room, actions: &mut Vec<Action>) {
        for (i, contender) in room.contenders.iter().enumerate() {
            match contender.phase {
                Phase::Outside => {
                    actions.push(Action::Join(i));
                    // The others are not to be told from it.
                    return;
                }
                Phase::Listing => actions.push(Action::List(i)),
                Phase::Arming(_) => actions.push(Action::Arm(i)),
                Phase::Waiting | Phase::Holding => {}
                Phase::Gone => continue,
            }
            if contender.is_told {
                actions.push(Action::Hear(i));
            }
            actions.push(Action::Leave(i));
        }
    }

    fn next_state(&self, room: &Room, action: Action) -> Option<Room> {
        let mut next = room.clone();
        match action {
            Action::Join(i) => next.list(i),
            Action::List(i) => next.contenders[i].phase = self.listed(room, i),
            Action::Arm(i) => next.arm(i),
            Action::Hear(i) => next.list(i),
            Action::Leave(i) => next.leave(i),
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nobody sleeps while a permit is free to him", |universe: &Self, room: &Room| {
                universe.sleeper(room).is_none()
            }),
            Property::always("no more hold than there are permits", |universe: &Self, room: &Room| {
                room.holders() <= universe.permits.get() as usize
            }),
            Property::sometimes("all permits are taken", |universe: &Self, room: &Room| {
                room.holders() == universe.permits.get() as usize
            }),
            Property::sometimes("all have come and gone", |_, room: &Room| {
                room.contenders.iter().all(|contender| contender.phase == Phase::Gone)
            }),
        ]
    }
}

impl Universe {
    fn listed(&self, room: &Room, i: usize) -> Phase {
        let (queue, _) = Queue::new(room.present().map(name));
        match queue.permit(&name(i), self.permits) {
            Permit::Held => Phase::Holding,
            Permit::Wait { nearest } => {
                let watched = match self.rule {
                    Rule::AllOfTheNearest => nearest,
                    Rule::TheFarthest => &nearest[..1],
                    Rule::AllButTheFarthest => &nearest[1..],
                };
                match watched {
                    [] => Phase::Waiting,
                    watched => Phase::Arming(watched.iter().map(|entry| entry.sequence as usize).collect()),
                }
            }
            Permit::Absent => unreachable!("{i} is in the queue"),
        }
    }

    /// Who waits, with nothing on its way to tell it that it could hold.
    fn sleeper(&self, room: &Room) -> Option<usize> {
        let permits = self.permits.get() as usize;
        room.present().take(permits).find(|&i| {
            let contender = &room.contenders[i];
            contender.phase == Phase::Waiting && !contender.is_told
        })
    }
}

impl Room {
    /// Those with a node, in their order.
    fn present(&self) -> impl Iterator<Item = usize> {
        (0..self.contenders.len()).filter(|&i| self.is_present(i))
    }

    fn is_present(&self, i: usize) -> bool {
        !matches!(self.contenders[i].phase, Phase::Outside | Phase::Gone)
    }

    fn holders(&self) -> usize {
        self.contenders.iter().filter(|contender| contender.phase == Phase::Holding).count()
    }

    /// Who does what, to be printed.
    fn sight(&self) -> String {
        let sights = self.contenders.iter().enumerate().map(|(i, contender)| match contender.phase {
            Phase::Waiting => format!("{i} waits for {:?}", contender.watched),
            ref phase => format!("{i}: {phase:?}"),
        });
        sights.collect::<Vec<_>>().join(", ")
    }

    /// What was watched before does not count any more.
    fn list(&mut self, i: usize) {
        self.contenders[i] = Contender { phase: Phase::Listing, watched: BTreeSet::new(), is_told: false };
    }

    fn arm(&mut self, i: usize) {
        let Phase::Arming(rest) = &mut self.contenders[i].phase else { unreachable!("{i} has nobody to watch") };
        let Some(next) = rest.pop() else { unreachable!("{i} watches all that it wants to") };
        let is_last = rest.is_empty();
        if !self.is_present(next) {
            return self.list(i);
        }
        self.contenders[i].watched.insert(next);
        if is_last {
            self.contenders[i].phase = Phase::Waiting;
        }
    }

    fn leave(&mut self, i: usize) {
        self.contenders[i] = Contender { phase: Phase::Gone, watched: BTreeSet::new(), is_told: false };
        for contender in &mut self.contenders {
            contender.is_told |= contender.watched.remove(&i);
        }
    }
}

fn name(i: usize) -> String {
    format!("lock-{i:010}")
}

fn universe(contenders: usize, permits: u32, rule: Rule) -> Universe {
    Universe { contenders, permits: NonZeroU32::new(permits).unwrap(), rule }
}

#[test]
fn a_semaphores_waiter_that_watches_all_of_the_nearest_never_sleeps_while_a_permit_is_free() {
    for (contenders, permits, states) in [(4, 1, 336), (4, 2, 390), (5, 2, 2496), (5, 3, 1860), (6, 2, 15974)] {
        let checker = universe(contenders, permits, Rule::AllOfTheNearest).checker().threads(2).spawn_bfs().join();
        checker.assert_properties();
        assert_eq!(checker.unique_state_count(), states, "{contenders} contenders for {permits}");
    }
}

/// A rule that is broken on purpose has to be found out, or the exploration proves nothing.
#[test]
fn a_semaphores_waiter_that_watches_fewer_misses_its_wake_up() {
    for rule in [Rule::TheFarthest, Rule::AllButTheFarthest] {
        println!("\n{rule:?}");
        let checker = universe(3, 2, rule).checker().spawn_bfs().join();
        let path = checker.discovery("nobody sleeps while a permit is free to him");
        let steps = path.unwrap_or_else(|| panic!("{rule:?} was not found out")).into_vec();
        for (number, (room, action)) in steps.iter().enumerate() {
            match action {
                Some(action) => println!("{number:3}. {action:?}"),
                None => println!("{number:3}. {}", room.sight()),
            }
        }
    }
}
