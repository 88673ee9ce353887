//! Tasks of one session that share their entries in the queue, each of which then serves several holds in a row.
//!
//! Who waits is kept apart from what it waits for: the waiters stand in one line, in the order in which they came, and
//! whichever entry holds the lock serves the first of them. There are as many entries as it takes for each waiter to
//! be sure of a hold. Nothing here asks the server for anything; the driver opens and closes entries.

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::{Notify, oneshot};

use crate::contender::Node;
use crate::driver::{NotHeld, Reply};
use crate::local::locked;

/// The waiters and the entries of one session at one lock.
#[derive(Debug, Default)]
pub struct Cohort {
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    next: u64,
    waiters: BTreeMap<u64, oneshot::Sender<Turn>>,
    entries: BTreeMap<u64, Entry>,
}

/// An entry in the queue.
#[derive(Debug)]
struct Entry {
    /// How many holds it can still serve.
    left: u32,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Queued {
        end: oneshot::Sender<Reply>,
        time_up: oneshot::Sender<()>,
    },
    /// Nobody needs it any more. What whoever waits for its removal has is dropped with the entry.
    Leaving(
        #[expect(dead_code, reason = "only dropping it counts")] Option<(oneshot::Sender<Reply>, oneshot::Sender<()>)>,
    ),
    Holding {
        node: Node,
        end: oneshot::Sender<Reply>,
        followed: Arc<Notify>,
    },
}

/// What a waiter gets.
pub type Turn = Result<(Node, Baton), NotHeld>;

/// An entry that is to be put into the queue.
#[derive(Debug)]
pub struct Opening {
    pub seat: Seat,
    pub end: oneshot::Receiver<Reply>,
    pub time_up: oneshot::Receiver<()>,
}

/// How a hold is ended.
#[derive(Debug)]
pub enum Passed {
    /// Somebody else of the cohort holds now.
    On,
    /// It was the last one: the entry has to be taken out of the queue.
    Last(oneshot::Sender<Reply>),
    /// The entry was lost meanwhile.
    Lost,
}

impl Cohort {
    /// Stands at the end of the line, and opens an entry, which serves so many holds, if those that there are do not
    /// suffice.
    pub fn join(self: &Arc<Self>, limit: u32) -> (Waiter, Option<Opening>) {
        let (turn, awaited) = oneshot::channel();
        let mut line = self.line();
        let id = line.id();
        line.waiters.insert(id, turn);
        let opening = line.is_short().then(|| line.open(self, limit));
        (Waiter { cohort: self.clone(), id, turn: awaited }, opening)
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        locked(&self.line)
    }

    fn pass_on(self: &Arc<Self>, id: u64) -> Passed {
        let mut line = self.line();
        let Some(entry) = line.entries.get(&id) else { return Passed::Lost };
        if entry.left > 0 && !line.waiters.is_empty() {
            line.serve(self, id);
            return Passed::On;
        }
        match line.entries.remove(&id).map(|entry| entry.stage) {
            Some(Stage::Holding { end, .. }) => Passed::Last(end),
            _ => Passed::Lost,
        }
    }
}

impl Line {
    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// How many waiters the entries can serve.
    fn capacity(&self) -> u64 {
        let is_open = |entry: &&Entry| !matches!(entry.stage, Stage::Leaving(_));
        self.entries.values().filter(is_open).map(|entry| u64::from(entry.left)).sum()
    }

    fn is_short(&self) -> bool {
        self.capacity() < self.waiters.len() as u64
    }

    fn open(&mut self, cohort: &Arc<Cohort>, limit: u32) -> Opening {
        let id = self.id();
        let ((end, ended), (time_up, is_up)) = (oneshot::channel(), oneshot::channel());
        self.entries.insert(id, Entry { left: limit, stage: Stage::Queued { end, time_up } });
        Opening { seat: Seat { cohort: cohort.clone(), id, limit }, end: ended, time_up: is_up }
    }

    /// The entry, which holds the lock, serves the first of the line.
    fn serve(&mut self, cohort: &Arc<Cohort>, id: u64) {
        let Some(Entry { left, stage: Stage::Holding { node, followed, .. } }) = self.entries.get_mut(&id) else {
            return;
        };
        let Some((_, turn)) = self.waiters.pop_first() else { return };
        *left -= 1;
        // It relies on us to notice if our node is deleted.
        followed.notify_one();
        // Whoever goes takes itself out of the line first, so there is somebody to take it.
        let _ = turn.send(Ok((node.clone(), Baton { cohort: cohort.clone(), id, is_passed: false })));
    }

