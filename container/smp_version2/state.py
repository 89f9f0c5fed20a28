"""``tsm.state``: degrees, ranks and process groups of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from smp_config import Group
from smp_config.version2.parameters import Version2Parameters
from smp_runtime.errors import NotInitializedError
from smp_runtime.tensor_parallel.group import TensorGroup
from smp_runtime.tensor_parallel.random_tracker import RandomTracker

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    from smp_runtime.job.ranks import Ranks

#: Settings that scripts read through the state, and set on it before ``tsm.init``.
_SETTINGS = frozenset(Version2Parameters.model_fields)


def get_global_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a process group, in its order; None stands for all ranks."""
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


class Ranker:
    """Positions of all ranks in the job's groups.

    Args:
        shards: ranks that share one copy of the state, neighbors, if the script has chosen that; 0 for the job's degrees.
    """

    def __init__(self, ranks: Ranks, shards: int = 0) -> None:
        self._topology, self._shards = ranks.topology, shards

    def get_rep_rank(self, rank: int) -> int:
        """Return the position of a global rank among the ranks that hold the same shard of the same experts."""
        if self._shards:
            return rank // self._shards
        return self._topology.rank_in(Group.EXPERT_REPLICA, rank)

    def get_rep_groups(self) -> list[list[int]]:
        """Return the groups of global ranks that hold the same shard, in the same order on all ranks."""
        if self._shards:
            return [list(range(first, self._topology.world_size, self._shards)) for first in range(self._shards)]
        return list(self._topology.groups(Group.EXPERT_REPLICA))

    def get_ep_rank(self, rank: int) -> int:
        """Return the position of a global rank among the ranks that share the experts out."""
        return self._topology.rank_in(Group.EP, rank)

    def get_ep_groups(self) -> list[list[int]]:
        """Return all groups of global ranks that share the experts out."""
        return list(self._topology.groups(Group.EP))

    def get_tp_rank(self, rank: int) -> int:
        """Return the position of a global rank in its tensor parallel group."""
        return self._topology.rank_in(Group.TP, rank)

    def get_tp_groups(self) -> list[list[int]]:
        """Return all tensor parallel groups of global ranks."""
        return list(self._topology.groups(Group.TP))


class RandomStates:
    """Random states that tensor parallel ranks do not share, for code that draws numbers for split activations."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def fork(self, name: str = "model-parallel-rng") -> contextlib.AbstractContextManager[None]:
        """Draw from this rank's own state inside the block. There is one state, whatever its name."""
        return RandomTracker.of(TensorGroup.of(self._ranks)).split(self._ranks.device)


class Version2State:
    """The settings of the job, and this rank's place in it.

    The nine settings can be read by their names before ``tsm.init`` too: then they have the values that the script has set, or
    the defaults. Process groups are None for a degree of 1 that leaves the choice to PyTorch.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the job, and what the script has set."""
        self.__dict__["_ranks"] = None
        self.__dict__["_parameters"] = Version2Parameters.from_parameters({})
        self.__dict__["_given"] = {}

    def join(self, ranks: Ranks, parameters: Version2Parameters) -> None:
        """Take the job's groups and settings."""
        self.__dict__["_ranks"], self.__dict__["_parameters"] = ranks, parameters
        self.note_shards(0)  # all of them, until a unit says otherwise

    def leave(self) -> None:
        """Forget the job."""
        self.__dict__["_ranks"] = None

    @property
    def is_joined(self) -> bool:
        """Return whether this process has joined a job."""
        return self._ranks is not None

    @property
    def given(self) -> dict[str, Any]:
        """Return the settings that the script has set before ``tsm.init``."""
        return dict(self._given)

    def __getattr__(self, name: str) -> Any:
        if name in _SETTINGS:
            return self._given.get(name, getattr(self._parameters, name))
        raise AttributeError(f"tsm.state has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SETTINGS:
            raise AttributeError(f"tsm.state.{name} cannot be set; scripts set {', '.join(sorted(_SETTINGS))}")
        self._given[name] = value

    @property
    def joined(self) -> Ranks:
        """Return this rank's place.

        Raises:
            NotInitializedError: before ``tsm.init``.
        """
        if self._ranks is None:
            raise NotInitializedError(
                "tsm.init() has not been called in this process; call it before tsm.transform, and before tsm.state's ranks and "
                "groups are read"
            )
        found: Ranks = self._ranks
        return found

    # -- world -----------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Return the global rank."""
        return self.joined.rank

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.joined.topology.world_size

    @property
    def local_rank(self) -> int:
        """Return the position among the ranks of this host."""
        return self.joined.local_rank

    @property
    def world_process_group(self) -> dist.ProcessGroup | None:
        """Return the group of all ranks."""
        return dist.group.WORLD

    @property
    def ranker(self) -> Ranker:
        """Return the positions of all ranks."""
        by_script = 0 if self._shards else self._script_shards or self.world_size
        return Ranker(self.joined, by_script)

    def note_shards(self, ranks: int) -> None:
        """Note how many ranks share one copy of the state, where the script's FSDP decides."""
        self.__dict__["_script_shards"] = ranks

    @property
    def shares_nothing(self) -> bool:
        """Return whether each rank has a whole copy of the state, or of its experts."""
        degree = self._parameters.shard_degree(self.world_size)
        return bool((degree or self._script_shards) == 1)

    # -- tensor, expert and context parallelism --------------------------------------------------------------------

    @property
    def tp_size(self) -> int:
        """Return the number of ranks that share each layer."""
        return int(self.tensor_parallel_degree)

    @property
    def tp_rank(self) -> int:
        """Return the position in the tensor parallel group."""
        return self.joined.rank_in(Group.TP) if self.tp_size > 1 else 0

    @property
    def tp_process_group(self) -> dist.ProcessGroup | None:
        """Return the tensor parallel group."""
        return self.joined.process_group(Group.TP) if self.tp_size > 1 else None

    @property
    def ep_size(self) -> int:
        """Return the number of ranks that share the experts of a mixture out."""
        return int(self.expert_parallel_degree)

    @property
    def ep_rank(self) -> int:
        """Return the position in the expert parallel group."""
        return self.joined.rank_in(Group.EP) if self.ep_size > 1 else 0

    @property
    def ep_process_group(self) -> dist.ProcessGroup | None:
        """Return the expert parallel group."""
        return self.joined.process_group(Group.EP) if self.ep_size > 1 else None

    @property
    def cp_size(self) -> int:
        """Return the number of ranks that share each sequence out."""
        return int(self.context_parallel_degree)

    @property
    def cp_rank(self) -> int:
        """Return the position among the ranks that share a sequence out."""
        return self.joined.rank_in(Group.CONTEXT) if self.cp_size > 1 else 0

    @property
    def cp_process_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that share a sequence out."""
        return self.joined.process_group(Group.CONTEXT) if self.cp_size > 1 else None

    # -- sharding --------------------------------------------------------------------------------------------------

    @property
    def shard_process_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that share one copy of the state; None leaves that to PyTorch."""
        return self.joined.process_group(Group.SHARD) if self._shards else None

    @property
    def rep_rank_process_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that hold the same shard; None leaves that to PyTorch."""
        return self.joined.process_group(Group.EXPERT_REPLICA) if self._shards else None

    @property
    def _shards(self) -> bool:
        return self._parameters.shard_degree(self.world_size) > 0

    # -- random numbers --------------------------------------------------------------------------------------------

    @property
    def get_rng_state_tracker(self) -> Callable[[], RandomStates]:
        """Return the function that returns the random states of tensor parallel ranks."""
        return lambda: RandomStates(self.joined)


#: The state of this process.
state = Version2State()
