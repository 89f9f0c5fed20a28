"""Planning with an estimator's own settings."""

from __future__ import annotations

import pytest

from smp_estimator import ConfigError, SMPEstimator


def _estimator(**parameters):
    return SMPEstimator(
        entry_point="train.py",
        instance_type="local",
        distribution={
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"ddp": True, **parameters}}},
            "mpi": {"enabled": True, "processes_per_host": 4},
        },
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


def test_a_cluster_that_is_not_known_yet():
    estimator = _estimator()
    estimator.instance_count = None
    with pytest.raises(ConfigError, match=r"smp_estimator.planning.plan\(\)"):
        estimator.suggest("gpt2")
