//! All that can happen to a few contenders, in every order.

use stateright::{Checker, Model, Property};

use super::world::{Action, Budget, Flaw, Rules, World};
use super::*;

struct Universe {
    patiences: Vec<Patience>,
    rules: Rules,
    budget: Budget,
}

impl Model for Universe {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.patiences, self.rules, self.budget)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        actions.extend(world.actions());
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        next.act(&action);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nothing is violated", |_, world: &World| world.violation.is_none()),
            Property::sometimes("all come to their end", |_, world: &World| {
                world.clients.iter().all(|client| client.contender.is_ended() && !client.told.is_empty())
            }),
        ]
    }
}

const RULES: Rules =
    Rules { has_parent: false, is_fast: true, is_compact: false, tells_zxid: true, is_shared: false, flaw: None };
const NONE: Budget = Budget { breaks: 0, abandons: 0, expiries: 0, deletions: 0, touches: 0, foreigners: 0 };

fn waiters(count: usize) -> Vec<Patience> {
    vec![Patience::Wait; count]
}

/// Explores everything and says how many states there are.
fn explore(patiences: Vec<Patience>, rules: Rules, budget: Budget) -> usize {
    let checker = Universe { patiences, rules, budget }.checker().threads(2).spawn_bfs().join();
    for (name, path) in checker.discoveries() {
        if name == "nothing is violated" {
            tell(&path.into_vec());
            panic!("a counterexample was found");
        }
    }
    checker.assert_properties();
    checker.unique_state_count()
}

/// Finds the shortest way to a violation and returns what is violated.
fn violation(patiences: Vec<Patience>, rules: Rules, budget: Budget) -> Option<&'static str> {
    let checker = Universe { patiences, rules, budget }.checker().threads(2).spawn_bfs().join();
    let steps = checker.discovery("nothing is violated")?.into_vec();
    tell(&steps);
    steps.last()?.0.violation
}

fn tell(steps: &[(World, Option<Action>)]) {
    for (number, (world, action)) in steps.iter().enumerate() {
        match action {
            Some(action) => println!("{number:3}. {action:?}"),
            None => println!("{number:3}. {}", world.violation.unwrap_or("the end")),
        }
    }
}

#[test]
fn two_contenders_keep_every_rule_whatever_happens_once() {
    let mishaps = [
        (NONE, 352),
        (Budget { breaks: 1, ..NONE }, 2642),
        (Budget { abandons: 2, ..NONE }, 1196),
        (Budget { expiries: 1, ..NONE }, 2676),
        (Budget { deletions: 1, touches: 1, ..NONE }, 34489),
        (Budget { breaks: 1, abandons: 1, ..NONE }, 7426),
        (Budget { breaks: 1, deletions: 1, ..NONE }, 60720),
        (Budget { foreigners: 1, ..NONE }, 8227),
    ];
    for (budget, states) in mishaps {
        assert_eq!(explore(waiters(2), RULES, budget), states, "{budget:?}");
    }
}

#[test]
fn servers_that_tell_less_and_sessions_that_tell_more_change_no_rule() {
    let variants = [
        (Rules { tells_zxid: false, ..RULES }, 18375),
        (Rules { is_shared: true, ..RULES }, 22675),
        (Rules { is_fast: false, ..RULES }, 32657),
        (Rules { is_compact: true, ..RULES }, 19099),
        (Rules { is_compact: true, is_shared: true, ..RULES }, 29221),
    ];
    for (rules, states) in variants {
        let budget = Budget { deletions: 1, abandons: 1, ..NONE };
        assert_eq!(explore(waiters(2), rules, budget), states, "{rules:?}");
    }
}

#[test]
fn three_contenders_pass_the_lock_on() {
    assert_eq!(explore(waiters(3), RULES, NONE), 35818);
}

#[test]
fn a_try_beside_a_waiter_keeps_every_rule() {
    let patiences = vec![Patience::Wait, Patience::Try];
    assert_eq!(explore(patiences, RULES, Budget { breaks: 1, abandons: 1, ..NONE }), 7966);
}

/// The large one: `cargo test --release --lib model -- --ignored`.
#[test]
#[ignore = "takes minutes; .ci/run does it"]
fn millions_of_states_keep_every_rule() {
    let all = Budget { breaks: 1, abandons: 1, expiries: 1, deletions: 1, touches: 0, foreigners: 0 };
    let requeued = Budget { deletions: 1, foreigners: 1, ..NONE };
    let cases = [
        (waiters(3), RULES, Budget { foreigners: 1, ..NONE }),
        (waiters(2), RULES, Budget { breaks: 2, abandons: 1, ..NONE }),
        (vec![Patience::Wait, Patience::Try], RULES, all),
        (waiters(2), Rules { is_shared: true, ..RULES }, requeued),
        (waiters(2), Rules { is_compact: true, is_shared: true, ..RULES }, requeued),
    ];
    let states: usize = cases.into_iter().map(|(patiences, rules, budget)| explore(patiences, rules, budget)).sum();
    println!("{states} states");
    assert_eq!(states, 2_932_456);
}

/// A rule that is broken on purpose has to be found out, or the exploration proves nothing.
#[test]
fn every_broken_rule_is_found_out() {
    let broken = |flaw| Rules { has_parent: true, flaw: Some(flaw), ..RULES };
    for (flaw, count, budget) in [
        (Flaw::BlindCreate, 1, Budget { breaks: 1, ..NONE }),
        (Flaw::NoSync, 1, Budget { breaks: 1, ..NONE }),
        (Flaw::ChangeIsDeletion, 3, Budget { touches: 1, ..NONE }),
        (Flaw::NoOwnWatch, 3, Budget { deletions: 1, ..NONE }),
        (Flaw::GoneIsRelease, 3, Budget { abandons: 1, ..NONE }),
    ] {
        println!("\n{flaw:?}");
        let violated = violation(waiters(count), broken(flaw), budget);
        assert!(violated.is_some(), "{flaw:?} was not found out");
    }
}
