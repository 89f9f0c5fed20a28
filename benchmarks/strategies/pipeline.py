"""Pipeline parallelism: idle time against the closed form, and time against PyTorch's own pipeline and one process.

    python benchmarks/strategies/pipeline.py                    # all cases, on this machine's processors
    python benchmarks/strategies/pipeline.py --case torch --rounds 20

``sleep``: a chain of four stages whose modules sleep 20 ms forward and 40 ms backward, 8 microbatches: makespan ÷ (m + p − 1)(f
+ b), the closed form of 1F1B and GPipe; each rank is bound to one processor, as ``mpirun --bind-to core`` does. ``sleep-zero``:
the same in ``zero_bubble``, where half of backward is the weights'; idle time ÷ that of 1F1B's closed form. ``sleep-waiting``:
``sleep`` with ``"fast_mode": false``. ``sleep-torch``: the same chain in torch.distributed.pipelining's Schedule1F1B;
``sleep-torch-interleaved`` and ``sleep-torch-zbv``: the same work as eight links, two on each rank, in its
ScheduleInterleaved1F1B and ScheduleZBVZeroBubble. ``torch``: a GPT (8 layers, hidden 256, split equally by both) on 2 ranks
with 4 microbatches, in turns with Schedule1F1B; ``torch-zero``: the same in ``zero_bubble``, beside the same peer. ``alone``:
the same GPT with its tied output layer, partitioned automatically, in turns with one process with one thread. ``gpt2``: the
same against one process with Transformers' GPT-2 as it comes (GPT2LMHeadModel of the same size, no dropout, no cache).
``live``: that GPT on 4 stages with 8 microbatches in ``interleaved`` and then in ``zero_bubble``: the most bytes of activations
and gradients that each stage holds at once, counted at every operation; that of the fullest stage ÷ that in ``interleaved``.
Bytes are counted at the transport and divided by what must cross the boundary. All ranks are on this machine and read one
clock: a step lasts from when the first rank begins it until the last has ended it. A result on CPU says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_parallel import make_gpt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import print_machine, run_ranks

FORWARD, BACKWARD = 0.020, 0.040
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "sleep": (4, {"partitions": 4, "microbatches": 8, "auto_partition": False, "default_partition": 0}),
    "sleep-waiting": (
        4,
        {"partitions": 4, "microbatches": 8, "auto_partition": False, "default_partition": 0, "fast_mode": False},
    ),
    "sleep-zero": (
        4,
        {
            "partitions": 4,
            "microbatches": 8,
            "auto_partition": False,
            "default_partition": 0,
            "pipeline": "zero_bubble",
        },
    ),
    "sleep-zero-last": (
        4,
        {
            "partitions": 4,
            "microbatches": 8,
            "auto_partition": False,
            "default_partition": 3,
            "pipeline": "zero_bubble",
        },
    ),
    "sleep-last": (4, {"partitions": 4, "microbatches": 8, "auto_partition": False, "default_partition": 3}),
    "sleep-simple": (
        4,
        {
            "partitions": 4,
            "microbatches": 8,
            "auto_partition": False,
            "default_partition": 0,
            "pipeline": "simple",
            "active_microbatches": 8,
        },
    ),
    "sleep-torch": (4, {"partitions": 4, "microbatches": 8, "auto_partition": False, "default_partition": 0}),
    **{
        f"sleep-torch-{kind}": (
            4,
            {"partitions": 4, "microbatches": 8, "auto_partition": False, "default_partition": 0},
        )
        for kind in ("interleaved", "zbv")
    },
    "torch": (2, {"partitions": 2, "microbatches": 4}),
    "torch-zero": (2, {"partitions": 2, "microbatches": 4, "pipeline": "zero_bubble"}),
    "alone": (2, {"partitions": 2, "microbatches": 4, "memory_weight": 0.0}),
    "gpt2": (2, {"partitions": 2, "microbatches": 4, "memory_weight": 0.0}),
    "live": (4, {"partitions": 4, "microbatches": 8, "memory_weight": 0.0}),
}


def network(case: str) -> Any:
    """Make the GPT of the data parallel benchmark, with a tied output layer or its own one, or Transformers' GPT-2."""
    import torch

    if case == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        shape = {"n_layer": 8, "n_embd": 256, "n_head": 8, "n_positions": 128, "vocab_size": 256}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(**shape, **dropout, bos_token_id=0, eos_token_id=0, use_cache=False))
    model = make_gpt()
    if case.startswith("torch"):
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    return model


#: Seconds that this rank has slept, as they were: a sleep ends late when the processor has gone to rest meanwhile.
_slept = 0.0


def _sleep(seconds: float) -> None:
    global _slept
    began = time.perf_counter()
    time.sleep(seconds)  # stands for computing that needs no processor
    _slept += time.perf_counter() - began


