"""``plan()`` and ``suggest()``: verdicts, what to change, notes, and the order of what is tried."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.matrix import examples

from smp_config import ConfigError, ModelParallelParameters
from smp_estimator.planning import ModelShape, Plan, Verdict, plan, suggest
from smp_estimator.planning.advice import microbatches_for

SHARDED = {"ddp": True, "bf16": True, "sharded_data_parallel_degree": 8}


def neox(parameters: dict[str, Any] | None = None, count: int = 2, batch: int = 4, **more: Any) -> Plan:
    checkpointing = more.pop("activation_checkpointing", "each")
    chosen = SHARDED if parameters is None else parameters
    return plan("gpt-neox-20b", "ml.p4d.24xlarge", count, chosen, batch, activation_checkpointing=checkpointing, **more)


def test_the_largest_batch_that_fits_is_proposed() -> None:
    sharded = {**SHARDED, "sharded_data_parallel_degree": 16}

    def proposed(batch: int) -> int:
        changes = neox(sharded, batch=batch).changes
        return next(change.plan.batches.batch for change in changes if str(change).startswith("batch "))

    most = proposed(64)
    assert neox(sharded, batch=most).verdict is Verdict.FITS
    assert neox(sharded, batch=most + 1).verdict is not Verdict.FITS
    # Not one after the other.
    assert proposed(10**12) == most
    many = neox({**sharded, "microbatches": 4}, batch=64).changes
    assert next(change.plan.batches.batch for change in many if str(change).startswith("batch ")) % 4 == 0


def test_verdicts_at_their_bounds() -> None:
    total = neox().total_bytes
    sizes = {total - 1: Verdict.DOES_NOT_FIT, total: Verdict.TIGHT, int(total / 0.851): Verdict.TIGHT}
    sizes[int(total / 0.849)] = Verdict.FITS
    for size, verdict in sizes.items():
        assert neox(gpu_memory_bytes=size).verdict is verdict, size
    assert not Verdict.DOES_NOT_FIT.feasible
    assert not Verdict.UNKNOWN.feasible


def test_every_change_keeps_its_promise() -> None:
    made = neox()
    assert made.verdict is Verdict.DOES_NOT_FIT
    said = [str(change) for change in made.changes]
    assert any(line.startswith('"sharded_data_parallel_degree": 16') for line in said), said
    assert any(line.startswith("ml.p4de.24xlarge") for line in said), said
    for change in made.changes:
        assert change.plan.verdict.feasible, change
        assert change.plan.fraction < made.fraction, change
        if "instances" not in change.what:
            assert change.plan.batches.global_batch == made.batches.global_batch, change


def test_the_batch_is_the_first_thing_to_change() -> None:
    made = neox({**SHARDED, "sharded_data_parallel_degree": 16}, batch=24)
    assert made.verdict is Verdict.DOES_NOT_FIT
    assert made.changes[0].what.startswith("batch ")
    largest = made.changes[0].plan.request.workload.batch
    assert made.changes[0].plan.verdict is Verdict.FITS
    assert made.changed(batch=largest + 1).verdict is not Verdict.FITS


def test_what_fits_needs_no_change() -> None:
    assert neox({**SHARDED, "sharded_data_parallel_degree": 16}).changes == ()


def test_no_single_change_is_said() -> None:
    made = plan("gpt-neox-65b", "ml.g5.xlarge", 1, {"ddp": True})
    assert made.changes == ()
    assert "no single change is enough" in str(made)


def test_the_table_shows_the_numbers() -> None:
    made = neox()
    text = " ".join(str(made).split())
    for stage in made.stages:
        for kind, size in stage.kinds.items():
            if size:
                assert kind.value in text
                assert f"{size / 1e9:.2f}" in text
    assert "does not fit" in text
    assert "16 bytes per parameter: 328.9 GB" in text
    assert "at 18, with gradients that stay in float32: 370.0 GB" in text
    assert json.dumps(made.to_dict())


@pytest.mark.parametrize(
    ("parameters", "rule"),
    [
        ({"bf16": True}, "at 20, with float32 copies of the gradients: 2.5 GB"),
        ({"bf16": True, "sharded_data_parallel_degree": 8}, "at 18, with gradients that stay in float32: 2.2 GB"),
        ({"fp16": True, "sharded_data_parallel_degree": 8}, "at 20,"),  # summed in fp16
        ({"bf16": True, "shard_optimizer_state": True}, "at 18,"),
        ({"fp16": True, "_fp32_grad_accumulation": True, "shard_optimizer_state": True}, "at 18,"),
        ({"fp16": True, "shard_optimizer_state": True}, "at 20,"),
        ({"bf16": True, "pipeline_parallel_degree": 8, "shard_optimizer_state": True}, "at 20,"),  # nobody shares
        ({}, "2.0 GB; on this GPU"),
    ],
)
def test_the_rule_of_thumb_is_that_of_the_precision(parameters: dict[str, Any], rule: str) -> None:
    made = plan("gpt2", "ml.p4d.24xlarge", 1, {"ddp": True, **parameters})
    text = " ".join(str(made).split())
    assert f"16 bytes per parameter: 2.0 GB{'; ' if not parameters else ', '}{rule.removeprefix('2.0 GB; ')}" in text


def test_notes() -> None:
    def said(*arguments: Any, **more: Any) -> str:
        return " ".join(plan(*arguments, **more).notes)

    across = {"ddp": True, "tensor_parallel_degree": 16, "prescaled_batch": True}
    assert "spreads over 2 nodes" in said("gpt2-10b", "ml.p4d.24xlarge", 2, across, 16)
    scattered = {**across, "tensor_parallel_degree": 2, "placement_strategy": "spread"}
    assert "spreads over 2 nodes" in said("gpt2-10b", "ml.p4d.24xlarge", 2, scattered, 16)
    assert "delayed_parameter_initialization" in said("gpt-neox-65b", "ml.p4d.24xlarge", 1, {"ddp": True})
    assert "no EFA" in said("gpt2", "ml.p3.16xlarge", 2, {"ddp": True})
    assert "alone fits too" in said("gpt2", "ml.p4d.24xlarge", 1, across | {"tensor_parallel_degree": 8}, 8)
    inside = said("gpt-neox-20b", "ml.p4d.24xlarge", 2, SHARDED)
    assert (
        "0% of the gathered bytes go through the SMDDP all-gather; the plain backend does the rest: all 8 ranks"
        in inside
    )
    assert "not in the catalogue" in said("gpt2", "ml.p9.48xlarge", processes_per_host=8)
    half = {"ddp": True, "bf16": True}
    for kind, gpu in (("ml.p3.2xlarge", "V100"), ("ml.p2.xlarge", "K80"), ("ml.g4dn.xlarge", "T4")):
        assert f"the {gpu} of {kind} has no bfloat16 arithmetic" in said("gpt2", kind, 1, half)
        assert "bfloat16" not in said("gpt2", kind, 1, {"ddp": True, "fp16": True})
    assert "bfloat16" not in said("gpt2", "ml.p4d.24xlarge", 1, half)
    assert "such a job is refused before it starts: instance_type is ml.p2.xlarge, whose K80 GPUs have" in said(
        "gpt2", "ml.p2.xlarge"
    )
    assert "builds of PyTorch for CUDA 13 and newer have no code for the V100" in said("gpt2", "ml.p3.2xlarge")
    nccl = {"ddp": True, "ddp_dist_backend": "nccl"}
    on_cpus = said("gpt2", "ml.c5.18xlarge", 1, nccl, processes_per_host=2)
    assert 'is refused before it starts: ddp_dist_backend is "nccl"' in on_cpus
    shared = said("gpt2", "ml.p4d.24xlarge", 1, {"ddp": True, "host_collectives": True})
    assert "is refused before it starts: host_collectives is true" in shared
    assert "refused" not in said("gpt2", "ml.g5.xlarge", 1, nccl)
    assert "refused" not in said("gpt2", "ml.c5.18xlarge", 1, {"ddp": True}, processes_per_host=2)
    assert "builds of PyTorch" not in said("gpt2", "ml.g4dn.xlarge")


def test_shorter_samples_are_among_the_changes() -> None:
    made = plan("gpt2-large", "ml.g5.xlarge", 1, {"ddp": True, "bf16": True}, sequence=8192)
    assert made.verdict is Verdict.DOES_NOT_FIT
    by_name = {change.what: change.plan for change in made.changes}
    shorter = [what for what in by_name if what.startswith("sequence ")]
    assert len(shorter) == 1, list(by_name)
    words = shorter[0].split()
    assert words[2:] == ["instead", "of", "8192"]
    again = made.changed(shape=made.request.shape.with_sequence(int(words[1])))
    assert again.total_bytes == by_name[shorter[0]].total_bytes
    assert again.verdict.feasible


def test_the_worse_of_two_moments_counts() -> None:
    """Few activations: optimizer.step(), with its float32 gradients; many: backward."""
    half = {"ddp": True, "bf16": True}
    few = plan("gpt2", "ml.p4d.24xlarge", 1, half, sequence=8, activation_checkpointing="each")
    assert few.total_bytes == few.worst.in_update == 20 * few.request.shape.parameters > few.worst.in_backward
    many = few.changed(batch=64, shape=few.request.shape.with_sequence(1024))
    assert many.total_bytes == many.worst.in_backward > many.worst.in_update
    text = " ".join(str(few).split())
    assert "total in backward" in text
    assert f"in optimizer.step() │ {few.worst.in_update / 1e9:.2f}" in text
    assert "total in backward" not in str(plan("gpt2", "ml.p4d.24xlarge"))


def test_what_adam_takes_in_its_step_is_said_where_it_matters() -> None:
    """As measured with foreach=True: 4 bytes per parameter, on top of 20."""
    few = plan("gpt2", "ml.p4d.24xlarge", 1, {"ddp": True, "bf16": True}, sequence=8, activation_checkpointing="each")
    count = few.request.shape.parameters
    said = f"needs {4 * count / 1e9:.1f} GB more in its step, {24 * count / 1e9:.1f} GB in all"
    assert said in " ".join(few.notes)
    assert "foreach" not in " ".join(few.changed(optimizer="momentum").notes)
    assert "foreach" not in " ".join(few.changed(batch=64, shape=few.request.shape.with_sequence(1024)).notes)


@pytest.mark.parametrize(
    ("model", "count", "degree", "mib", "pieces"),
    [
        ("gpt-neox-20b", 2, 16, 54.0, 5),
        ("gpt-neox-20b", 8, 32, 27.0, 3),
        ("gpt2-30b", 8, 64, 18.4, 3),
        ("gpt-neox-65b", 4, 16, 96.0, 8),
        (7e9, 2, 16, 19.2, 2),
    ],
)
def test_units_above_the_buffers_go_through_smddp_in_pieces(
    model: Any, count: int, degree: int, mib: float, pieces: int
) -> None:
    parameters = {**SHARDED, "sharded_data_parallel_degree": degree}
    said = of_smddp(model, count, parameters)
    assert said.startswith("100% of the gathered bytes go through the SMDDP all-gather, in buffers of 16 and 128 MiB")
    assert said.endswith(f"the shard of the largest unit, {mib} MiB, goes in {pieces} pieces")
    said = of_smddp(model, count, parameters, 8192)
    assert said.startswith("0% of the gathered bytes")
    assert "more than 64 pieces with SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES=8192" in said


def of_smddp(
    model: Any, count: int, parameters: dict[str, Any], scratch: int = 16 * 2**20, sort: int = 128 * 2**20
) -> str:
    environment = {
        "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": str(scratch),
        "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": str(sort),
    }
    notes = plan(model, "ml.p4d.24xlarge", count, parameters, environment=environment).notes
    return next(note for note in notes if "SMDDP" in note)


def test_units_that_fall_back_count_by_their_bytes() -> None:
    # The embeddings take 50 pieces of 768 KiB, a layer would take 72 and at most 64 are made.
    said = of_smddp("gpt-neox-20b", 2, {**SHARDED, "sharded_data_parallel_degree": 16}, 96 * 8192)
    assert said.startswith("3% of the gathered bytes go through the SMDDP all-gather, in buffers of 0.75 and 128 MiB")
    assert (
        "54.0 MiB, is too large for them; the plain backend does the rest: the shard of 56623104 bytes would take"
        in said
    )
    assert said.endswith("; SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES=884736 would do")


def test_what_a_plan_says_of_smddps_buffers_is_enough() -> None:
    """The sort buffer is to blame here, and the scratch buffer of 16 MiB holds a piece."""
    sharded = {**SHARDED, "sharded_data_parallel_degree": 16}
    said = of_smddp("gpt-neox-20b", 2, sharded, sort=8 * 8192)
    assert said.startswith("0% of the gathered bytes")
    assert said.endswith("; SMDDP_AG_SORT_BUFFER_SIZE_BYTES=8847360 would do")
    assert of_smddp("gpt-neox-20b", 2, sharded, sort=8847360).startswith("100% of the gathered bytes")
    assert of_smddp("gpt-neox-20b", 2, sharded, scratch=884736).startswith("100% of the gathered bytes")


def test_unknown_instances_are_planned_without_a_verdict() -> None:
    with pytest.raises(ConfigError, match="give processes_per_host"):
        plan("gpt2", "ml.p9.48xlarge")
    made = plan("gpt2", "ml.p9.48xlarge", processes_per_host=8)
    assert (made.verdict, made.fraction) == (Verdict.UNKNOWN, None)
    assert made.changes == ()
    assert "per GPU" in str(made)
    assert plan("gpt2", "local", processes_per_host=2, gpu_memory_bytes=2**40).verdict is Verdict.FITS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"processes_per_host": 16}, "has 8 GPUs"),
        ({"instance_count": 0}, "instance_count is 0"),
        ({"parameters": {"ddp": True, "sharded_data_parallel_degree": 3}}, "use one of 1, 2, 4, 8"),
        ({"parameters": {"pipeline_parallel_degree": 16}, "instance_count": 2}, "at most 12"),
        ({"parameters": {"ddq": True}}, "did you mean 'ddp'"),
        ({"activation_checkpoint": "each"}, "did you mean 'activation_checkpointing'"),
        ({"activation_checkpointing": "every"}, "use 'each'"),
        ({"optimizer": "adams"}, "use one of adam"),
        ({"parameters": {"pipeline_parallel_degree": 2, "microbatches": 4}, "batch": 6}, "4 or 8"),
    ],
)
def test_wrong_requests_name_a_right_one(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan("gpt2", "ml.p4d.24xlarge", **arguments)


# -- suggest ---------------------------------------------------------------------------------------------------


def test_a_small_model_is_trained_with_data_parallelism_alone() -> None:
    found = suggest("gpt2", "ml.p4d.24xlarge", 1, 4)
    assert found.parameters == {"ddp": True, "bf16": True}
    assert len(found.tried) == 1
    assert found.alternative is None or found.alternative.plan.verdict is Verdict.FITS


def test_the_ladder_is_climbed_in_order() -> None:
    found = suggest("gpt2-60b", "ml.p4d.24xlarge", 32, 7)
    said = [step.what for step in found.tried]
    assert said[:4] == [
        "data parallelism",
        "+ sharded optimizer state",
        "+ activation checkpointing of each layer",
        "+ tensor parallelism 2",
    ]
    assert found.plan.verdict is Verdict.FITS
    assert found.plan is found.tried[-1].plan
    assert all(step.plan.verdict is not Verdict.FITS for step in found.tried[:-1])
    assert {step.plan.batches.global_batch for step in found.tried} == {7 * 256}
    # The published reference point for this size and cluster has the same degrees.
    assert found.parameters["tensor_parallel_degree"] == 8
    assert found.parameters["pipeline_parallel_degree"] == 2
    assert found.alternative is not None
    assert "sharded data parallelism" in found.alternative.what


def test_the_fastest_sharding_is_compared_with_the_choice() -> None:
    found = suggest(7e9, "ml.p4d.24xlarge", 1)
    other = found.alternative
    assert other is not None
    degrees = (2, 4, 8)
    sharded = [
        plan(
            7e9,
            "ml.p4d.24xlarge",
            1,
            {"ddp": True, "bf16": True, "sharded_data_parallel_degree": degree},
            1,
            activation_checkpointing="each",
        )
        for degree in degrees
    ]
    speeds = [made.time.tokens_per_second for made in sharded if made.time and made.verdict is Verdict.FITS]
    assert len(speeds) > 1
    assert other.plan.time is not None
    assert found.plan.time is not None
    assert other.plan.time.tokens_per_second == max(speeds)
    more = max(speeds) / found.plan.time.tokens_per_second - 1
    assert more > 0.1
    assert f"{max(speeds):,.0f} tokens per second, {more:.1%} more" in " ".join(str(found).split())
    assert found.to_dict()["alternative"]["tokens_per_second"] == max(speeds)


def test_suggestions_can_be_used_as_they_are() -> None:
    found = suggest("gpt2-30b", "ml.p4d.24xlarge", 4, 2)
    parameters = ModelParallelParameters.from_mp_parameters(found.parameters)
    again = plan(
        "gpt2-30b",
        "ml.p4d.24xlarge",
        4,
        parameters,
        found.batch,
        activation_checkpointing=found.plan.request.workload.activation_checkpointing,
    )
    assert again.total_bytes == found.plan.total_bytes


@pytest.mark.parametrize(
    ("kind", "precision", "expected"),
    [("ml.p3.16xlarge", "auto", "fp16"), ("ml.g5.48xlarge", "auto", "bf16"), ("ml.g5.48xlarge", "fp16", "fp16")],
)
def test_precision_follows_the_gpu(kind: str, precision: str, expected: str) -> None:
    assert suggest("gpt2", kind, precision=precision).parameters[expected] is True


def test_what_cannot_fit_is_said_to_not_fit() -> None:
    found = suggest("gpt-neox-65b", "ml.g5.xlarge", 1)
    assert found.plan.verdict is Verdict.DOES_NOT_FIT
    assert "does not fit" in str(found)


def test_wrong_suggestions() -> None:
    with pytest.raises(ConfigError, match="use a global batch of"):
        suggest("gpt2", "ml.p3.2xlarge", 3, global_batch=1)
    with pytest.raises(ConfigError, match="memory of"):
        suggest("gpt2", "local", processes_per_host=2)
    with pytest.raises(ConfigError, match="precision is"):
        suggest("gpt2", "ml.p4d.24xlarge", precision="fp8")


def test_microbatches() -> None:
    assert microbatches_for(1, 8) == 1
    assert microbatches_for(2, 64) == 8
    assert microbatches_for(2, 12) == 12
    assert microbatches_for(4, 6) == 6


@settings(max_examples=examples(20, 40), deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.sampled_from([None, "each", "group_2", "contiguous"]),
    st.integers(1, 3),
)
def test_plans_behave(
    pipeline: int, tensor: int, sharded: int, offload: bool, checkpointing: str | None, factor: int
) -> None:
    """No negative bytes; more samples or more tokens never need less; the table can always be drawn."""
    shape = ModelShape(8, 512, 8, 1000, 64)
    parameters = {
        "ddp": True,
        "pipeline_parallel_degree": pipeline,
        "tensor_parallel_degree": tensor,
        "sharded_data_parallel_degree": sharded,
        "prescaled_batch": tensor > 1,
        "microbatches": 4,
        "offload_activations": offload,
        "fp16": True,
    }
    made = plan(shape, "ml.p4d.24xlarge", 16, parameters, 4 * factor, activation_checkpointing=checkpointing)
    assert all(size >= 0 for stage in made.stages for size in stage.kinds.values())
    assert made.changed(batch=8 * factor).total_bytes >= made.total_bytes
    assert made.traffic.total >= 0
    assert "verdict" in str(made)
