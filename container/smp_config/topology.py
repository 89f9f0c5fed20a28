"""Ranks and groups: every one a slice of one grid of processes.

An *axis* belongs to the grid: pipeline (``P``), tensor (``T``) and reduced data parallel (``D``). The right-most
letter of the placement varies fastest over global ranks. The sharding axis divides the reduced data parallel axis.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from smp_config.errors import ConfigError
from smp_config.limits import MOST_RANKS


class Group(enum.Enum):
    """The groups of processes that a rank belongs to; the value is the prefix of its ``*_rank`` functions."""

    WORLD = "world"
    #: One replica of the model: all pipeline and tensor parallel ranks.
    MP = "mp"
    #: All ranks of one pipeline stage: tensor and reduced data parallel ranks. Gradients are averaged over these.
    DP = "dp"
    TP = "tp"
    PP = "pp"
    #: Reduced data parallel: ranks with the same pipeline and tensor coordinates, which hold the same parameters.
    RDP = "rdp"
    #: Ranks of an RDP group that together hold one copy of the sharded state.
    SHARD = "shard"
    #: Ranks of an RDP group that hold the same shard.
    REPLICA = "replica"
    #: Ranks of an RDP group that share the experts of mixtures out.
    EP = "ep"
    #: Ranks of an RDP group that have the same experts, whole or in shards.
    EXPERT_RDP = "expert_rdp"
    #: Ranks of an RDP group that hold the same shard of the same experts.
    EXPERT_REPLICA = "expert_replica"
    #: Ranks of an RDP group that share each sequence out.
    CONTEXT = "cp"
    #: What scripts call data parallel: the DP group without the ranks that read the same batch for other positions.
    BATCH_DP = "batch_dp"
    #: What scripts call reduced data parallel: the RDP group without these.
    BATCH_RDP = "batch_rdp"


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on each axis, counted from 0."""

    pp: int
    tp: int
    rdp: int


