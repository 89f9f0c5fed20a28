"""Says of a table which tests passed where, which passed nowhere, and why tests were skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from runner.table import COLLECTED, FAILED, MISSING, PASSED, SKIPPED, XFAILED, Line, outcomes

#: Names that are listed of each kind, if not all are asked for.
LISTED = 20


@dataclass(frozen=True)
class Report:
    """What a table says at some commits."""

    #: The newest line by environment and test.
    lines: dict[tuple[str, str], Line]
    #: Reasons by environment that could not run.
    missing: dict[str, str]
    #: The environments that there are.
    environments: tuple[str, ...]

    @classmethod
    def of(cls, lines: Iterable[Line], environments: Iterable[str], commits: Collection[str] | None = None) -> Report:
        """Read lines of some commits, or of all if ``commits`` is None."""
        known = tuple(environments)
        lines = [line for line in lines if line.environment in known and (commits is None or line.commit in commits)]
        ran = [line for line in lines if line.outcome != MISSING]
        missing = {line.environment: line.reason for line in lines if line.outcome == MISSING}
        # One that could be built later is missing no more.
        present = {line.environment for line in ran}
        return cls(outcomes(ran), {name: why for name, why in missing.items() if name not in present}, known)

    def counts(self, environment: str) -> Counter[str]:
        """Return tests by outcome; those that have not run count as collected."""
        return Counter(line.outcome for line in self.lines.values() if line.environment == environment)

    def failed(self) -> list[Line]:
        """Return the lines of tests that failed somewhere."""
        return [line for line in self.lines.values() if line.outcome == FAILED]

    def passed_nowhere(self) -> dict[str, list[Line]]:
        """Return by test what became of those that passed in no environment. An expected failure is as good as a pass."""
        tests: dict[str, list[Line]] = {}
        for line in self.lines.values():
            tests.setdefault(line.test, []).append(line)
        good = {test for test, of in tests.items() if any(line.outcome in (PASSED, XFAILED) for line in of)}
        # A file that is skipped as a whole in one environment passes if its tests do in another.
        good |= {test.partition("::")[0] for test in good}
        return {test: tests[test] for test in sorted(tests.keys() - good)}

    def unknown(self) -> list[str]:
        """Return the environments of which the table has nothing, not even that they are missing."""
        present = {line.environment for line in self.lines.values()}
        return [name for name in self.environments if name not in present and name not in self.missing]

    def skips(self) -> Counter[tuple[str, str]]:
        """Return skips by environment and reason."""
        return Counter((line.environment, line.reason) for line in self.lines.values() if line.outcome == SKIPPED)

    @property
    def is_good(self) -> bool:
        """Whether there are tests, none failed, each passed somewhere, and no environment may have others."""
        return bool(self.lines) and not self.failed() and not self.passed_nowhere() and not self.unknown()

    def text(self, *, whole: bool = False) -> str:
        """Return the report; ``whole`` lists all tests."""
        rows = [f"{'environment':14}{'passed':>8}{'failed':>8}{'skipped':>9}{'xfailed':>9}{'not run':>9}"]
        for name in self.environments:
            of = self.counts(name)
            row = f"{name:14}{of[PASSED]:8}{of[FAILED]:8}{of[SKIPPED]:9}{of[XFAILED]:9}{of[COLLECTED]:9}"
            if name in self.missing:
                row = f"{name:14}{'missing':>8}  {self.missing[name]}"
            elif name in self.unknown():
                row = f"{name:14}{'unknown':>8}  the table has nothing of it at these commits"
            rows.append(row)
        failed = [f"{line.environment}: {line.test}: {line.reason}" for line in self.failed()]
        skipped = [f"{count} in {name}: {why}" for (name, why), count in self.skips().most_common()]
        nowhere = [f"{test} ({_where(lines)})" for test, lines in self.passed_nowhere().items()]
        rows += _block("skipped, by reason", skipped, whole)
        rows += _block("failed", failed, whole)
        rows += _block("passed in no environment", nowhere, whole)
        return "\n".join(rows)


def _where(lines: list[Line]) -> str:
    words = {COLLECTED: "not run"}
    return ", ".join(f"{words.get(line.outcome, line.outcome)} in {line.environment}" for line in lines)


def _block(title: str, texts: list[str], whole: bool) -> list[str]:
    if not texts:
        return []
    shown = texts if whole else texts[:LISTED]
    more = [f"  and {len(texts) - len(shown)} more (--whole lists them)"] if len(texts) > len(shown) else []
    return ["", f"{title}: {len(texts)}", *(f"  {text}" for text in shown), *more]
