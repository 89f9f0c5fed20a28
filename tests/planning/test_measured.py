"""Predicted against measured bytes, on the CPU with PyTorch: a formula that is wrong shows here."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from live_bytes import LiveBytes
from support.training import activation_training
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from smp_estimator.planning import ModelShape, plan
from smp_estimator.planning.memory.kinds import Kind

#: layers, hidden, heads, vocabulary, sequence, batch, checkpointing. In the small vocabularies the backward of a layer
#: is the worst moment, in the others the loss.
SHAPES = [
    (4, 128, 4, 512, 64, 8, None),
    (2, 256, 8, 2048, 128, 2, None),
    (2, 128, 4, 32, 128, 4, None),
    (8, 64, 4, 1024, 128, 4, "each"),
    (6, 128, 4, 64, 128, 4, "each"),
]


Sizes = tuple[int, int, int, int, int]


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, seq, hidden]
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, vocabulary: int, sequence: int, checkpoint: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.layers = nn.ModuleList([Layer(hidden, heads) for _ in range(layers)])
        self.norm, self.checkpoint = nn.LayerNorm(hidden), checkpoint

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoint else layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


def measured(shape: Sizes, batch: int, checkpointing: str | None, *, autocast: bool = False) -> tuple[int, int, Model]:
    """Bytes of state that exist between steps, and the most that a step adds to them."""
    torch.manual_seed(0)
    model = Model(*shape, checkpointing is not None)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        ids = torch.randint(shape[3], (batch, shape[4]))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(ids)
            # A GPU's autocast computes the loss in fp32; on the CPU the script does it.
            loss = F.cross_entropy((logits.float() if autocast else logits).view(-1, shape[3]), ids.view(-1))
        loss.backward()

    step()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    held: list[torch.Tensor] = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    held += [value for state in optimizer.state.values() for value in state.values()]
    with LiveBytes(held) as live:
        step()
    return sum(t.numel() * t.element_size() for t in held), live.peak, model


@pytest.mark.parametrize(("layers", "hidden", "heads", "vocabulary", "sequence", "batch", "checkpointing"), SHAPES)
def test_predicted_bytes_are_near_the_measured_ones(
    layers: int, hidden: int, heads: int, vocabulary: int, sequence: int, batch: int, checkpointing: str | None
) -> None:
    sizes = (layers, hidden, heads, vocabulary, sequence)
    state, peak, model = measured(sizes, batch, checkpointing)
    predicted = plan(
        ModelShape(*sizes),
        "local",
        parameters={},
        batch=batch,
        processes_per_host=1,
        activation_checkpointing=checkpointing,
        dropout=False,
    )
    assert predicted.request.shape.parameters == sum(p.numel() for p in model.parameters())
    assert predicted.worst.state == pytest.approx(state, rel=0.001)
    assert predicted.worst.activations.total == pytest.approx(peak, rel=0.05)
    assert predicted.total_bytes == pytest.approx(state + peak, rel=0.05)


@pytest.mark.parametrize(("layers", "hidden", "heads", "vocabulary", "sequence", "batch", "checkpointing"), SHAPES)
def test_predicted_bytes_under_autocast_are_near_the_measured_ones(
    layers: int, hidden: int, heads: int, vocabulary: int, sequence: int, batch: int, checkpointing: str | None
) -> None:
    sizes = (layers, hidden, heads, vocabulary, sequence)
    state, peak, _ = measured(sizes, batch, checkpointing, autocast=True)
    given = {"batch": batch, "activation_checkpointing": checkpointing, "processes_per_host": 1, "dropout": False}
    made = plan(ModelShape(*sizes), "local", parameters={}, autocast=True, **given)
    assert made.worst.state == pytest.approx(state, rel=0.001)
    assert made.total_bytes == pytest.approx(state + peak, rel=0.05)


#: layers, hidden, heads, vocabulary, sequence, batch of a rank.
SHAPES_OF_RANKS = [(4, 128, 4, 512, 64, 8), (8, 64, 4, 1024, 64, 4), (2, 256, 8, 256, 128, 4)]


def _collectives_as_on_gpus() -> None:
    """Plans are of GPUs, whose ranks do not share memory as those of one host do on CPUs."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.comm.collectives import TorchCollectives

    smp.init().ranks.collectives = TorchCollectives()