@dataclass(frozen=True)
class Topology:
    """All degrees, and every group that follows from them.

    Args:
        world_size: processes over all hosts.
        sharded: processes that share one copy of the state; divides the reduced data parallel degree.
        expert: processes that share the experts of mixtures out, neighbors on the reduced data parallel axis. Times ``sharded`` it
            divides that degree.
        context: processes that share each sequence out, neighbors on the reduced data parallel axis, whose degree it divides.
        placement: permutation of ``D``, ``P``, ``T``; the right-most varies fastest over global ranks.

    Raises:
        ConfigError: a degree below 1, or one that does not divide what it must divide.
    """

    world_size: int
    pipeline: int = 1
    tensor: int = 1
    sharded: int = 1
    placement: str = "DPT"
    expert: int = 1
    context: int = 1
    _sizes: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("world_size", "pipeline", "tensor", "sharded", "expert", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; every degree is at least 1", code="SMP102")
        if self.world_size > MOST_RANKS:
            raise ConfigError(
                f"the job has {self.world_size} processes (processes_per_host × instance_count), more than the {MOST_RANKS:,} that "
                "the library lays out: lower one of the two",
                code="SMP102",
            )
        if sorted(self.placement) != ["D", "P", "T"]:
            raise ConfigError(
                f"placement {self.placement!r} is not a permutation of D, P and T; use for example 'DPT'", code="SMP102"
            )
        model = self.pipeline * self.tensor
        made_of = f"pipeline_parallel_degree {self.pipeline} × tensor_parallel_degree {self.tensor} = {model}"
        if model > self.world_size:
            raise ConfigError(
                f"one replica needs {model} processes ({made_of}), but the job has {self.world_size} "
                f"(processes_per_host × instance_count); lower a degree or start at least {model} processes",
                code="SMP102",
            )
        if self.world_size % model:
            raise ConfigError(
                f"{self.world_size} processes (processes_per_host × instance_count) cannot be divided into replicas of "
                f"{model} processes ({made_of}); use {self.world_size // model * model} processes or degrees whose "
                f"product divides {self.world_size}",
                code="SMP102",
            )
        rdp = self.world_size // model
        if rdp % self.sharded:
            fitting = [d for d in range(1, rdp + 1) if rdp % d == 0]
            raise ConfigError(
                f"sharded_data_parallel_degree is {self.sharded}, but there are {rdp} data parallel ranks "
                f"to shard over ({self.world_size} processes ÷ {made_of}); use one of {', '.join(map(str, fitting))}",
                code="SMP102",
            )
        if rdp % (self.sharded * self.expert):
            fitting = [d for d in range(1, rdp // self.sharded + 1) if rdp // self.sharded % d == 0]
            raise ConfigError(
                f"expert_parallel_degree is {self.expert}, and {rdp} data parallel ranks cannot be divided by it times the "
                f"{self.sharded} that share one copy of the state; use one of {', '.join(map(str, fitting))}",
                code="SMP102",
            )
        if rdp % self.context:
            fitting = [d for d in range(1, rdp + 1) if rdp % d == 0]
            raise ConfigError(
                f"context_parallel_degree is {self.context}, but {rdp} replicas of the model "
                f"({self.world_size} processes ÷ {made_of}) cannot be divided into groups that share "
                f"sequences out; use one of {', '.join(map(str, fitting))}",
                code="SMP102",
            )
        object.__setattr__(self, "_sizes", {"P": self.pipeline, "T": self.tensor, "D": rdp})

    @property
    def rdp_size(self) -> int:
        """Return the number of ranks with the same parameters."""
        return self._sizes["D"]

    def size(self, group: Group) -> int:
        """Return the number of ranks in a group of this kind."""
        return {
            Group.WORLD: self.world_size,
            Group.MP: self.pipeline * self.tensor,
            Group.DP: self.tensor * self.rdp_size,
            Group.TP: self.tensor,
            Group.PP: self.pipeline,
            Group.RDP: self.rdp_size,
            Group.SHARD: self.sharded,
            Group.REPLICA: self.rdp_size // self.sharded,
            Group.EP: self.expert,
            Group.EXPERT_RDP: self.rdp_size // self.expert,
            Group.EXPERT_REPLICA: self.rdp_size // self.sharded // self.expert,
            Group.CONTEXT: self.context,
            Group.BATCH_DP: self.tensor * self.rdp_size // self.context,
            Group.BATCH_RDP: self.rdp_size // self.context,
        }[group]

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of a global rank on the three axes."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} does not exist: the job has ranks 0 to {self.world_size - 1}", code="SMP102"
            )
        found = {}
        rest = rank
        for letter in reversed(self.placement):
            rest, found[letter] = divmod(rest, self._sizes[letter])
        return Coordinates(pp=found["P"], tp=found["T"], rdp=found["D"])

    def rank_at(self, at: Coordinates) -> int:
        """Return the global rank at a position; the inverse of :meth:`coordinates`."""
        position = {"P": at.pp, "T": at.tp, "D": at.rdp}
        rank = 0
        for letter in self.placement:
            rank = rank * self._sizes[letter] + position[letter]
        return rank

    def _group_key(self, group: Group, rank: int) -> tuple[int, ...]:
        """Return the key of a rank's group; ranks with equal keys form one group."""
        at = self.coordinates(rank)
        place, expert = divmod(
            at.rdp, self.expert
        )  # ranks with other experts are neighbors, then come those with other shards
        replica, shard = divmod(place, self.sharded)
        sequence, positions = divmod(at.rdp, self.context)
        return {
            Group.WORLD: (),
            Group.MP: (at.rdp,),
            Group.DP: (at.pp,),
            Group.TP: (at.pp, at.rdp),
            Group.PP: (at.tp, at.rdp),
            Group.RDP: (at.pp, at.tp),
            Group.SHARD: (at.pp, at.tp, expert, replica),
            Group.REPLICA: (at.pp, at.tp, shard),
            Group.EP: (at.pp, at.tp, place),
            Group.EXPERT_RDP: (at.pp, at.tp, expert),
            Group.EXPERT_REPLICA: (at.pp, at.tp, expert, shard),
            Group.CONTEXT: (at.pp, at.tp, sequence),
            Group.BATCH_DP: (at.pp, positions),
            Group.BATCH_RDP: (at.pp, at.tp, positions),
        }[group]

    @cached_property
    def _groups(self) -> dict[Group, list[list[int]]]:
        """Return the cache of groups by kind, filled on demand; each kind takes a while for many ranks."""
        return {}

    @cached_property
    def _found(self) -> dict[tuple[Group, int], list[int]]:
        """Return the cache of a rank's groups, filled on demand."""
        return {}

    def _groups_of(self, group: Group) -> list[list[int]]:
        if group not in self._groups:
            members: dict[tuple[int, ...], list[int]] = {}
            for rank in range(self.world_size):
                members.setdefault(self._group_key(group, rank), []).append(rank)
            self._groups[group] = sorted(members.values())
        return self._groups[group]

    def groups(self, group: Group) -> list[list[int]]:
        """Return all groups of one kind as lists of ascending global ranks, ordered by their first rank."""
        return [list(members) for members in self._groups_of(group)]

    def group_of(self, group: Group, rank: int) -> list[int]:
        """Return the ascending global ranks of the group of this kind that ``rank`` belongs to."""
        members = self._found.get((group, rank))
        if members is None:  # asked for its own groups again with each collective
            key = self._group_key(group, rank)
            members = next(members for members in self._groups_of(group) if self._group_key(group, members[0]) == key)
            self._found[group, rank] = members
        return list(members)

    def rank_in(self, group: Group, rank: int) -> int:
        """Return the position of global ``rank`` in its group, in ascending global rank."""
        return self.group_of(group, rank).index(rank)

    def replicas(self) -> Iterator[list[int]]:
        """Yield the model replicas, each as the list of its global ranks."""
        yield from self.groups(Group.MP)

    def global_batch(self, batch: int, *, prescaled: bool) -> int:
        """Return the samples per optimizer step if every rank reads ``batch`` samples.

        With ``prescaled`` a tensor parallel group reads one batch together, so only the reduced data parallel
        degree multiplies it.
        """
        return batch * self.size(Group.BATCH_RDP if prescaled else Group.BATCH_DP)
