//! The machine of one acquisition, from the wish to the confirmed end of its node.
//!
//! It knows no clock, no client and no waker. The driver feeds it what happened ([`Input`]) and does what it asks
//! for ([`Op`]): at most one request is under way at any time, and each request is answered by exactly one input.
//! It is deterministic and hashable, so that a model checker can explore this very code.

#[cfg(test)]
mod tests;

use crate::name::{Entry, Kind, Tag};
use crate::queue::{Queue, Verdict};

/// The last sequence number that is used. The server's counter sticks at `i32::MAX` and hands the same number out
/// again and again, so a queue has to stop well before it.
const LAST_SEQUENCE: i64 = i32::MAX as i64 - 1_000_000;

/// After so many creates without an answer, each of which is known to have done nothing, the request itself must
/// be what breaks the connection.
const LOST_CREATES: u8 = 8;

/// The node of an acquisition.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    pub name: String,
    /// The transaction that created it: the node's identity, and the fencing token.
    pub czxid: i64,
}

/// What to do when somebody else is before us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Patience {
    Wait,
    /// Do not wait, and do not write at all if a look shows that it would be in vain.
    Try,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Input {
    /// The first input of all.
    Start,
    /// Answer to [`Op::Create`].
    Created(Node),
    /// Answer to [`Op::Create`] and [`Op::List`]: the lock's node does not exist.
    NoParent,
    /// Answer to [`Op::MakeParents`].
    ParentsMade,
    /// Answer to [`Op::Recover`]: the nodes of this attempt that our session owns, in the order of the queue.
    Recovered(Vec<Node>),
    /// Answer to [`Op::List`].
    Listed(Queue),
    /// Answer to [`Op::Watch`]: the predecessor is there, and [`Input::Woken`] will follow when it changes.
    Armed,
    /// Answer to [`Op::Watch`] and [`Op::Remove`]: there is no such node.
    NoNode,
    /// The predecessor changed or went.
    Woken,
    /// Answer to [`Op::Remove`].
    Removed,
    /// Answer to [`Op::Verify`]: whether the node with our identity is still there.
    Verified(bool),
    /// The server refused the running request for good.
    Refused,
    /// It is unknown whether the running request took effect.
    Unknown,
    /// The caller is no longer interested, or the holder releases.
    Abandon,
    /// The caller's time is up.
    TimeUp,
    /// The session is over, and with it the server ends all that it owned.
    SessionOver,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Create the ephemeral sequential node.
    Create,
    /// Create the lock's node and what is missing above it.
    MakeParents,
    /// See all earlier writes applied, then look for the nodes of this attempt.
    Recover,
    /// List the queue.
    List,
    /// Watch this node.
    Watch(String),
    /// Delete the node.
    Remove(Node),
    /// Look whether the node, by its identity, is still there.
    Verify(Node),
    /// Tell the caller. Not a request, so nothing answers it.
    Tell(Tell),
}

/// What the caller learns.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Tell {
    /// It holds the lock.
    Granted(Node),
    /// Somebody removed the node of the waiter; it starts again at the end of the queue.
    Requeued,
    /// The lock is not to be had now, and nothing of this attempt is left.
    WouldBlock,
    /// The acquisition failed, and nothing of this attempt is left that the session's end would not remove.
    Failed(Cause),
    /// The hold was ended by its holder.
    Released,
    /// The release failed; the node lives on until the session ends.
    ReleaseRefused(Node),
    /// The node of the holder was gone before it released.
    Lost(Node),
}

/// Why an acquisition failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The server refused a request; the driver knows its answer.
    Refused,
    /// The sequence numbers of this queue are used up.
    SequenceExhausted,
    /// Every create broke the connection.
    Unanswered,
    /// The session ended.
    SessionOver,
}

/// Why a node is taken out of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Leave {
    Release,
    Abandoned,
    WouldBlock,
    Failed(Cause),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    /// Looking before writing.
    Peeking,
    /// A create is under way; `leaving` once nobody wants its node any more.
    Creating {
        leaving: Option<Leave>,
    },
    MakingParents,
    /// A create is without answer.
    Recovering {
        leaving: Option<Leave>,
    },
    /// Several creates without answer took effect; a younger one of the nodes is being removed.
    Pruning {
        leaving: Option<Leave>,
    },
    Listing(Node),
    Arming(Node),
    Waiting(Node),
    Held(Node),
    Removing(Node, Leave),
    /// A removal is without answer.
    Verifying(Node, Leave),
    Ended,
}

/// One acquisition.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Contender {
    tag: Tag,
    kind: Kind,
    patience: Patience,
    lost_creates: u8,
    phase: Phase,
}

