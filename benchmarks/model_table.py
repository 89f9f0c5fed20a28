"""Writes what ``benchmarks/models.py`` has measured: into the file of the command ``models``, and into ``docs/models.md``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from smp_estimator.models.outcomes import ALONE, MODES, FamilyOutcomes, Matrix, format_cell, parse_matrix

ROOT = Path(__file__).parents[1]
OUTCOMES = ROOT / "smp_estimator" / "models" / "outcomes.json"
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- the following is written by benchmarks/models.py -->\n", "<!-- until here -->\n"

#: By kind, family and Transformers' major version, the outcome by mode as it stands in the file.
Found = dict[tuple[str, str], dict[str, dict[str, dict[str, Any]]]]


def write_table(runs: Sequence[Path]) -> None:
    """Take over outcomes of runs, and write the document; outcomes of other versions than a run's are forgotten.

    Args:
        runs: files of ``benchmarks/models.py run``.
    """
    data = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {"versions": {}, "families": []}
    found: Found = {(kind, name): majors for kind, name, majors in data["families"]}
    versions: dict[str, dict[str, str]] = data["versions"]
    for record in (json.loads(line) for path in runs for line in path.read_text().splitlines()):
        major = record["versions"]["transformers"].partition(".")[0]
        if versions.setdefault(major, record["versions"]) != record["versions"]:
            versions[major] = record["versions"]
            for majors in found.values():
                majors.pop(major, None)
        of = found.setdefault((record["kind"], record["family"]), {}).setdefault(major, {})
        if record["mode"] == ALONE and record["ok"]:
            of.pop(ALONE, None)
        else:
            of[record["mode"]] = _outcome(record)
    ordered = [[*key, dict(sorted(majors.items()))] for key, majors in sorted(found.items()) if any(majors.values())]
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in ordered)
    OUTCOMES.write_text(f'{{"versions": {json.dumps(dict(sorted(versions.items())))},\n"families": [\n{lines}\n]}}\n')
    write_document()


def write_document() -> None:
    """Write the generated part of the document."""
    before, begin, rest = DOCUMENT.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{DOCUMENT} lacks the lines between which the tables stand"
    DOCUMENT.write_text(f"{before}{begin}{tables()}{end}{after}")


def tables() -> str:
    """Return the generated part of the document, from the file."""
    matrix = parse_matrix(json.loads(OUTCOMES.read_text()))
    return "\n".join(line for major in sorted(matrix.versions) for line in _of_version(matrix, major)) + "\n"


def _outcome(record: dict[str, Any]) -> dict[str, Any]:
    if record["ok"]:
        numbers = {name: record.get(name) for name in ("split", "traffic")}
        return {"is_equal": True, **{name: round(value, 3) for name, value in numbers.items() if value is not None}}
    reason = record.get("reason") or (
        f"the loss differs by {record['loss']:.1g}, the gradient of {record['where']} by {record['gradient']:.1g}"
    )
    return {"is_equal": False, "reason": re.sub(r"^(\w+\.)+(?=\w+:)", "", reason).removeprefix("NotBuilt: ")}


def _of_version(matrix: Matrix, major: str) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in matrix.versions[major].items())
    trained = [family for family in matrix.families if family.trains_alone(major)]
    others = [family for family in matrix.families if major in family.majors and not family.trains_alone(major)]
    yield f"## Transformers {major}"
    yield ""
    yield f"With {versions}: {len(trained) + len(others)} entries were measured, of which one process trains {len(trained)}."
    yield ""
    yield "| mode | equal to one process |"
    yield "|---|---|"
    for mode, equal, count in matrix.counts(major):
        if count:
            yield f"| {mode} | {equal} of {count} ({equal / count:.1%}) |"
    for what, good, count in matrix.split_well(major):
        if count:
            yield f"| {what} | {good} of {count} ({good / count:.1%}) |"
    yield ""
    yield f"| family | kind | {' | '.join(MODES)} |"
    yield f"|---|---|{'---|' * len(MODES)}"
    for family in trained:
        cells = " | ".join(format_cell(family.majors[major].get(mode)) for mode in MODES)
        yield f"| {family.model_type} | {family.kind} | {cells} |"
    yield ""
    reasons = list(_reasons(trained, major))
    if reasons:
        yield from ("What is not equal:", "", *reasons, "")
    if others:
        yield from ("What one process does not train in a tiny configuration:", "", *_reasons(others, major), "")


def _reasons(families: Sequence[FamilyOutcomes], major: str) -> Iterator[str]:
    for family in families:
        for mode, outcome in family.majors[major].items():
            if outcome.reason:
                where = "" if mode == ALONE else f", {mode}"
                yield f"- {family.model_type} ({family.kind}){where}: {outcome.reason}"
