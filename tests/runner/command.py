"""The command line of the runner: ``make test-all``, ``make test-report``, and what the other targets of the Makefile call."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from pathlib import Path

import click

from runner import near, running, table
from runner.durations import FILE, Durations
from runner.environments import ENVIRONMENTS, ROOT, Environment, find
from runner.report import Report
from runner.slices import Slice, deal

_TABLE = click.option(
    "--table",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("test-table.jsonl"),
    show_default=True,
    help="a line of JSON per test, environment and commit",
)
_ENVIRONMENT = click.option(
    "--environment",
    "names",
    multiple=True,
    type=click.Choice([environment.name for environment in ENVIRONMENTS]),
    help="only this one; may be given several times",
)


@click.group()
def main() -> None:
    """Run all tests in all environments, in slices, and keep a table of their outcomes."""


@main.command()
@_TABLE
@_ENVIRONMENT
@click.option(
    "--slice", "asked", default="", help="k or k/n for the k-th of n, 'commit' for the one whose turn it is; all"
)
@click.option("--limit", default=0, help="seconds, after which the run ends, to be continued by the next; 0 for none")
@click.option("--build/--no-build", default=True, help="build environments that are not there")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def run(path: Path, names: tuple[str, ...], asked: str, limit: int, build: bool, options: tuple[str, ...]) -> None:
    """Run slices; OPTIONS are those of pytest. The exit code is 1 if a test fails."""
    slices = deal(ENVIRONMENTS, Durations.read(), ROOT)
    numbers = _numbers(asked, len(slices))
    if 0 < limit <= running.MARGIN:
        raise click.BadParameter(f"{limit}: no test begins in the last {running.MARGIN} s", param_hint="--limit")
    end = time.time() + limit if limit else 0.0
    setting = running.Setting(ROOT, path.resolve(), table.current_commit(ROOT), options, end, build)
    environments = {environment.name: environment for environment in ENVIRONMENTS}
    results = []
    for number in numbers:
        chosen = Slice(tuple(run for run in slices[number - 1].runs if not names or run.environment in names))
        if chosen.runs:
            click.echo(f"=== slice {number} of {len(slices)}, about {chosen.seconds:.0f} s, at {setting.commit}")
            results += running.run_slice(chosen, environments, setting)
    sys.exit(any(result.is_fault for result in results))


@main.command()
@_TABLE
@click.option("--at-commit", default="", help="outcomes at this commit; the current state of the working tree")
@click.option("--since-commit", default="", help="outcomes at this commit or a later one")
@click.option("--any-commit", is_flag=True, help="all outcomes, the newest of each test")
@click.option("--whole", is_flag=True, help="list all tests")
def report(path: Path, at_commit: str, since_commit: str, any_commit: bool, whole: bool) -> None:
    """Print the table by environment; the exit code is 1 if a test failed, or passed in no environment."""
    if since_commit:
        commits: set[str] | None = table.commits_since(ROOT, since_commit)
    else:
        commits = None if any_commit else {_commit(at_commit)}
    found = Report.of(table.read(path), [environment.name for environment in ENVIRONMENTS], commits)
    click.echo(found.text(whole=whole))
    sys.exit(not found.is_good)


@main.command()
@_TABLE
@_ENVIRONMENT
@click.option("--build/--no-build", default=False, help="build environments that are not there")
def collect(path: Path, names: tuple[str, ...], build: bool) -> None:
    """Write the tests of all environments into the table, so that the report knows those that never run."""
    setting = running.Setting(ROOT, path.resolve(), table.current_commit(ROOT), build=build)
    table.mend(path)
    worst = 0
    for environment in _chosen(names):
        if reason := environment.why_missing(ROOT, build=build):
            click.echo(f"{environment.name}: missing, {reason}")
        else:
            click.echo(environment.name)
            worst = max(worst, running.collect(environment, setting))
    sys.exit(worst)


@main.command()
@_TABLE
def durations(path: Path) -> None:
    """Take durations over from the table; slices are dealt by them."""
    names = [environment.name for environment in ENVIRONMENTS]
    Durations.read().updated(table.read(path), names, ROOT).write()
    click.echo(f"{FILE.relative_to(ROOT)}: commit it with the change whose tests were measured")


@main.command()
def slices() -> None:
    """Print the slices."""
    for number, each in enumerate(deal(ENVIRONMENTS, Durations.read(), ROOT), 1):
        parts = ", ".join(f"{run.environment} ({len(run.parts)} files)" for run in each.runs)
        click.echo(f"{number}: about {each.seconds:.0f} s, {parts}")


@main.command("pytest")
@click.argument("name", type=click.Choice([environment.name for environment in ENVIRONMENTS]))
@click.option("--sample", is_flag=True, help="the tests of the short targets")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="a table for the outcomes")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def call_pytest(name: str, sample: bool, record: Path | None, options: tuple[str, ...]) -> None:
    """Run the tests of an environment; OPTIONS are those of pytest."""
    environment = find(name)
    selections = environment.sample if sample else environment.selections
    sys.exit(running.call_pytest(environment, selections, options, ROOT, record))


@main.command("near")
@click.option("--base", default="HEAD", show_default=True, help="the commit from which the change is counted")
@click.option("--limit", default=120, show_default=True, help="seconds for all of them")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def run_near(base: str, limit: int, options: tuple[str, ...]) -> None:
    """Run the tests that are near a change; OPTIONS are those of pytest. The exit code is that of pytest."""
    changed = near.changed_files(ROOT, base)
    if not changed:
        click.echo("no file of Python has changed")
        return
    chosen = near.choose(changed, Durations.read(), limit)
    click.echo(
        f"{len(changed)} files have changed: {len(chosen.files)} test files, about {chosen.seconds:.0f} s; for "
        f"{len(chosen.left)} more that the change can reach there is no time: LIMIT={limit}"
    )
    newest = find("newest")
    sample = dataclasses.replace(newest.sample[0], paths=chosen.files)
    sys.exit(running.call_pytest(newest, [sample], options, ROOT))


def _chosen(names: tuple[str, ...]) -> list[Environment]:
    return [environment for environment in ENVIRONMENTS if not names or environment.name in names]


def _numbers(asked: str, count: int) -> list[int]:
    """Return the numbers of the slices that are asked for, from 1."""
    if not asked:
        return list(range(1, count + 1))
    if asked == "commit":
        return [table.count_commits(ROOT) % count + 1]
    found = re.fullmatch(r"(\d+)(?:/(\d+))?", asked)
    if not found or not 1 <= int(found[1]) <= count or (found[2] and int(found[2]) != count):
        raise click.BadParameter(f"{asked}: there are {count} slices, 1/{count} to {count}/{count}")
    return [int(found[1])]


def _commit(revision: str) -> str:
    return table.resolve(ROOT, revision) if revision else table.current_commit(ROOT)
