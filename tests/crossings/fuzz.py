"""Runs drawn cases, and goes on where a report ends: ``make test-crossings SEED=1 COUNT=3000``.

``make test-crossings CASE='{"topology": "tp2", "passes": 2}'`` runs one, as the report has it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import click
import torch
from crossings.case import AXES, Case, draw
from crossings.outcome import Outcome, Runner
from crossings.shrinking import shrink


@click.group()
def main() -> None:
    """Combinations of features, compared with one process."""
    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1", RES_OPTIONS="attempts:0")  # PyTorch asks for the name of 127.0.0.1


@main.command()
@click.option("--seed", default="1", help="of the draw: any text, such as a commit's hash")
@click.option("--count", default=60, help="cases")
@click.option("--only", multiple=True, help="FIELD=VALUE: what is not drawn, such as net=llama")
@click.option("--first", default=0, help="the number of the first one")
@click.option(
    "--out", type=click.Path(path_type=Path), help="report, a line of JSON each; cases that it has are not run again"
)
def run(seed: str, count: int, only: tuple[str, ...], first: int, out: Path | None) -> None:
    """Run cases; a fault is shrunk, and makes the exit code 1."""
    given = dict(map(_read_value, only))
    seed = " ".join((seed, *only))
    done = _read(out, seed) if out is not None else {}
    kinds = Counter(str(line["kind"]) for line in done.values())
    reasons = Counter(str(line["detail"]) for line in done.values() if line["kind"] == "refused")
    with Runner() as runner:
        for number in range(first, first + count):
            if number in done:
                continue
            case = draw(seed, number, given)
            outcome = runner.run(case)
            kinds[outcome.kind] += 1
            if outcome.kind == "refused":
                reasons[outcome.detail] += 1
            if outcome.is_fault:
                _tell(number, case, outcome)
                smaller = shrink(case, lambda other, kind=outcome.kind: runner.run(other).kind == kind)  # type: ignore[misc]
                click.echo(f"  smaller: make test-crossings CASE='{smaller.to_json()}'")
            if out is not None:
                with out.open("a", encoding="utf-8") as report:
                    report.write(json.dumps({"seed": seed, **outcome.to_line(number, case)}) + "\n")
    click.echo(f"seed {seed}, cases {first} to {first + count - 1}: {dict(kinds)}")
    for reason, times in reasons.most_common():
        click.echo(f"  refused {times} times: {reason}")
    sys.exit(any(Outcome(kind, "", 0.0).is_fault for kind in kinds))


@main.command()
@click.argument("text")
def case(text: str) -> None:
    """Run one case, given as JSON."""
    with Runner() as runner:
        given = Case.from_json(text)
        outcome = runner.run(given)
        _tell(0, given, outcome)
    sys.exit(outcome.is_fault)


def _read_value(text: str) -> tuple[str, object]:
    """Return the field and the value of ``FIELD=VALUE``."""
    name, _, value = text.partition("=")
    found = next((choice for choice in AXES.get(name, ()) if str(choice).lower() == value.lower()), None)
    if found is None:
        raise click.BadParameter(f"{text}: fields are {', '.join(AXES)}; of this one {AXES.get(name, ())}")
    return name, found


def _read(out: Path, seed: str) -> dict[int, dict[str, object]]:
    """Lines of a report, by the number of their case."""
    if not out.exists():
        return {}
    lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return {line["number"]: line for line in lines if line["seed"] == seed}


def _tell(number: int, given: Case, outcome: Outcome) -> None:
    click.echo(f"{number} {outcome.kind} after {outcome.seconds:.1f} s: {given.to_json()}")
    click.echo("  " + outcome.detail[-1500:].replace("\n", "\n  "))


if __name__ == "__main__":
    main()
