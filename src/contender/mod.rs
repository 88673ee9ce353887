//! The machine of one acquisition, from the wish to the confirmed end of its node.
//!
//! It knows no clock, no client and no waker. The driver feeds it what happened ([`Input`]) and does what it asks
//! for ([`Op`]): at most one request is under way at any time, and each request is answered by exactly one input.
//! It is deterministic and hashable, so that a model checker can explore this very code.

#[cfg(test)]
mod model;
#[cfg(test)]
mod permits_model;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;

use std::sync::Arc;

use crate::name::{Entry, Kind, Tag};
use crate::queue::{Queue, Verdict};

/// The last sequence number that is used. The server's counter sticks at `i32::MAX` and hands the same number out
/// again and again, so a queue has to stop well before it.
const LAST_SEQUENCE: i64 = i32::MAX as i64 - 1_000_000;

/// After so many creates without an answer, each of which is known to have done nothing, the request itself must
/// be what breaks the connection.
const LOST_CREATES: u8 = 8;

/// The transaction id of an event that tells none.
const NO_ZXID: i64 = -1;

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
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// The first input of all.
    Start,
    /// Answer to [`Op::Create`], and whether our node is known to be the only one in the queue.
    Created { node: Node, is_alone: bool },
    /// Answer to [`Op::Create`] and [`Op::List`]: the lock's node does not exist.
    NoParent,
    /// Answer to [`Op::MakeParents`].
    ParentsMade,
    /// Answer to [`Op::Recover`]: the nodes of this attempt that our session owns, in the order of the queue.
    Recovered(Vec<Node>),
    /// Answer to [`Op::List`].
    Listed(Arc<Queue>),
    /// Answer to [`Op::Watch`]: the node is there, and it will be told once when it changes.
    Armed,
    /// Answer to [`Op::Watch`] of a predecessor: nothing was asked of the server, since a contender of our own session
    /// will tell. It is our predecessor itself, or an earlier one to wait for until watching is worth it.
    Queued,
    /// Answer to [`Op::Watch`], [`Op::Remove`] and [`Op::Release`]: there is no such node.
    NoNode,
    /// The data of the predecessor changed in the transaction with this id.
    Changed(i64),
    /// The predecessor went in the transaction with this id.
    Gone(i64),
    /// Our predecessor, of our own session, holds the lock, so we are next.
    Next,
    /// Our predecessor, of our own session, was the holder, and its node is gone.
    Passed,
    /// The contender of our own session that was to tell has ended, and that means nothing.
    Left,
    /// A contender of our own session waits for us, and relies on us to notice if our node is deleted.
    Followed,
    /// Something happened to our own node.
    OwnTouched,
    /// The connection broke since the last input: what the server tells from now on may be a summary.
    Reconnected,
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
    /// Watch a node.
    Watch(Watch),
    /// Delete the node of a waiter.
    Remove(Node),
    /// Change and delete the node of a holder in one transaction, which tells the next waiter that it holds.
    Release(Node),
    /// Look whether the node, by its identity, is still there.
    Verify(Node),
    /// Tell the caller. Not a request, so nothing answers it.
    Tell(Tell),
}

/// What can be watched. Each watch tells once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Watch {
    /// Change and deletion of the predecessor.
    Data(String),
    /// Deletion of the predecessor, also after its change was told.
    Children(String),
    /// Change and deletion of our own node.
    Own(Node),
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
    Waiting(Node, Wait),
    /// The predecessor let go; whether our own node is still there has to be looked up.
    Confirming(Node),
    Held(Node),
    Removing(Node, Leave),
    /// A removal is without answer.
    Verifying(Node, Leave),
    Ended,
}

/// What a waiter knows of its predecessor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Wait {
    predecessor: String,
    /// Nobody else was before us, and nobody can come to be.
    is_only: bool,
    arming: Option<Arming>,
    is_data_armed: bool,
    is_children_armed: bool,
    /// A contender of our own session will tell, instead of the server.
    is_local: bool,
    is_next: bool,
    /// The transaction in which the predecessor's data changed.
    changed: Option<i64>,
    /// The connection broke since the watches were armed, so nothing that they tell is a proof.
    is_void: bool,
}

/// The watch whose request is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Arming {
    Data,
    Children,
    Own,
}

/// Whether our own node is being watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum OwnWatch {
    Unarmed,
    Armed,
}

/// One acquisition.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Contender {
    tag: Tag,
    kind: Kind,
    patience: Patience,
    lost_creates: u8,
    own_watch: OwnWatch,
    is_followed: bool,
    phase: Phase,
}

impl Wait {
    fn new(predecessor: &str, is_only: bool) -> Self {
        Self {
            predecessor: predecessor.to_owned(),
            is_only,
            arming: None,
            is_data_armed: false,
            is_children_armed: false,
            is_local: false,
            is_next: false,
            changed: None,
            is_void: false,
        }
    }

