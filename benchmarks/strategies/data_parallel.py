"""Data parallel training against PyTorch's own: time in turns, and bytes against the theoretical minimum.

    python benchmarks/strategies/data_parallel.py            # all cases, on this machine's processors
    python benchmarks/strategies/data_parallel.py --case zero --transport torch.distributed --rounds 20

Each case trains the same GPT (8 layers, hidden 256) twice in the same processes: with this library and with the peer, in
turns A B A B …; reported is the median of the ratios of neighbours. First both go over torch.distributed; then this library's
ranks share memory, which the peer cannot. Bytes are read off the tensors at the collectives
and divided by the bandwidth-optimal minimum. A result on CPU with gloo says nothing about NCCL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import PEERS, TRANSPORTS, print_machine, run_ranks, transports

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "single": (1, "plain PyTorch", {}),
    "ddp": (2, "torch DDP", {"ddp": True}),
    "zero": (2, "torch ZeroRedundancyOptimizer", {"ddp": True, "shard_optimizer_state": True}),
}


def make_gpt():
    """Make the model of the main job, larger."""
    import torch

    sys.path.insert(0, str(ROOT / "entrypoints"))
    import train_gpt

    torch.manual_seed(0)
    return train_gpt.GPT(train_gpt.GPTConfig(layers=8, hidden=256, heads=8, seq_len=128))


def run_rank(case: str, transport: str, rounds: int, batch: int, precision: str) -> None:
    """Run both sides in turns on one rank."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    from counting import CountingCollectives, bytes_bound

    import smdistributed.modelparallel.torch as smp

    config = {**CASES[case][2], **TRANSPORTS[transport], **({precision: True} if precision != "fp32" else {})}
    session = smp.init(config)
    collectives = CountingCollectives(session.ranks.collectives)
    session.ranks = replace(session.ranks, collectives=collectives)
    device = session.device
    ours = smp.DistributedModel(make_gpt())
    ours_optimizer = smp.DistributedOptimizer(torch.optim.AdamW(ours.parameters(), lr=1e-4))
    peer = make_gpt().to(device)
    peer_module = peer
    if case != "single":
        peer = torch.nn.parallel.DistributedDataParallel(peer, process_group=smp.get_dp_process_group())
    if case == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        peer_optimizer = ZeroRedundancyOptimizer(peer_module.parameters(), torch.optim.AdamW, lr=1e-4)
    else:
        peer_optimizer = torch.optim.AdamW(peer_module.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(smp.rank())
    ids = torch.randint(256, (batch, 129), generator=generator).to(device)

    @smp.step
    def step(tokens):
        loss = F.cross_entropy(ours(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        ours.backward(loss)
        return loss

    def ours_step() -> float:
        ours_optimizer.zero_grad()
        loss = step(ids).reduce_mean()
        ours_optimizer.step()
        return float(loss)

    def peer_step() -> float:
        peer_optimizer.zero_grad()
        loss = F.cross_entropy(peer(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        peer_optimizer.step()
        return float(loss.detach())

    for _ in range(4):  # warm up, and let both measure their order of gradients
        ours_step(), peer_step()
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    collectives.sent = 0.0
    for _ in range(rounds):
        for name, run in (("ours", ours_step), ("peer", peer_step)):
            times[name].append(_timed(run, smp))
    elements = sum(p.numel() for p in peer_module.parameters())
    ranks = smp.dp_size()
    bound = bytes_bound(elements, ranks, precision, sharded=case == "zero")
    ratios = [a / b for a, b in zip(times["ours"], times["peer"], strict=True)]
    if smp.rank() == 0:
        print(
            json.dumps(
                {
                    "case": case,
                    "precision": precision,
                    "ranks": ranks,
                    "peer": CASES[case][1],
                    "transport": transport if ranks > 1 else None,
                    "parameters": elements,
                    "ours_ms": round(1e3 * statistics.median(times["ours"]), 1),
                    "peer_ms": round(1e3 * statistics.median(times["peer"]), 1),
                    "time_ratio": round(statistics.median(ratios), 3),
                    "ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
                    "bytes_over_bound": round(collectives.sent / rounds / bound, 4) if bound else None,
                }
            ),
            flush=True,
        )
    smp.shutdown()


def _timed(run: Callable[[], float], smp) -> float:
    if smp.size() > 1:
        import torch.distributed as dist

        dist.barrier(group=smp.get_dp_process_group())
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--transport", choices=list(TRANSPORTS), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4, help="samples per rank")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--rank-of", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of, args.transport[0], args.rounds, args.batch, args.precision)
        return
    print_machine()
    words = ["--rounds", args.rounds, "--batch", args.batch, "--precision", args.precision]
    for case in args.case or list(CASES):
        ranks = CASES[case][0]
        for transport in transports(args.transport) if ranks > 1 else [PEERS]:
            run_ranks(__file__, ranks, ["--rank-of", case, "--transport", transport, *words])


if __name__ == "__main__":
    main()
