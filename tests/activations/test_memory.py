"""Activations that are alive, counted, against the formula of docs/how-it-works/activation-checkpointing.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from live_bytes import LiveBytes
from torch import nn

import smdistributed.modelparallel.torch as smp

sys.path.insert(0, str(Path(__file__).parents[2] / "entrypoints"))
import train_gpt

LAYERS, HEADS = 16, 4
REGIONS = {"each": 16, "group_4": 4, "group_5": 4, "contiguous": 1}
#: Layers of the region that backward runs again first: the last one.
LAST = {"each": 1, "group_4": 4, "group_5": 1, "contiguous": 16}


def _alive(strategy: str | None, batch: int, seq: int, hidden: int, dtype: torch.dtype) -> float:
    """Bytes that autograd keeps at the most: after the forward pass, or after a recomputation."""
    torch.manual_seed(0)
    config = train_gpt.GPTConfig(layers=LAYERS, hidden=hidden, heads=HEADS, seq_len=seq)
    net = nn.Sequential(*[train_gpt.Block(config) for _ in range(LAYERS)]).to(dtype)
    if strategy is not None:
        smp.set_activation_checkpointing(net, strategy=strategy)
    live = LiveBytes(net.parameters())
    with live, live.watching_regions():
        x = torch.randn(batch, seq, hidden, dtype=dtype).requires_grad_()
        output = net(x)
        kept = live.now - output.nbytes  # which is the caller's
        loss = output.sum()
        del output
        loss.backward()
    return max([kept, *live.recomputed])


@pytest.mark.parametrize(
    ("batch", "seq", "hidden", "dtype"),
    [
        (2, 32, 64, torch.float32),
        pytest.param(4, 16, 32, torch.float32, marks=pytest.mark.full),
        pytest.param(1, 64, 64, torch.float64, marks=pytest.mark.full),
    ],
)
def test_bytes_follow_the_formula(batch, seq, hidden, dtype):
    size = dtype.itemsize
    unit = batch * seq * hidden * size
    layer = 16 * unit + batch * seq * (HEADS + 4) * size
    none = _alive(None, batch, seq, hidden, dtype)
    assert none == pytest.approx(LAYERS * layer, rel=0.05)
    for strategy, regions in REGIONS.items():
        found = _alive(strategy, batch, seq, hidden, dtype)
        largest = max(LAST[strategy] * layer + (regions - 1) * unit, 0)
        if strategy == "group_5":  # the region before the last has five layers, and one input less is kept
            largest = 5 * layer + (regions - 2) * unit
        assert found == pytest.approx(largest, rel=0.05), strategy
        if strategy == "group_4":
            assert found <= none / 3
