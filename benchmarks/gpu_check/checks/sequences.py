"""Context parallelism with ranks that share one GPU: training, the kernels that attend, and the memory of activations."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import smdistributed.modelparallel.torch as smp
from gpu_check import environment, nccl
from gpu_check.checks.matrices import compare_on_ranks
from gpu_check.device import describe_peak, fuse_on_gpu, get_device, is_real, measure_peak, shut_down
from gpu_check.measurements import count_kernels, make_wrapped_step, time_runs, to_ms
from gpu_check.models import get_shape, mark_blocks, split_tensors
from gpu_check.processes import run_ranks
from gpu_check.results import case, emit, round_significant
from gpu_check.training import Comparison, compute_distance
from smp_config import Group
from smp_runtime.context.attention import attend, zigzag_indices

Config = dict[str, Any]

_METHODS = ("ring", "all_gather", "all_to_all")
_HALVES: Config = {"ddp": True, "context_parallel_degree": 2}
_BF16: Config = {"bf16": True}
_KERNELS = ("flash", "fmha", "attention", "softmax", "cutlass", "cudnn")
#: Largest relative distance from float64 of a result and of its gradients.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_WINDOW = 100


def check_matrix_cp() -> None:
    """Train with context parallelism of degree 2, alone and with other strategies."""
    run_ranks(2, rank_matrix_cp)
    run_ranks(4, rank_matrix_cp_four)


def check_context_attention() -> None:
    """Attend on two ranks with each mask, method and dtype; over gloo, then over NCCL."""
    run_ranks(2, rank_attend, "gloo", timeout=60)
    if is_real():
        run_ranks(2, rank_attend, "nccl", environ=nccl.SHARED_GPU, timeout=60)
        codes = run_ranks(2, rank_matrix_cp_over_nccl, environ=nccl.SHARED_GPU, timeout=60)
        emit(case="nccl: cp", ok=not any(codes), exits=codes)


def check_context_memory() -> None:
    """Measure the peak of a rank at degree 1, and that of two ranks with sequences of twice the length."""
    for method in ("", *_METHODS):
        run_ranks(2 if method else 1, rank_measure_peak, method, timeout=50)


def rank_matrix_cp() -> None:
    """Compare context parallelism with plain PyTorch."""
    fp16: Config = {**_HALVES, "fp16": True}
    offloaded = {**_HALVES, "microbatches": 2, "offload_activations": True, "activation_loading_horizon": 1}
    compare_on_ranks(
        {
            **{f"cp 2, {each}": Comparison({**_HALVES, "context_parallel": each}, 1e-4) for each in _METHODS},
            "cp 2, bf16, sharded state": Comparison({**_HALVES, **_BF16, "shard_optimizer_state": True}, 1e-2, "bf16"),
            "cp 2, fp16": Comparison(
                fp16, 1e-2, "fp16", plain={"scale": 1024.0}, ours={"optimizer_options": {"static_loss_scale": 1024.0}}
            ),
            "cp 2, clipping": Comparison(_HALVES, 1e-4, both={"clip": 0.05}),
            "cp 2, checkpointing, offloading": Comparison(offloaded, 1e-4, ours={"prepare": mark_blocks}),
        }
    )


def rank_matrix_cp_four() -> None:
    """Compare context parallelism beside another strategy with plain PyTorch."""
    pipeline = {**_HALVES, "pipeline_parallel_degree": 2, "microbatches": 2}
    sharded = {**_HALVES, "sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 1000}
    split = {**_HALVES, "tensor_parallel_degree": 2, "prescaled_batch": True}
    compare_on_ranks(
        {
            "cp 2 x ddp 2": Comparison(_HALVES, 1e-4),
            "cp 4": Comparison({**_HALVES, "context_parallel_degree": 4}, 1e-4),
            "cp 2 x pp 2": Comparison(pipeline, 1e-4),
            "cp 2 x sdp 4, bf16": Comparison({**sharded, **_BF16, "sdp_gradient_clipping": 1e6}, 1e-2, "bf16"),
            "cp 2 x tp 2": Comparison(split, 1e-4, ours={"prepare": split_tensors}),
        }
    )


def rank_matrix_cp_over_nccl() -> None:
    """Compare context parallelism over NCCL with plain PyTorch."""
    compare_on_ranks(
        {f"nccl: cp 2, {each}": Comparison({**_HALVES, "context_parallel": each}, 1e-4) for each in _METHODS}
    )


class _Ranks:
    """All ranks of the job as a context group."""

    def __init__(self) -> None:
        self.rank, self.size = smp.rank(), smp.size()
        self.process_group = smp.state.process_group(Group.WORLD)
        self.collectives = smp.state.collectives


def rank_attend(backend: str) -> None:
    """Compare this rank's rows, and the gradients of its keys, with float64 over the whole sequence."""
    length, width = (64, 16) if environment.is_tiny() else (2048, 64)
    smp.init({"ddp": True})
    group = _Ranks()
    positions = torch.arange(length, device=get_device())
    masks: dict[str, tuple[torch.Tensor | None, bool]] = {
        "none": (None, False),
        "causal": (None, True),
        "padding": ((positions < length - length // 5)[None], False),
        "window": ((positions <= positions[:, None]) & (positions > positions[:, None] - _WINDOW), False),
        "documents": (positions // 300 == positions[:, None] // 300, True),
        "bias": (-0.05 * (positions - positions[:, None]).abs().float(), False),
    }
    for name, (mask, is_causal) in masks.items():
        for dtype, tolerance in _TOLERANCES.items():
            inputs = _draw_inputs(length, width, dtype)
            wanted = _attend_alone(inputs, mask, is_causal, torch.float64)
            theirs = _measure_distance(_attend_alone(inputs, mask, is_causal, dtype), wanted)
            for method in _METHODS:
                with case(f"{backend}: {name}, {str(dtype)[6:]}, {method}") as finding:
                    index = zigzag_indices(length, group.size)
                    mine = index[group.rank].to(get_device())
                    options = {"group": group, "method": method, "mask": _cut(mask, mine), "causal": is_causal}
                    found = _attend_part(inputs, mine, index, options)
                    apart = _measure_distance(found, [each[:, :, mine] for each in wanted])
                    finding |= {"apart": round_significant(apart), "one_rank": round_significant(theirs)}
                    finding["ok"] = apart <= max(tolerance, 1.5 * theirs)
                    if dtype is torch.bfloat16 and method == "ring":
                        _add_costs(finding, inputs, mine, index, options)
                if "ok" not in finding:  # this rank has raised an exception and left the job
                    return
    shut_down()


def _draw_inputs(length: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return queries, keys and values with shared heads, and the gradient of the result."""
    made = torch.Generator().manual_seed(3)
    heads = (8, 4, 4, 8)
    return [torch.randn(2, each, length, width, generator=made).to(get_device(), dtype) for each in heads]


def _cut(mask: torch.Tensor | None, mine: torch.Tensor) -> torch.Tensor | None:
    return mask[mine] if mask is not None and len(mask) > 1 else mask


def _attend_alone(
    inputs: list[torch.Tensor], mask: torch.Tensor | None, is_causal: bool, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the result over the whole sequence and the gradients, in ``dtype``."""
    *parts, above = (each.detach().to(dtype) for each in inputs)
    leaves = [each.requires_grad_() for each in parts]
    length = above.shape[2]
    if mask is not None and is_causal:
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=above.device).tril()
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    whole = mask.expand(length, length) if mask is not None else None
    out = F.scaled_dot_product_attention(
        *leaves, attn_mask=whole, is_causal=is_causal and mask is None, enable_gqa=True
    )
    out.backward(above)
    return [out.detach(), *(_get_gradient(each) for each in leaves)]


def _attend_part(
    inputs: list[torch.Tensor], mine: torch.Tensor, index: list[torch.Tensor], options: dict[str, Any]
) -> list[torch.Tensor]:
    """Return this rank's rows of the result and of the gradients."""
    leaves = [each[:, :, mine].detach().clone().requires_grad_() for each in inputs[:3]]
    given = dict(options)
    mask = given["mask"]
    if mask is not None and mask.is_floating_point():
        given["mask"] = mask.to(leaves[0].dtype)
    out = attend(*leaves, query_index=index, key_index=index, grouped=True, **given)
    out.backward(inputs[3][:, :, mine])
    return [out.detach(), *(_get_gradient(each) for each in leaves)]


def _get_gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _measure_distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(compute_distance(one, other) for one, other in zip(found, wanted, strict=True))


def _add_costs(
    finding: dict[str, Any],
    inputs: list[torch.Tensor],
    mine: torch.Tensor,
    index: list[torch.Tensor],
    options: dict[str, Any],
) -> None:
    """Add the kernels that attend on this rank, and the time of both passes. All ranks call it."""

    def run() -> None:
        _attend_part(inputs, mine, index, options)

    finding["ms"] = to_ms(time_runs(run, 4, 1))
    if is_real():
        finding["kernels"] = count_kernels(run, _KERNELS, 4)
    dist.barrier(options["group"].process_group)


def rank_measure_peak(method: str = "") -> None:
    """Emit the peak memory of this rank in a step; with a method the sequences are twice as long."""
    name = f"cp 2, {method}, twice the length" if method else "degree 1"
    shape = dict(get_shape("350M"))
    if not environment.is_tiny():
        shape |= {"layers": 12, "seq": 4096}
    config: Config = {"ddp": True, **_BF16}
    if method:
        shape["seq"] *= 2
        config |= {"context_parallel_degree": 2, "context_parallel": method}
    with case(f"memory: {name}") as finding:
        smp.init(config)
        peak = measure_peak(lambda: make_wrapped_step(shape, 2, "bf16", fused=fuse_on_gpu()))
        finding |= describe_peak(peak)
        finding["layers"], finding["seq"] = shape["layers"], shape["seq"]
        finding["processes"] = os.environ["WORLD_SIZE"]
        shut_down()