    /// The newest entry that nobody needs, if there is one, so that it can leave the queue.
    fn surplus(&self) -> Option<u64> {
        let (waiters, capacity) = (self.waiters.len() as u64, self.capacity());
        let is_surplus =
            |entry: &Entry| matches!(entry.stage, Stage::Queued { .. }) && capacity - u64::from(entry.left) >= waiters;
        self.entries.iter().rev().find(|(_, entry)| is_surplus(entry)).map(|(id, _)| *id)
    }
}

/// A waiter in the line. Dropping it leaves the line, in the background.
#[derive(Debug)]
pub struct Waiter {
    cohort: Arc<Cohort>,
    id: u64,
    turn: oneshot::Receiver<Turn>,
}

impl Waiter {
    /// What came of it, or nothing if the runtime was shut down.
    pub async fn turn(&mut self) -> Option<Turn> {
        (&mut self.turn).await.ok()
    }

    /// Leaves the line because the time is up, unless its turn has come. If that leaves an entry without a use, the
    /// result resolves once it is out of the queue.
    pub fn time_up(&mut self) -> Option<Option<oneshot::Receiver<()>>> {
        let mut line = self.cohort.line();
        line.waiters.remove(&self.id)?;
        let Some(id) = line.surplus() else { return Some(None) };
        let (is_out, out) = oneshot::channel();
        let entry = line.entries.get_mut(&id)?;
        if let Stage::Queued { end, time_up } = mem::replace(&mut entry.stage, Stage::Leaving(None)) {
            let _ = time_up.send(());
            // What is to end the hold is kept, or the driver would take it that the caller went.
            entry.stage = Stage::Leaving(Some((end, is_out)));
        }
        Some(Some(out))
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut line = self.cohort.line();
        if line.waiters.remove(&self.id).is_some()
            && let Some(id) = line.surplus()
            && let Some(entry) = line.entries.get_mut(&id)
        {
            // The driver sees that nobody is there to end what it was to begin.
            entry.stage = Stage::Leaving(None);
        }
        // A turn that nobody took is passed on when the channel is dropped, after this.
    }
}

/// The right of the current holder, to be passed on. Dropping it does that too.
#[derive(Debug)]
pub struct Baton {
    cohort: Arc<Cohort>,
    id: u64,
    is_passed: bool,
}

impl Baton {
    pub fn pass_on(mut self) -> Passed {
        self.is_passed = true;
        self.cohort.pass_on(self.id)
    }
}

impl Drop for Baton {
    fn drop(&mut self) {
        if !self.is_passed {
            let _ = self.cohort.pass_on(self.id);
        }
    }
}

/// An entry, as its driver has it. Dropping it says that the driver is gone.
#[derive(Debug)]
pub struct Seat {
    cohort: Arc<Cohort>,
    id: u64,
    limit: u32,
}

impl Seat {
    /// The entry holds the lock. `followed` is told when it matters to others of us whether its node stays.
    pub fn granted(&self, node: Node, followed: Arc<Notify>) {
        let mut line = self.cohort.line();
        let Some(entry) = line.entries.remove(&self.id) else { return };
        if let Stage::Queued { end, .. } = entry.stage {
            line.entries.insert(self.id, Entry { left: entry.left, stage: Stage::Holding { node, end, followed } });
            line.serve(&self.cohort, self.id);
        }
        // Else nobody wants it any more: what was to end the hold is dropped, which ends it.
    }

    /// The entry did not come to hold the lock. Those who relied on it are told why, and they are the last of the line.
    pub fn failed(self, why: &NotHeld) {
        let mut line = self.cohort.line();
        line.entries.remove(&self.id);
        while line.is_short()
            && let Some((_, turn)) = line.waiters.pop_last()
        {
            let _ = turn.send(Err(why.clone()));
        }
    }

