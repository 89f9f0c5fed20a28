"""Memory by kind: the published formulas, strategy by strategy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from smp_config import ConfigError, ModelParallelParameters
from smp_estimator.planning import Kind, ModelShape, Plan, Workload, named_shape, plan, suggest
from smp_estimator.planning.batches import layers_of_stages
from smp_estimator.planning.context import ContextShare
from smp_estimator.planning.memory.activations import LayerCost, checkpoint_bytes, layer_bytes, selective_bytes

PREDICTIONS = Path(__file__).parents[2] / "benchmarks/gpu_check/predictions.json"

SHAPE = ModelShape(8, 1024, 16, 32_000, 512)
COUNT = SHAPE.parameters


def planned(parameters: dict[str, Any] | None = None, batch: int = 1, model: Any = SHAPE, **more: Any) -> Plan:
    return plan(model, "ml.p4d.24xlarge", more.pop("count", 1), parameters or {"ddp": True}, batch, **more)


def kinds(parameters: dict[str, Any], **more: Any) -> dict[Kind, int]:
    return planned(parameters, **more).worst.kinds


@pytest.mark.parametrize(
    ("heads", "sequence", "dropout", "fused", "per_token"),
    [
        (16, 512, True, False, 34 + 5 * 16 * 512 / 1024),
        (16, 512, True, True, 34 + 4 * 16 / 1024),
        (16, 2048, False, False, 32 + 2 * 16 * 2048 / 1024),
    ],
)
def test_a_layer_keeps_what_the_paper_says(
    heads: int, sequence: int, dropout: bool, fused: bool, per_token: float
) -> None:
    shape = ModelShape(1, 1024, heads, 1000, sequence)
    cost = LayerCost(samples=3, element_bytes=2)
    expected = 3 * sequence * 1024 * per_token
    assert layer_bytes(shape, cost, fused_attention=fused, dropout=dropout) == pytest.approx(expected)


@pytest.mark.parametrize(("sliced", "per_token"), [(True, 34 / 4 + 5 * 16 * 512 / 1024 / 4), (False, 10 + 24 / 4 + 10)])
def test_a_layer_under_tensor_parallelism(sliced: bool, per_token: float) -> None:
    cost = LayerCost(samples=3, element_bytes=2, tensor=4, sliced=sliced)
    assert layer_bytes(SHAPE, cost, fused_attention=False) == pytest.approx(3 * 512 * 1024 * per_token)


@pytest.mark.parametrize("name", json.loads(PREDICTIONS.read_text()))
def test_plans_of_the_gpu_checks_are_as_they_were_rehearsed(name: str) -> None:
    given = json.loads(PREDICTIONS.read_text())[name]
    sizes = given["shape"]
    shape = ModelShape(sizes["layers"], sizes["hidden"], sizes["heads"], 256, sizes["seq"], tied_embeddings=False)
    made = plan(
        shape,
        "ml.p5.48xlarge",
        1,
        given["config"],
        given["batch"],
        processes_per_host=1,
        dropout=False,
        fp32_loss=True,
        autocast=given["mode"] == "autocast",
        activation_checkpointing="each" if given["checkpointed"] else None,
    )
    assert made.total_bytes / 2**30 == pytest.approx(given["plan_gib"], rel=0.001)
    # At the first loss after gradients were cleared to None there are none. With checkpointing, the update is the worst moment.
    gradients = 0 if given["checkpointed"] else made.worst.kinds[Kind.GRADIENTS]
    assert (made.total_bytes - gradients) / 2**30 == pytest.approx(given["rehearsal_gib"], rel=0.001)


def test_autocast_copies_matrices_and_keeps_sums_in_fp32() -> None:
    shape = ModelShape(8, 1024, 16, 32_000, 512, biases=False, learned_positions=False)
    plain, half, auto = (
        planned({"ddp": True, **half}, model=shape, fp32_loss=True, **more)
        for half, more in (({}, {}), ({"bf16": True}, {}), ({}, {"autocast": True}))
    )
    matrices = 8 * 12 * 1024**2 + 32_000 * 1024
    assert auto.worst.kinds[Kind.COPIES] == 2 * matrices
    assert half.worst.kinds[Kind.COPIES] == plain.worst.kinds[Kind.COPIES] == 0
    assert auto.worst.state == plain.worst.state
    # Of each layer, the inputs of both norms have 4 bytes instead of 2.
    assert auto.worst.activations.kept - half.worst.activations.kept == 8 * 512 * 2 * 1024 * 2
    assert plain.time is not None
    assert auto.time is not None
    assert auto.time.peak > plain.time.peak
    stages = {"ddp": True, "pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
    of_two = [planned(stages, 2, shape, autocast=chosen).traffic for chosen in (False, True)]
    assert of_two[1].tensor == of_two[0].tensor / 2
    assert of_two[1].pipeline == of_two[0].pipeline
    assert "fp32 under autocast in bf16" in str(auto)


def test_autocast_is_of_fp32_parameters() -> None:
    with pytest.raises(ConfigError, match="remove bf16"):
        planned({"ddp": True, "bf16": True}, autocast=True)
    assert "bf16" not in suggest("gpt2", "ml.p4d.24xlarge", 1, autocast=True).parameters


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_ranks_that_share_sequences_out_hold_parts_of_activations(degree: int) -> None:
    long = ModelShape(8, 1024, 16, 32_000, 8192, learned_positions=False)
    given = {"ddp": True, "bf16": True}

    def activations(cut: int, method: str = "auto", **more: Any) -> Any:
        parameters = given | {"context_parallel_degree": cut, "context_parallel": method}
        return planned(parameters, model=long, dropout=False, **more).worst.activations

    whole, part = activations(1), activations(degree)
    # Beside them, one more number of four bytes for each head of a token.
    assert part.kept * degree == whole.kept + 8 * 8192 * 16 * 4
    assert part.kept <= 1.05 / degree * whole.kept
    assert part.loss <= 1.05 / degree * whole.loss + long.hidden * long.vocabulary * 2
    again = [activations(cut, activation_checkpointing="each").kept for cut in (1, degree)]
    assert again[1] * degree == again[0]
    # An all-gather has the keys of all ranks at once, a ring those of two.
    gathered, ring = activations(degree, "all_gather"), activations(degree, "ring")
    blocks = {name: found.layers for name, found in (("all_gather", gathered), ("ring", ring))}
    assert blocks["all_gather"] >= blocks["ring"]
    state = planned(given | {"context_parallel_degree": degree}, model=long).worst.state
    assert state == planned(given, model=long).worst.state


def test_buffers_of_attention_by_method() -> None:
    shares = {
        method: ContextShare.of(
            ModelParallelParameters(ddp=True, context_parallel_degree=8, context_parallel=method),
            ModelShape(8, 1024, 16, 32_000, 8192, given_key_heads=4),
        )
        for method in ("ring", "all_gather", "all_to_all")
    }
    tokens, keys = 1024, 2 * 4 * 64
    sums = 4 * (1024 + keys)
    found = {name: share.buffer_bytes(tokens, 2) for name, share in shares.items() if share is not None}
    assert found["ring"] == tokens * (sums + keys * (2 * 2 * 2 + 4 + 3 * 2))
    assert found["all_gather"] == tokens * (sums + keys * (2 * 7 * 2 + 4 + 3 * 7 * 2))
    assert found["all_to_all"] == tokens * (sums + keys * (2 * 1 * 2 + 4 + 3 * 2) + 2 * 2 * (2 * 1024 + keys))
    assert "communicators" in str(planned({"ddp": True, "context_parallel_degree": 2}))


def test_a_checkpoint_is_the_input_of_its_unit() -> None:
    assert checkpoint_bytes(SHAPE, LayerCost(samples=3, element_bytes=2)) == 2 * 512 * 3 * 1024


@pytest.mark.parametrize(
    ("parameters", "each"),
    [
        ({"ddp": True}, (4, 4, 8, 0)),
        ({"ddp": True, "bf16": True}, (2, 2, 8, 4)),
        ({"ddp": True, "fp16": True}, (2, 2, 8, 4)),
        ({"ddp": True, "bf16": True, "_fp32_grad_accumulation": True}, (2, 2, 8, 4)),
        ({"ddp": True, "shard_optimizer_state": True}, (4, 4 + 4 / 8, 8 / 8, 0)),
        ({"ddp": True, "bf16": True, "shard_optimizer_state": True}, (2, 2 + 4 / 8, 8 / 8, 4 / 8)),
        ({"ddp": True, "fp16": True, "shard_optimizer_state": True}, (2, 2 + 2 / 8, 8 / 8, 4 / 8)),
        ({"ddp": True, "sharded_data_parallel_degree": 8, "sdp_param_persistence_threshold": 0}, (4 / 8, 4 / 8, 1, 0)),
        (
            {"ddp": True, "bf16": True, "sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 0},
            (2 / 4, 4 / 4, 2, 1),
        ),
        (
            {"ddp": True, "fp16": True, "sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 0},
            (2 / 4, 2 / 4, 2, 1),
        ),
    ],
)
def test_bytes_of_state_per_parameter(parameters: dict[str, Any], each: tuple[float, ...]) -> None:
    found = kinds(parameters)
    wanted = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.MASTER)
    for kind, bytes_each in zip(wanted, each, strict=True):
        assert found[kind] == pytest.approx(bytes_each * COUNT, rel=1e-6), kind


def test_state_is_shared_out_over_the_ranks_with_the_same_parts() -> None:
    """Also that of tensors that tensor parallelism does not divide, which all 8 ranks have whole."""
    found = kinds({"ddp": True, "tensor_parallel_degree": 2, "shard_optimizer_state": True})
    assert found[Kind.OPTIMIZER] == pytest.approx(found[Kind.PARAMETERS] / 4 * 8 / 4, rel=1e-6)


@pytest.mark.parametrize(("optimizer", "each"), [("adamw", 8), ("lans", 8), ("lars", 4), ("momentum", 4), ("sgd", 0)])
def test_other_optimizers(optimizer: str, each: int) -> None:
    assert kinds({"ddp": True}, optimizer=optimizer)[Kind.OPTIMIZER] == each * COUNT


def test_muon_has_one_moment_of_matrices_and_memory_to_iterate_on_one() -> None:
    matrices = sum(weight.elements for weight in SHAPE.tensors() if weight.matrix)
    assert 0.5 * COUNT < matrices < COUNT
    assert kinds({"ddp": True}, optimizer="muon")[Kind.OPTIMIZER] == 4 * matrices + 8 * (COUNT - matrices)
    largest = 2 * max(weight.elements for weight in SHAPE.tensors() if weight.matrix)
    for settings, messages in (({}, 0), ({"shard_optimizer_state": True}, 2 * max(largest, 2**24))):
        found = planned({"ddp": True, **settings}, optimizer="muon").worst
        other = planned({"ddp": True, **settings}, optimizer="momentum").worst
        state = found.kinds[Kind.OPTIMIZER] - other.kinds[Kind.OPTIMIZER]
        assert found.in_update - other.in_update - state == 4 * largest + messages


def test_one_bucket_is_held_beside_the_gradients_unless_the_buffers_stay() -> None:
    assert kinds({"ddp": True})[Kind.BUCKETS] == 25 * 2**20
    assert kinds({"ddp": True, "bf16": True})[Kind.BUCKETS] == 25 * 2**20 + 2 * COUNT  # summed in float32
    # Gradients are the buffers: new ones of one bucket are made beside them, and all that several passes add up.
    assert kinds({"ddp": True}, gradient_as_bucket_view=True)[Kind.BUCKETS] == 25 * 2**20
    assert kinds({"ddp": True}, gradient_as_bucket_view=True, accumulation=2)[Kind.BUCKETS] == 4 * COUNT
    wide = planned({"ddp": True, "bf16": True}, gradient_as_bucket_view=True).worst
    assert wide.kinds[Kind.BUCKETS] == 4 * COUNT  # which are bf16, copies of fp32 buffers that stay
    assert wide.in_update == 24 * COUNT
    shared = {"ddp": True, "bf16": True, "shard_optimizer_state": True}  # its buckets never stay
    assert planned(shared, gradient_as_bucket_view=True).worst.kinds == planned(shared).worst.kinds
    assert kinds({})[Kind.BUCKETS] == 25 * 2**20  # {} is the default of plan(): ddp
    assert planned({"pipeline_parallel_degree": 8}).worst.kinds[Kind.BUCKETS] == 0
    whole = {"ddp": True, "tensor_parallel_degree": 8, "prescaled_batch": True}
    replicated = (
        kinds(whole, gradient_as_bucket_view=True, accumulation=2)[Kind.BUCKETS] / 4
    )  # with one replica only tensors that are not divided are averaged
    assert 32_000 * 1024 < replicated < 34_000 * 1024


def test_sharding_keeps_small_tensors_and_caps_what_is_gathered() -> None:
    base = {"ddp": True, "bf16": True, "sharded_data_parallel_degree": 8}
    small = sum(w.elements for w in SHAPE.tensors() if w.elements < 1_000_000)
    found = kinds(base)
    assert found[Kind.PARAMETERS] == pytest.approx(2 * (small + (COUNT - small) / 8), abs=8)
    assert found[Kind.GATHERED] == 2 * (COUNT - small)  # less than the default cap of a billion
    assert found[Kind.BUCKETS] == 4 * COUNT  # summed in float32
    assert kinds({**base, "bf16": False, "fp16": True})[Kind.BUCKETS] == 2 * COUNT
    capped = kinds({**base, "sdp_max_live_parameters": 40_000_000, "sdp_reduce_bucket_size": 50_000_000})
    assert capped[Kind.GATHERED] == 2 * 40_000_000
    assert capped[Kind.BUCKETS] == 4 * 50_000_000
    tiny = kinds({**base, "sdp_max_live_parameters": 1, "sdp_reduce_bucket_size": 1})
    assert tiny[Kind.GATHERED] == 2 * 32_000 * 1024  # a unit cannot be gathered in part
    assert tiny[Kind.BUCKETS] == 4 * (32_000 * 1024 + 1)  # nor is it sent before it is complete
    everything = kinds({**base, "sdp_param_persistence_threshold": 10**9})
    assert everything[Kind.GATHERED] == 0
    assert everything[Kind.PARAMETERS] == 2 * COUNT


def test_smddp_buffers_only_where_they_are_used() -> None:
    sharded = {"ddp": True, "sharded_data_parallel_degree": 16}
    both = {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "16384"}
    assert kinds(sharded, count=2)[Kind.SMDDP] == 144 * 2**20
    assert kinds(sharded, count=2, environment=both)[Kind.SMDDP] == 24576
    inside = {**sharded, "sharded_data_parallel_degree": 8}
    assert kinds(inside, count=1)[Kind.SMDDP] == kinds(inside, count=2)[Kind.SMDDP] == 0
    assert kinds({**sharded, "ddp_dist_backend": "nccl"}, count=2)[Kind.SMDDP] == 0
    assert kinds({**inside, "ddp_dist_backend": "smddp"}, count=1)[Kind.SMDDP] == 0  # nothing goes between hosts
    assert kinds({**sharded, "ddp_dist_backend": "smddp"}, count=2)[Kind.SMDDP] == 144 * 2**20
    tensor = {**inside, "tensor_parallel_degree": 2, "prescaled_batch": True}
    assert kinds(tensor, count=2)[Kind.SMDDP] == 0


def test_tensor_parallelism_divides_matrices_and_embeddings_when_asked() -> None:
    parameters = {"ddp": True, "tensor_parallel_degree": 4, "prescaled_batch": True}
    table = 32_000 * 1024
    plain = planned(parameters, batch=4).worst
    asked = planned(parameters, batch=4, distribute_embedding=True).worst
    assert plain.elements - asked.elements == table * 3 // 4
    sharded = planned({**parameters, "sharded_data_parallel_degree": 2}, batch=4).worst
    assert sharded.elements == asked.elements  # on by itself
    layers = sum(w.elements for w in SHAPE.tensors() if w.split)
    rest = COUNT - layers - table
    assert asked.elements == layers // 4 + table // 4 + rest


def test_every_weight_lies_in_one_stage() -> None:
    made = planned({"ddp": True, "pipeline_parallel_degree": 4, "microbatches": 4}, batch=4)
    assert sum(stage.elements for stage in made.stages) == COUNT
    assert [stage.layers for stage in made.stages] == [2, 2, 2, 2]
    assert made.worst.stage == 0  # the embedding, and the loss of the tied output projection
    untied = ModelShape(8, 1024, 16, 32_000, 512, tied_embeddings=False)
    last = planned({"ddp": True, "pipeline_parallel_degree": 4, "microbatches": 4}, batch=4, model=untied).stages[-1]
    assert last.activations.working > made.stages[-1].activations.working


def test_microbatches_in_flight() -> None:
    base = {"ddp": True, "pipeline_parallel_degree": 4, "microbatches": 8}
    kept = [stage.activations.kept for stage in planned(base, batch=8).stages]
    assert kept == [4 * kept[3], 3 * kept[3], 2 * kept[3], kept[3]]
    simple = [stage.activations.kept for stage in planned({**base, "pipeline": "simple"}, batch=8).stages]
    assert simple == [6 * kept[3]] * 4
    fewer = planned({**base, "active_microbatches": 2}, batch=8).stages[0].activations.kept
    assert fewer == 2 * kept[3]


def test_checkpointing_strategies() -> None:
    kept, working = {}, {}
    for strategy in (None, "each", "group_2", "group_3", "contiguous"):
        found = planned(batch=8, model=ModelShape(8, 1024, 16, 1000, 512), activation_checkpointing=strategy)
        kept[strategy], working[strategy] = found.worst.activations.kept, found.worst.activations.working
    unit = 4 * 8 * 512 * 1024
    assert [kept[s] for s in ("each", "group_2", "group_3", "contiguous")] == [8 * unit, 4 * unit, 3 * unit, unit]
    assert working["each"] < working["group_2"] < working["group_3"] < working["contiguous"]
    assert kept[None] > 8 * kept["each"]
    with pytest.raises(ConfigError, match="group_2"):
        Workload(activation_checkpointing="group_0")


def test_offloading_leaves_what_is_loaded_early() -> None:
    base = {"ddp": True, "offload_activations": True}
    unit = 4 * 8 * 512 * 1024
    found = planned(
        {**base, "activation_loading_horizon": 2}, batch=8, activation_checkpointing="each"
    ).worst.activations
    assert (found.kept, found.offloaded) == (3 * unit, 8 * unit)
    far = planned(
        {**base, "activation_loading_horizon": 99}, batch=8, activation_checkpointing="each"
    ).worst.activations
    assert far.kept == 8 * unit
    without = planned(base, batch=8).worst.activations
    assert without.offloaded == 0  # nothing is offloaded without checkpoints


def test_optimize_speed_keeps_more() -> None:
    parameters = {"ddp": True, "tensor_parallel_degree": 8, "prescaled_batch": True, "fp16": True}
    sliced, whole = (
        planned({**parameters, "optimize": how}, batch=8, activation_checkpointing="each").worst.activations.kept
        for how in ("memory", "speed")
    )
    assert whole == 8 * sliced


def test_fp32_loss_needs_more() -> None:
    half = planned({"ddp": True, "fp16": True}, batch=4)
    full = planned({"ddp": True, "fp16": True}, batch=4, fp32_loss=True)
    assert full.total_bytes - half.total_bytes == 4 * 512 * 32_000 * (14 - 8)


def test_where_gradients_are_let_go_of_the_loss_of_a_single_pass_is_a_moment_without_them() -> None:
    shared = {"ddp": True, "shard_optimizer_state": True, "fp16": True}
    one = planned(shared, batch=16, activation_checkpointing="each").worst
    loss = 16 * 512 * 32_000 * 8 + 2 * 16 * 512 * 1024 * 2
    # Parameters, a rank's part of masters and Adam's state, and the inputs of the layers; no gradients, no buckets.
    assert one.at_loss == pytest.approx(COUNT * (2 + 12 / 8) + one.activations.kept + loss, rel=1e-6)
    assert one.in_backward == sum(one.kinds.values()) < one.at_loss == one.total
    assert one.kinds[Kind.ACTIVATIONS] == one.activations.kept + one.activations.layers
    # Gradients of the pass before are there at the loss of the next.
    for more in ({"accumulation": 2}, {"parameters": {**shared, "microbatches": 2}}):
        several = planned(more.pop("parameters", shared), batch=16, activation_checkpointing="each", **more).worst
        assert several.at_loss == 0
        assert several.kinds[Kind.ACTIVATIONS] == several.activations.total
    # Without sharing a script decides whether they stay from step to step.
    assert planned({"ddp": True, "fp16": True}, batch=16).worst.at_loss == 0
    assert "at the loss" in str(planned(shared, batch=16))


def test_the_loss_of_transformers_is_in_fp32() -> None:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 32_000, "n_positions": 128}
    config = {"model_type": "gpt2", **sizes}
    half = {"ddp": True, "fp16": True}
    assert planned(half, model=config).request.workload.fp32_loss
    assert not planned(half, model=config, fp32_loss=False).request.workload.fp32_loss
    assert not planned(half).request.workload.fp32_loss
    assert not planned(half, model="gpt2-xl").request.workload.fp32_loss
    chosen = suggest(config, "ml.p4d.24xlarge", 1)
    assert chosen.plan.request.workload.fp32_loss


def test_frozen_parameters_have_no_gradient() -> None:
    class Parameter:
        def __init__(self, *shape: int, trains: bool) -> None:
            self.shape, self.requires_grad = shape, trains

        def numel(self) -> int:
            return self.shape[0] * self.shape[1]

    class Module:
        def named_parameters(self) -> Any:
            yield "frozen.weight", Parameter(100, 100, trains=False)
            yield "head.weight", Parameter(10, 100, trains=True)

    found = kinds({"ddp": True}, model=Module())
    assert found[Kind.PARAMETERS] == 4 * 11_000
    assert found[Kind.GRADIENTS] == 4 * 1_000
    assert found[Kind.OPTIMIZER] == 8 * 1_000


def test_communicators_between_stages_count_on_both_gpus() -> None:
    assert kinds({"ddp": True})[Kind.COMMUNICATORS] == 0
    assert kinds({"pipeline_parallel_degree": 2})[Kind.COMMUNICATORS] == 2 * 166 * 2**20
    eight = planned({"pipeline_parallel_degree": 8})
    counts = [stage.kinds[Kind.COMMUNICATORS] // (166 * 2**20) for stage in eight.stages]
    assert counts == [3, 5, 5, 5, 5, 5, 4, 8]
    assert kinds({"pipeline_parallel_degree": 2, "ddp": True, "ddp_dist_backend": "gloo"})[Kind.COMMUNICATORS] == 0
    on_cpus = plan(SHAPE, "ml.c5.4xlarge", 1, {"pipeline_parallel_degree": 2}, 1, processes_per_host=2)
    assert on_cpus.worst.kinds[Kind.COMMUNICATORS] == 0


def test_selective_checkpointing_keeps_every_second_product_and_the_result_of_attention() -> None:
    shape = named_shape("llama-3.1-8b").with_sequence(8192)
    # Input, queries, values (a quarter of the width), attention's result, the first product of the MLP.
    kept = 2 * (4096 + 4096 + 1024 + 4096 + 14_336) + 4 * 32
    assert selective_bytes(shape, LayerCost(1, 2), compiled=True) == 8192 * kept
    # The last product is kept too if the layer is not compiled.
    assert selective_bytes(shape, LayerCost(1, 2)) == 8192 * (kept + 2 * 4096)
    ways = (None, "selective", "each")
    none, some, most = (planned(batch=4, activation_checkpointing=way).total_bytes for way in ways)
    assert none > some > most


def test_fsdp2_keeps_a_pipeline_gathered_and_sums_its_gradients_whole() -> None:
    settings = {"bf16": True, "sharded_data_parallel_degree": 4, "pipeline_parallel_degree": 2, "ddp": True}
    shape = named_shape("llama-3.2-1b")
    many = planned({**settings, "microbatches": 2}, 2, shape, engine="fsdp2").stages[0]
    one = planned({**settings, "microbatches": 1}, 1, shape, engine="fsdp2").stages[0]
    assert many.kinds[Kind.GRADIENTS] == 4 * many.elements + many.elements  # whole sums, and 4 bytes over 4 ranks
    assert one.kinds[Kind.GRADIENTS] == one.elements
    alone = {"bf16": True, "sharded_data_parallel_degree": 4, "ddp": True}
    passes = planned(alone, 1, shape, engine="fsdp2", accumulation=2).worst
    assert passes.kinds[Kind.GRADIENTS] == passes.elements  # each pass reduces its own sums
    assert many.kinds[Kind.GATHERED] > 2 * many.elements
    assert many.kinds[Kind.PARAMETERS] == many.elements
    assert "engine fsdp2" in str(planned({**settings, "microbatches": 2}, 2, shape, engine="fsdp2"))
    with pytest.raises(ConfigError, match=r"^shard_optimizer_state is set.*remove shard_optimizer_state"):
        planned({"ddp": True, "shard_optimizer_state": True}, engine="fsdp2")
    with pytest.raises(ConfigError, match=r"^engine is 'fdsp2'.*use one of them"):
        planned(engine="fdsp2")


def test_a_pipeline_of_fsdp2_gives_the_first_stage_none_of_the_layers_that_are_left_over() -> None:
    assert [len(layers) for layers in layers_of_stages(14, 4, first_has_more=False)] == [3, 4, 4, 3]
    assert [len(layers) for layers in layers_of_stages(14, 4)] == [4, 4, 3, 3]
    assert layers_of_stages(13, 2, 2, first_has_more=False) == [[0, 1, 2, 7, 8, 9], [3, 4, 5, 6, 10, 11, 12]]
    shape = dataclasses.replace(named_shape("llama-3.2-1b"), layers=14)
    settings = {"bf16": True, "sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 4, "microbatches": 4}
    for engine, layers in (("fsdp2", [3, 4, 4, 3]), ("smp", [4, 4, 3, 3])):
        made = planned({"ddp": True, **settings}, 4, shape, engine=engine)
        assert [stage.layers for stage in made.stages] == layers


def test_sums_of_the_root_unit_need_a_segment_as_large_as_they_are() -> None:
    """The logits of 16,384 tokens in half precision are 16 KiB smaller than the sums of both tables and a norm in fp32."""
    shape = named_shape("llama-3.1-8b").with_sequence(8192)
    root = 2 * 128_256 * 4096 + 4096
    assert 4 * root - 2 * 128_256 * 16_384 == 4 * 4096
    settings = {"bf16": True, "ddp": True, "sharded_data_parallel_degree": 8}

    def total(batch: int, *, compiled_loss: bool, **more: Any) -> int:
        how = {"activation_checkpointing": "each", "engine": "fsdp2", "dropout": False}
        return planned(settings, batch, shape, compiled_loss=compiled_loss, **how, **more).total_bytes

    grows = {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True"}}
    assert total(2, compiled_loss=True) - total(2, compiled_loss=True, **grows) == 4 * root
    assert total(4, compiled_loss=True) == total(4, compiled_loss=True, **grows)
    # The gradient of a table in half precision is larger than the logits of few tokens in half precision.
    few = shape.with_sequence(1024)
    one, without = (
        planned(settings, 1, few, compiled_loss=True, engine="fsdp2", dropout=False, **more).total_bytes
        for more in ({}, grows)
    )
    assert one - without == (4 + 2) * root
    # The fp32 logits of a loss that is not compiled leave segments that are large enough.
    assert total(2, compiled_loss=False) == total(2, compiled_loss=False, **grows)


def test_attention_of_fsdp2_over_ranks_has_keys_of_all_and_fp32_gradients_that_go_around() -> None:
    shape = ModelShape(4, 512, 8, 1000, 4096, learned_positions=False, given_key_heads=2)
    share = ContextShare.of_pytorch(
        ModelParallelParameters.from_mp_parameters({"ddp": True, "context_parallel_degree": 4}), shape
    )
    assert share is not None
    # Keys and values, repeated for each head, of three other ranks; in backward again, and four times their gradients in fp32.
    assert share.forward_elements(4096) == 3 / 4 * 4096 * 2 * 512
    assert share.backward_elements(4096) == (3 / 4 + 2) * 4096 * 2 * 512
    assert share.buffer_bytes(1024, 2) == 1024 * 512 * (4 * 5 + 12 + 16 + 6 + 4)
    assert ContextShare.of_pytorch(ModelParallelParameters.from_mp_parameters({}), shape) is None
