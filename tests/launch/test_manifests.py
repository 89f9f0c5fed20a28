"""The examples for Kubernetes and SLURM: fields that the API server knows, and commands that start what they promise."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from smp_config import ModelParallelParameters
from smp_config.formats.values import parse_dictionary
from smp_launch.anywhere.detect_launcher import LauncherSettings, recognise
from smp_launch.anywhere.run_command import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
#: From the operators' CustomResourceDefinitions; where they come from is said in it.
KINDS = json.loads((ROOT / "tests/support/schemas/kubeflow.json").read_text())["kinds"]
MANIFESTS = {"PyTorchJob": EXAMPLES / "kubernetes/pytorchjob.yaml", "MPIJob": EXAMPLES / "kubernetes/mpijob.yaml"}


def manifest(kind):
    return yaml.safe_load(MANIFESTS[kind].read_text())


def check(job):
    known = KINDS[job["kind"]]
    assert job["apiVersion"] == known["apiVersion"]
    jsonschema.validate(job, known["schema"])


def options_of(words):
    """What smp-launch makes of a command line."""
    at = words.index("smp-launch")
    assert words[at + 1] == "run"
    return run_script.make_context("run", list(words[at + 2 :])).params


def containers(job, replicas, role):
    return job["spec"][replicas][role]["template"]["spec"]["containers"]


@pytest.mark.parametrize("kind", MANIFESTS)
def test_the_api_server_knows_every_field(kind):
    job = manifest(kind)
    assert job["kind"] == kind
    check(job)
    for spec in (job["spec"].get("pytorchReplicaSpecs") or job["spec"]["mpiReplicaSpecs"]).values():
        pod = spec["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
            assert container["image"]


def _without_containers(job):
    del job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda job: job["spec"].update(nprocPerNode=2), "2 is not of type 'string'"),
        (lambda job: job["spec"].update(nprocsPerNode="2"), "nprocsPerNode"),
        (_without_containers, "'containers' is a required property"),
        (lambda job: job["spec"].pop("pytorchReplicaSpecs"), "'pytorchReplicaSpecs' is a required property"),
    ],
)
def test_the_check_sees_mistakes(change, said):
    job = copy.deepcopy(manifest("PyTorchJob"))
    change(job)
    with pytest.raises(jsonschema.ValidationError, match=said):
        check(job)


def test_the_pods_of_a_pytorchjob_become_the_ranks_that_the_degrees_need():
    job = manifest("PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert set(roles) == {"Master", "Worker"}
    assert roles["Master"]["replicas"] == 1
    pods = sum(role["replicas"] for role in roles.values())
    processes = int(job["spec"]["nprocPerNode"])
    found = []
    for number in range(pods):
        (container,) = containers(job, "pytorchReplicaSpecs", "Worker" if number else "Master")
        assert container["name"] == "pytorch"  # by which the operator finds the port
        options = options_of([*container["command"], *container["args"]])
        # As the operator sets them, in pkg/controller.v1/pytorch/envvar.go.
        pod = {"MASTER_ADDR": "gpt-master-0", "MASTER_PORT": "23456", "RANK": str(number), "PET_NODE_RANK": str(number)}
        pod |= {"WORLD_SIZE": str(pods * processes), "PET_NNODES": str(pods), "PET_NPROC_PER_NODE": str(processes)}
        found.append(recognise({**pod, "CUDA_VISIBLE_DEVICES": ""}, LauncherSettings(options["processes"])))
    assert [(pod.first_rank, pod.ranks, pod.size) for pod in found] == [(0, 2, 4), (2, 2, 4)]
    parameters = ModelParallelParameters.from_mp_parameters(parse_dictionary(options["parameters"], "--parameters"))
    topology = parameters.topology(found[0].size)
    assert (parameters.pipeline_parallel_degree, topology.world_size) == (2, 4)


def test_the_workers_of_an_mpijob_have_a_slot_for_every_process():
    job = manifest("MPIJob")
    roles = job["spec"]["mpiReplicaSpecs"]
    assert set(roles) == {"Launcher", "Worker"}
    assert roles["Launcher"]["replicas"] == 1
    (container,) = containers(job, "mpiReplicaSpecs", "Launcher")
    words = [*container["command"], *container["args"]]
    processes = int(words[words.index("-np") + 1])
    assert processes == roles["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    options = options_of(words)
    assert options["processes"] is None  # each process is one rank
    ModelParallelParameters.from_mp_parameters(parse_dictionary(options["parameters"], "--parameters")).topology(
        processes
    )


def test_the_batch_script_of_slurm(tmp_path):
    path = EXAMPLES / "slurm" / "train_gpt.sbatch"
    subprocess.run(["bash", "-n", path], check=True, timeout=20)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.+)$", path.read_text(), re.MULTILINE))
    # The launcher is replaced by one that prints its words.
    program = tmp_path / "smp-launch"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    said = subprocess.run(
        ["bash", path, "/shared/text", "--steps", "3"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout.splitlines()
    options = options_of(["smp-launch", *said])
    ranks = int(asked["nodes"]) * int(asked["ntasks-per-node"]) * options["processes"]
    ModelParallelParameters.from_mp_parameters(parse_dictionary(options["parameters"], "--parameters")).topology(ranks)
    assert ranks == 4
    assert (ROOT / options["script"]).is_file()
    assert options["words"][:2] == ("--train", "/shared/text")
    assert options["words"][-2:] == ("--steps", "3")
    assert asked["signal"].startswith("TERM@")


@pytest.mark.parametrize("path", [*MANIFESTS.values(), ROOT / "docs/launchers.md"], ids=lambda path: path.name)
def test_parameters_in_examples_can_be_read(path):
    found = re.findall(r"'(\{\"[^']+\})'", path.read_text())
    assert found
    for text in found:
        ModelParallelParameters.from_mp_parameters(json.loads(text))


def test_commands_of_the_page_are_understood():
    """Every ``smp-launch run`` line of the page parses, with lines that are continued."""
    page = (ROOT / "docs/launchers.md").read_text().replace("\\\n", " ")
    blocks = re.findall(r"```(?:sh|bash)?\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if "smp-launch run" in line]
    assert len(lines) >= 6
    for line in lines:
        options_of(shlex.split(line, comments=True))
