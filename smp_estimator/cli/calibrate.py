"""``smp-estimator calibrate``: the rates of this machine's GPU, as a card that plans and rehearsals read."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import click

from smp_config import ConfigError
from smp_config.machine.extras import install_command

#: Seconds of all measurements, and of quick ones.
SECONDS, QUICK_SECONDS = 600, 60

#: Seconds that importing PyTorch, and the first call of each kernel, may take beside them.
_START_SECONDS = 600


@click.command()
@click.argument("file", type=click.Path(dir_okay=False), default="rate-card.json")
@click.option("--quick", is_flag=True, help=f"About {QUICK_SECONDS} seconds instead of {SECONDS}.")
@click.option(
    "--instance-type", "--instance", help="Whose links between GPUs and hosts the card gets; one GPU measures none."
)
def calibrate(file: str, quick: bool, instance_type: str | None) -> None:
    """Measure kernels on this machine's GPU for ten minutes, and write their rates to FILE (rate-card.json).

    plan and rehearse read it with --rates. Without a GPU all kernels run too, tiny; such a card says so, and forecasts nothing.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"PyTorch is not installed here, and kernels are measured with it: {install_command('local')}",
            code="SMP108",
        )
    seconds = QUICK_SECONDS if quick else SECONDS
    place = Path(file).resolve()
    words = [sys.executable, "-m", "smp_tools.calibration", str(place), str(seconds)]
    words += [instance_type] if instance_type else []
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=seconds + _START_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the measurements took more than {seconds + _START_SECONDS} s and were ended; other programs may use the GPU: end "
            "them, or pass --quick",
            code="SMP108",
        ) from None
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(
            f"the measurements failed: {last[0]}; run {' '.join(words[1:3])} yourself for all of the message",
            code="SMP108",
        )
    click.echo(f"wrote {place}: smp-estimator plan … --rates {file}")
