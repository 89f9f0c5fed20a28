"""Attention on devices: the host waits for no copy of numbers that a layer needs in every call."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def _attended(device: str, is_causal: bool, dropout: float) -> list[torch.Tensor]:
    """Return the output of the kernel without a fused one, and the gradients of its inputs."""
    drawn = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, HEADS, LENGTH, CHANNELS, generator=drawn).to(device).requires_grad_() for _ in range(3)]
    torch.manual_seed(1)
    with sdpa_kernel(SDPBackend.MATH):
        found = F.scaled_dot_product_attention(*inputs, is_causal=is_causal, dropout_p=dropout)
    found.square().sum().backward()
    return [tensor.detach().cpu() for tensor in (found, *(each.grad for each in inputs))]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_without_a_fused_kernel_is_that_of_the_host(is_causal, dropout):
    expected = _attended("cpu", is_causal, dropout)
    with emulated(seed=2):
        found = _attended("cuda", is_causal, dropout)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_deterministic_decoder_trains():
    def train(device):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(CHANNELS, 2, 16, dropout=0.2, batch_first=True).to(device)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH).to(device)
        x = torch.randn(2, LENGTH, CHANNELS, generator=torch.Generator().manual_seed(1)).to(device)
        torch.manual_seed(2)
        with sdpa_kernel(SDPBackend.MATH):
            layer(x, src_mask=mask, is_causal=True).square().mean().backward()
        return [parameter.grad.cpu() for parameter in layer.parameters()]

    expected = train("cpu")
    with emulated(seed=3):
        found = train("cuda")
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


HELPERS = {
    "one_hot": lambda x: F.one_hot(x.argsort(), 5),
    "quantile": lambda x: torch.quantile(x, 0.3),
    "Tensor.quantile": lambda x: x.quantile(0.3),
    "nanquantile": lambda x: torch.nanquantile(x, 0.3),
    "combinations": lambda x: torch.combinations(x),
    "vander": lambda x: torch.vander(x),
}


@pytest.mark.parametrize("name", HELPERS)
def test_helper_tensors_of_a_function_are_on_its_device(name):
    x = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0])
    expected = HELPERS[name](x)
    with emulated():
        found = HELPERS[name](x.to("cuda"))
        assert found.is_cuda
        assert torch.ones(2).device.type == "cpu"
        torch.testing.assert_close(found.cpu(), expected)
