"""Tensor parallel layers against DTensor's ``parallelize_module``: time in turns, and bytes against the minimum.

    python benchmarks/strategies/tensor_parallel.py             # both cases, two ranks, on this machine's processors
    python benchmarks/strategies/tensor_parallel.py --hidden 512 --rounds 100

Each case runs forward and backward of the same block twice in the same processes: with this library (``optimize:
speed``, a common batch) and with the same block under ``ColwiseParallel`` and ``RowwiseParallel``, in turns A B A B …;
reported is the median of the ratios of neighbours. Outputs and input gradients of both are compared first. What is won
is the work per operation, so small shapes show it and large ones less. A result on CPU with gloo says nothing about NCCL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import TRANSPORTS, print_machine, run_ranks, transports

RANKS = 2
CASES = ("mlp", "layer")


def make_peer(case: str, hidden: int, heads: int, ranks: int):
    """Make the block in plain PyTorch, and its plan for ``parallelize_module``."""
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if case == "layer":
                self.norm1 = nn.LayerNorm(hidden)
                self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
                self.dense = nn.Linear(hidden, hidden)
            self.norm2 = nn.LayerNorm(hidden)
            self.dense1, self.dense2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x):  # [batch, seq, hidden]
            if case == "layer":
                normed = self.norm1(x)
                maps = (self.query, self.key, self.value)
                query, key, value = (m(normed).unflatten(-1, (heads // ranks, -1)).transpose(1, 2) for m in maps)
                context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
                x = x + self.dense(context.transpose(1, 2).flatten(2))
            return x + self.dense2(F.gelu(self.dense1(self.norm2(x))))

    names = ["query", "key", "value", "dense1"] if case == "layer" else ["dense1"]
    plan = {name: ColwiseParallel() for name in names}
    plan |= {name: RowwiseParallel() for name in (["dense", "dense2"] if case == "layer" else ["dense2"])}
    return Block(), plan


def run_rank(case: str, transport: str, rounds: int, batch: int, seq: int, hidden: int, heads: int) -> None:
    """Run both sides in turns on one rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    torch.set_num_threads(1)
    from counting import CountingCollectives

    import smdistributed.modelparallel.torch as smp

    config = {"tensor_parallel_degree": RANKS, "ddp": True, "optimize": "speed", "prescaled_batch": True}
    config |= TRANSPORTS[transport]
    session = smp.init(config)
    collectives = CountingCollectives(session.ranks.collectives)
    object.__setattr__(session.ranks, "collectives", collectives)  # the record is frozen
    torch.manual_seed(0)
    peer, plan = make_peer(case, hidden, heads, RANKS)
    names = {"norm1": "attention.pre_layernorm", "norm2": "output.pre_layernorm"}
    names |= {name: f"attention.{name}" for name in ("query", "key", "value", "dense")}
    names |= {name: f"output.{name}" for name in ("dense1", "dense2")}
    common = {"hidden_size": hidden, "hidden_dropout_prob": 0.0, "pre_layernorm": True, "post_layernorm": False}
    if case == "layer":
        attention = {
            "num_attention_heads": heads,
            "attention_head_size": hidden // heads,
            "attention_dropout_prob": 0.0,
        }
        ours = smp.nn.DistributedTransformerLayer(
            **common, **attention, intermediate_size=4 * hidden, causal_mask_size=seq
        )
    else:
        ours = smp.nn.DistributedTransformerOutputLayer(**common, intermediate_size=4 * hidden)
    state = {}
    for name, value in peer.state_dict().items():
        module, _, kind = name.partition(".")
        ours_name = f"{names[module]}.{kind}"
        state[ours_name if case == "layer" else ours_name.removeprefix("output.")] = value.clone()
    ours.load_state_dict(state)
    parallelize_module(peer, init_device_mesh("cpu", (RANKS,)), plan)
    x = torch.randn(batch, seq, hidden, requires_grad=True)
    weight = torch.randn(batch, seq, hidden)

    def run(module, inputs):
        x.grad = None
        output = module(inputs)
        output = output[0] if isinstance(output, tuple) else output
        (output * weight).sum().backward()
        return output.detach(), x.grad

    def ours_pass():
        return run(ours, (x, None) if case == "layer" else x)

    def peer_pass():
        return run(peer, x)

    for mine, theirs in zip(ours_pass(), peer_pass(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    for _ in range(10):
        ours_pass(), peer_pass()
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    collectives.sent = 0.0
    for _ in range(rounds):
        for name, one_pass in (("ours", ours_pass), ("peer", peer_pass)):
            dist.barrier()
            start = time.perf_counter()
            one_pass()
            times[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(times["ours"], times["peer"], strict=True)]
    all_reduces = 4 if case == "layer" else 2
    bound = all_reduces * 2 * (RANKS - 1) / RANKS * batch * seq * hidden * 4
    if smp.rank() == 0:
        print(
            json.dumps(
                {
                    "case": case,
                    "ranks": RANKS,
                    "peer": "DTensor parallelize_module",
                    "transport": transport,
                    "shape": [batch, seq, hidden],
                    "ours_ms": round(1e3 * statistics.median(times["ours"]), 2),
                    "peer_ms": round(1e3 * statistics.median(times["peer"]), 2),
                    "time_ratio": round(statistics.median(ratios), 3),
                    "ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
                    "bytes_over_bound": round(collectives.sent / rounds / bound, 4),
                }
            ),
            flush=True,
        )
    smp.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: both")
    parser.add_argument("--transport", choices=list(TRANSPORTS), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rank-of", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of, args.transport[0], args.rounds, args.batch, args.seq, args.hidden, args.heads)
        return
    print_machine()
    for case in args.case or CASES:
        words: list[object] = ["--rank-of", case]
        for name in ("rounds", "batch", "seq", "hidden", "heads"):
            words += [f"--{name}", getattr(args, name)]
        for transport in transports(args.transport):
            run_ranks(__file__, RANKS, [*words, "--transport", transport])


if __name__ == "__main__":
    main()