impl Contender {
    pub fn new(tag: Tag, kind: Kind, patience: Patience) -> Self {
        Self { tag, kind, patience, lost_creates: 0, phase: Phase::Idle }
    }

    pub fn tag(&self) -> &Tag {
        &self.tag
    }

    /// Whether all is done: no node is left, or none that will outlive the session.
    pub fn is_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    #[cfg(test)]
    pub fn is_holding(&self) -> bool {
        matches!(self.phase, Phase::Held(_))
    }

    /// The node that the server has for us, as far as we know.
    pub fn node(&self) -> Option<&Node> {
        match &self.phase {
            Phase::Listing(node)
            | Phase::Arming(node)
            | Phase::Waiting(node)
            | Phase::Held(node)
            | Phase::Removing(node, _)
            | Phase::Verifying(node, _) => Some(node),
            _ => None,
        }
    }

    /// Takes what happened, and asks for what is to be done next.
    pub fn handle(&mut self, input: Input, ops: &mut Vec<Op>) {
        let phase = std::mem::replace(&mut self.phase, Phase::Ended);
        self.phase = match input {
            Input::SessionOver => session_over(phase, ops),
            Input::Abandon => self.leave(phase, Leave::Abandoned, ops),
            Input::TimeUp => self.leave(phase, Leave::WouldBlock, ops),
            answer => self.answered(phase, answer, ops),
        };
    }

    fn answered(&mut self, phase: Phase, input: Input, ops: &mut Vec<Op>) -> Phase {
        match (phase, input) {
            (Phase::Idle, Input::Start) => match self.patience {
                Patience::Wait => create(ops),
                Patience::Try => request(Op::List, Phase::Peeking, ops),
            },

            (Phase::Peeking, Input::Listed(queue)) if !queue.is_empty() => finish(Leave::WouldBlock, ops),
            (Phase::Peeking, Input::Listed(_) | Input::NoParent) => create(ops),
            (Phase::Peeking, Input::Unknown) => request(Op::List, Phase::Peeking, ops),

            (Phase::Creating { leaving }, Input::Created(node)) => self.enqueued(node, leaving, ops),
            (Phase::Creating { leaving: Some(why) }, Input::NoParent | Input::Refused) => finish(why, ops),
            (Phase::Creating { leaving: None }, Input::NoParent) => make_parents(ops),
            (Phase::Creating { leaving }, Input::Unknown) => {
                self.lost_creates += 1;
                request(Op::Recover, Phase::Recovering { leaving }, ops)
            }

            (Phase::MakingParents, Input::ParentsMade) => create(ops),
            (Phase::MakingParents, Input::Unknown) => make_parents(ops),

            (Phase::Recovering { leaving }, Input::Recovered(mut nodes)) => match (nodes.pop(), nodes.is_empty()) {
                (None, _) => self.not_created(leaving, ops),
                (Some(node), true) => self.enqueued(node, leaving, ops),
                (Some(youngest), false) => request(Op::Remove(youngest), Phase::Pruning { leaving }, ops),
            },
            (Phase::Recovering { leaving }, Input::NoParent) => self.not_created(leaving, ops),
            (Phase::Recovering { leaving } | Phase::Pruning { leaving }, Input::Unknown)
            | (Phase::Pruning { leaving }, Input::Removed | Input::NoNode) => {
                request(Op::Recover, Phase::Recovering { leaving }, ops)
            }

            (Phase::Listing(node), Input::Listed(queue)) => match queue.verdict(&node.name, self.kind) {
                Verdict::Held => {
                    ops.push(Op::Tell(Tell::Granted(node.clone())));
                    Phase::Held(node)
                }
                Verdict::Wait(predecessor) => match self.patience {
                    Patience::Wait => request(Op::Watch(predecessor.name.clone()), Phase::Arming(node), ops),
                    Patience::Try => remove(node, Leave::WouldBlock, ops),
                },
                Verdict::Absent => requeue(ops),
            },
            (Phase::Listing(_), Input::NoParent) => requeue(ops),
            (Phase::Listing(node), Input::Unknown) => list(node, ops),

            (Phase::Arming(node), Input::Armed) => Phase::Waiting(node),
            // Whether the watch was set is unknown too, so whatever it would have told has to be looked up.
            (Phase::Arming(node), Input::NoNode | Input::Unknown) => list(node, ops),
            (Phase::Waiting(node), Input::Woken) => list(node, ops),

            (Phase::Removing(_, why), Input::Removed) => finish(why, ops),
            (Phase::Removing(node, Leave::Release), Input::NoNode) => tell_last(Tell::Lost(node), ops),
            (Phase::Removing(_, why), Input::NoNode) => finish(why, ops),
            (Phase::Removing(node, why) | Phase::Verifying(node, why), Input::Unknown) => {
                request(Op::Verify(node.clone()), Phase::Verifying(node, why), ops)
            }
            (Phase::Removing(node, Leave::Release) | Phase::Verifying(node, Leave::Release), Input::Refused) => {
                tell_last(Tell::ReleaseRefused(node), ops)
            }
            (Phase::Removing(..) | Phase::Verifying(..), Input::Refused) => finish(Leave::Failed(Cause::Refused), ops),
            (Phase::Verifying(node, why), Input::Verified(true)) => remove(node, why, ops),
            // Only our own removal is known to have been under way, so it is taken to have done it.
            (Phase::Verifying(_, why), Input::Verified(false)) => finish(why, ops),

            (Phase::Listing(node) | Phase::Arming(node), Input::Refused) => {
                remove(node, Leave::Failed(Cause::Refused), ops)
            }
            (_, Input::Refused) => finish(Leave::Failed(Cause::Refused), ops),

            (phase, input) => unreachable!("{input:?} answers nothing that was asked in {phase:?}"),
        }
    }

