"""How long until something happens: imports, and from the launcher's start to the end of the first training step.

    python benchmarks/long_jobs/starting.py
    python benchmarks/long_jobs/starting.py --rounds 20 --only import

``import``: a process that imports ``smdistributed.modelparallel.torch`` and ends, beside one that imports ``torch``. ``fit()``:
from the call of ``SMPEstimator.fit()`` with two processes of this machine to the end of the first training step of rank 0, beside
``accelerate launch`` and ``torchrun`` with the same two-layer model under DDP. Sides take turns, each after a round that does not
count, so that files are in the system's cache (*warm*).
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
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import print_machine

_STEP = """
import os, time
import torch
{begin}
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
{wrap}
optimizer.zero_grad()
{step}
optimizer.step()
if {rank} == 0:
    with open(os.environ["FIRST_STEP_FILE"], "w") as file:
        file.write(str(time.time()))
{end}
"""

SCRIPTS = {
    "smp": {
        "begin": "import smdistributed.modelparallel.torch as smp\nsmp.init()",
        "wrap": "model = smp.DistributedModel(model)\n"
        "optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))\n"
        "@smp.step\ndef step(x):\n    loss = model(x).square().mean()\n    model.backward(loss)",
        "step": "step(torch.ones(8, 64))",
        "rank": "smp.rank()",
        "end": "smp.shutdown()",
    },
    "accelerate": {
        "begin": "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)",
        "wrap": "model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))",
        "step": "accelerator.backward(model(torch.ones(8, 64)).square().mean())",
        "rank": "accelerator.process_index",
        "end": "accelerator.end_training()",
    },
    "torchrun": {
        "begin": "import torch.distributed as dist\ndist.init_process_group('gloo')",
        "wrap": "model = torch.nn.parallel.DistributedDataParallel(model)\noptimizer = torch.optim.AdamW(model.parameters())",
        "step": "model(torch.ones(8, 64)).square().mean().backward()",
        "rank": "dist.get_rank()",
        "end": "dist.destroy_process_group()",
    },
}


def in_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side in each round; one round before is thrown away."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            seconds = run()
            if number:
                found[name].append(seconds)
    return found


def report(case: str, ours: list[float], peers: Mapping[str, list[float]]) -> None:
    """Print a line for each peer."""
    for peer, theirs in peers.items():
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        low, high = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2
        line = {
            "case": case,
            "peer": peer,
            "time_ratio": round(statistics.median(ratios), 3),
            "ratio_quartiles": [round(low, 3), round(high, 3)],
            "ours_s": round(statistics.median(ours), 3),
            "peer_s": round(statistics.median(theirs), 3),
            "seconds": round(statistics.median(ours), 3),
        }
        print(json.dumps(line), flush=True)


def importing(rounds: int) -> None:
    """Time a process that imports and does nothing else."""

    def of(name: str) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            # Installed packages have their bytecode; those of a checkout keep it too, unless the shell forbids that.
            environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
            subprocess.run([sys.executable, "-c", f"import {name}"], check=True, env=environ)
            return time.perf_counter() - start

        return run

    found = in_turns({"ours": of("smdistributed.modelparallel.torch"), "torch": of("torch")}, rounds)
    report("import", found["ours"], {"import torch": found["torch"]})


def first_step(rounds: int) -> None:
    """Time a job from the launcher's start to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        for name, parts in SCRIPTS.items():
            source = Path(folder, name)
            source.mkdir()
            (source / "train.py").write_text(_STEP.format(**parts))
        told = Path(folder, "first-step")
        environ = {"FIRST_STEP_FILE": str(told), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

        def fit() -> None:
            from smp_estimator import SMPEstimator

            parameters = {"enabled": True, "parameters": {"ddp": True}}
            SMPEstimator(
                entry_point="train.py",
                source_dir=str(Path(folder, "smp")),
                instance_type="local",
                instance_count=1,
                output_path=f"file://{folder}/output",
                environment=environ,
                distribution={
                    "smdistributed": {"modelparallel": parameters},
                    "mpi": {"enabled": True, "processes_per_host": 2},
                },
            ).fit(logs=False)

        def launch(name: str, *words: str) -> None:
            command = [sys.executable, "-m", *words, str(Path(folder, name, "train.py"))]
            subprocess.run(command, check=True, env={**os.environ, **environ}, capture_output=True)

        def timed(run: Callable[[], None]) -> Callable[[], float]:
            def seconds() -> float:
                told.unlink(missing_ok=True)
                start = time.time()
                run()
                return float(told.read_text()) - start

            return seconds

        accelerate = ("accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1")
        accelerate += ("--mixed_precision", "no", "--dynamo_backend", "no")
        torchrun = (
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "127.0.0.1:0",
        )
        sides = {
            "ours": timed(fit),
            "accelerate launch": timed(lambda: launch("accelerate", *accelerate)),
            "torchrun": timed(lambda: launch("torchrun", *torchrun)),
        }
        found = in_turns(sides, rounds)
    report("fit() to the first step, warm", found.pop("ours"), found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("import", "fit"))
    args = parser.parse_args()
    print_machine()
    if args.only != "fit":
        importing(args.rounds)
    if args.only != "import":
        first_step(args.rounds)


if __name__ == "__main__":
    main()
