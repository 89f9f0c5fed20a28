"""``python -m smp_tools.calibration FILE SECONDS [INSTANCE_TYPE]``: what ``smp-estimator calibrate`` runs."""

from __future__ import annotations

import sys
from pathlib import Path

from smp_emulation.installing import install_where_asked
from smp_tools.calibration.measure import calibrate


def main(words: list[str]) -> None:
    """Measure and write the card."""
    install_where_asked()
    file, seconds, *instance_type = words
    made = calibrate(float(seconds), *instance_type)
    Path(file).write_text(made.to_json() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
