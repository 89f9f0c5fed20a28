"""Muon: whole matrices are updated wherever their parts are, and training equals one process in float64."""

from __future__ import annotations

import contextlib
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.training.muon_training import LAYOUTS, STEPS, Net, batch_of, mean_loss, muon_of
from support.training.rank_training import training_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.optim.kinds.expected_state import refuse_state_of_others
from smp_runtime.optim.kinds.inner_step import step_inner
from smp_runtime.optim.matrices.muon import MuonUpdate, update_matrices
from smp_runtime.optim.matrices.ownership import MatrixHolding, in_rounds, share_out
from smp_runtime.optim.matrices.regions import regions_of
from smp_runtime.optim.matrices.rule import hidden_matrices
from smp_runtime.parameters.registry import TensorSlice

needs_pytorch_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has Muon since 2.9")


def _alone(tied: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net(tied).double()
    optimizer = muon_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_loss(model, *batch_of(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def _trained(tied: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = Net(tied).double()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(module)
    # Units of some hundred elements, so that matrices are cut at every place.
    model = smp.DistributedModel(module, bucket_cap_mb=1e-3)
    optimizer = smp.DistributedOptimizer(muon_of(model))
    train = training_step(model, mean_loss)
    rank, size = (smp.rdp_rank(), smp.rdp_size()) if smp.tp_size() > 1 else (smp.dp_rank(), smp.dp_size())
    for step in range(STEPS):
        optimizer.zero_grad()
        train(*(tensor.chunk(size)[rank] for tensor in batch_of(step)))
        optimizer.clip_master_grads(0.5)
        optimizer.step()
    return {name.removeprefix("module."): value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_equal_one_process(ranks: Callable[..., list[Any]], layout: str) -> None:
    world, settings = LAYOUTS[layout]
    tied = layout in ("state", "tp × sharding")
    wanted = _alone(tied)
    for found in ranks(_trained, world, tied, config={"ddp": True, "microbatches": 2, **settings}):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert float((value - wanted[name]).norm()) <= 1e-9 * float(wanted[name].norm()), name


def _sent() -> tuple[float, float]:
    """Bytes that all ranks send in an update beyond those of AdamW, and the fewest they could be."""
    from counting import CountingCollectives

    session = smp.init()
    found = []
    for make in (lambda m: torch.optim.AdamW(m.parameters()), lambda m: smp.optimizers.Muon(m, lr=0.02)):
        counting = CountingCollectives(session.ranks.collectives)
        session.ranks = replace(session.ranks, collectives=counting)
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(64, 96) if i % 2 == 0 else nn.Linear(96, 64) for i in range(6)))
        if smp.tp_size() > 1:
            smp.set_tensor_parallelism(module)
        model = smp.DistributedModel(module, bucket_cap_mb=0.02)
        optimizer = smp.DistributedOptimizer(make(model))
        train = training_step(model, lambda m, x: m(x).square().mean())
        for step in range(3):
            optimizer.zero_grad()
            train(torch.randn(4, 64))
            if step == 2:
                counting.sent = 0.0
            optimizer.step()
        smp.barrier()
        found.append(sum(smp.allgather(counting.sent, smp.WORLD)))
        session.ranks = replace(session.ranks, collectives=counting._inner)
    places = {}
    for record in (record for record in model.registry if len(record.shape) == 2):
        place, whole = record.placement, record.shape[0] * record.shape[1]
        split = whole // smp.tp_size() if place.tensor_axis is not None else whole
        places[record.name] = split if place.shard is None else place.shard[1] - place.shard[0], whole
    bound = 0.0
    for name, (_, whole) in places.items():
        parts = smp.allgather(places[name][0], smp.WORLD)
        replicas = sum(parts) // whole
        bound += 2 * 2 * (whole - max(parts)) * replicas  # there and back, in bfloat16
    return found[1] - found[0], bound


@pytest.mark.parametrize("layout", ["state", "sharding", "tp"])
def test_a_matrix_goes_to_the_rank_with_most_of_it(ranks: Callable[..., list[Any]], layout: str) -> None:
    world, settings = LAYOUTS[layout]
    for sent, bound in ranks(_sent, world, config={"ddp": True, **settings}):
        assert bound > 0
        assert sent <= 1.02 * bound


class Live(TorchDispatchMode):
    """The most bytes at one time of tensors that operations have made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(made):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            place, size = storage.data_ptr(), storage.nbytes()
            if size and place not in given and place not in self._known:
                self._known.add(place)
                self.now += size
                weakref.finalize(storage, self._gone, place, size)
        self.most = max(self.most, self.now)
        return made

    def _gone(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def _peak() -> tuple[int, int, int]:
    """Bytes that a rank holds of weights, gradients and state; most bytes more in an update; elements of a matrix."""
    import smp_runtime.optim.matrices.ownership as ownership

    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Linear(128, 256, bias=False) if i % 2 == 0 else nn.Linear(256, 128, bias=False) for i in range(12))
    )
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module, bucket_cap_mb=0.1)
    optimizer = smp.DistributedOptimizer(smp.optimizers.Muon(model, lr=0.02))
    train = training_step(model, lambda m, x: m(x).square().mean())
    former, ownership.MATRIX_ROUND_BYTES = ownership.MATRIX_ROUND_BYTES, 1
    live = Live()
    try:
        for step in range(3):
            optimizer.zero_grad()
            train(torch.randn(4, 128))
            optimizer.update_master_grads()
            with live if step == 2 else contextlib.nullcontext():
                step_inner(optimizer.optimizer, optimizer._matrices)
    finally:
        ownership.MATRIX_ROUND_BYTES = former
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    state = [value for each in optimizer.state.values() for value in each.values()]
    return sum(t.nbytes for t in (*updated, *updated, *state)), live.most, 128 * 256


@pytest.mark.parametrize("layout", ["state", "sharding", "tp"])
def test_the_memory_of_an_update_is_that_of_one_matrix(ranks: Callable[..., list[Any]], layout: str) -> None:
    world, settings = LAYOUTS[layout]
    for held, more, elements in ranks(_peak, world, config={"ddp": True, **settings}):
        # Two of the matrix and two products of its shorter side, in float32 on the CPU, and the matrix as it was sent.
        bound = held + 4 * (2 * elements + 2 * 128 * 128) + 2 * elements
        assert held + more <= 1.05 * bound


def _cut(shape: tuple[int, ...], axis: int | None, pieces: Sequence[int]) -> list[TensorSlice | None]:
    return [None] if axis is None else [TensorSlice.of(shape, axis, rank, 2, pieces) for rank in range(2)]


def test_elements_find_their_places_in_whole_matrices() -> None:
    chance = random.Random(0)
    for _ in range(300):
        shape = tuple(chance.choice((2, 4, 6)) for _ in range(chance.choice((2, 3))))
        axis = chance.choice((None, *range(len(shape))))
        pieces = (2, 2) if axis is not None and shape[axis] == 4 and chance.random() < 0.5 else ()
        whole = torch.randn(shape)
        matrices = whole.view(-1, *shape[-2:])
        found = torch.full_like(matrices, float("nan"))
        for where in _cut(shape, axis, pieces):
            local = whole if where is None else where.cut(whole).contiguous()
            cuts = sorted({0, local.numel(), *(chance.randrange(local.numel() + 1) for _ in range(2))})
            for start, stop in itertools.pairwise(cuts):
                mine = local.view(-1)[start:stop]
                for region in regions_of(shape, axis, None if where is None else where.bounds, start, stop):
                    part = mine[region.offset : region.offset + region.elements]
                    region.put(found[region.number], part)
                    again = torch.empty_like(part)
                    region.take(matrices[region.number], again)
                    assert torch.equal(again, part)
        assert torch.equal(found, matrices)


def _holding(rank: int, regions: dict[str, tuple[int, int]], sharers: tuple[int, ...]) -> MatrixHolding:
    found = {name: regions_of((4, 4), None, None, *run) for name, run in regions.items()}
    return MatrixHolding(sharers, (rank,), found, frozenset(), dict.fromkeys(found, 4))


def test_owners_have_most_elements_and_share_the_work() -> None:
    mine = {"a": (0, 8), "b": (0, 8), "c": (0, 3), "d": (0, 3)}
    theirs = {"a": (8, 16), "b": (8, 16), "c": (3, 16), "d": (3, 16)}
    pairs = [(0, 1), (2, 3)]  # two replicas, which have the same
    holdings = {rank: _holding(rank, (mine, theirs)[rank % 2], pair) for pair in pairs for rank in pair}
    shared = share_out(holdings)
    owners = {name: [each.owner for each in shared if each.key[0] == name] for name in mine}
    assert owners == {"a": [0, 2], "b": [1, 3], "c": [1, 3], "d": [1, 3]}
    assert in_rounds(shared) == [shared]
    with pytest.raises(AssertionError, match="lack elements"):
        share_out({0: _holding(0, mine, (0,))})


def test_rounds_have_memory_for_a_matrix_or_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp_runtime.optim.matrices.ownership.MATRIX_ROUND_BYTES", 1)
    names = [f"m{number}" for number in range(6)]
    holdings = {r: _holding(r, dict.fromkeys(names, ((0, 8), (8, 16))[r]), (0, 1)) for r in range(2)}
    rounds = in_rounds(share_out(holdings))
    assert [sorted(each.owner for each in shared) for shared in rounds] == [[0, 1]] * 3


@needs_pytorch_muon
@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.5}])
def test_updates_in_float32_are_pytorchs(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs = [nn.Parameter(torch.randn(shape)) for shape in ((8, 4), (4, 8), (6, 6))]
    mine = [nn.Parameter(each.detach().clone()) for each in theirs]
    stack = nn.Parameter(torch.stack([mine[2].detach()] * 2))
    near = [nn.Parameter(each.detach().clone()) for each in theirs]
    first = torch.optim.Muon(theirs, lr=0.02, **settings)
    second = smp.optimizers.Muon([{"params": [*mine, stack], "use_muon": True}], lr=0.02, **settings)
    third = smp.optimizers.Muon([{"params": near, "use_muon": True}], lr=0.02, **settings)
    for _ in range(4):
        for their, own in zip(theirs, mine, strict=True):
            their.grad = torch.randn_like(their)
            own.grad = their.grad.clone()
        for their, own in zip(theirs, near, strict=True):
            own.grad = their.grad.clone()
        stack.grad = torch.stack([mine[2].grad] * 2)
        first.step()
        update_matrices(MuonUpdate(second, as_pytorch=True), second.param_groups, None)
        third.step()
    assert all(torch.equal(their, own) for their, own in zip(theirs, mine, strict=True))
    assert torch.equal(stack[1], theirs[2])
    for their, own in zip(theirs, near, strict=True):  # on the CPU fewer roundings; updates are about 0.02 of a weight
        torch.testing.assert_close(own, their, rtol=0, atol=2e-3)


@needs_pytorch_muon
def test_a_state_of_pytorchs_is_gone_on_from() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(6, 6)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    theirs = torch.optim.Muon(weights[:1], lr=0.02, momentum=0.5)
    mine = smp.optimizers.Muon([{"params": weights[1:], "use_muon": True}])
    for step in range(3):
        gradient = torch.randn(6, 6)
        for weight in weights:
            weight.grad = gradient.clone()
        theirs.step()
        if step == 0:
            weights[1].data.copy_(weights[0].data)
            mine.load_state_dict(theirs.state_dict())
        else:
            mine.step()
    assert mine.param_groups[0]["momentum"] == 0.5
    former, kept = theirs.state[weights[0]], mine.state[weights[1]]
    assert torch.equal(kept["momentum_buffer"], former["momentum_buffer"])
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0.01)


@pytest.mark.parametrize("former", ["AdamW", "SGD"])
def test_a_state_of_another_optimizer_is_refused(former: str) -> None:
    made = smp.optimizers.Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": True}])
    keys = [{"step", "exp_avg", "exp_avg_sq"}]  # which the part of AdamW has, too
    with pytest.raises(CheckpointError, match=f"has the state of {former}, which cannot be loaded into Muon"):
        refuse_state_of_others(made, made.state_dict()["param_groups"], keys, "the file", former)


def _with_pytorchs(split: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(3)))
    if split and smp.tp_size() > 1:
        smp.set_tensor_parallelism(module)
    model: Any = smp.DistributedModel(module, bucket_cap_mb=1e-3) if split else module
    inner = torch.optim.Muon(model.parameters(), lr=0.02)
    calls: list[int] = []
    inner.register_step_post_hook(lambda *_: calls.append(1))
    optimizer: Any = smp.DistributedOptimizer(inner) if split else inner
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if split:
            size = smp.dp_size() // smp.tp_size()
            training_step(model, lambda m, x: m(x).square().mean())(x.chunk(size)[smp.rdp_rank()])
        else:
            model(x).square().mean().backward()
        optimizer.step()
    assert len(calls) == STEPS
    return {name.removeprefix("module."): value.cpu() for name, value in model.state_dict().items()}


@needs_pytorch_muon
@pytest.mark.parametrize("layout", ["state", "sharding", "tp"])
def test_pytorchs_own_gets_whole_matrices(ranks: Callable[..., list[Any]], layout: str) -> None:
    world, settings = LAYOUTS[layout]
    wanted = _with_pytorchs(split=False)
    for found in ranks(_with_pytorchs, world, True, config={"ddp": True, **settings}):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-9)


class Mixed(nn.Module):
    """What is no hidden matrix though it has two or three dimensions, and what is one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(20, 8), nn.Embedding(8, 8)
        self.position_embeddings = nn.Parameter(torch.zeros(1, 5, 8))
        self.conv = nn.Conv1d(8, 8, 3)
        self.layers = nn.ModuleList([nn.Linear(8, 20), nn.Linear(20, 8)])
        self.gate = nn.Linear(8, 1)
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))
        self.out, self.score = nn.Linear(8, 20), nn.Linear(8, 3)
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.zeros(2, 20))})
        self.lora_A = nn.ParameterDict({"default": nn.Parameter(torch.zeros(2, 8))})
        self.tied = nn.Linear(8, 20)
        self.tied.weight = self.table.weight


