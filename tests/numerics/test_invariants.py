"""What a job checks of itself: each check finds a planted fault, names its first tensor, and is silent otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smp_tools.numerics.checksums import checksum

STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "o2": (2, {"shard_optimizer_state": True}),
    "s2": (2, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}),
    "s2 twice": (4, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "tp2-dp2": (4, {"tensor_parallel_degree": 2}),
    "pp2": (2, {"pipeline_parallel_degree": 2}),
    "pp2-dp2": (4, {"pipeline_parallel_degree": 2}),
}


class Net(nn.Module):
    """A tied embedding around two residual blocks, with an input that may mask positions."""

    def __init__(self) -> None:
        import smdistributed.modelparallel.torch as smp

        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        with smp.tensor_parallelism():
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        weights = torch.softmax(mask[:, None, :].expand(-1, mask.shape[1], -1), -1)
        x = x + weights @ self.down(torch.tanh(self.up(self.norm(x))))
        return self.head(x)


def _train(fault: str, name: str, rank: int, updates: int, fp16: bool = False) -> str:
    """Train with a fault; returns what the checks say."""
    import contextlib

    from support.faults.planted import planted

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import NumericsError
    from smp_runtime.tensors.parameter_attributes import get_data

    torch.manual_seed(0)
    here = smp.rank() == rank
    plants = {
        "a wrong slice": ("smp_runtime.parameters.registry:TensorSlice.cut", "self.bounds", "(0, self.stop - self.start)"),
        "a wrong shard": ("smp_runtime.sharding.flat_unit:FlatUnit.take", "copy_(part)", "copy_(part * 0.5)"),
        "a wrong master": ("smp_runtime.parameters.optimizer_shards:OptimizerShard.take", "(whole))", "(whole).abs())"),
        "NaN in what is gathered": (
            "smp_runtime.sharding.flat_unit:ShardedUnit.attach",
            "self.ready = True",
            "self.ready, self.full[-9] = True, float('nan')",
        ),
        "a broken gather": (
            "smp_runtime.sharding.sharded_state:ShardedState.gather_parameters",
            "if not self._arrives_late:\n",
            "arrivals.settle()\n    for unit in self.units * " + str(int(here)) + ":\n"
            "        unit.data.view(torch.int32)[0 if unit.position else -9] ^= 1\n    if True:\n",
        ),
    }  # fmt: skip
    plant = planted(*plants[fault]) if fault in plants else contextlib.nullcontext()
    with plant:
        try:
            model = smp.DistributedModel(Net())
        except NumericsError as error:
            return str(error)
        optimizer = smp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            dynamic_loss_scale=fp16,
            static_loss_scale=None if fp16 else 1.0,
        )

        @smp.step
        def step(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(ids, mask).float().flatten(0, 1), ids.flatten())
            model.backward(loss)
            return loss

        try:
            for number in range(updates):
                ids = (torch.arange(16).view(4, 4) * 3 + smp.dp_rank() + number) % 11
                mask = torch.zeros(4, 4)
                mask[:, -1] = -torch.inf
                if fault == "a NaN in the batch" and here:
                    mask[0, 0] = torch.nan
                optimizer.zero_grad()
                step(ids, mask)
                parameters = dict(model.local_named_parameters())
                if fault == "a bit of a gradient" and here:
                    parameters[name].grad.view(-1).view(torch.int32)[0] ^= 1 << 21
                if fault == "NaN in a gradient" and name in parameters and parameters[name].grad is not None:
                    parameters[name].grad.view(-1)[0] = torch.nan
                optimizer.step()
                if fault == "a bit of a weight" and here and number == 0:
                    weight = parameters[name]
                    live = weight.ds_tensor if hasattr(weight, "ds_tensor") else get_data(weight)
                    live.view(-1).view(torch.int32)[0] ^= 1 << 12
                if fault == "a NaN of the script" and name in parameters:
                    get_data(parameters[name]).view(-1)[0] = torch.nan
        except NumericsError as error:
            return str(error)
        except smp.exceptions.SMPRuntimeError:
            return "another rank has left"
    return ""


def _said(
    ranks: Any, strategy: str, fault: str, name: str = "", rank: int = 1, updates: int = 2, **config: Any
) -> list[str]:
    world, degrees = STRATEGIES[strategy]
    settings = {"ddp": True, "microbatches": 2, **degrees, **config}
    return ranks(_train, world, fault, name, rank, updates, config.get("fp16", False), config=settings)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "fault", "name", "rank", "odd"),
    [
        ("dp2", "a bit of a gradient", "up.weight", 1, (1, 0)),
        ("o2", "a broken gather", "", 1, (1, 0)),
        ("s2 twice", "a bit of a weight", "up.weight", 3, (3, 1)),
        ("tp2", "a bit of a weight", "embedding.weight", 1, (1, 0)),
        ("tp2-dp2", "a bit of a weight", "up.weight", 2, (2, 0)),
        ("pp2-dp2", "a bit of a weight", "norm.weight", 2, (2, 0)),
    ],
)
def test_copies_that_differ_in_one_bit_stop_the_job(
    ranks: Any, strategy: str, fault: str, name: str, rank: int, odd: tuple[int, int]
) -> None:
    found = _said(ranks, strategy, fault, name, rank)
    said = [text for text in found if "is not the same on rank" in text]
    assert len(said) == (2 if "pp2" in strategy else len(found)), found
    assert len(set(said)) == 1
    assert {text for text in found if text not in said} <= {"another rank has left"}
    assert f"is not the same on rank {max(odd)} as on rank {min(odd)} after update 1" in said[0]
    assert said[0].startswith(name)
    assert "element " in said[0]


def test_the_switch_turns_the_checks_off(ranks: Any) -> None:
    assert _said(ranks, "dp2", "a bit of a weight", "up.weight", check_invariants=False) == ["", ""]


def test_a_checksum_tells_bits_and_the_order_of_pieces_apart() -> None:
    values = torch.randn(5000)
    other = values.clone()
    other.view(torch.int32)[4999] ^= 1
    numbers = {
        int(checksum(tensor)) for tensor in (values, other, values.roll(2500), values.double(), values.bfloat16())
    }
    assert len(numbers) == 5
    assert int(checksum(values.clone())) in numbers
    assert [int(checksum(torch.zeros(n))) for n in (0, 1, 61)] == [0, 0, 0]


# -- first steps -------------------------------------------------------------------------------------------------------


def test_norms_on_devices_equal_extremes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from smp_tools.numerics import first_steps

    tensors = [torch.randn(5), torch.tensor([-3.0, 1.0]).half(), torch.tensor([1.0, float("nan")]), torch.zeros(2, 2)]
    tensors += [torch.tensor([float("-inf"), 2.0]), torch.tensor([float("nan"), 7.0]).bfloat16()]
    mine = first_steps._greatest_magnitudes(tensors)
    # What devices other than CPUs compute, on this one.
    monkeypatch.setattr(
        first_steps, "_greatest_magnitude", lambda tensor: first_steps.norms_of([tensor], float("inf"))[0]
    )
    theirs = first_steps._greatest_magnitudes(tensors)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert [float(value) for value in mine[1:2] + mine[3:5]] == [3.0, 0.0, float("inf")]
    assert [bool(value.isnan()) for value in mine] == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("strategy", "fault", "name", "first"),
    [
        ("dp2", "NaN in a gradient", "up.weight", "the gradient of up.weight"),
        ("tp2", "NaN in a gradient", "norm.weight", "the gradient of norm.weight"),
        ("pp2", "NaN in a gradient", "embedding.weight", "the gradient of embedding.weight"),
        ("s2", "NaN in what is gathered", "", "the loss of microbatch 0"),
    ],
)
def test_nan_that_comes_of_finite_numbers_stops_the_job(
    ranks: Any, strategy: str, fault: str, name: str, first: str
) -> None:
    found = _said(ranks, strategy, fault, name)
    assert any(text.startswith(f"{first} is NaN on rank") for text in found), found
    assert "" not in found


@pytest.mark.parametrize(
    ("strategy", "fault", "config"),
    [
        ("dp2", "a NaN in the batch", {}),
        ("pp2-dp2", "a NaN of the script", {}),
        ("dp2", "an overflow", {"fp16": True}),
    ],
)  # fmt: skip
def test_what_is_not_the_librarys_is_left_alone(ranks: Any, strategy: str, fault: str, config: dict[str, Any]) -> None:
    found = _said(ranks, strategy, fault, "norm.weight", updates=3, **config)
    # Copies of a weight with NaN are equal too.
    assert set(found) == {""}


# -- cuts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "fault", "config", "name"),
    [
        ("tp2", "a wrong slice", {}, "up.weight"),
        ("s2", "a wrong shard", {}, "embedding.weight"),
        ("o2", "a wrong master", {"bf16": True}, "the optimizer's embedding.weight"),
    ],
)
def test_parts_that_are_not_the_whole_stop_the_job(
    ranks: Any, strategy: str, fault: str, config: dict[str, Any], name: str
) -> None:
    found = _said(ranks, strategy, fault, **config)
    assert len(set(found)) == 1
    assert found[0].startswith(f"the parts of {name} on ranks [0, 1] are not what it was cut from")


@pytest.mark.parametrize("strategy", ["o2", "s2 twice", "tp2-dp2", "pp2-dp2"])
def test_right_trainings_go_on(ranks: Any, strategy: str) -> None:
    assert set(_said(ranks, strategy, "", updates=3)) == {""}
