"""Complex and empty parameters, sparse gradients and optimizers in float64 train as in one process, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError

SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}
STAGES = {"pipeline_parallel_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "state": {"shard_optimizer_state": True},
    "sharding": SHARDED,
    "pp": STAGES,
    "zero bubble": {**STAGES, "pipeline": "zero_bubble"},
    "tp": {"tensor_parallel_degree": 2},
}
Record = tuple[list[float], dict[str, torch.Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Spectral(nn.Module):
    """Complex weights of a filter and of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.mix = nn.Linear(5, 5, dtype=torch.complex128)
        self.table = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = self.mix(torch.fft.rfft(x[:, self.table]).to(self.filter.dtype) * self.filter)
        return x + torch.tanh(torch.fft.irfft(waves, n=8)).to(x.dtype)


class Empty(nn.Module):
    """Layers and parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.back = nn.Linear(8, 0), nn.Linear(0, 8)
        self.extra = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(self.none(x)) + self.extra.sum()


class Net(nn.Module):
    def __init__(self, middle: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([middle(), Block(), middle(), Block()])
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


class Words(nn.Module):
    """Tables with sparse gradients, one of which only some batches use."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always
        self.table = nn.Embedding(11, 8, sparse=True)
        self.bag = nn.EmbeddingBag(11, 8, sparse=True, mode="sum")
        self.rare = nn.Embedding(3, 8, sparse=True)
        self.block = Block()
        self.head = nn.Linear(8, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ids = y[:, None] + torch.arange(3)
        hidden = self.table(ids) + self.bag(ids)[:, None]
        if self.always or bool((y == 0).any()):
            hidden = hidden + self.rare(y.clamp(max=2))[:, None]
        return F.cross_entropy(self.head(self.block(hidden)).flatten(0, 1), ids.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Net(Block),
    "complex": lambda: Net(Spectral),
    "empty": lambda: Net(Empty),
    "sparse": Words,
    "sparse, all used": lambda: Words(always=True),  # by all ranks, as sharded parameters are
}


def _sparse_adam(module: nn.Module) -> list[torch.optim.Optimizer]:
    named = list(module.named_parameters())
    tables = [p for name, p in named if any(word in name for word in ("table", "bag", "rare"))]
    others = [p for name, p in named if not any(word in name for word in ("table", "bag", "rare"))]
    return [torch.optim.SparseAdam(tables, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def _one(
    make: Callable[..., torch.optim.Optimizer], **settings: Any
) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda module: [make([p for p in module.parameters() if p.requires_grad], **settings)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "adamw": _one(torch.optim.AdamW, lr=1e-2),
    "sgd": _one(torch.optim.SGD, lr=0.1),
    "momentum": _one(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": _one(torch.optim.Adagrad, lr=0.1),
    "sparse adam": _sparse_adam,
    **{
        name: lambda module, name=name: [getattr(smp.optimizers, name)(module.parameters(), lr=1e-2)]
        for name in ("FusedAdam", "FusedLAMB", "FusedLANS", "FusedLARS", "FusedNovoGrad")
    },
}


def _batch(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 + step)
    x = torch.randn(size, 8, dtype=torch.float64, generator=drawn)
    return x, torch.randint(0, 5, (size,), generator=drawn)


def _measured(parameters: list[nn.Parameter]) -> list[float]:
    """Every function of PyTorch that measures or clips gradients, one after the other."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    said = [float(get_total_norm(gradients, kind)) for kind in (2.0, 3.0, float("inf"))]
    clip_grads_with_norm_(parameters, 0.5, get_total_norm(gradients))
    clip_grad_value_(parameters, 0.05)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    said.append(float(get_total_norm(gradients, 1.0)))
    said.append(float(clip_grad_norm_(parameters, 0.3)))
    return [*said, float(get_total_norm(parameters))]


def _alone(model: str, optimizer: str, measures: bool = False, steps: int = 3) -> Record:
    torch.manual_seed(0)
    module = MODELS[model]().double() if model != "complex" else _wide(MODELS[model]())
    optimizers, said = OPTIMIZERS[optimizer](module), []
    for step in range(steps):
        for each in optimizers:
            each.zero_grad()
        x, y = _batch(step)
        losses = [module(*part) for part in zip(x.chunk(4), y.chunk(4), strict=True)]
        loss = torch.stack(losses).mean()
        loss.backward()
        said.append(float(loss))
        if measures:
            said += _measured(list(module.parameters()))
        for each in optimizers:
            each.step()
    return said, {name: value.detach() for name, value in module.state_dict().items()}


def _wide(module: nn.Module) -> nn.Module:
    """In float64, with complex numbers as they are."""
    return module._apply(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def _trained(model: str, optimizer: str, measures: bool = False, steps: int = 3) -> Record:
    torch.manual_seed(0)
    module = MODELS[model]().double() if model != "complex" else _wide(MODELS[model]())
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(module)
    wrapped = smp.DistributedModel(module)
    optimizers = [smp.DistributedOptimizer(each) for each in OPTIMIZERS[optimizer](wrapped)]

    @smp.step
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = wrapped(x, y)
        wrapped.backward(loss)
        return loss

    said = []
    for step in range(steps):
        for each in optimizers:
            each.zero_grad()
        x, y = (tensor.chunk(smp.dp_size())[smp.dp_rank()].contiguous() for tensor in _batch(step))
        loss = float(train(x, y).reduce_mean())
        said.append(sum(smp.allgather(loss, smp.WORLD)) / smp.size())
        if measures:
            said += _measured(list(wrapped.parameters()))
        for each in optimizers:
            each.step()
    return said, {name.removeprefix("module."): value.cpu() for name, value in wrapped.state_dict().items()}


def _compare(found: list[Record], wanted: Record, tolerance: float = 1e-9) -> None:
    for losses, state in found:
        assert losses == pytest.approx(wanted[0], rel=tolerance)
        assert state.keys() == wanted[1].keys()
        for name, value in state.items():
            torch.testing.assert_close(
                value, wanted[1][name], rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


def _config(layout: str) -> dict[str, Any]:
    ranks = 1 if "pipeline_parallel_degree" in LAYOUTS[layout] or "tensor_parallel_degree" in LAYOUTS[layout] else 2
    return {"ddp": True, "microbatches": 4 // ranks, **LAYOUTS[layout]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["complex", "empty"])
def test_parameters_of_other_kinds_train_as_in_one_process(
    ranks: Callable[..., list[Any]], model: str, layout: str
) -> None:
    _compare(ranks(_trained, 2, model, "adamw", config=_config(layout)), _alone(model, "adamw"))


@pytest.mark.parametrize("layout", ["pp", "tp", "sharding", "state"])
@pytest.mark.parametrize("optimizer", ["FusedAdam", "FusedLAMB", "FusedLANS", "FusedLARS", "FusedNovoGrad"])
def test_optimizers_with_norms_train_in_float64(ranks: Callable[..., list[Any]], optimizer: str, layout: str) -> None:
    _compare(ranks(_trained, 2, "plain", optimizer, config=_config(layout)), _alone("plain", optimizer))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pytorchs_norms_are_those_of_one_process(ranks: Callable[..., list[Any]], layout: str) -> None:
    # Where no gradient lies on a parameter, clip_grad_norm_ returns its norm in float32.
    _compare(ranks(_trained, 2, "plain", "sgd", True, config=_config(layout)), _alone("plain", "sgd", True), 1e-7)


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        *(("ddp", name) for name in ("sgd", "momentum", "adagrad", "sparse adam", "adamw")),
        *((layout, "sgd") for layout in ("state", "sharding", "pp", "zero bubble")),
        ("pp", "sparse adam"),
    ],
)
def test_sparse_gradients_train_as_in_one_process(ranks: Callable[..., list[Any]], layout: str, optimizer: str) -> None:
    model = "sparse, all used" if layout == "sharding" else "sparse"
    wanted = _alone_dense(optimizer) if optimizer == "adamw" else _alone(model, optimizer)
    _compare(ranks(_trained, 2, model, optimizer, config=_config(layout)), wanted)


def _alone_dense(optimizer: str) -> Record:
    """What an optimizer that takes no sparse gradients does with dense ones."""

    def dense() -> nn.Module:
        module = Words()
        for table in (module.table, module.bag, module.rare):
            table.sparse = False
        return module

    MODELS["dense"] = dense
    try:
        return _alone("dense", optimizer)
    finally:
        del MODELS["dense"]


def _refusal(model: str, optimizer: str) -> str:
    module = MODELS[model]().double()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(module)
    wrapped = smp.DistributedModel(module)
    make = {"lbfgs": _one(torch.optim.LBFGS), **OPTIMIZERS}[optimizer]
    try:
        for each in make(wrapped):
            smp.DistributedOptimizer(each)
    except SMPUserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "model", "optimizer", "words"),
    [
        ("tp", "plain", "lbfgs", "LBFGS looks at all parameters together, but with tensor_parallel_degree 2"),
        ("pp", "plain", "lbfgs", "LBFGS looks at all parameters together, but with pipeline_parallel_degree 2"),
        (
            "state",
            "sparse",
            "sparse adam",
            "SparseAdam updates the rows of sparse gradients, but with shard_optimizer_state",
        ),
        ("sharding", "sparse", "sparse adam", "SparseAdam updates the rows of sparse gradients, but with sharding"),
    ],
)
def test_optimizers_that_need_what_a_rank_has_not_are_refused(
    ranks: Callable[..., list[Any]], layout: str, model: str, optimizer: str, words: str
) -> None:
    for said in ranks(_refusal, 2, model, optimizer, config=_config(layout)):
        assert words in said
