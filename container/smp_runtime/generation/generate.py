"""``generate`` of wrapped modules: Transformers' own, or whatever method of that name a module has."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_runtime.generation.whole_call import call_whole
from smp_runtime.job import session as sessions
from smp_runtime.model import distributed_model
from smp_runtime.model.distributed_model import DistributedModel

if TYPE_CHECKING:
    from torch import nn


@dataclass(eq=False)
class Generate:
    """``generate`` of a module that is wrapped, inside one that is, or was replaced there, in place of its class's.

    Copies of the module have their class's again.
    """

    module: nn.Module

    def __post_init__(self) -> None:
        kind: Any = type(self.module)
        functools.update_wrapper(self, kind.generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result that one process would return.

        Every rank calls it, outside a step, with the batch of one process.
        """
        kind: Any = type(self.module)
        own = functools.partial(kind.generate, self.module)
        model = _model_around(self.module)
        if model is None:
            return own(*args, **kwargs)
        if self.module is model.blueprint.module is not model.module:
            inside: Any = model.module
            return inside.generate(*args, **kwargs)
        # Ranks wait for each other by themselves; among all processes, those of other stages would never answer.
        if kwargs.get("synced_gpus") is not None:
            kwargs["synced_gpus"] = False
        ranks = sessions.current_session().ranks
        if ranks.step.microbatch is not None:
            return own(*args, **kwargs)
        return call_whole(model, ranks, "generate", own, args, kwargs)


def _model_around(module: nn.Module) -> DistributedModel | None:
    """Return the wrapped model that contains a module.

    None for copies, and for a model that computes alone after ``cpu()``.
    """
    if not sessions.is_initialized():
        return None
    for model in sessions.current_session().models:
        # A whole copy generates without other ranks.
        if not isinstance(model, DistributedModel) or model.is_whole_copy:
            continue
        # By identity: a module may define an equality of its own.
        parts = [model.blueprint.module, *model.module.modules()]
        if any(part is module for part in parts):
            return model
    return None


def give_generate(model: DistributedModel) -> None:
    """Let all modules of a wrapped model that can generate do so on all ranks together."""
    parts = list(model.module.modules())
    former = model.blueprint.module
    is_replaced = former is not model.module and callable(getattr(model.module, "generate", None))
    if is_replaced:  # the script may hold the former one
        parts.append(former)
    for part in parts:
        if callable(getattr(type(part), "generate", None)):
            part.__dict__["generate"] = Generate(part)


distributed_model.when_wrapped.append(give_generate)