def _peak(sizes: tuple[int, ...], batch: int) -> int:
    """Bytes of storages alive at the worst moment, from the creation of the model to its third step."""
    import smdistributed.modelparallel.torch as smp

    _collectives_as_on_gpus()
    with LiveBytes() as live:
        torch.manual_seed(0)
        model = smp.DistributedModel(Model(*sizes, False))
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), foreach=False))

        @smp.step
        def step(ids: torch.Tensor) -> None:
            logits = model(ids).view(-1, sizes[3])  # which a script holds until its step ends
            model.backward(F.cross_entropy(logits, ids.view(-1)))

        for _ in range(3):
            # Gradients that stay from step to step are what the plan counts; cleared to None, a step needs less.
            optimizer.zero_grad(set_to_none=False)
            step(torch.randint(sizes[3], (batch, sizes[4])))
            optimizer.step()
        return live.peak


@pytest.mark.parametrize("sizes", SHAPES_OF_RANKS)
def test_predicted_bytes_are_near_the_measured_ones_under_data_parallelism(ranks, sizes) -> None:
    config = {"ddp": True}
    *shape, batch = sizes
    predicted = plan(
        ModelShape(*shape),
        "local",
        parameters=config,
        batch=batch,
        processes_per_host=2,
        dropout=False,
        activation_checkpointing=None,
    )
    for peak in ranks(_peak, 2, tuple(shape), batch, config=config):
        assert peak == pytest.approx(predicted.total_bytes, rel=0.1)


def test_at_the_loss_of_a_single_pass_shared_state_has_no_gradients(ranks) -> None:
    config = {"ddp": True, "shard_optimizer_state": True}
    *shape, batch = (2, 256, 8, 4096, 64, 16)  # logits are most of it
    predicted = plan(ModelShape(*shape), "local", 1, config, batch, processes_per_host=2, dropout=False)
    assert predicted.total_bytes == predicted.worst.at_loss
    for peak in ranks(_peak, 2, tuple(shape), batch, config=config):
        assert peak == pytest.approx(predicted.total_bytes, rel=0.03)


# -- state, by precision -----------------------------------------------------------------------------------------

WIDE = 256
#: Bytes of a parameter between two steps and in the inner ``optimizer.step()``, of two ranks. Sharded parameters stay
#: gathered, below sdp_max_live_parameters.
STATE_SHARED = {"ddp": True, "shard_optimizer_state": True}
ALL_SHARED = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
STATES = [
    ({"ddp": True, "bf16": True}, 16, 20),
    ({**STATE_SHARED, "fp16": True}, 8, 11),
    ({**ALL_SHARED, "bf16": True}, 9, 11),
    pytest.param({"ddp": True}, 16, 16, marks=pytest.mark.full),
    pytest.param(STATE_SHARED, 8, 10, marks=pytest.mark.full),
    pytest.param({"ddp": True, "fp16": True}, 16, 20, marks=pytest.mark.full),
    pytest.param(ALL_SHARED, 10, 12, marks=pytest.mark.full),
    pytest.param({**ALL_SHARED, "fp16": True}, 9, 12, marks=pytest.mark.full),
    pytest.param({**STATE_SHARED, "bf16": True}, 8, 10, marks=pytest.mark.full),
    pytest.param({**STATE_SHARED, "fp16": True, "_fp32_grad_accumulation": True}, 8, 10, marks=pytest.mark.full),
    # Each of two stages has half of the parameters.
    ({"ddp": True, "bf16": True, "pipeline_parallel_degree": 2, "microbatches": 2}, 8, 10),
]
#: With gradient_as_bucket_view gradients are the buffers, but copies of those that are summed in another type.
VIEWS = [
    ({"ddp": True, "bf16": True}, 20, 24),
    pytest.param({"ddp": True}, 16, 16, marks=pytest.mark.full),
    pytest.param({"ddp": True, "fp16": True}, 16, 20, marks=pytest.mark.full),
    pytest.param({"ddp": True, "fp16": True, "_fp32_grad_accumulation": True}, 20, 24, marks=pytest.mark.full),
]


def _matrices() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(16)])


def _settled(live: LiveBytes) -> int:
    """Threads of gloo let go of what they have sent a moment after it has arrived."""
    lowest = live.now
    for _ in range(5):
        time.sleep(0.01)
        lowest = min(lowest, live.now)
    return lowest


