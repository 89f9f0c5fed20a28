"""Plans of drawn models, clusters and settings: what always holds between a plan and the same one with one input changed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.matrix import examples

from smp_config import ConfigError
from smp_estimator.planning import SHAPES, Kind, ModelShape, Plan, plan
from smp_estimator.planning.known_models import CONFIGURATIONS

STATE = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.MASTER)
TYPES = ("ml.p4d.24xlarge", "ml.p5.48xlarge", "ml.p3.16xlarge", "ml.g5.12xlarge", "ml.p5en.48xlarge", "ml.g4dn.xlarge")

#: Settings: (part of the draws that have it, its values).
SETTINGS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "tensor_parallel_degree": (0.4, (2, 4, 8)),
    "pipeline_parallel_degree": (0.3, (2, 4)),
    "sharded_data_parallel_degree": (0.4, (2, 4, 8, 32)),
    "shard_optimizer_state": (0.2, (True,)),
    "prescaled_batch": (0.3, (True,)),
    "microbatches": (0.4, (2, 4, 8)),
    "active_microbatches": (0.2, (1, 2, 4)),
    "context_parallel_degree": (0.15, (2, 4)),
    "context_parallel": (0.2, ("ring", "all_gather", "all_to_all")),
    "pipeline": (0.2, ("simple", "interleaved", "zero_bubble")),
    "virtual_stages": (0.1, (2,)),
    "offload_activations": (0.1, (True,)),
    "optimize": (0.3, ("speed", "memory")),
    "fp8": (0.1, (True,)),
}

#: The same of a script.
SCRIPTS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "batch": (1.0, (None, 1, 2, 4, 8, 16)),
    "sequence": (0.6, (128, 1024, 4096, 131_072)),
    "activation_checkpointing": (0.6, ("each", "contiguous", "group_3", "selective")),
    "optimizer": (0.3, ("adamw", "sgd", "muon", "momentum")),
    "accumulation": (0.2, (2, 4)),
    "fused_attention": (0.2, (False,)),
    "dropout": (0.3, (False,)),
    "distribute_embedding": (0.2, (True,)),
    "fp32_loss": (0.2, (True,)),
    "gradient_as_bucket_view": (0.2, (True,)),
    "compiled": (0.2, (True,)),
    "async_tensor": (0.1, (True,)),
    "engine": (0.2, ("fsdp2",)),
    "steps": (0.2, (1, 100_000)),
    "samples": (0.1, (1, 100_000)),
}


def _drawn(of: random.Random, space: dict[str, tuple[float, tuple[Any, ...]]]) -> dict[str, Any]:
    return {name: of.choice(values) for name, (part, values) in space.items() if of.random() < part}


def draw(of: random.Random) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Return the model and the cluster, settings, and the script of a plan; many of them are refused."""
    model: Any = of.choice([*SHAPES, *CONFIGURATIONS, 1e8, 7e9])
    if of.random() < 0.4:
        heads = of.choice((1, 4, 12, 32))
        sizes = (of.choice((1, 2, 7, 48)), heads * of.choice((8, 64)), heads, of.choice((7, 50_257, 128_256)), 2048)
        names = ("tied_embeddings", "learned_positions", "gated", "biases")
        has = {name: of.random() < 0.5 for name in names}
        model = ModelShape(*sizes, feed_forward=of.choice((0, 0, 100)), **has)
    precision = of.choice(("fp32", "fp16", "bf16", "autocast"))
    settings = {"ddp": True, **_drawn(of, SETTINGS)}
    script = _drawn(of, SCRIPTS)
    if precision in ("fp16", "bf16"):
        settings[precision] = True
    script["autocast"] = precision == "autocast"
    return (model, of.choice(TYPES), of.choice((1, 1, 2, 3, 8, 64))), settings, script


def _problems(made: Plan, cluster: tuple[Any, ...], settings: dict[str, Any], script: dict[str, Any]) -> Iterator[str]:
    def other(parameters: dict[str, Any] | None = None, **fields: Any) -> Plan | None:
        try:
            return plan(*cluster, {**settings, **(parameters or {})}, **{**script, **fields})
        except ConfigError:
            return None

    assert "memory of one GPU" in str(made)
    assert json.loads(json.dumps(made.to_dict(), allow_nan=False))["total_bytes"] == made.total_bytes
    if made.time is not None and not 0 < made.time.total < float("inf"):
        yield f"a step takes {made.time.total} s"
    larger = other(batch=2 * made.request.workload.batch)
    longer = other(sequence=2 * made.batches.sequence)
    none, some, most = (other(activation_checkpointing=way) for way in (None, "selective", "each"))
    pairs = [("a larger batch", made, larger), ("a longer sequence", made, longer), ("no checkpointing", some, none)]
    pairs += [("selective checkpointing", most, some), ("Adam", other(optimizer="sgd"), other(optimizer="adam"))]
    pairs.append(("whole attention maps", other(fused_attention=True), other(fused_attention=False)))
    for what, less, more in pairs:
        if less is not None and more is not None and more.total_bytes < less.total_bytes:
            yield f"{what} takes {more.total_bytes}, less than {less.total_bytes}"
    degree = made.request.parameters.sharded_data_parallel_degree
    sharded = other({"sharded_data_parallel_degree": 2 * degree}) if degree > 1 else None
    for before, after in zip(made.stages, sharded.stages if sharded else (), strict=False):
        for kind in STATE:
            # Each is rounded for itself.
            if after.kinds[kind] > before.kinds[kind] + 1:
                yield f"{kind.value} of twice the shards are {after.kinds[kind]}, before {before.kinds[kind]}"
    for change in made.changes:
        again = change.plan.request
        if again.instance_type == made.request.instance_type and change.plan.total_bytes >= made.total_bytes:
            yield f"{change} does not help"


@pytest.mark.parametrize("value", ["4", "x", [], {}, 1.5, float("nan"), -1, 0], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "batch",
        "sequence",
        "accumulation",
        "optimizer",
        "processes_per_host",
        "gpu_memory_bytes",
        "environment",
        "steps",
    ],
)
def test_a_value_of_another_kind_is_refused_or_planned(name: str, value: Any) -> None:
    try:
        made = plan("gpt2", "ml.p4d.24xlarge", **{name: value})
    except ConfigError as error:
        assert str(value) in str(error)
        return
    assert str(made)


@pytest.mark.parametrize("seed", range(examples(4, 40)))
def test_drawn_plans_keep_their_order(seed: int) -> None:
    of = random.Random(seed)
    found = 0
    while found < 10:
        cluster, settings, script = draw(of)
        try:
            made = plan(*cluster, settings, **script)
        except ConfigError:
            continue
        found += 1
        problems = list(_problems(made, cluster, settings, script))
        assert not problems, (cluster, settings, script, problems)
