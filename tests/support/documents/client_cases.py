"""Cases of client libraries: tests marked ``client``, what became of each, and where it is written down.

``@pytest.mark.client("Trainer", "resume", "pp 2")`` says of a test which library it uses, which of its features, and under
which strategy; a test may have several marks. Where the library is not installed it is skipped. Its file must be importable
all the same, or the table does not know of it: clients are imported inside functions.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import pytest

#: By library of a mark, the packages that its cases import beside PyTorch; the first one's version is the library's.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "Public scripts": (),
    "Transformers": ("transformers",),
    "Trainer": ("transformers", "accelerate"),
    "run_clm.py": ("transformers", "datasets", "evaluate"),
    "GPT-2 sample": ("transformers",),
    "TRL": ("trl", "datasets"),
    "PEFT": ("peft",),
    "Accelerate": ("accelerate",),
    "Lightning": ("lightning",),
    "Fabric": ("lightning",),
    "SMDDP": (),
}
#: Degrees joined by " × ", in this order.
STRATEGY = re.compile(
    r"one process|(?=.)((^| × )pp \d+)?((^| × )tp \d+)?((^| × )cp \d+)?((^| × )sdp \d+)?((^| × )dp \d+)?"
)
#: A file to which the outcome of every case is appended as a line of JSON.
OUTCOMES = "SMP_CLIENT_OUTCOMES"


@dataclass(frozen=True, order=True)
class Case:
    """What a mark says."""

    library: str
    feature: str
    strategy: str

    def __post_init__(self) -> None:
        if self.library not in LIBRARIES:
            known = ", ".join(LIBRARIES)
            raise pytest.UsageError(f"a case of {self.library!r}, which LIBRARIES of client_cases.py lacks ({known})")
        if not STRATEGY.fullmatch(self.strategy):
            raise pytest.UsageError(f"{self.strategy!r} is no strategy: 'one process', 'pp 2', 'pp 2 × tp 2 × dp 2' …")


def cases(item: pytest.Item) -> list[Case]:
    """The cases that a test is marked with."""
    found = []
    for mark in item.iter_markers("client"):
        try:
            found.append(Case(*mark.args, **mark.kwargs))
        except TypeError:
            raise pytest.UsageError(f"{item.nodeid}: client(library, feature, strategy), not {mark}") from None
    return found


@functools.cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def versions(library: str) -> dict[str, str]:
    """Versions of a library's packages, and of what all of them stand on."""
    packages = dict.fromkeys((*LIBRARIES[library], "transformers", "torch"))
    return {package: metadata.version(package).partition("+")[0] for package in packages if _is_installed(package)}


class Cases:
    """A plug-in of pytest: skips the cases whose library is absent, and writes down what became of the others."""

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for case in cases(item):
                absent = [package for package in LIBRARIES[case.library] if not _is_installed(package)]
                if absent:
                    item.add_marker(pytest.mark.skip(reason=f"{', '.join(absent)} not installed"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[Any]:
        report = yield
        path = os.environ.get(OUTCOMES)
        # A failure while things are put away counts too: the table takes the worst outcome of a case.
        if path and (report.when == "call" or not report.passed):
            for case in cases(item):
                _append(
                    path, {**asdict(case), "test": item.nodeid, **_outcome(report), "versions": versions(case.library)}
                )
        return report


def _outcome(report: pytest.TestReport) -> dict[str, str]:
    """Passed, failed or skipped, and why: the reason of a skip, of an expected failure, or the error's last line."""
    if hasattr(report, "wasxfail"):
        reason = report.wasxfail.removeprefix("reason: ")
        return {"outcome": "failed" if report.skipped else "passed", "reason": reason}
    if report.passed:
        return {"outcome": "passed", "reason": ""}
    if report.skipped:
        _, _, reason = report.longrepr
        return {"outcome": "skipped", "reason": reason.removeprefix("Skipped: ")}
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else str(report.longrepr)
    return {"outcome": "failed", "reason": message.strip().splitlines()[0][:300]}


def _append(path: str, record: dict[str, Any]) -> None:
    # Lines of several processes do not mix: each is one write to the file's end.
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
