"""Planning of a schedule from a recorded step: list scheduling under several rules; the best result is kept.

A rule (:class:`_Rule`) is a simple way to decide what a free rank starts next. Which rule is best depends
on the graph: where the step function runs, how long its parts are, how slow the transport is. So all are
tried on the recorded graph, in a fixed order and without randomness, and the plan with the smallest
makespan wins. Among plans that are equal within 1 %, the one that holds fewer microbatches in flight wins,
since activations cost memory.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.schedule.actions import Action, ScheduleError, Segment
from smp_runtime.pipeline.schedule.recorded_step import RecordedStep
from smp_runtime.pipeline.schedule.simulation import ScheduleSimulator, SegmentGraph, replay, summarize_run

if TYPE_CHECKING:
    from smp_runtime.pipeline.schedule.policies import Policy

#: Simulated segments (segments × rules) that a search may cost; about 5 µs each. Of a bigger graph, only the rules that are
#: best on its first microbatches are tried on the whole.
_BUDGET = 400_000

#: Random changes that are tried on the best schedule of a small graph.
_ROUNDS = 300

#: Plans count as equal if their makespans differ by less than this fraction.
_EQUAL = 0.01

#: How many rules, of those that are best on the first microbatches, are tried on a whole big graph.
_FINALISTS = 3


@dataclass(frozen=True)
class SchedulePlan:
    """A schedule and its predicted figures."""

    orders: dict[int, tuple[Action, ...]]  # for every rank, the actions in the order in which it is to run them
    makespan: float  # seconds from the first action's start to the last one's end
    bound: float  # seconds that no order can beat: the busiest rank's work, with the work before and after it
    idle: dict[int, float]  # per rank, the fraction of the makespan in which it computes nothing
    in_flight: dict[int, int]  # per rank, the most microbatches with activations there; never more than ``active``
    rule: str  # the rule that won, in words, for the log
    start: dict[Action, float] = field(default_factory=dict)  # seconds, of every action


def plan(segments: Iterable[Segment], *, policy: Policy, active: int, latency: float = 0.0) -> SchedulePlan:
    """Return the plan: the order in which every rank runs the segments of a step.

    The orders name every segment once. They cannot deadlock on the recorded graph, whatever the real durations
    are. They keep microbatches ascending wherever a rank runs the same (kind, path, part) for several of them.

    Args:
        segments: all segments of all ranks of one pipeline group, durations smoothed (see
            :func:`.actions.smooth`).
        active: most microbatches begun and not finished.
        latency: seconds from rank to rank.

    Raises:
        ScheduleError: the record is incomplete or contradicts itself.
        SMPUserError: ``active`` is below 1.
    """
    if active < 1:
        raise SMPUserError(f"active_microbatches is {active}. At least one must be active: set it to 1 or more.")
    # The same plan, whichever rank's record came first.
    segments = sorted(segments, key=lambda s: (s.action.microbatch, s.action.kind.value, s.action.path, s.action.part))
    if not segments:
        return SchedulePlan({}, 0.0, 0.0, {}, {}, "nothing to run")
    facts = RecordedStep(SegmentGraph(segments, latency, ascending=True), active, policy)
    best = _search(facts)
    graph = facts.graph
    sequence = best.clock.order
    run = summarize_run(graph, replay(graph, sequence, active))  # without the waits that the rule chose
    return SchedulePlan(
        orders={rank: tuple(graph.segments[i].action for i in sequence[r]) for r, rank in enumerate(graph.ranks)},
        makespan=run.makespan,
        bound=facts.bound / 1e9,
        idle=run.idle,
        in_flight=run.in_flight,
        rule=str(best.rule),
        start=run.start,
    )


# ---- the rules ----


@dataclass(frozen=True)
class _Rule:
    """One way to choose the next segment of a free rank."""

    #: ``"lowest"``: lowest microbatch first; ``"longest"``: longest way to its microbatch's end first; ``"refined"``: by given
    #: keys; backwards come before forwards in these. ``"cycle"``: as many forwards as fill the rank, then one backward, one
    #: microbatch's gradients of weights and one forward in turns.
    priority: str
    #: How many microbatches more than needed may be in flight on a rank; None: as many as may be active.
    spare: int | None
    #: Whether gradients of weights may wait longer than for the next forward pass: on each rank those of so many microbatches that
    #: it has as many in flight as the rank that needs most.
    weights_wait: bool = False

    def __str__(self) -> str:
        spare = "free" if self.spare is None else f"+{self.spare}"
        return f"{self.priority} first, in flight {spare}" + (", weights later" if self.weights_wait else "")


def _rules(facts: RecordedStep) -> list[_Rule]:
    spares: list[int | None] = [None]
    if not facts.in_waves:
        least = max(1, min(int(need) for need in facts.need))
        spares = [*range(min(4, max(0, facts.active - least))), None]
    if any(facts.graph.weights):
        # No rank holds more than the busiest rank does with whole backward passes, so the gain costs no memory.
        return [_Rule(priority, 0, wait) for wait in (False, True) for priority in ("lowest", "longest", "cycle")]
    return [_Rule(priority, spare) for spare in spares for priority in ("lowest", "longest")]


class _RuleRun:
    """A rule at work on a graph."""

    def __init__(self, facts: RecordedStep, rule: _Rule, keys: Sequence[float] | None = None) -> None:
        self.facts = facts
        self.rule = rule
        graph = facts.graph
        self.cap = [facts.active] * len(graph.ranks)
        if rule.spare is not None:
            # 0.9: a little more than a whole number (latency, the step function's code) does not call for one more.
            self.cap = [min(facts.active, max(1, int(need + 0.9)) + rule.spare) for need in facts.need]
            # What only asks others for work holds nothing yet, and they have limits of their own.
            self.cap = [facts.active if asks else cap for cap, asks in zip(self.cap, facts.asks_first, strict=True)]
        self.fill = [min(facts.active, max(1, int(need + 0.9))) for need in facts.fill]
        #: Per rank, the microbatches that may postpone gradients of weights while another begins; and the same in nodes.
        self.waiting = [max(self.fill) - own if rule.weights_wait else 0 for own in self.fill]
        nodes_of = Counter((r, k) for r, k, w in zip(graph.rank, graph.microbatch, graph.weights, strict=True) if w)
        most = [max((n for (r, _), n in nodes_of.items() if r == rank), default=0) for rank in range(len(graph.ranks))]
        self.waiting_nodes = [count * nodes for count, nodes in zip(self.waiting, most, strict=True)]
        nodes = range(len(graph.segments))
        self.place = list(nodes)
        #: With turns, each rank's other nodes than gradients of weights, the next turn last.
        self.turns: list[list[int]] = []
        chosen = keys.__getitem__ if keys else self._turn_key() if rule.priority == "cycle" else self._key()
        for place, node in enumerate(sorted(nodes, key=chosen)):
            self.place[node] = place
        self.early_left = [[0] * (1 + max(facts.wave)) for _ in graph.ranks]
        for i, late in enumerate(facts.late):
            if not late:
                self.early_left[graph.rank[i]][facts.wave[graph.microbatch[i]]] += 1
        self.counted = [0] * len(graph.ranks)
        self.capped = False  # whether the limit of microbatches in flight ever did

    def _key(self) -> Callable[[int], tuple[int, ...]]:
        facts, graph, priority = self.facts, self.facts.graph, self.rule.priority
        quick = facts.quick

        def key(i: int) -> tuple[int, ...]:
            microbatch, tail = graph.microbatch[i], -facts.tail[i]
            after = (microbatch, tail) if priority == "lowest" else (tail, microbatch)
            if graph.weights[i]:
                return (1, 3, *after)  # no other work waits for it, however quick it is
            if graph.ns[i] <= quick and facts.is_last(i):
                return (1, 1, *after)
            return (0 if graph.ns[i] <= quick else 1, 0 if facts.late[i] else 2, *after)

        return key

    def _turn_key(self) -> Callable[[int], tuple[int, ...]]:
        facts, graph = self.facts, self.facts.graph
        quick, count = facts.quick, len(graph.microbatches)
        cycles = [_cycle(count, own, waiting) for own, waiting in zip(self.fill, self.waiting, strict=True)]

        def turn(i: int) -> int:
            kind = "W" if graph.weights[i] else "B" if facts.late[i] else "F"
            return cycles[graph.rank[i]][kind, graph.microbatch[i]]

        self.turn = [turn(i) for i in range(len(graph.ns))]
        self.turns = [
            sorted((i for i, r in enumerate(graph.rank) if r == rank and not graph.weights[i]), key=turn, reverse=True)
            for rank in range(len(graph.ranks))
        ]

        def key(i: int) -> tuple[int, ...]:
            is_quick = graph.ns[i] <= quick and not graph.weights[i]
            if is_quick and facts.is_last(i) and facts.late[i]:
                next_one = min(graph.microbatch[i] + 1, count - 1)
                return 1, cycles[graph.rank[i]]["B", next_one], 1
            return 0 if is_quick else 1, self.turn[i], -facts.tail[i]

        return key

    def _is_its_turn(self, clock: ScheduleSimulator, rank: int, node: int) -> bool:
        """Return whether all work before these gradients of weights on their rank has begun.

        A short wait for a value should not be filled with them: the next segment would come late, and with it
        everything after.
        """
        turns = self.turns[rank]
        while turns and clock.start[turns[-1]] >= 0:
            turns.pop()
        return not turns or self.turn[node] < self.turn[turns[-1]]

    def pick(self, clock: ScheduleSimulator, rank: int, now: int) -> int:
        """See :class:`.Picker`."""
        place, best = self.place, -1
        for node in clock.ready[rank]:
            if (best < 0 or place[node] < place[best]) and self._allowed(clock, rank, node):
                best = node
        if best < 0:
            return best
        # Something more important may be worth a wait: if that and the segment itself take less than starting would delay it. Of
        # gradients of weights, which can wait, if that takes a small part of the delay.
        ns = clock.ns
        end, fills = now + ns[best], bool(self.turns) or self.facts.graph.weights[best]
        for node, time in clock.coming[rank].items():
            if time < end and place[node] < place[best]:
                wait = 4 * (time - now) if fills else time + ns[node] - now
                if wait < end - time and self._allowed(clock, rank, node):
                    return -1
        return best

    def _allowed(self, clock: ScheduleSimulator, rank: int, node: int) -> bool:
        k = self.facts.graph.microbatch[node]
        if not clock.begun[k] and clock.open >= clock.active:
            return False
        if self.turns and self.facts.graph.weights[node]:
            return clock.weights_ready[rank] > self.waiting_nodes[rank] or self._is_its_turn(clock, rank, node)
        if self.facts.in_waves and not self._wave_allows(clock, rank, node, k):
            return False
        forward = self.facts.graph.forward[node]
        if forward and not clock.opened[rank][k] and clock.weights_ready[rank] > self.waiting_nodes[rank]:
            return False  # gradients of weights, which can start, are due
        # The lowest unfinished microbatch always goes on: so nothing can wait for itself in a circle.
        if (
            clock.opened[rank][k]
            or clock.in_flight[rank] - clock.weights_only[rank] < self.cap[rank]
            or k == clock.lowest
            or not forward
        ):
            return True
        self.capped = True
        return False

    def _wave_allows(self, clock: ScheduleSimulator, rank: int, node: int, k: int) -> bool:
        wave = self.facts.wave[k]
        if clock.lowest < self.facts.first[wave]:
            return False
        left = self.early_left[rank]
        order = clock.order[rank]
        for done in order[self.counted[rank] :]:
            if not self.facts.late[done]:
                left[self.facts.wave[self.facts.graph.microbatch[done]]] -= 1
        self.counted[rank] = len(order)
        return left[wave] == 0 or not self.facts.late[node]


def _cycle(count: int, cap: int, waiting: int) -> dict[tuple[str, int], int]:
    """Return the turn of each microbatch's forward, backward and weights on a rank (ZB-H1: Qi et al., 2023).

    Args:
        cap: microbatches that fill the rank.
        waiting: number of microbatches with weights that wait.
    """
    kinds = ["F"] * cap + ["B", "F"] * waiting + ["B", "W", "F"] * count + ["B"] * count + ["W"] * count
    turns: dict[tuple[str, int], int] = {}
    for turn, kind in enumerate(kinds):
        k = sum(1 for other, _ in turns if other == kind)
        if k < count:
            turns[kind, k] = turn
    return turns


# ---- the search ----


@dataclass(eq=False)
class _Try:
    rule: _Rule
    clock: ScheduleSimulator
    capped: bool

    @property
    def in_flight(self) -> int:
        return sum(self.clock.most_in_flight)


def _run(facts: RecordedStep, rule: _Rule, keys: Sequence[float] | None = None) -> _Try:
    choice = _RuleRun(facts, rule, keys)
    clock = ScheduleSimulator(facts.graph, facts.active).run(choice)
    if clock.done < len(facts.graph.segments):
        raise AssertionError(f"the rule {rule} got stuck after {clock.done} of {len(facts.graph.segments)} segments")
    return _Try(rule, clock, choice.capped)


def _search(facts: RecordedStep) -> _Try:
    rules = _rules(facts)
    size = len(facts.graph.segments)
    if size * len(rules) > _BUDGET:
        fewer = _first_microbatches(facts)
        if fewer is not None:
            rules = [one.rule for one in _best(_tries(fewer, rules))[:_FINALISTS]]
    tries = _tries(facts, rules)
    fastest = min(tries, key=lambda one: one.clock.makespan)
    rounds = min(_ROUNDS, _BUDGET // 4 // size)
    if fastest.clock.makespan > facts.bound * (1 + _EQUAL) and rounds > _ROUNDS // 10:
        tries.append(_refined(facts, fastest, rounds))
    return _best(tries)[0]


def _tries(facts: RecordedStep, rules: Sequence[_Rule]) -> list[_Try]:
    """Run every rule, except those that are known to lead to the same result."""
    tries: list[_Try] = []
    settled: set[tuple[str, bool]] = set()  # what more spare cannot change
    for rule in rules:
        kind = rule.priority, rule.weights_wait
        if kind not in settled:
            tries.append(one := _run(facts, rule))
            if not one.capped:
                settled.add(kind)
    return tries


def _best(tries: Sequence[_Try]) -> list[_Try]:
    """Return the distinct tries, the preferred one first.

    The fastest tries count as equal; among them, the one with the fewest microbatches in flight is preferred.
    """
    least = min(one.clock.makespan for one in tries)

    def preference(one: _Try) -> tuple[float, ...]:
        equal = one.clock.makespan <= least * (1 + _EQUAL)
        return (0, one.in_flight, one.clock.makespan) if equal else (1, one.clock.makespan)

    return sorted(_without_doubles(tries), key=preference)


def _first_microbatches(facts: RecordedStep) -> RecordedStep | None:
    """Return the same facts for fewer microbatches: enough for a full pipeline or, in waves, for two waves."""
    graph, active = facts.graph, facts.active
    # Waves are as long as each other, but for the last.
    number = 2 * facts.wave.count(0) if facts.in_waves else active + 2 * len(graph.ranks)
    if number >= len(graph.microbatches):
        return None
    kept = set(graph.microbatches[:number])
    segments = [segment for segment in graph.segments if segment.action.microbatch in kept]
    try:
        return RecordedStep(SegmentGraph(segments, graph.latency / 1e9, ascending=True), active, facts.policy)
    except ScheduleError:  # a microbatch needs something of a later one
        return None


def _without_doubles(tries: Iterable[_Try]) -> list[_Try]:
    """Return one try for each different schedule, the first; rules often agree."""
    return list({tuple(map(tuple, one.clock.order)): one for one in reversed(list(tries))}.values())[::-1]


def _refined(facts: RecordedStep, best: _Try, rounds: int) -> _Try:
    """Climb from a schedule: take its start times as priorities, shift a few of them at random, keep what is faster."""
    draw = random.Random(0)
    size = len(facts.graph.segments)
    for _ in range(rounds):
        shift = facts.period * draw.choice((0.3, 1.0, 3.0))
        share = draw.choice((0.03, 0.1, 0.3))
        keys: list[float] = list(best.clock.start)
        for node in draw.sample(range(size), max(1, int(share * size))):
            keys[node] += draw.uniform(-shift, shift)
        one = _run(facts, replace(best.rule, priority="refined"), keys)
        if one.clock.makespan < best.clock.makespan:
            best = one
    return best
