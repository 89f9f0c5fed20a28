"""Manifests for HyperPod's training operator: fields that it knows, ranks that meet, and log patterns that our lines match."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.platform.command_line import call

from smp_config import ConfigError
from smp_config.error_codes import code_of
from smp_estimator.cli.manifest import as_yaml
from smp_estimator.cloud.hyperpod import HyperPodJob
from smp_launch.anywhere.detect_launcher import LauncherKind, LauncherSettings, recognise
from smp_launch.anywhere.run_command import run_script
from smp_records.records import PaceRecord, ProgressRecord, UsageRecord, format_pace, format_progress, format_usage

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/kubernetes/hyperpodpytorchjob.yaml"
KNOWN = json.loads((ROOT / "tests/support/schemas/hyperpod.json").read_text())

JOB: dict[str, Any] = {"name": "gpt", "image": "i", "script": "/opt/ml/code/train.py", "nodes": 2, "processes": 2}


def check(manifest: Any) -> None:
    assert (manifest["apiVersion"], manifest["kind"]) == (KNOWN["apiVersion"], KNOWN["kind"])
    assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(manifest["spec"], KNOWN["spec"])


def test_the_operator_knows_every_field_of_the_example() -> None:
    made = yaml.safe_load(EXAMPLE.read_text())
    check(made)
    made["spec"]["runPolicy"]["logMonitoringConfiguration"][0]["faultOnMatch"] = True
    with pytest.raises(jsonschema.ValidationError, match="faultOnMatch"):
        check(made)


def test_the_example_is_what_its_command_writes() -> None:
    text = EXAMPLE.read_text()
    comment = re.sub(r"^#", "", "".join(re.findall(r"^#   .*\n", text, re.MULTILINE)), flags=re.MULTILINE)
    program, *words = shlex.split(comment.replace("\\\n", " ").partition("kubectl")[0])
    assert program == "smp-estimator"
    assert text.endswith(call(*words).output)


def test_every_rank_finds_its_place() -> None:
    """The agent sets the variables of torchrun, in a pod; `smp-launch run` is started once for each rank."""
    container = HyperPodJob(**JOB, words=["--steps", "3"]).manifest()["spec"]["replicaSpecs"][0]["template"]["spec"][
        "containers"
    ][0]
    words = [*container["command"], *container["args"]]
    assert words[:3] == ["hyperpodrun", "--nnodes=2", "--nproc-per-node=2"]
    at = words.index("smp-launch")
    assert words[at - 1] == "--no-python"
    options = run_script.make_context("run", words[at + 2 :]).params
    assert (options["script"], options["words"]) == ("/opt/ml/code/train.py", ("--steps", "3"))
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "10.1.0.4", "MASTER_PORT": "29500"}
    found = []
    for rank in range(4):
        torch = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        torch |= {"GROUP_RANK": str(rank // 2), "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
        found.append(recognise({**pod, **torch, "TORCHELASTIC_RESTART_COUNT": "0"}, LauncherSettings()))
    assert [(place.kind, place.is_rank, place.first_rank, place.size) for place in found] == [
        (LauncherKind.TORCH, True, rank, 4) for rank in range(4)
    ]


def test_the_operator_sees_progress_in_the_lines_of_every_rank() -> None:
    manifest = HyperPodJob(**JOB).manifest()
    (rule,) = manifest["spec"]["runPolicy"]["logMonitoringConfiguration"]
    seen, stops = re.compile(rule["logPattern"]), re.compile(rule["stopPattern"])
    times = dict.fromkeys(("compute", "collectives", "waiting", "data", "saving"), 6.0)
    pace = format_pace(PaceRecord(rank=3, host="node-1", step=7, steps=2, seconds=30.0, **times))
    usage = format_usage(UsageRecord(rank=3, memory_bytes=1))
    progress = format_progress(ProgressRecord(step=7, loss=1.0))
    lines = [pace, f"[node3]: {pace}", usage, progress, "[smp] Partition assignments:", ""]
    assert [bool(seen.match(line)) for line in lines] == [True, True, False, False, False, False]
    assert [bool(stops.match(line)) for line in lines] == [False, False, True, False, False, False]
    assert not set(rule["logPattern"] + rule["stopPattern"]) & set("\\()[]?+"), "the same in every dialect of patterns"
    container = manifest["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    every = next(int(one["value"]) for one in container["env"] if one["name"] == "SMP_RANK_RECORDS")
    assert 0 < every < rule["expectedRecurringFrequencyInSeconds"]


def test_settings_of_a_job_come_to_their_fields() -> None:
    job = HyperPodJob(
        **JOB,
        instance_type="ml.p4d.24xlarge",
        environment={"A": "1"},
        volumes={"data": "/data"},
        secret="ours",
        namespace="team",
        restarts=0,
    )
    made = job.manifest()
    check(made)
    pod = made["spec"]["replicaSpecs"][0]["template"]["spec"]
    (container,) = pod["containers"]
    assert made["metadata"] == {"name": "gpt", "namespace": "team"}
    assert made["spec"]["runPolicy"]["jobMaxRetryCount"] == 0
    assert {"name": "A", "value": "1"} in container["env"]
    assert container["env"][-1]["valueFrom"] == {"secretKeyRef": {"name": "ours", "key": "secret"}}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] > 110
    assert yaml.safe_load(as_yaml(made)) == made


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"name": "My_Job"}, "SMP108", "name is 'My_Job'"),
        ({"volumes": {"data": "data"}}, "SMP108", "write an absolute path"),
        ({"volumes": {"shared-memory": "/x"}}, "SMP108", "give the claim another name"),
        ({"environment": {"SMP_RANK_RECORDS": "0"}}, "SMP108", "leave it out"),
        ({"instance_type": "ml.g5.xlarge"}, "SMP108", "has 1 GPUs"),
        ({"parameters": {"pipeline_parallel_degree": 3, "ddp": True}}, "SMP102", "pipeline_parallel_degree 3"),
    ],
)
def test_what_cannot_run_is_refused(change: dict[str, Any], code: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        HyperPodJob(**{**JOB, **change})
    assert code_of(raised.value) == code
