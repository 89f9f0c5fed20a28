"""The example script's evaluation, which may be turned off."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest


def test_no_batches_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "entrypoints"))
    import train_gpt

    model: Any = Namespace(eval=lambda: None, train=lambda: None)
    nothing: Any = None
    assert train_gpt.evaluate(model, nothing, Namespace(eval_batches=0), nothing) is None
    assert train_gpt.shown(None) == "none"
    assert train_gpt.shown(1.0) == "1.0000"
    sys.modules.pop("train_gpt")
