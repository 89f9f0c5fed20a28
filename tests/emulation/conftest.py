"""What tests of the emulation of CUDA share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smp_emulation.installing import emulated


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``torch.cuda`` answers on the CPU, for the first of two ranks of this host."""
    monkeypatch.setenv("SMP_LOCAL_SIZE", "2")
    with emulated():
        yield
