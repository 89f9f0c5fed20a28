"""Names that the blocks of all pages use without saying where they come from: models, batches, steps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

if TYPE_CHECKING:
    from support.documents.doc_runs import Names

WIDTH, CLASSES = 8, 4


class Small(nn.Module):
    """A model under the names that pages use for parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))})
        self.transformer = nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))})
        self.layer1, self.layer2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder["layers"]:
            x = torch.tanh(layer(x))
        x = self.transformer["layers"](x)
        return self.head(self.student(x) + self.teacher(x).detach() + self.layer2(self.layer1(x)))


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(CLASSES, (8,), generator=generator)


def stand_ins() -> Names:
    """Names that all pages use without saying where they come from."""
    import smdistributed.modelparallel.torch as smp
    import smp_estimator

    inputs, targets = batch()
    return {
        "os": os,
        "torch": torch,
        "nn": nn,
        "smp": smp,
        "SMPEstimator": smp_estimator.SMPEstimator,
        "ModelParallel": smp_estimator.ModelParallel,
        "MPI": smp_estimator.MPI,
        "MyModel": Small,
        "criterion": cross_entropy,
        "model": Small(),
        "inputs": inputs,
        "targets": targets,
        "x": inputs,
        "y": targets,
        "batch": batch,
        "loader": [batch(n) for n in range(4)],
        "dataset": torch.utils.data.TensorDataset(*batch()),
        "folder": "checkpoints",
        "path": "checkpoints",
        "step": 99,
        "steps": 4,
        "total": 4,
        "epochs": 2,
    }


def training(names: Names) -> None:
    """A wrapped model, its optimizer, a scheduler, a step, and one update."""
    smp = names["smp"]
    torch.manual_seed(0)
    model = names["model"] = smp.DistributedModel(names["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = names["optimizer"] = smp.DistributedOptimizer(optimizer)
    names["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)

    @smp.step
    def train_step(*given: Any) -> torch.Tensor:
        inputs, targets = given[-2:]
        loss = cross_entropy(model(inputs), targets)
        model.backward(loss)
        return loss

    names["train_step"] = train_step
    train_step(*batch())
    optimizer.step()


def nothing(names: Names) -> None:
    """Nothing, for scenes whose session or process is all."""


def gpt2(**sizes: int) -> Any:
    """A tiny GPT-2 of Transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    usual = {"vocab_size": 64, "n_positions": 128, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**usual, "eos_token_id": 0, **sizes})).eval()


def wrapped_gpt2(names: Names) -> None:
    """A wrapped GPT-2 that has run once, ``prompts`` for it, and its optimizer."""
    smp = names["smp"]
    model = names["model"] = smp.DistributedModel(gpt2())
    names["optimizer"] = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(16).view(2, 8)
    names["prompts"] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    @smp.step
    def run(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids)["loss"]
        model.backward(loss)
        return loss

    run(ids)
