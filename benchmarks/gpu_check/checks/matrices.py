"""Several ranks on one GPU under each strategy, against plain PyTorch on the same device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from gpu_check import environment, nccl
from gpu_check.device import is_real, use_exact_attention
from gpu_check.models import SMALL, make_lamb, mark_blocks, split_tensors
from gpu_check.processes import run_ranks
from gpu_check.results import case, emit
from gpu_check.training import Comparison
from smp_runtime.comm.devices import nccl_version

Config = dict[str, Any]

_PIPELINE: Config = {"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True}
_TENSORS: Config = {"tensor_parallel_degree": 2, "ddp": True}
_SHARDED: Config = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 1000,
    "sdp_gradient_clipping": 1e6,
}
# With the default horizon no activation would leave a model of so few layers.
_OFFLOADED: Config = {"offload_activations": True, "activation_loading_horizon": 1}

_CLIPPED = {"clip": 0.05}
_MARKED = {"prepare": mark_blocks}
_SPLIT = {"prepare": split_tensors}
_STATIC_SCALE = {"optimizer_options": {"static_loss_scale": 1024.0}}
_SCALE = {"scale": 1024.0}

_BF16: Config = {"bf16": True}
_FP16: Config = {"fp16": True}
_SHARDED_STATE: Config = {"shard_optimizer_state": True}


def check_matrix_dp() -> None:
    """Train two replicas."""
    run_ranks(2, rank_matrix_dp)


def check_matrix_pp() -> None:
    """Train a pipeline of two stages."""
    run_ranks(2, rank_matrix_pp)


def check_matrix_tp() -> None:
    """Train with tensor parallelism of degree 2."""
    run_ranks(2, rank_matrix_tp)


def check_matrix_sdp() -> None:
    """Train with sharded data parallelism of degree 2."""
    run_ranks(2, rank_matrix_sdp)


def check_matrix_four() -> None:
    """Train with two strategies on four ranks."""
    run_ranks(4, rank_matrix_four)


def check_nccl_matrix() -> None:
    """Train over NCCL with two ranks on one GPU, then with four."""
    if not is_real():
        emit(case="nccl matrix", ok=None, note="no GPU")
        return
    is_newer = os.environ.get("SMPCHECK_NCCL") == "newer"
    environ = nccl.make_newer_environment() if is_newer else nccl.SHARED_GPU
    for which in _OVER_NCCL:
        codes = run_ranks(4 if which == "four" else 2, rank_nccl_family, which, environ=environ, timeout=45)
        emit(case=f"nccl: {which}", ok=not any(codes), exits=codes)


def compare_on_ranks(comparisons: Mapping[str, Comparison]) -> None:
    """Run comparisons on this rank, one after another."""
    with use_exact_attention():
        for name, comparison in comparisons.items():
            if environment.is_tiny() and comparison.config.get("compile"):
                continue
            with case(name) as finding:
                comparison.run(finding)
            if "loss_rel" not in finding:
                # This rank has raised an exception. Others may not have: the next case would hang.
                break


def rank_matrix_dp() -> None:
    """Compare replicas with plain PyTorch."""
    ddp: Config = {"ddp": True}
    compare_on_ranks(
        {
            "ddp": Comparison(ddp, 1e-4),
            "ddp, 2 microbatches, clipping": Comparison({**ddp, "microbatches": 2}, 1e-4, both=_CLIPPED),
            "ddp, bf16": Comparison({**ddp, **_BF16}, 1e-2, "bf16"),
            "ddp, bf16, sharded state": Comparison({**ddp, **_BF16, **_SHARDED_STATE}, 1e-2, "bf16"),
            "ddp, fp16, sharded state": Comparison(
                {**ddp, **_FP16, **_SHARDED_STATE}, 1e-2, "fp16", plain=_SCALE, ours=_STATIC_SCALE
            ),
            "ddp, LAMB, sharded state": Comparison({**ddp, **_SHARDED_STATE}, 1e-4, both={"make": make_lamb}),
            # In 8 bits results are near only.
            "ddp, bf16, fp8": Comparison({**ddp, **_BF16, "fp8": True}, 5e-2, "bf16"),
            "ddp, compile": Comparison({**ddp, "compile": True}, 1e-3),
        }
    )


def rank_matrix_pp() -> None:
    """Compare pipelines with plain PyTorch."""
    four_layers = {"shape": {**SMALL, "layers": 4}}
    compare_on_ranks(
        {
            "pp 2": Comparison(_PIPELINE, 1e-4),
            "pp 2, simple": Comparison({**_PIPELINE, "pipeline": "simple"}, 1e-4),
            "pp 2, zero bubble": Comparison({**_PIPELINE, "pipeline": "zero_bubble"}, 1e-4),
            "pp 2, virtual stages": Comparison({**_PIPELINE, "virtual_stages": 2}, 1e-4, both=four_layers),
            "pp 2, bf16": Comparison({**_PIPELINE, **_BF16}, 1e-2, "bf16"),
            "pp 2, fp16": Comparison({**_PIPELINE, **_FP16}, 1e-2, "fp16", plain=_SCALE, ours=_STATIC_SCALE),
            "pp 2, checkpointing, offloading": Comparison({**_PIPELINE, **_OFFLOADED}, 1e-4, ours=_MARKED),
            "pp 2, clipping": Comparison(_PIPELINE, 1e-4, both=_CLIPPED),
            "pp 2, compile": Comparison({**_PIPELINE, "compile": True}, 1e-3),
        }
    )


def rank_matrix_tp() -> None:
    """Compare tensor parallelism with plain PyTorch."""
    prescaled = {**_TENSORS, "prescaled_batch": True}
    half = {**_TENSORS, **_FP16, **_SHARDED_STATE}
    compare_on_ranks(
        {
            "tp 2": Comparison(_TENSORS, 1e-4, ours=_SPLIT),
            "tp 2, speed": Comparison({**_TENSORS, "optimize": "speed"}, 1e-4, ours=_SPLIT),
            "tp 2, prescaled": Comparison(prescaled, 1e-4, ours=_SPLIT),
            "tp 2, prescaled, bf16": Comparison({**prescaled, **_BF16}, 1e-2, "bf16", ours=_SPLIT),
            "tp 2, fp16, sharded state": Comparison(half, 1e-2, "fp16", plain=_SCALE, ours={**_SPLIT, **_STATIC_SCALE}),
            "tp 2, clipping": Comparison(_TENSORS, 1e-4, both=_CLIPPED, ours=_SPLIT),
        }
    )


def rank_matrix_sdp() -> None:
    """Compare sharded data parallelism with plain PyTorch."""
    offloaded = {**_SHARDED, **_BF16, **_OFFLOADED, "microbatches": 2}
    compare_on_ranks(
        {
            "sdp 2": Comparison(_SHARDED, 1e-4),
            "sdp 2, all sharded": Comparison({**_SHARDED, "sdp_param_persistence_threshold": 0}, 1e-4),
            "sdp 2, few live": Comparison({**_SHARDED, "sdp_max_live_parameters": 60_000}, 1e-4),
            "sdp 2, 2 microbatches": Comparison({**_SHARDED, "microbatches": 2}, 1e-4),
            "sdp 2, its own clipping": Comparison({**_SHARDED, "sdp_gradient_clipping": 0.05}, 1e-4, plain=_CLIPPED),
            "sdp 2, bf16": Comparison({**_SHARDED, **_BF16}, 1e-2, "bf16"),
            "sdp 2, fp16": Comparison({**_SHARDED, **_FP16}, 1e-2, "fp16", plain=_SCALE, ours=_STATIC_SCALE),
            "sdp 2, bf16, checkpointing, offloading": Comparison(offloaded, 1e-2, "bf16", ours=_MARKED),
            "sdp 2, compile": Comparison({**_SHARDED, "compile": True}, 1e-3),
        }
    )


def rank_matrix_four() -> None:
    """Compare two strategies at once with plain PyTorch."""
    pipeline = {**_PIPELINE, "microbatches": 2}
    sharded_and_split = {**_TENSORS, "prescaled_batch": True, **_BF16, **_SHARDED}
    compare_on_ranks(
        {
            "pp 2 x ddp 2": Comparison(pipeline, 1e-4),
            "pp 2 x tp 2": Comparison({**pipeline, **_TENSORS}, 1e-4, ours=_SPLIT),
            "sdp 2 x tp 2, bf16": Comparison(sharded_and_split, 1e-2, "bf16", ours=_SPLIT),
            "sdp 2 x dp 2 (MiCS)": Comparison(_SHARDED, 1e-4),
        }
    )


_OVER_NCCL = {
    "dp": {
        "nccl: ddp": Comparison({"ddp": True, "ddp_dist_backend": "nccl"}, 1e-4),
        "nccl: ddp, bf16, sharded state": Comparison({"ddp": True, **_BF16, **_SHARDED_STATE}, 1e-2, "bf16"),
    },
    "pp": {
        "nccl: pp 2": Comparison(_PIPELINE, 1e-4),
        "nccl: pp 2, zero bubble, bf16": Comparison({**_PIPELINE, "pipeline": "zero_bubble", **_BF16}, 1e-2, "bf16"),
    },
    "sdp": {
        "nccl: sdp 2": Comparison(_SHARDED, 1e-4),
        "nccl: sdp 2, bf16, 2 microbatches": Comparison({**_SHARDED, **_BF16, "microbatches": 2}, 1e-2, "bf16"),
    },
    "tp": {"nccl: tp 2": Comparison(_TENSORS, 1e-4, ours=_SPLIT)},
    "four": {"nccl: pp 2 x ddp 2": Comparison({**_PIPELINE, "microbatches": 2}, 1e-4)},
}


def rank_nccl_family(which: str) -> None:
    """Compare a strategy over NCCL with plain PyTorch, then emit the memory that the communicators take."""
    compare_on_ranks(_OVER_NCCL[which])
    if is_real() and os.environ["RANK"] == "0":
        free, total = torch.cuda.mem_get_info()
        emit(
            case=f"nccl: {which}: memory of both ranks beside PyTorch's",
            version=nccl_version(),
            variables={name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
            used_mib=(total - free) >> 20,
            reserved_here_mib=torch.cuda.memory_reserved() >> 20,
        )
