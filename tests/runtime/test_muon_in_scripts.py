"""Muon beside what else scripts do: other optimizers, scalers, accumulation, frozen and late parameters; as in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.training.muon_training import LAYOUTS, STEPS, WIDTH, WORDS, Net, batch_of, mean_loss, muon_of
from support.training.rank_training import training_step
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.optim.matrices.rule import hidden_matrices

State = dict[str, torch.Tensor]


class Adapted(nn.Module):
    """A frozen map with a low rank beside it, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base_layer(x) + self.lora_B(self.lora_A(x)))


class AdaptedNet(nn.Module):
    """Adapters between a table and a head that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Adapted() for _ in range(2))
        for part in (self.table, self.head):
            part.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _made(case: str) -> nn.Module:
    torch.manual_seed(0)
    module = AdaptedNet() if case == "adapters" else Net()
    if case == "frozen":
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in ("table.weight", "layers.0.up.weight", "layers.1.experts"))
    return module


def _optimizers(case: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    if case != "two optimizers":
        return [muon_of(model)]
    hidden, others = hidden_matrices(model)
    return [
        smp.optimizers.Muon([{"params": hidden, "use_muon": True}], lr=0.02),
        torch.optim.AdamW(others, lr=3e-3, eps=1e-3),
    ]


def _passes(case: str, step: int) -> list[tuple[torch.Tensor, ...]]:
    """The batches of an update."""
    halves = [tensor.chunk(2) for tensor in batch_of(step)]
    return list(zip(*halves, strict=True)) if case == "accumulation" else [batch_of(step)]


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _alone(case: str, start: State) -> State:
    with _in_float64():
        model = _made(case)
        model.load_state_dict(start)
        optimizers = _optimizers(case, model)
        for step in range(STEPS):
            model.zero_grad()
            for batch in (passes := _passes(case, step)):
                (mean_loss(model, *batch) / len(passes)).backward()
            for optimizer in optimizers:
                optimizer.step()
    return model.state_dict()


def _trained(case: str) -> tuple[State, State]:
    with _in_float64():
        with smp.delay_param_initialization(enabled=case == "delayed"):
            module = _made(case)
        if smp.tp_size() > 1:
            smp.set_tensor_parallelism(module)
        model = smp.DistributedModel(module, bucket_cap_mb=1e-3)
        optimizers: list[Any] = [smp.DistributedOptimizer(each) for each in _optimizers(case, model)]
        start = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        scaler = smp.amp.GradScaler(init_scale=256.0, enabled=case == "scaler")
        rank, size = (smp.rdp_rank(), smp.rdp_size()) if smp.tp_size() > 1 else (smp.dp_rank(), smp.dp_size())
        parts = 1

        def loss(*batch: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = scaler.scale(mean_loss(*batch) / parts)
            return found

        train = training_step(model, loss)
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            passes = _passes(case, step)
            parts = len(passes)
            for batch in passes:
                train(*(tensor.chunk(size)[rank] for tensor in batch))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return start, {name: value.cpu() for name, value in model.state_dict().items()}


CASES = [
    *(
        (case, layout)
        for case in ("accumulation", "frozen", "adapters", "scaler")
        for layout in ("state", "sharding", "tp")
    ),
    *(("two optimizers", layout) for layout in ("dp", "tp", "pp")),
    *(("delayed", layout) for layout in ("state", "sharding", "tp", "tp × state")),
]


@pytest.mark.parametrize(("case", "layout"), CASES)
def test_scripts_train_as_one_process(ranks: Callable[..., list[Any]], case: str, layout: str) -> None:
    world, settings = LAYOUTS[layout]
    config = {"ddp": True, "microbatches": 2 if "pp" in layout else 1, **settings}
    found = ranks(_trained, world, case, config=config)
    wanted = _alone(case, found[0][0])
    for start, last in found:
        assert last.keys() == wanted.keys()
        for name, value in last.items():
            assert float((value - wanted[name]).norm()) <= 1e-9 * float(wanted[name].norm()), name
            is_trained = case != "adapters" or "lora" in name
            is_frozen = case == "frozen" and name in ("table.weight", "layers.0.up.weight", "layers.1.experts")
            assert torch.equal(value, start[name]) == (is_frozen or not is_trained), name


def _two_models(split: bool) -> list[torch.Tensor]:
    """Train two models, whose parameters have the same names, by one optimizer; return their whole matrices."""
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).double() for _ in range(2)]
    models: list[Any] = [smp.DistributedModel(each) for each in modules if split and _marked(each)] or modules
    groups = [{"params": [p for model in models for p in model.parameters()], "use_muon": True}]
    inner = smp.optimizers.Muon(groups, lr=0.02)
    optimizer: Any = smp.DistributedOptimizer(inner) if split else inner
    steps = [training_step(model, lambda m, x: m(x).square().mean()) for model in models] if split else []
    for step in range(STEPS):
        optimizer.zero_grad()
        for at, model in enumerate(models):
            x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * step + at))
            if split:
                steps[at](x)
            else:
                model(x).square().mean().backward()
        optimizer.step()
    return [value.cpu() for model in models for value in model.state_dict().values()]


def _marked(module: nn.Module) -> bool:
    smp.set_tensor_parallelism(module)
    return True


def test_two_models_with_the_same_names_have_matrices_of_their_own(ranks: Callable[..., list[Any]]) -> None:
    wanted = _two_models(split=False)
    for found in ranks(_two_models, 2, True, config={"ddp": True, **LAYOUTS["tp"][1]}):
        for mine, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)
