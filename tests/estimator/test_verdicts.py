"""500 configurations: what a rank would refuse, the client refuses before, and the other way round."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from support.cloud import Cloud, service
from support.random_configurations import GPUS, Drawn, drawn

from smp_config import ConfigError, Group, JobSettings, ModelParallelParameters
from smp_estimator import ProcessSession, SMPEstimator

#: Refused on the notebook for what no rank is told: the service's limits, and what the SDK cannot send.
CLIENT_ONLY = (
    r"characters as JSON, but the service accepts",
    r"in environment and .* in custom_mpi_options",
    r"instance_count is",
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the estimators of both kinds are made with."""
    folder = tmp_path_factory.mktemp("verdicts")
    (folder / "train.py").write_text("")
    with service() as boto:
        yield {"folder": folder, "cloud": Cloud(boto), "here": ProcessSession(root=folder / "jobs")}


def client(case: Drawn, places: dict[str, Any]) -> tuple[str | None, dict[str, str]]:
    """Why the estimator refuses, and what it would send."""
    arguments = {
        "instance_count": case.hosts,
        "distribution": case.distribution,
        "environment": dict(case.environment),
    }
    try:
        if case.instance_type is None:
            code = {"entry_point": "train.py", "source_dir": str(places["folder"])}
            made = SMPEstimator(instance_type="local", sagemaker_session=places["here"], **code, **arguments)
        else:
            made = places["cloud"].estimator(places["folder"], instance_type=case.instance_type, **arguments)
        made._check_code()  # as fit() does, before anything is started
        return None, dict(made.hyperparameters())
    except ConfigError as error:
        return str(error), {}


def as_sent(case: Drawn) -> dict[str, str] | None:
    """What the SDK alone would send; None where it cannot be written as JSON."""
    sent = {
        "mp_parameters": case.parameters,
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": case.mpi.get("processes_per_host"),
        "sagemaker_mpi_custom_mpi_options": case.mpi.get("custom_mpi_options", ""),
        "sagemaker_instance_type": case.instance_type or "local",
    }
    try:
        return {name: json.dumps(value) for name, value in sent.items()}
    except TypeError:
        return None


class OneRank:
    """Stands for the control plane and the groups of a rank whose peers are like it."""

    def __init__(self, rank: int, layout: Any, gpus: int) -> None:
        self.rank, self.size, self.layout, self.gpus = rank, layout.world_size, layout, gpus

    def seen(self, rank: int) -> list[str]:
        return [f"{self.layout.host_of(rank)}/{number}" for number in range(self.gpus)]

    def allgather(self, mine: tuple[Any, ...], members: list[int]) -> list[tuple[Any, ...]]:
        return [(self.layout.host_of(rank), *mine[1:3], self.seen(rank)) for rank in members]


def ranks_refuse(carried: dict[str, str], case: Drawn, patch: pytest.MonkeyPatch, folder: Path) -> str | None:
    """What the launcher of each host and then the ranks say, until one refuses; the checks are their own."""
    import torch

    from smp_launch.environment import TrainingEnvironment
    from smp_launch.hosts import Layout
    from smp_launch.leader import Job
    from smp_launch.tree import Tree
    from smp_runtime.comm import control as planes
    from smp_runtime.job import ranks as places_of
    from smp_runtime.pipeline.schedule.policies import policy_named
    from smp_runtime.tensor_parallel.group import Throttle

    gpus = GPUS.get(case.instance_type, 8)
    hosts = [f"algo-{number}" for number in range(1, case.hosts + 1)]
    try:
        decoded = {name: json.loads(value) for name, value in carried.items()}
        settings = JobSettings.from_hyperparameters(decoded, are_decoded=True)
        layout = Layout.of(settings, hosts, hosts[0], gpus, simulated=case.instance_type is None)
        training = TrainingEnvironment(
            Tree(folder), {**decoded, "sagemaker_program": "train.py"}, {"hosts": hosts}, {}, hosts[0]
        )
        job = Job.read(training, settings, layout, case.environment)
        from smp_config.mpi_options import variables

        environ = {**case.environment, **variables(job.custom), "SM_CURRENT_INSTANCE_TYPE": str(case.instance_type)}
        with patch.context() as here:
            for name, value in environ.items():
                here.setenv(name, value)
            here.setattr(places_of, "ProcessGroups", lambda *_: None)
            here.setattr(
                places_of, "use_device", lambda n: torch.device("cpu") if n is None else torch.device("cuda", n)
            )
            for rank in {0, layout.world_size - 1}:
                planes.timeout_seconds()
                Throttle.from_environment()
                plane: Any = OneRank(rank, layout, gpus)
                here.setattr(places_of, "host_name", lambda rank=rank: layout.host_of(rank))
                here.setattr(places_of, "visible_gpus", lambda plane=plane, rank=rank: plane.seen(rank))
                parameters = ModelParallelParameters.from_mp_parameters(json.dumps(decoded["mp_parameters"]))
                joined, _ = places_of.Ranks.join(parameters, plane)
                policy_named(joined.cfg.pipeline)
                assert joined.size(Group.WORLD) == layout.world_size
            from smp_config.timeline import steps_to_keep

            steps_to_keep(environ)
            if parameters.load_partition and case.instance_type is None and parameters.pipeline_parallel_degree > 1:
                from smp_runtime.pipeline.partition.assignment import Assignment

                Assignment.load(parameters.partition_file or "")
    except ValueError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def one_mpirun() -> Iterator[None]:
    """It is asked for its version once, not for every configuration."""
    import os

    from smp_launch.leader import OpenMpi

    found = OpenMpi.find(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenMpi, "find", lambda *_: found)
        yield


@lru_cache(maxsize=1)
def cases() -> list[Drawn]:
    return drawn(500)


def test_both_sides_say_the_same(places: dict[str, Any], one_mpirun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp_estimator.settings.accelerators.gpu_count", lambda _: 0)
    (places["folder"] / "code").mkdir()
    (places["folder"] / "code" / "train.py").write_text("")
    different, verdicts = [], Counter()
    for case in cases():
        refused, sent = client(case, places)
        if refused is not None and any(re.search(pattern, refused) for pattern in CLIENT_ONLY):
            verdicts["only the client can know"] += 1
            continue
        carried = sent if refused is None else as_sent(case)
        if carried is None:
            verdicts["cannot be sent"] += 1
            continue
        theirs = ranks_refuse(carried, case, monkeypatch, places["folder"])
        verdicts["accepted" if refused is None else "refused"] += 1
        if (refused is None) != (theirs is None):
            different.append((case, f"client: {refused}", f"ranks: {theirs}"))
    print(verdicts)
    assert not different, "\n".join(map(str, different))
    assert sum(verdicts.values()) == 500
    assert 200 <= verdicts["accepted"] <= 300
    assert verdicts["refused"] >= 150
