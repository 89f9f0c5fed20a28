"""Models split by ``tsm.transform`` and wrapped by PyTorch's FSDP train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.version2 import make_llama, make_mixtral, make_neox
from support.models.version2_mixtures import make_tabled


@pytest.mark.parametrize(
    ("make", "config", "world"),
    [
        (make_llama, {"hybrid_shard_degree": 2}, 2),
        (make_llama, {"hybrid_shard_degree": 2}, 4),
        (make_llama, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, 2),
        (make_llama, {"tensor_parallel_degree": 2}, 4),
        pytest.param(make_neox, {"tensor_parallel_degree": 2}, 4, marks=pytest.mark.full),
        pytest.param(make_mixtral, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, 4, marks=pytest.mark.full),
    ],
)
def test_a_split_model_trains_as_one_process(ranks: Any, make: Any, config: dict[str, Any], world: int) -> None:
    from support.training.version2_training import train_split

    found_on_ranks = ranks(lambda: train_split(config, make, torch.float64), world, init=False, timeout=120)
    assert len(found_on_ranks[0]["saved"]) > 10  # rank 0 has the whole state
    for found in found_on_ranks:
        assert max(found["apart"].values()) < (1e-5 if make is make_mixtral else 1e-9)  # its router computes in float32
        shards = 1 if world == 2 and "tensor_parallel_degree" in config else 2
        parts = shards * config.get("tensor_parallel_degree", 1)
        assert found["held"] < 1.1 * found["whole"] / parts
        assert max(found["saved"].values(), default=0.0) < (1e-5 if make is make_mixtral else 1e-9)
        assert all(norm > 0.3 for norm in found["norms"])


@pytest.mark.parametrize(
    ("config", "world"),
    [
        ({"tensor_parallel_degree": 2}, 4),
        pytest.param({"hybrid_shard_degree": 2}, 4, marks=pytest.mark.full),
    ],
)
def test_fully_shard_takes_the_jobs_groups(ranks: Any, config: dict[str, Any], world: int) -> None:
    from support.training.version2_training import train_split

    for found in ranks(
        lambda: train_split(config, make_llama, torch.float64, "function"), world, init=False, timeout=120
    ):
        assert max(found["apart"].values()) < 1e-9, found["apart"]
        assert found["held"] < 0.6 * found["whole"] / config.get("tensor_parallel_degree", 1)


def _find_shapes(make: Any, shards: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a rank's parameters, before anything shards them."""
    import torch.sagemaker as tsm

    tsm.init({"tensor_parallel_degree": 2, "hybrid_shard_degree": shards})
    model = tsm.transform(make())
    tsm.shutdown()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_what_is_split_does_not_depend_on_the_sharding(ranks: Any) -> None:
    """Sharded state loads at any hybrid_shard_degree."""
    whole = {name: tuple(parameter.shape) for name, parameter in make_tabled().named_parameters()}
    alone, shared = (ranks(_find_shapes, 4, make_tabled, shards, init=False) for shards in (1, 2))
    assert alone == shared
    assert all(found != whole for found in shared)


def _find_sizes(config: dict[str, Any]) -> list[int]:
    """Return the sizes of the groups that shard a parameter, and one made from it by an operation."""
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import fully_shard

    tsm.init(config)
    weight: Any = fully_shard(torch.nn.Linear(3, 3)).weight
    found = [tensor.device_mesh.get_group().size() for tensor in (weight, weight.detach())]
    tsm.shutdown()
    return found


def test_a_second_job_of_a_process_has_groups_of_its_own(ranks: Any) -> None:
    """PyTorch keeps results of operations for meshes of the same ranks, with groups of the first job."""
    assert ranks(_find_sizes, 1, {"hybrid_shard_degree": 1}, init=False) == [[1, 1]]
    assert ranks(_find_sizes, 2, {"tensor_parallel_degree": 2}, init=False) == [[1, 1], [1, 1]]


def _train_in_half_precision(uses: str) -> tuple[float, float]:
    """Return the norms of gradients with and without ``fully_shard``, of a model that autocast calls twice."""
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import fully_shard

    norms = []
    for shards in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)))
        tsm.init({"hybrid_shard_degree": 2})
        for unit in (*model, model) if shards else ():
            fully_shard(unit)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.set_grad_enabled(uses == "both"):
                first = model(torch.ones(2, 4))
            loss = model(torch.ones(2, 4)).square().sum() + first.sum()
        loss.backward()
        found: list[Any] = [p.grad for p in model.parameters()]
        whole = [each.full_tensor() if shards else each for each in found if each is not None]
        tsm.shutdown()
        norms.append(float(torch.stack([each.norm() for each in whole]).norm()))
    return norms[0], norms[1]


