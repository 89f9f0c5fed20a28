"""The tables of clients in ``docs/compatibility.md``, from what became of the cases of ``tests/clients``.

::

    python tests/support/documents/client_table.py RUN.jsonl …  # writes the tables with what test runs wrote to SMP_CLIENT_OUTCOMES
    python tests/support/documents/client_table.py --check       # says what is out of date, and changes nothing

``tests/clients/outcomes.json`` keeps the outcomes, so a run of a sample leaves those of cases that it has not, or not
wholly, run as they are.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests")]

from support.documents.client_cases import LIBRARIES, Case, cases  # noqa: E402 (found by the line above when run as a program)

CASES = ROOT / "tests" / "clients"
OUTCOMES = CASES / "outcomes.json"
DOCUMENT = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- the following is written by `make test-clients` -->\n", "<!-- until here -->\n"
#: Versions of Transformers; each has a file of constraints.
MAJORS = ("4", "5")
#: Of several tests of one case the worst counts.
WORST_LAST = ("passed", "skipped", "failed")

#: By case and version of Transformers: passed, failed or skipped, and why.
Outcomes = dict[Case, dict[str, tuple[str, str]]]


def collected() -> dict[Case, set[str]]:
    """The cases of all tests of clients, in the order of these, and the tests of each; nothing is run."""
    found: dict[Case, set[str]] = {}

    class Collector:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            for item in session.items:
                for case in cases(item):
                    found.setdefault(case, set()).add(item.nodeid)

    arguments = ["--collect-only", "-qqq", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}", str(CASES)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = pytest.main(arguments, [Collector()])
    if status:
        print(said.getvalue(), file=sys.stderr)
        raise SystemExit("the tests of clients could not be collected")
    return found


def pinned() -> dict[str, dict[str, str]]:
    """By version of Transformers, those of the client libraries in its environment."""
    shown = dict.fromkeys(["torch", "transformers", *(p for packages in LIBRARIES.values() for p in packages)])
    found = {}
    for major in MAJORS:
        texts = [(ROOT / name).read_text() for name in ("constraints/cpu.txt", f"constraints/clients-{major}.txt")]
        pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", "".join(texts), re.MULTILINE))
        found[major] = {package: pins[package] for package in shown}
    return found


def read() -> Outcomes:
    """What is known, but for that of environments whose versions have changed since."""
    kept = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {"versions": {}, "cases": []}
    current = [major for major, versions in pinned().items() if kept["versions"].get(major) == versions]
    return {
        Case(*names): {major: (of[major][0], of[major][1]) for major in current if major in of}
        for *names, of in kept["cases"]
    }


def take_over(outcomes: Outcomes, tests: dict[Case, set[str]], runs: Iterable[Path]) -> None:
    """Put what became of cases in test runs in the place of what was known of them, where all tests of a case were run."""
    fresh: Outcomes = {}
    ran: dict[tuple[Case, str], set[str]] = {}
    for record in (json.loads(line) for path in runs for line in path.read_text().splitlines()):
        major = record["versions"]["transformers"].partition(".")[0]
        other = {name: version for name, version in record["versions"].items() if version != pinned()[major][name]}
        if other:
            raise SystemExit(
                f"{record['test']} ran with {other}, not with the versions of constraints/clients-{major}.txt"
            )
        case = Case(record["library"], record["feature"], record["strategy"])
        ran.setdefault((case, major), set()).add(record["test"])
        of = fresh.setdefault(case, {})
        found = record["outcome"], record["reason"]
        of[major] = max(of.get(major, found), found, key=lambda outcome: WORST_LAST.index(outcome[0]))
    for (case, major), names in ran.items():
        if names >= tests.get(case, {""}):
            outcomes.setdefault(case, {})[major] = fresh[case][major]


def _order(strategy: str) -> tuple[int, list[int]]:
    parts = dict(part.split(" ") for part in strategy.split(" × ") if strategy != "one process")
    return len(parts), [-int(parts.get(name, 0)) for name in ("pp", "tp", "cp", "sdp", "dp")]


def _cell(of: dict[str, tuple[str, str]]) -> str:
    kinds = {major: of[major][0] if major in of else "unknown" for major in MAJORS}
    working = [major for major, kind in kinds.items() if kind == "passed"]
    if len(working) == len(MAJORS):
        return "works"
    if "unknown" in kinds.values():
        return "not run yet"
    if working:
        return f"only with {' and '.join(working)}"
    return "does not" if "failed" in kinds.values() else "not applicable"


def _reasons(case: Case, outcomes: Outcomes) -> Iterator[str]:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for major, outcome in sorted(outcomes[case].items()):
        if outcome[0] != "passed":
            by_reason.setdefault(outcome, []).append(major)
    for (kind, reason), majors in by_reason.items():
        where = "" if len(majors) == len(MAJORS) else f" with Transformers {majors[0]}"
        yield f"{case.feature}, {case.strategy}{where}: {'not applicable' if kind == 'skipped' else 'does not work'}: {reason}"


def tables(order: list[Case], outcomes: Outcomes) -> str:
    """A table for each library: features × strategies, and below it why not."""
    text = []
    for library in dict.fromkeys(
        case.library for case in sorted(order, key=lambda c: list(LIBRARIES).index(c.library))
    ):
        own = [case for case in order if case.library == library]
        strategies = sorted({case.strategy for case in own}, key=_order)
        text += [f"### {library}", "", f"| {' | '.join(['', *strategies])} |", f"|{'---|' * (len(strategies) + 1)}"]
        for feature in dict.fromkeys(case.feature for case in own):
            row = [Case(library, feature, strategy) for strategy in strategies]
            cells = [_cell(outcomes.get(case, {})) if case in own else "" for case in row]
            text.append(f"| {' | '.join([feature, *cells])} |")
        reasons = [f"- {reason}" for case in own if case in outcomes for reason in _reasons(case, outcomes)]
        text += ["", *reasons, *([""] if reasons else [])]
    return "\n".join([_versions(), "", *text])


def _versions() -> str:
    both = pinned()
    found = []
    for package, version in both["4"].items():
        versions = dict.fromkeys([version, both["5"][package]])
        found.append(f"{package} {' and '.join(versions)}")
    return f"Versions: {', '.join(found)}."


def main(arguments: list[str]) -> None:
    """Write the tables, or say what is out of date."""
    tests = collected()
    order = list(tests)
    outcomes = read()
    is_check = arguments == ["--check"]
    if not is_check:
        take_over(outcomes, tests, map(Path, arguments))
        outcomes = {case: of for case, of in outcomes.items() if case in order}
    before, begin, rest = DOCUMENT.read_text().partition(BEGIN)
    old, end, after = rest.partition(END)
    assert end, f"{DOCUMENT} lacks the lines between which the tables stand"
    new = tables(order, {case: outcomes[case] for case in order if case in outcomes})
    if is_check:
        if old != new:
            differing = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[2:12]
            raise SystemExit("\n".join(["the tables of clients are out of date: make test-clients-full", *differing]))
        return
    kept = [
        [case.library, case.feature, case.strategy, dict(sorted(outcomes[case].items()))] for case in sorted(outcomes)
    ]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in kept)
    OUTCOMES.write_text(f'{{"versions": {json.dumps(pinned())},\n"cases": [\n{lines}\n]}}\n')
    DOCUMENT.write_text(f"{before}{begin}{new}{end}{after}")
    lacking = [case for case in order if set(outcomes.get(case, {})) != set(MAJORS)]
    if lacking:
        print(f"{len(lacking)} cases have not been run with both versions yet: make test-clients-full")


if __name__ == "__main__":
    main(sys.argv[1:])
