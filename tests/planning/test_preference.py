"""The cheapest and the fastest cluster: against all types one by one, with prices of one's own, and what is said."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from click.testing import CliRunner

from smp_config import ConfigError
from smp_config.machine.instances import instances
from smp_estimator.cli.commands.planning import suggest as suggest_command
from smp_estimator.cli.main import main
from smp_estimator.planning import Cluster, Suggestion, Verdict, plan, suggest
from smp_estimator.planning.search.heuristic_steps import climb, fitting_plans, has_room, sharded_plans
from smp_estimator.planning.search.preference import PREFERENCES


def price(cluster: Cluster) -> float:
    assert cluster.plan.cost is not None
    return cluster.plan.cost.usd_per_million_tokens


def speed(cluster: Cluster) -> float:
    assert cluster.plan.time is not None
    return cluster.plan.time.tokens_per_second


def each_type(model: Any, prefer: str, **more: Any) -> list[Cluster]:
    """The best cluster of every type by itself, so that no type is passed over."""
    found = []
    for known in instances():
        try:
            found += [] if known.gpu == "V100" else suggest(model, known.name, prefer=prefer, **more).clusters
        except ConfigError:
            continue  # too old, too small, no price, or nothing published
    return found


@pytest.mark.parametrize(
    "model", ["gpt2", "gptj-6b", *(pytest.param(m, marks=pytest.mark.full) for m in ("gpt-neox-20b", "gpt2-60b"))]
)
def test_no_type_is_cheaper(model: str) -> None:
    found = suggest(model, prefer="cheapest")
    others = [cluster for cluster in each_type(model, "cheapest") if not cluster.is_slow]
    assert len(others) > 6
    assert price(found.clusters[0]) == pytest.approx(min(map(price, others)))
    assert found.plan.total_bytes == found.clusters[0].plan.total_bytes
    assert found.plan.verdict is Verdict.FITS
    prices = [price(cluster) for cluster in found.clusters if not cluster.is_slow]
    assert prices == sorted(prices)
    assert set(prices) <= set(map(price, others))


@pytest.mark.parametrize("model", ["gpt2", "gpt-neox-20b"])
def test_no_type_is_faster_with_as_many_instances(model: str) -> None:
    found = suggest(model, prefer="fastest")
    assert found.instance_count == 1
    others = [speed(cluster) for cluster in each_type(model, "fastest", up_to=1)]
    assert speed(found.clusters[0]) == pytest.approx(max(others))
    assert found.plan.verdict is Verdict.FITS


def test_of_one_cluster_the_shortest_step_is_chosen() -> None:
    found = suggest("gpt-neox-20b", "ml.p4d.24xlarge", 4, prefer="fastest")
    fitting = [step.plan for step in found.tried if step.plan.verdict is Verdict.FITS]
    assert len(fitting) > 3
    assert found.plan.time is not None
    assert found.plan.time.total == min(made.time.total for made in fitting if made.time is not None)
    first = suggest("gpt-neox-20b", "ml.p4d.24xlarge", 4).plan
    assert first.time is not None
    assert first.time.total > found.plan.time.total
    assert suggest("gpt-neox-20b", "ml.p4d.24xlarge", 4, prefer="cheapest").parameters == found.parameters


def test_what_offloads_is_chosen_only_where_nothing_else_fits() -> None:
    found = suggest("gpt-neox-65b", "ml.p4d.24xlarge", 64, prefer="fastest", sequence=4096, batch=2)
    assert found.plan.verdict is Verdict.FITS
    assert not found.plan.request.parameters.offload_activations
    assert any(step.plan.request.parameters.offload_activations for step in found.tried)


def test_more_instances_are_faster_and_may_be_asked_for() -> None:
    one, four = (suggest("gpt-neox-20b", prefer="fastest", up_to=most) for most in (1, 4))
    assert (one.instance_count, four.instance_count) == (1, 4)
    assert speed(four.clusters[0]) > 2 * speed(one.clusters[0])
    assert max(cluster.instance_count for cluster in four.clusters) == 4
    cheapest = suggest("gpt2-xl", prefer="cheapest", up_to=4, batch=8)
    assert max(cluster.instance_count for cluster in cheapest.clusters) <= 4
    assert price(cheapest.clusters[0]) <= price(suggest("gpt2-xl", prefer="cheapest", batch=8).clusters[0])
    assert {cluster.instance_count for cluster in suggest("gpt2", instance_count=2, prefer="cheapest").clusters} == {2}


@pytest.mark.parametrize(
    ("model", "kind", "count", "settings", "workload"),
    [
        ("gpt2-xl", "ml.g5.12xlarge", 1, {"bf16": True}, {}),
        ("gpt2-10b", "ml.p4d.24xlarge", 2, {}, {}),
        ("gpt-neox-20b", "ml.p4d.24xlarge", 4, {"fp16": True}, {}),
        ("gpt-neox-20b", "ml.p5.48xlarge", 2, {"bf16": True}, {"optimizer": "sgd"}),
        ("gpt2-30b", "ml.p4de.24xlarge", 2, {"bf16": True}, {"optimizer": "momentum"}),
    ],
)
def test_what_is_not_planned_would_not_have_fitted(
    model: str, kind: str, count: int, settings: dict[str, Any], workload: dict[str, Any]
) -> None:
    request = plan(model, kind, count, {"ddp": True, **settings}, 1, **workload).request
    planned = [*climb(request, request.world), *sharded_plans(request, request.world)]
    fit = [step.what for step in planned if step.plan.verdict is Verdict.FITS and has_room(step.plan)]
    assert 0 < len(fit) < len(planned)
    assert [step.what for step in fitting_plans(request, request.world)] == fit


def test_with_a_global_batch_the_cheapest_token_is_the_cheapest_step() -> None:
    found = suggest("gpt2-xl", prefer="cheapest", global_batch=64)
    steps = [cluster.plan.cost.usd_per_step for cluster in found.clusters if cluster.plan.cost and not cluster.is_slow]
    assert len(steps) > 2
    assert steps == sorted(steps)


def test_prices_of_ones_own_decide() -> None:
    usual = suggest("gpt-neox-20b", prefer="cheapest")
    assert usual.instance_type != "ml.p4de.24xlarge"
    offered = suggest("gpt-neox-20b", prefer="cheapest", prices={"ml.p4de.24xlarge": 1.0})
    assert offered.instance_type == "ml.p4de.24xlarge"
    assert "(given)" in str(offered)
    assert "(given)" not in str(usual)
    assert usual.left_out == (
        "ml.g7.12xlarge, ml.g7.24xlarge, ml.g7.2xlarge, ml.g7.48xlarge, ml.g7.4xlarge, ml.g7.8xlarge: no peak of "
        "the RTX PRO 4500 in bf16 is published",
        "ml.p6e-gb200.36xlarge: no price is known",
    )
    assert "not compared" in str(usual)
    blocks = suggest("gpt-neox-20b", prefer="cheapest", prices={"ml.p5e.48xlarge": 1.0})
    assert blocks.instance_type == "ml.p5e.48xlarge"


def test_only_what_can_be_compared_is_proposed() -> None:
    with pytest.raises(ConfigError, match=r"fits on 1 × ml\.p5e\.48xlarge, but .* no price is known; give prices for"):
        suggest("gpt-neox-20b", "ml.p5e.48xlarge", prefer="cheapest")
    assert suggest("gpt-neox-20b", "ml.p5e.48xlarge", prefer="fastest").instance_count == 1
    with pytest.raises(ConfigError, match="no peak of the RTX PRO 4500 in bf16 is published"):
        suggest("gpt2", "ml.g7.2xlarge", prefer="fastest")
    with pytest.raises(ConfigError, match="the model fits on no cluster of up to"):
        suggest("gpt2-60b", prefer="cheapest", global_batch=1, sequence=2**22)


def test_a_cluster_of_a_type_that_is_not_known_gets_the_first_that_fits() -> None:
    given = {"processes_per_host": 8, "gpu_memory_bytes": 2**36}
    found = suggest("gpt2-xl", "ml.p9.48xlarge", 1, prefer="fastest", **given)
    assert found.parameters == suggest("gpt2-xl", "ml.p9.48xlarge", 1, **given).parameters
    assert "shortest step" not in str(found)
    assert "unknown: the type is not in the catalogue" in str(found)


def test_what_is_shown() -> None:
    found = suggest("gpt-neox-20b", prefer="cheapest")
    text = " ".join(str(found).split())
    assert text.startswith("the cheapest clusters that fit")
    how = "of those that fit the one with the shortest step is chosen"
    assert how not in text  # each cluster has its configuration beside it
    given = suggest("gpt-neox-20b", found.instance_type, found.instance_count, prefer="fastest")
    assert how in " ".join(str(given).split())
    written = json.loads(json.dumps(found.to_dict()))
    assert (written["prefer"], written["left_out"]) == ("cheapest", list(found.left_out))
    first = written["clusters"][0]
    assert first["usd_per_million_tokens"] == price(found.clusters[0])
    assert first["tokens_per_second"] == speed(found.clusters[0])
    assert written["plan"]["step_time"]["utilisation"] == 0.5
    assert all(step["seconds_per_step"] > 0 for step in written["tried"])
    assert isinstance(found, Suggestion)


def test_the_smallest_says_time_and_price_too() -> None:
    found = suggest("gpt-neox-20b")
    assert (found.prefer, found.left_out) == ("smallest", ())
    made = plan(
        "gpt-neox-20b",
        found.instance_type,
        found.instance_count,
        found.plan.request.parameters,
        found.batch,
        activation_checkpointing=found.plan.request.workload.activation_checkpointing,
    )
    assert made.time == found.plan.time
    assert "USD per million tokens" in str(found)


def test_the_search_is_quick() -> None:
    """A bound against searches that plan everything, five times what it takes."""
    start = time.process_time()
    suggest(300e9, prefer="cheapest")
    assert time.process_time() - start < 8


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["suggest", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command() -> None:
    found = json.loads(call("gpt-neox-20b", "--prefer", "cheapest", "--price", "ml.p4de.24xlarge=1", "--json"))
    assert found["instance_type"] == "ml.p4de.24xlarge"
    slower = json.loads(call("gpt2", "--prefer", "fastest", "--utilisation", "0.25", "--up-to", "2", "--json"))
    assert slower["instance_count"] == 2
    assert slower["plan"]["step_time"]["utilisation"] == 0.25
    assert "--utilisation is 2.0; it is the part" in " ".join(call("gpt2", "--utilisation", "2", code=1).split())
    assert "--price is 'ml.p4d'; it gives" in " ".join(call("gpt2", "--price", "ml.p4d", code=1).split())
    (choices,) = (option.type.choices for option in suggest_command.params if option.name == "prefer")  # type: ignore[attr-defined]
    assert tuple(choices) == PREFERENCES


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prefer": "cheap"}, r"prefer is 'cheap'.*use one of smallest, cheapest, fastest"),
        (
            {"prefer": "fastest", "up_to": 1, "model": 300e9},
            r"up_to is 1, but the fewest .* are 3 × ml\.p6-b300.* to 3",
        ),
        ({"prefer": "fastest", "up_to": 0}, "up_to is 0; it is a number of instances"),
        ({"up_to": 4}, r'up_to is 4, but prefer="smallest" settles'),
        ({"prefer": "fastest", "up_to": 4, "instance_count": 2}, "up_to is 4, but instance_count 2 settles"),
        ({"prefer": "cheapest", "prices": {"ml.p4d": 3.0}}, r"prices has 'ml\.p4d'"),
        ({"instance_type": "ml.p2.xlarge"}, "K80 GPUs have compute capability"),
        ({"instance_type": "trn2.48xlarge"}, "AWS Neuron devices"),
        ({"prefer": "fastest", "processes_per_host": 99}, "has 8 GPUs"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        suggest(**{"model": "gpt2", **arguments})
