"""Jobs that hang, or fail on purpose, through ``fit()``."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.platform.jobs import model_parallel

from smp_records import rank_record

SCRIPT = Path(__file__).with_name("hanging_script.py")

#: By name: processes, and the parameters of the library.
TOPOLOGIES = {
    "dp 2": (2, {"ddp": True}),
    "pp 2": (2, {"partitions": 2, "microbatches": 2, "ddp": True}),
    "pp 2 program": (2, {"partitions": 2, "microbatches": 2, "ddp": True, "step_program": True}),
    "pp 2 × dp 2": (4, {"partitions": 2, "microbatches": 2, "ddp": True}),
    "sharding 4": (4, {"sharded_data_parallel_degree": 4, "ddp": True}),
    "tp 2 × dp 2": (4, {"tensor_parallel_degree": 2, "ddp": True}),
}


@dataclass
class Ended:
    """How a job ended: its exception's words, empty without one, the seconds that ``fit()`` took, and what it printed."""

    error: str
    seconds: float
    output: str

    @property
    def headline(self) -> str:
        """The first line of the reason."""
        return self.error.partition("Reason: ")[2].split("\n")[0]

    @property
    def lines(self) -> set[int]:
        """The lines of the script that the headline names."""
        return {int(number) for number in re.findall(rf"{SCRIPT.name}:(\d+)", self.headline)}


def marked(kind: str) -> set[int]:
    """Lines of the script that a verdict about ``kind`` may name."""
    found = set()
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1):
        if kind in line.partition("# <- ")[2].split():
            found.add(number)
    return found


@pytest.fixture
def hanging_job(tmp_path: Path, capfd: Any) -> Callable[..., Ended]:
    """Runs ``hanging_script.py``: ``hanging_job(kind, topology, seconds, rank=…, environment=…)``."""
    from smp_estimator import SMPEstimator

    def run(
        kind: str = "",
        topology: str = "dp 2",
        seconds: float | None = 4.0,
        environment: dict[str, str] | None = None,
        **hyperparameters: Any,
    ) -> Ended:
        processes, parameters = TOPOLOGIES[topology]
        watch = {} if seconds is None else {"SMP_HANG_SECONDS": str(seconds)}
        estimator = SMPEstimator(
            entry_point=SCRIPT.name,
            source_dir=str(SCRIPT.parent),
            instance_type="local",
            instance_count=1,
            output_path=f"file://{tmp_path}",
            distribution=model_parallel(processes, **parameters),
            hyperparameters={"hang": kind, **hyperparameters},
            environment={**watch, **(environment or {})},
        )
        began, error = time.monotonic(), ""
        try:
            estimator.fit()
        except Exception as failed:
            error = str(failed)
        return Ended(error, time.monotonic() - began, capfd.readouterr().out)

    return run


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """``sleeper(rank)``: a process with a record in the folder; its notes are written by the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(rank: int, code: str = "import time; time.sleep(1000)") -> subprocess.Popen[bytes]:
        begin = "import os; from smp_records import rank_record as w; n = w.begin(os.environ, %d); n.begin_step(); n.begin_step();"
        environ = {**os.environ, rank_record.FOLDER_VARIABLE: str(tmp_path)}
        processes.append(
            subprocess.Popen([sys.executable, "-c", begin % rank + code], env=environ, start_new_session=True)
        )
        while (found := rank_record.read(tmp_path / str(rank))) is None or found.step < 2:
            time.sleep(0.01)
        return processes[-1]

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children, too
        process.wait()
