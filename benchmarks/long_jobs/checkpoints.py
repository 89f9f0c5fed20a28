"""Checkpoints: how long a save stalls training, at once and asynchronously; time and memory of loading; beside PyTorch's DCP.

    python benchmarks/long_jobs/checkpoints.py                 # 32 million parameters, two ranks, this machine's disk
    python benchmarks/long_jobs/checkpoints.py --ranks 1 --hidden 512 --folder /mnt/slow
    python benchmarks/long_jobs/checkpoints.py --folder /dev/shm --rounds 16   # without a disk
    python benchmarks/long_jobs/checkpoints.py --show                          # what is claimed: on a disk, and without one

Each round saves once at once and once with ``async_save``, and so does torch.distributed.checkpoint (DCP) with the same model
under FSDP2, all in turns. A save at once ends when the oldest checkpoint is removed, on both sides; its processor time is that of
all threads of all ranks. The *stall* is the time that the call takes away from training, its processor time that of the thread
that calls. ``--show`` measures on a disk and in memory, and says of each claim whether it is met, with the machine's load.
``reshard``: the checkpoint of all ranks is loaded by ranks that hold whole tensors, weights and state. Bounds: a save writes each
byte of the state once, so its least time is bytes ÷ the rate at which the same folder takes one plain file with fsync and a sha256,
measured here too; a load holds its shard and the largest tensor. Nothing is claimed about networks, or about how much slower steps
are while the thread writes: on a machine with fewer cores than ranks both share them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import print_machine, run_ranks
from torch import nn

#: Seconds of each round, by side and by what was measured.
Times = dict[tuple[str, str], list[float]]
#: Of ``--show``: the folder's kind, the case, the figure, and what is claimed of its median.
CLAIMS = (
    ("disk", "save", "time_ratio", 0.85),
    ("disk", "save", "processor_time_ratio", 0.7),
    ("memory", "save", "time_ratio", 0.7),
    ("memory", "save", "processor_time_ratio", 0.7),
    ("disk", "async stall", "over_sync", 0.04),
    ("memory", "async stall", "over_sync", 0.04),
)


def plain_rate(folder: Path, size: int) -> float:
    """Return the bytes per second of one file, hashed, written and forced to the disk."""
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


def run_rank(folder: Path, layers: int, hidden: int, rounds: int, *, loads: bool = True) -> None:
    """Save in turns on one rank, then load once under PyTorch's memory profiler, unless ``loads`` is false."""
    from torch.profiler import ProfilerActivity, profile

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.checkpoint.folder_transaction import FolderRemoval
    from smp_runtime.job.session import current_session

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
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

    peer = Peer(nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(layers))), hidden, folder / "dcp")

    def save_ours(kind: str) -> None:
        smp.save_checkpoint(str(folder), tag=kind, async_save=kind == "async", num_kept_partial_checkpoints=2)

    train(), peer.train()
    sides = {"ours": (save_ours, train, smp.wait_for_checkpoint), "peer": (peer.save, peer.train, peer.wait)}
    times: Times = {}
    for number in range(rounds + 1):
        for kind in ("sync", "async"):
            for name, (save, step_once, wait) in sides.items():
                smp.barrier()
                start, busy, called = time.perf_counter(), time.process_time(), time.thread_time()
                save(kind)
                called = time.thread_time() - called
                if kind == "sync" and name == "ours":
                    FolderRemoval.of(current_session()).wait()
                took = time.perf_counter() - start
                worked: list[Any] = [None] * ranks
                dist.all_gather_object(worked, time.process_time() - busy)
                if number:  # the first allocates the buffers
                    times.setdefault((name, kind), []).append(took)
                    times.setdefault((name, f"{kind} processor"), []).append(sum(worked))
                    times.setdefault((name, f"{kind} call"), []).append(called)
                step_once()
                wait()
    elements = sum(p.numel() for p in model.parameters())
    if not loads:
        print_saves(times, folder, ranks, elements)
        smp.shutdown()
        return
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
    smp.shutdown()
    whole: dict[str, list[float]] = {"ours": [], "peer": []}
    smp.init({"ddp": True} if ranks > 1 else {})
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(layers))))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    train()
    for _ in range(rounds):
        for name, resume in (
            ("ours", lambda: smp.resume_from_checkpoint(str(folder), tag="sync")),
            ("peer", peer.load_whole),
        ):
            smp.barrier()
            start = time.perf_counter()
            resume()
            whole[name].append(time.perf_counter() - start)
    if smp.rank() == 0:
        peak_over_bound = round((shard + peak) / (shard + 4 * hidden * hidden), 3)
        loading = {"ours_s": round(load, 3), "peak_over_bound": peak_over_bound, "peer": None}
        print_saves(times, folder, ranks, elements, reshard=compared(whole["ours"], whole["peer"]), load=loading)
    smp.shutdown()


