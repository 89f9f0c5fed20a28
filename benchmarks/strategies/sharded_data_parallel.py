"""Sharded data parallel training against PyTorch's FSDP2: time in turns, and bytes against the theoretical minimum.

    python benchmarks/strategies/sharded_data_parallel.py                 # two ranks, one group of four, and two groups of two
    python benchmarks/strategies/sharded_data_parallel.py --case 2x2 --rounds 20

Each case trains the same GPT (8 layers, hidden 256) twice in the same processes: with this library, everything sharded
and at most two units gathered at once, and with FSDP2 (``fully_shard`` on every block and the root; HSDP with several
groups), in turns A B A B …; reported is the median of the ratios of neighbours. First both go over torch.distributed; then
this library's ranks share memory, which the peer cannot. Bytes are read off the tensors at the
collectives and divided by k·3(s−1)/s·Ψb + 2(r−1)/r·Ψb/s. A result on CPU with gloo says nothing about NCCL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import TRANSPORTS, print_machine, run_ranks, transports

ROOT = Path(__file__).resolve().parents[2]
#: Ranks and sharding degree.
CASES = {"2": (2, 2), "4": (4, 4), "2x2": (4, 2)}


def make_gpt():
    """Make the model of the main job, larger."""
    import torch

    sys.path.insert(0, str(ROOT / "entrypoints"))
    import train_gpt

    torch.manual_seed(0)
    return train_gpt.GPT(train_gpt.GPTConfig(layers=8, hidden=256, heads=8, seq_len=128))


def make_peer(ranks: int, degree: int, device_type: str):
    """Make the same model under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_gpt().to(device_type)
    shape, names = ((degree,), ("shard",)) if ranks == degree else ((ranks // degree, degree), ("replica", "shard"))
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run_rank(case: str, transport: str, rounds: int, batch: int) -> None:
    """Run both sides in turns on one rank."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    from counting import CountingCollectives

    import smdistributed.modelparallel.torch as smp

    ranks, degree = CASES[case]
    elements = sum(p.numel() for p in make_gpt().parameters())
    block = sum(p.numel() for p in make_gpt().blocks[0].parameters())
    session = smp.init(
        {
            "ddp": True,
            "sharded_data_parallel_degree": degree,
            "sdp_param_persistence_threshold": 0,
            "sdp_max_live_parameters": 2 * block,
            "sdp_gradient_clipping": 1e9,
            **TRANSPORTS[transport],
        }
    )
    collectives = CountingCollectives(session.ranks.collectives)
    session.ranks = replace(session.ranks, collectives=collectives)
    device = session.device
    ours = smp.DistributedModel(make_gpt())
    ours_optimizer = smp.DistributedOptimizer(torch.optim.AdamW(ours.parameters(), lr=1e-4))
    peer = make_peer(ranks, degree, device.type)
    peer_optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4)
    ids = torch.randint(256, (batch, 129), generator=torch.Generator().manual_seed(smp.rank())).to(device)

    @smp.step
    def step(tokens):
        loss = F.cross_entropy(ours(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        ours.backward(loss)
        return loss

    def ours_update() -> float:
        ours_optimizer.zero_grad()
        loss = step(ids).reduce_mean()
        ours_optimizer.step()
        return float(loss)

    def peer_update() -> float:
        peer_optimizer.zero_grad()
        loss = F.cross_entropy(peer(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        peer_optimizer.step()
        return float(loss.detach())

    for _ in range(4):  # warm up, and let this side learn its order
        mine, theirs = ours_update(), peer_update()
    # Gradients are averaged by both, so both learn the same.
    if abs(mine - theirs) > 1e-3 * abs(theirs):
        raise AssertionError(f"the two sides do not train the same model: losses {mine} and {theirs}")
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    collectives.sent = 0.0
    for _ in range(rounds):
        for name, run in (("ours", ours_update), ("peer", peer_update)):
            dist.barrier()
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    s, r, size = degree, ranks // degree, 4 * elements
    bound = 3 * (s - 1) / s * size + 2 * (r - 1) / r * size / s
    ratios = [a / b for a, b in zip(times["ours"], times["peer"], strict=True)]
    if smp.rank() == 0:
        live = ours.shards.scheduler
        result = {
            "case": case,
            "ranks": ranks,
            "peer": "FSDP2" if ranks == degree else "FSDP2, hybrid (HSDP)",
            "transport": transport,
            "sharding_degree": degree,
            "parameters": elements,
            "ours_ms": round(1e3 * statistics.median(times["ours"]), 1),
            "peer_ms": round(1e3 * statistics.median(times["peer"]), 1),
            "time_ratio": round(statistics.median(ratios), 3),
            "ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
            "bytes_over_bound": round(collectives.sent / rounds / bound, 4),
            "most_gathered_over_cap": round(live.peak / (2 * block), 3),
        }
        print(json.dumps(result), flush=True)
    smp.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--transport", choices=list(TRANSPORTS), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4, help="samples per rank")
    parser.add_argument("--rank-of", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of, args.transport[0], args.rounds, args.batch)
        return
    print_machine()
    for case in args.case or list(CASES):
        words = ["--rank-of", case, "--rounds", args.rounds, "--batch", args.batch]
        for transport in transports(args.transport):
            run_ranks(__file__, CASES[case][0], [*words, "--transport", transport])


if __name__ == "__main__":
    main()
