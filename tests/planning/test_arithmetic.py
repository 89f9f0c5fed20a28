"""Batches, pipelines and network traffic: the worked examples of the documentation, and closed forms."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_config import ConfigError, ModelParallelParameters, Topology
from smp_estimator.planning import ModelShape, batch_for, batches, batches_of, plan, suggest
from smp_estimator.planning import network as net
from smp_estimator.planning.batches import idle_fraction, in_flight, layers_of_stage, layers_of_stages
from smp_estimator.planning.network import pipeline_bytes

SMALL = ModelShape(2, 64, 2, 100, 16)


def test_example_one_sharding_alone() -> None:
    found = batches(Topology(1536, sharded=32), 1, sequence=4096)
    assert (found.replicas, found.global_batch, found.tokens) == (1536, 1536, 6_291_456)


def test_example_one_with_tensor_parallelism() -> None:
    found = batches(Topology(1536, tensor=8), 4, sequence=4096, prescaled=True)
    assert (found.readers, found.replicas) == (192, 192)
    assert (found.global_batch, found.tokens) == (768, 3_145_728)
    assert found.group_batch == 4


def test_example_two() -> None:
    parameters = ModelParallelParameters.from_mp_parameters(
        {"ddp": True, "prescaled_batch": True, "sharded_data_parallel_degree": 4, "tensor_parallel_degree": 4}
    )
    found = batches_of(parameters, 32, 2)
    assert (found.replicas, found.global_batch) == (8, 16)
    assert parameters.topology(32).rdp_size // 4 == 2  # replicas of each shard


def test_without_prescaling_every_rank_reads() -> None:
    found = batches(Topology(16, tensor=4, pipeline=2), 3)
    assert (found.readers, found.replicas, found.group_batch, found.global_batch) == (8, 2, 12, 24)


def test_accumulation_and_microbatches() -> None:
    found = batches(Topology(8, pipeline=2), 12, microbatches=4, accumulation=3, sequence=10)
    assert (found.microbatch, found.global_batch, found.tokens) == (3, 4 * 12 * 3, 4 * 12 * 3 * 10)


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 8),
    st.integers(1, 6),
    st.booleans(),
    st.integers(1, 3),
)
@settings(deadline=None)
def test_batch_for_is_the_inverse(
    pipeline: int, tensor: int, replicas: int, batch: int, prescaled: bool, accumulation: int
) -> None:
    topology = Topology(pipeline * tensor * replicas, pipeline=pipeline, tensor=tensor)
    total = batches(topology, batch, prescaled=prescaled, accumulation=accumulation).global_batch
    assert total == accumulation * topology.global_batch(batch, prescaled=prescaled)
    assert batch_for(topology, total, prescaled=prescaled, accumulation=accumulation) == batch


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch": 10, "microbatches": 4}, "8 or 12"),
        ({"batch": 3, "microbatches": 4}, "at most 3 microbatches"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": True}, "batch is True"),
        ({"batch": 1, "sequence": 0}, "sequence is 0"),
    ],
)
def test_wrong_batches_name_a_right_one(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        batches(Topology(8), **arguments)


def test_a_global_batch_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="use a global batch of 96"):
        batch_for(Topology(32), 100)


@pytest.mark.parametrize(
    ("stages", "microbatches", "idle"), [(1, 1, 0), (2, 1, 1 / 2), (4, 8, 3 / 11), (8, 32, 7 / 39)]
)
def test_idle_fraction(stages: int, microbatches: int, idle: float) -> None:
    assert idle_fraction(stages, microbatches) == pytest.approx(idle)
    assert idle_fraction(stages, microbatches, active=stages + 2) == pytest.approx(idle)


def test_a_pipeline_that_is_not_filled_idles_more() -> None:
    """4 stages: two of 8 microbatches in flight take 4 rounds of 4, and the last one follows; waves of two fill 4 times."""
    assert idle_fraction(4, 8, active=1) == 1 - 8 / 32
    assert idle_fraction(4, 8, active=2) == 1 - 8 / 17
    assert idle_fraction(4, 8, active=2, schedule="simple") == 1 - 8 / (8 + 4 * 3)
    made = plan(SMALL, "ml.g5.12xlarge", 1, {"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 4}, 4)
    slow = made.changed({"active_microbatches": 1})
    assert (made.idle, slow.idle) == (pytest.approx(1 / 5), 0.5)
    assert made.time is not None
    assert slow.time is not None
    assert slow.time.idle == pytest.approx(4 * made.time.idle)


def test_in_flight() -> None:
    assert [in_flight("interleaved", stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight("interleaved", stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert [in_flight("interleaved", stage, 4, 8, active=2) for stage in range(4)] == [2, 2, 2, 1]
    assert [in_flight("simple", stage, 4, 8, active=2) for stage in range(4)] == [2, 2, 2, 2]
    assert in_flight("_only_forward", 0, 4, 8) == 1
    with pytest.raises(ConfigError, match="stages 0 to 3"):
        in_flight("simple", 4, 4, 8)
    with pytest.raises(ConfigError, match="schedules are"):
        in_flight("zigzag", 0, 4, 8)


@given(st.integers(1, 100), st.integers(1, 16))
@settings(deadline=None)
def test_every_layer_has_one_stage(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ConfigError, match=f"at most {layers}"):
            layers_of_stage(layers, stages, 0)
        return
    ranges = [layers_of_stage(layers, stages, stage) for stage in range(stages)]
    assert [layer for held in ranges for layer in held] == list(range(layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(
    ("accumulation", "degree", "megabytes"),
    [(1, 8, 10.5), (1, 2, 9.0), (1, 4, 10.0), (8, 8, 84), (8, 2, 51), (8, 4, 73)],
)
def test_the_worked_example_of_sharding(accumulation: int, degree: int, megabytes: float) -> None:
    """8 ranks, a million parameters in fp32, one or eight accumulation steps."""
    assert net.sharded_bytes(8, degree, 1e6, 4, accumulation=accumulation) == pytest.approx(megabytes * 1e6)


def test_plain_data_parallelism_and_primitives() -> None:
    assert net.data_parallel_bytes(8, 1e6, 4) == pytest.approx(7.0e6)
    assert net.gather_bytes(4, 100) == 75
    assert net.reduce_bytes(1, 100) == 0
    assert net.sharded_bytes(8, 8, 1e6, 4, keep_gathered=True) == pytest.approx(7.0e6)
    assert net.sharded_bytes(8, 8, 1e6, 2, gathered=1) == pytest.approx(7 / 8 * (2 * 1e6 + 2e6))
    assert net.node_gather_bytes(16, 8, 100) == 50
    assert net.node_gather_bytes(16, 8, 100, hierarchical=False) == 93.75


def test_traffic_of_a_plan() -> None:
    shape: dict[str, Any] = {"model": "gpt2", "instance_type": "ml.p4d.24xlarge"}
    count = 124_439_808
    plain = plan(**shape, parameters={"ddp": True}).traffic
    assert (plain.data, plain.tensor, plain.pipeline) == (pytest.approx(2 * 7 / 8 * count * 4), 0, 0)
    sharded = plan(**shape, parameters={"ddp": True, "sharded_data_parallel_degree": 4, "bf16": True}, accumulation=2)
    # Parameters travel with two bytes, gradients with four, in which they are summed.
    assert sharded.traffic.data == pytest.approx((2 * 3 / 4 * (2 * 2 + 4) + 2 * 1 / 2 / 4 * 4) * count)
    halved = plan(**shape, parameters={"ddp": True, "sharded_data_parallel_degree": 4, "fp16": True}, accumulation=2)
    assert halved.traffic.data == pytest.approx((2 * 3 * 3 / 4 + 2 * 1 / 2 / 4) * count * 2)
    for half, summed in (("bf16", 4), ("fp16", 2)):
        for shares, again in ((False, summed), (True, 2)):
            sent = plan(**shape, parameters={"ddp": True, half: True, "shard_optimizer_state": shares}).traffic.data
            assert sent == pytest.approx(7 / 8 * count * (summed + again))
    hidden = 4 * 1024 * 768 * 2  # of 4 samples, in bytes
    both = {"ddp": True, "tensor_parallel_degree": 4, "prescaled_batch": True, "fp16": True}
    tensor = plan(**shape, parameters=both, batch=4).traffic
    assert tensor.tensor == pytest.approx(12 * 4 * 2 * 3 / 4 * hidden)
    recomputed = plan(**shape, parameters=both, batch=4, activation_checkpointing="each").traffic
    assert recomputed.tensor == pytest.approx(1.5 * tensor.tensor)
    staged = plan(
        **shape, parameters={"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 4, "fp16": True}, batch=4
    )
    assert staged.traffic.pipeline == pytest.approx(hidden)


LONG = ModelShape(4, 512, 8, 1000, 4096, learned_positions=False, given_key_heads=4)


def _cut(degree: int, method: str = "auto", batch: int = 2, **more: Any) -> Any:
    parameters = {"ddp": True, "bf16": True, "context_parallel_degree": degree, "context_parallel": method}
    return plan(LONG, "ml.p4d.24xlarge", 1, parameters | more.pop("parameters", {}), batch, **more)


def test_ranks_that_share_sequences_out_read_one_batch() -> None:
    assert [_cut(degree).batches.readers for degree in (1, 2, 8)] == [8, 4, 1]
    assert _cut(4).batches.global_batch == 2 * 2
    assert batch_for(Topology(8, context=4), 12) == 6
    assert "context 4, 2 replicas" in str(_cut(4))
    prescaled = _cut(2, parameters={"tensor_parallel_degree": 2, "prescaled_batch": True})
    assert (prescaled.batches.readers, prescaled.batches.group_batch) == (2, 2)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_attention_sends_as_many_bytes_as_the_runtime_counts_before_it_sends(degree: int, method: str) -> None:
    costs = pytest.importorskip("smp_runtime.context.attention.costs")
    one = costs.AttentionShape(batch=2, heads=8, key_heads=4, width=64, value_width=64, element=2)
    neighbors = costs.neighbors_for(degree, 8, 4) if method == "all_to_all" else 1
    assert neighbors == (min(degree, 4) if method == "all_to_all" else 1)
    members, tokens = degree // neighbors, 4096
    rows = [tokens // members * (members - 1)] * members
    expected = [costs.ring_bytes(one, rows, backward=again) / neighbors for again in (False, True)]
    for place, again in enumerate((False, True)):
        expected[place] += costs.head_bytes(one, tokens, tokens, degree, neighbors, backward=again)
    found = _cut(degree, method)
    assert found.traffic.context == pytest.approx(LONG.layers * expected[1])
    assert found.traffic.total == found.traffic.data + found.traffic.context
    again = _cut(degree, method, activation_checkpointing="each")
    assert again.traffic.context == pytest.approx(LONG.layers * sum(expected))
    assert f"context parallel {found.traffic.context / 1e9:.2f}" in " ".join(str(found).split())
    # The first formula of the design: 2·(c − 1)/c·b·s·k·d elements of keys and values.
    if method != "all_to_all":
        assert expected[0] == 2 * (degree - 1) / degree * 2 * tokens * 4 * 64 * 2


def test_the_method_with_the_fewest_bytes_is_planned() -> None:
    sent = {method: _cut(8, method).traffic.context for method in ("ring", "all_gather", "all_to_all")}
    assert _cut(8).traffic.context == min(sent.values()) == sent["all_to_all"]
    assert sent["ring"] == sent["all_gather"]
    few = ModelShape(4, 512, 8, 1000, 4096, learned_positions=False, given_key_heads=1)
    parameters = {"ddp": True, "context_parallel_degree": 4, "context_parallel": "all_to_all"}
    alone = plan(few, "ml.p4d.24xlarge", 1, parameters).traffic.context
    assert alone == plan(few, "ml.p4d.24xlarge", 1, parameters | {"context_parallel": "ring"}).traffic.context


def test_stages_and_tensor_parallel_ranks_send_slices() -> None:
    hidden = 4096 * 512 * 2 / 2
    parameters = {"pipeline_parallel_degree": 2, "microbatches": 2}
    assert _cut(2, parameters=parameters).traffic.pipeline == pytest.approx(2 * hidden)
    tensor = _cut(2, parameters={"tensor_parallel_degree": 4, "prescaled_batch": True}).traffic
    assert tensor.tensor == pytest.approx(4 * 4 * 2 * 3 / 4 * 2 * hidden)
    assert tensor.context == pytest.approx(_cut(2, "ring").traffic.context / 4)


# -- data sets ---------------------------------------------------------------------------------------------------


def _epochs(batch: int = 500, **dataset: int) -> Any:
    return plan(1e9, "ml.p4d.24xlarge", 1, {"ddp": True}, batch, processes_per_host=1, sequence=128, **dataset).epochs


def test_the_published_examples_of_epochs() -> None:
    """5,000 samples in batches of 500 are 10 steps; 640 images in batches of 64 (two replicas of 32) are 10 too."""
    assert (_epochs(samples=5000).steps, _epochs(samples=5000).dropped) == (10, 0)
    parameters = {"ddp": True, "pipeline_parallel_degree": 4, "microbatches": 4}
    assert plan("gpt2", "ml.p4d.24xlarge", 1, parameters, 32, samples=640).epochs.steps == 10


def test_what_is_left_over_is_dropped_and_said() -> None:
    found = _epochs(samples=5001 + 498, epochs=3)
    assert (found.steps, found.total_steps, found.dropped) == (10, 30, 499)
    said = " ".join(found.lines())
    assert "5,499 samples ÷ 500 per step = 10 steps per epoch, 499 left over and dropped (9.1% of an epoch)" in said
    assert "3 epochs: 30 steps" in said
    assert "half the global batch would update them 21 times per epoch" in said


@given(st.integers(1, 5000), st.sampled_from([1, 2, 8]), st.integers(1, 7), st.integers(1, 3), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_steps_are_those_of_readers_that_drop(
    samples: int, hosts: int, batch: int, accumulation: int, tensor: int
) -> None:
    """A reader gets an equal share of the samples, makes whole batches of it, and steps after whole accumulations."""
    parameters = {"ddp": True, "tensor_parallel_degree": tensor, "prescaled_batch": tensor > 1}
    made = plan(
        SMALL, "local", hosts, parameters, batch, processes_per_host=2, samples=samples, accumulation=accumulation
    )
    share = samples // made.batches.readers
    assert made.epochs is not None
    assert made.epochs.steps == share // batch // accumulation
    assert made.epochs.dropped == samples - made.epochs.steps * made.batches.global_batch


def test_tokens_are_cut_into_samples() -> None:
    found = _epochs(tokens=128 * 5000 + 127)
    assert (found.samples, found.steps) == (5000, 10)
    padded = _epochs(tokens=64 * 5000, samples=5000)
    assert "64 each, so 50% of what is computed is padding" in padded.lines()[0]
    with pytest.raises(ConfigError, match="less than one sample of 128 tokens"):
        _ = _epochs(tokens=127)


def test_a_data_set_smaller_than_a_step() -> None:
    found = _epochs(samples=499)
    assert found.steps == 0
    assert "499 samples are fewer than the global batch of 500, so an epoch has no whole step" in found.lines()[0]


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"samples": 1.5}, {"epochs": True}, {"tokens": "many"}])
def test_wrong_data_sets(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="steps are counted from it"):
        _epochs(**wrong)


# -- batches that were not given ---------------------------------------------------------------------------------


def test_a_batch_that_was_not_given() -> None:
    parameters = {"pipeline_parallel_degree": 2, "microbatches": 4}
    made = plan("gpt2", "ml.p4d.24xlarge", 1, parameters)
    assert made.batches.batch == 4
    assert "the batch is one sample per microbatch, as none was given" in " ".join(str(made).split())
    assert "the batch is" not in str(plan("gpt2", "ml.p4d.24xlarge", 1, parameters, 4))
    assert plan("gpt2", "ml.p4d.24xlarge").batches.batch == 1


@pytest.mark.parametrize(
    ("stages", "pieces", "idle"), [(4, 2, 3 / (2 * 8 + 3)), (4, 1, 3 / 11), (2, 4, 1 / (4 * 8 + 1))]
)
def test_stages_of_several_pieces_idle_less(stages: int, pieces: int, idle: float) -> None:
    """Narayanan et al. 2021, section 2.2; where too few are in flight, as stages of one piece."""
    assert idle_fraction(stages, 8, active=2 * stages, pieces=pieces) == pytest.approx(idle)
    assert idle_fraction(4, 8, active=4, pieces=2) == pytest.approx(3 / 11)
    assert idle_fraction(4, 16, "simple", 8, pieces=2) == pytest.approx(1 - 16 / (16 + 2 * 3 / 2))


def test_a_plan_of_several_pieces() -> None:
    """Layers are dealt out in turn, twice as many microbatches are held, and each boundary of pieces is a message."""
    settings = {"pipeline_parallel_degree": 4, "microbatches": 8}
    one, two = (
        plan("gpt2", "ml.p4d.24xlarge", 1, {"ddp": True, **settings, **more}, batch=8)
        for more in ({}, {"virtual_stages": 2})
    )
    assert two.idle == pytest.approx(3 / 19) != one.idle
    assert layers_of_stages(12, 4, 2) == [[0, 1, 8], [2, 3, 9], [4, 5, 10], [6, 7, 11]]
    assert one.time is not None
    assert two.time is not None
    assert two.time.idle / one.time.idle == pytest.approx(0.5)
    assert pipeline_bytes(4, 1, 100.0, 2) == 400.0 == 2 * pipeline_bytes(4, 1, 100.0)
    assert (pipeline_bytes(4, 0, 100.0, 2), pipeline_bytes(4, 3, 100.0, 2), pipeline_bytes(1, 0, 100.0)) == (
        300.0,
        300.0,
        0.0,
    )
    assert two.total_bytes > one.total_bytes
    with pytest.raises(
        ConfigError, match=r"4 stages own 16 pieces, but the model has 12 layers; use virtual_stages of at most 3"
    ):
        plan("gpt2", "ml.p4d.24xlarge", 1, {"ddp": True, **settings, "virtual_stages": 4}, batch=8)
    with pytest.raises(ConfigError, match="a search compares stages that own one piece"):
        suggest("gpt2", "ml.p4d.24xlarge", 1, 8, parameters={**settings, "virtual_stages": 2})