def print_saves(times: Times, folder: Path, ranks: int, elements: int, **others: dict[str, Any]) -> None:
    """Print the figures of saving, and others by their case, on the first rank."""
    if dist.get_rank() != 0:
        return
    saved = sum(file.stat().st_size for file in (folder / "sync_partial").iterdir())
    plain = saved / plain_rate(folder, saved)
    common = {"ranks": ranks, "parameters": elements, "checkpoint_MB": round(saved / 1e6, 1), "peer": "torch DCP"}
    synchronous = statistics.median(times["ours", "sync"])
    save = compared(times["ours", "sync"], times["peer", "sync"]) | {"over_plain_file": round(synchronous / plain, 2)}
    save |= compared(times["ours", "sync processor"], times["peer", "sync processor"], "processor_")
    stall = compared(times["ours", "async"], times["peer", "async"])
    # Of neighbors, like the other ratios; the call of rank 0, which does most.
    over_sync = [a / b for a, b in zip(times["ours", "async"], times["ours", "sync"], strict=True)]
    stall["over_sync"] = round(statistics.median(over_sync), 3)
    stall["over_sync_quartiles"] = [round(q, 3) for q in statistics.quantiles(over_sync, n=4)[::2]]
    processor = times["ours", "sync processor"]
    called = [ranks * a / b for a, b in zip(times["ours", "async call"], processor, strict=True)]
    stall["processor_over_sync"] = round(statistics.median(called), 3)
    stall["peers_over_its_sync"] = round(
        statistics.median(times["peer", "async"]) / statistics.median(times["peer", "sync"]), 3
    )
    for case, figures in {"save": save, "async stall": stall, **others}.items():
        print(json.dumps({"case": case, **common, **figures}), flush=True)


def compared(ours: list[float], theirs: list[float], what: str = "") -> dict[str, Any]:
    """Return the seconds of both sides, and the ratio of neighbours."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        f"{what}ours_s": round(statistics.median(ours), 4),
        f"{what}peer_s": round(statistics.median(theirs), 4),
        f"{what}time_ratio": round(statistics.median(ratios), 3),
        f"{what}ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
    }


class Peer:
    """The same model under FSDP2 (DDP-like on one rank), saved and loaded by torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module, hidden: int, folder: Path) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.hidden, self.folder = hidden, folder
        if dist.get_world_size() > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            model = fully_shard(model, mesh=mesh)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.running: Any = None
        # Its thread talks while the next step does.
        self.of_saves = dist.new_group(backend="gloo")
        self.number = 0
        self.newest: Path | None = None

    def train(self) -> None:
        """Train for one step."""
        self.optimizer.zero_grad()
        self.model(torch.ones(4, self.hidden)).square().mean().backward()
        self.optimizer.step()

    def save(self, kind: str) -> None:
        """Save into a new folder; those before the last two are removed, as this library does."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, state = get_state_dict(self.model, self.optimizer)
        self.number += 1
        target = self.folder / f"{kind}-{self.number}"
        content = {"model": weights, "optimizer": state}
        if kind == "async":
            self.running = dcp.async_save(content, checkpoint_id=target, process_group=self.of_saves)
        else:
            dcp.save(content, checkpoint_id=target)
            self.newest = target
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / f"{kind}-{self.number - 4}", ignore_errors=True)

    def wait(self) -> None:
        """Block until an asynchronous save is written."""
        if self.running is not None:
            self.running.result()
            self.running = None

    def load_whole(self) -> None:
        """Load the newest checkpoint into a model that every rank holds whole."""
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model = nn.Sequential(*(nn.Linear(self.hidden, self.hidden) for _ in self.model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        weights, state = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": state}
        dcp.load(content, checkpoint_id=self.newest)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def show(ranks: int, layers: int, hidden: int, rounds: int) -> None:
    """Measure saving on a disk and in memory, one after the other, and print which claims are met."""
    words: list[object] = ["--layers", layers, "--hidden", hidden, "--rounds", rounds]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for kind, place in (("memory", "/dev/shm"), ("disk", tempfile.gettempdir())):
        start, load = time.monotonic(), os.getloadavg()[0]
        with tempfile.TemporaryDirectory(dir=place) as folder:
            command = [sys.executable, __file__, "--ranks", str(ranks), "--folder", folder, "--saves-only"]
            done = subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=1200)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                figures = json.loads(line)
                found[kind, figures["case"]] = figures
                print(kind, line, flush=True)
        if done.returncode:
            print(done.stderr[-2000:])
        seconds = time.monotonic() - start
        print(f"{kind}: {seconds:.0f} s, load {load:.1f} before and {os.getloadavg()[0]:.1f} after", flush=True)
    for kind, case, figure, most in CLAIMS:
        value = found.get((kind, case), {}).get(figure)
        verdict = "not measured" if value is None else "met" if value <= most else "missed"
        print(f"{kind:7} {case:12} {figure:22} {value}  ≤ {most}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--show", action="store_true", help="16 rounds on a disk and in memory, and what they show")
    parser.add_argument("--saves-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_in:
        run_rank(args.rank_in, args.layers, args.hidden, args.rounds, loads=not args.saves_only)
        return
    print_machine()
    if args.show:
        show(args.ranks, args.layers, args.hidden, args.rounds)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        words: list[object] = ["--rank-in", folder]
        for name in ("layers", "hidden", "rounds"):
            words += [f"--{name}", getattr(args, name)]
        words += ["--saves-only"] * args.saves_only
        run_ranks(__file__, args.ranks, words)


if __name__ == "__main__":
    main()
