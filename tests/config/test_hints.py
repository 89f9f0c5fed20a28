"""What a parameter that belongs elsewhere, or says more than it can, is told."""

from __future__ import annotations

import pytest

from smp_config import ConfigError, ModelParallelParameters


@pytest.mark.parametrize("name", ["_trace_execution_times", "trace_execution_times"])
def test_an_argument_of_the_model_is_no_parameter(name):
    with pytest.raises(ConfigError, match=rf"unknown parameter '{name}'.* is no setting of the job") as caught:
        ModelParallelParameters.from_mp_parameters({name: True})
    assert "smp.DistributedModel(model, trace_execution_times=True)" in str(caught.value)


def test_the_hints_are_arguments_that_the_model_has():
    import inspect

    pytest.importorskip("torch")
    import smdistributed.modelparallel.torch as smp
    from smp_config.parameters import _MODEL_ARGUMENTS

    assert set(_MODEL_ARGUMENTS) <= set(inspect.signature(smp.DistributedModel).parameters)


def test_more_active_microbatches_than_there_are_is_told():
    def said(**settings):
        return ModelParallelParameters(**settings).warnings()

    assert said(microbatches=4, active_microbatches=6) == [
        "active_microbatches is 6, but microbatches is 4, the most that can be in flight: it counts as that"
    ]
    assert said(microbatches=4, active_microbatches=4) == said(microbatches=2) == []


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("hybrid_shard_degree", '"sharded_data_parallel_degree"'),
        ("sm_activation_offloading", '"offload_activations"'),
        ("random_seed", "torch.manual_seed"),
        ("allow_empty_shards", '"sdp_param_persistence_threshold"'),
        ("fsdp_cache_flush_warnings", "torch.cuda.memory_stats"),
    ],
)
def test_a_setting_of_version_2_says_what_to_use(name, instead):
    with pytest.raises(ConfigError, match=f"{name}.*belongs to version 2.*use .*{instead}"):
        ModelParallelParameters.from_mp_parameters({"ddp": True, name: 2})
