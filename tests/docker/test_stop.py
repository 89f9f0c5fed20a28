"""``docker stop``: the ranks save, the containers end well, and a new job goes on where the old one ended."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.platform.docker_client import docker, logs
from support.platform.jobs import ENTRYPOINTS, TINY

pytestmark = pytest.mark.timeout(300)

#: What the platform gives between SIGTERM and SIGKILL, in seconds.
PLATFORM_GRACE = 120


def tree(folder: Path, host: str, hosts: list[str], text: Path, **hyperparameters: Any) -> list[str]:
    """Write what the platform gives a host; the words that mount it."""
    base = folder / host
    config = base / "input" / "config"
    if not config.exists():
        for name in ("input/config", "input/data", "model", "output/data", "checkpoints"):
            (base / name).mkdir(parents=True)
        shutil.copytree(ENTRYPOINTS, base / "code", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(text, base / "input" / "data" / "train")
    values = {
        **TINY,
        **hyperparameters,
        "sagemaker_program": "train_gpt.py",
        "mp_parameters": {"ddp": True, "microbatches": 2},
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 2,
    }
    (config / "hyperparameters.json").write_text(json.dumps({k: json.dumps(v) for k, v in values.items()}))
    (config / "inputdataconfig.json").write_text(json.dumps({"train": {"TrainingInputMode": "File"}}))
    resources = {"current_host": host, "hosts": hosts, "network_interface_name": "eth0"}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    return ["--volume", f"{base}:/opt/ml", "--env", "OMP_NUM_THREADS=1"]


def wait_for(identity: str, text: str, patience: float = 60.0) -> None:
    """Wait until the container has said ``text``."""
    command = ["docker", "logs", "--follow", identity]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + patience
    try:
        for line in follower.stdout or ():
            if text in line:
                return
            if time.monotonic() > deadline:
                break
    finally:
        follower.kill()
        follower.wait()
    raise AssertionError(f"{text!r} did not come:\n{docker('logs', identity)}")


@pytest.mark.parametrize("hosts", [1, 2])
def test_docker_stop_leaves_a_checkpoint(image, text, tmp_path, containers, network, hosts):
    names = [f"algo-{n + 1}" for n in range(hosts)]
    for name in names:
        mounts = tree(tmp_path, name, names, text, steps=100_000)
        containers.run("--network", network, "--network-alias", name, *mounts, image, "train")
    wait_for(containers.ids[0], "smp-progress ")
    start = time.monotonic()
    docker("stop", "--time", str(PLATFORM_GRACE), *containers.ids)
    took = time.monotonic() - start
    log = logs(containers.ids[0])
    assert containers.exit_codes() == [0] * hosts, log
    assert "stopped by SIGTERM after step" in log
    print(f"{hosts} host(s): docker stop took {took:.1f} s")
    assert took < 30
    checkpoints = tmp_path / "algo-1" / "checkpoints"
    newest = (checkpoints / "newest").read_text().strip()
    assert (checkpoints / newest / "user_content.pt").exists()
    assert not (tmp_path / "algo-1" / "output" / "failure").exists()
    if hosts == 1:
        step = int(log.rpartition("stopped by SIGTERM after step ")[2].partition(",")[0])
        mounts = tree(tmp_path, "algo-1", names, text, steps=step + 5)
        again = containers.run(*mounts, image, "train")
        assert docker("wait", again) == "0"
        assert f"resumed at step {step}" in logs(again)


def test_started_by_the_toolkit_s_own_program(image, text, tmp_path, containers):
    """An entry point that is ``train`` of the training toolkit hands over to the launcher."""
    mounts = tree(tmp_path, "algo-1", ["algo-1"], text, steps=3)
    identity = containers.run("--entrypoint", "train", *mounts, image)
    assert docker("wait", identity) == "0", logs(identity)
    assert "smp-launch: 1 host (algo-1) × 2 processes" in logs(identity)
    assert (tmp_path / "algo-1" / "model" / "losses.json").exists()


@pytest.mark.parametrize(
    ("requirements", "submitted", "parts"),
    [
        ("no-such-package-of-anybody==0\n", None, ["requirements.txt cannot be installed: ", "put what it names into"]),
        (
            None,
            "s3://no-such-bucket/code.tar.gz",
            ["the code cannot be fetched from s3://no-such-bucket/code.tar.gz: "],
        ),
    ],
)
def test_code_that_cannot_be_prepared(image, text, tmp_path, containers, requirements, submitted, parts):
    options = {"sagemaker_submit_directory": submitted} if submitted else {}
    mounts = tree(tmp_path, "algo-1", ["algo-1"], text, **options)
    if requirements:
        (tmp_path / "algo-1" / "code" / "requirements.txt").write_text(requirements)
    if submitted:  # code that is there already is not fetched
        shutil.rmtree(tmp_path / "algo-1" / "code")
    nothing_outside = ["--network", "none", "--env", "AWS_EC2_METADATA_DISABLED=true", "--env", "PIP_RETRIES=0"]
    identity = containers.run(*nothing_outside, *mounts, image, "train")
    assert docker("wait", identity) == "2", logs(identity)
    said = (tmp_path / "algo-1" / "output" / "failure").read_text()
    assert said.startswith("the job cannot start: ")
    assert all(part in said for part in parts), said


def test_one_host_needs_no_network(image, text, tmp_path, containers):
    mounts = tree(tmp_path, "algo-1", ["algo-1"], text, steps=3)
    identity = containers.run("--network", "none", *mounts, image, "train")
    assert docker("wait", identity) == "0", logs(identity)


def test_ranks_that_mpirun_lays_out_otherwise_are_refused(image, text, tmp_path, containers, network):
    names = ["algo-1", "algo-2"]
    for name in names:
        options = {"sagemaker_mpi_custom_mpi_options": "--map-by node"}
        mounts = tree(tmp_path, name, names, text, **options)
        containers.run("--network", network, "--network-alias", name, *mounts, image, "train")
    assert docker("wait", containers.ids[0]) == "1"
    said = (tmp_path / "algo-1" / "output" / "failure").read_text()
    assert "remove options such as --map-by" in said.partition("\n")[0]


def test_a_lost_host_ends_the_job_with_its_name(image, text, tmp_path, containers, network):
    names = ["algo-1", "algo-2"]
    for name in names:
        mounts = tree(tmp_path, name, names, text, steps=100_000)
        containers.run("--network", network, "--network-alias", name, *mounts, image, "train")
    wait_for(containers.ids[0], "smp-progress ")
    start = time.monotonic()
    docker("kill", containers.ids[1])
    code = docker("wait", containers.ids[0])
    assert code != "0"
    assert time.monotonic() - start < 30
    said = (tmp_path / "algo-1" / "output" / "failure").read_text()
    assert "algo-2" in said.partition("\n")[0], said


def test_a_worker_learns_that_its_leader_was_killed(image, text, tmp_path, containers, network):
    names = ["algo-1", "algo-2"]
    for name in names:
        mounts = tree(tmp_path, name, names, text, steps=100_000)
        containers.run("--network", network, "--network-alias", name, *mounts, image, "train")
    wait_for(containers.ids[0], "smp-progress ")
    docker("kill", containers.ids[0])
    assert docker("wait", containers.ids[1]) == "1"
    assert "the leader algo-1 died" in (tmp_path / "algo-2" / "output" / "failure").read_text()


def test_a_host_that_never_comes_is_named(image, text, tmp_path, containers, network):
    names = ["algo-1", "algo-2"]
    mounts = tree(tmp_path, "algo-1", names, text)
    patience = ["--env", "SMP_LAUNCH_HOSTS_PATIENCE=2"]
    only = containers.run("--network", network, "--network-alias", "algo-1", *patience, *mounts, image, "train")
    assert docker("wait", only) == "2"
    said = (tmp_path / "algo-1" / "output" / "failure").read_text()
    assert "1 of 1 other host(s) could not be reached within 2 s (algo-2: " in said


def test_only_the_leader_may_log_in(image, text, tmp_path, containers, network):
    """A third machine of the network finds the worker's server, and no way in, with whatever key."""
    names = ["algo-1", "algo-2"]
    leader = containers.run("--network", network, "--network-alias", "algo-1", "--entrypoint", "sleep", image, "120")
    mounts = tree(tmp_path, "algo-2", names, text)
    worker = containers.run("--network", network, "--network-alias", "algo-2", *mounts, image, "train")
    stranger = containers.run("--network", network, "--entrypoint", "sleep", image, "120")
    wait_for(worker, "waits for algo-1")
    login = (
        "ssh-keygen -q -t ed25519 -N '' -f /tmp/key && ssh -i /tmp/key -o BatchMode=yes -o StrictHostKeyChecking=no "
        "-o LogLevel=ERROR algo-2 echo inside"
    )

    def attempt(identity: str) -> subprocess.CompletedProcess[str]:
        command = ["docker", "exec", identity, "bash", "-c", login]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    refused = attempt(stranger)
    assert refused.returncode == 255
    assert "Permission denied" in refused.stderr
    assert attempt(leader).stdout.strip() == "inside"