    /// Whether it is our turn now that the predecessor went. A change and the deletion in one transaction are the
    /// mark of a holder that releases. Servers before 3.9 do not tell the transaction but -1, and so do all of them
    /// for what they make up for after a reconnect.
    fn is_turn(&self, gone: i64) -> bool {
        let is_release = gone != NO_ZXID && self.changed == Some(gone);
        !self.is_void && (is_release || self.is_only)
    }
}

impl Contender {
    pub fn new(tag: Tag, kind: Kind, patience: Patience) -> Self {
        Self {
            tag,
            kind,
            patience,
            lost_creates: 0,
            own_watch: OwnWatch::Unarmed,
            is_followed: false,
            phase: Phase::Idle,
        }
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

    #[cfg(test)]
    pub fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting(..))
    }

    /// The node that the server has for us, as far as we know.
    pub fn node(&self) -> Option<&Node> {
        match &self.phase {
            Phase::Listing(node)
            | Phase::Waiting(node, _)
            | Phase::Confirming(node)
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
            Input::OwnTouched => {
                self.own_watch = OwnWatch::Unarmed;
                self.watch_own(phase, ops)
            }
            Input::Followed => {
                self.is_followed = true;
                self.watch_own(phase, ops)
            }
            Input::Reconnected => reconnected(phase),
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

            (Phase::Creating { leaving }, Input::Created { node, is_alone }) => {
                self.enqueued(node, is_alone, leaving, ops)
            }
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
                (Some(node), true) => self.enqueued(node, false, leaving, ops),
                (Some(youngest), false) => request(Op::Remove(youngest), Phase::Pruning { leaving }, ops),
            },
            (Phase::Recovering { leaving }, Input::NoParent) => self.not_created(leaving, ops),
            (Phase::Recovering { leaving } | Phase::Pruning { leaving }, Input::Unknown)
            | (Phase::Pruning { leaving }, Input::Removed | Input::NoNode) => {
                request(Op::Recover, Phase::Recovering { leaving }, ops)
            }

            (Phase::Listing(node), Input::Listed(queue)) => match queue.verdict(&node.name, self.kind) {
                Verdict::Held => self.granted(node, ops),
                Verdict::Wait { on, is_only } => match self.patience {
                    Patience::Wait => self.wait(node, Wait::new(&on.name, is_only), ops),
                    Patience::Try => remove(node, Leave::WouldBlock, ops),
                },
                Verdict::Absent => self.requeue(ops),
            },
            (Phase::Listing(_), Input::NoParent) => self.requeue(ops),
            (Phase::Listing(node), Input::Unknown) => list(node, ops),

            (Phase::Waiting(node, mut wait), answer @ (Input::Armed | Input::Queued | Input::NoNode)) => {
                match (wait.arming.take(), answer) {
                    (Some(Arming::Data), Input::Armed) => wait.is_data_armed = true,
                    (Some(Arming::Children), Input::Armed) => wait.is_children_armed = true,
                    (Some(Arming::Own), Input::Armed) => self.own_watch = OwnWatch::Armed,
                    (Some(Arming::Data | Arming::Children), Input::Queued) => wait.is_local = true,
                    (Some(Arming::Own), _) => return self.requeue(ops),
                    // It is gone, and nothing tells how.
                    _ => return list(node, ops),
                }
                self.wait(node, wait, ops)
            }
            // Whether the watch was set is unknown too, so whatever it would have told has to be looked up.
            (Phase::Waiting(node, _), Input::Unknown) => list(node, ops),
            (Phase::Waiting(node, mut wait), Input::Changed(zxid)) => {
                wait.changed = Some(zxid);
                Phase::Waiting(node, wait)
            }
            (Phase::Waiting(node, wait), Input::Gone(zxid)) if wait.is_turn(zxid) => self.our_turn(node, ops),
            (Phase::Waiting(node, _), Input::Gone(_) | Input::Left) => list(node, ops),
            (Phase::Waiting(node, mut wait), Input::Next) => {
                wait.is_next = true;
                match wait.arming {
                    None => self.wait(node, wait, ops),
                    Some(_) => Phase::Waiting(node, wait),
                }
            }
            (Phase::Waiting(node, _), Input::Passed) => self.our_turn(node, ops),
            (Phase::Confirming(node), Input::Verified(true)) => self.granted(node, ops),
            (Phase::Confirming(_), Input::Verified(false)) => self.requeue(ops),
            (Phase::Confirming(node), Input::Unknown) => list(node, ops),

            (Phase::Held(node), Input::Armed) => {
                self.own_watch = OwnWatch::Armed;
                Phase::Held(node)
            }
            (Phase::Held(node), Input::NoNode) => tell_last(Tell::Lost(node), ops),
            (Phase::Held(node), Input::Unknown) => self.watch_own(Phase::Held(node), ops),
            (Phase::Held(node), Input::Refused) => Phase::Held(node),

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

            (Phase::Listing(node) | Phase::Waiting(node, _) | Phase::Confirming(node), Input::Refused) => {
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
            Phase::Listing(node) | Phase::Waiting(node, _) | Phase::Confirming(node) => remove(node, why, ops),
            Phase::Held(node) if why == Leave::Abandoned => remove(node, Leave::Release, ops),
            Phase::Held(_) | Phase::Removing(..) | Phase::Verifying(..) | Phase::Ended => phase,
        }
    }

    /// Our node is in the queue.
    fn enqueued(&mut self, node: Node, is_alone: bool, leaving: Option<Leave>, ops: &mut Vec<Op>) -> Phase {
        let sequence = Entry::parse(&node.name).map_or(-1, |entry| entry.sequence);
        match leaving {
            Some(why) => remove(node, why, ops),
            None if !(0..=LAST_SEQUENCE).contains(&sequence) => {
                remove(node, Leave::Failed(Cause::SequenceExhausted), ops)
            }
            None if is_alone => self.granted(node, ops),
            None => match (self.patience, self.tag.predecessor(&node.name)) {
                // If it is there, it is the one before us, and nobody is between us.
                (Patience::Wait, Some(predecessor)) => self.wait(node, Wait::new(&predecessor, false), ops),
                (Patience::Wait, None) | (Patience::Try, _) => list(node, ops),
            },
        }
    }

    /// Arms the watches one after the other, first those that tell of our turn. The change counts only as part of the
    /// proof that the predecessor was the holder, which is not needed of the only one before us.
    fn wait(&self, node: Node, mut wait: Wait, ops: &mut Vec<Op>) -> Phase {
        let watch = if wait.is_local {
            // The node is watched only when it is worth it: a session cannot watch any number of them.
            if !wait.is_next || self.own_watch == OwnWatch::Armed {
                return Phase::Waiting(node, wait);
            }
            wait.arming = Some(Arming::Own);
            Watch::Own(node.clone())
        } else if !wait.is_data_armed && !wait.is_only {
            wait.arming = Some(Arming::Data);
            Watch::Data(wait.predecessor.clone())
        } else if !wait.is_children_armed {
            wait.arming = Some(Arming::Children);
            Watch::Children(wait.predecessor.clone())
        } else if self.own_watch == OwnWatch::Unarmed {
            wait.arming = Some(Arming::Own);
            Watch::Own(node.clone())
        } else {
            return Phase::Waiting(node, wait);
        };
        request(Op::Watch(watch), Phase::Waiting(node, wait), ops)
    }

    fn granted(&self, node: Node, ops: &mut Vec<Op>) -> Phase {
        ops.push(Op::Tell(Tell::Granted(node.clone())));
        self.watch_own(Phase::Held(node), ops)
    }

    /// Nobody is before us any more, if we are in the queue ourselves.
    fn our_turn(&self, node: Node, ops: &mut Vec<Op>) -> Phase {
        match self.own_watch {
            OwnWatch::Armed => self.granted(node, ops),
            OwnWatch::Unarmed => request(Op::Verify(node.clone()), Phase::Confirming(node), ops),
        }
    }

    /// Arms the watch on our own node where it is of use. If somebody deleted the node, the answer tells.
    fn watch_own(&self, phase: Phase, ops: &mut Vec<Op>) -> Phase {
        match phase {
            Phase::Waiting(node, wait) if wait.arming.is_none() => self.wait(node, wait, ops),
            Phase::Held(node) if self.is_followed && self.own_watch == OwnWatch::Unarmed => {
                request(Op::Watch(Watch::Own(node.clone())), Phase::Held(node), ops)
            }
            phase => phase,
        }
    }

    /// The node is not ours any more; the watch on it has told, or never was.
    fn requeue(&mut self, ops: &mut Vec<Op>) -> Phase {
        self.own_watch = OwnWatch::Unarmed;
        ops.push(Op::Tell(Tell::Requeued));
        create(ops)
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
    let op = match why {
        Leave::Release => Op::Release(node.clone()),
        // Only a holder may tell the next waiter that it holds.
        Leave::Abandoned | Leave::WouldBlock | Leave::Failed(_) => Op::Remove(node.clone()),
    };
    request(op, Phase::Removing(node, why), ops)
}

fn reconnected(phase: Phase) -> Phase {
    match phase {
        Phase::Waiting(node, wait) => Phase::Waiting(node, Wait { is_void: true, ..wait }),
        phase => phase,
    }
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
