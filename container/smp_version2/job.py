"""``tsm.init`` and its counterparts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from pydantic import PrivateAttr

from smp_config import Group, ModelParallelParameters
from smp_config.errors import kind_of
from smp_config.version2.parameters import Version2Parameters
from smp_records.rehearsal import REHEARSAL_VARIABLE
from smp_runtime.context.loaded_batches import CutBatches, LoadedBatches
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session
from smp_runtime.job.ranks import PARAMETERS_VARIABLE
from smp_runtime.tensor_parallel.group import TensorGroup
from smp_runtime.tensor_parallel.random_tracker import RandomTracker, mix_seeds
from smp_version2 import cache_flushes, recomputation, sharded_modules, updates
from smp_version2.checkpoint.agreement import SavesOfCopies
from smp_version2.eight_bits import job as eight_bits
from smp_version2.state import state

if TYPE_CHECKING:
    from smp_config.topology import Topology
    from smp_runtime.job.ranks import Ranks

logger = logging.getLogger("smp")


def init(config: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> None:
    """Join the job and build every group; call it after ``torch.distributed.init_process_group``, or instead of it.

    Args:
        config: the path of a JSON file with parameters, or a dictionary; None reads the job's own (``SM_HP_MP_PARAMETERS``),
            which win over it.

    Raises:
        ConfigError: a parameter that cannot work, or not with this number of processes.
        SMPUserError: version 1 of the library has begun in this process, or the script is rehearsed.

    Example:
        >>> import torch.sagemaker as tsm  # doctest: +SKIP
        >>> tsm.init({"hybrid_shard_degree": 2, "tensor_parallel_degree": 2})  # doctest: +SKIP
    """
    if is_initialized():
        return
    if session.is_initialized():
        raise SMPUserError(
            "smp.init() has been called in this process, and a process trains with one version of the library: call smp.shutdown() "
            "before tsm.init(), or remove one of the two",
            code="SMP303",
        )
    if REHEARSAL_VARIABLE in os.environ:
        raise SMPUserError(
            "tsm.init() was called in a rehearsal, and a rehearsal is for scripts of version 1 of the library: run a few steps of "
            "this script as processes of this machine instead, with smp-estimator run or instance_type='local'",
            code="SMP303",
        )
    parameters = _read(config)
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    topology = parameters.topology(size)
    joined = session.start(_engine_parameters(parameters, topology))
    state.join(joined.ranks, parameters)
    if parameters.shard_degree(size) <= 1:  # now, since all ranks meet; later one may save alone
        joined.ranks.keep(SavesOfCopies, lambda: SavesOfCopies(joined.ranks))
    joined.at_leave.append(state.leave)
    joined.at_leave.append(sharded_modules.install(parameters, joined.ranks))
    joined.at_leave.append(recomputation.install(parameters, joined.ranks))
    joined.at_leave.append(updates.install(joined))
    joined.at_leave.append(eight_bits.install(parameters, joined.ranks))
    if parameters.context_parallel_degree > 1:
        for batches in (LoadedBatches.of(joined.ranks), CutBatches.of(joined.ranks)):
            joined.at_leave.append(batches.watch())
    if parameters.fsdp_cache_flush_warnings:
        joined.at_leave.append(cache_flushes.install(joined.ranks.device))
    _seed_split_numbers(parameters.random_seed, joined.ranks)
    if joined.ranks.rank == 0:
        for sentence in parameters.warnings():
            logger.warning(sentence)


def _seed_split_numbers(seed: int, ranks: Ranks) -> None:
    """Give the numbers that tensor parallel ranks draw on their own a seed; replicas draw others."""
    group = TensorGroup.of(ranks)
    base = mix_seeds(seed, ranks.rank_in(Group.RDP))
    ranks.keep(RandomTracker, lambda: RandomTracker(base, group.rank, ranks.step))


def is_initialized() -> bool:
    """Return whether :func:`init` has been called."""
    return state.is_joined


def shutdown() -> None:
    """Leave the job; a later :func:`init` joins again. It is called automatically when the process ends."""
    session.shutdown()


def _read(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> Version2Parameters:
    if config is None or isinstance(config, Mapping):
        given = dict(config or {})
    elif isinstance(config, str | os.PathLike):
        given = Version2Parameters.from_file(Path(config)).model_dump(exclude_unset=True)
    else:
        raise SMPUserError(
            f"tsm.init() got {config!r}, {kind_of(config)}; pass the path of a JSON file or a dictionary of parameters, or nothing",
            code="SMP303",
        )
    carried = os.environ.get(PARAMETERS_VARIABLE)
    given |= json.loads(carried) if carried else {}
    # What a script has set on tsm.state is what it computes with.
    return Version2Parameters.from_parameters({**given, **state.given})


class _EngineParameters(ModelParallelParameters):
    """The engine's settings, which lay the ranks out as version 2 does."""

    _version2: Version2Parameters = PrivateAttr()

    def laid_out_by(self, parameters: Version2Parameters) -> _EngineParameters:
        """Take the degrees of version 2, and return these settings."""
        self._version2 = parameters
        return self

    def to_mp_parameters(self) -> dict[str, Any]:
        """Return the settings of version 2, all of them: ranks compare these at the start."""
        return self._version2.model_dump()

    def topology(self, world_size: int) -> Topology:
        """Lay the ranks out."""
        return self._version2.topology(world_size)


def _engine_parameters(parameters: Version2Parameters, topology: Topology) -> ModelParallelParameters:
    """Return the engine's settings for the same groups; PyTorch shards and reduces, not the engine."""
    made: Any = _EngineParameters.from_mp_parameters(
        {
            "ddp": True,
            "tensor_parallel_degree": topology.tensor,
            "sharded_data_parallel_degree": topology.sharded,
            "prescaled_batch": parameters.tensor_parallel_degree > 1,
            "optimize": "speed",
            "check_invariants": False,
        }
    )
    laid_out: _EngineParameters = made.laid_out_by(parameters)
    return laid_out
