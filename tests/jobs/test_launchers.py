"""``entrypoints/train_gpt.py`` under every launcher that runs here, pp 2 × dp 2: the losses and weights of one process.

Two hosts are two network namespaces with a link between them, and names of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from support.platform.jobs import ENTRYPOINTS, TINY
from support.scripts import fake_slurm

from smp_launch.machine.network import reserved_port

pytestmark = [pytest.mark.job, pytest.mark.full, pytest.mark.timeout(240)]

ROOT = ENTRYPOINTS.parent
SCRIPT = ENTRYPOINTS / "train_gpt.py"
PARAMETERS = json.dumps({"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2})
#: Where launchers look for the parameters when they are not given in other words.
GIVEN = {"SM_HP_MP_PARAMETERS": PARAMETERS}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCH = [sys.executable, "-m", "smp_launch", "run"]
#: In a namespace that was just made every port is free.
PORT = 29400

#: Seconds for a whole job on a busy machine.
PATIENCE = 150.0


def words_of(folder, text):
    settings = {**TINY, "steps": 4, "train": text, "model_dir": folder}
    return [str(SCRIPT), *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]


def clean(**more):
    """An environment without marks of other launchers."""
    others = ("OMPI_", "PMIX_", "PMI_", "SLURM", "SMP_", "SM_", "MASTER_", "TORCHELASTIC")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        inherited.pop(name, None)
    path = os.pathsep.join([str(ROOT), str(ROOT / "container")])
    as_root = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")} | {
        f"PRTE_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")
    }
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SMP_TIMEOUT_SECONDS": "90", **as_root, **more}


def run(*commands, folder, environs=(), patience=PATIENCE):
    """Run commands at the same time, to their end."""
    with contextlib.ExitStack() as stack:
        started = []
        for number, command in enumerate(commands):
            log = stack.enter_context((folder / f"log-{number}").open("w"))
            environ = environs[number] if environs else clean(**GIVEN)
            process = subprocess.Popen(
                list(map(str, command)), env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            stack.callback(process.kill)
            started.append(process)
        codes = [process.wait(patience) for process in started]
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("log-*")))
    assert not any(codes), f"{codes}\n{logs}"
    return logs


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """Losses and weights of one process."""
    folder = tmp_path_factory.mktemp("alone")
    run([sys.executable, *words_of(folder, text)], folder=folder, environs=[clean()])
    return result_of(folder)


def result_of(folder):
    weights = torch.load(folder / "model.pt", weights_only=True)
    return json.loads((folder / "losses.json").read_text()), weights


@pytest.fixture
def trained(text, tmp_path, alone):
    """The words of the script; afterwards what it has trained is compared."""
    yield words_of(tmp_path, text)
    losses, weights = result_of(tmp_path)
    assert len(losses) == 4
    assert losses == pytest.approx(alone[0], abs=1e-5)
    for name, weight in alone[1].items():
        torch.testing.assert_close(weights[name], weight, atol=2e-5, rtol=1e-4)


@pytest.fixture
def hosts():
    """Two hosts, and by each the words that bring a command there, under a name of its own."""
    from namespaces import two_hosts, why_not

    if (reason := why_not()) is not None:
        pytest.skip(reason)
    if shutil.which("unshare") is None:
        pytest.skip("the program unshare (package util-linux) is missing")
    with two_hosts() as link:
        yield [(host, host.command(named(host.name))) for host in link.hosts]


def named(name):
    return ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"]


def test_ranks_of_this_machine(trained, tmp_path):
    log = run([*LAUNCH, "--processes", 4, "--parameters", PARAMETERS, *trained], folder=tmp_path, environs=[clean()])
    assert "this machine alone: 4 ranks" in log


def test_two_hosts_that_are_named_by_hand(trained, tmp_path, hosts):
    (first, _), _ = hosts
    shared = ["--processes", 2, "--parameters", PARAMETERS, "--hosts", 2, "--master", f"{first.address}:{PORT}"]
    commands = [[*enter, *LAUNCH, *shared, "--host-rank", n, *trained] for n, (_, enter) in enumerate(hosts)]
    log = run(*commands, folder=tmp_path, environs=[clean(), clean()])
    assert "2 ranks on" in log
    assert "(2 to 3 of 4)" in log


@pytest.mark.parametrize("inside", [[], ["--no-python", *LAUNCH]], ids=["torchrun", "torchrun smp-launch"])
def test_torchrun_on_two_hosts(trained, tmp_path, hosts, inside):
    (first, _), _ = hosts
    nodes = ["--nnodes", 2, "--nproc-per-node", 2, "--master-addr", first.address, "--master-port", PORT]
    commands = [[*enter, *TORCHRUN, *nodes, "--node-rank", n, *inside, *trained] for n, (_, enter) in enumerate(hosts)]
    # smp-launch finds the interface by itself; without it, one says it where a host's name does not.
    environs = [clean(**GIVEN, **({} if inside else {"GLOO_SOCKET_IFNAME": host.interface})) for host, _ in hosts]
    run(*commands, folder=tmp_path, environs=environs)


@pytest.mark.parametrize("inside", [[sys.executable], LAUNCH], ids=["mpirun", "mpirun smp-launch"])
def test_mpirun_with_a_hostfile_of_two_hosts(trained, tmp_path, hosts, inside):
    from smp_launch.mpirun.command import OpenMpi

    (first, enter), (second, _) = hosts
    (tmp_path / "hosts").write_text("".join(f"{host.address} slots=2\n" for host, _ in hosts))
    # What ssh does between machines. An interface that has another name there is named there, as in a login's profile.
    agent = tmp_path / "agent"
    there = shlex.join(
        [*second.command(named(second.name)), "env", f"GLOO_SOCKET_IFNAME={second.interface}", "sh", "-c"]
    )
    agent.write_text(f'#!/bin/sh\necho "asked for $1"\nshift\nexec {there} "$*"\n')
    agent.chmod(0o755)
    mpi = OpenMpi.find(os.environ)
    agent_parameter = mpi.dialect.agent
    options = [
        "--hostfile",
        "hosts",
        "-np",
        4,
        "--bind-to",
        "none",
        f"--{agent_parameter[0]}",
        agent_parameter[1],
        agent,
    ]
    for prefix, parameter in mpi.dialect.interface:
        options += [f"--{prefix}", parameter, f"{first.address}/30"]
    for name in ("SM_HP_MP_PARAMETERS", "PYTHONPATH", "OMP_NUM_THREADS", "SMP_TIMEOUT_SECONDS"):
        options += ["-x", name]
    environ = clean(**GIVEN, GLOO_SOCKET_IFNAME=first.interface)
    log = run([*enter, mpi.path, *options, *inside, *trained], folder=tmp_path, environs=[environ])
    assert f"asked for {second.address}" in log


@pytest.mark.parametrize("tasks", [1, 2], ids=["a task for each host", "a task for each rank"])
def test_srun_on_two_hosts(trained, tmp_path, hosts, tasks):
    """A batch script's one command."""
    fake_slurm.install(tmp_path)
    environ = fake_slurm.allocation(
        tmp_path, [host.address for host, _ in hosts], tasks, {host.address: enter for host, enter in hosts}
    )
    words = [] if tasks == 2 else ["--processes", 2]
    run([*LAUNCH, *words, *trained], folder=tmp_path, environs=[clean(**GIVEN, **environ)])


