"""What both of Lightning's kinds of strategies ask of a job: ranks, collectives, the state of what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available, _sync_ddp_if_available

from smp_config import Group
from smp_runtime.job import session as sessions
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer
from smp_runtime.wrapped_model import DistributedModel

if TYPE_CHECKING:
    from torch import nn


class JobEnvironment(ClusterEnvironment):
    """The ranks of the job as Lightning asks for them; they run already."""

    def __init__(self) -> None:
        self._ranks = sessions.current().ranks

    @property
    def creates_processes_externally(self) -> bool:
        """Whether somebody else starts the processes."""
        return True

    @property
    def main_address(self) -> str:
        """Not asked for: the ranks have met."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Not asked for: the ranks have met."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Whether Lightning should take this by itself."""
        return False

    def world_size(self) -> int:
        """Ranks of the job."""
        return self._ranks.size(Group.WORLD)

    def set_world_size(self, size: int) -> None:
        """The job has its size."""

    def global_rank(self) -> int:
        """This rank's position in the job."""
        return self._ranks.rank

    def set_global_rank(self, rank: int) -> None:
        """A rank has its position."""

    def local_rank(self) -> int:
        """This rank's position on its host."""
        return self._ranks.local_rank

    def node_rank(self) -> int:
        """0 on the host of the first rank."""
        return self._ranks.rank // self._ranks.local_size


class JobStrategy:
    """The part of a strategy that is the same for Fabric and for Lightning's ``Trainer``.

    What a batch or a metric is shared out over are the data parallel ranks; ranks and barriers are the job's.

    Args:
        config: for ``smp.init``, where the job carries none.
        loss_scale: arguments of ``smp.DistributedOptimizer``; by default fp16 begins with 2¹⁶ and adapts.
        options: arguments of ``smp.DistributedModel``.
    """

    def __init__(
        self, config: Mapping[str, Any] | None, loss_scale: Mapping[str, Any] | None, options: dict[str, Any]
    ) -> None:
        self._job = sessions.init(config)
        if loss_scale is None and self._job.ranks.cfg.fp16:
            loss_scale = {"static_loss_scale": None, "dynamic_loss_scale": True, "init_scale": 65536.0}
        self._loss_scale = dict(loss_scale or {})
        self._options = options

    @property
    def root_device(self) -> torch.device:
        """Where this rank computes."""
        return self._job.ranks.device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Of the sampler that gives each rank its samples: stages of a pipeline get the same."""
        return {"num_replicas": self._job.ranks.size(self._batches), "rank": self._job.ranks.rank_in(self._batches)}

    @property
    def _batches(self) -> Group:
        return Group.RDP if self._job.ranks.cfg.prescaled_batch else Group.DP

    def _group(self, given: Any) -> Any:
        return given if given is not None else self._job.ranks.process_group(self._batches)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The values of all data parallel ranks, stacked."""
        return _all_gather_ddp_if_available(tensor, group=self._group(group), sync_grads=sync_grads)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean or sum over the data parallel ranks."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return _sync_ddp_if_available(tensor, self._group(group), reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """What all ranks, or any of them, have decided."""
        control, everyone = self._job.ranks.control, self._job.ranks.members(Group.WORLD)
        decisions = control.allgather(bool(decision), everyone)
        return decisions.count(True) == len(decisions) if all else True in decisions

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the job."""
        self._job.ranks.control.barrier(self._job.ranks.members(Group.WORLD))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of one rank of the job."""
        everyone: list[Any] = [obj]
        if self._job.ranks.size(Group.WORLD) > 1:
            dist.broadcast_object_list(everyone, src, group=self._job.ranks.process_group(Group.WORLD))
        return everyone[0]

    # -- what is trained -------------------------------------------------------------------------------------------

    def wrapped_model(self, module: nn.Module) -> nn.Module:
        """A model that is trained as the job divides it."""
        if isinstance(module, DistributedModel) or not any(p.requires_grad for p in module.parameters()):
            return module
        return DistributedModel(module, **self._options)

    @staticmethod
    def state_of(module: nn.Module) -> dict[str, Any]:
        """The whole state, on the first rank only; every rank calls it."""
        if isinstance(module, DistributedModel):
            state: dict[str, Any] = module.state_dict(gather_to_rank0=True)
            return state
        return module.state_dict()

    @staticmethod
    def optimizer_state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The same of an optimizer, with float32 weights and the loss scale of half precision."""
        if isinstance(optimizer, DistributedOptimizer):
            return optimizer.full_state_dict(gather_to_rank0=True)
        return optimizer.state_dict()


def whole_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The model's parameters that an optimizer updates, whatever it has in their place."""
    groups = optimizer.original_groups() if isinstance(optimizer, DistributedOptimizer) else None
    if groups is None:
        groups = [group["params"] for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group]