def sleepers(smp: Any, stages: int) -> Any:
    """Make a chain of modules that only take time, one on each stage."""
    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            # First of all what is read: a module does not compute before its input is there.
            ctx.save_for_backward(x, weight)
            product = x * weight
            _sleep(FORWARD)  # whatever else runs on the processor
            return product

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors

            def of_weight():
                _sleep(BACKWARD / 2)
                return (gradient * x).sum(0)

            _sleep(BACKWARD / 2)
            return gradient * weight, None if smp.weight_gradient_later(weight, of_weight) else of_weight()

    class Sleeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return Sleep.apply(x, self.weight)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.links = nn.ModuleList()
            for stage in range(stages):
                with smp.partition(min(stage, smp.pp_size() - 1)):
                    self.links.append(Sleeper())

        def forward(self, x):
            for link in self.links:
                x = link(x)
            return x

    return Chain()


def run_sleep(smp: Any, rounds: int, case: str) -> dict[str, Any]:
    """Return the chain's makespan divided by the closed form."""
    import torch

    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[smp.rank() % len(processors)]})
    stages, count = smp.pp_size(), smp.state.cfg.microbatches
    chain, inputs, found = sleepers(smp, stages), torch.ones(count, 4), {}
    if case == "sleep-torch":
        run = _torch_chain(smp, chain.links[smp.pp_rank()], inputs)
    elif case.startswith("sleep-torch"):
        run = _torch_two_links(smp, case.rpartition("-")[2], inputs)
    else:
        model = smp.DistributedModel(chain)

        @smp.step
        def step(x):
            loss = model(x).sum()
            model.backward(loss)
            return loss

        def run() -> None:
            step(inputs)

    for _ in range(10):  # recorded, planned, and planned again
        run()
    spans, idle = [], []
    for _ in range(rounds):
        before = _slept
        spans.append(_timed(run, smp))
        idle.append(spans[-1] - statistics.mean(smp.allgather(_slept - before, smp.PP_GROUP)))
    closed = (count + stages - 1) * (FORWARD + BACKWARD)
    ratios = [span / closed for span in spans]
    if not case.startswith("sleep-torch"):
        found["most_in_flight"] = smp.allgather(model.pipeline.server.most_in_flight, smp.PP_GROUP)
        found["active_microbatches"] = smp.state.cfg.active_microbatches
    return {
        "closed_form_ms": round(1e3 * closed, 1),
        "makespan_over_closed_form": round(statistics.median(ratios), 4),
        "best": round(min(ratios), 4),
        # What is no sleep, as the mean of the ranks, ÷ that of the closed form.
        "idle_over_1f1b": round(statistics.median(idle) / ((stages - 1) * (FORWARD + BACKWARD)), 4),
        **found,
    }


