"""What one GPU shows of this library: overhead at degree 1, MFU, peak memory with checkpointing and offloading, and compile gain.

    python benchmarks/gpu.py                                          # a GPT of 350 million parameters in bfloat16
    python benchmarks/gpu.py --device cpu --layers 2 --hidden 64 --heads 2 --seq 32 --rounds 2     # whether it runs

One process and one GPU; ranks of a job do the same beside their collectives. ``overhead``: a step of the wrapped model (forward,
backward, AdamW) beside the same in plain PyTorch, in turns, as the median of the ratios of neighbours. ``mfu``: FLOPs that the
model needs (PyTorch's count of forward and backward of the plain model) ÷ time ÷ the peak that NVIDIA states for the type.
``compile``: blocks compiled by ``torch.compile`` in both; ``compile gain``: the wrapped model with and without. ``checkpointing``
and ``offloading``: each block marked; time and peak of allocated memory ÷ those of the wrapped model without. On CPU, where
memory is not counted and no peak is known, these figures are null.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from launching import print_machine
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import smdistributed.modelparallel.torch as smp
from smp_config.machine.gpus import gpus

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "entrypoints"))
import train_gpt

Step = Callable[[], None]


def net_of(args: argparse.Namespace, *, compiled: bool = False) -> train_gpt.GPT:
    """The model, the same in every case."""
    torch.manual_seed(0)
    config = train_gpt.GPTConfig(layers=args.layers, hidden=args.hidden, heads=args.heads, seq_len=args.seq)
    net = train_gpt.GPT(config)
    for block in net.blocks if compiled else ():
        block.compile()
    return net


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of the next byte, computed in bfloat16 where there is a GPU."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(ids)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def plain(args: argparse.Namespace, ids: torch.Tensor, *, compiled: bool = False) -> Step:
    """A step in plain PyTorch."""
    model = net_of(args, compiled=compiled).to(ids.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=ids.is_cuda or None)

    def run() -> None:
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()

    return run


def wrapped(args: argparse.Namespace, ids: torch.Tensor, *, compiled: bool = False, checkpointed: bool = False) -> Step:
    """The same step with this library."""
    net = net_of(args, compiled=compiled)
    for block in net.blocks if checkpointed else ():
        smp.set_activation_checkpointing(block)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def step(batch: torch.Tensor) -> None:
        model.backward(loss_of(model, batch))

    def run() -> None:
        optimizer.zero_grad()
        step(ids)
        optimizer.step()

    return run


def seconds(run: Step) -> float:
    """Of one step, with all that it has left to the GPU."""
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compared(ours: Step, peer: Step, rounds: int, warm_up: int = 3) -> dict[str, Any]:
    """Both in turns, after steps that do not count."""
    times = [(seconds(ours), seconds(peer)) for _ in range(rounds + warm_up)][warm_up:]
    ratios = [a / b for a, b in times]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "time_ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
        "ours_ms": round(1e3 * statistics.median(a for a, _ in times), 2),
        "peer_ms": round(1e3 * statistics.median(b for _, b in times), 2),
    }


def peak_of(make: Callable[[], Step]) -> int | None:
    """Bytes allocated on the GPU at the most in the third step of a model that is made for this alone."""
    if not torch.cuda.is_available():
        return None
    run = make()
    run(), run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def flops_of(run: Step) -> int:
    """Of one step, as PyTorch counts matrix products, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def mfu_of(flops: int, milliseconds: float) -> float | None:
    """The part of the GPU's stated peak in bfloat16; None where that is not known."""
    words = set(torch.cuda.get_device_name().replace("-", " ").split()) if torch.cuda.is_available() else set()
    known = [gpu for gpu in gpus() if set(gpu.name.split()) <= words]
    peak = max(known, key=lambda gpu: len(gpu.name)).tflops("bf16") if known else None
    return None if peak is None else round(flops / (1e-3 * milliseconds) / (1e12 * peak), 4)


def say(case: str, **figures: Any) -> None:
    """A line of JSON."""
    print(json.dumps({"case": case, **figures}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rounds", type=int, default=12)
    for name, value in (("layers", 24), ("hidden", 1024), ("heads", 16), ("seq", 1024), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    print_machine()
    ids = torch.randint(0, 256, (args.batch, args.seq), device=args.device)
    smp.init({})
    ours, theirs = wrapped(args, ids), plain(args, ids)
    flops = flops_of(theirs)
    found = compared(ours, theirs, args.rounds)
    say("overhead", peer="plain PyTorch", **found)
    say(
        "mfu",
        flops=flops,
        mfu=mfu_of(flops, found["ours_ms"]),
        peer="plain PyTorch",
        peers_mfu=mfu_of(flops, found["peer_ms"]),
    )
    compiled = wrapped(args, ids, compiled=True)
    say("compile", peer="plain PyTorch, compiled", **compared(compiled, plain(args, ids, compiled=True), args.rounds))
    say("compile gain", peer="without", **compared(compiled, ours, args.rounds))
    del theirs, compiled
    none = peak_of(lambda: wrapped(args, ids))
    for case, parameters in (("checkpointing", {}), ("offloading", {"offload_activations": True, "microbatches": 4})):
        smp.shutdown()
        smp.init(parameters)
        step = wrapped(args, ids, checkpointed=True)
        peer = wrapped(args, ids)
        figures = compared(step, peer, args.rounds)
        del step, peer
        peak = peak_of(lambda: wrapped(args, ids, checkpointed=True))
        say(case, peer="wrapped, without", **figures, peak_bytes=peak, peak_over_none=peak and none and peak / none)
    smp.shutdown()


if __name__ == "__main__":
    main()
