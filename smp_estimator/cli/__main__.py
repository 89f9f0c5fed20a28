"""``python -m smp_estimator.cli``: the same as the command ``smp-estimator``."""

from smp_estimator.cli.main import main

main()