def run_gpt(smp: Any, rounds: int, batch: int, case: str) -> dict[str, Any]:
    """Run our pipeline and a peer in turns."""
    import torch
    import torch.nn.functional as F

    net = network(case)
    model = smp.DistributedModel(net)
    if case.startswith("torch"):
        for index, block in enumerate(net.blocks):
            smp.set_partition(block, index // 4)
        # Their sum is the model's own code, which is with the head.
        for part in (net.tokens, net.positions, net.norm, net.head):
            smp.set_partition(part, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(256, (batch, 129), generator=generator)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def loss_of(output: Any, wanted: torch.Tensor) -> torch.Tensor:
        logits = output.logits if case == "gpt2" else output
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    @smp.step
    def step(x, wanted):
        loss = loss_of(model(x), wanted)
        model.backward(loss)
        return loss

    def ours() -> None:
        optimizer.zero_grad()
        step(inputs, targets)
        optimizer.step()

    make_peer = _torch_pipeline if case.startswith("torch") else _one_process
    peer = make_peer(smp, network(case), loss_of, inputs, targets)
    for _ in range(10):  # recorded, planned, and planned again
        ours(), peer()
    sent = dict(model.pipeline.transport.bytes_sent)
    ours()
    crossed = sum(model.pipeline.transport.bytes_sent[stage] - before for stage, before in sent.items())
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(rounds):
        for name, run in (("ours", ours), ("peer", peer)):
            times[name].append(_timed(run, smp))
    ratios = [a / b for a, b in zip(times["ours"], times["peer"], strict=True)]
    # Activations forward and their gradients back, twice, since the embedding lies with the output layer.
    bound = 2 * 2 * batch * 128 * 256 * 4
    return {
        "peer": "torch Schedule1F1B" if case.startswith("torch") else "one process, one thread",
        "ours_ms": round(1e3 * statistics.median(times["ours"]), 1),
        "peer_ms": round(1e3 * statistics.median(times["peer"]), 1),
        "time_ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
        "bytes_over_bound": round(sum(smp.allgather(crossed, smp.PP_GROUP)) / bound, 3),
    }


def run_live(smp: Any, config: dict[str, Any], batch: int) -> dict[str, Any]:
    """Measure the bytes that each stage holds at most, in both schedules."""
    import torch
    import torch.nn.functional as F
    from live_bytes import LiveBytes

    peaks: dict[str, list[int]] = {}
    for schedule in ("interleaved", "zero_bubble"):
        smp.init({**config, "pipeline": schedule})
        torch.manual_seed(0)
        model = smp.DistributedModel(network("live"))
        ids = torch.randint(256, (batch, 129), generator=torch.Generator().manual_seed(0))

        @smp.step
        def step(x, wanted, model=model):
            loss = F.cross_entropy(model(x).flatten(0, 1), wanted.flatten())
            model.backward(loss)
            return loss

        for _ in range(10):  # planned, and with gradients for all parameters
            step(ids[:, :-1], ids[:, 1:])
        live = LiveBytes([*model.local_parameters(), *(p.grad for p in model.local_parameters() if p.grad is not None)])
        with live.watching_tasks():
            step(ids[:, :-1], ids[:, 1:])
        peaks[schedule] = smp.allgather(live.peak, smp.PP_GROUP)
        smp.shutdown()
    whole, halves = peaks["interleaved"], peaks["zero_bubble"]
    return {
        "peak_mb": [round(peak / 1e6, 2) for peak in halves],
        "interleaved_mb": [round(peak / 1e6, 2) for peak in whole],
        "peak_over_interleaved": round(max(halves) / max(whole), 3),
        "by_stage": [round(a / b, 2) for a, b in zip(halves, whole, strict=True)],
    }


def _torch_chain(smp: Any, link: Any, inputs: Any) -> Callable[[], None]:
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, last = smp.pp_rank(), smp.pp_size() - 1
    stage = PipelineStage(link, rank, last + 1, torch.device("cpu"), group=smp.get_pp_process_group())
    schedule = Schedule1F1B(stage, len(inputs), loss_fn=lambda output, _: output.sum())

    def run() -> None:
        if rank == 0:
            schedule.step(inputs)
        elif rank == last:
            schedule.step(target=inputs, losses=[])
        else:
            schedule.step()

    return run


def _torch_two_links(smp: Any, kind: str, inputs: Any) -> Callable[[], None]:
    """Return a step of the chain as two links per rank, in operations whose halves of backward torch tells apart."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

    class SleepBack(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            _sleep(BACKWARD / 4)
            return gradient

    class Link(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            _sleep(FORWARD / 2)
            return SleepBack.apply(x) * SleepBack.apply(self.weight)

    rank, ranks = smp.pp_rank(), smp.pp_size()
    second = 2 * ranks - 1 - rank if kind == "zbv" else ranks + rank
    group, device = smp.get_pp_process_group(), torch.device("cpu")
    stages: Any = [PipelineStage(Link(), index, 2 * ranks, device, group=group) for index in (rank, second)]
    make: Any = ScheduleZBVZeroBubble if kind == "zbv" else ScheduleInterleaved1F1B
    schedule = make(stages, len(inputs), loss_fn=lambda output, _: output.sum())
    last = any(stage.is_last for stage in stages)

    def run() -> None:
        words = {"target": inputs, "losses": []} if last else {}
        schedule.step(*((inputs,) if rank == 0 else ()), **words)

    return run


def _torch_pipeline(smp: Any, whole: Any, loss_of: Callable[..., Any], inputs: Any, targets: Any) -> Callable[[], None]:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions, self.blocks = whole.tokens, whole.positions, whole.blocks[:4]

        def forward(self, ids):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            return x

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.norm, self.head = whole.blocks[4:], whole.norm, whole.head

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    rank = smp.pp_rank()
    part = First() if rank == 0 else Last()
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=smp.get_pp_process_group())
    schedule = Schedule1F1B(stage, smp.state.cfg.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4)

    def run() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=[])
        optimizer.step()

    return run


def _one_process(smp: Any, whole: Any, loss_of: Callable[..., Any], inputs: Any, targets: Any) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-4)

    def run() -> None:
        if smp.rank() == 0:
            optimizer.zero_grad()
            for x, wanted in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                (loss_of(whole(x), wanted) / 4).backward()
            optimizer.step()

    return run


def _timed(run: Callable[[], object], smp: Any) -> float:
    """Return the seconds from when the first rank begins until the last has ended."""
    import torch.distributed as dist

    dist.barrier(group=smp.get_pp_process_group())
    start = time.perf_counter()
    run()
    spans = smp.allgather((start, time.perf_counter()), smp.PP_GROUP)
    return max(stop for _, stop in spans) - min(start for start, _ in spans)


def run_rank(case: str, rounds: int, batch: int) -> None:
    """Run one rank of a case."""
    import torch

    torch.set_num_threads(1)
    import smdistributed.modelparallel.torch as smp

    if case == "live":
        found = run_live(smp, CASES[case][1], batch)
        if int(os.environ["RANK"]) == 0:
            print(json.dumps({"case": case, "ranks": CASES[case][0], **found}), flush=True)
        return
    smp.init(CASES[case][1])
    found = run_sleep(smp, rounds, case) if case.startswith("sleep") else run_gpt(smp, rounds, batch, case)
    if smp.rank() == 0:
        print(json.dumps({"case": case, "ranks": smp.size(), **found}), flush=True)
    smp.barrier()
    smp.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--rank-of", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of, args.rounds, args.batch)
        return
    print_machine()
    for case in args.case or list(CASES):
        words = ["--rank-of", case, "--rounds", args.rounds, "--batch", args.batch]
        run_ranks(__file__, CASES[case][0], words)


if __name__ == "__main__":
    main()
