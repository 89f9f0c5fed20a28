"""``model.generate()`` of Transformers on a wrapped model gives what it gives in one process, under every strategy."""

from __future__ import annotations

import pytest
import torch
from support.models.huggingface import tiny_model

import smdistributed.modelparallel.torch as smp

VOCABULARY = 43
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
TENSOR = {"tensor_parallel_degree": 2}
STRATEGIES = {
    "pp 2": (2, PIPELINE),
    "tp 2": (2, TENSOR),
    "sdp 2": (2, SHARDED),
    "dp 2": (2, {}),
    "cp 2": (2, {"context_parallel_degree": 2}),
    "pp 2 × tp 2": (4, {**PIPELINE, **TENSOR}),
    "pp 2 × sdp 2": (4, {**PIPELINE, **SHARDED}),
    "tp 2 × sdp 2": (4, {**TENSOR, **SHARDED, "prescaled_batch": True}),
}
#: Those whose tensor parallel form is a distributed model, others, mixtures, an encoder with a decoder.
FAMILIES = (
    "gpt2",
    "gptj",
    "gptneo",
    "gptneox",
    "llama",
    "mistral",
    "bloom",
    "falcon",
    "qwen3",
    "mixtral",
    "t5",
    "bart",
)
#: Always run.
SAMPLE = {("gpt2", "tp 2"), ("falcon", "pp 2 × sdp 2"), ("t5", "pp 2 × tp 2")}
#: How text is made, by name.
WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3},
    "beams sampled": {"num_beams": 2, "do_sample": True},
    "without cache": {"use_cache": False},
}


def _model(family):
    torch.manual_seed(7)
    return tiny_model(family, VOCABULARY).eval()


def _prompts(rank):
    """Of another length on each rank, the second one padded."""
    length = 3 + rank
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(ids)
    ids[1, 0] = mask[1, 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _generated(model, rank, ways=WAYS):
    """What each way makes, in unequal numbers of passes, and the next random number of the script."""
    found = {}
    for name in ways:
        torch.manual_seed(5 + rank)
        tokens = model.generate(**_prompts(rank), max_new_tokens=3 + 2 * rank, **WAYS[name])
        found[name] = (tokens.tolist(), float(torch.rand(())))
    return found


def _replica():
    return smp.rdp_rank() if smp.state.cfg.prescaled_batch else smp.dp_rank()


def _wrapped(original):
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
        model = original()
    return smp.DistributedModel(model)


def _marks(family, strategy):
    mark = pytest.mark.client("Transformers", "`generate()`", strategy)
    return [mark] if (family, strategy) in SAMPLE else [mark, pytest.mark.full]


@pytest.mark.parametrize(
    ("family", "strategy"),
    [pytest.param(family, strategy, marks=_marks(family, strategy)) for family in FAMILIES for strategy in STRATEGIES],
)
def test_text_is_that_of_one_process(ranks, family, strategy):
    size, config = STRATEGIES[strategy]

    def script():
        model = _wrapped(lambda: _model(family)).eval()
        return _replica(), _generated(model, _replica()), _generated(model.module, _replica(), ["greedy"])

    alone = {}
    for replica, found, inside in ranks(script, size, config={"ddp": True, **config}, timeout=100):
        if replica not in alone:
            alone[replica] = _generated(_model(family), replica)
        assert found == alone[replica]
        assert inside["greedy"] == found["greedy"]


def _rounds(model, optimizer, replica, step):
    """Trains and generates in turns: losses, and what was made."""
    found = []
    ids = torch.randint(3, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(9))
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        found.append(float(step(model, ids)))
        optimizer.step()
        found.append(_generated(model.eval(), replica, ["greedy", "sampled"]))
    return found


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


@smp.step
def _distributed_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def _plain_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        pytest.param("gpt2", "tp 2", marks=pytest.mark.client("Transformers", "`generate()` between epochs", "tp 2")),
        *(
            pytest.param(
                *(family, strategy),
                marks=[pytest.mark.full, pytest.mark.client("Transformers", "`generate()` between epochs", strategy)],
            )
            for family in ("falcon", "t5")
            for strategy in STRATEGIES
        ),
    ],
)
def test_a_model_trains_and_generates_in_turns(ranks, family, strategy):
    size, config = STRATEGIES[strategy]

    def script():
        model = _wrapped(lambda: _model(family))
        optimizer = smp.DistributedOptimizer(_optimizer(model))
        step = lambda *given: _distributed_step(*given).reduce_mean()  # noqa: E731 - short
        return _replica(), _rounds(model, optimizer, _replica(), step)

    for replica, found in ranks(
        script, size, config={"ddp": True, **config, "sdp_gradient_clipping": 1e9}, timeout=100
    ):
        model = _model(family)
        alone = _rounds(model, _optimizer(model), replica, _plain_step)
        assert found[::2] == pytest.approx(alone[::2], abs=1e-5)
        assert found[1::2] == alone[1::2]


class _OwnLoop(torch.nn.Module):
    """A model of a script's own, with a ``generate`` of its own, inside another module."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.head = torch.nn.Linear(16, VOCABULARY)

    def forward(self, ids):
        hidden = self.embedding(ids).cumsum(1)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)

    def generate(self, ids, tokens):
        """Samples, and ends at unequal times."""
        for _ in range(tokens):
            ids = torch.cat([ids, self(ids)[:, -1].softmax(-1).multinomial(1)], 1)
        return {"ids": ids, "length": ids.shape[1]}


class _Around(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner = _OwnLoop()

    def forward(self, ids):
        return self.inner(ids)


@pytest.mark.parametrize(
    "strategy", [pytest.param(s, marks=[] if s == "pp 2 × sdp 2" else pytest.mark.full) for s in STRATEGIES]
)
def test_a_generate_of_a_script_s_own(ranks, strategy):
    """With a step before and after it, in inference mode, on a part of the model, ending with an error on one replica."""
    size, config = STRATEGIES[strategy]

    def made(model, rank):
        torch.manual_seed(rank)
        with torch.inference_mode():
            return model.generate(torch.ones(2, 3, dtype=torch.int64), 2 + 3 * rank)

    def script():
        model = _wrapped(_Around)
        step = smp.step(lambda ids: model.backward(model(ids).square().mean()))
        step(torch.ones(2, 3, dtype=torch.int64))
        found = made(model.eval().module.inner, _replica())
        if _replica() == 1 and smp.tp_size() == 1:
            with pytest.raises(Exception, match="index out of range"):
                model.module.inner.generate(torch.full((2, 3), VOCABULARY), 1)
        elif smp.tp_size() == 1:
            made(model.module.inner, 0)
        step(torch.ones(2, 3, dtype=torch.int64))
        return _replica(), found["ids"].tolist(), found["length"]

    for replica, ids, length in ranks(script, size, config={"ddp": True, **config}):
        alone = made(_Around().inner, replica)
        assert (ids, length) == (alone["ids"].tolist(), alone["length"])
