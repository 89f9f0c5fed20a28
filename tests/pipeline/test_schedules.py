"""Schedules as data: closed forms of the classics, and what holds for every planned order."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.matrix import examples
from support.ranks.schedules import InPairs, chain, draw, gpipe, one_f_one_b, slowdowns, split

from smp_runtime.pipeline.schedule import planner as planning
from smp_runtime.pipeline.schedule.actions import Action, Segment, TaskKind, smooth
from smp_runtime.pipeline.schedule.planner import plan
from smp_runtime.pipeline.schedule.policies import POLICIES
from smp_runtime.pipeline.schedule.simulation import simulate

INTERLEAVED, SIMPLE, ZERO_BUBBLE = POLICIES["interleaved"], POLICIES["simple"], POLICIES["zero_bubble"]
F, B, S, W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.STEP, TaskKind.WEIGHTS

STAGES, MICROBATCHES, FORWARD, BACKWARD, STEP, LATENCY = 4, 8, 0.020, 0.040, 0.0001, 0.0002
CLOSED_FORM = (MICROBATCHES + STAGES - 1) * (FORWARD + BACKWARD)
# A microbatch's three parts of the step function's code between its begin and its last gradient.
STEP_CODE = 3 * STEP


def standard(step_rank, **options):
    return chain(STAGES, MICROBATCHES, FORWARD, BACKWARD, step_seconds=STEP, step_rank=step_rank, **options)


# ---- the classics ----

shapes = {
    "p": st.integers(1, 6),
    "m": st.integers(1, 10),
    "f": st.sampled_from([0.5, 1.0, 2.0]),
    "b": st.sampled_from([0.5, 1.0, 3.0]),
}


@given(**shapes)
@settings(max_examples=examples(6, 60), deadline=None)
def test_gpipe_has_its_closed_forms(p, m, f, b):
    run = simulate(gpipe(p, m), chain(p, m, f, b), active=m)
    assert run.makespan == pytest.approx((m + p - 1) * (f + b))
    assert run.idle == pytest.approx(dict.fromkeys(range(p), (p - 1) / (m + p - 1)))
    assert run.in_flight == dict.fromkeys(range(p), m)


@given(**shapes)
@settings(max_examples=examples(6, 60), deadline=None)
def test_1f1b_has_its_closed_forms(p, m, f, b):
    run = simulate(one_f_one_b(p, m), chain(p, m, f, b), active=min(p, m))
    assert run.makespan == pytest.approx((m + p - 1) * (f + b))
    assert run.idle == pytest.approx(dict.fromkeys(range(p), (p - 1) / (m + p - 1)))
    assert run.in_flight == {i: min(m, p - i) for i in range(p)}
    assert run.active == min(m, p)


def test_orders_are_drawn_one_line_per_rank():
    assert (
        draw(one_f_one_b(3, 4)) == "0: F0 F1 F2 B0 F3 B1 B2 B3\n1: F0 F1 B0 F2 B1 F3 B2 B3\n2: F0 B0 F1 B1 F2 B2 F3 B3"
    )
    assert draw(gpipe(1, 3), width=8) == "0: F0 F…"
    parts = {0: (Action(S, 0), Action(S, 0, (), 1), Action(F, 0, (0,)), Action(F, 0, (1,)), Action(S, 0, (), 2))}
    assert draw(parts) == "0: S0 F0 S0"
    assert draw(parts, kinds="FB") == "0: F0"


def test_data_for_another_rank_comes_later():
    run = simulate(gpipe(2, 1), chain(2, 1, 1.0, 2.0), active=1, latency=0.25)
    assert run.start[Action(F, 0, (1,))] == pytest.approx(1.25)
    assert run.start[Action(B, 0, (1,))] == pytest.approx(2.25)
    assert run.makespan == pytest.approx(6.5)


def test_an_event_is_there_before_its_segment_ends():
    segments = [
        Segment(Action(F, 0, (0,)), 0, 1.0, F, (), ((("early",), 0.25),)),
        Segment(Action(F, 0, (1,)), 1, 1.0, F, (("early",),)),
        Segment(Action(F, 0, (2,)), 0, 1.0, F, (("early",),)),
    ]
    orders = {0: [Action(F, 0, (0,)), Action(F, 0, (2,))], 1: [Action(F, 0, (1,))]}
    run = simulate(orders, segments, active=1, latency=0.5)
    assert run.start[Action(F, 0, (1,))] == pytest.approx(0.75)
    assert run.start[Action(F, 0, (2,))] == pytest.approx(1.0)


# ---- planned orders of chains ----


@pytest.mark.parametrize("step_rank", [None, 0, 3])
def test_interleaved_reaches_the_closed_form(step_rank):
    segments = standard(step_rank)
    made = plan(segments, policy=INTERLEAVED, active=STAGES + 2, latency=LATENCY)
    assert made.makespan <= 1.02 * CLOSED_FORM + STEP_CODE
    assert max(made.in_flight.values()) <= STAGES + 2
    run = simulate(made.orders, segments, active=STAGES + 2, latency=LATENCY)
    assert run.makespan == pytest.approx(made.makespan)
    assert run.active <= STAGES + 2
    # Forward and backward in turn where the backwards begin: nothing is let in while the loss is computed elsewhere.
    assert draw({3: made.orders[3]}, kinds="FB") == "3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


@pytest.mark.parametrize("step_rank", [None, 0, 3])
def test_simple_reaches_the_closed_form(step_rank):
    made = plan(standard(step_rank), policy=SIMPLE, active=MICROBATCHES, latency=LATENCY)
    assert made.makespan <= 1.03 * CLOSED_FORM + STEP_CODE
    assert draw({3: made.orders[3]}, kinds="FB") == draw({3: gpipe(STAGES, MICROBATCHES)[3]})


def test_1f1b_is_what_comes_out_when_memory_is_short():
    made = plan(chain(4, 8, 0.02, 0.04), policy=INTERLEAVED, active=4)
    assert made.makespan == pytest.approx(CLOSED_FORM)
    assert made.in_flight == {0: 4, 1: 3, 2: 2, 3: 1}
    assert draw(made.orders) == draw(one_f_one_b(4, 8))


def with_head_and_embedding_on_the_root():
    """The last stage is the root: its part of the model runs in the step function's task."""
    segments = []
    last = STAGES - 1
    for k in range(MICROBATCHES):
        segments.append(Segment(Action(S, k), last, 0.0005, F, (), ((("value", k, -1), 0.0005),)))
        for j in range(last):
            gives = ((("value", k, j), FORWARD),)
            segments.append(Segment(Action(F, k, (j,)), j, FORWARD, F, (("value", k, j - 1),), gives))
            gives = ((("gradient", k, j), BACKWARD),)
            segments.append(Segment(Action(B, k, (j,)), j, BACKWARD, B, (("gradient", k, j + 1),), gives))
        segments.append(Segment(Action(S, k, (), 1), last, FORWARD, F, (("value", k, last - 1),)))
        gives = ((("gradient", k, last), BACKWARD),)
        segments.append(Segment(Action(S, k, (), 2), last, BACKWARD, B, (), gives))
        segments.append(Segment(Action(S, k, (), 3), last, 0.0005, B, (("gradient", k, 0),)))
    return segments


