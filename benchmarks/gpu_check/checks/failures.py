"""Checks of failures on a GPU: a rank that fails, a batch that does not fit, and forks after CUDA was used."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from typing import Any

import torch

import smdistributed.modelparallel.torch as smp
from gpu_check import environment
from gpu_check.device import get_device, is_real, shut_down, synchronize
from gpu_check.models import compute_loss, draw_batch, get_shape, make_gpt, mark_blocks
from gpu_check.processes import read_output
from gpu_check.results import Finding, case, emit

#: The other ranks and the launcher must have ended so many seconds after the failure.
_SECONDS_TO_END = 40
#: More than any GPU has.
_TOO_MUCH = 200 * 2**30
#: What may be left of a batch that did not fit.
_LEFT_BYTES = 64 * 2**20
_IMPORTS = {
    "nothing": "pass",
    "torch.cuda.is_available": "torch.cuda.is_available()",
    "smp": ("import smdistributed.modelparallel.torch as smp; smp.DistributedModel, smp.DistributedOptimizer, smp.nn"),
    "torch._dynamo": "import torch._dynamo",
    "transformers": "import transformers; transformers.Trainer, transformers.LlamaForCausalLM",
    "accelerate": "import accelerate",
}
_TINY_IMPORTS = ("nothing", "torch.cuda.is_available", "smp")


def check_warm_fork() -> None:
    """Emit for each import whether a process forked after it can use CUDA.

    The launcher forks ranks from a process with the imports of the script.
    """
    script = str(environment.PACKAGE / "scripts" / "fork_after.py")
    device = "cuda" if is_real() else "cpu"
    path = f"import sys; sys.path[:0] = {environment.PATHS!r}; "
    for name in _TINY_IMPORTS if environment.is_tiny() else _IMPORTS:
        printed = read_output(sys.executable, script, path + _IMPORTS[name], device, timeout=50)
        said = [line for line in printed.splitlines() if line.startswith(("CHILD", "OPENED"))]
        emit(case=f"fork after {name}", said=said)


def check_failure() -> None:
    """Let rank 1 fail while rank 0 waits for it, and measure how soon all processes end."""
    pipeline = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
    cases: tuple[tuple[str, dict[str, Any], list[str]], ...] = (
        ("ddp, raises", {"ddp": True}, ["raise"]),
        ("pp 2, dies", pipeline, ["die"]),
        ("ddp over NCCL, raises", {"ddp": True}, ["raise", "--nccl"]),
        ("ddp over NCCL, dies", {"ddp": True}, ["die", "--nccl"]),
    )
    for name, config, words in cases:
        if "--nccl" in words and not is_real():
            continue
        with case(f"failure: {name}") as finding:
            _fail(finding, [json.dumps(config), *words])


def _fail(finding: Finding, words: list[str]) -> None:
    script = str(environment.PACKAGE / "scripts" / "rank_fails.py")
    done = subprocess.run(
        [sys.executable, "-m", "smp_launch", "run", "--processes", "2", script, *words],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=max(5.0, min(60.0, environment.count_seconds_left() - 4)),
        env={**environment.make_program_environment(), "SMP_TIMEOUT_SECONDS": "30"},
    )
    ended = time.time()
    printed = (done.stdout + done.stderr).strip().splitlines()
    failed_at = [float(line.split("FAILS")[1]) for line in printed if "FAILS" in line]
    seconds = ended - failed_at[0] if failed_at else None
    finding["exit"] = done.returncode
    finding["seconds_after"] = None if seconds is None else round(seconds, 1)
    finding["last"] = printed[-2:]
    finding["ok"] = done.returncode != 0 and seconds is not None and seconds < _SECONDS_TO_END
    if not finding["ok"]:
        print("\n".join(printed[-30:]))


def check_oom() -> None:
    """Run out of memory in a step, and go on with a batch that fits.

    Scripts do that which look for the largest batch, as with ``find_executable_batch_size`` of Accelerate.
    """
    offloaded = {"bf16": True, "microbatches": 2, "offload_activations": True}
    cases: dict[str, tuple[dict[str, Any], bool]] = {
        # name: configuration, whether blocks are checkpointed
        "bf16": ({"bf16": True}, False),
        "bf16, microbatches, checkpointing, offloading": (offloaded, True),
    }
    for name, (config, is_checkpointed) in cases.items():
        with case(f"out of memory: {name}") as finding:
            _run_out_of_memory(finding, config, is_checkpointed)
            shut_down()


def _run_out_of_memory(finding: Finding, config: dict[str, Any], is_checkpointed: bool) -> None:
    smp.init(config)
    with get_device():
        net = make_gpt(get_shape("350M"))
    if is_checkpointed:
        mark_blocks(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    does_not_fit = False

    def raise_without_gpu(*_: object) -> None:
        if does_not_fit and not is_real():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. (planted)")

    model.get_module().blocks[-1].register_forward_hook(raise_without_gpu)

    @smp.step
    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = compute_loss(model, ids, targets)
        if does_not_fit and is_real():
            torch.empty(_TOO_MUCH, dtype=torch.uint8, device=loss.device)
        model.backward(loss)
        return loss

    batch = draw_batch(0, 4, get_shape("350M")["seq"])
    losses = []

    def update() -> None:
        optimizer.zero_grad()
        losses.append(float(step(*batch).reduce_mean()))
        optimizer.step()

    update()
    update()
    before = _count_allocated()
    does_not_fit = True
    try:
        optimizer.zero_grad()
        step(*batch)
        finding["raised"] = None
    except BaseException as error:
        finding["raised"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        finding["is_torchs"] = isinstance(error, torch.cuda.OutOfMemoryError)
    does_not_fit = False
    left = _count_allocated() - before
    update()
    update()
    finding["left_mib"] = round(left / 2**20, 1)
    finding["losses"] = [round(loss, 4) for loss in losses]
    finding["ok"] = bool(finding.get("is_torchs")) and losses[-1] < losses[0] and left < _LEFT_BYTES


def _count_allocated() -> int:
    """Return the allocated bytes of the GPU, without what only reference cycles hold."""
    gc.collect()
    synchronize()
    return torch.cuda.memory_allocated() if is_real() else 0