@pytest.mark.parametrize("uses", ["both", "one"])
def test_fully_shard_trains_a_model_that_autocast_calls_twice(ranks: Any, uses: str) -> None:
    """In plain PyTorch the copies of the first call's weights take the gradients of the second, too late."""
    for sharded, whole in ranks(_train_in_half_precision, 2, uses, init=False):
        assert sharded == pytest.approx(whole, rel=1e-2)


class _MostlyFrozen(torch.nn.Module):
    """The second rank's shard has frozen elements only."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.ones(2))
        self.frozen = torch.nn.Parameter(torch.ones(100), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.trained).sum() * self.frozen.mean()


def _clip_with_few_gradients() -> float:
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel

    import torch_sagemaker_finder  # noqa: F401
    from smp_version2.clipping import clip_grad_norm_

    tsm.init({"hybrid_shard_degree": 2})
    model = FullyShardedDataParallel(_MostlyFrozen().double(), use_orig_params=True)
    model(torch.tensor([3.0, 4.0], dtype=torch.float64)).backward()
    norm = float(clip_grad_norm_(model, 1.0))
    tsm.shutdown()
    return norm


def test_ranks_without_gradients_add_numbers_of_the_same_type(ranks: Any) -> None:
    assert ranks(_clip_with_few_gradients, 2, init=False) == [5.0, 5.0]


def _drop_and_accumulate(shards: int) -> float:
    """Return how far a training that drops some gradients once, and keeps zeros for others, is from one process's."""
    import contextlib

    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel

    def train(model: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            for number in range(3):
                is_open = number < 2 and isinstance(model, FullyShardedDataParallel)
                with model.no_sync() if is_open else contextlib.nullcontext():
                    model(torch.randn(4, 3, generator=generator)).square().mean().backward()
            for name, parameter in model.named_parameters():
                if step == 0 and ".1." in f".{name}":
                    parameter.grad = None
            optimizer.step()
        whole = (
            FullyShardedDataParallel.summon_full_params(model)
            if hasattr(model, "no_sync")
            else contextlib.nullcontext()
        )
        with whole:
            return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))

    tsm.init({"hybrid_shard_degree": shards})
    found = train(FullyShardedDataParallel(tsm.transform(make()), use_orig_params=True))
    tsm.shutdown()
    return float((found - train(make())).abs().max())


@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_after_dropped_ones_accumulate_without_sync(ranks: Any, shards: int) -> None:
    """PyTorch's FSDP alone drops what earlier passes have computed, where each rank has whole parameters."""
    assert max(ranks(_drop_and_accumulate, 2, shards, init=False)) < 1e-6


def _call_after_changes(units: str) -> list[float]:
    """Return what a model gives whose weights a script sets to zero, and then to one, each time after a pass without gradients."""
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

    tsm.init({"hybrid_shard_degree": 2})
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(3)]
    model: Any = torch.nn.Sequential(*layers)
    if units == "fully_shard":
        fully_shard(layers[0])
        fully_shard(layers[1:2])
        model = fully_shard(model)
    else:
        given: dict[str, Any] = {"sharding_strategy": ShardingStrategy[units], "use_orig_params": True}
        model[0] = FullyShardedDataParallel(layers[0], **given)
        model = FullyShardedDataParallel(model, **given)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for value in (0.0, 1.0):
        with torch.no_grad():
            model(torch.ones(1, 4))
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.fill_(value)
        found.append(float(model(torch.ones(1, 4)).detach()[0, 0]))
        model(torch.ones(1, 4)).sum().backward()
    return found


@pytest.mark.parametrize("units", ["FULL_SHARD", "SHARD_GRAD_OP", "fully_shard"])
def test_what_a_script_writes_after_an_evaluation_counts_in_the_next_pass(ranks: Any, units: str) -> None:
    for found in ranks(_call_after_changes, 2, units, init=False):
        assert found == [0.0, 64.0]


def test_blocks_are_recognized_by_the_originals_class_names(solo: Any) -> None:
    import torch.sagemaker as tsm

    import torch_sagemaker_finder  # noqa: F401
    from smp_version2.layer_classes import MoELayer, TETransformerLayer, TransformerLayer

    model = make_llama()
    assert not any(isinstance(module, TransformerLayer) for module in model.modules())
    tsm.init({})
    try:
        model = tsm.transform(model)
        for kind in (TransformerLayer, TETransformerLayer):
            found = [type(module).__name__ for module in model.modules() if isinstance(module, kind)]
            assert found == ["LlamaDecoderLayer"] * 2
        assert not any(isinstance(module, MoELayer) for module in model.modules())
    finally:
        tsm.shutdown()


