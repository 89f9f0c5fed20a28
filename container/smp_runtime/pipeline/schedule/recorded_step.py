"""Facts about a recorded step before it has an order: durations, and how many microbatches keep each rank busy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_runtime.pipeline.schedule.policies import Policy
    from smp_runtime.pipeline.schedule.simulation import SegmentGraph

#: Segments shorter than this fraction of a microbatch's work on the busiest rank go first, since others wait for them.
#: They are usually the step function's own code.
_QUICK = 0.06


class RecordedStep:
    """The facts about a graph before any order: solo times, tails, waves, and how many microbatches fill each rank."""

    def __init__(self, graph: SegmentGraph, active: int, policy: Policy) -> None:
        self.graph = graph
        self.active = active
        self.policy = policy
        self.nodes = graph.topological()
        self.period = self._period()
        self.quick = int(_QUICK * self.period)
        self.tail, self.head = self._tails(), self._heads()
        self.bound = self._bound()
        waves = [policy.wave(k, active) for k in range(len(graph.microbatches))]
        self.in_waves = None not in waves
        self.wave = [wave or 0 for wave in waves]
        #: The first microbatch of each wave.
        self.first = [self.wave.index(wave) for wave in range(1 + max(self.wave))]
        self.late = self._late()
        self.asks_first = self._asks_first()
        self.need = self._need(0)
        #: The same without the step function's own code, which may begin long before.
        self.fill = self._need(self.quick)

    def _period(self) -> int:
        """Return the work per microbatch of the busiest rank, in nanoseconds."""
        work = [0] * len(self.graph.ranks)
        for r, ns in zip(self.graph.rank, self.graph.ns, strict=True):
            work[r] += ns
        return max(1, max(work) // len(self.graph.microbatches))

    def _edges(self, node: int) -> Iterable[tuple[int, int]]:
        """Yield followers in the same microbatch, with the time from start to start."""
        graph = self.graph
        for target, at in graph.successors[node]:
            if graph.microbatch[target] == graph.microbatch[node]:
                yield target, (graph.ns[node] if at < 0 else at) + graph.travel(node, target)

    def _tails(self) -> list[int]:
        """Return for each node the time from its start to its microbatch's end, if there were no other work."""
        tail = list(self.graph.ns)
        for node in reversed(self.nodes):
            for target, time in self._edges(node):
                tail[node] = max(tail[node], time + tail[target])
        return tail

    def _heads(self, later: Sequence[int] | None = None) -> list[int]:
        """Return for each node the time from its microbatch's begin to its start, if there were no other work.

        Args:
            later: for each node, the delay of everything that it gives.
        """
        head = [0] * len(self.graph.ns)
        delays = later or head.copy()
        for node in self.nodes:
            for target, time in self._edges(node):
                head[target] = max(head[target], head[node] + time + delays[node])
        return head

    def _bound(self) -> int:
        """Return a lower bound of the makespan of any order, in nanoseconds.

        Per rank: the earliest start of a segment, the work of all, the shortest tail after one. Once over all
        segments, and once over the longer ones only, which have more work before and after them.
        """
        bound = max(self.tail)
        for shortest in (0, self.quick):
            for rank in range(len(self.graph.ranks)):
                bound = max(bound, self._bound_of(rank, shortest))
        return bound

    def _bound_of(self, rank: int, shortest: int) -> int:
        """Return the bound that one rank's segments of at least ``shortest`` nanoseconds set, or 0 if it has none."""
        ns = self.graph.ns
        nodes = self._nodes_of(rank, shortest)
        if not nodes:
            return 0
        before = min(self.head[i] for i in nodes)
        work = sum(ns[i] for i in nodes)
        after = min(self.tail[i] - ns[i] for i in nodes)
        return before + work + after

    def _nodes_of(self, rank: int, shortest: int) -> list[int]:
        ranks, ns = self.graph.rank, self.graph.ns
        return [i for i, r in enumerate(ranks) if r == rank and ns[i] >= shortest]

    def _late(self) -> list[bool]:
        """Return for each segment whether it is in the backward phase or follows from it.

        An example of the latter is a forward run again inside a backward.
        """
        graph = self.graph
        late = [not forward for forward in graph.forward]
        for node in self.nodes:
            if not late[node]:
                continue
            wave = self.wave[graph.microbatch[node]]
            for target, _ in graph.successors[node]:
                if self.wave[graph.microbatch[target]] == wave:
                    late[target] = True
        return late

    def is_last(self, node: int) -> bool:
        """Return whether only gradients of weights of its microbatch wait for a node; no segment waits for those.

        A segment that itself waits for others should not stand between segments that others wait for. An example is
        the step function that waits for the gradient of an embedding on the stage of the loss. On a rank that keeps
        to an order, such a segment would hold the others up when it comes late.
        """
        return all(self.graph.weights[target] for target, _ in self._edges(node))

    def _asks_first(self) -> list[bool]:
        """Return for each rank whether its microbatches begin with a quick segment.

        This is the step function's code, up to the first value that it needs from other stages.
        """
        graph = self.graph
        first: dict[tuple[int, int], int] = {}
        for node in self.nodes:
            first.setdefault((graph.rank[node], graph.microbatch[node]), node)
        asks_first = [True] * len(graph.ranks)
        for (rank, _), node in first.items():
            if graph.ns[node] > self.quick:
                asks_first[rank] = False
        return asks_first

    def _need(self, shortest: int) -> list[float]:
        """Return how many microbatches in flight keep each rank busy: time that one spends there ÷ period (Little's law).

        On a chain of equal stages this is ``p - i``, as in 1F1B. Gradients of weights that come later count as if
        they were computed at once, in the backward pass that leaves them: they reduce idle time without more
        microbatches in flight.

        Args:
            shortest: nanoseconds of the shortest segment that counts.
        """
        graph = self.graph
        left = [0] * len(graph.ns)
        for i, segment in enumerate(graph.segments):
            if graph.weights[i]:
                for event in segment.needs:
                    left[graph.giver[event][0]] += graph.ns[i]
        head = self._heads(left) if any(left) else self.head
        begin: dict[tuple[int, int], int] = {}
        end: dict[tuple[int, int], int] = {}
        for i, (r, k) in enumerate(zip(graph.rank, graph.microbatch, strict=True)):
            if graph.ns[i] < shortest or graph.weights[i]:
                continue
            if graph.forward[i]:
                begin[r, k] = min(begin.get((r, k), head[i]), head[i])
            end[r, k] = max(end.get((r, k), 0), head[i] + graph.ns[i] + left[i])
        need = [0.0] * len(graph.ranks)
        for (r, k), time in begin.items():
            need[r] = max(need[r], (end[r, k] - time) / self.period)
        return need
