"""Rehearsals against real steps: the makespan that durations of one process promise, and that of a job on this machine.

    python benchmarks/rehearsal/rehearsed_time.py                  # all cases
    python benchmarks/rehearsal/rehearsed_time.py --case gpt-pp2 --rounds 3

A case is a script of this file. It runs in one process with ``SMP_TIMELINE``, which records what each module takes for a
microbatch; it is rehearsed with ``measured=`` that timeline at the case's degrees; and it runs as a job of these degrees, whose
timelines say how long its steps took. ``sleep-2`` and ``sleep-4``: a chain of 2 and 4 stages whose modules sleep 20 ms forward
and 40 ms backward, 8 microbatches. ``gpt-pp2``: a GPT (8 layers, hidden 256, 128 tokens) on two stages with 4 microbatches of 4
samples. ``gpt-dp2``: the same as two replicas without microbatches. Compared are makespans, from a step's first block to its
last, and for replicas the length of the step with its all-reduce; medians of the steps that were kept. Rates of links are those
that this machine's all-reduce shows first. With ``--beside`` as many processes as the job has ranks run at once while modules are
measured: ranks of one machine share its caches and its memory, all of the time where they are replicas.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import print_machine

ROOT = Path(__file__).parents[2]
KEPT, STEPS = 20, 34

#: By name: what is trained, ranks, and parameters.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sleep-2": ("sleep", 2, {"pipeline_parallel_degree": 2, "microbatches": 8}),
    "sleep-4": ("sleep", 4, {"pipeline_parallel_degree": 4, "microbatches": 8}),
    "gpt-pp2": ("gpt", 2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    "gpt-dp2": ("gpt", 2, {"ddp": True}),
}


def train(name: str, stages: int) -> None:
    """Run the script of a case for some steps."""
    import torch
    import torch.nn.functional as F
    from data_parallel import make_gpt
    from pipeline import sleepers

    import smdistributed.modelparallel.torch as smp

    torch.set_num_threads(1)
    smp.init()
    torch.manual_seed(0)
    if name == "sleep":
        module, given = sleepers(smp, stages), (torch.ones(8, 4), torch.zeros(8))
    else:
        module = make_gpt()
        ids = torch.randint(256, (4 * smp.state.cfg.microbatches, 129))
        given = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))

    @smp.step
    def step(x, wanted):
        output = model(x)
        loss = output.sum() if name == "sleep" else F.cross_entropy(output.flatten(0, 1), wanted.flatten())
        model.backward(loss)
        return loss

    for _ in range(STEPS):
        optimizer.zero_grad()
        step(*given)
        optimizer.step()
    smp.barrier()
    smp.shutdown()


def start(name: str, ranks: int, parameters: Mapping[str, Any], folder: Path, stages: int) -> subprocess.Popen[bytes]:
    """Run a job on this machine that leaves its timelines in a folder."""
    environ = {
        "SM_HP_MP_PARAMETERS": json.dumps(dict(parameters)),
        "SMP_TIMELINE": str(KEPT),
        "SM_OUTPUT_DATA_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "container")]),
    }
    words = [__file__, "--train", name, "--stages", str(stages)]
    command = [sys.executable, "-m", "smp_launch", "run", "--processes", str(ranks), *words]
    return subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.DEVNULL)


def wait(jobs: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended well."""
    codes = [job.wait() for job in jobs]
    if any(codes):
        raise SystemExit("a job failed; what it said is above")


def alone(name: str, copies: int, microbatches: int, folder: Path, stages: int) -> Path:
    """Return the timelines of one process, while ``copies - 1`` others do the same."""
    folders = [folder / str(copy) for copy in range(copies)]
    wait([start(name, 1, {"microbatches": microbatches}, each, stages) for each in folders])
    return folders[0]


def this_machine(ranks: int, reduces: bool) -> Any:
    """Return a rate card of this machine; what was not measured, such as an optimizer's update, is no part of a makespan.

    Args:
        reduces: whether ranks sum gradients, for which the link is measured.
    """
    from smp_records.rate_card import Link, RateCard

    link = _link(ranks) if reduces else Link(bytes_per_second=1e9)
    return RateCard(
        name="this machine",
        gpus_per_host=ranks,
        flops_per_second={"float32": 5e10},
        memory_bytes_per_second=1e10,
        inside=link,
        host=link,
    )


def _link(ranks: int) -> Any:
    """Return the link that an all-reduce over gloo shows, by the medians for 4 MiB and for nothing."""
    from smp_records.rate_card import Link

    code = """
import statistics, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
def seconds(tensor):
    found = []
    for _ in range(20):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        found.append(time.perf_counter() - began)
    return statistics.median(found[5:])
found = seconds(torch.zeros(1)), seconds(torch.zeros(2**20))
if dist.get_rank() == 0:
    print(*found)
dist.barrier()
dist.destroy_process_group()
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", file.name]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        printed = subprocess.run(command, check=True, env=environ, capture_output=True, text=True).stdout
    least, whole = map(float, printed.split())
    sent = 2 * (ranks - 1) / ranks * 2**22
    return Link(bytes_per_second=sent / max(whole - least, 1e-6), latency=least / (2 * (ranks - 1)))


def compare(case: str, *, beside: bool = False) -> dict[str, float]:
    """Return the makespans in milliseconds, rehearsed and real.

    Args:
        beside: modules are measured while as many processes compute as the job has ranks.
    """
    from smp_estimator.rehearsal import rehearse
    from smp_estimator.timeline import read_timeline

    name, ranks, parameters = CASES[case]
    stages = int(parameters.get("pipeline_parallel_degree", 1))
    microbatches = int(parameters.get("microbatches", 1))
    if name == "sleep":
        parameters = {**parameters, "auto_partition": False, "default_partition": 0}
    with tempfile.TemporaryDirectory() as folder:
        one, all_ranks = Path(folder, "one"), Path(folder, "all")
        one = alone(name, ranks if beside else 1, microbatches, one, stages)
        card = Path(folder, "card.json")
        card.write_text(this_machine(ranks, stages == 1).to_json())
        began = time.monotonic()
        found = rehearse(
            __file__,
            ["--train", name, "--stages", str(stages)],
            instance_type="local",
            processes_per_host=ranks,
            parameters=parameters,
            rates=card,
            measured=one,
        ).rehearsal
        seconds = time.monotonic() - began
        wait([start(name, ranks, parameters, all_ranks, stages)])
        # The first steps are recorded, planned, and planned again.
        steps = [step for step in read_timeline(all_ranks).steps if step.trains][-KEPT // 2 :]
        if stages > 1:
            promised = next(kind.pipeline_seconds for kind in found.kinds if kind.pipeline_seconds)
            real = [step.makespan for step in steps]
        else:
            promised = found.step_seconds
            real = [max(rank.stop - rank.start for rank in step.ranks) for step in steps]
    return {
        "rehearsed_ms": round(1e3 * promised, 2),
        "real_ms": round(1e3 * statistics.median(real), 2),
        "best_ms": round(1e3 * min(real), 2),
        "ratio": round(promised / statistics.median(real), 4),
        "rehearsal_s": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--beside", action="store_true", help="measure modules while other processes do the same")
    parser.add_argument("--train", choices=("sleep", "gpt"), help=argparse.SUPPRESS)
    parser.add_argument("--stages", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.stages)
        return
    print_machine()
    for _ in range(args.rounds):
        for case in args.case or list(CASES):
            print(json.dumps({"case": case, "beside": args.beside, **compare(case, beside=args.beside)}), flush=True)


if __name__ == "__main__":
    main()
