"""What reads the parameters where they are not: ``state_dict`` of the module inside, and autocast's copies of weights."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from smp_runtime.sharding.flat_unit import ShardedUnit
    from smp_runtime.sharding.module_hooks import ModuleUses

logger = logging.getLogger("smp")


class StateReads:
    """Refuses ``state_dict`` of the module inside, which would be placeholders: only the wrapper's has the values."""

    def __init__(self, module: nn.Module, uses: ModuleUses, degree: int) -> None:
        self._allowed = False
        for name, part in module.named_modules():
            if not uses.units_held_by(part):
                continue

            def before(_: nn.Module, prefix: str, keep_vars: bool, name: str = name) -> None:
                if keep_vars or self._allowed:  # who wants the parameters themselves gets them as they are
                    return
                raise SMPUserError(
                    f"state_dict was called on a module inside smp.DistributedModel, but of the parameters of "
                    f"{name or 'the module'!r} this rank holds 1/{degree} (sharded_data_parallel_degree is {degree}) and the "
                    "state would be NaN; call model.state_dict() of the wrapper on every rank, and for Transformers "
                    "model.save_pretrained(folder, state_dict=model.state_dict())"
                )

            part.register_state_dict_pre_hook(before)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, somebody puts the values into the state afterwards."""
        before, self._allowed = self._allowed, True
        try:
            yield
        finally:
            self._allowed = before


class AutocastWarning:
    """Says once that ``torch.autocast`` makes a copy of every weight, which autograd keeps.

    Args:
        speaks: whether this rank is the one that warns.
    """

    def __init__(self, units: Sequence[ShardedUnit], device: torch.device, *, speaks: bool) -> None:
        self._types = {unit.dtype for unit in units}
        self._kind = device.type
        self._waits = speaks

    def check(self) -> None:
        """A forward pass begins."""
        if not self._waits or not torch.is_autocast_enabled(self._kind):
            return
        cast = torch.get_autocast_dtype(self._kind)
        if self._types <= {cast}:
            return
        self._waits = False
        logger.warning(
            "torch.autocast is on and casts weights of %s to %s: autograd keeps these copies of the whole model on every rank "
            "until backward, which sharding should avoid; leave autocast out and use 'bf16: true'",
            ", ".join(sorted(map(str, self._types - {cast}))),
            cast,
        )