def test_the_hosts_of_a_training_operator(trained, tmp_path, hosts):
    """The variables that the operator gives to the pods of a PyTorchJob with nprocPerNode 2."""
    (first, _), _ = hosts
    pod = {"MASTER_ADDR": first.address, "MASTER_PORT": "23456", "WORLD_SIZE": "4", "PET_NNODES": "2"}
    pod |= {"PET_NPROC_PER_NODE": "2", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    commands = [[*enter, *LAUNCH, *trained] for _, enter in hosts]
    environs = [clean(**GIVEN, **pod, RANK=str(n), PET_NODE_RANK=str(n)) for n in range(2)]
    run(*commands, folder=tmp_path, environs=environs)


FAILS = """
import torch
import smdistributed.modelparallel.torch as smp

smp.init()
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)))

@smp.step
def step(x, y):
    loss = (model(x) - y).pow(2).mean()
    model.backward(loss)
    return loss

while True:
    step(torch.ones(4, 8), torch.zeros(4, 4))
    if smp.rank() == 3:
        raise ValueError("boom")
"""


def test_a_failure_on_one_host_ends_the_other_which_names_it(tmp_path):
    """Two launchers that know nothing of one another but where their ranks meet, on addresses of this machine."""
    (tmp_path / "fails.py").write_text(FAILS)
    with reserved_port() as port:
        shared = ["--processes", 2, "--parameters", PARAMETERS, "--hosts", 2, "--master", f"127.0.0.1:{port}"]
        commands = [
            [*LAUNCH, *shared, "--host-rank", n, "--failure-file", f"failure-{n}", "fails.py"] for n in range(2)
        ]
        with pytest.raises(AssertionError, match=r"^\[1, 1\]"):  # long before the ranks' own deadline of 90 seconds
            run(*commands, folder=tmp_path, environs=[clean(), clean()], patience=60.0)
    assert "ValueError: boom" in (tmp_path / "failure-1").read_text().splitlines()[0]
    assert "rank 3" in (tmp_path / "failure-0").read_text().splitlines()[0]


def test_workers_of_ray_train(trained, tmp_path):
    pytest.importorskip("ray.train.torch", reason='ray is not installed: pip install "ray[train]"')
    # The example has a folder of its own for weights, which the test then finds where it looks.
    words = [word for word in trained[1:] if word not in ("--model_dir", str(tmp_path))]
    (tmp_path / "model").symlink_to(tmp_path)
    example = ROOT / "examples" / "ray_train.py"
    sizes = ["--workers", 4, "--cpus", 0.4, "--folder", tmp_path]
    log = run([sys.executable, example, *sizes, "--", *words], folder=tmp_path, environs=[clean()])
    assert "world_rank=3" in log
