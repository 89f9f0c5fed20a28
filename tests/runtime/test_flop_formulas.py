"""Each rank with emulated CUDA began its log with a warning of PyTorch's that there is no Triton."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys

import pytest
import torch

from smp_runtime.tensors import flop_formulas

COUNTER = "torch.utils.flop_counter"


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="with Triton there is nothing to warn of")
def test_the_import_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delitem(sys.modules, COUNTER)  # and the one that others use comes back
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # as where CUDA is emulated
    # PyTorch's loggers pass nothing on to the root.
    monkeypatch.setattr(logging.getLogger(COUNTER), "handlers", [caplog.handler])
    importlib.import_module(COUNTER)
    assert "triton" in caplog.text, "PyTorch has left its warning out: this project can import it as it is"
    caplog.clear()
    del sys.modules[COUNTER]
    importlib.reload(flop_formulas)
    assert caplog.text == ""
    assert flop_formulas.flop_registry
