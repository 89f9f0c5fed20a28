"""What activation checkpointing and offloading cost and save, per strategy, in one process.

    python benchmarks/strategies/activation_checkpointing.py
    python benchmarks/strategies/activation_checkpointing.py --device cuda --layers 24 --hidden 2048 --seq 2048 --batch 4

A GPT is trained with and without checkpointing in turns (A B A B …); reported is the median of the ratios of neighbours.
Bytes are counted at every operation (``live_bytes.py``), and divided by the formula of
docs/how-it-works/activation-checkpointing.md.
On a GPU the offloaded steps are also timed against steps that only checkpoint; the part of the copies that is hidden
behind compute is one minus what they add to a step, over the time that the same copies take alone. On CPU copies are made
at once, so their time says nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.utils.checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from live_bytes import LiveBytes
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "entrypoints"))


PEER = "torch, each"


class Peer(nn.Module):
    """A layer under PyTorch's own checkpointing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)


def make(args: argparse.Namespace, strategy: str | None) -> nn.Module:
    """Make a wrapped stack of layers."""
    import train_gpt

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    config = train_gpt.GPTConfig(args.layers, args.hidden, args.heads, args.seq)
    net = nn.Sequential(*[train_gpt.Block(config) for _ in range(args.layers)])
    if strategy == PEER:
        net = nn.Sequential(*[Peer(block) for block in net])
    elif strategy is not None:
        smp.set_activation_checkpointing(net, strategy=strategy)
    return smp.DistributedModel(net)


def step_of(model: nn.Module, args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """Return one forward and backward pass as a function."""
    import smdistributed.modelparallel.torch as smp

    x = torch.randn(args.batch, args.seq, args.hidden, device=device)

    @smp.step
    def step(inputs):
        inputs = inputs.detach().requires_grad_()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(inputs).sum()
        model.backward(loss)

    def run() -> None:
        model.zero_grad()
        step(x)

    return run


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of one step; on CPU of the processor, which other programs do not lengthen."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def expected(args: argparse.Namespace, strategy: str | None, size: int = 4) -> float:
    """Return the most bytes alive by the formula, in fp32."""
    unit = args.batch * args.seq * args.hidden * size
    layer = 16 * unit + args.batch * args.seq * (args.heads + 4) * size
    if strategy is None:
        return args.layers * layer
    most = {"each": 1, "contiguous": args.layers}.get(strategy) or int(strategy.removeprefix("group_"))
    regions, last = -(-args.layers // most), args.layers % most or most
    before = most * layer + (regions - 2) * unit if regions > 1 else 0
    return max(last * layer + (regions - 1) * unit, before)


def counted(model: nn.Module, run: Callable[[], None]) -> int:
    """Count the most bytes alive: after forward, or after a recomputation."""
    live, at_turn = LiveBytes(model.parameters()), []
    handle = model.module.register_forward_hook(lambda _, __, output: at_turn.append(live.now - output.nbytes))
    with live, live.watching_regions():
        run()
    handle.remove()
    return max([*at_turn, *live.recomputed])


def checkpointing(args: argparse.Namespace, device: torch.device) -> None:
    """Measure time and memory of every strategy against none."""
    import smdistributed.modelparallel.torch as smp

    smp.init({})
    plain = make(args, None)
    plain_step = step_of(plain, args, device)
    for strategy in args.strategy:
        model = make(args, strategy)
        step = step_of(model, args, device)
        ratios = []
        for index in range(args.rounds + 2):
            a, b = timed(step, device), timed(plain_step, device)
            if index >= 2:
                ratios.append(a / b)
        answer = {"case": strategy, "peer": "none", "time_ratio": round(statistics.median(ratios), 3)}
        answer["ratio_quartiles"] = [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]]
        if device.type == "cpu" and strategy != PEER:
            found, none = counted(model, step), counted(plain, plain_step)
            answer["bytes_over_none"] = round(found / none, 4)
            answer["bytes_over_formula"] = round(found / expected(args, strategy), 4)
            answer["none_over_formula"] = round(none / expected(args, None), 4)
        print(json.dumps(answer), flush=True)
    smp.shutdown()


def offloading(args: argparse.Namespace, device: torch.device) -> None:
    """Measure the memory of every horizon; on a GPU also how much of the copies is hidden."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.activations.activations import Activations

    unit = args.batch * args.seq * args.hidden * 4
    smp.init({})
    alone = step_of(make(args, "each"), args, device)
    base = statistics.median([timed(alone, device) for _ in range(args.rounds + 2)][2:])
    smp.shutdown()
    for horizon in args.horizon:
        smp.init({"offload_activations": True, "activation_loading_horizon": horizon})
        step = step_of(make(args, "each"), args, device)
        offloader = Activations.here().offloader
        for _ in range(2):
            step()
        offloader.figures.peak = offloader.figures.resident
        offloader.figures.left = offloader.figures.came = offloader.figures.late = 0
        times = [timed(step, device) for _ in range(args.rounds)]
        moved = (offloader.figures.left + offloader.figures.came) / args.rounds
        answer = {
            "case": f"each, horizon {horizon}",
            "horizon": horizon,
            "peak_regions": round(offloader.figures.peak / unit, 2),
        }
        answer |= {"late": offloader.figures.late, "moved_MB": round(moved / 1e6, 1)}
        if device.type == "cuda":
            copies = moved / 2 / speed(device, "out") + moved / 2 / speed(device, "in")
            added = statistics.median(times) - base
            answer |= {
                "step_ms": round(1e3 * statistics.median(times), 1),
                "checkpointing_only_ms": round(1e3 * base, 1),
            }
            answer |= {"copies_ms": round(1e3 * copies, 1), "hidden": round(1 - max(added, 0.0) / copies, 3)}
            answer["peak_MB"] = round(torch.cuda.max_memory_allocated() / 1e6)
            torch.cuda.reset_peak_memory_stats()
        print(json.dumps(answer), flush=True)
        smp.shutdown()


def speed(device: torch.device, way: str) -> float:
    """Return the bytes per second of one large copy from (``out``) or to the GPU."""
    host, there = (
        torch.empty(2**28, dtype=torch.uint8, pin_memory=True),
        torch.empty(2**28, dtype=torch.uint8, device=device),
    )
    source, target = (there, host) if way == "out" else (host, there)
    seconds = [timed(lambda: target.copy_(source, non_blocking=True), device) for _ in range(5)]
    return 2**28 / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--strategy", action="append", help="default: each, group_4, contiguous, and PyTorch's own")
    parser.add_argument("--horizon", type=int, action="append", help="default: 1, 2, 4, 8")
    parser.add_argument("--rounds", type=int, default=8)
    for name, value in (("layers", 16), ("hidden", 128), ("heads", 4), ("seq", 128), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    args.strategy = args.strategy or ["each", "group_4", "contiguous", PEER]
    args.horizon = args.horizon or [1, 2, 4, 8]
    device = torch.device(args.device)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {args}")
    checkpointing(args, device)
    offloading(args, device)


if __name__ == "__main__":
    main()
