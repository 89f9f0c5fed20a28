"""PyTorch's CUDA sanitizer on the parts of the library that use streams of their own.

The sanitizer (``TORCH_CUDA_SANITIZER=1``) raises an error if two streams use a tensor and neither waits for the other.
"""

from __future__ import annotations

import math
import sys
import tempfile
from typing import Any

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from gpu_check import environment
from gpu_check.device import is_real, shut_down
from gpu_check.models import Shape, mark_blocks
from gpu_check.processes import make_rank_command, read_output, run_program
from gpu_check.results import case, emit
from gpu_check.training import train_wrapped

_SHAPE: Shape = {"layers": 4, "hidden": 128, "heads": 2, "seq": 64}
#: A fault that the sanitizer must find: a second stream writes without waiting for the first.
_PLANTED = """
import torch
a = torch.rand(10000, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    torch.mul(a, 5, out=a)
torch.cuda.synchronize()
"""
_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: configuration, arguments of the training
    "offloading": (
        {"offload_activations": True, "microbatches": 4, "activation_loading_horizon": 1},
        {"prepare": mark_blocks},
    ),
    "saving": ({"bf16": True}, {}),
    "tracking": ({"bf16": True}, {}),
    "clipping": ({"fp16": True}, {"clip": 0.05, "optimizer_options": {"static_loss_scale": 1024.0}}),
}
_TINY = ("offloading", "saving")


def check_sanitizer() -> None:
    """Train under the sanitizer, each case in a process of its own, after a planted fault as a control."""
    environ = {"TORCH_CUDA_SANITIZER": "1"} if is_real() else {}
    if is_real():
        command = ("env", "TORCH_CUDA_SANITIZER=1", sys.executable, "-c", _PLANTED)
        printed = read_output(*command, timeout=60)
        is_found = "CUDASanitizerErrors" in printed or "data race" in printed
        emit(case="control: a planted race is found", ok=is_found, last=printed.splitlines()[-1:])
    for which in _TINY if environment.is_tiny() else _CASES:
        run_program(f"sanitized {which}", make_rank_command(rank_sanitized, which), environ=environ, timeout=60)


def rank_sanitized(which: str) -> None:
    """Train with one of the features that use streams of their own."""
    config, options = _CASES[which]
    with case(f"sanitizer: {which}") as finding, tempfile.TemporaryDirectory(prefix="smpcheck-save-") as folder:

        def act(model: nn.Module, optimizer: Any) -> None:
            if which == "saving":
                _save_meanwhile(model, optimizer, folder)
            if which == "tracking":
                for index in range(5):
                    smp.log(step=index, loss=torch.ones((), device=smp.state.device) * index)

        run = train_wrapped(config, shape=_SHAPE, at_end=act, **options)
        finding["ok"] = all(map(math.isfinite, run.losses))
        shut_down()


def _save_meanwhile(model: nn.Module, optimizer: Any, folder: str) -> None:
    """Change weights while they are saved, as a training does that goes on at once."""
    for index in range(3):
        smp.save_checkpoint(folder, f"at{index}", model=model, optimizer=optimizer, async_save=True)
        for parameter in model.parameters():
            parameter.data.mul_(1.0)
    smp.wait_for_checkpoint()
