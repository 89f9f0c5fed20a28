"""The common part of both of Lightning's kinds of strategies: ranks, collectives, the state of model and optimizer."""

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
        self._ranks = sessions.current_session().ranks

    @property
    def creates_processes_externally(self) -> bool:
        """Return True: the job has already started its processes."""
        return True

    @property
    def main_address(self) -> str:
        """Return an unused address: the ranks are already connected."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Return an unused port: the ranks are already connected."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return False: Lightning does not select this environment automatically."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return self._ranks.size(Group.WORLD)

    def set_world_size(self, size: int) -> None:
        """Ignore the size: the job has a fixed one."""

    def global_rank(self) -> int:
        """Return this rank's position in the job."""
        return self._ranks.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore the rank: each rank has a fixed position."""

    def local_rank(self) -> int:
        """Return this rank's position on its host."""
        return self._ranks.local_rank

    def node_rank(self) -> int:
        """Return the index of this rank's host, 0 on the host of the first rank."""
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
            # As ``torch.amp.GradScaler`` begins.
            loss_scale = {"static_loss_scale": None, "dynamic_loss_scale": True, "init_scale": 65536.0}
        self._loss_scale = dict(loss_scale or {})
        self._options = options

    @property
    def root_device(self) -> torch.device:
        """Return the device on which this rank computes."""
        return self._job.ranks.device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return arguments of the sampler that selects each rank's samples; stages of a pipeline get the same samples."""
        return {"num_replicas": self._job.ranks.size(self._batches), "rank": self._job.ranks.rank_in(self._batches)}

    @property
    def _batches(self) -> Group:
        return Group.BATCH_RDP if self._job.ranks.cfg.prescaled_batch else Group.BATCH_DP

    def _group(self, given: Any) -> Any:
        return given if given is not None else self._job.ranks.process_group(self._batches)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the values of all data parallel ranks, stacked."""
        return _all_gather_ddp_if_available(tensor, group=self._group(group), sync_grads=sync_grads)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or sum over the data parallel ranks."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return _sync_ddp_if_available(tensor, self._group(group), reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any of them, decided True."""
        control, everyone = self._job.ranks.control, self._job.ranks.members(Group.WORLD)
        decisions = control.allgather(bool(decision), everyone)
        return decisions.count(True) == len(decisions) if all else True in decisions

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the job."""
        self._job.ranks.control.barrier(self._job.ranks.members(Group.WORLD))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` of the job."""
        everyone: list[Any] = [obj]
        if self._job.ranks.size(Group.WORLD) > 1:
            dist.broadcast_object_list(everyone, src, group=self._job.ranks.process_group(Group.WORLD))
        return everyone[0]

    # -- trained model and optimizer -------------------------------------------------------------------------------

    def wrapped_model(self, module: nn.Module) -> nn.Module:
        """Wrap a model that is trained in a ``DistributedModel``, and return other models unchanged."""
        if isinstance(module, DistributedModel) or not any(p.requires_grad for p in module.parameters()):
            return module
        return DistributedModel(module, **self._options)

    @staticmethod
    def state_of(module: nn.Module) -> dict[str, Any]:
        """Return the whole state of a model on the first rank only; every rank must call this."""
        if isinstance(module, DistributedModel):
            state: dict[str, Any] = module.state_dict(gather_to_rank0=True)
            return state
        return module.state_dict()

    @staticmethod
    def optimizer_state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer, with the float32 weights and the loss scale of half precision."""
        if isinstance(optimizer, DistributedOptimizer):
            return optimizer.full_state_dict(gather_to_rank0=True)
        return optimizer.state_dict()


def whole_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the model's own parameters that an optimizer updates, even if the optimizer has replaced them."""
    groups = optimizer.original_groups() if isinstance(optimizer, DistributedOptimizer) else None
    if groups is None:
        groups = [group["params"] for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group]
