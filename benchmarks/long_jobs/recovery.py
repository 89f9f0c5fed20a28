"""Ranks that are killed: how soon training goes on with this library, with torchrun and DCP, and with torchft.

    python benchmarks/long_jobs/recovery.py
    python benchmarks/long_jobs/recovery.py --kills 20 --topologies --torchft-python /path/to/python

The same small GPT, two data parallel ranks on one machine. Again and again a rank drawn by chance gets SIGKILL at a moment drawn by
chance. Systems take turns, a job of ``--kills`` ÷ ``--rounds`` kills at a time, so that other load meets all alike.

- This library: its launcher with ``SMP_MAX_RESTARTS``, a copy in memory after each step.
- torchrun: DDP under ``--max-restarts``, DCP's save after each step into a folder on ``/dev/shm``, or its ``async_save``.
- torchft: a torchrun with ``--max-restarts`` for each of two replicas, and its lighthouse, which takes a replica for lost after
  a second without a heartbeat (its default is 5). "waits": the replica that is left waits for the other, as the other systems do;
  "goes on": it trains on alone meanwhile. torchft is no dependency of this project: ``--torchft-python`` names the Python of an
  environment that has it.

Figures per system: median and 95th percentile of the seconds from a kill to the end of the next step that all ranks have
finished, the killed one's successor included, and, in brackets, to the end of the next step that any rank has begun and finished;
steps that a rank had finished and has made again, at most; steps that a rank has never made, over all ranks; whether the final
parameters of each job are bit for bit those of a job without kills.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import print_machine

_RANKS = Path(__file__).with_name("recovery_ranks.py")
_ROOT = Path(__file__).resolve().parents[2]
_RESTARTS = 1000

#: Steps, at most, between the step in which a job has recovered and the next kill; seconds, at most, within that step.
_BETWEEN, _WITHIN = 8, 0.2
#: A job that has not gone on after so many seconds is counted as lost.
_PATIENCE = 120.0


@dataclass(frozen=True)
class System:
    """What is compared; ``kind`` is what its ranks are told."""

    name: str
    kind: str
    ranks: int = 2
    parameters: dict[str, Any] = field(default_factory=dict)

    def commands(self, folder: Path, python: str) -> list[list[str]]:
        """Return the command lines of a job: one, or one for each replica."""
        words = [str(_RANKS), self.kind, str(folder)]
        if self.kind == "smp":
            launch = [sys.executable, "-m", "smp_launch", "run", "--processes", str(self.ranks)]
            return [[*launch, "--parameters", json.dumps(self.parameters), *words]]
        launch = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", str(_RESTARTS), "--nproc-per-node"]
        if self.kind.startswith("dcp"):
            return [[sys.executable, *launch, str(self.ranks), *words]]
        return [[python, *launch, "1", *words] for _ in range(self.ranks)]


SYSTEMS = (
    System("this library", "smp", parameters={"ddp": True}),
    System("torchrun, DCP", "dcp"),
    System("torchrun, DCP, asynchronous", "dcp-async"),
    System("torchft, waits", "torchft"),
    System("torchft, goes on", "torchft-alone"),
)
TOPOLOGIES = (
    System("pp 2 × dp 2", "smp", 4, {"partitions": 2, "microbatches": 2, "ddp": True}),
    System("tp 2 × dp 2", "smp", 4, {"tensor_parallel_degree": 2, "ddp": True}),
    System("sharding 4", "smp", 4, {"sharded_data_parallel_degree": 4, "ddp": True}),
    System("pp 4", "smp", 4, {"partitions": 4, "microbatches": 4, "ddp": True}),
)


class Line(NamedTuple):
    """A step that a rank has finished, in which process, and when, in seconds of the monotonic clock."""

    step: int
    pid: int
    when: float


class Kill(NamedTuple):
    """Seconds from a kill to the next step that all ranks have finished, and to the next one of any rank."""

    of_all: float
    of_any: float


@dataclass
class Found:
    """What the jobs of a system have shown."""

    kills: list[Kill] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0
    left_out: int = 0
    equal: list[bool] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


class Job:
    """A running job of a system, in a folder of its own."""

    def __init__(self, system: System, folder: Path, python: str) -> None:
        self.system, self.folder = system, folder
        self._python = python

    @contextlib.contextmanager
    def running(self) -> Iterator[Job]:
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "container")]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "SMP_MAX_RESTARTS": str(_RESTARTS),
            "SMP_MEMORY_CHECKPOINT": "1",
            "SMP_MEMORY_CHECKPOINT_STEPS": "1",
            "NUM_REPLICA_GROUPS": str(self.system.ranks),
        }
        if self.system.kind.startswith("dcp"):
            # In the store that an agent keeps through restarts, ranks find where those before them listened, and wait for them.
            environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with contextlib.ExitStack() as stack:
            if self.system.kind.startswith("torchft"):
                environ["TORCHFT_LIGHTHOUSE"] = stack.enter_context(self._lighthouse())
            self._processes = [
                stack.enter_context(self._process(words, {**environ, "REPLICA_GROUP_ID": str(n)}, f"log.{n}"))
                for n, words in enumerate(self.system.commands(self.folder, self._python))
            ]
            yield self

    @contextlib.contextmanager
    def _process(self, words: list[str], environ: dict[str, str], log: str) -> Iterator[subprocess.Popen[bytes]]:
        with (self.folder / log).open("wb") as out:
            process = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=30)
                process.kill()
            process.wait()

    @contextlib.contextmanager
    def _lighthouse(self) -> Iterator[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        replicas = "1" if self.system.kind == "torchft-alone" else str(self.system.ranks)
        words = [str(Path(self._python).with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}"]
        words += ["--min_replicas", replicas, "--quorum_tick_ms", "100", "--join_timeout_ms", "1000"]
        with self._process([*words, "--heartbeat_timeout_ms", "1000"], dict(os.environ), "log.lighthouse"):
            yield f"http://127.0.0.1:{port}"

    def ledgers(self) -> list[list[Line]]:
        """Return the lines that each rank has written so far, without one that is still being written."""
        found = []
        for rank in range(self.system.ranks):
            path = self.folder / f"ledger.{rank}"
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            found.append([Line(int(step), int(pid), float(when)) for step, pid, when in map(str.split, lines)])
        return found

    def wait_for(self, is_so: Any) -> list[list[Line]]:
        """Wait until ``is_so`` holds for the ledgers; gives them. TimeoutError after a while, or when the job has ended."""
        deadline = time.monotonic() + _PATIENCE
        while not is_so(found := self.ledgers()):
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                raise TimeoutError(self._last_words())
            time.sleep(0.01)  # polling: ledgers are files, which send no event
        return found

    def end(self, step: int) -> None:
        """End the job after ``step`` steps, which must be some steps away."""
        (self.folder / "end.new").write_text(str(step))
        (self.folder / "end.new").rename(self.folder / "end")
        for process in self._processes:
            if process.wait(timeout=_PATIENCE):
                raise TimeoutError(self._last_words())

    def _last_words(self) -> str:
        lines = [line for path in sorted(self.folder.glob("log.*")) for line in path.read_text().splitlines()[-15:]]
        return f"{self.system.name} has not gone on:\n" + "\n".join(lines)

    def parameters(self) -> list[str]:
        return [(self.folder / f"parameters.{rank}").read_text() for rank in range(self.system.ranks)]


def _kill(job: Job, chance: random.Random) -> Kill:
    """Kill a rank some steps from now, and wait until all ranks have finished a step together."""
    begun = [len(lines) for lines in job.ledgers()]
    steps = chance.randint(2, _BETWEEN)
    job.wait_for(lambda found: all(len(lines) >= n + steps for lines, n in zip(found, begun, strict=True)))
    time.sleep(chance.uniform(0.0, _WITHIN))  # so that the rank dies at any point of a step
    rank = chance.randrange(job.system.ranks)
    before = job.ledgers()
    victim = before[rank][-1].pid
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()

    def of_successor(found: list[list[Line]]) -> list[Line]:
        return [line for line in found[rank] if line.when > killed and line.pid != victim]

    # Its second step begins when all have finished the first, so that this is in all ledgers by then.
    found = job.wait_for(lambda found: len(of_successor(found)) > 1)
    step = of_successor(found)[0].step
    of_all = max([line for line in lines if line.step == step][-1].when for lines in found)
    # A step that a process had begun before the kill, with what the killed one had given already, is none of after it.
    later = [
        line.when
        for lines in found
        for old, line in pairwise(lines)
        if line.when > killed and (line.pid != old.pid or old.when > killed)
    ]
    return Kill(of_all - killed, min(later) - killed)


def _repeated(ledgers: list[list[Line]]) -> int:
    return max((old.step + 1 - new.step for lines in ledgers for old, new in pairwise(lines)), default=0)


def _left_out(ledgers: list[list[Line]]) -> int:
    """Return the steps that a rank has not made, over all ranks."""
    end = 1 + max(line.step for lines in ledgers for line in lines)
    return sum(end - len({line.step for line in lines}) for lines in ledgers)


def _killed_job(system: System, kills: int, python: str, chance: random.Random, found: Found) -> tuple[int, list[str]]:
    """Run a job with that many kills; return its number of steps and its final parameters."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, Job(system, Path(folder), python).running() as job:
        job.wait_for(lambda ledgers: all(ledgers))
        for _ in range(kills):
            found.kills.append(_kill(job, chance))
            print(f"{system.name}: {found.kills[-1].of_all:.1f} s, load {os.getloadavg()[0]:.0f}", flush=True)
        # Six steps from now or more.
        end = 5 * (2 + max(line.step for lines in job.ledgers() for line in lines) // 5)
        job.end(end)
        ledgers = job.ledgers()
        found.repeated = max(found.repeated, _repeated(ledgers))
        found.left_out += _left_out(ledgers)
        found.step_seconds += [
            new.when - old.when for old, new in pairwise(ledgers[0]) if (new.step, new.pid) == (old.step + 1, old.pid)
        ]
        return end, job.parameters()


def _undisturbed(system: System, steps: int, python: str) -> list[str]:
    """Return the final parameters of a job without kills."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, Job(system, Path(folder), python).running() as job:
        job.end(steps)
        return job.parameters()


def _print(found: Sequence[tuple[str, Found]]) -> None:
    print(
        "| | step, ms | kills | median, s | 95th percentile, s | repeated at most | left out | bit-equal |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, what in found:
        cells = ["–", "–", "–"]
        if what.kills:
            cells = [f"{statistics.median(what.step_seconds) * 1e3:.0f}"] if what.step_seconds else ["–"]
            for share in (0.5, 0.95):
                of_all, of_any = ([kill[n] for kill in what.kills] for n in (0, 1))
                cells.append(f"{_quantile(of_all, share):.1f} ({_quantile(of_any, share):.1f})")
        equal = f"{sum(what.equal)} of {len(what.equal)} jobs"
        kills = f"{len(what.kills)}" + (f", and {what.lost} jobs lost" if what.lost else "")
        print(
            f"| {name} | {cells[0]} | {kills} | {cells[1]} | {cells[2]} | {what.repeated} | {what.left_out} | {equal} |"
        )


def _quantile(values: list[float], share: float) -> float:
    """Return the smallest value that at most that share of the values exceeds."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if share != 0.5 else statistics.median(values)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="per system")
    parser.add_argument("--rounds", type=int, default=2, help="jobs per system, which share the kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="the name of a system; may be given again")
    parser.add_argument("--topologies", action="store_true", help="this library on four ranks in four ways, too")
    parser.add_argument("--torchft-python", default=sys.executable, help="the Python of an environment with torchft")
    options = parser.parse_args(arguments)
    systems = [*SYSTEMS, *(TOPOLOGIES if options.topologies else ())]
    systems = [system for system in systems if not options.only or system.name in options.only]
    python = options.torchft_python
    if subprocess.run([python, "-c", "import torchft"], capture_output=True, check=False).returncode:
        print(f"{python} has no torchft, which is left out: pip install torchft, or --torchft-python")
        systems = [system for system in systems if not system.kind.startswith("torchft")]
    print_machine()
    found = {system.name: Found() for system in systems}
    jobs: list[tuple[System, int, list[str]]] = []
    for turn in range(options.rounds):
        for n, system in enumerate(systems):
            what = found[system.name]
            chance = random.Random(f"{options.seed}, {turn}, {n}")
            kills = options.kills // options.rounds + (turn < options.kills % options.rounds)
            try:
                jobs.append((system, *_killed_job(system, kills, python, chance, what)))
            except (TimeoutError, subprocess.TimeoutExpired) as error:
                what.lost += 1
                print(error, file=sys.stderr)
    for system, steps, ended in jobs:
        found[system.name].equal.append(ended == _undisturbed(system, steps, python))
    _print(list(found.items()))


if __name__ == "__main__":
    sys.exit(main())
