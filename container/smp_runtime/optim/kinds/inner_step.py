"""The step of an inner optimizer, with whole matrices for PyTorch's Muon where ranks have parts of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.optim.fused_kernels import fused_where_open
from smp_runtime.optim.kinds.known_kinds import make_dense
from smp_runtime.optim.matrices.exchange import WholeMatrices, is_pytorch_muon
from smp_runtime.optim.matrices.muon import MuonUpdate, update_matrices

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedModel


def whole_matrices(
    groups: Callable[[], list[list[torch.nn.Parameter]]], model: TrainedModel, session: Session
) -> WholeMatrices | None:
    """Return the matrices of a wrapped optimizer of ``model``; None where each rank has all that it updates.

    Args:
        groups: a method of the wrapped optimizer that returns its parameters by group. It is not held.
    """
    is_joined = any(record.origin is not None for record in model.registry)
    if session.ranks.size(Group.TP) == 1 and model.sharded_state is None and not is_joined:
        return None
    weak = weakref.WeakMethod(groups)  # the inner optimizer keeps the result

    def originals() -> list[list[torch.nn.Parameter]]:
        found = weak()
        return found() if found is not None else []

    return WholeMatrices(session.ranks, model, lambda: session.records, originals)


def step_inner(
    optimizer: torch.optim.Optimizer, whole: WholeMatrices | None, closure: Callable[[], Any] | None = None
) -> Any:
    """Call ``optimizer.step()``, or update whole matrices as PyTorch's Muon would, with the hooks of its step.

    Without a closure the gradients are there: they are made dense, and fused kernels are used where the script left that open.
    """
    if whole is None or not is_pytorch_muon(optimizer):
        if closure is not None:
            return optimizer.step(closure)
        make_dense(optimizer)
        with fused_where_open(optimizer):
            return optimizer.step()

    @torch.no_grad()
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update_matrices(MuonUpdate(self, as_pytorch=True), self.param_groups, whole)
        return loss

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    return hooked(optimizer) if closure is None else hooked(optimizer, closure)
