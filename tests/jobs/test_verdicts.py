"""500 configurations: what a rank would refuse, the client refuses before, and the other way round."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.faults.random_configurations import GPUS, Drawn, drawn
from support.platform.cloud import Cloud, service

from smp_config import ConfigError, Group, JobSettings, ModelParallelParameters
from smp_estimator import ProcessSession, SMPEstimator

if TYPE_CHECKING:
    from smp_runtime.comm.control import Arrival

#: Refused on the notebook for what no rank is told: the service's limits, and what the SDK cannot send.
CLIENT_ONLY = (
    r"characters as JSON, but the service accepts",
    r"in environment and .* in custom_mpi_options",
    r"instance_count is",
)

#: Mistakes of which smp.init hears nothing: the launcher, or the partition, refuses them.
NOT_FOR_INIT = frozenset(["processes", "hosts", "mpi options", "a file that is missing"])


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the estimators of both kinds are made with."""
    folder = tmp_path_factory.mktemp("verdicts")
    (folder / "train.py").write_text("")
    with service() as boto, pytest.MonkeyPatch.context() as patch:
        # The SDK makes one for its TensorBoard application, with every estimator; it takes most of the time.
        patch.setattr("sagemaker.interactive_apps.base_interactive_app.boto3.client", lambda *_, **__: None)
        patch.setattr("smp_estimator.settings.accelerators.gpu_count", lambda _: 0)
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

    def arrivals(self, mine: Arrival) -> list[Arrival]:
        return [mine._replace(host=self.layout.host_of(rank), gpus=self.seen(rank)) for rank in range(self.size)]


def ranks_refuse(carried: dict[str, str], case: Drawn, patch: pytest.MonkeyPatch, folder: Path) -> str | None:
    """What the launcher of each host and then the ranks say, until one refuses; the checks are their own."""
    import torch

    from smp_launch.machine.hosts import Layout
    from smp_launch.mpirun.job import Job
    from smp_launch.sagemaker.environment import TrainingEnvironment
    from smp_launch.sagemaker.tree import Tree
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
        from smp_config.mpi_options import exported_variables

        environ = {
            **case.environment,
            **exported_variables(job.custom),
            "SM_CURRENT_INSTANCE_TYPE": str(case.instance_type),
        }
        with patch.context() as here:
            for name, value in environ.items():
                here.setenv(name, value)
            here.setattr(places_of, "ProcessGroups", lambda *_: None)
            here.setattr(places_of, "host_of", lambda *_, is_required: None)
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
            from smp_records.timeline import steps_to_keep

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

    from smp_launch.mpirun.command import OpenMpi

    found = OpenMpi.find(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenMpi, "find", lambda *_: found)
        yield


@lru_cache(maxsize=1)
def cases() -> list[Drawn]:
    return drawn(500)


def test_both_sides_say_the_same(places: dict[str, Any], one_mpirun: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert not different, "\n".join(map(str, different))
    assert sum(verdicts.values()) == 500
    assert 200 <= verdicts["accepted"] <= 340
    assert verdicts["refused"] >= 120


def _started(folder: str) -> tuple[float, list[int]]:
    """What a script does of a job: a model with distributed layers, an optimizer, a step, an update, a checkpoint."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    cfg = smp.state.cfg
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
        net = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
    model = smp.DistributedModel(net)
    # The epsilon of AdamW is 0 in float16: weights without float32 copies become NaN, as in plain PyTorch.
    is_narrow = cfg.fp16_params and not cfg.fp16
    make = torch.optim.SGD if is_narrow else torch.optim.AdamW
    optimizer = smp.DistributedOptimizer(make(model.parameters(), lr=0.01))
    learns = cfg.pipeline != "_only_forward"

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x.to(model.get_module()[0].weight.dtype)).float().square().mean()
        if learns:
            model.backward(loss)
        return loss

    loss = 0.0
    for seed in range(2):
        mine = seed * 100 + (smp.rdp_rank() if cfg.prescaled_batch else smp.dp_rank())
        batch = torch.randn(2 * cfg.microbatches, 8, generator=torch.Generator().manual_seed(mine))
        optimizer.zero_grad()
        loss = float(step(batch).reduce_mean())
        if learns:
            optimizer.step()
    smp.save_checkpoint(folder, tag="end", model=model, optimizer=optimizer, user_content={"loss": 1})
    smp.resume_from_checkpoint(folder, tag="end")
    return loss, [smp.pp_size(), smp.tp_size(), smp.rdp_size()]


def _refused() -> str:
    """What ``smp.init`` says of the configuration that the job carries."""
    import smdistributed.modelparallel.torch as smp

    try:
        smp.init()
    except ValueError as error:
        return str(error)
    smp.barrier()  # none leaves while others still connect
    return ""


def _sample(accepted: bool) -> Iterator[Any]:
    """Numbers of configurations for up to four ranks of this machine; the first of each kind belong to the normal run."""
    seen: set[Any] = set()
    taken = 0
    for case in cases():
        if (
            case.instance_type is not None
            or not 1 <= case.world <= 4
            or bool(case.wrong) is accepted
            or case.environment
        ):
            continue
        if NOT_FOR_INIT.intersection(case.wrong):
            continue
        parameters = case.parameters if isinstance(case.parameters, dict) else {}
        kind = tuple(
            name for name in ("tensor_parallel_degree", "shard_optimizer_state") if parameters.get(name, 1) != 1
        )
        normal = case.world == 2 and kind not in seen
        seen |= {kind} if normal else set()
        taken += 1
        yield pytest.param(case.number, marks=[] if normal else pytest.mark.full)
        if taken == (60 if accepted else 30):
            return


@pytest.mark.parametrize("number", list(_sample(accepted=True)))
def test_what_the_client_accepts_trains(number: int, ranks: Any, places: dict[str, Any], tmp_path: Path) -> None:
    case = cases()[number]
    refused, sent = client(case, places)
    assert refused is None
    config = json.loads(sent["mp_parameters"])
    results = ranks(_started, case.world, str(tmp_path), config=config, env={"SM_OUTPUT_DATA_DIR": str(tmp_path)})
    for loss, (pipeline, tensor, replicas) in results:
        assert loss == loss, "not a number"
        assert pipeline * tensor * replicas * config.get("context_parallel_degree", 1) == case.world
        assert (pipeline, tensor) == (config["pipeline_parallel_degree"], config.get("tensor_parallel_degree", 1))


@pytest.mark.parametrize("number", list(_sample(accepted=False)))
def test_what_the_client_refuses_is_refused_there(number: int, ranks: Any, places: dict[str, Any]) -> None:
    case = cases()[number]
    refused, sent = client(case, places)
    carried = as_sent(case) if refused is not None else sent
    if carried is None:
        return
    said = ranks(_refused, case.world, init=False, env={"SM_HP_MP_PARAMETERS": carried["mp_parameters"]})
    assert {bool(text) for text in said} == {refused is not None}, (refused, said)
