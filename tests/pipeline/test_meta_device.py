"""Modules without values take batches with values, in any precision."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from smp_runtime.pipeline.partition.meta_device import values_left_out

X = torch.ones(2, 3, 4)
CALLS = {
    "linear": lambda: nn.Linear(4, 4, device="meta")(X),
    "convolution": lambda: nn.Conv1d(3, 4, 1, device="meta")(X),
    "bilinear": lambda: nn.Bilinear(4, 4, 4, device="meta")(X, X),
    "attention": lambda: nn.MultiheadAttention(4, 2, device="meta")(X, X, X)[0],
    "embedding": lambda: nn.Embedding(4, 4, device="meta")(X.long()),
    "norm": lambda: nn.LayerNorm(4, device="meta")(X),
    "LSTM": lambda: nn.LSTM(4, 4, device="meta")(X)[0],
    "GRU": lambda: nn.GRU(4, 4, device="meta")(X)[0],
    "RNN": lambda: nn.RNN(4, 4, device="meta", nonlinearity="relu")(X)[0],
    "repeated": lambda: nn.Linear(4, 4, device="meta")(X)[0].repeat_interleave(torch.tensor([1, 2, 1]), dim=0),
}


@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_comes_out_has_its_shape(call, is_cast):
    cast = torch.autocast("cpu", torch.bfloat16) if is_cast else contextlib.nullcontext()
    with values_left_out(torch.device("cpu")), cast:
        out = call()
    assert out.is_meta
    assert out.shape[-1] == 4
