//! The machine in a small world: long random histories, and the cases that have a name.

use proptest::prelude::*;

use super::world::{Action, Budget, Rules, World};
use super::*;
use crate::options::Naming;

const RULES: Rules =
    Rules { has_parent: false, is_fast: true, is_compact: false, tells_zxid: true, is_shared: false, flaw: None };
const NONE: Budget = Budget { breaks: 0, abandons: 0, expiries: 0, deletions: 0, touches: 0, foreigners: 0 };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn in_any_history_there_is_one_holder_at_most_no_orphan_and_no_sleeper(
        tries in prop::collection::vec(any::<bool>(), 1..6),
        (is_fast, is_compact, tells_zxid, is_shared) in any::<(bool, bool, bool, bool)>(),
        choices in prop::collection::vec(any::<prop::sample::Index>(), 0..200),
    ) {
        let patiences: Vec<_> = tries.iter().map(|&is_try| if is_try { Patience::Try } else { Patience::Wait }).collect();
        let rules = Rules { has_parent: false, is_fast, is_compact, tells_zxid, is_shared, flaw: None };
        let budget = Budget { breaks: 6, abandons: 3, expiries: 1, deletions: 3, touches: 3, foreigners: 3 };
        let mut world = World::new(&patiences, rules, budget);
        for choice in choices {
            let actions = world.actions();
            if !actions.is_empty() {
                world.act(choice.get(&actions));
            }
            prop_assert_eq!(world.violation, None);
        }
        world.settle();
        prop_assert_eq!(world.violation, None);
        for client in &world.clients {
            prop_assert!(client.contender.is_ended(), "a sleeper: {:?}", client.contender);
            let told = client.told.iter().filter(|tell| !matches!(tell, Tell::Requeued)).count();
            // Granted and then how the hold ended; or one reason why not; or nothing, to a caller that went.
            let is_granted = client.told.iter().any(|tell| matches!(tell, Tell::Granted(_)));
            prop_assert!(told == if is_granted { 2 } else { 1 } || client.is_abandoned && told == 0, "{:?}", client.told);
        }
        prop_assert!(world.is_empty(), "an orphan");
    }
}

fn waiters(count: usize) -> World {
    World::new(&vec![Patience::Wait; count], RULES, NONE)
}

/// Everything is answered until this client has nothing under way.
fn run(world: &mut World, client: usize) {
    loop {
        let actions = world.actions();
        let next = [Action::Advance(client), Action::Execute(client), Action::Answer(client)];
        match next.into_iter().find(|action| actions.contains(action)) {
            Some(action) => world.act(&action),
            None => return,
        }
    }
}

#[test]
fn waiters_are_granted_in_the_order_of_their_nodes_and_read_nothing_for_it() {
    let mut world = waiters(5);
    for i in 0..5 {
        run(&mut world, i);
    }
    for i in 0..5 {
        assert_eq!(world.holder(), Some(i));
        world.act(&Action::Abandon(i));
        run(&mut world, i);
        assert_eq!(world.clients[i].told.last(), Some(&Tell::Released));
        if i + 1 < 5 {
            // One transaction, and its events alone make the next one the holder.
            while world.holder().is_none() {
                world.act(&Action::Advance(i + 1));
            }
            for later in i + 2..5 {
                run(&mut world, later);
            }
        }
    }
}

#[test]
fn a_free_lock_takes_one_request_once_its_parent_is_there() {
    let mut world = waiters(1);
    run(&mut world, 0);
    assert_eq!(world.transactions_so_far(), 2);
    assert_eq!(world.holder(), Some(0));
}

#[test]
fn a_try_that_would_be_in_vain_writes_nothing() {
    let mut world = World::new(&[Patience::Wait, Patience::Try], RULES, NONE);
    run(&mut world, 0);
    let before = world.transactions_so_far();
    run(&mut world, 1);
    assert_eq!(world.clients[1].told, [Tell::WouldBlock]);
    assert_eq!(world.transactions_so_far(), before);
}

/// A contender, and what it asked for last.
struct Alone {
    contender: Contender,
    ops: Vec<Op>,
}

impl Alone {
    fn new() -> Self {
        Self {
            contender: Contender::new(Tag::named("a", Naming::Tagged), Kind::Exclusive, Patience::Wait),
            ops: Vec::new(),
        }
    }

