"""The typed configuration: every name, default, bound and cross-field rule."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.matrix import examples

from smp_config import ConfigError, ModelParallelParameters
from smp_config.formats.values import why_no_path


def parse(**parameters):
    return ModelParallelParameters.from_mp_parameters(parameters)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_without_end_are_refused(value):
    with pytest.raises(ConfigError, match="microbatches must be a whole number"):
        parse(microbatches=value)


DOCUMENTED_DEFAULTS = {
    "pipeline_parallel_degree": 1,
    "partitions": 1,
    "tensor_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "sharded_data_parallel_degree": 1,
    "microbatches": 1,
    "active_microbatches": 3,
    "virtual_stages": 1,
    "pipeline": "interleaved",
    "optimize": "memory",
    "memory_weight": 0.8,
    "placement_strategy": "cluster",
    "auto_partition": True,
    "default_partition": 0,
    "ddp": False,
    "ddp_dist_backend": "auto",
    "host_collectives": None,
    "ddp_port": None,
    "prescaled_batch": False,
    "shard_optimizer_state": False,
    "fp16": False,
    "bf16": False,
    "fp16_params": False,
    "offload_activations": False,
    "activation_loading_horizon": 4,
    "delayed_parameter_initialization": False,
    "skip_tracing": False,
    "deterministic_server": False,
    "deterministic": False,
    "record_numerics": 0,
    "check_invariants": True,
    "sdp_reduce_bucket_size": 5e8,
    "sdp_param_persistence_threshold": 1e6,
    "sdp_max_live_parameters": 1e9,
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
}


def test_defaults_are_the_documented_ones():
    parameters = parse()
    assert {name: getattr(parameters, name) for name in DOCUMENTED_DEFAULTS} == DOCUMENTED_DEFAULTS


def test_defaults_that_follow_from_other_fields():
    assert parse(partitions=4).active_microbatches == 6
    assert parse(partitions=4, active_microbatches=2).active_microbatches == 2
    assert parse(optimize="speed").memory_weight == 0.2
    assert parse(optimize="speed", memory_weight=0.0).memory_weight == 0.0


@pytest.mark.parametrize(
    "parameters",
    [
        {"partitions": 2, "pipeline_parallel_degree": 2},
        {"sdp_reduce_bucket_size": 5e8},
        {"tensor_parallel_degree": 3, "ddp": True},
        {"sharded_data_parallel_degree": 2, "ddp": True, "pipeline_parallel_degree": 2},
        {
            "sharded_data_parallel_degree": 4,
            "tensor_parallel_degree": 4,
            "ddp": True,
            "prescaled_batch": True,
            "fp16": True,
        },
        {"auto_partition": False, "default_partition": 0},
        {"pipeline": "_only_forward"},
        {"contiguous": True, "horovod": False, "fast_mode": True, "static_mode": True, "checkpoint_attentions": True},
        {"_match_weights": True, "_fp32_grad_accumulation": True, "_prescaled_batch": True},
        {"overlapping_allreduce": False, "tracing_rank": 0},
        {"load_partition": True, "partition_file": "p.json"},
        {"bf16": True},
        {"ddp": True, "ddp_dist_backend": "smddp", "ddp_port": 12345},
        {"ddp": True, "ddp_dist_backend": "smddp", "host_collectives": False},
        {"ddp": True, "ddp_dist_backend": "gloo", "host_collectives": True},
        {"host_collectives": True},
        {"context_parallel_degree": 2, "ddp": True, "context_parallel": "ring", "sharded_data_parallel_degree": 4},
        {"context_parallel_degree": 2, "ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True},
        *({"placement_strategy": p} for p in ("cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD")),
    ],
)
def test_right_configurations_are_accepted(parameters):
    parse(**parameters)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"microbatchs": 2}, "did you mean 'microbatches'"),
        ({"zzz": 2}, "unknown parameter 'zzz'"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "keep only pipeline_parallel_degree"),
        ({"tensor_parallel_degree": 2}, '"ddp": True'),
        ({"tensor_parallel_degree": 2, "ddp": False}, "ddp is false"),
        ({"sharded_data_parallel_degree": 2}, "needs data parallelism"),
        ({"context_parallel_degree": 2}, "context_parallel_degree is 2, which needs data parallelism"),
        ({"context_parallel_degree": 2, "ddp": True, "tensor_parallel_degree": 2}, '"prescaled_batch": True'),
        ({"context_parallel_degree": 2, "ddp": True, "compile": True}, "compile is true"),
        ({"context_parallel_degree": 2, "ddp": True, "fp8": True}, "fp8 is true"),
        ({"context_parallel_degree": 0}, "greater than or equal to 1"),
        ({"context_parallel": "p2p"}, "'all_to_all'"),
        ({"expert_parallel_degree": 2}, "set tensor_parallel_degree to 2 too"),
        ({"expert_parallel_degree": 2, "tensor_parallel_degree": 4, "ddp": True}, "to 4 or to 1"),
        (
            {"sharded_data_parallel_degree": 2, "ddp": True, "shard_optimizer_state": True},
            "remove shard_optimizer_state",
        ),
        ({"sharded_data_parallel_degree": 2, "ddp": True, "tensor_parallel_degree": 2}, "prescaled_batch"),
        ({"fp16": True, "bf16": True}, "keep one of them"),
        ({"horovod": True}, "TensorFlow"),
        ({"auto_partition": False}, "set default_partition"),
        ({"partitions": 2, "default_partition": 2}, "numbered 0 to 1"),
        ({"ddp_port": 1234}, "ddp_port is 1234"),
        ({"ddp_dist_backend": "nccl"}, "needs data parallelism"),
        ({"ddp_dist_backend": "mpi", "ddp": True}, "'smddp' or 'gloo'"),
        ({"host_collectives": "auto"}, "valid boolean"),
        ({"host_collectives": True, "ddp": True, "ddp_dist_backend": "nccl"}, "ddp_dist_backend is 'nccl'"),
        ({"host_collectives": True, "ddp": True, "ddp_dist_backend": "smddp"}, "remove one of the two"),
        ({"microbatches": 0}, "greater than or equal to 1"),
        ({"microbatches": 2.5}, "whole number"),
        ({"microbatches": True}, "whole number"),
        ({"microbatches": "2"}, "whole number"),
        ({"memory_weight": 1.5}, "less than or equal to 1"),
        ({"placement_strategy": "DDP"}, "permutation"),
        ({"ddp": "true"}, "valid boolean"),
        ({"activation_loading_horizon": 0}, "activation_loading_horizon is 0"),
        ({"load_partition": True}, "partition_file is missing"),
        ({"partitions": 2, "tracing_rank": 2}, "pipeline rank from 0 to 1"),
        ({"sdp_gradient_clipping": 0}, "greater than 0"),
    ],
)
def test_wrong_configurations_say_what_to_change(parameters, says):
    with pytest.raises(ConfigError, match=None) as error:
        parse(**parameters)
    assert says in str(error.value)


def test_text_that_is_not_json_or_no_object():
    with pytest.raises(ConfigError, match="not JSON"):
        ModelParallelParameters.from_mp_parameters("{ddp: true}")
    with pytest.raises(ConfigError, match="must be a dictionary"):
        ModelParallelParameters.from_mp_parameters("[1]")


def test_both_names_of_the_degree_are_sent_and_defaults_are_not():
    assert parse(partitions=2).to_mp_parameters() == {"partitions": 2, "pipeline_parallel_degree": 2}
    assert "active_microbatches" not in parse(partitions=2).to_mp_parameters()


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "pipeline_parallel_degree": st.integers(1, 16),
            "microbatches": st.integers(1, 64),
            "ddp": st.booleans(),
            "memory_weight": st.floats(0, 1),
            "placement_strategy": st.sampled_from(["cluster", "spread", "PTD"]),
            "optimize": st.sampled_from(["memory", "speed"]),
            "_match_weights": st.booleans(),
            "partition_file": st.text(max_size=5).filter(lambda text: why_no_path(text) is None),
        },
    )
)
@settings(max_examples=examples(12, 50), deadline=None)
def test_what_the_client_sends_is_what_the_rank_reads(parameters):
    sent = ModelParallelParameters.from_mp_parameters(parameters)
    assert ModelParallelParameters.from_mp_parameters(json.dumps(sent.to_mp_parameters())) == sent


def test_ignored_settings_are_warned_about():
    assert any("powers of two" in w for w in parse(tensor_parallel_degree=6, ddp=True).warnings())
    assert any("nothing is sharded" in w for w in parse(sdp_gradient_clipping=2.0).warnings())
    assert any("auto_partition is true" in w for w in parse(partitions=2, default_partition=1).warnings())
    assert any("offload_activations" in w for w in parse(offload_activations=True).warnings())
    assert any("prescaled_batch ignored" in w for w in parse(prescaled_batch=True).warnings())
    assert parse(ddp=True, microbatches=4).warnings() == []


def test_every_field_says_what_it_means():
    for name, field in ModelParallelParameters.model_fields.items():
        assert field.description, name
        assert len(field.description) > 15, name