    /// The hold was lost. Those who relied on it stay in the line, for which this may open another entry.
    pub fn lost(self) -> Option<Opening> {
        let mut line = self.cohort.line();
        line.entries.remove(&self.id);
        line.is_short().then(|| line.open(&self.cohort, self.limit))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut line = self.cohort.line();
        line.entries.remove(&self.id);
        while line.is_short() && line.waiters.pop_last().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use futures::FutureExt;
    use proptest::prelude::*;

    use super::*;

    /// A cohort, and what would be the queue at the server.
    #[derive(Default)]
    struct Scene {
        cohort: Arc<Cohort>,
        waiters: VecDeque<(u64, Waiter)>,
        queue: VecDeque<Opening>,
        holding: Option<Opening>,
        baton: Option<Baton>,
        came: u64,
        served: u64,
        holds_of_entry: u32,
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Join,
        Cancel(usize),
        TimeUp(usize),
        Grant,
        PassOn,
        Drop,
        Lose,
        Fail,
    }

    const LIMIT: u32 = 3;

    impl Scene {
        fn act(&mut self, step: Step) {
            match step {
                Step::Join => {
                    self.came += 1;
                    let (waiter, opening) = self.cohort.join(LIMIT);
                    self.waiters.push_back((self.came, waiter));
                    self.queue.extend(opening);
                }
                Step::Cancel(which) => drop(self.take(which)),
                Step::TimeUp(which) => {
                    if let Some((_, mut waiter)) = self.take(which) {
                        assert!(waiter.time_up().is_some(), "nobody whose turn came is in the line");
                    }
                }
                Step::Grant if self.holding.is_none() => {
                    if let Some(opening) = self.queue.pop_front() {
                        self.holds_of_entry = 0;
                        opening.seat.granted(Node { name: String::new(), czxid: 1 }, Arc::default());
                        self.holding = Some(opening);
                    }
                }
                Step::PassOn => match self.baton.take().map(Baton::pass_on) {
                    None | Some(Passed::On) => {}
                    Some(Passed::Last(_)) => self.holding = None,
                    Some(Passed::Lost) => panic!("it was not lost"),
                },
                Step::Drop => drop(self.baton.take()),
                Step::Lose => {
                    if let Some(opening) = self.holding.take() {
                        self.queue.extend(opening.seat.lost());
                        assert!(self.baton.take().is_none_or(|baton| matches!(baton.pass_on(), Passed::Lost)));
                    }
                }
                Step::Fail => {
                    if let Some(opening) = self.queue.pop_front() {
                        opening.seat.failed(&NotHeld::WouldBlock);
                    }
                }
                Step::Grant => {}
            }
            self.settle();
        }

        fn take(&mut self, which: usize) -> Option<(u64, Waiter)> {
            let count = self.waiters.len();
            (count > 0).then(|| self.waiters.remove(which % count)).flatten()
        }

        /// What the channels tell, and the rules.
        fn settle(&mut self) {
            let mut line = VecDeque::new();
            let mut has_failed = false;
            for (number, mut waiter) in mem::take(&mut self.waiters) {
                match waiter.turn().now_or_never() {
                    None => {
                        assert!(!has_failed, "a failure is for the last of the line");
                        line.push_back((number, waiter));
                    }
                    Some(Some(Ok((_, baton)))) => {
                        assert!(line.is_empty(), "somebody came before");
                        assert!(number > self.served, "in the order in which they came");
                        assert!(self.baton.is_none(), "one holder at a time");
                        assert!(self.holding.is_some(), "an entry that holds");
                        self.served = number;
                        self.holds_of_entry += 1;
                        assert!(self.holds_of_entry <= LIMIT);
                        self.baton = Some(baton);
                    }
                    Some(Some(Err(_))) => has_failed = true,
                    Some(None) => panic!("nobody shut the runtime down"),
                }
            }
            self.waiters = line;
            // An entry whose end was dropped, or whose time was said to be up, is taken out of the queue.
            if self.holding.as_mut().is_some_and(|opening| is_over(&mut opening.end)) {
                self.holding = None;
            }
            for mut opening in mem::take(&mut self.queue) {
                if is_over(&mut opening.end) || matches!(opening.time_up.try_recv(), Ok(())) {
                    opening.seat.failed(&NotHeld::WouldBlock);
                } else {
                    self.queue.push_back(opening);
                }
            }
            let left = if self.holding.is_some() { LIMIT - self.holds_of_entry } else { 0 };
            let capacity = left as usize + LIMIT as usize * self.queue.len();
            assert!(capacity >= self.waiters.len(), "everyone is sure of a hold");
            assert!(self.queue.is_empty() || capacity - (LIMIT as usize) < self.waiters.len(), "no entry in vain");
        }
    }

    fn is_over(end: &mut oneshot::Receiver<Reply>) -> bool {
        matches!(end.try_recv(), Err(oneshot::error::TryRecvError::Closed))
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => Just(Step::Join),
            2 => any::<usize>().prop_map(Step::Cancel),
            2 => any::<usize>().prop_map(Step::TimeUp),
            4 => Just(Step::Grant),
            6 => Just(Step::PassOn),
            1 => Just(Step::Drop),
            1 => Just(Step::Lose),
            1 => Just(Step::Fail),
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens_all_are_served_in_order_and_no_entry_is_too_many(
            steps in prop::collection::vec(step(), 0..200)
        ) {
            let mut scene = Scene::default();
            for step in steps {
                scene.act(step);
            }
        }
    }
}
