"""Generated configurations for up to 8 ranks, really started: what the client accepts runs, what it refuses ``smp.init``
refuses too."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.jobs import model_parallel

from smp_config import ConfigError
from smp_estimator.settings import distribution as strategies

pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]

ACCEPTED, REFUSED = 24, 16
MOST_RANKS = 8

SCRIPT = """
import json, os, sys
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

found = []
refused = json.loads(sys.argv[sys.argv.index("--configs") + 1]) if "--configs" in sys.argv else []
for config in refused:
    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps(config)
    try:
        smp.init()
        found.append("accepted")
    except ValueError as error:
        found.append(str(error))
if not refused:
    found.append(train())
if os.environ["SMP_RANK"] == "0":
    with open(os.path.join(os.environ["SM_MODEL_DIR"], "found.json"), "w") as file:
        json.dump(found, file)
"""


class Case(NamedTuple):
    """A configuration and the client's verdict."""

    processes: int
    hosts: int
    parameters: dict[str, Any]
    refusal: str

    @property
    def world(self) -> int:
        return self.processes * self.hosts


#: Values of each setting, frequent ones several times; None leaves it out.
_VALUES: dict[str, list[Any]] = {
    "ddp": [True, True, True, True, True, True, False],
    "pipeline_parallel_degree": [None, None, None, 1, 1, 2, 3, 4],
    "tensor_parallel_degree": [None, None, None, 1, 1, 2, 3, 4],
    "sharded_data_parallel_degree": [None, None, None, 1, 1, 2, 3, 4],
    "microbatches": [None, 1, 2, 4],
    "active_microbatches": [None, None, 1, 2, 4],
    "pipeline": [None, None, "interleaved", "simple"],
    "optimize": [None, None, "memory", "speed"],
    "memory_weight": [None] * 6 + [0.0, 0.5, 1.0, 1.5],
    "placement_strategy": [None] * 8 + ["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD", "PDP"],
    "auto_partition": [None] * 4 + [True, False],
    "default_partition": [None] * 4 + [0, 0, 1],
    "prescaled_batch": [None] * 3 + [True],
    "shard_optimizer_state": [None] * 3 + [True],
    "fp16": [None] * 5 + [True],
    "bf16": [None] * 5 + [True],
    "skip_tracing": [None] * 5 + [True],
    "sdp_gradient_clipping": [None] * 5 + [0.5],
}
_WORLDS = [(processes, hosts) for hosts in (1, 2, 3) for processes in range(1, 9) if processes * hosts <= MOST_RANKS]


@lru_cache(maxsize=1)
def cases() -> tuple[list[Case], list[Case]]:
    """The sample, the same in every run: accepted and refused ones, the refused for as many reasons as there are."""
    accepted: list[Case] = []
    refused: dict[tuple[str, bool], Case] = {}

    @settings(
        max_examples=500,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=True))
    def collect(draw: Any) -> None:
        processes, hosts = draw.choice(_WORLDS)
        parameters = {name: draw.choice(values) for name, values in _VALUES.items()}
        parameters = {name: value for name, value in parameters.items() if value is not None}
        try:
            strategies.read(
                model_parallel(processes, **parameters),
                instance_type="local",
                hosts=hosts,
                process_mode=True,
                say=lambda _: None,
            )
        except ConfigError as error:
            reason = re.sub(r"[\d.]+|'\w+'", "", str(error))[:60]
            case = Case(processes, hosts, parameters, str(error))
            refused.setdefault((reason, case.world == 2), case)
        else:
            accepted.append(Case(processes, hosts, parameters, ""))

    collect()
    return accepted[:ACCEPTED], list(refused.values())[:REFUSED]


def _numbers() -> Iterator[Any]:
    """All accepted ones; the smallest of each kind belong to the normal run."""
    accepted = cases()[0]
    small = [number for number, case in enumerate(accepted) if case.world == 2]
    small.sort(key=lambda number: (accepted[number].world, accepted[number].hosts))
    degrees = ("pipeline_parallel_degree", "tensor_parallel_degree", "sharded_data_parallel_degree")
    normal = {
        number
        for name in (None, *degrees)
        for number in [n for n in small if _strategy(accepted[n].parameters, degrees) == name][:1]
    }
    for number, case in enumerate(accepted):
        name = f"{number}-{case.hosts}x{case.processes}"
        yield pytest.param(number, id=name, marks=[] if number in normal else pytest.mark.full)


def _strategy(parameters: dict[str, Any], degrees: tuple[str, ...]) -> str | None:
    return next((name for name in degrees if parameters.get(name, 1) > 1), None)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _run(script: Path, tmp_path: Path, case: Case, **hyperparameters: Any) -> list[Any]:
    from smp_estimator import ProcessSession, SMPEstimator

    (script / "train.py").write_text(SCRIPT)
    parameters = {"ddp": True} if hyperparameters else case.parameters
    job = SMPEstimator(
        entry_point="train.py",
        source_dir=str(script),
        instance_type="local",
        instance_count=case.hosts,
        sagemaker_session=ProcessSession(root=tmp_path / "jobs"),
        distribution=model_parallel(case.processes, **parameters),
        hyperparameters=hyperparameters,
        environment={"PATH": os.environ["PATH"]},
    )
    job.fit(logs=False)
    with tarfile.open(job.model_data.removeprefix("file://")) as archive:
        return list(json.load(archive.extractfile("found.json")))  # type: ignore[arg-type]


def test_the_sample_has_both_kinds() -> None:
    accepted, refused = cases()
    assert (len(accepted), len(refused)) == (ACCEPTED, REFUSED)
    assert max(case.world for case in accepted) > 4


@pytest.mark.parametrize("number", list(_numbers()))
def test_what_is_accepted_runs(number: int, script: Path, tmp_path: Path) -> None:
    case = cases()[0][number]
    [found] = _run(script, tmp_path, case)
    assert found["size"] == case.world
    pipeline, tensor, replicas = found["groups"]
    assert pipeline == case.parameters.get("pipeline_parallel_degree", 1)
    assert tensor == case.parameters.get("tensor_parallel_degree", 1)
    assert pipeline * tensor * replicas == case.world


@pytest.mark.parametrize(
    "worlds", [[2], pytest.param([1, 3, 4, 5, 6, 7, 8], marks=pytest.mark.full)], ids=["two", "others"]
)
def test_what_is_refused_is_refused_there_too(worlds: list[int], script: Path, tmp_path: Path) -> None:
    """One job per number of ranks asks ``smp.init`` about each of its configurations."""
    for world in worlds:
        refused = [case for case in cases()[1] if case.world == world]
        if not refused:
            continue
        one = Case(world, 1, {}, "")
        answers = _run(script, tmp_path / str(world), one, configs=json.dumps([case.parameters for case in refused]))
        assert len(answers) == len(refused)
        for case, answer in zip(refused, answers, strict=True):
            assert answer != "accepted", case
