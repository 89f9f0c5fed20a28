"""A job without the hosts that it has lost: who takes their place, at which degrees, and how a loss is seen."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack

import pytest

from smp_config.job import JobSettings
from smp_config.recovery import PARAMETERS_VARIABLE, READERS_VARIABLE
from smp_launch.machine.hosts import LAYOUT_VARIABLE, Layout
from smp_launch.machine.locked_folders import StatusDir
from smp_launch.mpirun.job import Job
from smp_launch.remote.remaining_hosts import Neighbours, RemainingHosts, lost_of
from smp_launch.sagemaker.environment import TrainingEnvironment
from smp_launch.sagemaker.tree import Tree


@pytest.fixture
def job(launcher, tmp_path):
    """``job(hosts, spares, **parameters)``: with two processes on each host."""

    def make(hosts=3, spares=0, **parameters):
        launcher.folder = tmp_path / f"{hosts}-{spares}-{len(list(tmp_path.iterdir()))}"
        folder = launcher.job("", 2, hosts=hosts, hyperparameters={"mp_parameters": {"ddp": True, **parameters}})
        environ = {**os.environ, "CURRENT_HOST": "algo-1", "SMP_MAX_RESTARTS": "3"}
        training = TrainingEnvironment.read(Tree(folder.tree()), environ)
        settings = JobSettings.from_hyperparameters(training.hyperparameters, are_decoded=True)
        layout = Layout.of(settings, training.hosts[: hosts - spares], "algo-1", 0, simulated=True)
        return Job.read(training, settings, layout, environ)

    return make


def announced(job):
    with job.announced({}) as values:
        return values


def test_fewer_hosts(job):
    begun = job(partitions=3, microbatches=3)
    assert (announced(begun).get(PARAMETERS_VARIABLE), begun.readers, begun.spares) == (None, None, ())
    left = begun.without(["algo-2"])
    assert left.layout.hosts == ("algo-1", "algo-3")
    assert left.parameters.pipeline_parallel_degree == 2
    assert json.loads(announced(left)[PARAMETERS_VARIABLE])["partitions"] == 2
    assert announced(left)[READERS_VARIABLE] == "2"
    assert json.loads(announced(left)[LAYOUT_VARIABLE])["hosts"] == ["algo-1", "algo-3"]
    assert "partitions=2" in left.program()[left.program().index("--mp_parameters") + 1]
    seen = left.training.variables()
    assert seen["SM_HOSTS"] == '["algo-1","algo-3"]'
    assert json.loads(seen["SM_HP_MP_PARAMETERS"])["partitions"] == 2
    assert json.loads(seen["SM_INSTANCE_GROUPS_DICT"])["homogeneousCluster"]["hosts"] == ["algo-1", "algo-3"]
    alone = left.without(["algo-3"])
    assert (alone.layout.hosts, alone.readers, alone.parameters.pipeline_parallel_degree) == (("algo-1",), 2, 2)


def test_without_its_first_host_or_degrees_that_fit_no_job_goes_on(job):
    assert job().without(["algo-1"]) is None
    assert job(3, ddp=False, partitions=6).without(["algo-2"]).parameters.pipeline_parallel_degree == 4
    assert job(3, auto_partition=False, default_partition=5, ddp=False, partitions=6).without(["algo-2"]) is None


def test_a_spare_takes_the_place_of_a_lost_host(job):
    begun = job(4, spares=2, sharded_data_parallel_degree=4)
    assert begun.spares == ("algo-3", "algo-4")
    replaced = begun.without(["algo-2"])
    assert (replaced.layout.hosts, replaced.spares) == (("algo-1", "algo-3"), ("algo-4",))
    assert (replaced.parameters, replaced.readers) == (begun.parameters, None)
    assert begun.without(["algo-3"]).spares == ("algo-4",)
    assert begun.without(["algo-2", "algo-3"]).layout.hosts == ("algo-1", "algo-4")
    assert begun.without(["algo-2", "algo-3", "algo-4"]).parameters.sharded_data_parallel_degree == 2


def test_a_host_is_gone_that_was_there(job, tmp_path, capfd):
    status = StatusDir(tmp_path / "status")
    begun = job(3, partitions=3, microbatches=3)
    others = Neighbours.of(begun, status)
    memory = tmp_path / "memory"
    for host in begun.layout.hosts:
        (memory / host).mkdir(parents=True)
    left = RemainingHosts(begun, others, str(memory))
    assert others.lost() == []  # none has come yet
    with ExitStack() as third, ExitStack() as second:
        third.enter_context(status.following("algo-3"))
        second.enter_context(status.following("algo-2"))
        assert left.job_now() is begun
        second.close()
        assert lost_of(begun, others) == ["algo-2"]
        assert others.lost_when is not None
        now = left.job_now()
        assert now.layout.hosts == ("algo-1", "algo-3")
        assert left.job_now() is now
        assert others.lost() == []
    said = capfd.readouterr().err
    assert (
        "host algo-2 is lost; the job goes on with 2 hosts (algo-1, algo-3) × 2 processes = 4 ranks instead of 6: "
        in said
    )
    assert "pipeline_parallel_degree 3 → 2, replicas 2 → 2" in said
    assert sorted(path.name for path in memory.iterdir()) == ["algo-1", "algo-3"]


def test_a_lost_spare_disturbs_nobody(job, tmp_path, capfd):
    status = StatusDir(tmp_path / "status")
    begun = job(3, spares=1)
    others = Neighbours.of(begun, status)
    left = RemainingHosts(begun, others, None)
    with status.following("algo-3"):
        assert others.lost() == []
    assert others.lost() == ["algo-3"]
    assert lost_of(begun, others) == []
    assert left.job_now().spares == ()
    assert "lost" not in capfd.readouterr().err


def test_ranks_of_a_deterministic_job_order_sets_alike(job):
    begun = job(deterministic=True)
    assert announced(begun)["PYTHONHASHSEED"] == "0"
    with begun.announced({"PYTHONHASHSEED": "7"}) as values:  # as the user wants it
        assert values["PYTHONHASHSEED"] == "7"
    assert "PYTHONHASHSEED" not in announced(job())
