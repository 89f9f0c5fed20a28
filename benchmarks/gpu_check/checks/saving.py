"""Checkpoints against ``torch.save`` and ``torch.distributed.checkpoint``: time, host memory, and how long training stalls."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import smdistributed.modelparallel.torch as smp
from gpu_check import environment
from gpu_check.checks.costs import start_torch_distributed
from gpu_check.device import fuse_on_gpu, get_device, is_real, shut_down, synchronize, time_run
from gpu_check.measurements import Step, count_rounds, make_plain_step, make_wrapped_step, to_ms
from gpu_check.models import get_shape
from gpu_check.results import case, round_significant
from gpu_check.training import compare_weights
from smp_config.recovery import FOLDER_VARIABLE, INTERVAL_VARIABLE, MEMORY_VARIABLE
from smp_runtime.checkpoint.save_partial import Saver
from smp_runtime.job.session import current_session
from smp_runtime.tensors.host_memory.snapshot import StagingArena

_MEMORY_FOLDER = Path("/dev/shm")
_LEAST_FREE = 24 * 2**30
#: Seconds to wait for a thread that pins memory.
_PIN_SECONDS = 60.0


def check_saving() -> None:
    """Save and load a GPT of 350 million parameters on both sides."""
    shape, batch = get_shape("350M"), 2 if environment.is_tiny() else 8
    with tempfile.TemporaryDirectory(prefix="smpcheck-save-", dir=_choose_folder()) as name:
        folder = Path(name)
        _stage()
        _set_memory_checkpoints(folder / "memory")
        smp.init({"bf16": True})
        step = make_wrapped_step(shape, batch, "bf16", fused=fuse_on_gpu())
        step()
        step()
        _save_meanwhile(step, folder)
        _save_and_resume(step, folder)
        _keep_in_memory(step, folder)
        del step
        shut_down()
        peer = make_plain_step(shape, batch, "bf16")
        peer()
        peer()
        _save_by_torch(peer, folder)
        _save_by_dcp(peer, folder)


def _choose_folder() -> str | None:
    """Return a folder in memory if there is room, so that no disk is measured; None for the default one."""
    has_room = is_real() and shutil.disk_usage(_MEMORY_FOLDER).free > _LEAST_FREE
    return str(_MEMORY_FOLDER) if has_room else None


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _resident_bytes() -> int:
    """Return the bytes of this process that lie in host memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def _stage() -> None:
    """Measure copies to host memory before it is pinned and after, and how fast a thread pins it."""
    size = 2**16 if environment.is_tiny() else 2**30
    tensor = torch.ones(size, dtype=torch.uint8, device=get_device())

    def measure(run: Any) -> float:
        synchronize()
        return round_significant(size / time_run(run) / 1e9)

    with case("staging, GB/s") as finding:
        pageable = torch.empty(size, dtype=torch.uint8)
        finding["new_pageable"] = measure(lambda: pageable.copy_(tensor))
        finding["pageable"] = measure(lambda: pageable.copy_(tensor))
        arena = StagingArena(tensor.device)
        finding["new_by_chunks"] = measure(lambda: arena.copy([tensor]))
        finding["by_chunks"] = measure(lambda: arena.copy([tensor]))
        arena.pin_later()
        finding["pinning"] = measure(lambda: arena.wait_until_pinned(_PIN_SECONDS))
        finding["pinned"] = measure(lambda: arena.copy([tensor]))
        finding |= {"bytes": size, "pinned_bytes": arena.pinned_bytes}
        equal = torch.equal(arena.copy([tensor])[0], torch.ones(size, dtype=torch.uint8))
        finding["ok"] = equal and arena.pinned_bytes in ((size,) if tensor.device.type == "cuda" else (0,))
        arena.close()


def _set_memory_checkpoints(folder: Path) -> None:
    """Let the job keep its state in memory at each call, as a launcher would."""
    folder.mkdir()
    os.environ |= {MEMORY_VARIABLE: "1", INTERVAL_VARIABLE: "1", FOLDER_VARIABLE: str(folder)}


