"""``smp-estimator profile``: the records of PyTorch's profiler on all ranks, as one trace."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.markup import escape

from smp_config import ConfigError
from smp_estimator.cli.console import console


@click.command()
@click.argument("job_output")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write one trace of all ranks for ui.perfetto.dev.")
def profile(job_output: str, trace: str | None) -> None:
    """Show and merge the records of PyTorch's profiler on the ranks of a job.

    JOB_OUTPUT is the job's output: its path or folder, or output.tar.gz. Ranks record with
    environment={"SMP_PROFILE": "10-12"}, the steps. If they have also recorded the timeline of a pipeline
    (SMP_TIMELINE), it is shown above each rank's threads, on the same clock.
    """
    from smp_estimator.timeline.profiles import merged_trace, profile_table, read_profiles, timeline_beside

    traces = read_profiles(job_output)
    out = console()
    out.print(profile_table(traces))
    if trace is None:
        return
    try:
        Path(trace).write_text(json.dumps(merged_trace(traces, timeline_beside(job_output))), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{trace} cannot be written: {error.strerror}; --trace names a file in a folder that exists", code="SMP108"
        ) from None
    out.print(f"trace: {escape(trace)} (open it in ui.perfetto.dev)", soft_wrap=True)
