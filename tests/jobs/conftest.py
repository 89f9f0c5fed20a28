"""Whole jobs: ``fit()`` → bootstrap → mpirun → ``entrypoints/train_gpt.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.platform.jobs import ENTRYPOINTS, TINY, model_parallel, some_text


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A folder with about half a megabyte of real text."""
    return some_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def gpt_job(text, tmp_path):
    """``gpt_job(processes, hyperparameters…)``: an estimator of a tiny GPT job, not started yet."""
    from smp_estimator import SMPEstimator

    def make(
        processes: int = 2, hosts: int = 1, microbatches: int = 1, name: str = "out", **settings: Any
    ) -> SMPEstimator:
        arguments = settings.pop("estimator", {})
        parameters = {"ddp": True, "microbatches": microbatches, **settings.pop("parameters", {})}
        return SMPEstimator(
            entry_point=settings.pop("entry_point", "train_gpt.py"),
            source_dir=settings.pop("source_dir", str(ENTRYPOINTS)),
            instance_type="local",
            instance_count=hosts,
            output_path=f"file://{tmp_path / name}",
            hyperparameters={**TINY, **settings},
            distribution=model_parallel(processes, **parameters),
            **arguments,
        )

    return make
