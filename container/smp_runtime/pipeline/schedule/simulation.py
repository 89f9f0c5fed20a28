"""Simulation of a schedule without processes: a clock over the recorded graph, the check of an order, and figures.

Times are whole nanoseconds inside, so that events at the same moment are exactly equal. So every run of the
simulation, on every machine, takes the same decisions.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from smp_runtime.pipeline.schedule.actions import Action, Event, Orders, ScheduleError, Segment, TaskKind

_NANOSECONDS = 1_000_000_000
#: What happens at a time, to a node or microbatch; ends before arrivals, so that a rank that gets free sees all that is there.
_END, _ARRIVAL, _FINISHED = range(3)


@dataclass(frozen=True)
class SimulatedRun:
    """The result of a simulated schedule. Seconds throughout."""

    start: dict[Action, float]  # of every action, like the next
    finish: dict[Action, float]
    makespan: float  # end of the last action
    idle: dict[int, float]  # per rank, the fraction of the makespan in which it computes nothing
    #: Per rank, the most microbatches with a forward segment begun there and the last segment there not ended.
    #: The memory of the rank's activations grows with it.
    in_flight: dict[int, int]
    active: int  # the most microbatches begun and not finished, over all ranks


def simulate(orders: Orders, segments: Iterable[Segment], *, active: int, latency: float = 0.0) -> SimulatedRun:
    """Run ``orders`` on the recorded graph: every rank starts the next action of its order as soon as it can.

    Args:
        active: most microbatches begun and not finished; one more begins only when another has finished everywhere.
        latency: seconds from rank to rank.

    Raises:
        ScheduleError: an action is missing, unknown, listed twice or on a wrong rank, no action gives an event, or
            the order deadlocks; the message then names the cycle of waits.
    """
    graph = SegmentGraph(segments, latency)
    sequence = _sequence(orders, graph)
    return summarize_run(graph, replay(graph, sequence, active))


# ---- the graph ----


class SegmentGraph:
    """Segments compiled to numbers: nodes are positions in ``segments``, edges carry the time after a node's start.

    With ``ascending``, a segment also follows the same (kind, path, part) of the next lower microbatch on its rank. In
    ``ranks`` and ``microbatches`` stand the real numbers; inside, both count from 0.
    """

    def __init__(self, segments: Iterable[Segment], latency: float, *, ascending: bool = False) -> None:
        self.segments = list(segments)
        self.latency = _nanoseconds(latency)
        self.index = {segment.action: i for i, segment in enumerate(self.segments)}
        if len(self.index) < len(self.segments):
            raise ScheduleError(f"action {_first_double(s.action for s in self.segments)} was recorded twice.")
        self.ranks = sorted({segment.rank for segment in self.segments})
        self.microbatches = sorted({segment.action.microbatch for segment in self.segments})
        rank_number = {rank: r for r, rank in enumerate(self.ranks)}
        microbatch_number = {k: i for i, k in enumerate(self.microbatches)}
        self.rank = [rank_number[segment.rank] for segment in self.segments]
        self.microbatch = [microbatch_number[segment.action.microbatch] for segment in self.segments]
        self.ns = [_nanoseconds(segment.seconds) for segment in self.segments]
        self.forward = [segment.phase is not TaskKind.BACKWARD for segment in self.segments]
        self.weights = [segment.action.kind is TaskKind.WEIGHTS for segment in self.segments]
        self.successors: list[list[tuple[int, int]]] = [[] for _ in self.segments]  # (node, event offset or -1 = end)
        self.needed = [0] * len(self.segments)
        self.giver = self._givers()
        self._connect_events()
        self._connect_parts()
        if ascending:
            self._connect_microbatches()

    def _givers(self) -> dict[Event, tuple[int, int]]:
        givers: dict[Event, tuple[int, int]] = {}
        for i, segment in enumerate(self.segments):
            for event, at in segment.gives:
                if event in givers:
                    other = self.segments[givers[event][0]].action
                    raise ScheduleError(f"event {event} was recorded twice: given by {other} and by {segment.action}.")
                givers[event] = i, min(_nanoseconds(at), self.ns[i])
        return givers

    def _connect_events(self) -> None:
        for i, segment in enumerate(self.segments):
            for event in segment.needs:
                if event not in self.giver:
                    raise ScheduleError(
                        f"{segment.action} on rank {segment.rank} needs {event}, which no recorded segment gives. "
                        "Record whole steps, of every rank."
                    )
                source, at = self.giver[event]
                # On its own rank the giver's end comes first anyway.
                self._connect(source, i, -1 if self.rank[source] == self.rank[i] else at)

    def _connect_parts(self) -> None:
        tasks: dict[tuple[TaskKind, int, tuple[int, ...]], list[int]] = {}
        for i, segment in enumerate(self.segments):
            action = segment.action
            tasks.setdefault((action.kind, action.microbatch, action.path), []).append(i)
        for parts in tasks.values():
            parts.sort(key=lambda i: self.segments[i].action.part)
            for one, following in itertools.pairwise(parts):
                self._connect(one, following, -1)

    def _connect_microbatches(self) -> None:
        alike: dict[tuple[int, TaskKind, tuple[int, ...], int], list[int]] = {}
        for i, segment in enumerate(self.segments):
            action = segment.action
            alike.setdefault((self.rank[i], action.kind, action.path, action.part), []).append(i)
        for nodes in alike.values():
            nodes.sort(key=lambda i: self.microbatch[i])
            for one, following in itertools.pairwise(nodes):
                self._connect(one, following, -1)

    def _connect(self, source: int, target: int, at: int) -> None:
        self.successors[source].append((target, at))
        self.needed[target] += 1

    def travel(self, source: int, target: int) -> int:
        """Return the nanoseconds until the output of one node is available to another."""
        return 0 if self.rank[source] == self.rank[target] else self.latency

    def sources(self, node: int) -> list[int]:
        """Return the nodes that must give something before ``node`` can start."""
        found = []
        for source, edges in enumerate(self.successors):
            targets = [target for target, _ in edges]
            if node in targets:
                found.append(source)
        return found

    def topological(self) -> list[int]:
        """Return all nodes, sources first.

        Raises:
            ScheduleError: segments wait for each other in a cycle, whatever the order.
        """
        left = list(self.needed)
        found = [i for i, count in enumerate(left) if count == 0]
        for i in found:  # grows while it is read
            for target, _ in self.successors[i]:
                left[target] -= 1
                if left[target] == 0:
                    found.append(target)
        if len(found) < len(left):
            blocked = {i for i, count in enumerate(left) if count}
            first = min(blocked)
            raise ScheduleError(_in_words(_circle(first, lambda i: self._blocked_source(i, blocked)), self))
        return found

    def _blocked_source(self, node: int, blocked: set[int]) -> tuple[int, str]:
        source = next(i for i in self.sources(node) if i in blocked)
        return source, "needs what comes from"


def _nanoseconds(seconds: float) -> int:
    if not 0 <= seconds < 1e9:
        raise ScheduleError(f"a duration of {seconds} s was recorded. Durations are seconds from 0 up.")
    return round(seconds * _NANOSECONDS)


def _first_double(actions: Iterable[Action]) -> Action | None:
    seen: set[Action] = set()
    for action in actions:
        if action in seen:
            return action
        seen.add(action)
    return None


# ---- the clock ----


class Picker(Protocol):
    """The choice of the next segment of a free rank."""

    def pick(self, clock: ScheduleSimulator, rank: int, now: int) -> int:
        """Return a node that is ready on ``rank`` and allowed by the clock, or -1 to wait until something happens."""


class ScheduleSimulator:
    """A simulation of a graph: one segment at a time per rank, non-preemptive, chosen by a :class:`Picker`.

    Attributes:
        ready: per rank, nodes that could start now.
        coming: per rank, nodes that will be ready at a known later time, with that time.
        open: microbatches begun and not yet known to be finished.
        order, start, finish: what ran.
    """

    def __init__(self, graph: SegmentGraph, active: int) -> None:
        self.graph = graph
        self.active = active
        self.ns = graph.ns
        size, ranks, microbatches = len(graph.segments), len(graph.ranks), len(graph.microbatches)
        self.ready: list[set[int]] = [set() for _ in range(ranks)]
        self.coming: list[dict[int, int]] = [{} for _ in range(ranks)]
        self.order: list[list[int]] = [[] for _ in range(ranks)]
        self.start = [-1] * size
        self.finish = [-1] * size
        self.makespan = 0
        self.done = 0
        # Microbatches, over all ranks.
        self.begun = [False] * microbatches
        self.home = [0] * microbatches
        self.finished = [False] * microbatches
        self.lowest = 0  # the lowest microbatch that is not finished
        self.open = 0
        self.most_open = 0
        self.left = [0] * microbatches
        # And on each rank, at [rank][microbatch].
        self.left_at = [[0] * microbatches for _ in range(ranks)]
        self.opened = [[False] * microbatches for _ in range(ranks)]
        self.before_weights = [[0] * microbatches for _ in range(ranks)]  # as ``left_at``, without gradients of weights
        self.in_flight = [0] * ranks
        self.weights_only = [0] * ranks  # of those in flight, the ones with nothing left but gradients of weights
        self.weights_ready = [0] * ranks  # gradients of weights that could be computed, as nodes
        self.most_in_flight = [0] * ranks
        for r, k, weights in zip(graph.rank, graph.microbatch, graph.weights, strict=True):
            self.left[k] += 1
            self.left_at[r][k] += 1
            self.before_weights[r][k] += not weights
        self._missing = list(graph.needed)
        self._available = [0] * size
        self._busy = [False] * ranks
        self._events = [(0, _ARRIVAL, i) for i, count in enumerate(self._missing) if count == 0]
        heapq.heapify(self._events)

    def may_begin(self, node: int) -> bool:
        """Return whether the limit of active microbatches lets this node start."""
        return self.open < self.active or self.begun[self.graph.microbatch[node]]

    def run(self, picker: Picker) -> ScheduleSimulator:
        """Run until nothing more happens. If ``done`` is less than the number of segments, the picker got stuck."""
        rank_of, events, busy = self.graph.rank, self._events, self._busy
        while events:
            now = events[0][0]
            while events and events[0][0] == now:
                _, what, node = heapq.heappop(events)
                if what == _END:
                    busy[rank_of[node]] = False
                    self._end(node, now)
                elif what == _ARRIVAL:
                    self.coming[rank_of[node]].pop(node, None)
                    self.ready[rank_of[node]].add(node)
                    self.weights_ready[rank_of[node]] += self.graph.weights[node]
                else:
                    self._finished(node)
            for r, waiting in enumerate(self.ready):
                if not waiting or busy[r]:
                    continue
                node = picker.pick(self, r, now)
                if node >= 0:
                    busy[r] = True
                    self._start(node, r, now)
                    self._give(node, r, now)
        return self

    def _give(self, node: int, r: int, now: int) -> None:
        """Schedule the end of a node that starts now, and the starts of the nodes that need something from it."""
        graph, events, missing, available = self.graph, self._events, self._missing, self._available
        ns = self.ns[node]
        heapq.heappush(events, (now + ns, _END, node))
        for target, at in graph.successors[node]:
            if at < 0 or at > ns:
                at = ns
            to = graph.rank[target]
            time = now + at + (graph.latency if to != r else 0)
            if time > available[target]:
                available[target] = time
            missing[target] -= 1
            if missing[target] == 0:
                self.coming[to][target] = available[target]
                heapq.heappush(events, (available[target], _ARRIVAL, target))

    def _start(self, node: int, r: int, now: int) -> None:
        self.ready[r].discard(node)
        self.weights_ready[r] -= self.graph.weights[node]
        self.order[r].append(node)
        self.start[node] = now
        k = self.graph.microbatch[node]
        if not self.begun[k]:
            self.begun[k] = True
            self.home[k] = r
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        if self.graph.forward[node] and not self.opened[r][k]:
            self.opened[r][k] = True
            self.in_flight[r] += 1
            self.most_in_flight[r] = max(self.most_in_flight[r], self.in_flight[r])

    def _end(self, node: int, now: int) -> None:
        """Record the end of a node; the first rank of a microbatch learns later that the microbatch is finished."""
        r, k = self.graph.rank[node], self.graph.microbatch[node]
        self.finish[node] = now
        self.makespan = max(self.makespan, now)
        self.done += 1
        self.left_at[r][k] -= 1
        if not self.graph.weights[node]:
            self.before_weights[r][k] -= 1
        if self.opened[r][k]:
            self._count_in_flight(node, r, k)
        self.left[k] -= 1
        if not self.left[k]:
            known = now + (self.graph.latency if self.home[k] != r else 0)
            heapq.heappush(self._events, (known, _FINISHED, k))

    def _count_in_flight(self, node: int, r: int, k: int) -> None:
        """Record the end of a node of a microbatch that is in flight on the rank."""
        left, is_weights = self.left_at[r][k], self.graph.weights[node]
        has_only_weights = self.before_weights[r][k] == 0
        if has_only_weights:
            if left and not is_weights:
                # From now on only gradients of weights are left.
                self.weights_only[r] += 1
            elif is_weights and not left:
                # These are done too.
                self.weights_only[r] -= 1
        if not left:
            self.in_flight[r] -= 1

    def _finished(self, k: int) -> None:
        self.finished[k] = True
        self.open -= 1
        while self.lowest < len(self.finished) and self.finished[self.lowest]:
            self.lowest += 1


class _Replay:
    """A picker that starts only the next node of the order."""

    def __init__(self, sequence: Sequence[Sequence[int]]) -> None:
        self.sequence = sequence

    def pick(self, clock: ScheduleSimulator, rank: int, now: int) -> int:
        """See :class:`Picker`."""
        node = self.sequence[rank][len(clock.order[rank])]
        return node if node in clock.ready[rank] and clock.may_begin(node) else -1


def replay(graph: SegmentGraph, sequence: Sequence[Sequence[int]], active: int) -> ScheduleSimulator:
    """Run fixed orders, in node numbers.

    Raises:
        ScheduleError: the orders deadlock.
    """
    clock = ScheduleSimulator(graph, active).run(_Replay(sequence))
    if clock.done < len(graph.segments):
        raise ScheduleError(_deadlock(clock, sequence))
    return clock


def summarize_run(graph: SegmentGraph, clock: ScheduleSimulator) -> SimulatedRun:
    """Return the figures of a finished clock, in seconds and real rank numbers."""
    actions = [segment.action for segment in graph.segments]
    busy = [0] * len(graph.ranks)
    for r, ns in zip(graph.rank, clock.ns, strict=True):
        busy[r] += ns
    return SimulatedRun(
        start={action: time / _NANOSECONDS for action, time in zip(actions, clock.start, strict=True)},
        finish={action: time / _NANOSECONDS for action, time in zip(actions, clock.finish, strict=True)},
        makespan=clock.makespan / _NANOSECONDS,
        idle={rank: 1 - busy[r] / clock.makespan if clock.makespan else 0.0 for r, rank in enumerate(graph.ranks)},
        in_flight=dict(zip(graph.ranks, clock.most_in_flight, strict=True)),
        active=clock.most_open,
    )


# ---- checks of an order ----


def _sequence(orders: Orders, graph: SegmentGraph) -> list[list[int]]:
    """Return the orders in node numbers, after a check that every action is listed exactly once and on its rank."""
    sequence = []
    for rank, order in orders.items():
        _check_order(rank, order, graph)
    for rank in graph.ranks:
        order = orders.get(rank, ())
        sequence.append([graph.index[action] for action in order])
    named = set(itertools.chain.from_iterable(sequence))
    for node, segment in enumerate(graph.segments):
        if node not in named:
            raise ScheduleError(f"{segment.action} was recorded on rank {segment.rank}, but its order lacks it.")
    return sequence


def _check_order(rank: int, order: Sequence[Action], graph: SegmentGraph) -> None:
    double = _first_double(order)
    if double is not None:
        raise ScheduleError(f"{double} stands twice in the order of rank {rank}. An action runs exactly once.")
    for action in order:
        if action not in graph.index:
            raise ScheduleError(f"{action} is in the order of rank {rank}, but was not recorded on any rank.")
        home = graph.segments[graph.index[action]].rank
        if home != rank:
            raise ScheduleError(f"{action} is in the order of rank {rank}, but was recorded on rank {home}.")


def _deadlock(clock: ScheduleSimulator, sequence: Sequence[Sequence[int]]) -> str:
    """Return a message with the cycle of waits, found by following what each rank's next action waits for."""
    graph = clock.graph
    heads: dict[int, int] = {}
    for r, order in enumerate(sequence):
        done = len(clock.order[r])
        if done < len(order):
            heads[r] = order[done]

    def waits_for(node: int) -> tuple[int, str]:
        r = graph.rank[node]
        if heads[r] != node:
            return heads[r], "comes in its rank's order after"
        for source in graph.sources(node):
            if clock.finish[source] < 0:
                return source, "needs what comes from"
        unfinished = _unfinished_node(clock)
        return unfinished, f"may only begin when one of {clock.active} active microbatches is finished, which lacks"

    return _in_words(_circle(next(iter(heads.values())), waits_for), graph)


