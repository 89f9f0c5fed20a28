"""Functions of ``torch.autograd.Function`` on sequences, which their call does not hand to subclasses of tensors.

They would keep the gradients of a slice from it: their own graph begins at the wrapper, which has none.
"""

from __future__ import annotations

from typing import Any

import torch

from smp_runtime.context.sequence import ShardedSequence, cut_results, gather_all, sequences_in

#: Attribute of a function's class: whether it treats positions alike, so that it may run on slices.
ON_SLICES = "runs_on_slices"

_original = torch.autograd.Function.__dict__["apply"]


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Run a function on slices or on whole sequences, if there are any among its arguments."""
    call = _original.__get__(None, cls)
    found = sequences_in((args, kwargs))
    if not found:
        return call(*args, **kwargs)
    first = found[0]
    if getattr(cls, ON_SLICES, False) and all(one.sequence_layout == first.sequence_layout for one in found):
        result = call(*(arg.local if isinstance(arg, ShardedSequence) else arg for arg in args), **kwargs)
        return first.like(result)
    name = cls.__name__
    return cut_results(call(*gather_all(args, name), **gather_all(kwargs, name)), first)


def install() -> None:
    """Let functions see sequences; once in a process with context parallelism, since others pay nothing."""
    if torch.autograd.Function.__dict__["apply"] is _original:
        torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
