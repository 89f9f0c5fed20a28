"""Predicted against measured bytes, on the CPU with PyTorch: a formula that is wrong shows here."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from live_bytes import LiveBytes
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from smp_estimator.planning import ModelShape, plan

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


def measured(shape: Sizes, batch: int, checkpointing: str | None) -> tuple[int, int, Model]:
    """Bytes of state that exist between steps, and the most that a step adds to them."""
    torch.manual_seed(0)
    model = Model(*shape, checkpointing is not None)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        ids = torch.randint(shape[3], (batch, shape[4]))
        logits = model(ids)
        F.cross_entropy(logits.view(-1, shape[3]), ids.view(-1)).backward()

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


#: layers, hidden, heads, vocabulary, sequence, batch of a rank.
SHAPES_OF_RANKS = [(4, 128, 4, 512, 64, 8), (8, 64, 4, 1024, 64, 4), (2, 256, 8, 256, 128, 4)]


def _peak(sizes: tuple[int, ...], batch: int) -> int:
    """Bytes of storages alive at the worst moment, from the creation of the model to its third step."""
    import smdistributed.modelparallel.torch as smp

    with LiveBytes() as live:
        torch.manual_seed(0)
        model = smp.DistributedModel(Model(*sizes, False))
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), foreach=False))

        @smp.step
        def step(ids: torch.Tensor) -> None:
            model.backward(F.cross_entropy(model(ids).view(-1, sizes[3]), ids.view(-1)))

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