    fn told(inputs: impl IntoIterator<Item = Input>) -> Self {
        let mut alone = Self::new();
        for input in inputs {
            alone.take(input);
        }
        alone
    }

    fn take(&mut self, input: Input) -> &[Op] {
        self.ops.clear();
        self.contender.handle(input, &mut self.ops);
        &self.ops
    }
}

fn node(sequence: i64, czxid: i64) -> Node {
    Node { name: format!("{}{sequence:010}", Tag::named("a", Naming::Tagged).prefix()), czxid }
}

fn held(sequence: i64) -> Alone {
    Alone::told([Input::Start, Input::Created { node: node(sequence, 1), is_alone: true }])
}

#[test]
fn a_create_without_an_answer_is_looked_for_and_not_repeated() {
    let mut alone = Alone::told([Input::Start, Input::Unknown]);
    assert_eq!(alone.ops, [Op::Recover]);
    assert_eq!(alone.take(Input::Recovered(vec![node(7, 1)])), [Op::List]);
}

#[test]
fn of_two_nodes_of_one_attempt_the_older_is_kept() {
    let mut alone = Alone::told([Input::Start, Input::Unknown]);
    assert_eq!(alone.take(Input::Recovered(vec![node(7, 1), node(8, 2)])), [Op::Remove(node(8, 2))]);
    assert_eq!(alone.take(Input::Removed), [Op::Recover]);
    alone.take(Input::Recovered(vec![node(7, 1)]));
    assert_eq!(alone.contender.node(), Some(&node(7, 1)));
}

#[test]
fn a_release_whose_answer_is_lost_is_looked_up_before_it_is_repeated() {
    let mut alone = held(7);
    assert_eq!(alone.take(Input::Abandon), [Op::Release(node(7, 1))]);
    assert_eq!(alone.take(Input::Unknown), [Op::Verify(node(7, 1))]);
    assert_eq!(alone.take(Input::Verified(true)), [Op::Release(node(7, 1))]);
    assert_eq!(alone.take(Input::Unknown), [Op::Verify(node(7, 1))]);
    assert_eq!(alone.take(Input::Verified(false)), [Op::Tell(Tell::Released)]);
}

#[test]
fn a_holder_whose_node_was_deleted_is_told_at_its_release() {
    let mut alone = held(7);
    alone.take(Input::Abandon);
    assert_eq!(alone.take(Input::NoNode), [Op::Tell(Tell::Lost(node(7, 1)))]);
}

#[test]
fn a_waiter_leaves_by_a_plain_deletion_that_makes_nobody_a_holder() {
    let mut alone = Alone::told([Input::Start, Input::Created { node: node(7, 1), is_alone: false }]);
    assert_eq!(alone.ops, [Op::List]);
    assert_eq!(alone.take(Input::Abandon), [Op::Remove(node(7, 1))]);
}

#[test]
fn numbers_near_their_end_are_refused_and_leave_no_node() {
    for sequence in [LAST_SEQUENCE + 1, i64::from(i32::MAX), -1, i64::from(i32::MIN)] {
        let mut alone = held(sequence);
        assert_eq!(alone.ops, [Op::Remove(node(sequence, 1))]);
        assert_eq!(alone.take(Input::Removed), [Op::Tell(Tell::Failed(Cause::SequenceExhausted))]);
    }
}

#[test]
fn a_create_that_always_breaks_the_connection_ends_in_an_error() {
    let mut alone = Alone::told([Input::Start]);
    for _ in 0..LOST_CREATES {
        assert_eq!(alone.ops, [Op::Create]);
        alone.take(Input::Unknown);
        alone.take(Input::Recovered(Vec::new()));
    }
    assert_eq!(alone.ops, [Op::Tell(Tell::Failed(Cause::Unanswered))]);
}

#[test]
fn a_refused_request_takes_the_node_out_of_the_queue() {
    let mut alone = Alone::told([Input::Start, Input::Created { node: node(7, 1), is_alone: false }]);
    assert_eq!(alone.take(Input::Refused), [Op::Remove(node(7, 1))]);
    assert_eq!(alone.take(Input::Removed), [Op::Tell(Tell::Failed(Cause::Refused))]);
}