@pytest.mark.parametrize(
    ("make", "config", "world", "shards_by", "comm_type", "by_model"),
    [
        (make_llama, {"hybrid_shard_degree": 2}, 2, "wrapper", "p2p", False),
        (make_llama, {"hybrid_shard_degree": 2}, 2, "function", "all_gather", False),
        (make_neox, {"hybrid_shard_degree": 2}, 4, "wrapper", "all_gather", True),
        (make_mixtral, {"hybrid_shard_degree": 2}, 2, "function", "p2p", False),
        pytest.param(
            make_llama, {"tensor_parallel_degree": 2}, 4, "wrapper", "p2p", False, marks=pytest.mark.full, id="tensor"
        ),
    ],
)
def test_slices_of_a_script_train_as_whole_sequences(
    ranks: Any, make: Any, config: dict[str, Any], world: int, shards_by: str, comm_type: str, by_model: bool
) -> None:
    from support.training.version2_training import train_on_slices

    config = {**config, "context_parallel_degree": 2}
    limit = 1e-4 if by_model else 1e-9  # Transformers computes losses in float32
    for found in ranks(train_on_slices, world, config, make, shards_by, comm_type, by_model, init=False, timeout=120):
        assert max(map(abs, found["losses"])) < limit
        assert max(found["apart"].values()) < limit
        assert found["method"] == {"p2p": "ring", "all_gather": "all_gather"}[comm_type]
        assert not [name for name in found["tried"] if name.startswith("Register")]  # of fully_shard
        if not by_model:  # Transformers shifts labels
            assert found["gathered"] == {}


def _call_with(shapes: list[list[int]], eight_bits: bool) -> str:
    import torch.sagemaker as tsm

    from smp_runtime.fp8.autocast import fp8_autocast

    tsm.init({"context_parallel_degree": 2})
    model = tsm.transform(make_llama())
    names = ("input_ids", "position_ids", "attention_mask")
    given = {name: torch.ones(shape, dtype=torch.long) for name, shape in zip(names, shapes, strict=False)}
    try:
        with fp8_autocast(enabled=eight_bits):
            model(**given)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shapes", [[[2, 5]], [[2, 6], [2, 12]], [[2, 6], [2, 6], [2, 1, 6, 12]], []])
def test_tensors_that_are_no_slices_are_refused(ranks: Any, shapes: list[list[int]]) -> None:
    for said in ranks(_call_with, 2, shapes, False, init=False):
        assert all(str(shape) in said for shape in shapes)
        assert "context_parallel_degree is 2" in said


def test_eight_bits_are_refused_on_slices(ranks: Any) -> None:
    assert all("fp8_autocast" in said for said in ranks(_call_with, 2, [[2, 6]], True, init=False))
    assert ranks(_call_with, 2, [[2, 6]], False, init=False) == ["", ""]


def _load_and_call(way: str) -> str:
    import torch.sagemaker as tsm
    from support.training.version2_training import cut_zigzag
    from torch.utils.data import DataLoader, DistributedSampler

    tsm.init({"context_parallel_degree": 2})
    model = tsm.transform(make_llama())
    rows = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(0))
    shared = {"num_replicas": 1, "rank": 0} if way in ("one batch", "cut by the loader") else {}
    cut_before = "cut by the loader" in way
    sampler = None if way == "not cut" else DistributedSampler(rows, **shared, shuffle=False)
    loader = (
        DataLoader(
            rows, batch_size=2, sampler=sampler, collate_fn=lambda found: {"ids": cut_zigzag(torch.stack(found))}
        )
        if cut_before
        else DataLoader(rows, batch_size=2, sampler=sampler)
    )
    try:
        for batch in loader:
            ids = batch["ids"] if cut_before else batch
            model(input_ids=ids if cut_before or way == "not cut" else cut_zigzag(ids))
    except ValueError as error:
        return f"{error.code} {error}"
    assert len(iter(loader)) == len(loader)
    return ""


