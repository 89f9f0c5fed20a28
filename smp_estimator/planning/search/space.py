"""The choices for a job on a cluster, and their order.

They are degrees, state, recomputation, microbatches, schedule and placement.

A configuration is chosen level by level (:data:`LEVELS`), so that a bound for the first levels holds for all that share
them. Degrees are divisors of what they divide, not powers of two only: published configurations have 35 stages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smp_config import ConfigError, Group, Topology
from smp_config.schedules import DEFAULT_SCHEDULE, DOCUMENTED, default_active

#: Levels of a configuration in the order of choice; the first decide most about time and memory.
LEVELS = ("pipeline", "tensor", "state", "memory", "microbatches", "schedule", "active", "placement")

#: Who keeps what: everything on each rank, optimizer state shared out, or all state over ``sharded`` ranks.
_WHOLE, _OPTIMIZER = "whole", "optimizer"

#: What activations cost: kept, computed again, or computed again with their inputs in the host's memory.
MEMORIES = _, _AGAIN, _OFFLOADED = "kept", "again", "offloaded"

_PLACEMENTS = ("DPT", "PDT", "DTP", "TDP", "PTD", "TPD")
_PLACEMENT_NAMES = {"DPT": "cluster", "TPD": "spread"}


@dataclass(frozen=True)
class Configuration:
    """One way to train; fields that are None are not chosen yet.

    Attributes:
        pipeline, tensor: degrees.
        state: ``"whole"``, ``"optimizer"`` (``shard_optimizer_state``), or the degree of sharded data parallelism.
        memory: of activations: ``"kept"``, ``"again"`` (checkpointing of each layer) or ``"offloaded"``, which is both.
        microbatches: of a batch.
        schedule: of the pipeline, one of :data:`~smp_config.schedules.DOCUMENTED`.
        active: most microbatches in flight.
        placement: letters, right-most fastest.
    """

    pipeline: int | None = None
    tensor: int | None = None
    state: str | int | None = None
    memory: str | None = None
    microbatches: int | None = None
    schedule: str | None = None
    active: int | None = None
    placement: str | None = None

    @property
    def chosen(self) -> int:
        """Return the number of levels that have a value; they are the first ones."""
        return sum(getattr(self, name) is not None for name in LEVELS)

    @property
    def is_complete(self) -> bool:
        """Return whether everything is chosen."""
        return self.placement is not None

    @property
    def sharded(self) -> int:
        """Return the degree of sharded data parallelism."""
        return self.state if isinstance(self.state, int) else 1

    @property
    def recomputes(self) -> bool:
        """Return whether layers are computed again in backward; False if that is not chosen yet."""
        return self.memory in (_AGAIN, _OFFLOADED)

    @property
    def effort(self) -> int:
        """Return how many features are enabled; of two equally fast configurations, the simpler one is preferred."""
        stages, count = self.pipeline or 1, self.microbatches or 1
        features = (stages > 1, (self.tensor or 1) > 1, self.state not in (None, _WHOLE), self.recomputes)
        details = [
            self.schedule not in (None, DEFAULT_SCHEDULE),
            self.memory == _OFFLOADED,
            self.placement not in (None, "DPT"),
        ]
        if stages > 1:
            details.append(self.active not in (None, min(default_active(stages), count)))
        else:
            details.append(count > 1)
        return 2 * sum(features) + sum(details)

    def settings(self) -> dict[str, Any]:
        """Return the ``mp_parameters`` of the configuration; values equal to their defaults are omitted."""
        stages, tensor, microbatches = self.pipeline or 1, self.tensor or 1, self.microbatches or 1
        found: dict[str, Any] = {}
        if stages > 1:
            found["pipeline_parallel_degree"] = stages
        if tensor > 1:
            found["tensor_parallel_degree"] = tensor
            # The ranks of a group read one batch together, as :meth:`Space.batch` counts.
            found["prescaled_batch"] = True
        if self.state == _OPTIMIZER:
            found["shard_optimizer_state"] = True
        elif self.sharded > 1:
            found["sharded_data_parallel_degree"] = self.sharded
        if microbatches > 1:
            found["microbatches"] = microbatches
        if stages > 1:
            found |= self._schedule_settings(stages)
        if self.memory == _OFFLOADED:
            found["offload_activations"] = True
        if self._placement_name is not None:
            found["placement_strategy"] = self._placement_name
        return found

    @property
    def _placement_name(self) -> str | None:
        """Return the value of ``placement_strategy``, or None if it is the default or not chosen."""
        if self.placement in (None, "DPT"):
            return None
        return _PLACEMENT_NAMES.get(self.placement or "", self.placement)

    def _schedule_settings(self, stages: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.schedule not in (None, DEFAULT_SCHEDULE):
            found["pipeline"] = self.schedule
        if self.active not in (None, default_active(stages)):
            found["active_microbatches"] = self.active
        return found

    def __str__(self) -> str:
        stages, tensor, microbatches = self.pipeline or 1, self.tensor or 1, self.microbatches or 1
        words = {
            f"pipeline {stages}": stages > 1,
            f"tensor parallelism {tensor}": tensor > 1,
            f"sharded data parallelism {self.sharded}": self.sharded > 1,
            "sharded optimizer state": self.state == _OPTIMIZER,
            "activation checkpointing": self.recomputes,
            "offloading": self.memory == _OFFLOADED,
            f"{microbatches} microbatches": microbatches > 1,
        }
        features = [word for word, is_on in words.items() if is_on]
        if stages > 1:
            features += self._pipeline_words(stages, microbatches)
        if self._placement_name is not None:
            features.append(f"placement {self._placement_name}")
        return " + ".join(features) or "data parallelism"

    def _pipeline_words(self, stages: int, microbatches: int) -> list[str]:
        words = []
        if self.schedule not in (None, DEFAULT_SCHEDULE):
            words.append(f"schedule {self.schedule}")
        usual = min(default_active(stages), microbatches)
        if self.active is not None and self.active != usual:
            words.append(f"{self.active} of them active")
        return words


@dataclass(frozen=True)
class Space:
    """All configurations of a model on a cluster with one global batch.

    Attributes:
        world: processes.
        per_host: of them on each host.
        samples: of a step, over all processes and all accumulated passes.
        accumulation: passes of an update.
        layers: most stages.
        heads: which tensor parallelism divides; 0: nothing is divided, there is no tensor parallelism.
        memories: ways to store activations, the least work first; without ``"kept"`` if the script itself checkpoints.
        schedules: that a pipeline may have.
    """

    world: int
    per_host: int
    samples: int
    accumulation: int = 1
    layers: int = 1
    heads: int = 0
    memories: tuple[str, ...] = MEMORIES
    schedules: tuple[str, ...] = DOCUMENTED

    def __post_init__(self) -> None:
        for name in ("world", "per_host", "samples", "accumulation", "layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is a count: set it to 1 or more", code="SMP110")

    def replicas(self, at: Configuration) -> int:
        """Return the number of ranks that have the same part of the model."""
        model_parallel = (at.pipeline or 1) * (at.tensor or 1)
        return self.world // model_parallel

    def batch(self, at: Configuration) -> int:
        """Return the samples that a replica reads at a time, the script's batch size."""
        return self.samples // (self.replicas(at) * self.accumulation)

    def check(self, at: Configuration) -> None:
        """Refuse a configuration from outside the space if its replicas cannot read the global batch.

        Raises:
            ConfigError: degrees that do not divide the processes, or a batch that is not whole.
        """
        self.topology(at)
        microbatches = at.microbatches or 1
        replicas = self.replicas(at)
        readers = replicas * self.accumulation
        each, rest = divmod(self.samples, readers)
        if rest or each % microbatches:
            raise ConfigError(
                f"a global batch of {self.samples} samples cannot be read by {replicas} replicas in {self.accumulation} "
                f"accumulation steps of {microbatches} microbatches ({self.world} processes, pipeline {at.pipeline or 1}, "
                f"tensor {at.tensor or 1}); use a multiple of {readers * microbatches}",
                code="SMP110",
            )

    def topology(self, at: Configuration) -> Topology:
        """Return the degrees over all processes."""
        return Topology(
            self.world,
            pipeline=at.pipeline or 1,
            tensor=at.tensor or 1,
            sharded=at.sharded,
            placement=at.placement or "DPT",
        )

    def children(self, at: Configuration) -> Iterator[Configuration]:
        """Yield the choices of the next level."""
        name = LEVELS[at.chosen]
        choices: Mapping[str, Callable[[Configuration], Iterator[Any]]] = {
            "pipeline": self._pipelines,
            "tensor": self._tensors,
            "state": self._states,
            "memory": self._memories,
            "microbatches": self._microbatch_counts,
            "schedule": self._schedules,
            "active": self._actives,
            "placement": self._placements,
        }
        for value in choices[name](at):
            yield dataclasses.replace(at, **{name: value})

    def all(self, at: Configuration | None = None) -> Iterator[Configuration]:
        """Yield every complete configuration below ``at``."""
        at = at or Configuration()
        if at.is_complete:
            yield at
            return
        for child in self.children(at):
            yield from self.all(child)

    def neighbours(self, at: Configuration) -> Iterator[tuple[str, Configuration]]:
        """Yield configurations that differ in one level, each with the name of that level.

        Later levels keep their values if they can. A level that cannot (another number of stages has other
        microbatches) takes the nearest value.
        """
        for level, name in enumerate(LEVELS):
            before = dataclasses.replace(at, **dict.fromkeys(LEVELS[level:]))
            value = getattr(at, name)
            others = [changed for changed in self.children(before) if getattr(changed, name) != value]
            for changed in others:
                found = self._completed(changed, at)
                if found is not None:
                    yield name, found

    def _completed(self, at: Configuration, like: Configuration) -> Configuration | None:
        while not at.is_complete:
            name = LEVELS[at.chosen]
            choices = list(self.children(at))
            if not choices:
                return None
            wanted = getattr(like, name)
            at = min(choices, key=lambda choice: _distance(getattr(choice, name), wanted))
        return at

    def _pipelines(self, _: Configuration) -> Iterator[int]:
        yield from (degree for degree in _divisors(self.world) if degree <= self.layers)

    def _tensors(self, at: Configuration) -> Iterator[int]:
        """Yield degrees inside a host, but only those with which replicas can read the global batch."""
        stages = at.pipeline or 1
        for degree in _divisors(self.world // stages):
            if degree > 1 and not self._can_split(degree):
                continue
            replicas = self.world // (stages * degree)
            # Each replica reads as many samples as the others, in each accumulation step.
            reads_evenly = self.samples % (replicas * self.accumulation) == 0
            if reads_evenly:
                yield degree

    def _can_split(self, degree: int) -> bool:
        """Return whether a tensor parallel group of this size divides the attention heads, and fits into a host."""
        if not self.heads or self.heads % degree:
            return False
        return self.per_host % degree == 0

    def _states(self, at: Configuration) -> Iterator[str | int]:
        replicas = self.replicas(at)
        yield _WHOLE
        if replicas > 1:
            yield _OPTIMIZER
            yield from (degree for degree in _divisors(replicas) if degree > 1)

    def _memories(self, _: Configuration) -> Iterator[str]:
        yield from self.memories

    def _microbatch_counts(self, at: Configuration) -> Iterator[int]:
        yield from _divisors(self.batch(at))

    def _schedules(self, at: Configuration) -> Iterator[str]:
        """Yield the schedules; only the default one without a pipeline, because all are then alike."""
        has_pipeline = (at.pipeline or 1) > 1
        yield from self.schedules if has_pipeline else (DEFAULT_SCHEDULE,)

    def _actives(self, at: Configuration) -> Iterator[int]:
        """Yield the default, enough to fill the pipeline and half of that, twice as many, and all."""
        stages = at.pipeline or 1
        most = at.microbatches or 1
        if stages == 1:
            yield 1
            return
        wanted = (default_active(stages), stages // 2, stages, 2 * stages, most)
        possible = [min(most, max(1, each)) for each in wanted]
        yield from dict.fromkeys(possible)

    def _placements(self, at: Configuration) -> Iterator[str]:
        """Yield placements that distribute the groups over hosts in different ways; on one host all are alike."""
        if self.world <= self.per_host:
            yield "DPT"
            return
        sizes = {"P": at.pipeline or 1, "T": at.tensor or 1, "D": self.replicas(at)}
        seen: set[str] = set()
        for letters in _PLACEMENTS:
            # Groups of one rank have no place: placements that differ only in them are one layout.
            layout = "".join(letter for letter in letters if sizes[letter] > 1)
            if layout not in seen:
                seen.add(layout)
                yield letters

    def ring(self, at: Configuration, group: Group) -> tuple[int, int]:
        """Return the most ranks of a group on one host, and the number of its hosts.

        If no placement is chosen, these are the best possible values.
        """
        sizes = {
            Group.TP: at.tensor or 1,
            Group.RDP: self.replicas(at),
            Group.SHARD: at.sharded,
            Group.REPLICA: self.replicas(at) // at.sharded,
            Group.PP: at.pipeline or 1,
        }
        if at.placement is None:
            on_host = min(sizes[group], self.per_host)
            return on_host, -(-sizes[group] // on_host)
        # The right-most letter changes from one rank to the next.
        order = at.placement[::-1]
        degrees = {"P": sizes[Group.PP], "T": sizes[Group.TP], "D": sizes[Group.RDP]}
        letter = {Group.TP: "T", Group.PP: "P"}.get(group, "D")
        stride = 1
        for each in itertools.takewhile(lambda one: one != letter, order):
            stride *= degrees[each]
        # Between two ranks with the same shard are those with the other shards.
        if group is Group.REPLICA:
            stride *= at.sharded
        hosts = [member * stride // self.per_host for member in range(sizes[group])]
        return max(hosts.count(host) for host in set(hosts)), len(set(hosts))


def _distance(value: Any, wanted: Any) -> float:
    if value == wanted:
        return -1.0
    if isinstance(value, int) and isinstance(wanted, int):
        return float(abs(value - wanted))
    return float("inf")


def _divisors(number: int) -> list[int]:
    # Each divisor above the root belongs to one below it.
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


__all__ = ["LEVELS", "MEMORIES", "Configuration", "Space"]
