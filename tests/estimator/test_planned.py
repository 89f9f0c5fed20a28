"""Planning with an estimator's own settings."""

from __future__ import annotations

import pytest
from support.platform.jobs import model_parallel

from smp_estimator import ConfigError, SMPEstimator


def _estimator(**parameters):
    return SMPEstimator(
        entry_point="train.py",
        instance_type="local",
        distribution=model_parallel(4, ddp=True, **parameters),
    )


def test_a_plan_takes_cluster_and_settings_from_the_estimator():
    plain = _estimator().plan("gpt2", batch=2, gpu_memory_bytes=8 * 2**30)
    sharded = _estimator(shard_optimizer_state=True).plan("gpt2", batch=2, gpu_memory_bytes=8 * 2**30)
    assert plain.batches.global_batch == 8
    assert sharded.worst.state < plain.worst.state
    assert "gradients" in str(plain)


def test_a_suggestion_for_the_same_cluster():
    suggestion = _estimator().suggest("gpt2", processes_per_host=4, gpu_memory_bytes=8 * 2**30)
    assert suggestion.plan.total_bytes < 8 * 2**30


def test_a_simple_pipeline_holds_one_wave():
    """As the runtime: waves of active_microbatches, two more than stages unless given."""
    held = {
        active: _estimator(pipeline_parallel_degree=4, microbatches=16, pipeline="simple", **given)
        .plan("gpt2", batch=16, gpu_memory_bytes=8 * 2**30)
        .worst.activations.kept
        for active, given in ((6, {}), (3, {"active_microbatches": 3}), (16, {"active_microbatches": 99}))
    }
    assert held[6] == 2 * held[3]
    assert held[16] * 3 == held[3] * 16


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_a_gpu_without_memory(size):
    with pytest.raises(ConfigError, match=r"the memory of a GPU is .* give more than 0, or leave it out"):
        _estimator().plan("gpt2", gpu_memory_bytes=size)


def test_a_cluster_that_is_not_known_yet():
    estimator = _estimator()
    estimator.instance_count = None
    with pytest.raises(ConfigError, match=r"smp_estimator.planning.plan\(\)"):
        estimator.suggest("gpt2")


@pytest.mark.parametrize("name", ["batch_size", "train_batch_size", "per_device_train_batch_size"])
def test_the_batch_is_that_of_the_hyperparameters(name):
    estimator = _estimator(pipeline_parallel_degree=2, microbatches=2)
    assert estimator.plan("gpt2", gpu_memory_bytes=2**34).batches.batch == 2
    estimator.set_hyperparameters(**{name: 6, "epochs": 3})
    made = estimator.plan("gpt2", gpu_memory_bytes=2**34)
    assert made.batches.batch == 6
    assert f"the batch is the hyperparameter {name}" in " ".join(str(made).split())
    assert estimator.plan("gpt2", 4, gpu_memory_bytes=2**34).batches.batch == 4
    estimator.set_hyperparameters(**{name: 5})
    with pytest.raises(
        ConfigError, match=f"cannot be divided into 2 microbatches.*; the batch of 5 is the hyperparameter {name}"
    ):
        estimator.plan("gpt2", gpu_memory_bytes=2**34)


def test_an_estimator_rehearses_its_script_with_its_settings(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr("smp_estimator.rehearsal.rehearse", lambda *args, **kwargs: asked.update(kwargs, args=args))
    (tmp_path / "train.py").write_text("")
    given = {"source_dir": str(tmp_path), "hyperparameters": {"layers": 2, "n": "x"}}
    estimator = SMPEstimator(
        entry_point="train.py",
        instance_type="local",
        distribution=model_parallel(4, ddp=True, pipeline_parallel_degree=2),
        **given,
    )
    estimator.rehearse(["--checkpoint"], channels={"train": tmp_path}, steps=4)
    assert asked["args"] == (tmp_path / "train.py", ["--layers", "2", "-n", "x", "--checkpoint"])
    assert (asked["instance_type"], asked["instance_count"], asked["processes_per_host"]) == ("local", 1, 4)
    assert asked["parameters"]["pipeline_parallel_degree"] == 2
    assert (asked["channels"], asked["steps"]) == ({"train": tmp_path}, 4)
    (tmp_path / "train.py").unlink()
    with pytest.raises(ConfigError, match="is not on this machine; a rehearsal runs it here"):
        estimator.rehearse()
