"""``smp.model_creation`` and ``smp.delay_param_initialization``: the contexts in which a script builds its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from smp_runtime import session as sessions
from smp_runtime.deferred import Deferral
from smp_runtime.errors import SMPUserError


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Create a model without memory for its parameters; ``smp.DistributedModel`` computes them, with the same values.

    Operations on tensors inside are recorded and run later, so the model's constructor must not read values
    (``item()``, ``if tensor: …``).
    """
    if not enabled:
        yield
        return
    deferral = Deferral()
    sessions.current().deferrals.append(deferral)
    with deferral:
        yield


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """Create the model's parameters in ``dtype``, and later if ``delayed_parameter_initialization`` is set.

    Args:
        tensor_parallelism: distribute the modules created inside; False leaves them as they are.
        dtype: floating point type of new parameters; None means PyTorch's default. Under ``fp16`` or ``bf16`` the
            float32 weights are the better start: they become the master weights unrounded.
        tensor_parallel_config: settings of tensor parallelism; not used without it.

    Raises:
        SMPUserError: ``dtype`` is no floating point type, or tensor parallelism was asked for.
    """
    if tensor_parallelism:
        raise SMPUserError(
            "model_creation(tensor_parallelism=True), but this version of the runtime has no tensor parallelism yet; pass "
            "tensor_parallelism=smp.tp_size() > 1, which is False here"
        )
    if dtype is not None and not dtype.is_floating_point:
        raise SMPUserError(
            f"model_creation got dtype={dtype}; parameters are floating point: use for example torch.float16"
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with delay_param_initialization(enabled=sessions.current().cfg.delayed_parameter_initialization):
            yield
    finally:
        torch.set_default_dtype(before)
