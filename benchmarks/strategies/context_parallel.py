"""Context parallelism against PyTorch's ``context_parallel``: time in turns, bytes, and what a rank keeps for backward.

    python benchmarks/strategies/context_parallel.py                    # two and four ranks, all keys gathered and a ring
    python benchmarks/strategies/context_parallel.py --case "2 ring" --rounds 20

Each case trains the same GPT (4 layers, hidden 256) twice in the same processes, on one sample of 2,048 tokens: with this
library, which runs the model as it is, and with PyTorch's prototype, which needs the positions among its buffers, under
``DistributedDataParallel``. They take turns, A B A B …; reported is the median of the ratios of neighbors. First both go over
torch.distributed; then this library's ranks share memory, which the peer cannot. Bytes are those of keys, values and their
gradients, divided by the closed form 3 · 2(c−1)/c · b·s·k·d per layer. What a rank keeps is divided by 1/c of what one process
keeps. A result on CPU with gloo says nothing about NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import TRANSPORTS, print_machine, run_ranks, transports

ROOT = Path(__file__).resolve().parents[2]
#: Ranks and method.
CASES = {"2": (2, "all_gather"), "2 ring": (2, "ring"), "4": (4, "all_gather"), "4 ring": (4, "ring")}
LAYERS, HIDDEN, HEADS = 4, 256, 8


def make_gpt(tokens: int):
    """Make the model of the main job."""
    import torch

    sys.path.insert(0, str(ROOT / "entrypoints"))
    import train_gpt

    torch.manual_seed(0)
    return train_gpt.GPT(train_gpt.GPTConfig(layers=LAYERS, hidden=HIDDEN, heads=HEADS, seq_len=tokens))


def make_peer(tokens: int):
    """Make the same model with positions as an argument: PyTorch's code splits only the tensors that a script names."""
    from torch import nn

    class GivenPositions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = make_gpt(tokens)

        def forward(self, ids, positions):
            x = self.gpt.tokens(ids) + self.gpt.positions(positions)
            for block in self.gpt.blocks:
                x = block(x)
            return self.gpt.head(self.gpt.norm(x))

    return GivenPositions()


class KeptBytes:
    """Counts the memory of what a forward pass keeps for backward, without parameters.

    Attributes:
        total: bytes in the first block; later ones are not slowed down.
    """

    def __init__(self) -> None:
        self.total = 0

    @contextlib.contextmanager
    def counting(self, model) -> Iterator[None]:
        """Count in the block."""
        import torch

        if self.total:
            yield
            return
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        seen: dict[int, int] = {}

        def keep(tensor):
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()  # a DTensor has none
            if storage.data_ptr() not in parameters:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
        self.total = sum(seen.values())


def closed_form(ranks: int, batch: int, tokens: int) -> float:
    """Return the bytes that a rank sends per step in float32: keys and values forward, again backward, and their gradients."""
    return LAYERS * 3 * 2 * (ranks - 1) / ranks * batch * tokens * HIDDEN * 4


def alone(ids, tokens: int) -> tuple[float, int]:
    """Return the loss and kept bytes of one process."""
    import torch.nn.functional as F

    model, kept = make_gpt(tokens), KeptBytes()
    with kept.counting(model):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    return float(loss.detach()), kept.total


