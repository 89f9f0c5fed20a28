"""Every name of ``smp`` and of its modules has an example in its documentation, and the examples run, one after the other, in one
process."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.documents.doc_runs import estimators
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

import smdistributed.modelparallel.torch as smp

#: What they do to the whole process: begin, end, wrap another model, change degrees, record all that comes after, hear signals.
APART = {"init", "shutdown", "DistributedModel", "DistributedOptimizer", "reshape", "record_numerics", "auto_resume"}

#: Modules of ``smp`` whose names are public, too.
SPACES = ("amp", "comm_hooks", "data", "exceptions", "nn", "optimizers", "patches.checkpoint", "utils")


def _names() -> dict[str, Any]:
    found = {name: getattr(smp, name) for name in smp.__all__}
    for space in SPACES:
        module = importlib.import_module(f"{smp.__name__}.{space}")
        found |= {f"{space}.{name}": getattr(module, name) for name in module.__all__}
    # Groups are members of CommGroup, which has an example.
    of_enumeration = tuple(smp.CommGroup)
    return {name: v for name, v in found.items() if not isinstance(v, ModuleType | str) and v not in of_enumeration}


NAMES = _names()


def _examples(name: str) -> doctest.DocTest:
    return doctest.DocTestParser().get_doctest(inspect.getdoc(NAMES[name]) or "", _reader(), name, None, None)


def _reader() -> dict[str, Any]:
    """What a reader has, under the names that examples use."""
    names = {"smp": smp, "torch": torch, "nn": nn, "os": os, "dist": dist, "cross_entropy": cross_entropy}
    dataset = torch.utils.data.TensorDataset(torch.randn(8, 4))
    embedding = nn.Embedding(8, 4)
    head = nn.Linear(4, 8, bias=False)
    return {**names, "DistributedSampler": DistributedSampler, "dataset": dataset, "embedding": embedding, "head": head}


@pytest.fixture
def training(solo: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    solo({"ddp": True, "microbatches": 2})
    model = smp.DistributedModel(nn.Linear(4, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model(inputs), targets)
        model.backward(loss)
        return loss

    return {
        "model": model,
        "optimizer": optimizer,
        "train_step": train_step,
        "inputs": torch.randn(8, 4),
        "targets": torch.randint(2, (8,)),
        "module": nn.Linear(4, 2),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_name_has_an_example(name: str) -> None:
    assert _examples(name).examples, f"smp.{name} has no Example: in its docstring"


def test_examples_run(training: dict[str, Any]) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    later = ["load", "resume_from_checkpoint"]  # after those that save
    first = ["step", "StepOutput"]  # a step makes the model whole
    for name in sorted(NAMES.keys() - APART, key=lambda name: (name not in first, name in later, name)):
        example = _examples(name)
        example.globs |= training
        runner.run(example, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


@pytest.mark.parametrize("name", sorted(APART))
def test_examples_of_the_whole_process_compile(name: str) -> None:
    for example in _examples(name).examples:
        compile(example.source, name, "exec")


def test_examples_of_estimators_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without jobs, and without what asks the cloud (marked in the docstrings)."""
    import smp_estimator

    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with estimators():
        kind = smp_estimator.SMPEstimator
        names: dict[str, Any] = {"SMPEstimator": kind, "estimator": None}
        for method in (
            None,
            "fit",
            "logs",
            "plan",
            "suggest",
            "training_image_uri",
            "attach",
            "create_model",
            "deploy",
            "rehearse",
        ):
            text = inspect.getdoc(kind if method is None else getattr(kind, method)) or ""
            example = doctest.DocTestParser().get_doctest(text, names, method or "SMPEstimator", None, None)
            assert example.examples, method
            runner.run(example, out=said.append, clear_globs=False)
            names = example.globs
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
