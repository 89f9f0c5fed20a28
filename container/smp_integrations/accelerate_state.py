"""Accelerate's view of the processes of a job: one for each batch that differs, and one of them is the main one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.data.position import batch_group

if TYPE_CHECKING:
    from smp_runtime.job.session import Session


def describe_processes(session: Session) -> None:
    """Let Accelerate see the data parallel ranks as its processes, whatever else the job is divided into.

    Scripts multiply batches and numbers of steps by ``num_processes``, and Accelerate hands a batch to each process: stages
    of a pipeline, which work on the same one, are one process to it. The main process stays a single rank.
    """
    # Not above: loading Accelerate brings along what needs this file.
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    ranks = session.ranks
    group = batch_group(ranks)
    shared = PartialState._shared_state
    if not shared:
        shared.update(_cpu=ranks.device.type == "cpu", debug=False, fork_launched=0)
    shared.update(
        backend=ranks.backend,
        device=ranks.device,
        # An emulated GPU counts as one: libraries use this type to choose the device of a model that they load.
        distributed_type=DistributedType.MULTI_GPU if torch.cuda.is_available() else DistributedType.MULTI_CPU,
        num_processes=ranks.size(group),
        process_index=ranks.rank_in(group),
        local_process_index=ranks.local_rank,
    )
    if ranks.kept(_Described) is None:
        ranks.keep(_Described, _Described).begin(session)


class _Described:
    """While the session lasts, which rank Accelerate takes for the main and for the last process."""

    outlives_regrouping = True

    def begin(self, session: Session) -> None:
        rank, size = session.ranks.rank, session.ranks.size(Group.WORLD)
        self._replace(session, "is_main_process", property(lambda _: rank == 0))
        self._replace(session, "is_last_process", property(lambda _: rank == size - 1))
        session.at_close.append(_forget)

    @staticmethod
    def _replace(session: Session, name: str, value: Any) -> None:
        from accelerate.state import PartialState

        session.at_close.append(functools.partial(setattr, PartialState, name, PartialState.__dict__[name]))
        setattr(PartialState, name, value)


def _forget() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
