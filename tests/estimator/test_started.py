"""Configurations drawn at random for up to 8 ranks, as whole jobs: what the client accepts runs.

That both sides give the same verdict on each is shown by ``tests/jobs/test_verdicts.py``.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from support.faults.random_configurations import Drawn, drawn

pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]

ACCEPTED = 24

SCRIPT = """
import json, os
import torch
import smdistributed.modelparallel.torch as smp

def train():
    smp.init()
    torch.manual_seed(0)
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(x):
        loss = model(x.to(next(model.parameters()).dtype)).float().mean()
        model.backward(loss)
        return loss

    optimizer.zero_grad()
    loss = step(torch.ones(4 * smp.state.cfg.microbatches, 4)).reduce_mean()
    optimizer.step()
    return {"loss": float(loss), "size": smp.size(), "groups": [smp.pp_size(), smp.tp_size(), smp.rdp_size()]}

found = train()
if os.environ["SMP_RANK"] == "0":
    with open(os.path.join(os.environ["SM_MODEL_DIR"], "found.json"), "w") as file:
        json.dump(found, file)
"""


@lru_cache(maxsize=1)
def cases() -> list[Drawn]:
    """The sample, the same in every run: right ones for this machine, of every size."""
    right = [case for case in drawn(500) if case.instance_type is None and not case.wrong]
    return [case for case in right if case.parameters.get("pipeline") != "_only_forward"][:ACCEPTED]


def _numbers() -> Iterator[Any]:
    """All of the sample, for the whole matrix: the normal run has jobs enough, chosen by hand, in ``tests/jobs/``."""
    for number, case in enumerate(cases()):
        name = f"{case.number}-{case.hosts}x{case.mpi['processes_per_host']}"
        yield pytest.param(number, id=name, marks=pytest.mark.full)


def _degrees(case: Drawn) -> tuple[int, int, int]:
    given = case.parameters
    pipeline = given.get("pipeline_parallel_degree", given.get("partitions", 1))
    return pipeline, given.get("tensor_parallel_degree", 1), given.get("sharded_data_parallel_degree", 1)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_sample_has_jobs_of_every_size() -> None:
    assert len(cases()) == ACCEPTED
    assert {case.hosts for case in cases()} == {1, 2, 3}
    assert max(case.world for case in cases()) > 4


@pytest.mark.parametrize("number", list(_numbers()))
def test_what_is_accepted_runs(number: int, script: Path, tmp_path: Path) -> None:
    from smp_estimator import ProcessSession, SMPEstimator

    case = cases()[number]
    (script / "train.py").write_text(SCRIPT)
    job = SMPEstimator(
        entry_point="train.py",
        source_dir=str(script),
        instance_type="local",
        instance_count=case.hosts,
        sagemaker_session=ProcessSession(root=tmp_path / "jobs"),
        distribution=case.distribution,
        environment={"PATH": os.environ["PATH"], **case.environment},
    )
    job.fit(logs=False)
    with tarfile.open(job.model_data.removeprefix("file://")) as archive:
        found = json.load(archive.extractfile("found.json"))  # type: ignore[arg-type]
    assert found["size"] == case.world
    pipeline, tensor, replicas = found["groups"]
    assert (pipeline, tensor) == _degrees(case)[:2]
    assert pipeline * tensor * replicas * case.parameters.get("context_parallel_degree", 1) == case.world
