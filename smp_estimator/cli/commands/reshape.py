"""``smp-estimator reshape``: a running job goes over to other degrees, without being stopped."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from smp_config import ConfigError
from smp_estimator.cli.console import console
from smp_launch.watch.running import find_running_job
from smp_records.reshaping import VARIABLE, ask, read_answer

_EXAMPLE = '{"microbatches": 4}'


@click.command()
@click.argument("job", default="")
@click.option("--parameters", required=True, help='What changes, as JSON: {"pipeline_parallel_degree": 2}.')
@click.option("--timeout", default=600.0, show_default=True, help="Seconds to wait for the job's answer.")
def reshape(job: str, parameters: str, timeout: float) -> None:
    """Change the degrees of a running job. JOB is its name, or the beginning of it.

    For jobs that run as processes of this machine, of the same user, with SMP_RESHAPE_REQUESTS=1 in their environment. All ranks
    finish the same update, and go on with the other degrees. Exit code 1 when the job goes on as it was.
    """
    found = find_running_job(job)
    ask(found.folder, _read(parameters))
    deadline = time.monotonic() + timeout
    while (said := read_answer(found.folder)) is None:
        if not found.folder.is_dir():
            raise ConfigError(f"job {found.name!r} has ended before it came to the request", code="SMP314")
        if time.monotonic() > deadline:
            raise ConfigError(
                f"job {found.name!r} has not answered for {timeout:g} s: it takes requests if {VARIABLE}=1 is in its environment, "
                "and after its next optimizer.step(); the request stays",
                code="SMP314",
            )
        time.sleep(0.1)
    if "error" in said:
        raise ConfigError(str(said["error"]), code="SMP314")
    text = f"job {found.name or 'without a name'} goes on with {json.dumps(_read(parameters))}; it took {said['seconds']:.2f} s"
    console().print(text, markup=False, highlight=False, soft_wrap=True)


def _read(parameters: str) -> dict[str, Any]:
    """Parse the dictionary in a text.

    Raises:
        ConfigError: the text is not a dictionary of parameters.
    """
    try:
        value = json.loads(parameters)
    except ValueError as error:
        raise ConfigError(
            f"--parameters {parameters!r} is no JSON ({error}); write for example '{{\"microbatches\": 4}}'",
            code="SMP314",
        ) from None
    if not isinstance(value, dict) or not value:
        raise ConfigError(
            f"--parameters {parameters!r} is no dictionary of parameters, such as '{{\"microbatches\": 4}}'",
            code="SMP314",
        )
    return value
