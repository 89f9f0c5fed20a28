"""Runs drawn cases, and goes on where a report ends: ``make test-crossings SEED=1 COUNT=3000``.

``make test-crossings CASE='{"topology": "tp2", "passes": 2}'`` runs one, as the report has it. Every fourth case is one of version
2 of the library; ``ONLY="version=2"`` draws no others.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import click
import torch
from crossings.case import AXES, draw
from crossings.outcome import AnyCase, Outcome, Runner, read_case
from crossings.reports import commit_of_this, ledger, read_reports, shares
from crossings.shrinking import shrink
from crossings.version2_case import AXES as VERSION2_AXES
from crossings.version2_case import draw_version2

#: Of so many cases one is of version 2.
_EVERY = 4


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
    seed, commit = " ".join((seed, *only)), commit_of_this()
    done = _read(out, seed) if out is not None else {}
    kinds = Counter(str(line["kind"]) for line in done.values())
    reasons = Counter(str(line["detail"]) for line in done.values() if line["kind"] == "refused")
    with Runner() as runner:
        for number in range(first, first + count):
            if number in done:
                continue
            case = _draw(seed, number, given)
            outcome = runner.run(case)
            kinds[outcome.kind] += 1
            if outcome.kind == "refused":
                reasons[outcome.detail] += 1
            if outcome.is_fault:
                _tell(number, case, outcome)
                _shrink(runner, case, outcome)
            if out is not None:
                with out.open("a", encoding="utf-8") as report:
                    report.write(json.dumps({"commit": commit, "seed": seed, **outcome.to_line(number, case)}) + "\n")
    click.echo(f"seed {seed}, cases {first} to {first + count - 1}: {dict(kinds)}")
    for reason, times in reasons.most_common():
        click.echo(f"  refused {times} times: {reason}")
    sys.exit(any(Outcome(kind, "", 0.0).is_fault for kind in kinds))


def _shrink(runner: Runner, case: AnyCase, outcome: Outcome) -> None:
    """Print the smallest case with the same fault; for one that depends on chance, or on what ran before it, there is none."""
    if outcome.kind != "unsteady":
        smaller = shrink(case, lambda other: runner.run_once(other).kind == outcome.kind)
        click.echo(f"  smaller: make test-crossings CASE='{smaller.to_json()}'")


@main.command("ledger")
@click.argument("reports", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def tell_ledger(reports: tuple[Path, ...]) -> None:
    """Print what became of the cases in reports of `run`, as a table: a row for each commit and seed."""
    click.echo("\n".join(ledger(read_reports(reports))))


@main.command("shares")
@click.option("--seed", default="1", help="of the draw")
@click.option("--count", default=2000, help="cases, which are drawn and not run")
@click.option("--below", default=100.0, help="percent: print only values that fewer cases have")
def tell_shares(seed: str, count: int, below: float) -> None:
    """Print the share of cases that have each value of an axis and each event; the rarest first."""
    found = shares([_draw(seed, number, {}) for number in range(count)])
    for what, share in sorted(found, key=lambda each: each[1]):
        if 100 * share < below:
            click.echo(f"{100 * share:5.1f} % {what}")


@main.command()
@click.argument("text")
def case(text: str) -> None:
    """Run one case, given as JSON."""
    with Runner() as runner:
        given = read_case(text)
        outcome = runner.run(given)
        _tell(0, given, outcome)
    sys.exit(outcome.is_fault)


def _draw(seed: str, number: int, given: Mapping[str, object]) -> AnyCase:
    """Draw a case of the version that is given, or else of the one that has the given fields and this number."""
    fields = {name: value for name, value in given.items() if name != "version"}
    fits_version_2 = all(value in VERSION2_AXES.get(name, ()) for name, value in fields.items())
    default = 2 if number % _EVERY == _EVERY - 1 and fits_version_2 else 1
    default = default if fields.keys() <= AXES.keys() else 2
    is_version_2 = given.get("version", default) == 2
    return draw_version2(seed, number, fields) if is_version_2 else draw(seed, number, fields)


def _read_value(text: str) -> tuple[str, object]:
    """Return the field and the value of ``FIELD=VALUE``."""
    name, _, value = text.partition("=")
    choices = {"version": (1, 2)}.get(name, (*AXES.get(name, ()), *VERSION2_AXES.get(name, ())))
    found = next((choice for choice in choices if str(choice).lower() == value.lower()), None)
    if found is None:
        fields = ", ".join(dict.fromkeys(["version", *AXES, *VERSION2_AXES]))
        raise click.BadParameter(f"{text}: fields are {fields}; of this one {choices}")
    return name, found


def _read(out: Path, seed: str) -> dict[int, dict[str, object]]:
    """Lines of a report, by the number of their case."""
    if not out.exists():
        return {}
    lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return {line["number"]: line for line in lines if line["seed"] == seed}


def _tell(number: int, given: AnyCase, outcome: Outcome) -> None:
    click.echo(f"{number} {outcome.kind} after {outcome.seconds:.1f} s: {given.to_json()}")
    click.echo("  " + outcome.detail[-1500:].replace("\n", "\n  "))


if __name__ == "__main__":
    main()
