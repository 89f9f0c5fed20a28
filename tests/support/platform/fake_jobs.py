"""What the tests of the estimator share."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

#: Command of a bootstrap that plays the one of ``smp_launch``.
FAKE_BOOTSTRAP = (sys.executable, str(Path(__file__).parents[1] / "scripts" / "fake_bootstrap.py"))


def forget_account(patch: pytest.MonkeyPatch, home: Path) -> None:
    """No credentials, region or configuration of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("HOME", str(home))


def source_folder(parent: Path) -> Path:
    """A source directory with ``train.py`` and a module beside it."""
    folder = parent / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text("print('train')\n")
    (folder / "helper.py").write_text("")
    return folder


def marked(mark: str) -> list[int]:
    """Living processes that carry the mark of a test in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def gone_within(mark: str, seconds: float) -> float:
    """Seconds until no marked process is left.

    Raises:
        AssertionError: some are left after ``seconds``.
    """
    started = time.monotonic()
    while left := marked(mark):
        if time.monotonic() - started > seconds:
            raise AssertionError(f"still alive after {seconds} s: {left}")
        time.sleep(0.02)
    return time.monotonic() - started
