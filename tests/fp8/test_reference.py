"""Emulated FP8 equals a reference of the published formulas in float64, written here, and recomputing changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.fp8 import autocast
from smp_runtime.fp8.autocast import checkpoint, fp8_autocast
from smp_runtime.fp8.recipe import DelayedScaling, Format
from smp_runtime.fp8.scales import E4M3, E5M2, from_eight_bits, to_eight_bits

#: Bits of mantissa, least exponent of a normal number, greatest number.
FORMATS = {"E4M3": (3, -6, 448.0), "E5M2": (2, -14, 57344.0)}
STEPS, RATE = 7, 0.05


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    yield
    autocast.end_all()


def round_to(value: float, name: str) -> float:
    """Return the nearest number of a format, of two that are as near the even one; greater ones become the greatest."""
    mantissa, least, greatest = FORMATS[name]
    if value == 0.0:
        return 0.0
    exponent = max(math.frexp(abs(value))[1] - 1, least)
    step = 2.0 ** (exponent - mantissa)
    return math.copysign(min(round(abs(value) / step) * step, greatest), value)  # Python rounds halves to even


class Reference:
    """One linear layer with delayed scaling: ``scale = greatest / amax / 2**margin``, and 1 at first."""

    def __init__(self, layer: nn.Linear, recipe: DelayedScaling) -> None:
        self.weight, self.bias = layer.weight.detach().clone(), layer.bias.detach().clone()
        self.recipe = recipe
        backward = "E4M3" if recipe.fp8_format is Format.E4M3 else "E5M2"
        self.formats = {"input": "E4M3", "weight": "E4M3", "gradient": backward}
        self.scales = dict.fromkeys(self.formats, 1.0)
        self.history: dict[str, list[float]] = {name: [] for name in self.formats}

    def rounded(self, name: str, values: torch.Tensor) -> torch.Tensor:
        self.history[name].insert(0, float(values.abs().max()))
        scale = self.scales[name]
        flat = [round_to(value * scale, self.formats[name]) / scale for value in values.flatten().tolist()]
        return torch.tensor(flat, dtype=torch.float64).view(values.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x, self.w = self.rounded("input", x), self.rounded("weight", self.weight)
        return self.x @ self.w.t() + self.bias

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        rounded = self.rounded("gradient", gradient)
        self.dw, self.db = rounded.t() @ self.x, gradient.sum(0)
        return rounded @ self.w

    def update(self) -> None:
        for name, values in self.history.items():
            kept = values[: self.recipe.amax_history_len]
            # Scales are kept in float32, as are the values that they come from.
            amax = torch.tensor(max(kept) if self.recipe.amax_compute_algo == "max" else kept[0], dtype=torch.float32)
            if amax > 0:
                greatest = torch.tensor(FORMATS[self.formats[name]][2], dtype=torch.float32)
                self.scales[name] = float(greatest / amax / 2**self.recipe.margin)
        self.weight -= RATE * self.dw
        self.bias -= RATE * self.db


RECIPES = [
    DelayedScaling(amax_history_len=3),
    DelayedScaling(amax_history_len=1024, amax_compute_algo="most_recent", margin=1),
    DelayedScaling(fp8_format=Format.E4M3, amax_history_len=2),
]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double()


def draw(step: int) -> torch.Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64) * (
        1 + 3 * (step == 2)
    )


def train(recipe: DelayedScaling, call: Any = None, backward_passes: int = 1) -> nn.Sequential:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(backward_passes):
            with fp8_autocast(enabled=True, fp8_recipe=recipe):
                output = model(draw(step)) if call is None else call(model, draw(step).requires_grad_())
            (output.square().sum() / 2 / backward_passes).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("recipe", RECIPES, ids=["max", "most recent", "E4M3"])
def test_training_equals_the_formulas(recipe: DelayedScaling) -> None:
    model = make()
    first, second = Reference(model[0], recipe), Reference(model[2], recipe)
    for step in range(STEPS):
        hidden = first.forward(draw(step))
        output = second.forward(hidden.clamp(min=0.0))
        first.backward(second.backward(output) * (hidden > 0))
        first.update(), second.update()
    found = train(recipe)
    for layer, wanted in ((found[0], first), (found[2], second)):
        torch.testing.assert_close(layer.weight.detach(), wanted.weight, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(layer.bias.detach(), wanted.bias, rtol=1e-12, atol=1e-13)
    plain = make()(draw(0))
    assert not torch.allclose(found(draw(0)), plain, rtol=1e-3), "and it has learned"


@pytest.mark.parametrize(("name", "kind"), [("E4M3", E4M3), ("E5M2", E5M2)])
def test_rounding_is_to_the_nearest_number_of_the_format(name: str, kind: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(kind).double()
    numbers = numbers[numbers.isfinite()].unique()
    values = torch.cat(
        [numbers, (numbers[1:] + numbers[:-1]) / 2, torch.randn(500, dtype=torch.float64) * 10, numbers * 3]
    )
    one = torch.ones((), dtype=torch.float64)
    found = from_eight_bits(to_eight_bits(values, one, kind), one, torch.float64)
    assert found.tolist() == [round_to(value, name) for value in values.tolist()]


WAYS = {
    "with the window": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant, with the window": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "by PyTorch": lambda model, x: recompute(model, x, use_reentrant=False),
    "reentrant, by PyTorch": lambda model, x: recompute(model, x, use_reentrant=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_recomputing_changes_nothing(way: str) -> None:
    wanted = [parameter.clone() for parameter in train(RECIPES[0], backward_passes=2).parameters()]
    autocast.end_all()
    found = train(RECIPES[0], WAYS[way], backward_passes=2).parameters()
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_a_context_that_is_recomputed_after_another_has_its_own_scales() -> None:
    recipe = DelayedScaling(amax_history_len=1)

    def gradients(call: Any) -> list[torch.Tensor]:
        autocast.end_all()
        model = make()
        for scale in (1.0, 50.0):
            with fp8_autocast(fp8_recipe=recipe):
                model(draw(0) * scale).sum().backward()
        model.zero_grad()
        outputs = []
        for scale in (1.0, 50.0):
            with fp8_autocast(fp8_recipe=recipe):
                outputs.append(call(model, (draw(1) * scale).requires_grad_()))
        torch.stack(outputs).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    wanted, found = gradients(lambda model, x: model(x)), gradients(WAYS["with the window"])
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_outside_and_switched_off_nothing_is_rounded() -> None:
    model = make()
    plain = model(draw(0))
    with fp8_autocast(enabled=False):
        assert torch.equal(model(draw(0)), plain)
    with fp8_autocast():
        assert not torch.equal(model(draw(0)), plain)
        with fp8_autocast(enabled=False):
            assert torch.equal(model(draw(0)), plain)
            with fp8_autocast():
                assert not torch.equal(model(draw(0)), plain)
        assert not torch.equal(model(draw(0)), plain)
    assert torch.equal(model(draw(0)), plain)
    autocast.end_all()
    assert nn.Linear.forward.__module__ == "torch.nn.modules.linear"


def test_evaluation_leaves_the_scales_as_they_are() -> None:
    model = make()
    with fp8_autocast(fp8_recipe=RECIPES[0]):
        model(draw(0)).sum().backward()
    with torch.no_grad(), fp8_autocast(fp8_recipe=RECIPES[0]):
        model(draw(1) * 1000)
    before = autocast.scales_to_save()
    with torch.no_grad(), fp8_autocast(fp8_recipe=RECIPES[0]):
        model(draw(1) * 1000)
    assert autocast.scales_to_save() == before


def test_layers_whose_sizes_are_no_multiples_of_16_stay_as_they_are() -> None:
    small = nn.Linear(8, 16).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    plain = small(x)
    with fp8_autocast():
        assert torch.equal(small(x), plain)


def test_a_saved_state_goes_on(tmp_path: Any) -> None:
    train(RECIPES[0])
    state = autocast.scales_to_save()
    assert set(state) == {"layer 0", "layer 1"}
    autocast.end_all()
    autocast.go_on_with(state)
    train(DelayedScaling(amax_history_len=3))  # takes it when it begins
    autocast.end_all()
    for damaged in ("text", {"a": 1}, {"a": {"scale": "AAAA"}}, {"a": {"scale": "%", "history": "", "amax": ""}}):
        layers = autocast.started_layers()
        with pytest.raises(CheckpointError):
            layers.load_state_dict(damaged)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"fp8_format": Format.E5M2}, "E5M2"),
        ({"amax_history_len": 0}, "amax_history_len is 0"),
        ({"margin": -1}, "margin is -1"),
        ({"amax_compute_algo": "mean"}, "'mean'"),
        ({"fp8_dpa": True}, "fp8_dpa"),
        ({"interval": 2}, "interval is 2"),
    ],
)
def test_recipes_that_cannot_be_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SMPUserError, match=said) as caught:
        DelayedScaling(**arguments)
    assert caught.value.code == "SMP321"


def test_contexts_that_cannot_be_are_refused() -> None:
    for arguments in ({"fp8_recipe": "hybrid"}, {"calibrating": True}):
        with pytest.raises(SMPUserError) as caught, fp8_autocast(**arguments):  # type: ignore[arg-type]
            pass
        assert caught.value.code == "SMP321"
    first, second = (fp8_autocast(fp8_recipe=recipe) for recipe in RECIPES[:2])
    with pytest.raises(SMPUserError, match="another recipe"), first, second:
        pass
    with pytest.raises(SMPUserError, match="distribute_saved"):
        checkpoint(make(), draw(0), distribute_saved_activations=True)
