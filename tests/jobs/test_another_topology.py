"""A job's checkpoints at ``checkpoint_s3_uri``, and a second job with another ``distribution`` that goes on from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.platform.jobs import ENTRYPOINTS, artifact

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

STAGES = {"partitions": 2, "microbatches": 2}
SHARDED = {"sharded_data_parallel_degree": 2}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, STAGES), (2, SHARDED), id="stages to shards", marks=pytest.mark.full),
        pytest.param((2, SHARDED), (1, {}), id="shards to one process", marks=pytest.mark.full),
        pytest.param((1, {}), (2, STAGES), id="one process to stages", marks=pytest.mark.full),
        pytest.param(
            (2, {"shard_optimizer_state": True}), (2, STAGES), id="sharded state to stages", marks=pytest.mark.full
        ),
        pytest.param(
            (4, {**STAGES, **SHARDED}), (2, {"tensor_parallel_degree": 2}), id="four to two", marks=pytest.mark.full
        ),
    ],
)
def test_a_job_resumes_at_another_topology(gpt_job, text, tmp_path, capsys, before, after):
    """Both halves of the losses are those of the first job alone, which went on to its end."""
    from smp_estimator.cli.main import main

    checkpoints = tmp_path / "checkpoints"
    settings = {"checkpoint_interval": 10, "estimator": {"checkpoint_s3_uri": f"file://{checkpoints}"}}
    results = []
    for name, (processes, parameters) in (("a", before), ("b", after)):
        job = gpt_job(
            processes, name=name, parameters=parameters, **{**settings, "estimator": {**settings["estimator"]}}
        )
        job.fit({"train": f"file://{text}"})
        assert ("resumed at step 10" in capsys.readouterr().out) == (name == "b")
        results.append(artifact(job, "losses.json"))
        if name == "a":
            said = CliRunner().invoke(main, ["checkpoint", "inspect", str(checkpoints), "--json"])
            about = json.loads(said.output)
            assert about["newest"] == about["resumes"] == "step10_partial"
            assert about["checkpoints"][0]["topology"]["world_size"] == processes
            assert CliRunner().invoke(main, ["checkpoint", "verify", str(checkpoints)]).exit_code == 0
    expected, resumed = results
    assert len(expected) == len(resumed) == 20
    assert resumed[:10] == expected[:10]
    assert resumed == pytest.approx(expected, abs=1e-5)


@pytest.mark.full
def test_the_example_stops_goes_on_elsewhere_and_exports(tmp_path):
    from safetensors.torch import load_file

    example = ENTRYPOINTS.parent / "examples" / "another_topology.py"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, str(example), "--steps", "4", "--megabytes", "0.3"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step" in done.stdout
    said = done.stdout.splitlines()[-1]
    assert said.startswith("another topology: stopped_at=")
    assert len(load_file(said.partition("weights=")[2])) == 52