@pytest.mark.parametrize(("policy", "active"), [(INTERLEAVED, 6), (SIMPLE, 8)])
def test_a_root_that_is_first_and_last_of_the_chain(policy, active):
    made = plan(with_head_and_embedding_on_the_root(), policy=policy, active=active, latency=LATENCY)
    assert made.makespan <= 1.02 * CLOSED_FORM


@pytest.mark.parametrize("policy", [INTERLEAVED, ZERO_BUBBLE])
def test_a_root_that_only_asks_at_first_lets_the_others_fill_up(policy):
    segments = [one for one in with_head_and_embedding_on_the_root() if one.action.part < 3]
    made = plan(split(segments, 0.5) if policy is ZERO_BUBBLE else segments, policy=policy, active=6, latency=LATENCY)
    assert made.start[Action(F, 3, (0,))] < 3 * FORWARD + 0.005
    assert all(made.in_flight[rank] <= STAGES for rank in range(STAGES - 1))


@pytest.mark.parametrize("policy", [INTERLEAVED, ZERO_BUBBLE])
def test_what_nobody_waits_for_stands_between_no_loss_and_its_backward_pass(policy):
    segments = with_head_and_embedding_on_the_root()
    made = plan(split(segments, 0.5) if policy is ZERO_BUBBLE else segments, policy=policy, active=6, latency=0.003)
    root = [(action.microbatch, action.part) for action in made.orders[STAGES - 1] if action.part != 0]
    for k in range(MICROBATCHES):
        assert root[root.index((k, 1)) + 1] == (k, 2), k


