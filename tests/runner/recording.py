"""A plug-in of pytest that runs a part of each file and appends outcomes to the table. Needs pytest and the standard library only.

``tests/conftest.py`` registers it for ``--run-plan FILE``. Under pytest-xdist every worker takes the same choice, one of them
notes what was collected, and the controller notes the outcomes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from runner.table import COLLECTED, FAILED, PASSED, SKIPPED, XFAILED, Line, append

_OPTION = "run_plan"
#: Of several phases of a test the worst counts.
_WORST_LAST = (PASSED, XFAILED, SKIPPED, FAILED)


@dataclass(frozen=True)
class Plan:
    """What one call of pytest runs. It is read before the first test, so a worker that replaces a crashed one has the same."""

    table: str
    environment: str
    commit: str
    #: By file: number of the part, and how many parts the file has.
    parts: dict[str, tuple[int, int]]
    #: Tests that need not run again.
    passed: list[str] = field(default_factory=list)
    #: Seconds since the epoch at which no further test begins; 0 for none.
    deadline: float = 0.0
    #: Where the names of the chosen tests are written.
    chosen: str = ""
    #: Whether what is collected is all that the files have; it is noted then.
    is_all: bool = True

    def write(self, path: Path) -> None:
        """Write it for :meth:`read`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Return the plan of a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def add_option(parser: pytest.Parser) -> None:
    """Add the option, which workers get from their controller."""
    help_text = "a plan of tests/runner: which part of each file runs, and the table for the outcomes"
    parser.addoption("--run-plan", dest=_OPTION, default="", metavar="FILE", help=help_text)


def register(config: pytest.Config) -> None:
    """Register the plug-in if there is a plan."""
    if path := config.getoption(_OPTION):
        config.pluginmanager.register(Recording(config, Plan.read(Path(path))))


class Recording:
    """Chooses tests, and appends a line for each as soon as it has ended."""

    def __init__(self, config: pytest.Config, plan: Plan) -> None:
        self._plan = plan
        self._passed = frozenset(plan.passed)
        worker = getattr(config, "workerinput", None)
        self._is_worker = worker is not None
        # The first worker stands for all: they collect the same.
        self._notes_collection = plan.is_all and (worker is None or worker["workerid"] == "gw0")
        self._running: dict[str, Line] = {}

    @pytest.hookimpl(trylast=True)  # after -m and -k: parts are those of the tests that are left
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep this run's part of each file, without the tests that have passed."""
        seen: dict[str, int] = {}
        kept: list[pytest.Item] = []
        others: list[pytest.Item] = []
        for item in items:
            file = item.nodeid.partition("::")[0]
            place = seen[file] = seen.get(file, -1) + 1
            number, parts = self._plan.parts.get(file, (0, 1))
            # In turns: cases of a matrix that take long often stand side by side.
            if place % parts == number and item.nodeid not in self._passed:
                kept.append(item)
            else:
                others.append(item)
        if self._notes_collection:
            append(Path(self._plan.table), [self._line(item.nodeid, COLLECTED) for item in items])
            if self._plan.chosen:
                Path(self._plan.chosen).write_text(json.dumps([item.nodeid for item in kept]), encoding="utf-8")
        if others:
            config.hook.pytest_deselected(items=others)
        items[:] = kept

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that is skipped, or cannot be imported, as a whole."""
        if self._notes_collection and not report.passed and report.nodeid in self._plan.parts:
            append(Path(self._plan.table), [self._line(report.nodeid, *_describe(report))])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Let a test that would begin after the deadline pass by: it gets no line and is run another time."""
        is_late = bool(self._plan.deadline) and time.time() > self._plan.deadline
        return True if is_late else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a phase of a test; the last one ends its line."""
        if self._is_worker:
            return
        outcome, reason = _describe(report)
        line = self._running.pop(report.nodeid, self._line(report.nodeid, PASSED))
        if _WORST_LAST.index(outcome) < _WORST_LAST.index(line.outcome):
            outcome, reason = line.outcome, line.reason
        line = self._line(report.nodeid, outcome, reason, line.seconds + report.duration)
        # Beside "teardown" there is a phase without a name: that in which a worker crashed.
        if report.when in ("setup", "call"):
            self._running[report.nodeid] = line
        else:
            append(Path(self._plan.table), [line])

    def _line(self, test: str, outcome: str, reason: str = "", seconds: float = 0.0) -> Line:
        return Line(test, self._plan.environment, outcome, self._plan.commit, reason, round(seconds, 3))


def _describe(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str]:
    """Return the outcome, and the reason of a skip or the first line of an error."""
    if hasattr(report, "wasxfail"):
        return (XFAILED if report.skipped else PASSED), report.wasxfail.removeprefix("reason: ")
    if report.passed:
        return PASSED, ""
    if report.skipped and isinstance(report.longrepr, tuple | list):
        return SKIPPED, str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines()
    return FAILED, lines[0 if crash or len(lines) == 1 else -1][:300] if lines else "no reason"