def _keep_in_memory(step: Step, folder: Path) -> None:
    """Measure memory checkpoints: the first two make their memory, which a thread pins while training goes on."""
    with case("memory checkpoints") as finding:
        kept = folder / "memory"
        kept.mkdir(exist_ok=True)
        stalls, steps = [], []
        for _ in range(count_rounds(8)):
            steps.append(statistics.median(time_run(step) for _ in range(4)))
            begin = time.perf_counter()
            made = smp.memory_checkpoint(step.model, step.optimizer)
            stalls.append(time.perf_counter() - begin)
            if not made:
                raise AssertionError("no copy was made; is there enough shared memory?")
        size = max(path.stat().st_size for path in kept.iterdir())
        finding |= {
            "stalls_ms": [to_ms(seconds, 1) for seconds in stalls],
            "steps_ms": [to_ms(seconds, 1) for seconds in steps],
            "bytes": size,
            "gbs": round_significant(size / stalls[-1] / 1e9),
        }


def _save_meanwhile(step: Step, folder: Path) -> None:
    """Measure asynchronous saves; after the first one, a thread pins its host memory, which later ones use again."""
    arena, before = Saver.of(current_session()).arena, _resident_bytes()
    alone = statistics.median(time_run(step) for _ in range(count_rounds(4)))
    for number in range(3):
        with case(f"async save {number}") as finding:
            synchronize()
            begin = time.perf_counter()
            smp.save_checkpoint(str(folder), f"at{number}", model=step.model, optimizer=step.optimizer, async_save=True)
            stall = time.perf_counter() - begin
            meanwhile = [time_run(step) for _ in range(3)]
            smp.wait_for_checkpoint()
            whole = time.perf_counter() - begin
            is_pinned = arena.wait_until_pinned(_PIN_SECONDS)
            finding |= {
                "step_ms": to_ms(alone, 1),
                "stall_ms": to_ms(stall, 1),
                "steps_meanwhile_ms": [to_ms(seconds, 1) for seconds in meanwhile],
                "whole_s": round(whole, 2),
                "wait_for_pinning_s": round(time.perf_counter() - begin - whole, 2),
                "is_pinned": is_pinned,
                "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
                "arena_bytes": arena.bytes,
                "resident_bytes_more": _resident_bytes() - before,
            }
            finding["stall_gbs"] = round_significant(arena.bytes / stall / 1e9)
        _empty(folder)


def _save_and_resume(step: Step, folder: Path) -> None:
    with case("save at once") as finding:
        begin = time.perf_counter()
        smp.save_checkpoint(str(folder), "now", model=step.model, optimizer=step.optimizer)
        finding["save_s"] = round(time.perf_counter() - begin, 2)
    with case("resume") as finding:
        saved = {name: value.detach().clone() for name, value in step.model.state_dict().items()}
        step()
        begin = time.perf_counter()
        smp.resume_from_checkpoint(str(folder), tag="now")
        synchronize()
        finding["resume_s"] = round(time.perf_counter() - begin, 2)
        finding["ok"] = finding["bit_equal"] = compare_weights(step.model.state_dict(), saved).is_equal
    _empty(folder)


def _save_by_torch(peer: Step, folder: Path) -> None:
    optimizer: Any = peer.optimizer
    state = {
        "model": peer.model.state_dict(),
        "optimizer": optimizer.inner.state_dict(),
        "masters": optimizer.masters,
    }
    with case("torch.save") as finding:
        synchronize()
        begin = time.perf_counter()
        torch.save(state, folder / "plain.pt")
        finding["save_s"] = round(time.perf_counter() - begin, 2)
    _empty(folder)


def _save_by_dcp(peer: Step, folder: Path) -> None:
    optimizer: Any = peer.optimizer
    with case("torch.distributed.checkpoint.async_save") as finding:
        tensors = {f"m{number}": master for number, master in enumerate(optimizer.masters)}
        for number, state in enumerate(optimizer.inner.state.values()):
            tensors |= {f"{key}{number}": value for key, value in state.items() if torch.is_tensor(value)}
        start_torch_distributed()
        for number in range(2):
            begin = time.perf_counter()
            future = dcp.async_save(tensors, checkpoint_id=str(folder / f"dcp{number}"))
            finding[f"stall_ms_{number}"] = to_ms(time.perf_counter() - begin, 1)
            future.result()
            finding[f"whole_s_{number}"] = round(time.perf_counter() - begin, 2)
        dist.destroy_process_group()
