"""``smp-estimator where``: the current activity of each rank of a running job, and its line in the script."""

from __future__ import annotations

import click

from smp_estimator.cli.console import console
from smp_launch.watch.report import describe
from smp_launch.watch.running import find_running_job, positions_of


@click.command()
@click.argument("job", default="")
@click.option("--stacks", is_flag=True, help="Show the stacks of all threads, too.")
def where(job: str, stacks: bool) -> None:
    """Ask a running job where its ranks are. JOB is its name, or the beginning of it.

    Works for jobs that run as processes of this machine, of the same user. The job continues meanwhile. Exit code 1 if no such
    job runs.
    """
    found = find_running_job(job)
    positions, verdict = positions_of(found)
    out = console()
    out.print(f"job {found.name or 'without a name'}: {len(positions)} ranks", markup=False, highlight=False)
    for position in positions.values():
        out.print(describe(position), markup=False, highlight=False, soft_wrap=True)
        threads = position.threads if stacks else ()
        for thread in threads:
            main = " (main)" if thread.ident == position.where.main_thread else ""
            lines = [f"  thread {thread.ident:#x}{main}"]
            lines += [f"    {frame}" for frame in thread.frames]
            out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if verdict is not None:
        whose = "" if verdict.rank is None else f"rank {verdict.rank} "
        out.print(f"now: {whose}{verdict.text}", markup=False, highlight=False, soft_wrap=True)
