"""Time of a training step: overhead, MFU and compiled blocks against plain PyTorch, and FSDP2 as another peer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import smdistributed.modelparallel.torch as smp
from gpu_check import environment
from gpu_check.device import (
    describe_peak,
    fuse_on_gpu,
    get_device,
    is_real,
    measure_peak,
    shut_down,
    synchronize,
)
from gpu_check.measurements import (
    Step,
    compare_times,
    compute_mfu,
    count_flops,
    end_first_steps,
    make_plain_step,
    make_wrapped_step,
    measure_queueing,
    profile_step,
    time_runs,
    to_ms,
)
from gpu_check.models import SMALL, compute_loss, draw_batch, get_shape, make_gpt
from gpu_check.results import Finding, case, emit

#: A model whose kernels are so short that the time of launching them counts.
_BOUND_BY_LAUNCHES = {"layers": 12, "hidden": 256, "heads": 4, "seq": 128}


def check_overhead() -> None:
    """Compare steps of one rank with plain PyTorch, in turns."""
    shape, batch = get_shape("350M"), 2 if environment.is_tiny() else 8
    for mode in ("autocast", "bf16"):
        with case(f"350M, {mode}") as finding:
            smp.init({"bf16": True} if mode == "bf16" else {})
            ours = make_wrapped_step(shape, batch, mode, fused=fuse_on_gpu())
            peer = make_plain_step(shape, batch, mode)
            _compare(finding, ours, peer, 10)
            if mode == "bf16":
                finding |= {"ours_profile": profile_step(ours), "peer_profile": profile_step(peer)}
            if is_real():
                flops = count_flops(peer)
                finding["mfu"] = compute_mfu(flops, finding["ours_ms"] * 1e-3)
                finding["peers_mfu"] = compute_mfu(flops, finding["peer_ms"] * 1e-3)
            del ours, peer
            shut_down()
    with case("small model, where launching counts") as finding:
        small = SMALL if environment.is_tiny() else _BOUND_BY_LAUNCHES
        smp.init({})
        ours, peer = make_wrapped_step(small, 4, fused=fuse_on_gpu()), make_plain_step(small, 4)
        _compare(finding, ours, peer, 20)
        del ours, peer
        shut_down()
    with case("default optimizer of both (no fused asked for)") as finding:
        smp.init({"bf16": True})
        ours = make_wrapped_step(shape, batch, "bf16")
        peer = make_plain_step(shape, batch, "bf16", fused=False)
        finding |= compare_times(ours, peer, 6)
        del ours, peer
        shut_down()


def _compare(finding: Finding, ours: Step, peer: Step, many: int) -> None:
    finding |= compare_times(ours, peer, many)
    finding |= {"ours": measure_queueing(ours), "peer": measure_queueing(peer)}


def check_mfu() -> None:
    """Measure a GPT of 1.3 billion parameters, one side after the other, since both do not fit at once."""
    shape, batch = get_shape("1.3B"), 2 if environment.is_tiny() else 4

    def make_peer() -> Step:
        return make_plain_step(shape, batch, "bf16")

    def make_ours() -> Step:
        return make_wrapped_step(shape, batch, "bf16", fused=fuse_on_gpu())

    with case("1.3B, bf16") as finding:
        peer = make_peer()
        flops = count_flops(peer)
        theirs = time_runs(peer, 8, 2)
        del peer
        peer_peak = measure_peak(make_peer)
        smp.init({"bf16": True})
        ours = make_ours()
        finding["first_steps_ms"] = end_first_steps(ours)
        mine = time_runs(ours, 8, 2)
        finding |= {
            "parameters": sum(parameter.numel() for parameter in ours.model.parameters()),
            "flops": flops,
            "ours_ms": to_ms(mine, 1),
            "peer_ms": to_ms(theirs, 1),
            "ratio": round(mine / theirs, 3),
            "tokens_per_s": round(batch * shape["seq"] / mine),
        }
        if is_real():
            finding |= {"mfu": compute_mfu(flops, mine), "peers_mfu": compute_mfu(flops, theirs)}
        finding |= measure_queueing(ours)
        del ours
        shut_down()
        smp.init({"bf16": True})
        finding["ours_memory"] = describe_peak(measure_peak(make_ours))
        finding["peer_memory"] = describe_peak(peer_peak)
        shut_down()
    if environment.is_tiny() and environment.is_emulated():
        return  # checked devices have no kernels to compile
    with case("1.3B, bf16, blocks compiled") as finding:
        smp.init({"bf16": True})
        ours, finding["first_s"] = _time_first(
            lambda: make_wrapped_step(shape, batch, "bf16", is_compiled=True, fused=fuse_on_gpu())
        )
        end_first_steps(ours)
        mine = time_runs(ours, 8, 2)
        finding["ours_ms"] = to_ms(mine, 1)
        if is_real():
            finding["mfu"] = compute_mfu(flops, mine)
        del ours
        shut_down()


def check_compile() -> None:
    """Measure compiled blocks: compiled by the script, by the option ``compile``, and with checkpointing."""
    shape, batch = get_shape("350M"), 2 if environment.is_tiny() else 8
    if environment.is_tiny() and environment.is_emulated():
        emit(case="compile", ok=None, note="checked devices have no kernels")
        return
    with case("350M, bf16, blocks compiled") as finding:
        smp.init({"bf16": True})
        peer, finding["peer_first_s"] = _time_first(lambda: make_plain_step(shape, batch, "bf16", is_compiled=True))
        ours, finding["ours_first_s"] = _time_first(
            lambda: make_wrapped_step(shape, batch, "bf16", is_compiled=True, fused=fuse_on_gpu())
        )
        finding |= compare_times(ours, peer, 8)
        plain = make_wrapped_step(shape, batch, "bf16", fused=fuse_on_gpu())
        end_first_steps(plain)
        finding["gain"] = compare_times(plain, ours, 6)["ratio"]
        finding["host_waits"] = measure_queueing(ours).get("host_waits")
        del ours, peer, plain
        shut_down()
    with case('350M, bf16, {"compile": True}') as finding:
        smp.init({"bf16": True, "compile": True})
        ours, finding["first_s"] = _time_first(lambda: make_wrapped_step(shape, batch, "bf16", fused=fuse_on_gpu()))
        end_first_steps(ours)
        finding["ms"] = to_ms(time_runs(ours, 8, 2))
        del ours
        shut_down()
    with case("compiled and checkpointed") as finding:
        smp.init({"bf16": True, "compile": True, "offload_activations": True, "microbatches": 2})
        ours = make_wrapped_step(shape, batch, "bf16", is_checkpointed=True, fused=fuse_on_gpu())
        end_first_steps(ours)
        finding["ms"] = to_ms(time_runs(ours, 5, 1))
        del ours
        shut_down()


def _time_first(make: Callable[[], Step]) -> tuple[Step, float]:
    """Return a step and the seconds until it has been made and has run once, compilation included."""
    begin = time.perf_counter()
    step = make()
    step()
    synchronize()
    return step, round(time.perf_counter() - begin, 1)


def check_fsdp2() -> None:
    """Measure FSDP2 with one rank."""
    shape, batch = get_shape("350M"), 2 if environment.is_tiny() else 8
    start_torch_distributed()

    def make() -> Callable[[], None]:
        with get_device():
            model = make_gpt(shape)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fuse_on_gpu())
        ids, targets = draw_batch(0, batch, shape["seq"])

        def run() -> None:
            optimizer.zero_grad()
            compute_loss(model, ids, targets).backward()
            optimizer.step()

        return run

    with case("FSDP2, world size 1, 350M") as finding:
        run = make()
        finding["ms"] = to_ms(time_runs(run, 10, 3))
        finding |= measure_queueing(run)
        del run
        finding |= describe_peak(measure_peak(make))
    dist.destroy_process_group()


def start_torch_distributed() -> None:
    """Start a job of one rank in plain PyTorch."""
    port = str(environment.find_free_port())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="1")
    if is_real():
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_real() else "gloo", rank=0, world_size=1)
