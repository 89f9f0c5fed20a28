"""Planning of a schedule from a recorded step: list scheduling under several rules; the best result is kept.

A rule (:class:`_Rule`) is a simple way to decide what a free rank starts next. Which rule is best depends
on the graph: where the step function runs, how long its parts are, how slow the transport is. So all are
tried on the recorded graph, in a fixed order and without randomness, and the plan with the smallest
makespan wins. Among plans that are equal within 1 %, the one that holds fewer microbatches in flight wins,
since activations cost memory.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

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
        raise SMPUserError(
            f"active_microbatches is {active}. At least one must be active: set it to 1 or more.", code="SMP305"
        )
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
    if any(facts.graph.weights):
        # No rank holds more than the busiest rank does with whole backward passes, so the gain costs no memory.
        waits = itertools.product((False, True), ("lowest", "longest", "cycle"))
        return [_Rule(priority, 0, wait) for wait, priority in waits]
    spares: list[int | None] = [None]
    if not facts.in_waves:
        least = max(1, min(int(need) for need in facts.need))
        more = min(4, max(0, facts.active - least))
        spares = [*range(more), None]
    return [_Rule(priority, spare) for spare, priority in itertools.product(spares, ("lowest", "longest"))]


class _RuleRun:
    """A rule at work on a graph."""

    def __init__(self, facts: RecordedStep, rule: _Rule, keys: Sequence[float] | None = None) -> None:
        self.facts = facts
        self.rule = rule
        #: Per rank, the most microbatches in flight.
        self.cap = self._caps()
        self.fill = [_count_to_fill(need, facts.active) for need in facts.fill]
        #: Per rank, the microbatches that may postpone gradients of weights while another begins; and the same in nodes.
        self.waiting = [max(self.fill) - own if rule.weights_wait else 0 for own in self.fill]
        most = _most_weight_nodes(facts.graph)
        self.waiting_nodes = [count * nodes for count, nodes in zip(self.waiting, most, strict=True)]
        #: With turns, each rank's other nodes than gradients of weights, the next turn last.
        self.turns: list[list[int]] = []
        #: Per node, its number in the order of importance.
        self.place = self._places(keys)
        self.early_left = _early_nodes(facts)
        self.counted = [0] * len(facts.graph.ranks)
        self.capped = False  # whether the limit of microbatches in flight ever did

    def _caps(self) -> list[int]:
        active, spare = self.facts.active, self.rule.spare
        if spare is None:
            return [active] * len(self.facts.graph.ranks)
        caps = []
        for need, asks in zip(self.facts.need, self.facts.asks_first, strict=True):
            # A rank that first asks others for work holds nothing yet, and they have limits of their own.
            caps.append(active if asks else min(active, _count_to_fill(need, active) + spare))
        return caps

    def _places(self, keys: Sequence[float] | None) -> list[int]:
        key: Callable[[int], Any]
        if keys:
            key = keys.__getitem__
        elif self.rule.priority == "cycle":
            key = self._turn_key()
        else:
            key = self._key()
        nodes = range(len(self.facts.graph.segments))
        places = list(nodes)
        for place, node in enumerate(sorted(nodes, key=key)):
            places[node] = place
        return places

    def _key(self) -> Callable[[int], tuple[int, ...]]:
        facts, graph, priority = self.facts, self.facts.graph, self.rule.priority
        quick = facts.quick

        def key(i: int) -> tuple[int, ...]:
            microbatch = graph.microbatch[i]
            tail = -facts.tail[i]
            after = (microbatch, tail) if priority == "lowest" else (tail, microbatch)
            if graph.weights[i]:
                return (1, 3, *after)  # no other work waits for it, however quick it is
            is_quick = graph.ns[i] <= quick
            if is_quick and facts.is_last(i):
                return (1, 1, *after)
            length = 0 if is_quick else 1
            phase = 0 if facts.late[i] else 2
            return (length, phase, *after)

        return key

    def _turn_key(self) -> Callable[[int], tuple[int, ...]]:
        facts, graph = self.facts, self.facts.graph
        quick, count = facts.quick, len(graph.microbatches)
        cycles = [_cycle(count, own, waiting) for own, waiting in zip(self.fill, self.waiting, strict=True)]

        def turn(i: int) -> int:
            kind = "B" if facts.late[i] else "F"
            if graph.weights[i]:
                kind = "W"
            return cycles[graph.rank[i]][kind, graph.microbatch[i]]

        nodes = range(len(graph.ns))
        self.turn = [turn(i) for i in nodes]
        self.turns = [[] for _ in graph.ranks]
        for node in sorted(nodes, key=self.turn.__getitem__, reverse=True):
            if not graph.weights[node]:
                self.turns[graph.rank[node]].append(node)

        def key(i: int) -> tuple[int, ...]:
            turns = cycles[graph.rank[i]]
            is_quick = graph.ns[i] <= quick and not graph.weights[i]
            if not is_quick:
                return 1, self.turn[i], -facts.tail[i]
            if facts.late[i] and facts.is_last(i):
                next_one = min(graph.microbatch[i] + 1, count - 1)
                return 1, turns["B", next_one], 1
            return 0, self.turn[i], -facts.tail[i]

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
        best = self._most_important(clock, rank)
        if best >= 0 and self._is_worth_a_wait(clock, rank, best, now):
            return -1
        return best

    def _most_important(self, clock: ScheduleSimulator, rank: int) -> int:
        """Return the most important node that is ready and allowed, or -1."""
        best, lowest = -1, len(self.place)
        for node in clock.ready[rank]:
            place = self.place[node]
            if place < lowest and self._allowed(clock, rank, node):
                best = node
                lowest = place
        return best

    def _is_worth_a_wait(self, clock: ScheduleSimulator, rank: int, best: int, now: int) -> bool:
        """Return whether something more important than the best ready segment comes so soon that the rank should wait.

        It should if the wait and the coming segment take less than the delay that starting the best one would cause.
        Gradients of weights can wait, so they do if the wait is a small part of that delay.
        """
        place, ns = self.place, clock.ns
        end = now + ns[best]
        fills = bool(self.turns) or self.facts.graph.weights[best]
        for node, time in clock.coming[rank].items():
            if time >= end or place[node] >= place[best]:
                continue
            # Work that fills gaps gives way only to a wait that is short against the delay that it would cause.
            wait = 4 * (time - now) if fills else time + ns[node] - now
            if wait < end - time and self._allowed(clock, rank, node):
                return True
        return False

    def _allowed(self, clock: ScheduleSimulator, rank: int, node: int) -> bool:
        graph = self.facts.graph
        k = graph.microbatch[node]
        if not clock.may_begin(node):
            return False
        if self.turns and graph.weights[node]:
            return self._may_compute_weights(clock, rank, node)
        if self.facts.in_waves and not self._wave_allows(clock, rank, node, k):
            return False
        # Only the first forward of a microbatch puts one more in flight on the rank.
        is_first = graph.forward[node] and not clock.opened[rank][k]
        return not is_first or self._may_open(clock, rank, k)

    def _may_compute_weights(self, clock: ScheduleSimulator, rank: int, node: int) -> bool:
        return self._weights_are_due(clock, rank) or self._is_its_turn(clock, rank, node)

    def _weights_are_due(self, clock: ScheduleSimulator, rank: int) -> bool:
        return clock.weights_ready[rank] > self.waiting_nodes[rank]

    def _may_open(self, clock: ScheduleSimulator, rank: int, k: int) -> bool:
        """Return whether a rank may begin forward of one more microbatch."""
        if self._weights_are_due(clock, rank):
            return False
        # The lowest unfinished microbatch always goes on: so nothing can wait for itself in a circle.
        if k == clock.lowest:
            return True
        if clock.in_flight[rank] - clock.weights_only[rank] < self.cap[rank]:
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


def _count_to_fill(need: float, active: int) -> int:
    # 0.9: a little more than a whole number (latency, the step function's code) does not call for one more.
    return min(active, max(1, int(need + 0.9)))


def _most_weight_nodes(graph: SegmentGraph) -> list[int]:
    """Return for each rank the most nodes of gradients of weights that one microbatch has there."""
    nodes_of: Counter[tuple[int, int]] = Counter()
    for rank, microbatch, is_weights in zip(graph.rank, graph.microbatch, graph.weights, strict=True):
        nodes_of[rank, microbatch] += is_weights
    most = [0] * len(graph.ranks)
    for (rank, _), count in nodes_of.items():
        most[rank] = max(most[rank], count)
    return most


def _early_nodes(facts: RecordedStep) -> list[list[int]]:
    """Return for each rank and wave the number of nodes that do not follow from a backward."""
    graph = facts.graph
    counts = [[0] * (1 + max(facts.wave)) for _ in graph.ranks]
    for node, late in enumerate(facts.late):
        if not late:
            wave = facts.wave[graph.microbatch[node]]
            counts[graph.rank[node]][wave] += 1
    return counts


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
        if kind in settled:
            continue
        one = _run(facts, rule)
        tries.append(one)
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