def _moments(*, bucket_view: bool = False) -> dict[str, int]:
    """Bytes alive in the fourth step: before it, at the most in it, in the inner optimizer's step."""
    import smdistributed.modelparallel.torch as smp

    _collectives_as_on_gpus()
    with LiveBytes() as live:
        torch.manual_seed(0)
        model = smp.DistributedModel(_matrices(), gradient_as_bucket_view=bucket_view)
        inner = torch.optim.AdamW(model.parameters(), foreach=False)
        optimizer = smp.DistributedOptimizer(inner)
        found = {}
        inner.register_step_pre_hook(lambda *_: found.update(update=_settled(live)))

        @smp.step
        def step(x: torch.Tensor) -> None:
            model.backward(model(x).float().mean())

        for _ in range(4):  # after the second the buckets are divided anew, in the order of their gradients
            optimizer.zero_grad(set_to_none=False)
            found["before"] = live.peak = _settled(live)
            step(torch.randn(2, WIDE))
            found["backward"] = live.peak
            optimizer.step()
        return found


@pytest.mark.parametrize(("config", "before", "update"), STATES)
def test_the_state_of_every_precision_is_the_measured_one(ranks, config, before, update) -> None:
    with torch.device("meta"):
        module = _matrices()
    count = 16 * WIDE**2
    worst = plan(module, "local", parameters=config, processes_per_host=2, optimizer="adamw").worst
    slack = 0.03 * count  # activations of one sample, counters of the optimizer, flags
    for found in ranks(_moments, 2, config=config):
        assert found["before"] == pytest.approx(before * count, abs=slack)
        assert found["update"] == pytest.approx(update * count, abs=slack)
        assert found["update"] == pytest.approx(worst.in_update, abs=slack)
        backward = worst.in_backward - worst.activations.total
        if config.get("shard_optimizer_state"):
            # Only without a reduce-scatter of its own, as gloo, does a backend get the other ranks' parts beside the buffers.
            sums = 2 if config == {**STATE_SHARED, "fp16": True} else 4
            assert found["backward"] - sums * count == pytest.approx(backward, rel=0.12)
        elif config.get("sharded_data_parallel_degree"):
            # Three quarters of the planned bucket are in use: a group of units is filled while another travels, twice with gloo.
            assert found["backward"] == pytest.approx(backward - worst.kinds[Kind.BUCKETS] / 4, rel=0.03)
        else:
            assert max(found["backward"], found["update"]) == pytest.approx(max(backward, worst.in_update), rel=0.02)


def _moments_of_views() -> dict[str, int]:
    return _moments(bucket_view=True)


@pytest.mark.parametrize(("config", "before", "update"), VIEWS)
def test_buffers_that_stay_are_the_measured_ones(ranks, config, before, update) -> None:
    with torch.device("meta"):
        module = _matrices()
    count = 16 * WIDE**2
    made = plan(
        module, "local", parameters=config, processes_per_host=2, optimizer="adamw", gradient_as_bucket_view=True
    )
    for found in ranks(_moments_of_views, 2, config=config):
        assert found["before"] == pytest.approx(before * count, abs=0.03 * count)
        assert found["update"] == pytest.approx(update * count, abs=0.03 * count)
        assert found["update"] == pytest.approx(made.worst.in_update, abs=0.03 * count)
        assert max(found["backward"], found["update"]) == pytest.approx(made.total_bytes, rel=0.08)


# -- offloaded activations -----------------------------------------------------------------------------------------

#: Twelve layers on two stages, of which the script's own is the first.
HALVES = [0] * 6 + [1] * 6


def _offloaded() -> list[int]:
    """Most bytes of inputs on the device, of each step that followed the order of the one before."""
    import smdistributed.modelparallel.torch as smp

    def mark(model: Any) -> None:
        smp.set_activation_checkpointing(model.layers)

    found = activation_training.train(functools.partial(activation_training.Net, HALVES), mark, 4, batch=8)
    return [f["peak"] for f, followed in zip(found["figures"], found["followed"], strict=True) if followed]


@pytest.mark.parametrize(
    ("horizon", "active"),
    [(4, 4), *(pytest.param(*given, marks=pytest.mark.full) for given in ((1, 4), (3, 1), (9, 1)))],
)
def test_the_horizon_of_offloading_is_the_measured_one(ranks, horizon, active) -> None:
    config = {
        "pipeline_parallel_degree": 2,
        "microbatches": 4,
        "active_microbatches": active,
        "auto_partition": False,
        "default_partition": 0,
        "ddp": True,
        "offload_activations": True,
        "activation_loading_horizon": horizon,
    }
    sequence, hidden = 5, activation_training.HIDDEN
    shape = ModelShape(12, hidden, 2, 16, sequence)
    made = plan(shape, "local", 1, config, 8, processes_per_host=2, activation_checkpointing="each")
    for stage, peaks in zip(made.stages, ranks(_offloaded, 2, config=config), strict=True):
        assert peaks
        assert set(peaks) == {stage.activations.kept}