def _unfinished_node(clock: ScheduleSimulator) -> int:
    """Return a node that has not ended, of the lowest microbatch that has begun and not finished."""
    unfinished = (k for k, begun in enumerate(clock.begun) if begun and not clock.finished[k])
    lowest = next(unfinished)
    nodes = (node for node, k in enumerate(clock.graph.microbatch) if k == lowest)
    return next(node for node in nodes if clock.finish[node] < 0)


def _circle(node: int, waits_for: Callable[[int], tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the cycle of waits that is reached from ``node``, as ``(node, why it waits for the following one)``."""
    path: dict[int, str] = {}
    while node not in path:
        source, path[node] = waits_for(node)
        node = source
    nodes = list(path)
    return [(i, path[i]) for i in nodes[nodes.index(node) :]]


def _in_words(circle: list[tuple[int, str]], graph: SegmentGraph) -> str:
    waits = "; ".join(
        f"{_named(node, graph)} {why} {_named(circle[(i + 1) % len(circle)][0], graph)}"
        for i, (node, why) in enumerate(circle)
    )
    return f"the schedule deadlocks: {waits}. Change the order of one of these ranks."


def _named(node: int, graph: SegmentGraph) -> str:
    segment = graph.segments[node]
    return f"{segment.action} (rank {segment.rank})"
