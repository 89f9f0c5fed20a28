"""Reduction of accumulated gradients before they are clipped or an update takes them.

``backward_passes_per_step`` reduces after complete groups of passes. An epoch may end in the middle of one. A script
then updates with the gradients so far, as in one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    import torch

    from smp_runtime.job.session import Session


def reduce_accumulated(session: Session, parameters: Iterable[torch.Tensor]) -> None:
    """Reduce the accumulated gradients of the models of these parameters; every rank calls it."""
    models = [model for model in session.models if model.has_accumulated]
    if not models:
        return
    wanted = set(map(id, parameters))
    # The registry has the parameters of all stages, so that every rank decides alike: reducing is collective.
    for model in models:
        of_model = {id(record.parameter) for record in model.registry}
        if not wanted.isdisjoint(of_model):
            model.reduce_accumulated()


class _BeforeUpdates:
    """The hook of a job's optimizers."""

    outlives_regrouping = True

    def __init__(self, session: Session) -> None:
        weak = weakref.ref(session)  # PyTorch keeps the hook, even longer than a session that is never closed

        def before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            session = weak()
            if session is not None:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                reduce_accumulated(session, parameters)

        session.at_close.append(register_optimizer_step_pre_hook(before_update).remove)


def reduce_before_updates(session: Session) -> None:
    """Reduce gradients before updates of optimizers that are not wrapped, until the session closes."""
    session.ranks.keep(_BeforeUpdates, lambda: _BeforeUpdates(session))
