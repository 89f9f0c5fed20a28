"""One rank against plain PyTorch on the same device: losses and weights after a few steps."""

from __future__ import annotations

import math

import torch

import smdistributed.modelparallel.torch as smp
from gpu_check import environment
from gpu_check.device import get_device, is_real, shut_down, use_exact_attention
from gpu_check.models import (
    SMALL,
    compute_loss,
    draw_batch,
    make_fused_adamw,
    make_gpt,
    make_lamb,
    make_sgd,
    mark_blocks,
)
from gpu_check.results import Finding, case, emit
from gpu_check.training import STEPS, Comparison, compare_weights, judge, train_plain, train_wrapped

_OFFLOADED = {"offload_activations": True, "activation_loading_horizon": 1, "microbatches": 4}
_STATIC_SCALE = {"optimizer_options": {"static_loss_scale": 1024.0}}
_DYNAMIC_SCALE = {
    "optimizer_options": {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": {"init_scale": 2.0**20, "scale_window": 1000},
    }
}
_CASES = {
    "fp32": Comparison({}, 1e-5),
    "fp32, SGD with momentum": Comparison({}, 1e-5, both={"make": make_sgd}),
    "fp32, fused AdamW": Comparison({}, 1e-5, both={"make": make_fused_adamw}),
    "fp32, LAMB": Comparison({}, 1e-5, both={"make": make_lamb}),
    "fp32, clipping": Comparison({}, 1e-5, both={"clip": 0.05}),
    "fp32, 4 microbatches": Comparison({"microbatches": 4}, 1e-5),
    "fp32, 4 microbatches, clipping": Comparison({"microbatches": 4}, 1e-5, both={"clip": 0.05}),
    "fp32, dropout": Comparison({}, 1e-5, both={"dropout": 0.2}),
    "fp32, dropout, checkpointing": Comparison({}, 1e-5, both={"dropout": 0.2}, ours={"prepare": mark_blocks}),
    "fp32, checkpointing, offloading": Comparison(_OFFLOADED, 1e-5, ours={"prepare": mark_blocks}),
    "bf16": Comparison({"bf16": True}, 2e-3, "bf16"),
    "bf16, 4 microbatches": Comparison({"bf16": True, "microbatches": 4}, 5e-3, "bf16"),
    "bf16, 4 microbatches, fp32 accumulation": Comparison(
        {"bf16": True, "microbatches": 4, "_fp32_grad_accumulation": True}, 5e-3, "bf16"
    ),
    "bf16, fused AdamW": Comparison({"bf16": True}, 2e-3, "bf16", both={"make": make_fused_adamw}),
    "bf16, checkpointing, offloading": Comparison(
        {"bf16": True, **_OFFLOADED}, 5e-3, "bf16", ours={"prepare": mark_blocks}
    ),
    "fp16, loss scale 1024": Comparison({"fp16": True}, 2e-3, "fp16", plain={"scale": 1024.0}, ours=_STATIC_SCALE),
    "fp16, dynamic from 2**20": Comparison(
        {"fp16": True},
        2e-3,
        "fp16",
        plain={"scale": 2.0**20, "is_dynamic": True},
        both={"steps": 8},
        ours=_DYNAMIC_SCALE,
    ),
}


def check_parity() -> None:
    """Compare trainings of one rank with plain PyTorch."""
    with use_exact_attention():
        for name, comparison in _CASES.items():
            if environment.is_emulated() and "dropout" in comparison.both:
                emit(case=name, ok=None, note="checked devices have no attention with dropout")
                continue
            with case(name) as finding:
                plain = comparison.run(finding)
                if comparison.mode == "fp16":
                    finding["skipped_by_plain"] = plain.skipped
        with case("autocast and smp.amp.GradScaler") as finding:
            _train_with_scaler(finding)
    if is_real():
        with case("350M, bf16, flash attention, 4 steps") as finding:
            shape = SMALL if environment.is_tiny() else {"layers": 24, "hidden": 1024, "heads": 16, "seq": 512}
            theirs = train_plain("bf16", shape=shape)
            mine = train_wrapped({"bf16": True}, shape=shape)
            judge(finding, mine, theirs, 1e-2)
            shut_down()


def _train_with_scaler(finding: Finding) -> None:
    """Train as a script does that was written for PyTorch's autocast and gradient scaler."""
    smp.init({})
    model = smp.DistributedModel(make_gpt(SMALL))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    scaler = smp.amp.GradScaler(init_scale=2.0**10)
    dtype = torch.float16 if is_real() else torch.bfloat16

    @smp.step
    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(get_device().type, dtype):
            loss = compute_loss(model, ids, targets)
        model.backward(scaler.scale(loss))
        return loss

    losses = []
    for index in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(step(*draw_batch(index, 8, SMALL["seq"])).reduce_mean()))
        scaler.step(optimizer)
        scaler.update()
    finding["losses"] = [round(loss, 4) for loss in losses]
    finding["scale"] = scaler.get_scale()
    finding["ok"] = all(map(math.isfinite, losses))
    shut_down()


def check_deterministic() -> None:
    """Compare two runs of the same training bit by bit."""
    for mode in ("fp32", "bf16"):
        with case(f"deterministic, {mode}") as finding:
            config = {"deterministic": True, "microbatches": 2}
            if mode != "fp32":
                config[mode] = True
            runs = []
            for _ in range(2):
                # Checked devices have no attention with dropout.
                runs.append(train_wrapped(config, dropout=0.0 if environment.is_emulated() else 0.1))
                shut_down()
            first, second = runs
            distance = compare_weights(first.weights, second.weights)
            is_equal = distance.is_equal and first.losses == second.losses
            finding |= {"bit_equal": is_equal, "weights_rel": distance.worst, "ok": is_equal}
