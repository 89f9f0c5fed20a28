"""Lightning Fabric's strategy: models that the job divides, in loops that scripts write themselves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn

from smp_config import Group
from smp_integrations.lightning_job import JobEnvironment, JobStrategy, whole_parameters
from smp_runtime.errors import SMPOperationError, SMPUserError
from smp_runtime.model.distributed_model import DistributedModel
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer
from smp_runtime.optim.grad_scaler import GradScaler


class SMPStrategy(JobStrategy, ParallelStrategy):
    """``Fabric(strategy=SMPStrategy())``: ``setup`` wraps in ``smp.DistributedModel`` and ``smp.DistributedOptimizer``.

    With pipeline parallelism the model is called, and ``fabric.backward`` too, in a function decorated with ``smp.step``.

    Args:
        config: for ``smp.init``, where the job carries none.
        loss_scale: arguments of ``smp.DistributedOptimizer`` for fp16; by default the scale begins with 2¹⁶ and adapts.
        options: arguments of ``smp.DistributedModel``, such as ``bucket_cap_mb``.
    """

    def __init__(
        self, config: Mapping[str, Any] | None = None, loss_scale: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        JobStrategy.__init__(self, config, loss_scale, options)
        ParallelStrategy.__init__(self, cluster_environment=JobEnvironment())
        self._backward_sync_control = _SyncControl()

    @property
    def precision(self) -> Precision:
        """Return the precision, which defines the data types that modules compute in."""
        return self._precision if self._precision is not None else Precision()

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if isinstance(precision, MixedPrecision):
            if precision.scaler is not None and self._job.ranks.size(Group.PP) > 1:
                raise SMPUserError(
                    f'Fabric(precision="{precision.precision}") scales losses outside smp.step, but with pipeline parallelism they '
                    'exist inside it only; leave precision out, and set "fp16": True in the parameters',
                    code="SMP312",
                )
            if precision.scaler is not None:
                precision.scaler = GradScaler()
            else:
                precision = _Autocast(precision.precision, precision.device)
        self._precision = precision

    def setup_environment(self) -> None:
        """Set up the environment; no process is started, because the ranks are already connected."""
        super().setup_environment()
        rank_zero_only.rank = self._job.ranks.rank

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a model that is trained."""
        return self.wrapped_model(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Wrap an optimizer."""
        if isinstance(optimizer, DistributedOptimizer):
            return optimizer
        return DistributedOptimizer(optimizer, **self._loss_scale)

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module; the parts of a wrapped one lie where they belong."""
        module.to(self.root_device)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole state of a model on the first rank only."""
        return self.state_of(module)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer on the first rank only."""
        return self.optimizer_state_of(optimizer)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the norm of the whole gradient, and return that norm."""
        self.precision.unscale_gradients(optimizer)
        if not isinstance(optimizer, DistributedOptimizer):
            return torch.nn.utils.clip_grad_norm_(
                whole_parameters(optimizer), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
        norm = optimizer.clip_master_grads(max_norm, norm_type)
        if error_if_nonfinite and not math.isfinite(norm) and not optimizer.overflow:
            raise SMPOperationError(
                f"the gradient's norm of order {norm_type} is {norm}, so it cannot be clipped; pass error_if_nonfinite=False to "
                "scale by it all the same",
                code="SMP312",
            )
        return torch.tensor(norm)

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip every element."""
        self.precision.unscale_gradients(optimizer)
        torch.nn.utils.clip_grad_value_(whole_parameters(optimizer), clip_val)


class _SyncControl(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients of the passes in the block, and average them after a later pass."""
        if enabled and isinstance(module, DistributedModel):
            return module.no_sync()
        return contextlib.nullcontext()


class _Autocast(MixedPrecision):
    """Mixed precision that scales no loss, so that it has no part in backward: several microbatches run theirs at once."""

    pre_backward = Precision.pre_backward
    backward = Precision.backward
    post_backward = Precision.post_backward
