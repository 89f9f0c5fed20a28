"""Measure the overhead of a microbatch in a pipeline: messages by kind, processor time, and thread switches.

    python benchmarks/pipeline_messages.py                     # all cases
    python benchmarks/pipeline_messages.py --case gpt2 --set step_program=true

``chain2`` and ``chain4``: one small linear layer on each stage, the step function on the first; ``chain-deep``: 12 layers on each
of 2 stages. ``gpt2``: a GPT (4 layers, hidden 64, 32 positions) on 2 ranks, two layers each, the step function on the last;
``gpt4``: 8 layers on 4 ranks. 8 microbatches.

Counted in a step that follows its plan, by stage, and divided by the microbatches: messages by kind and by pair of stages,
bytes, times that a task was woken on a thread of its own, and of the process all voluntary switches of threads. ``cpu_ms``:
processor time of the rank's threads per microbatch, the median of the rounds; ``by_thread``: its parts, as means.
``bare_cpu_ms``: that of the same modules and microbatches without a pipeline, in one process, divided by the stages. Counts are
exact on a busy machine; times are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from launching import print_machine, run_ranks

MICROBATCHES = 8
#: Stages, and layers on each.
CASES = {"chain2": (2, 1), "chain4": (4, 1), "chain-deep": (2, 12), "gpt2": (2, 2), "gpt4": (4, 2)}


def network(case: str, stages: int, each: int) -> Any:
    """Make the model of a case."""
    import torch
    from torch import nn

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(stages * each))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(64, 64)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(stages * each)
            )
            self.head = nn.Linear(64, 64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    return Chain() if case.startswith("chain") else GPT()


def counting(pipeline: Any, found: dict[str, Counter]) -> contextlib.ExitStack:
    """Count the messages that this rank sends and the tasks that it wakes, until the returned stack is closed."""
    from smp_runtime.pipeline.transport.messages import from_plain

    transport, scheduler = pipeline.transport, pipeline.context.scheduler
    send, hand_over = transport.send, scheduler._hand_over

    def counted_send(stage: int, head: Any, *args: Any, **kwargs: Any) -> None:
        kind = "news alone" if head[1] is None else type(from_plain(head[1])).__name__
        found["messages"][kind] += 1
        found["pairs"][f"{pipeline.stage}->{stage}"] += 1
        send(stage, head, *args, **kwargs)

    def counted_hand_over() -> None:
        hand_over()
        running = scheduler._running
        if running is not None:
            found["segments"]["own thread" if running.part else "new task"] += 1

    transport.send, scheduler._hand_over = counted_send, counted_hand_over
    stack = contextlib.ExitStack()
    stack.callback(lambda: (transport.__dict__.pop("send"), scheduler.__dict__.pop("_hand_over")))
    return stack


def thread_times() -> dict[str, int]:
    """Return the nanoseconds that the threads of this process have computed, by what they do."""
    found = dict.fromkeys(("script", "tasks", "receives", "sends", "rest"), 0)
    kinds = {"MainThread": "script", "smp-pipeline-worker": "tasks"}
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for folder in Path("/proc/self/task").iterdir():
        name = names.get(int(folder.name), "")
        kind = "receives" if name.startswith("smp-from-") else "sends" if name.startswith("smp-to-") else "rest"
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found[kinds.get(name, kind)] += int((folder / "schedstat").read_text().split()[0])
    return found


def run_case(case: str, rounds: int, settings: dict[str, Any]) -> None:
    """Measure one case, on each rank, and print a line on the first."""
    import torch

    import smdistributed.modelparallel.torch as smp

    stages, each = CASES[case]
    root = 0 if case.startswith("chain") else stages - 1
    smp.init(
        {
            "partitions": stages,
            "microbatches": MICROBATCHES,
            "auto_partition": False,
            "default_partition": root,
            **settings,
        }
    )
    net = network(case, stages, each)
    for number, block in enumerate(net.blocks):
        smp.set_partition(block, number // each)
    model = smp.DistributedModel(net)
    batch = torch.randn(MICROBATCHES, 8) if case.startswith("chain") else torch.randint(64, (MICROBATCHES, 32))

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(10):  # recorded, planned, and planned again
        step(batch)
    pipeline = model.pipeline
    found: dict[str, Counter] = {"messages": Counter(), "pairs": Counter(), "segments": Counter()}
    before = dict(pipeline.transport.bytes_sent)
    with counting(pipeline, found):
        step(batch)
    sent = sum(pipeline.transport.bytes_sent.values()) - sum(before.values())
    cpu, switches, spans, threads = [], [], [], thread_times()
    for _ in range(rounds):
        smp.barrier()
        began, used = time.perf_counter(), time.process_time()
        switched = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        step(batch)
        spans.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
        switches.append(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switched)
    by_thread = {name: (value - threads[name]) / 1e6 / rounds / MICROBATCHES for name, value in thread_times().items()}
    mine = {
        **{name: {key: value / MICROBATCHES for key, value in counts.items()} for name, counts in found.items()},
        "bytes": sent / MICROBATCHES,
        "switches": statistics.median(switches) / MICROBATCHES,
        "cpu_ms": round(1e3 * statistics.median(cpu) / MICROBATCHES, 3),
        "span_ms": round(1e3 * statistics.median(spans) / MICROBATCHES, 3),
        "by_thread": {name: round(value, 3) for name, value in by_thread.items()},
        "replayed": pipeline.replayed,
    }
    everyone = smp.allgather(mine, smp.PP_GROUP)
    if smp.rank() == 0:
        messages = sum((Counter(each["messages"]) for each in everyone), Counter())
        pairs = sum((Counter(each["pairs"]) for each in everyone), Counter())
        result = {
            "case": case,
            **settings,
            "messages_per_microbatch": dict(sorted(messages.items())),
            "messages_in_all": sum(messages.values()),
            "by_pair": dict(sorted(pairs.items())),
            "bytes": sum(each["bytes"] for each in everyone),
            **{
                key: [each[key] for each in everyone]
                for key in ("segments", "switches", "cpu_ms", "by_thread", "span_ms")
            },
            "bare_cpu_ms": round(_bare(network(case, stages, each), batch, rounds) / stages, 3),
            "replayed": all(each["replayed"] for each in everyone),
        }
        print(json.dumps(result), flush=True)
    smp.barrier()


def _bare(net: Any, batch: Any, rounds: int) -> float:
    """Return the processor time of one microbatch in one process, in milliseconds."""
    used = []
    for _ in range(rounds + 3):
        began = time.process_time()
        for part in batch.split(1):
            net(part).square().mean().backward()
        used.append(time.process_time() - began)
    return 1e3 * statistics.median(used[3:]) / MICROBATCHES


def main() -> None:
    """Run the cases asked for, or one rank of a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="PARAMETER=JSON", help="of mp_parameters")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    settings = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in args.set)}
    if args.rank:
        run_case(args.case[0], args.rounds, settings)
        return
    print_machine()
    for case in args.case or CASES:
        words = ["--rank", "--case", case, "--rounds", args.rounds]
        words += [word for pair in args.set for word in ("--set", pair)]
        run_ranks(os.path.abspath(__file__), CASES[case][0], words)


if __name__ == "__main__":
    main()
