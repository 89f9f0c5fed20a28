"""Full checkpoints with the optimizer, to and from tensor parallelism, which replaces Transformers models by its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.matrix import sampled
from support.models.huggingface import tiny_inputs, tiny_model

VOCABULARY = 16
STEPS = 2
CLOSE = 1e-6  # models compute in float64, but their losses in float32, whose last bit is 2.4e-7 here

CONFIGS: dict[str, dict[str, Any]] = {
    "dp2": {"ddp": True},
    "tp2": {"ddp": True, "tensor_parallel_degree": 2},
    "ep2": {"ddp": True, "tensor_parallel_degree": 2, "expert_parallel_degree": 2},
    "pp2": {"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2},
    "o2": {"ddp": True, "shard_optimizer_state": True},
    "s2": {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e9},
}

#: States that are as large as the parameter, one number of it, and a tensor that is smaller.
OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
}


def _groups(module):
    named = list(module.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]


class _Run:
    """A job, or one process of plain PyTorch, with the same batch on all ranks."""

    def __init__(self, family, optimizer, seed, *, plain=False, **more):
        torch.manual_seed(seed)
        self._plain = plain
        self.batch = tiny_inputs(family, VOCABULARY, 4, torch.Generator().manual_seed(1))
        self.batch = {key: v.double() if v.is_floating_point() else v for key, v in self.batch.items()}
        if plain:
            self.model: Any = tiny_model(family, VOCABULARY, **more).double()
            self.optimizer: Any = OPTIMIZERS[optimizer](_groups(self.model))
            return
        import smdistributed.modelparallel.torch as smp

        with smp.tensor_parallelism():
            module = tiny_model(family, VOCABULARY, **more).double()
        self.model = smp.DistributedModel(module)
        self.optimizer = smp.DistributedOptimizer(OPTIMIZERS[optimizer](_groups(self.model)))

        @smp.step
        def step(model, batch):
            loss = model(**batch).loss
            model.backward(loss)
            return loss

        self._step = step

    def train(self):
        losses = []
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            if self._plain:
                loss = self.model(**self.batch).loss
                loss.backward()
            else:
                loss = self._step(self.model, self.batch).reduce_mean()
            losses.append(float(loss.detach()))
            self.optimizer.step()
        return losses


def _saves(family, optimizer, path, plain=False):
    """Losses after a checkpoint; of one process, the files that plain PyTorch writes."""
    import smdistributed.modelparallel.torch as smp

    torch.set_default_dtype(torch.float64)
    try:
        run = _Run(family, optimizer, 0, plain=plain)
        run.train()
        if plain:
            torch.save(run.model.state_dict(), f"{path}/full")
            torch.save(run.optimizer.state_dict(), f"{path}/full_optimizer")
        else:
            smp.save_checkpoint(path, tag="full", partial=False)
        return run.train()
    finally:
        torch.set_default_dtype(torch.float32)


def _resumes(family, optimizer, path, plain=False):
    import smdistributed.modelparallel.torch as smp

    torch.set_default_dtype(torch.float64)
    try:
        run = _Run(family, optimizer, 9, plain=plain)
        if plain:
            run.model.load_state_dict(torch.load(f"{path}/full"))
            run.optimizer.load_state_dict(torch.load(f"{path}/full_optimizer"))
        else:
            smp.resume_from_checkpoint(path, tag="full", partial=False)
        return run.train()
    finally:
        torch.set_default_dtype(torch.float32)


CASES = [
    (family, optimizer, source, target)
    for family in ("llama", "gpt2", "gptneox", "mixtral", "bert", "vit", "t5")
    for optimizer in OPTIMIZERS
    for source, target in (("dp2", "tp2"), ("tp2", "dp2"), ("tp2", "pp2"), ("tp2", "s2"), ("o2", "tp2"))
] + [("mixtral", optimizer, "ep2", target) for optimizer in OPTIMIZERS for target in ("dp2", "ep2")]


SAMPLE = [
    ("llama", "AdamW", "dp2", "tp2"),
    ("gpt2", "RMSprop", "tp2", "pp2"),
    ("gptneox", "SGD", "tp2", "s2"),
    ("mixtral", "AdamW", "ep2", "dp2"),
    ("bert", "Adagrad", "o2", "tp2"),
]


@pytest.mark.parametrize(("family", "optimizer", "source", "target"), sampled(CASES, SAMPLE))
def test_a_full_checkpoint_goes_on_where_the_model_has_another_form(ranks, tmp_path, family, optimizer, source, target):
    path = str(tmp_path)
    config = CONFIGS[source]
    expected = ranks(_saves, 2, family, optimizer, path, config=config, timeout=100)[0]
    for losses in ranks(_resumes, 2, family, optimizer, path, config=CONFIGS[target], timeout=100):
        assert losses == pytest.approx(expected, abs=CLOSE)
    # It has the numbers and shapes of one process.
    alone = ranks(_resumes, 1, family, optimizer, path, True, config={}, timeout=100)[0]
    assert alone == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_one_process_of_plain_pytorch_saved_goes_on_with_tensor_parallelism(ranks, tmp_path, family):
    path = str(tmp_path)
    expected = ranks(_saves, 1, family, "AdamW", path, True, config={}, timeout=100)[0]
    for losses in ranks(_resumes, 2, family, "AdamW", path, config=CONFIGS["tp2"], timeout=100):
        assert losses == pytest.approx(expected, abs=CLOSE)
