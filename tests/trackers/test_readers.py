"""What trackers' own readers find of a job: the losses of its log. Runs in `make test-trackers`, where the packages are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.platform.jobs import model_parallel

from smp_estimator import progress

if TYPE_CHECKING:
    from smp_records.records import ProgressRecord

for package in ("tensorboard", "mlflow", "wandb"):
    pytest.importorskip(package, reason="runs in `make test-trackers`, which installs it")

pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]

STEPS = 12

SCRIPT = """
import json, os, sys, time
import torch
import torch.nn.functional as F
import smdistributed.modelparallel.torch as smp

smp.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

@smp.step
def train_step(ids):
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    model.backward(loss)
    return loss

def main(fails_at, pause):
    start = 0
    folder = os.environ["SMP_CHECKPOINT_DIR"]
    if os.path.exists(os.path.join(folder, "newest")):
        start = smp.resume_from_checkpoint(folder)["step"]
    for step in range(start, STEPS):
        torch.manual_seed(100 + step + 1000 * smp.dp_rank())
        loss = train_step(torch.randint(32, (8, 16))).reduce_mean()
        optimizer.clip_master_grads(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if smp.rank() == 0:
            print("own " + json.dumps([step + 1, float(loss)]), flush=True)
        if step % 4 == 3:
            smp.save_checkpoint(folder, tag=f"step{step + 1}", user_content={"step": step + 1})
            smp.log(accuracy=step / STEPS)
        if step + 1 == fails_at:
            raise ValueError("on purpose")
        time.sleep(pause)
"""


def script(folder: Path, *, fails_at: int = 0, pause: float = 0.15) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(f"{SCRIPT}\nSTEPS = {STEPS}\nmain({fails_at}, {pause})\n")
    return str(folder)


def told(job: Any, name: str) -> dict[int, float]:
    """By step, the loss that the script has printed."""
    log = (job.sagemaker_session.job(name).tree.root / "job.log").read_text()
    return dict(json.loads(line.partition("own ")[2]) for line in log.splitlines() if "own [" in line)


def of_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {name: {e.step: e.value for e in reader.Scalars(name)} for name in reader.Tags()["scalars"]}


def of_mlflow(folder: Path) -> tuple[Any, dict[str, dict[int, float]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    names = run.data.metrics
    return run, {name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)} for name in names}


def records_of(content: bytes) -> Iterator[bytes]:
    """Of a file of wandb: behind seven bytes blocks of 32 KiB, as LevelDB writes its log."""
    at, part = 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        part += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


def of_wandb(folder: Path) -> dict[str, dict[int, float]]:
    from wandb.proto import wandb_internal_pb2

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("offline-run-*/run-*.wandb")):
        for data in records_of(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            for name, value in values.items():
                found.setdefault(name, {})[int(values["_step"])] = value
    return found


def estimator(tmp_path: Path, code: str, **more: Any) -> Any:
    from smp_estimator import SMPEstimator

    return SMPEstimator(
        entry_point="train.py",
        source_dir=code,
        instance_type="local",
        output_path=f"file://{tmp_path / 'out'}",
        distribution=model_parallel(2, ddp=True, microbatches=2),
        hyperparameters={"steps": STEPS, "api_token": "s3cret"},
        loggers=["tensorboard", "mlflow", "wandb"],
        **more,
    )


def test_readers_show_the_losses_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[ProgressRecord] = []
    monkeypatch.setattr(progress.View, "update", lambda view, record: lines.append(record))
    monkeypatch.setattr(progress, "open_view", progress.View)
    folder = tmp_path / "tracking"
    job = estimator(tmp_path, script(tmp_path / "src"), environment={"SMP_LOG_FOLDER": str(folder)})
    job.fit(job_name="tracked")
    own = told(job, "tracked")
    assert sorted(own) == list(range(1, STEPS + 1))
    assert len(lines) >= 2
    run, by_mlflow = of_mlflow(folder / "mlflow")
    found = {
        "tensorboard": of_tensorboard(folder / "tensorboard"),
        "mlflow": by_mlflow,
        "wandb": of_wandb(folder / "wandb"),
    }
    for name, values in found.items():
        assert values["loss"] == {step: pytest.approx(loss, rel=1e-6) for step, loss in own.items()}, name
        for line in lines:
            assert values["loss"][line.step] == pytest.approx(line.loss, rel=1e-6), name
            assert values["gradient_norm"][line.step] == pytest.approx(line.gradient_norm, rel=1e-6), name
        assert set(values["learning_rate"].values()) == {pytest.approx(0.01)}, name
        assert values["accuracy"] == {step + 1: pytest.approx(step / STEPS) for step in (3, 7, 11)}, name
        assert {f"memory_gib/rank{rank}" for rank in (0, 1)} <= values.keys(), name
        assert all(value > 0 for value in values["checkpoint_seconds"].values()), name
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tracked")
    assert run.data.params["smp.processes"] == "2"
    assert "s3cret" not in str(run.data.params)


def test_a_job_that_fails_and_resumes_goes_on_in_the_same_run(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "tracking", f"file://{tmp_path / 'checkpoints'}"
    more = {"environment": {"SMP_LOG_FOLDER": str(folder)}, "checkpoint_s3_uri": checkpoints}
    job = estimator(tmp_path, script(tmp_path / "src", fails_at=10, pause=0), **more)
    with pytest.raises(ValueError, match="on purpose"):
        job.fit(logs=False, job_name="failing")
    assert max(of_tensorboard(folder / "tensorboard")["loss"]) >= 9
    again = estimator(tmp_path, script(tmp_path / "again", pause=0), **more)
    again.fit(logs=False, job_name="resuming")
    own = told(again, "resuming")
    assert sorted(own) == list(range(9, STEPS + 1))
    run, values = of_mlflow(folder / "mlflow")  # one run
    assert run.info.status == "FINISHED"
    shown = of_tensorboard(folder / "tensorboard")["loss"]
    for loss in (values["loss"], shown):
        assert sorted(loss) == list(range(1, STEPS + 1))
        assert {step: loss[step] for step in own} == {
            step: pytest.approx(value, rel=1e-6) for step, value in own.items()
        }