    /// The caller goes; what it asked for ends as soon as it can.
    fn leave(&self, phase: Phase, why: Leave, ops: &mut Vec<Op>) -> Phase {
        match phase {
            Phase::Idle | Phase::Peeking | Phase::MakingParents => finish(why, ops),
            Phase::Creating { leaving } => Phase::Creating { leaving: leaving.or(Some(why)) },
            Phase::Recovering { leaving } => Phase::Recovering { leaving: leaving.or(Some(why)) },
            Phase::Pruning { leaving } => Phase::Pruning { leaving: leaving.or(Some(why)) },
            Phase::Listing(node) | Phase::Arming(node) | Phase::Waiting(node) => remove(node, why, ops),
            Phase::Held(node) if why == Leave::Abandoned => remove(node, Leave::Release, ops),
            Phase::Held(_) | Phase::Removing(..) | Phase::Verifying(..) | Phase::Ended => phase,
        }
    }

    /// Our node is in the queue.
    fn enqueued(&mut self, node: Node, leaving: Option<Leave>, ops: &mut Vec<Op>) -> Phase {
        let sequence = Entry::parse(&node.name).map_or(-1, |entry| entry.sequence);
        match leaving {
            Some(why) => remove(node, why, ops),
            None if (0..=LAST_SEQUENCE).contains(&sequence) => list(node, ops),
            None => remove(node, Leave::Failed(Cause::SequenceExhausted), ops),
        }
    }

    /// A create without an answer is known to have done nothing, and never to do anything.
    fn not_created(&mut self, leaving: Option<Leave>, ops: &mut Vec<Op>) -> Phase {
        match leaving {
            Some(why) => finish(why, ops),
            None if self.lost_creates < LOST_CREATES => create(ops),
            None => finish(Leave::Failed(Cause::Unanswered), ops),
        }
    }
}

fn request(op: Op, phase: Phase, ops: &mut Vec<Op>) -> Phase {
    ops.push(op);
    phase
}

fn create(ops: &mut Vec<Op>) -> Phase {
    request(Op::Create, Phase::Creating { leaving: None }, ops)
}

fn make_parents(ops: &mut Vec<Op>) -> Phase {
    request(Op::MakeParents, Phase::MakingParents, ops)
}

fn list(node: Node, ops: &mut Vec<Op>) -> Phase {
    request(Op::List, Phase::Listing(node), ops)
}

fn remove(node: Node, why: Leave, ops: &mut Vec<Op>) -> Phase {
    request(Op::Remove(node.clone()), Phase::Removing(node, why), ops)
}

fn requeue(ops: &mut Vec<Op>) -> Phase {
    ops.push(Op::Tell(Tell::Requeued));
    create(ops)
}

fn finish(why: Leave, ops: &mut Vec<Op>) -> Phase {
    match why {
        Leave::Release => tell_last(Tell::Released, ops),
        Leave::WouldBlock => tell_last(Tell::WouldBlock, ops),
        Leave::Failed(cause) => tell_last(Tell::Failed(cause), ops),
        Leave::Abandoned => Phase::Ended,
    }
}

fn session_over(phase: Phase, ops: &mut Vec<Op>) -> Phase {
    match phase {
        Phase::Held(node) | Phase::Removing(node, Leave::Release) | Phase::Verifying(node, Leave::Release) => {
            tell_last(Tell::Lost(node), ops)
        }
        Phase::Ended => Phase::Ended,
        _ => finish(Leave::Failed(Cause::SessionOver), ops),
    }
}

fn tell_last(tell: Tell, ops: &mut Vec<Op>) -> Phase {
    ops.push(Op::Tell(tell));
    Phase::Ended
}
