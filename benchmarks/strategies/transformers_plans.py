"""Tensor parallelism of whole models against ``tp_plan="auto"`` of Transformers 5: losses, bytes and time per step, in turns.

    python benchmarks/strategies/transformers_plans.py            # four families, two ranks, on this machine's processors
    python benchmarks/strategies/transformers_plans.py --family llama --rounds 100

Both sides train the same model from the same weights in the same processes: forward, backward and SGD, first some steps whose
losses are compared with one process's, then steps in turns A B A B …; reported is the median of the ratios of neighbours. Bytes are
what a rank sends in a step, read off the tensors of all collectives that it calls (bandwidth-optimal algorithms). Attention and
experts are those that Transformers takes by default. A result on CPU with gloo says nothing about NCCL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from counting import BytesSent, CountingCollectives
from launching import TRANSPORTS, print_machine, run_ranks, transports

RANKS = 2
FAMILIES = ("llama", "qwen3", "gemma2", "mixtral")
#: Steps whose losses are compared, and their learning rate.
STEPS, RATE = 5, 0.1


def settings(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return settings of the family's configuration."""
    made: dict[str, Any] = {
        "vocab_size": args.vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 3,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": max(RANKS, args.heads // 2),
        "max_position_embeddings": 2 * args.seq,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attention_dropout": 0.0,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if family in ("qwen3", "gemma2"):
        made["head_dim"] = args.hidden // args.heads
    if family == "mixtral":
        made |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return made


def run_rank(family: str, args: argparse.Namespace) -> None:
    """Run both sides in turns on one rank."""
    torch.set_num_threads(1)
    from transformers import AutoConfig, AutoModelForCausalLM

    import smdistributed.modelparallel.torch as smp

    config = {"tensor_parallel_degree": RANKS, "ddp": True, "optimize": "speed", "prescaled_batch": True}
    session = smp.init({**config, **TRANSPORTS[args.transport[0]]})
    # Ranks of one host exchange through memory that they share, where PyTorch's dispatcher sees nothing.
    through = CountingCollectives(session.ranks.collectives)
    object.__setattr__(session.ranks, "collectives", through)  # the record is frozen
    folder = [tempfile.mkdtemp() if smp.rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    if smp.rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings(family, args))).save_pretrained(
            folder[0]
        )
    dist.barrier()

    def loaded(**options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder[0], dtype=torch.float32, **options).train()

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(args.vocabulary, (args.batch, args.seq), generator=generator) for _ in range(STEPS)]
    alone = _plain(loaded())
    expected = [alone(batch) for batch in batches]
    ours = _ours(loaded(), smp)
    theirs = _plain(loaded(tp_plan="auto"))
    sides: dict[str, Callable[[torch.Tensor], float]] = {"ours": ours, "transformers": theirs}
    off = dict.fromkeys(sides, 0.0)
    sent, calls = {}, {}
    for name, step in sides.items():
        for number, batch in enumerate(batches):
            through.sent, through.asked, counted = 0.0, 0, BytesSent()
            with counted:
                loss = step(batch)
            off[name] = max(off[name], abs(loss - expected[number]))
        if name == "ours":
            sent[name], calls[name] = through.sent, through.asked
        else:
            sent[name], calls[name] = counted.sent, counted.calls
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, step in sides.items():
            dist.barrier()
            start = time.perf_counter()
            step(batches[0])
            times[name].append(time.perf_counter() - start)
    if smp.rank() == 0:
        ratios = [a / b for a, b in zip(times["ours"], times["transformers"], strict=True)]
        record = {
            "case": family,
            "peer": 'tp_plan="auto"',
            "transport": args.transport[0],
            "ranks": RANKS,
            "shape": [args.layers, args.batch, args.seq, args.hidden],
            "loss_off": {name: float(f"{value:.2g}") for name, value in off.items()},
            "kib_sent": {name: round(value / 1024, 1) for name, value in sent.items()},
            "bytes_ratio": round(sent["ours"] / sent["transformers"], 3),
            "collectives": calls,
            "ours_ms": round(1e3 * statistics.median(times["ours"]), 2),
            "peer_ms": round(1e3 * statistics.median(times["transformers"]), 2),
            "time_ratio": round(statistics.median(ratios), 3),
            "ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
        }
        print(json.dumps(record), flush=True)
    smp.shutdown()


def _plain(model: Any) -> Callable[[torch.Tensor], float]:
    """Return a step of one process, which Transformers' plans leave as it is."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(ids: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _ours(net: Any, smp: Any) -> Callable[[torch.Tensor], float]:
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))

    @smp.step
    def forward_backward(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss.detach()

    def step(ids: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = float(forward_backward(ids).reduce_mean())
        optimizer.step()
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="default: all")
    parser.add_argument("--transport", choices=list(TRANSPORTS), action="append", help="default: all")
    sizes = {"rounds": 40, "batch": 4, "seq": 64, "hidden": 128, "heads": 4, "layers": 4, "vocabulary": 512}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--rank-of", choices=FAMILIES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of, args)
        return
    print_machine()
    words = [word for name in sizes for word in (f"--{name}", getattr(args, name))]
    for family in args.family or FAMILIES:
        for transport in transports(args.transport):
            run_ranks(__file__, RANKS, ["--rank-of", family, "--transport", transport, *words])


if __name__ == "__main__":
    main()