def mean_over_ranks(value: float) -> float:
    """Return the mean of the ranks' values."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def our_side(tokens: int, ids) -> tuple[Callable[[], float], KeptBytes]:
    """Return an update of this library as a function, which returns the loss."""
    import torch
    import torch.nn.functional as F

    import smdistributed.modelparallel.torch as smp

    model, kept = smp.DistributedModel(make_gpt(tokens)), KeptBytes()
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

    @smp.step
    def step(sample):
        with kept.counting(model):
            loss = F.cross_entropy(model(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
        model.backward(loss)
        return loss

    def update() -> float:
        optimizer.zero_grad()
        loss = step(ids).reduce_mean()
        optimizer.step()
        return float(loss)

    return update, kept


def peer_side(tokens: int, ids) -> tuple[Callable[[], float], KeptBytes]:
    """Return an update of PyTorch's prototype as a function, which returns the loss of this rank's tokens."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from context_peers import cut
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model, kept = torch.nn.parallel.DistributedDataParallel(make_peer(tokens)), KeptBytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def update() -> float:
        optimizer.zero_grad()
        inputs, targets = ids[:, :-1].clone(), ids[:, 1:].clone()
        positions = torch.arange(tokens)[None].repeat(len(ids), 1)
        with cut(mesh, inputs, targets, positions):
            with kept.counting(model):
                loss = F.cross_entropy(model(inputs, positions).flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        return float(loss.detach())

    return update, kept


def run_rank(case: str, transport: str, rounds: int, tokens: int, batch: int) -> None:
    """Run both sides in turns on one rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from context_peers import PeerBytes, install

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.context.attention.traffic import counters_of
    from smp_runtime.context.exchange import ContextGroup

    ranks, method = CASES[case]
    parameters = {"ddp": True, "context_parallel_degree": ranks, "context_parallel": method}
    session = smp.init({**parameters, **TRANSPORTS[transport]})
    install(method)
    peer_bytes = PeerBytes()
    our_bytes = counters_of(ContextGroup.of(session.ranks))
    ids = torch.randint(256, (batch, tokens + 1), generator=torch.Generator().manual_seed(1))
    one_loss, one_kept = alone(ids, tokens)
    ours, our_kept = our_side(tokens, ids)
    peer, peer_kept = peer_side(tokens, ids)
    first = ours(), mean_over_ranks(peer())
    for mine in first:
        if abs(mine - one_loss) > 1e-5 * one_loss:
            raise AssertionError(f"the losses are {first}, and {one_loss} in one process")
    ours(), peer()
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    losses = {"ours": 0.0, "peer": 0.0}
    peer_bytes.sent = our_bytes.sent = 0
    for _ in range(rounds):
        for name, run in (("ours", ours), ("peer", peer)):
            dist.barrier()
            start = time.perf_counter()
            losses[name] = run()
            dist.barrier()  # it ends with the slowest rank
            times[name].append(time.perf_counter() - start)
    bound = closed_form(ranks, batch, tokens) * rounds
    sent, theirs, last = (mean_over_ranks(value) for value in (our_bytes.sent, peer_bytes.sent, losses["peer"]))
    kept, peers_kept = (mean_over_ranks(side.total) * ranks / one_kept for side in (our_kept, peer_kept))
    ratios = [a / b for a, b in zip(times["ours"], times["peer"], strict=True)]
    if smp.rank() == 0:
        result = {
            "case": case,
            "ranks": ranks,
            "peer": f"context_parallel, {'ring' if method == 'ring' else 'keys gathered'}",
            "transport": transport,
            "tokens": tokens,
            "ours_ms": round(1e3 * statistics.median(times["ours"]), 1),
            "peer_ms": round(1e3 * statistics.median(times["peer"]), 1),
            "time_ratio": round(statistics.median(ratios), 3),
            "ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
            "bytes_over_bound": round(sent / bound, 4),
            "peer_bytes_over_bound": round(theirs / bound, 4),
            "kept_over_share": round(kept, 4),
            "peer_kept_over_share": round(peers_kept, 4),
            "loss_difference": abs(first[0] - one_loss),
            "peer_loss_difference": abs(first[1] - one_loss),
            "difference_after_all_steps": abs(losses["ours"] - last),
        }
        print(json.dumps(result), flush=True)
    smp.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--transport", choices=list(TRANSPORTS), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sample")
    parser.add_argument("--batch", type=int, default=1, help="samples")
    parser.add_argument("--rank-of", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of, args.transport[0], args.rounds, args.tokens, args.batch)
        return
    print_machine()
    for case in args.case or list(CASES):
        words = ["--rank-of", case, "--rounds", args.rounds, "--tokens", args.tokens, "--batch", args.batch]
        for transport in transports(args.transport):
            run_ranks(__file__, CASES[case][0], [*words, "--transport", transport])


if __name__ == "__main__":
    main()
