"""A budget of seconds for each test of ``make test``: what is above it without a reason is listed, and fails the run if far above.

A time is measured where other tests, and perhaps other programs, use the processors. So it is divided by how much longer
than its processor time a busy loop takes at that moment, and a test that is above the budget runs once more; the
shorter time counts. No test asserts its own time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

FILE = Path(__file__).parents[1] / "slow-tests.json"
_OPTION = "budget"
#: Of a report's user properties: seconds of a test that is above the budget.
_PROPERTY = "above the budget"
#: How many times the budget a test may take before it fails the run.
_FAR = 2.0
#: Seconds above which a test is not run once more.
_TOO_LONG_TO_REPEAT = 30.0
#: Seconds of its processor that the busy loop takes.
_LOOP = 0.05


@dataclass(frozen=True)
class Budget:
    """Seconds that a test may take, and the reasons of those that take longer."""

    seconds: float
    reasons: dict[str, str]

    @classmethod
    def read(cls, path: Path = FILE) -> Budget:
        """Return the budget that a file has."""
        kept = json.loads(path.read_text(encoding="utf-8"))
        return cls(kept["seconds"], kept["tests"])

    def text(self, above: dict[str, float]) -> list[str]:
        """Return lines on tests that are above the budget, the slowest first."""
        lines = [
            f"above {self.seconds:g} s a test: shorten it, move it to tests/longer-tests.txt, or add it with a reason to "
            f"tests/{FILE.name}; more than {_FAR:g} times as long fails the run"
        ]
        ordered = sorted(above.items(), key=lambda pair: -pair[1])
        return lines + [f"{seconds:6.1f} s  {test}" for test, seconds in ordered]


def add_option(parser: pytest.Parser) -> None:
    """Add the option, which workers get from their controller."""
    parser.addoption("--budget", dest=_OPTION, action="store_true", help="list tests that take too long")


def register(config: pytest.Config) -> None:
    """Register the plug-in if it is asked for."""
    if config.getoption(_OPTION):
        config.pluginmanager.register(Watch(Budget.read(), is_worker=hasattr(config, "workerinput")))


def measure_slowness() -> float:
    """Return how many times its processor time a busy loop takes now; 1 on a processor of its own."""
    begin, begin_busy = time.perf_counter(), time.thread_time()
    while time.thread_time() - begin_busy < _LOOP:
        pass
    return max(1.0, (time.perf_counter() - begin) / (time.thread_time() - begin_busy))


class Watch:
    """Measures tests where they run, and lists those that are above the budget where outcomes are collected.

    Args:
        is_worker: whether another process collects the outcomes.
        slowness: see :func:`measure_slowness`.
    """

    def __init__(self, budget: Budget, *, is_worker: bool, slowness: Callable[[], float] = measure_slowness) -> None:
        self._budget = budget
        self._is_worker = is_worker
        self._slowness = slowness
        self._above: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)  # before -m takes its choice
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Refuse reasons of tests that are there no more.

        Raises:
            pytest.UsageError: a file that was collected whole has no such test.
        """
        found = {item.nodeid for item in items}
        files = {name.partition("::")[0] for name in found}
        unknown = sorted(name for name in self._budget.reasons.keys() - found if name.partition("::")[0] in files)
        if unknown and not any("::" in argument for argument in config.args):
            raise pytest.UsageError(f"{FILE.name} names what is no test: {', '.join(unknown)}")

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test that has no reason to be slow; once more if it is."""
        if item.nodeid in self._budget.reasons:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        seconds = self._seconds(reports)
        if self._budget.seconds < seconds < _TOO_LONG_TO_REPEAT and _have_passed(reports):
            again = runtestprotocol(item, nextitem=nextitem, log=False)
            # A test that cannot run twice in one process keeps its first outcome.
            if _have_passed(again):
                seconds = min(seconds, self._seconds(again))
        if seconds > self._budget.seconds:
            reports[-1].user_properties.append((_PROPERTY, seconds))
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _seconds(self, reports: list[pytest.TestReport]) -> float:
        """Return the time of a test, on a processor of its own."""
        taken = sum(report.duration for report in reports)
        return taken / self._slowness() if taken > self._budget.seconds else taken

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a test that is above the budget."""
        if self._is_worker:
            return
        found = dict(report.user_properties)
        if _PROPERTY in found and report.when == "teardown":
            self._above[report.nodeid] = float(str(found[_PROPERTY]))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run in which a test is far above the budget."""
        is_far = any(seconds > _FAR * self._budget.seconds for seconds in self._above.values())
        if is_far and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List the tests that are above the budget."""
        if self._above:
            terminalreporter.section("budget")
            for line in self._budget.text(self._above):
                terminalreporter.write_line(line)


def _have_passed(reports: list[pytest.TestReport]) -> bool:
    return all(report.passed for report in reports)
