"""Peak memory: checkpointing and offloading against PyTorch's own, and predictions against measurements."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from gpu_check import environment
from gpu_check.device import GIB, describe_peak, fuse_on_gpu, is_real, measure_peak, shut_down
from gpu_check.measurements import (
    Step,
    end_first_steps,
    make_plain_step,
    make_wrapped_step,
    measure_queueing,
    time_runs,
    to_ms,
)
from gpu_check.models import get_shape
from gpu_check.results import case, emit
from smp_runtime.activations.activations import Activations

_OFFLOADED = {"offload_activations": True}
_WRAPPED: dict[str, tuple[dict[str, Any], bool]] = {
    # name: configuration, whether blocks are checkpointed
    "smp: none": ({}, False),
    "smp: checkpointing": ({}, True),
    "smp: checkpointing, 4 microbatches": ({"microbatches": 4}, True),
    "smp: offloading, 4 microbatches": ({"microbatches": 4, **_OFFLOADED}, True),
    "smp: offloading, one batch": (_OFFLOADED, True),
}
_FIGURES = ("left", "came", "late", "peak")


def check_activations() -> None:
    """Measure time and peak memory of a GPT of 1.3 billion parameters in each way to keep activations."""
    shape, batch = get_shape("1.3B"), 4 if environment.is_tiny() else 8
    _measure("torch: none", lambda: make_plain_step(shape, batch, "bf16"))
    _measure("torch: checkpoint", lambda: make_plain_step(shape, batch, "bf16", change=_checkpoint))
    _measure("torch: checkpoint, save_on_cpu", lambda: make_plain_step(shape, batch, "bf16", change=_save_on_cpu))
    for name, (config, is_checkpointed) in _WRAPPED.items():
        with contextlib.suppress(Exception):  # without a session the next line emits the error
            smp.init({"bf16": True, **config})
        _measure(
            name,
            lambda is_checkpointed=is_checkpointed: make_wrapped_step(
                shape, batch, "bf16", is_checkpointed=is_checkpointed, fused=fuse_on_gpu()
            ),
        )
        if "offloading" in name:
            with contextlib.suppress(Exception):
                _emit_figures(name)
        shut_down()


def _measure(name: str, make: Callable[[], Step]) -> None:
    with case(name) as finding:
        run = make()
        if name.startswith("smp"):
            finding["first_steps_ms"] = end_first_steps(run)
        finding["ms"] = to_ms(time_runs(run, 6, 1), 1)
        finding |= measure_queueing(run)
        del run
        finding |= describe_peak(measure_peak(make))


def _checkpoint(model: nn.Module) -> None:
    """Checkpoint each block by ``torch.utils.checkpoint``."""
    for block in model.blocks:
        own = block.forward
        block.forward = lambda x, own=own: checkpoint(own, x, use_reentrant=False)


def _save_on_cpu(model: nn.Module) -> None:
    """Checkpoint each block, and keep its input in pinned host memory."""
    for block in model.blocks:
        own = block.forward

        def forward(x: torch.Tensor, own: Callable[..., torch.Tensor] = own) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=is_real()):
                return checkpoint(own, x, use_reentrant=False)

        block.forward = forward


def _emit_figures(name: str) -> None:
    """Emit how many bytes the offloader has moved."""
    activations = smp.state.ranks.kept(Activations)
    if activations is not None and activations.offloader is not None:
        figures = activations.offloader.figures
        moved = {key: getattr(figures, key) for key in _FIGURES}
        emit(case=f"{name}: figures", **moved, pinned=activations.offloader.pinned_bytes)


def check_plan() -> None:
    """Compare measured peaks with those that planning and rehearsal have predicted, in ``predictions.json``."""
    path = environment.PACKAGE / "predictions.json"
    if not path.exists():
        emit(case="predictions", ok=None, note="no predictions.json")
        return
    for name, given in json.loads(path.read_text()).items():
        with case(name) as finding:
            smp.init(given["config"])
            shape = get_shape("350M") if environment.is_tiny() else given["shape"]
            batch = 4 if environment.is_tiny() else given["batch"]
            is_checkpointed = given["checkpointed"]
            peak = measure_peak(
                lambda shape=shape, batch=batch, mode=given["mode"], is_checkpointed=is_checkpointed: make_wrapped_step(
                    shape, batch, mode, is_checkpointed=is_checkpointed
                )
            )
            finding |= describe_peak(peak)
            for kind in ("plan", "rehearsal"):
                predicted = given.get(f"{kind}_gib")
                finding[f"{kind}_gib"] = predicted
                if peak is not None and predicted:
                    finding[f"{kind}_over_measured"] = round(predicted / (peak[0] / GIB), 3)
            shut_down()
