"""``smp-estimator top``: how each rank of a running job spends its time, and which ranks slow down the others."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

import click

from smp_config import ConfigError
from smp_estimator.cli.console import console
from smp_estimator.watching.rank_table import json_of, rows_of, table_of
from smp_estimator.watching.stragglers import Stragglers
from smp_launch.watch.pace import compare_records, read_records
from smp_launch.watch.running import RunningJob, find_running_job
from smp_records.records import PaceRecord, parse_pace
from smp_records.tracking import RECORDS_VARIABLE

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Seconds for which ranks that begin are waited for.
_START_SECONDS = 10.0

#: A view of a job: what its ranks did since the one before.
Views = Iterator[list[PaceRecord]]


@click.command()
@click.argument("job", default="")
@click.option("--once", is_flag=True, help="Show one table and end.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each table.")
@click.option("--seconds", type=click.FloatRange(0.1, 3600), default=2.0, show_default=True, help="Between two tables.")
@click.option(
    "--log", type=click.File("r", encoding="utf-8", errors="replace"), help="Read a job's log; - is the input."
)
@click.option("--cloud", is_flag=True, help="Read the log of a job in the cloud.")
def top(job: str, once: bool, as_json: bool, seconds: float, log: IO[str] | None, cloud: bool) -> None:
    """Show how each rank spends its time. JOB is the job's name, or the beginning of it.

    Without --log and --cloud, the job runs as processes of this machine, and is not disturbed. The other sources
    need lines from the ranks, which environment={"SMP_RANK_RECORDS": "10"} makes them print every 10 seconds.
    """
    name, views = _views(job, seconds, log, cloud)
    stragglers, newest, shown = Stragglers(), {}, 0
    out = console()
    with _screen(out, live=not (once or as_json) and out.is_terminal) as show:
        for records in views:
            newest.update({record.rank: record for record in records})
            stragglers.add(records)
            if once and log is not None:
                continue  # the state at the log's end
            show(_view(name, newest, stragglers, as_json=as_json))
            shown += 1
            if once:
                return
        if not shown and newest:
            show(_view(name, newest, stragglers, as_json=as_json))
    if not newest:
        raise ConfigError(
            f"nothing is known of the ranks of {name}; its log has no lines of them: give the job "
            f'environment={{"{RECORDS_VARIABLE}": "10"}}, or wait for its first steps',
            code="SMP108",
        )


def _views(job: str, seconds: float, log: IO[str] | None, cloud: bool) -> tuple[str, Views]:
    if log is not None:
        name = job or str(getattr(log, "name", "the log"))
        return name, _of_lines(log)
    if cloud:
        return job, _of_cloud(job, seconds)
    found = find_running_job(job)
    name = found.name or "a job without a name"
    return name, _of_machine(found, seconds)


def _of_machine(job: RunningJob, seconds: float) -> Views:
    began = time.monotonic()
    before = read_records(job.folder)
    while before or time.monotonic() - began < _START_SECONDS:
        time.sleep(seconds)
        after = read_records(job.folder)
        if records := compare_records(before, after):
            yield records
        before = after


def _of_lines(lines: Iterable[str]) -> Views:
    for line in lines:
        if (record := parse_pace(line)) is not None:
            yield [record]


def _of_cloud(job: str, seconds: float) -> Views:
    if not job:
        raise ConfigError(
            "JOB is missing; name a training job of the cloud: smp-estimator top JOB --cloud", code="SMP108"
        )
    import boto3

    from smp_estimator.cloud.log import ENDED, CloudLog

    session = boto3.Session()
    log, client = CloudLog(_Session(session), job), session.client("sagemaker")
    while True:
        has_ended = client.describe_training_job(TrainingJobName=job)["TrainingJobStatus"] in ENDED
        parsed = [parse_pace(line) for line in log.new_lines()]
        records = [record for record in parsed if record is not None]
        if records:
            yield records
        if has_ended:
            return
        # Each look is a call of the cloud's API, which limits calls per second and account.
        time.sleep(max(seconds, 5.0))


class _Session:
    """The part of an SDK session that a reader of logs uses."""

    def __init__(self, boto_session: Any) -> None:
        self.boto_session = boto_session


def _view(name: str, newest: dict[int, PaceRecord], stragglers: Stragglers, *, as_json: bool) -> RenderableType:
    rows, found = rows_of(newest.values()), stragglers.found()
    if as_json:
        return json.dumps(json_of(name, rows, found))
    from rich.console import Group
    from rich.text import Text

    step = max((row.step for row in rows), default=0)
    return Group(table_of(rows, f"{name}, step {step}"), *(Text(str(straggler), style="yellow") for straggler in found))


class _screen:  # noqa: N801 - used like a function
    """Shows one view after the other: in its place in a terminal, else below the one before."""

    def __init__(self, out: Any, *, live: bool) -> None:
        from rich.live import Live

        self._out = out
        self._live = Live(console=out, auto_refresh=False) if live else None

    def __enter__(self) -> Any:
        if self._live is None:
            return lambda view: self._out.print(view, soft_wrap=isinstance(view, str), markup=False, highlight=False)
        self._live.start()
        return lambda view: self._live.update(view, refresh=True) if self._live is not None else None

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
