"""Starts the runner: ``.venv/bin/python tests/runner --help``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

# The folder itself, which Python puts first for ``python tests/runner``, would make its modules importable by bare names.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from runner.command import main  # noqa: E402 (found by the line above)

if __name__ == "__main__":
    # A shell that starts this in the background has it ignore Ctrl-C, and tests that send it would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    main()
