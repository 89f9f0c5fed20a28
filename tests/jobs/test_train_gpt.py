"""The main job: the same losses however it is spread, resumed after a kill, stopped cleanly, weights for plain torch."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import time

import pytest
from support.platform.jobs import ENTRYPOINTS, artifact

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]


def _fit(estimator, text):
    estimator.fit({"train": f"file://{text}"}, logs=False)
    return estimator


@pytest.fixture(scope="module")
def reference():
    """Losses of one process without mpirun, computed once."""
    return {}


@pytest.mark.parametrize(
    ("hosts", "processes", "microbatches"),
    [
        pytest.param(1, 1, 1, marks=pytest.mark.full),
        pytest.param(1, 1, 4, marks=pytest.mark.full),
        pytest.param(1, 2, 2, marks=pytest.mark.full),
        pytest.param(2, 1, 1, marks=pytest.mark.full),
        pytest.param(2, 2, 4, marks=pytest.mark.full),
    ],
)
def test_the_same_losses_however_the_job_is_spread(gpt_job, text, reference, hosts, processes, microbatches):
    losses = artifact(_fit(gpt_job(processes, hosts, microbatches), text), "losses.json")
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(reference.setdefault("losses", losses), abs=1e-5)


@pytest.mark.parametrize(
    ("parameters", "tolerance"),
    [
        pytest.param({"shard_optimizer_state": True}, 1e-5, marks=pytest.mark.full),
        pytest.param({"bf16": True, "shard_optimizer_state": True}, 2e-2, marks=pytest.mark.full),
        pytest.param({"fp16": True}, 2e-2, marks=pytest.mark.full),
        pytest.param({"partitions": 2}, 1e-5, marks=pytest.mark.full),
    ],
)
def test_half_precision_sharded_state_and_pipelines_train_alike(gpt_job, text, reference, parameters, tolerance):
    if "losses" not in reference:
        reference["losses"] = artifact(_fit(gpt_job(1), text), "losses.json")
    losses = artifact(_fit(gpt_job(2, 1, 2, parameters=parameters), text), "losses.json")
    assert losses == pytest.approx(reference["losses"], rel=tolerance)


@pytest.mark.full
def test_a_pipeline_across_two_hosts_trains_alike(gpt_job, text, reference):
    if "losses" not in reference:
        reference["losses"] = artifact(_fit(gpt_job(1), text), "losses.json")
    spread = {"partitions": 2, "placement_strategy": "spread"}  # each pipeline has one stage on each host
    losses = artifact(_fit(gpt_job(2, 2, 2, parameters=spread), text), "losses.json")
    assert losses == pytest.approx(reference["losses"], abs=1e-5)


@pytest.mark.full
def test_weights_load_in_plain_torch_without_this_package(gpt_job, text, tmp_path):
    job = _fit(gpt_job(2, steps=2), text)
    with tarfile.open(job.model_data.removeprefix("file://")) as archive:
        archive.extractall(tmp_path / "model", filter="data")
    code = (
        "import torch, json, sys\n"
        "state = torch.load('model.pt', weights_only=True)\n"
        "assert state['tokens.weight'].shape == (256, 32), state['tokens.weight'].shape\n"
        "assert json.load(open('config.json'))['layers'] == 2\n"
        "assert not [m for m in sys.modules if m.startswith(('smp', 'smdistributed'))]\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "model", check=True)


@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param({}, id="replicas"),
        pytest.param({"partitions": 2, "microbatches": 2}, id="stages"),
    ],
)
@pytest.mark.full
def test_killed_at_step_50_of_100_and_started_again_it_ends_as_if_never_killed(gpt_job, text, tmp_path, parameters):
    from sagemaker.exceptions import UnexpectedStatusException

    settings = {"steps": 100, "dropout": 0.1, "parameters": parameters}
    expected = artifact(_fit(gpt_job(2, name="a", **settings), text), "losses.json")

    checkpoints = tmp_path / "checkpoints"
    (tmp_path / "kill").mkdir()
    # The script kills its own job once, right after step 50, between two checkpoints.
    for name in ("train_gpt.py",):
        source = (ENTRYPOINTS / name).read_text()
        marker = tmp_path / "killed-once"
        killer = (
            f"        if done == 50 and smp.rank() == 1 and not os.path.exists({str(marker)!r}):\n"
            f"            open({str(marker)!r}, 'w').close()\n"
            "            os.kill(os.getpid(), 9)\n"
        )
        assert source.count("        done = step + 1\n") == 1
        (tmp_path / "kill" / name).write_text(
            source.replace("        done = step + 1\n", "        done = step + 1\n" + killer)
        )
    again = {
        **settings,
        "checkpoint_interval": 20,
        "source_dir": str(tmp_path / "kill"),
        "estimator": {"checkpoint_s3_uri": f"file://{checkpoints}"},
    }
    with pytest.raises(UnexpectedStatusException, match="rank 1 .*killed by signal 9"):
        _fit(gpt_job(2, name="b", **again), text)
    assert (checkpoints / "newest").read_text() == "step40_partial"
    losses = artifact(_fit(gpt_job(2, name="c", **again), text), "losses.json")
    assert len(losses) == 100
    assert losses == pytest.approx(expected, abs=1e-5)


def test_a_stopped_job_saves_leaves_and_continues(gpt_job, text, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    settings = {"checkpoint_interval": 20, "estimator": {"checkpoint_s3_uri": f"file://{checkpoints}"}}
    job = gpt_job(2, steps=100_000, **settings)
    job.fit({"train": f"file://{text}"}, wait=False)
    until = time.monotonic() + 90
    while not (checkpoints / "newest").exists():  # then it is training, and listens to SIGTERM
        assert time.monotonic() < until, "the job saved nothing"
        time.sleep(0.05)
    job.latest_training_job.stop()
    job.latest_training_job.wait(logs=False)
    assert job.latest_training_job.describe()["TrainingJobStatus"] == "Stopped"
    step = int((checkpoints / "newest").read_text().removeprefix("step").removesuffix("_partial"))
    assert step >= 20
    settings["estimator"] = {"checkpoint_s3_uri": f"file://{checkpoints}"}
    # One process is enough to go on.
    losses = artifact(_fit(gpt_job(1, steps=step + 5, **settings), text), "losses.json")
    assert len(losses) == step + 5
