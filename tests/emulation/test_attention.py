"""Attention on devices: the host waits for no copy of numbers that a layer needs in every call."""

from __future__ import annotations

import functools

import pytest
import torch

from smp_emulation.checked import emulated
from smp_runtime.nn import attention_scores
from smp_runtime.nn.attention_scores import Scoring, alibi_slopes, attend, rotate

HEADS, LENGTH, CHANNELS = 4, 5, 8


def _rotated(inputs: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(LENGTH, device=inputs.device)[None]
    return rotate(inputs, (1.0, 0.1, 0.01, 0.001), interleaved=False, positions=positions)


def _with_linear_bias(inputs: torch.Tensor) -> torch.Tensor:
    scoring = Scoring(CHANNELS**-0.5, causal=True, slopes=alibi_slopes(HEADS))
    return attend(inputs, inputs[:, :1], inputs[:, :1], None, scoring)


@pytest.mark.parametrize("layer", [_rotated, _with_linear_bias], ids=["rotary", "ALiBi"])
def test_only_the_first_call_waits(layer, monkeypatch):
    # Later tests have other devices.
    monkeypatch.setattr(attention_scores, "_kept_on", functools.lru_cache(attention_scores._made_on))
    inputs = torch.randn(2, HEADS, LENGTH, CHANNELS, generator=torch.Generator().manual_seed(0))
    expected = layer(inputs)
    with emulated() as emulation:
        on_device = inputs.to("cuda")
        layer(on_device)
        emulation.waits.clear()
        found = layer(on_device)
        assert not emulation.waits
        torch.testing.assert_close(found.cpu(), expected)
