"""Checkpoints: how long a save stalls training, at once and asynchronously; time and memory of loading.

    python benchmarks/checkpoints.py                 # 32 million parameters, two ranks, this machine's disk
    python benchmarks/checkpoints.py --ranks 1 --hidden 512 --folder /mnt/slow

Each round saves once at once and once with ``async_save``, in turns; the *stall* is the time that the call takes away
from training. Bounds: a save writes each byte of the state once, so its least time is bytes ÷ the rate at which the
same folder takes one plain file with fsync and a sha256, measured here too; a load holds its shard and the largest
tensor. Nothing is claimed about networks, or about how much slower steps are while the thread writes: on a machine
with fewer cores than ranks both share them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from launching import print_machine, run_ranks


def plain_rate(folder: Path, size: int) -> float:
    """Bytes per second of one file, hashed, written and forced to the disk."""
    import hashlib

    content = os.urandom(min(size, 2**26))
    start = time.perf_counter()
    hashlib.sha256(content)
    with open(folder / "plain", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rate = len(content) / (time.perf_counter() - start)
    (folder / "plain").unlink()
    return rate


def run_rank(folder: Path, layers: int, hidden: int, rounds: int) -> None:
    """One rank: saves in turns, then one load under PyTorch's memory profiler."""
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile

    import smdistributed.modelparallel.torch as smp

    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    smp.init({"ddp": True, "sharded_data_parallel_degree": ranks} if ranks > 1 else {})
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(layers))))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)

    def train() -> None:
        optimizer.zero_grad()
        step(torch.ones(4, hidden))
        optimizer.step()

    train()
    times: dict[str, list[float]] = {"sync": [], "async": []}
    for number in range(rounds + 1):
        for kind in times:
            smp.barrier()
            start = time.perf_counter()
            smp.save_checkpoint(str(folder), tag=kind, async_save=kind == "async", num_kept_partial_checkpoints=2)
            if number:  # the first allocates the buffers
                times[kind].append(time.perf_counter() - start)
            train()
            smp.wait_for_checkpoint()
    elements = sum(p.numel() for p in model.parameters())
    shard = 3 * 4 * elements / ranks
    # What is there already is reused: weights and moments are allocated before.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        start = time.perf_counter()
        smp.resume_from_checkpoint(str(folder))
        load = time.perf_counter() - start
    now = peak = 0
    # Mapped files are reported like memory, with the length of the file.
    mapped = {file.stat().st_size for file in folder.glob("*/*")}
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    events = [event for event in events if abs(event.nbytes()) not in mapped]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    if smp.rank() == 0:
        saved = sum(file.stat().st_size for file in (folder / "sync_partial").iterdir())
        rate = plain_rate(folder, saved)
        stalls = {kind: statistics.median(found) for kind, found in times.items()}
        figures = {
            "ranks": ranks,
            "parameters": elements,
            "checkpoint_MB": round(saved / 1e6, 1),
            "save_s": round(stalls["sync"], 3),
            "save_over_plain_file": round(stalls["sync"] / (saved / rate), 2),
            "async_stall_s": round(stalls["async"], 4),
            "async_over_sync": round(stalls["async"] / stalls["sync"], 3),
            "load_s": round(load, 3),
            "load_peak_over_bound": round((shard + peak) / (shard + 4 * hidden * hidden), 3),
        }
        print(json.dumps(figures), flush=True)
    smp.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_in:
        run_rank(args.rank_in, args.layers, args.hidden, args.rounds)
        return
    print_machine()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        words: list[object] = ["--rank-in", folder]
        for name in ("layers", "hidden", "rounds"):
            words += [f"--{name}", getattr(args, name)]
        run_ranks(__file__, args.ranks, words)


if __name__ == "__main__":
    main()