def _draw_and_call(way: str, seeds: tuple[int, int]) -> str:
    """Train on batches that no loader made, cut in one of the usual ways."""
    import torch.sagemaker as tsm

    tsm.init({"context_parallel_degree": 2})
    model, rank = tsm.transform(make_llama()), tsm.state.cp_rank
    drawn = torch.Generator().manual_seed(seeds[rank])

    def cut(batch: torch.Tensor) -> torch.Tensor:
        if way == "index_select":
            rows = batch.view(batch.shape[0], 4, batch.shape[1] // 4)
            return rows.index_select(1, torch.tensor([rank, 3 - rank])).reshape(batch.shape[0], -1)
        chunks = torch.split(batch, batch.shape[1] // 4, 1) if way == "split" else batch.chunk(4, 1)
        return torch.cat([chunks[rank], chunks[3 - rank]], 1)

    former = torch.Tensor.chunk
    try:
        for _ in range(17):
            ids = torch.randint(0, 64, (2, 12), generator=drawn)
            model(input_ids=cut(ids), labels=cut(ids))
    except ValueError as error:
        return f"{error.code} {error}"
    assert torch.Tensor.chunk is not former, "nothing is noted from the sixteenth call on"
    return ""


@pytest.mark.parametrize("way", ["chunk", "split", "index_select"])
def test_slices_of_batches_that_no_loader_made(ranks: Any, way: str) -> None:
    assert ranks(_draw_and_call, 2, way, (3, 3), init=False) == ["", ""]
    for said in ranks(_draw_and_call, 2, way, (3, 4), init=False):
        assert said.startswith("SMP310"), said
        assert "rank 1 cut another batch with sequences of 12 tokens than rank 0" in said


def test_compiled_code_may_cut_batches_while_they_are_noted() -> None:
    """It compiles in one piece, and what it cuts is not noted."""
    from smp_runtime.context.layout import zigzag
    from smp_runtime.context.loaded_batches import CutBatches

    def cut(batch: torch.Tensor) -> torch.Tensor:
        first, _, _, last = batch.chunk(4, 1)
        assert len(torch.split(batch, 3, 1)) == 4
        return torch.cat([first, last], 1) + batch.index_select(1, torch.arange(6)) * 0

    batch, layout = torch.arange(24).view(2, 12), zigzag(12, 2)
    former, cuts = torch.Tensor.chunk, CutBatches()
    end, compiled = cuts.watch(), torch.compile(cut, backend="aot_eager", fullgraph=True)
    try:
        mine = compiled(batch)
        assert mine.tolist() == [[0, 1, 2, 9, 10, 11], [12, 13, 14, 21, 22, 23]]
        assert cuts.take([mine], layout, 0) == [[]]
        assert torch.equal(cut(batch), mine)
        (found,) = cuts.take([mine], layout, 0)
        assert found
        assert all(torch.equal(each, batch) for each in found)
    finally:
        end()
    assert torch.Tensor.chunk is former
    assert torch.equal(compiled(batch), mine)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("one batch", ()),
        ("cut by the loader", ()),
        ("others, cut by the loader", ("rank 1 cut another batch",)),
        ("not cut", ("with the same tokens", "tsm.state.cp_rank")),
        ("other batches", ("rank 1 loaded another batch", "12 tokens", "num_replicas=tsm.state.world_size")),
    ],
)
def test_slices_of_different_batches_are_refused(ranks: Any, way: str, words: tuple[str, ...]) -> None:
    for said in ranks(_load_and_call, 2, way, init=False):
        assert said.startswith("SMP310") == bool(words)
        assert all(word in said for word in words)


class _Stacked(torch.nn.Module):
    """A table, matrices and a stack of them; sizes that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 6)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.experts = torch.nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + torch.einsum("bi,eij->bj", x, self.experts)
        return x.square().mean()


def _train_by_muon(config: dict[str, Any], wraps: str = "function") -> dict[str, torch.Tensor] | str:
    """Return the weights after a few updates; or why there are none. Without ``config``, in one process."""
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model: Any = _Stacked().double()
    if config:
        tsm.init(config)
        model = FullyShardedDataParallel(model, use_orig_params=True) if wraps == "wrapper" else fully_shard(model)
    try:
        optimizer = smp.optimizers.Muon(model, lr=0.02, adamw_lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([step, 1, 2, 4])).backward()
            optimizer.step()
    except smp.exceptions.SMPUserError as error:
        return str(error)
    return {
        name: p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach()
        for name, p in model.named_parameters()
    }


def test_muon_gets_whole_matrices_of_fully_shard(ranks: Any) -> None:
    wanted = _train_by_muon({})
    assert isinstance(wanted, dict)
    for found in ranks(_train_by_muon, 2, {"hybrid_shard_degree": 2}, init=False):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-11)


def test_muon_is_refused_where_pytorch_does_not_know_the_matrix(ranks: Any) -> None:
    for found in ranks(_train_by_muon, 2, {"tensor_parallel_degree": 2}, init=False):
        assert "with tensor_parallel_degree 2 of version 2 a rank has parts of them" in found
    for found in ranks(_train_by_muon, 2, {"hybrid_shard_degree": 2}, "wrapper", init=False):
        assert "FullyShardedDataParallel inside" in found