@pytest.mark.parametrize("active", [3, 4])
def test_simple_runs_in_waves(active):
    segments = standard(0)
    made = plan(segments, policy=SIMPLE, active=active, latency=LATENCY)
    phase = {segment.action: segment.phase for segment in segments}
    for order in made.orders.values():
        seen = [(action.microbatch // active, phase[action] is B) for action in order]
        assert seen == sorted(seen)
    waves = [4, 4] if active == 4 else [3, 3, 2]
    closed_form = sum(wave + STAGES - 1 for wave in waves) * (FORWARD + BACKWARD)
    assert made.makespan <= 1.03 * closed_form


@pytest.mark.parametrize("microbatches", [8, 16])
@pytest.mark.parametrize("step_rank", [None, 0, 3])
def test_zero_bubble_idles_less_than_half_as_much_as_1f1b_and_holds_no_more(step_rank, microbatches):
    segments = chain(STAGES, microbatches, FORWARD, BACKWARD, step_seconds=STEP, step_rank=step_rank)
    whole = plan(segments, policy=INTERLEAVED, active=STAGES + 2, latency=LATENCY)
    made = plan(split(segments, 0.5), policy=ZERO_BUBBLE, active=STAGES + 2, latency=LATENCY)
    work = microbatches * (FORWARD + BACKWARD)
    assert (made.makespan - work) <= 0.45 * (whole.makespan - work)
    # Of the rank that runs the step function, what that has begun counts as well.
    held = {rank: most for rank, most in made.in_flight.items() if rank != step_rank or rank == 0}
    assert max(held.values()) <= max(whole.in_flight.values())
    for rank, order in made.orders.items():
        done = [(action.microbatch, action.path) for action in order if action.kind is B]
        left = [(action.microbatch, action.path) for action in order if action.kind is W]
        assert sorted(left) == sorted(done), rank


@given(
    **shapes,
    part=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    step=st.sampled_from([None, 0, "last"]),
    active=st.integers(1, 8),
    pieces=st.integers(1, 2),
)
@settings(max_examples=examples(6, 60), deadline=None)
def test_gradients_of_weights_always_find_a_place(p, m, f, b, part, step, active, pieces):
    rank = p - 1 if step == "last" else step
    segments = split(chain(p, m, f, b, step_seconds=STEP, step_rank=rank, pieces=pieces), part)
    made = plan(segments, policy=ZERO_BUBBLE, active=active, latency=LATENCY)
    run = simulate(made.orders, segments, active=active, latency=LATENCY)
    assert run.makespan == pytest.approx(made.makespan)
    assert run.active <= active


@pytest.mark.parametrize("policy", POLICIES.values())
def test_evaluation_has_forwards_only(policy):
    segments = chain(STAGES, MICROBATCHES, FORWARD, None, step_seconds=STEP, step_rank=0)
    made = plan(segments, policy=policy, active=MICROBATCHES, latency=LATENCY)
    assert {action.kind for order in made.orders.values() for action in order} == {S, F}
    assert made.makespan <= 1.02 * (MICROBATCHES + STAGES - 1) * FORWARD


@pytest.mark.parametrize("step_rank", [None, 0, 3])
def test_interleaved_stages_idle_less(step_rank):
    options = {"policy": INTERLEAVED, "latency": LATENCY}
    whole = plan(standard(step_rank), active=MICROBATCHES, **options)
    pieces = plan(standard(step_rank, pieces=2), active=MICROBATCHES, **options)
    tight = plan(standard(step_rank, pieces=2), active=STAGES + 2, **options)
    # (p-1)/(vm+p-1) with v pieces each: 0.158 instead of 0.273.
    assert max(pieces.idle.values()) < 0.19 < 0.25 < max(whole.idle.values())
    assert max(tight.idle.values()) < max(whole.idle.values())


def test_a_new_schedule_is_planned():
    """A policy that is nowhere but in its own file."""
    segments = standard(0)
    made = plan(segments, policy=InPairs(), active=6, latency=LATENCY)
    assert draw({3: made.orders[3]}, kinds="FB") == "3: F0 F1 B0 B1 F2 F3 B2 B3 F4 F5 B4 B5 F6 F7 B6 B7"
    assert max(made.in_flight.values()) == 2
    assert made.makespan <= 1.03 * 4 * (2 + STAGES - 1) * (FORWARD + BACKWARD)


def test_a_short_loss_is_not_held_up_by_a_long_backward():
    made = plan(standard(0), policy=INTERLEAVED, active=STAGES + 2, latency=LATENCY)
    run = simulate(made.orders, standard(0), active=STAGES + 2, latency=LATENCY)
    held_up = [run.start[Action(S, k, (), 1)] - run.finish[Action(F, k, (3,))] for k in range(MICROBATCHES)]
    assert max(held_up) < 0.002


def test_unequal_stages_stay_near_the_bound():
    slow = {0: 1.0, 1: 0.6, 2: 1.5, 3: 0.8}
    segments = [
        replace(s, seconds=s.seconds * slow[s.rank], gives=tuple((e, at * slow[s.rank]) for e, at in s.gives))
        for s in standard(None)
    ]
    made = plan(segments, policy=INTERLEAVED, active=STAGES + 2, latency=LATENCY)
    assert made.bound <= made.makespan <= 1.01 * made.bound


@pytest.mark.parametrize("step_rank", [0, 3])
def test_noise_costs_little(step_rank):
    segments = standard(step_rank)
    made = plan(segments, policy=INTERLEAVED, active=STAGES + 2, latency=LATENCY)
    figures = slowdowns(made.orders, segments, active=STAGES + 2, latency=LATENCY, noise=0.2, samples=20)
    assert len(set(figures)) == 20
    assert sum(figures) / 20 < 1.06


def test_a_big_graph_is_searched_on_fewer_microbatches(monkeypatch):
    segments = chain(4, 24, FORWARD, BACKWARD, step_seconds=STEP, step_rank=0)
    monkeypatch.setattr(planning, "_BUDGET", 1000)
    for policy, active in [(INTERLEAVED, 6), (SIMPLE, 12)]:
        made = plan(segments, policy=policy, active=active, latency=LATENCY)
        waves = 1 if policy is INTERLEAVED else 2
        assert made.makespan <= 1.02 * (24 + waves * 3) * (FORWARD + BACKWARD)


def test_a_plan_does_not_depend_on_the_order_of_the_record():
    segments = standard(3, pieces=2)
    shuffled = random.Random(1).sample(segments, len(segments))
    options = {"policy": INTERLEAVED, "active": 6, "latency": LATENCY}
    assert plan(segments, **options) == plan(shuffled, **options)


# ---- planned orders of any graph ----


def random_module(draw, ranks, depth):
    """A module: its rank, its remote children, whether it waits for each before it goes on, and its seconds a part."""
    children = [random_module(draw, ranks, depth - 1) for _ in range(draw.randint(0, 3 if depth else 0))]
    return {
        "rank": draw.randrange(ranks),
        "children": children,
        "waits": [draw.random() < 0.5 for _ in children],
        "seconds": [draw.choice([0.0, 0.001, 0.02, 0.05]) for _ in range(2 * len(children) + 4)],
    }


class Recorder:
    """The segments of one microbatch of a tree of modules, calls and gradients going from task to task."""

    def __init__(self, k, tree, trains):
        self.k = k
        self.segments = []
        self.task(S, (), tree, F, trains)

    def task(self, kind, path, module, phase, trains=False, start=()):
        """A forward (of the step function too, then its backward) or a backward of one module."""
        needs, part, seconds = list(start), 0, iter(module["seconds"])
        gives = []

        def cut(following=()):
            nonlocal needs, part, gives
            length = next(seconds)
            given = tuple((event, length * (i + 1) / (len(gives) + 1)) for i, event in enumerate(gives))
            action = Action(kind, self.k, path, part)
            self.segments.append(Segment(action, module["rank"], length, phase, tuple(needs), given))
            needs, gives, part = list(following), [], part + 1

        if kind is not B:
            before = ()
            for i, child in enumerate(module["children"]):
                gives.append(("request", self.k, *path, i))
                self.task(F, (*path, i), child, phase, start=(("request", self.k, *path, i), *before))
                before = (("value", self.k, *path, i),)
                if module["waits"][i]:
                    cut(before)
            if before and not module["waits"][-1]:
                cut(before)
        if kind is F:
            gives.append(("value", self.k, *path))
            cut()
            return
        if kind is S:
            cut()
            if not trains:
                return
            phase = B
        for i, child in reversed(list(enumerate(module["children"]))):
            gives.append(("gradient", self.k, *path, i))
            self.task(B, (*path, i), child, B, start=(("gradient", self.k, *path, i),))
            cut((("done", self.k, *path, i),))
        gives.append(("done", self.k, *path))
        cut()


def random_graph(seed, ranks, microbatches, trains, branches):
    draw = random.Random(seed)
    tree = random_module(draw, ranks, 2)
    branch = {**tree, "children": tree["children"][:1], "waits": tree["waits"][:1]}
    graph = []
    for k in range(microbatches):
        graph += Recorder(k, branch if branches and draw.random() < 0.5 else tree, trains).segments
    return graph


def graphs(branches):
    """Random call graphs; with ``branches``, some microbatches take a shorter way than the others."""
    return st.builds(
        random_graph,
        seed=st.integers(0, 2**32),
        ranks=st.integers(1, 4),
        microbatches=st.integers(1, 6),
        trains=st.booleans(),
        branches=branches,
    )


@given(
    segments=graphs(st.booleans()),
    policy=st.sampled_from(list(POLICIES.values())),
    active=st.integers(1, 7),
    noise=st.integers(0, 99),
)
@settings(max_examples=examples(10, 80), deadline=None)
def test_every_plan_is_sound(segments, policy, active, noise):
    made = plan(segments, policy=policy, active=active, latency=0.001)
    # Complete, in the order of the parts, without deadlock.
    run = simulate(made.orders, segments, active=active, latency=0.001)
    assert run.makespan == pytest.approx(made.makespan)
    assert made.bound <= made.makespan + 1e-6
    # The memory rule.
    assert run.active <= active
    assert all(count <= active for count in run.in_flight.values())
    # Ascending wherever a rank runs the same thing for several microbatches.
    for order in made.orders.values():
        seen = defaultdict(list)
        for action in order:
            seen[action.kind, action.path, action.part].append(action.microbatch)
        assert all(microbatches == sorted(microbatches) for microbatches in seen.values())
    # Whatever the real durations are.
    draw = random.Random(noise)
    other = [replace(s, seconds=draw.choice([0.0, 0.001, 1.0])) for s in segments]
    run = simulate(made.orders, other, active=active, latency=draw.choice([0.0, 0.1]))
    assert run.active <= active
    # The orders alone keep what each rank holds, even where nobody counts the active microbatches.
    run = simulate(made.orders, other, active=len(segments), latency=0.1)
    assert run.in_flight == made.in_flight


@given(segments=graphs(st.just(False)), active=st.integers(1, 7))
@settings(max_examples=examples(6, 40), deadline=None)
def test_simple_is_forward_first_on_every_rank(segments, active):
    made = plan(segments, policy=SIMPLE, active=active, latency=0.001)
    phase = {segment.action: segment.phase for segment in segments}
    for order in made.orders.values():
        seen = [(action.microbatch // active, phase[action] is B) for action in order]
        assert seen == sorted(seen)


def test_a_forward_that_runs_again_inside_a_backward_counts_as_backward():
    segments = []
    for k in range(3):
        segments += [
            Segment(Action(S, k), 0, 0.01, F, (), ((("request", k), 0.01),)),
            Segment(Action(F, k, (0,)), 1, 0.01, F, (("request", k),), ((("value", k), 0.01),)),
            Segment(Action(S, k, (), 1), 0, 0.01, B, (("value", k),), ((("again", k), 0.01),)),
            Segment(Action(F, k, (1,)), 1, 0.01, F, (("again", k),), ((("recomputed", k), 0.01),)),
            Segment(Action(S, k, (), 2), 0, 0.01, B, (("recomputed", k),)),
        ]
    made = plan(segments, policy=SIMPLE, active=3)
    assert draw({1: made.orders[1]}) == "1: F0 F1 F2 F0 F1 F2"
    root = [(action.part, action.microbatch) for action in made.orders[0]]
    assert root[:3] == [(0, 0), (0, 1), (0, 2)]
    simulate(made.orders, segments, active=3)


def test_a_lower_microbatch_is_never_kept_out_by_a_higher_one():
    # Microbatch 1 is on rank 1 first, but cannot go on there before microbatch 0 has run the same module.
    segments = [
        Segment(Action(F, 0, (0,)), 0, 10.0, F, (), ((("value", 0), 10.0),)),
        Segment(Action(F, 0, (1,)), 1, 1.0, F, (("value", 0),)),
        Segment(Action(F, 1, (2,)), 1, 1.0, F, (), ((("value", 1), 1.0),)),
        Segment(Action(F, 1, (1,)), 1, 1.0, F, (("value", 1),)),
    ]
    made = plan(segments, policy=INTERLEAVED, active=2)
    assert draw(made.orders) == "0: F0\n1: F1 F0 F1"


# ---- smoothing ----


def test_durations_are_made_equal_over_microbatches():
    def segment(k, seconds, *times):
        gives = tuple(((name, k), at) for name, at in zip("ab", times, strict=False))
        return Segment(Action(F, k, (0,)), 0, seconds, F, (), gives)

    record = [segment(0, 9.0, 1.0, 9.0), segment(1, 2.0, 0.5, 2.0), segment(2, 3.0, 0.7, 3.0)]
    assert smooth(record) == [segment(k, 3.0, 0.7, 3.0) for k in range(3)]
    # Another course of events keeps its own durations.
    other = segment(3, 50.0, 1.0)
    assert smooth([*record, other])[-1] == other
    longer = [replace(other, action=Action(F, 4, (0,)), seconds=7.0), Segment(Action(F, 4, (0,), 1), 0, 1.0, F)]
    assert smooth([*record, *longer])[3:] == longer
    # Nothing is given after the end.
    assert smooth([segment(0, 1.0, 1.0), segment(1, 5.0, 5.0), segment(2, 1.0, 1.0)])[1].gives[0][1] == 1.0
