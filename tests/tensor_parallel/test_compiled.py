"""``"compile": true`` with tensor parallelism: collectives are nodes of one graph, and training is as in one process."""

from __future__ import annotations

import pytest
import torch
from support.models.plain_transformer import Layer
from support.training.closeness import close
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone
from torch import nn

STEPS, VOCABULARY = 5, 13
SIZES = {"num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16, "intermediate_size": 24}
QUIET = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "causal_mask_size": 6}


class Block(nn.Module):
    """An ordinary block, whose linear maps are distributed by themselves."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, inputs):
        x, mask = inputs
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))), mask


class Net(nn.Module):
    """Blocks, and a head that shares the embedding's weight."""

    def __init__(self, make):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(make() for _ in range(4))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer((x, None))[0]
        return x @ self.embedding.weight.t()


def _one_process(kind):
    torch.manual_seed(0)
    return Net(Block if kind != "layers" else lambda: Layer(**SIZES, causal_mask_size=6))


def _batches():
    for step in range(STEPS):
        ids = torch.randint(VOCABULARY, (8, 7), generator=torch.Generator().manual_seed(100 + step))
        yield ids[:, :-1], ids[:, 1:]


def _loss_of(model, ids, targets):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())


def _adamw(parameters):
    # The keys' biases have no gradient but rounding, which a small eps would blow up.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def _trained(kind, checkpointed):
    import torch._dynamo
    from torch._dynamo.utils import counters

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.microbatch_state.compiled_blocks import is_compiled

    if kind == "layers":
        net = Net(lambda: smp.nn.DistributedTransformerLayer(**SIZES, **QUIET))
    else:
        net = _one_process(kind)
        for layer in net.layers:
            for part in (layer.up, layer.down) if kind == "linear" else (layer,):
                smp.set_tensor_parallelism(part)
    model = smp.DistributedModel(net)
    model.load_state_dict(_one_process(kind).state_dict())
    for layer in model.module.layers if checkpointed else ():
        smp.set_activation_checkpointing(layer)
    torch.manual_seed(smp.rank())
    optimizer = smp.DistributedOptimizer(_adamw(model.parameters()))
    torch._dynamo.reset()  # what other tests have compiled in this process
    counters.clear()
    step, losses, after_three = training_step(model, _loss_of), [], 0
    for number, loss in enumerate(updates(step, optimizer, _batches())):
        losses.append(loss)
        if number == 2:
            after_three = counters["stats"]["unique_graphs"]
    blocks = [path for path, part in model.module.named_modules() if is_compiled(part)]
    stats = after_three, counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    return losses, model.state_dict(), blocks, stats


ONE_BATCH, OWN_BATCHES = {"prescaled_batch": True, "optimize": "speed"}, {"prescaled_batch": False}
STAGES = {**ONE_BATCH, "pipeline_parallel_degree": 2, "microbatches": 2}
#: What is distributed, the configuration, the backend, whether blocks are checkpointed.
CASES = [
    ("layers", {**OWN_BATCHES, "optimize": "memory", "microbatches": 2}, "aot_eager", False),
    *(("layers", {**batch, "optimize": "speed"}, "aot_eager", False) for batch in (ONE_BATCH, OWN_BATCHES)),
    ("layers", ONE_BATCH, "aot_eager", True),
    ("layers", STAGES, "aot_eager", False),
    ("layers", {**STAGES, "pipeline": "zero_bubble"}, "aot_eager", True),
    *((kind, batch, "aot_eager", False) for kind in ("linear", "block") for batch in (ONE_BATCH, OWN_BATCHES)),
    ("layers", {**ONE_BATCH, "microbatches": 2}, "inductor", True),
    ("layers", {**OWN_BATCHES, "optimize": "memory"}, "inductor", False),
]


@pytest.mark.parametrize(
    ("kind", "more", "backend", "checkpointed"),
    [
        pytest.param(*case, marks=[] if number == 0 else pytest.mark.full, id=f"{number}-{case[0]}-{case[2]}")
        for number, case in enumerate(CASES)
    ],
)
def test_compiled_blocks_train_as_one_process(ranks, kind, more, backend, checkpointed):
    config = {"tensor_parallel_degree": 2, "ddp": True, **more, "compile": True, "compile_backend": backend}
    alone = train_alone(_one_process(kind), _adamw, _batches(), _loss_of)
    world = 2 * more.get("pipeline_parallel_degree", 1)
    results = ranks(_trained, world, kind, checkpointed, config=config, timeout=500)
    # Of others than layers of smp.nn nobody knows whether each collective follows from the one before.
    expected = {f"layers.{i}" for i in range(4)} if kind == "layers" else set()
    assert {path for _, _, blocks, _ in results for path in blocks} == expected
    for losses, state, _, (after_three, graphs, breaks) in results:
        assert losses == pytest.approx(alone.losses, abs=1e-5)
        for name, value in alone.model.state_dict().items():
            close(state[name], value, name, 2e-5)
        assert not breaks
        assert after_three == graphs == (kind == "layers")


def _dropped(backend):
    """Outputs and gradients of a training pass with dropout, without and with checkpointing; drawn from one seed."""
    import torch._dynamo

    import smdistributed.modelparallel.torch as smp

    torch._dynamo.reset()
    settings = {**SIZES, "attention_dropout_prob": 0.3, "hidden_dropout_prob": 0.3, "pre_layernorm": True}
    torch.manual_seed(0)
    model = smp.DistributedModel(Net(lambda: smp.nn.DistributedTransformerLayer(**settings)))
    ids, found = next(_batches())[0], []
    for checkpointed in (False, True):
        for layer in model.module.layers if checkpointed else ():
            smp.set_activation_checkpointing(layer)
        torch.manual_seed(7 + smp.rank())
        model.zero_grad()
        output = model(ids)
        output.square().mean().backward()
        found.append((output.detach(), [p.grad.clone() for p in model.parameters()]))
    return found, model(ids).detach()


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_dropout_agrees_over_ranks_and_with_what_is_recomputed(ranks, backend):
    config = {"tensor_parallel_degree": 2, "ddp": True, **ONE_BATCH}
    config |= {"compile": True, "compile_backend": backend}
    results = ranks(_dropped, 2, backend, config=config, timeout=300)
    for ((output, gradients), (again, recomputed)), other in results:
        close(output, results[0][0][0][0], "the other rank's output", 1e-6)
        close(again, output, "output with checkpointing", 1e-6)
        for one, two in zip(gradients, recomputed, strict=True):
            close(two, one, "gradient with checkpointing", 1e-5)
        assert not torch.allclose(other, output)
