"""Updates of PyTorch's optimizers as the steps of a job, for progress, ``smp-estimator top`` and the watch for hangs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from smp_config import Group
from smp_records.rank_record import FORWARD, OPTIMIZER, current_record
from smp_runtime.errors import SMPUserError
from smp_runtime.optim.matrices.exchange import takes_matrices

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from smp_runtime.job.session import Session


def install(joined: Session) -> Callable[[], None]:
    """Count the updates of one optimizer, the first that updates; return the function that ends it.

    Loading data between two updates counts as computing, since nothing marks the beginning of a forward pass.
    """
    counted: list[weakref.ref[Optimizer]] = []

    def is_counted(optimizer: Optimizer) -> bool:
        if not counted or counted[0]() is None:
            counted[:] = [weakref.ref(optimizer)]
        return counted[0]() is optimizer

    def before(optimizer: Optimizer, *_: Any) -> None:
        _refuse_parts(optimizer, joined)
        if is_counted(optimizer):
            joined.progress.step_begins()
            current_record().update()
            current_record().enter(OPTIMIZER)

    def after(optimizer: Optimizer, *_: Any) -> None:
        if is_counted(optimizer):
            current_record().enter(FORWARD)
            joined.progress.optimizer_stepped()

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


def _refuse_parts(optimizer: Optimizer, joined: Session) -> None:
    """Refuse Muon where a rank has rows or columns of matrices, and PyTorch does not know of the others."""
    degree = joined.ranks.size(Group.TP)
    if degree > 1 and takes_matrices(optimizer):
        raise SMPUserError(
            f"{type(optimizer).__name__} looks at whole matrices, but with tensor_parallel_degree {degree} of version 2 a rank "
            "has parts of them; use an element-wise optimizer such as AdamW, or set tensor_parallel_degree to 1",
            code="SMP304",
        )
