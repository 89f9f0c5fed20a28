"""A word to scripts that clip with PyTorch's function where it cannot see the whole gradient.

``torch.nn.utils.clip_grad_norm_`` measures what this rank has. Where that is a part, it raises nothing: every rank scales
by another factor and the weights drift from those of one process.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

from smp_config import Group

if TYPE_CHECKING:
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")

#: What PyTorch's function ends with since 2.6, however a script has imported it; else the function itself.
_INNER, _OUTER = "_clip_grads_with_norm_", "clip_grad_norm_"


def what_is_missing(session: Session) -> str:
    """Why PyTorch's clipping is wrong in this job; empty where it is right."""
    parameters = session.ranks.cfg
    if session.ranks.size(Group.PP) > 1:
        return "takes the norm of one pipeline stage, so that every stage is clipped by another factor"
    if session.ranks.size(Group.TP) > 1:
        return "takes the norm of one tensor parallel rank's parts, so that equal weights drift apart"
    if parameters.sharded_data_parallel_degree > 1 or parameters.shard_optimizer_state:
        return "finds no gradients, which lie in shards, and has no effect"
    if parameters.fp16:
        return "measures gradients that are multiplied by the loss scale"
    return ""


def watch_clipping(session: Session) -> None:
    """Until the session closes: say it once when PyTorch's function clips a wrapped model's parameters and is wrong."""
    if (reason := what_is_missing(session)) and session.ranks.kept(_Watch) is None:
        places = (
            [(clip_grad, _INNER)] if hasattr(clip_grad, _INNER) else [(clip_grad, _OUTER), (torch.nn.utils, _OUTER)]
        )
        watch = session.ranks.keep(_Watch, lambda: _Watch(session, reason))
        for module, name in places:
            original = getattr(module, name)
            setattr(module, name, watch.around(original))
            session.at_close.append(functools.partial(setattr, module, name, original))


class _Watch:
    def __init__(self, session: Session, reason: str) -> None:
        self._session = weakref.ref(session)
        self._reason = reason
        self._said = False

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._look_at(parameters)
            return original(parameters, *args, **kwargs)

        return clip

    def _look_at(self, parameters: list[torch.Tensor]) -> None:
        session = self._session()
        if self._said or session is None:
            return
        trained = {id(parameter) for model in session.models for parameter in model.parameters()}
        if any(id(parameter) in trained for parameter in parameters):
            self._said = True
            logger.warning(
                "torch.nn.utils.clip_grad_norm_ %s; use optimizer.clip_master_grads(max_norm) of smp.DistributedOptimizer, on "
                "every rank, which clips as one process does",
                self._reason,
            )
