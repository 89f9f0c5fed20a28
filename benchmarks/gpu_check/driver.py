"""Runs checks one after another or beside each other, each in a process of its own with a time limit.

A check that fails, hangs or dies does not stop the others. Needs only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_check import environment, results

if TYPE_CHECKING:
    from gpu_check.catalog import Check

#: With less time than this a check does not begin.
_LEAST_SECONDS = 15
#: Of the log of a check, the last lines are kept: in logs.txt, and in failures.txt if it fails.
_LOG_LINES, _FAILURE_LINES = 400, 80


class Attempt:
    """A check in a process group of its own.

    Args:
        seconds: time limit, after which all of its processes are killed.
        report: gets each finding of the check.

    Attributes:
        code: exit status.
        has_timed_out: whether the time limit has ended it.
        left_behind: processes that its own process left running, and that were killed.
        failed: number of findings that are not right.
        log: the other lines that it printed.
        took: seconds.
    """

    def __init__(self, check: Check, seconds: float, report: Report) -> None:
        self._check, self._seconds, self._report = check, seconds, report
        self._mark = f"{check.name}-{os.getpid()}-{time.monotonic_ns()}"
        self.code = self.left_behind = self.failed = 0
        self.has_timed_out = False
        self.log: list[str] = []
        self.took = 0.0

    def run(self) -> None:
        """Run the check to its end, or to that of its time."""
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, str(environment.PACKAGE), "run", self._check.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._make_environment(),
            start_new_session=True,
        )

        def end() -> None:
            self.has_timed_out = True
            self._kill(process)

        timer = threading.Timer(self._seconds, end)
        timer.start()
        # A thread, because a process that outlives the check may keep the pipe open.
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        self.code = process.wait()
        timer.cancel()
        self.left_behind = self._kill(process)
        reader.join(10)
        self.took = time.monotonic() - begin

    @property
    def is_ok(self) -> bool:
        """Return whether the check ended in time, without an error, and all findings are right."""
        return self.code == 0 and not self.failed and not self.has_timed_out

    @property
    def outcome(self) -> str:
        """Return the outcome in a word or two."""
        if self.is_ok:
            return "ok"
        return "TIME" if self.has_timed_out else f"FAILED ({self.failed} cases, exit {self.code})"

    def summarize(self) -> results.Finding:
        """Return the finding about the check as a whole."""
        finding: results.Finding = {
            "check": self._check.name,
            "ok": self.is_ok,
            "exit": self.code,
            "timed_out": self.has_timed_out,
            "seconds": round(self.took, 1),
        }
        if self.left_behind:
            finding["left_behind"] = self.left_behind
        if not self.is_ok:
            finding["last"] = [line.rstrip()[:300] for line in self.log[-4:]]
        return finding

    def _make_environment(self) -> dict[str, str]:
        environ = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "SMPCHECK_DEADLINE": str(time.time() + self._seconds),
            "SMPCHECK_MARK": self._mark,
        }
        environ.setdefault("OMP_NUM_THREADS", "4" if self._check.is_alone else "1")
        environ.setdefault("SMP_TIMEOUT_SECONDS", "60")
        environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8" if self._check.is_alone else "2")
        return environ

    def _kill(self, process: subprocess.Popen[str]) -> int:
        """Kill all processes of the check; return how many were left outside its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return environment.kill_marked(f"SMPCHECK_MARK={self._mark}")

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            finding = results.parse(line)
            if finding is None:
                self.log.append(line)
                continue
            if finding.get("ok") is False:
                self.failed += 1
            self._report.add({"check": self._check.name, **finding})


class Report:
    """The findings and logs of a run, on standard output and in a folder.

    Args:
        folder: created if it is not there. A later run appends to its files.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Guards the files and standard output: checks that run beside each other report from threads of their own.
        self._lock = threading.Lock()
        self._results = (folder / "results.jsonl").open("a")
        self._logs = (folder / "logs.txt").open("a")
        self._failures = (folder / "failures.txt").open("a")

    def add(self, finding: results.Finding) -> None:
        """Print and keep a finding."""
        line = json.dumps(finding, default=str)
        with self._lock:
            print(line, flush=True)
            self._results.write(line + "\n")
            self._results.flush()

    def add_log(self, name: str, attempt: Attempt) -> None:
        """Keep the end of a check's log."""
        title = f"\n===== {name}: exit {attempt.code}, {attempt.took:.1f} s =====\n"
        with self._lock:
            self._logs.write(title + "".join(attempt.log[-_LOG_LINES:]))
            self._logs.flush()
            if not attempt.is_ok:
                self._failures.write(title + "".join(attempt.log[-_FAILURE_LINES:]))
                self._failures.flush()


class Driver:
    """Runs checks within a budget of time.

    Args:
        out: the folder of the results.
        budget: seconds for all checks.
        began: start of the budget, as ``time.time()`` returns it; 0: now.
        patience: factor of the checks' time limits.
    """

    def __init__(self, out: Path, budget: float, began: float = 0.0, patience: float = 1.0) -> None:
        used = max(0.0, time.time() - began) if began else 0.0
        self._end = time.monotonic() + budget - used
        self._patience = patience
        self._report = Report(out)
        self._table: list[tuple[str, str, float]] = []

    def run_all(self, checks: Sequence[Check], beside: int) -> bool:
        """Run checks in their order, then print a table of them.

        Args:
            beside: most checks at the same time.

        Returns:
            Whether all of them have run and passed.
        """
        waiting: list[Check] = []
        for check in checks:
            if not check.is_alone:
                waiting.append(check)
                continue
            self._run_beside(waiting, beside)
            waiting = []
            self._run(check)
        self._run_beside(waiting, beside)
        print("\n" + "\n".join(f"{name:16} {took:7.1f} s  {word}" for name, word, took in self._table), flush=True)
        return all(word == "ok" for _, word, _ in self._table)

    def _run_beside(self, checks: Sequence[Check], most: int) -> None:
        gate = threading.Semaphore(most)

        def run(check: Check) -> None:
            with gate:
                self._run(check)

        threads = [threading.Thread(target=run, args=(check,)) for check in checks]
        for thread in threads:
            thread.start()
            time.sleep(0.2)  # so that they begin in their order
        for thread in threads:
            thread.join()

    def _run(self, check: Check) -> None:
        try:
            self._attempt(check)
        except Exception as error:  # an error of the driver: the other checks go on
            message = f"{type(error).__name__}: {error}"[:500]
            self._report.add({"check": check.name, "ok": False, "driver": message})
            self._table.append((check.name, "FAILED (driver)", 0.0))

    def _attempt(self, check: Check) -> None:
        left = self._end - time.monotonic()
        if left < _LEAST_SECONDS:
            self._report.add({"check": check.name, "ok": None, "skipped": "no time left"})
            self._table.append((check.name, "skipped", 0.0))
            return
        attempt = Attempt(check, min(self._patience * check.seconds, left), self._report)
        attempt.run()
        self._report.add_log(check.name, attempt)
        self._report.add(attempt.summarize())
        self._table.append((check.name, attempt.outcome, attempt.took))