def test_the_rule_finds_hidden_matrices() -> None:
    model = Mixed()
    matrices, others = hidden_matrices(model)
    wanted = [model.experts, model.layers[0].weight, model.layers[1].weight, model.lora_A["default"]]
    assert list(map(id, matrices)) == list(map(id, wanted))
    assert len(matrices) + len(others) == len(list(model.parameters()))


def test_what_is_not_said_or_out_of_range_is_refused() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    with pytest.raises(SMPUserError, match="does not say whether.*pass the model itself"):
        smp.optimizers.Muon([weight])
    with pytest.raises(SMPUserError, match=r"shape \[2\].*\"use_muon\": False"):
        smp.optimizers.Muon([{"params": [bias], "use_muon": True}])
    groups = [{"params": [weight], "use_muon": True}, {"params": [bias], "use_muon": False, "weight_decay": 0.0}]
    for wrong in ({"ns_steps": 0}, {"momentum": -1.0}, {"adjust_lr_fn": "sqrt"}, {"ns_coefficients": (1.0,)}):
        with pytest.raises(SMPUserError, match=f"Muon: {next(iter(wrong))}"):
            smp.optimizers.Muon(groups, **wrong)
    made = smp.optimizers.Muon(groups, lr=0.02, adamw_lr=1e-3)
    assert [(group["lr"], group["weight_decay"]) for group in made.param_groups] == [(0.02, 0.1), (1e-3, 0.0)]
