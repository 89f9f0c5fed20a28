"""The search for a cluster: which instances, how many, in which order, and what is said when none is enough."""

from __future__ import annotations

import dataclasses
from itertools import islice, pairwise
from typing import Any

import pytest

from smp_config import ConfigError
from smp_config.machine.instances import instances
from smp_estimator.planning import ModelShape, Verdict, plan, suggest
from smp_estimator.planning.rates.fitted import FITTED
from smp_estimator.planning.request import request_for
from smp_estimator.planning.search.bounds import least_seconds
from smp_estimator.planning.search.clusters import MOST_INSTANCES
from smp_estimator.planning.search.planned import region_of
from smp_estimator.planning.search.space import LEVELS


def test_without_instances_the_smallest_cluster_is_proposed() -> None:
    small = suggest("gpt2")
    assert (small.instance_type, small.instance_count) == ("ml.g4dn.xlarge", 1)
    large = suggest("gpt-neox-20b")
    assert large.plan.verdict is Verdict.FITS
    assert large.searched
    assert large.clusters[0].plan.total_bytes == large.plan.total_bytes
    sizes = [cluster.size for cluster in large.clusters]
    assert sizes == sorted(sizes)
    assert len({cluster.instance_type for cluster in large.clusters}) == len(sizes) == 6
    said = str(large)
    assert "the smallest clusters that fit" in said
    assert "sharded data parallelism" not in said.partition("verdict")[2].partition("└")[0], "in a row of seven columns"
    assert "tried on" not in said, "each cluster has its configuration beside it"
    assert len(said.partition("fewer GPUs")[2].partition("notes")[0].split("does not fit")) <= 2


def test_fewer_instances_come_before_less_memory() -> None:
    clusters = suggest("gpt-neox-65b").clusters
    counts = [cluster.instance_count for cluster in clusters]
    assert counts == sorted(counts)
    assert len(set(counts)) > 1
    for one, other in pairwise(clusters):
        assert one.instance_count < other.instance_count or one.memory_bytes <= other.memory_bytes


def test_every_cluster_that_is_named_fits() -> None:
    for cluster in suggest("gpt2-60b").clusters:
        request = cluster.plan.request
        again = plan(
            "gpt2-60b",
            cluster.instance_type,
            cluster.instance_count,
            request.parameters,
            request.workload.batch,
            activation_checkpointing=request.workload.activation_checkpointing,
        )
        assert again.verdict is Verdict.FITS, cluster
        assert again.batches.global_batch == cluster.gpus


def test_no_smaller_cluster_of_any_type_fits() -> None:
    """By brute force over all types, of as many instances as the chosen cluster has."""
    chosen = suggest("gpt-neox-20b").clusters[0]
    assert chosen.instance_count == 1
    for known in instances():
        memory = known.gpus * known.gpu_memory_bytes
        if known.gpu in ("K80", "V100") or not 16 * 20.5e9 < memory < chosen.memory_bytes:
            continue  # old; smaller than the state; not smaller than what was chosen
        assert suggest("gpt-neox-20b", known.name, 1).plan.verdict is not Verdict.FITS, known.name


@pytest.mark.parametrize(("model", "kind"), [("gpt2-60b", "ml.p4d.24xlarge"), ("gpt-neox-20b", "ml.g5.12xlarge")])
def test_a_type_alone_gets_its_fewest_instances(model: str, kind: str) -> None:
    found = suggest(model, kind)
    count = found.instance_count
    assert found.instance_type == kind
    assert count > 1
    assert found.plan.verdict is Verdict.FITS
    assert all(suggest(model, kind, fewer).plan.verdict is not Verdict.FITS for fewer in range(1, count))


def test_a_number_alone_gets_the_smallest_type() -> None:
    found = suggest("gpt-neox-20b", instance_count=2)
    assert {cluster.instance_count for cluster in found.clusters} == {2}
    assert found.plan.instance is not None
    assert found.plan.instance.efa  # those without are slow, and come last
    with pytest.raises(ConfigError, match=r"on no cluster of 1 instances .* it fits on \d+ × ml\."):
        suggest(300e9, instance_count=1)


def test_a_cluster_that_is_too_small_names_those_that_are_not() -> None:
    found = suggest("gpt-neox-65b", "ml.p4d.24xlarge", 2)
    assert found.plan.verdict is Verdict.DOES_NOT_FIT
    assert not found.searched
    first = found.clusters[0]
    assert first.instance_type == "ml.p4d.24xlarge"
    assert first.instance_count > 2
    said = " ".join(str(found).split())
    assert "nothing fits on 2 × ml.p4d.24xlarge" in said
    assert f"{first.instance_count} × ml.p4d.24xlarge" in said
    assert "← nearest" in said
    assert "chosen" not in said.split("verdict nothing")[0].replace("chosen for", "")
    assert "'ddp'" not in said  # settings that do not fit are not offered
    assert "suggest" not in said  # which would advise itself


def test_too_large_for_anything() -> None:
    with pytest.raises(ConfigError, match=f"no cluster of up to {MOST_INSTANCES:,} instances"):
        suggest("gpt2-60b", global_batch=1, sequence=2**22)
    found = suggest(600e9, "ml.g4dn.xlarge")
    assert found.plan.verdict is Verdict.DOES_NOT_FIT
    assert "ml.g4dn.xlarge" not in {cluster.instance_type for cluster in found.clusters}


def test_a_global_batch_stays_and_larger_clusters_read_more_without_one() -> None:
    fixed = suggest("gpt2-60b", "ml.p4d.24xlarge", global_batch=480)
    assert fixed.plan.batches.global_batch == 480
    open_ = suggest("gpt2-60b", "ml.p4d.24xlarge")
    assert open_.plan.batches.global_batch == open_.plan.request.world


def test_old_gpus_are_proposed_only_when_named() -> None:
    for model in ("gpt2", 1e9, 3e9, 6e9):
        assert not {c.plan.instance.gpu for c in suggest(model).clusters if c.plan.instance} & {"K80", "V100"}
    assert suggest("gpt2", "ml.p3.2xlarge").plan.verdict is Verdict.FITS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gpu_memory_bytes": 2**34}, "give instance_type too"),
        ({"optimizer": "adams"}, "use one of adam"),
        ({"instance_count": 0}, "instance_count is 0"),
        ({"processes_per_host": 99}, "has 8 GPUs"),
    ],
)
def test_wrong_arguments_are_told_and_not_searched_around(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        suggest("gpt2", **arguments)


def test_more_samples_never_fit_on_less() -> None:
    sizes = [suggest("gpt2-xl", "ml.g5.12xlarge", global_batch=samples).instance_count for samples in (16, 64, 256)]
    assert all(few <= many for few, many in pairwise(sizes))


def test_where_one_sequence_does_not_fit_ranks_share_it_out() -> None:
    long = ModelShape(16, 4096, 32, 32_000, 524_288, learned_positions=False, gated=True, biases=False)
    found = suggest(long, "ml.p5.48xlarge", 1)
    assert found.plan.verdict is Verdict.FITS
    degree = found.parameters["context_parallel_degree"]
    assert degree > 1
    assert found.parameters["microbatches"] == found.batch == degree  # one sample at a time
    assert found.plan.batches.global_batch == 8
    without = [each for each in found.tried if "context" not in each.what]
    assert all(not each.plan.verdict.feasible for each in without)
    given = {"ddp": True, "bf16": True, "sharded_data_parallel_degree": 8}
    changes = plan(long, "ml.p5.48xlarge", 1, given, activation_checkpointing="each").changes
    assert any("context_parallel_degree" in change.what for change in changes)


def test_a_short_sequence_stays_whole() -> None:
    found = suggest("gpt-neox-20b", "ml.p4d.24xlarge", 1)
    assert "context_parallel_degree" not in found.parameters


def test_a_search_refuses_settings_that_share_sequences_out() -> None:
    given = {"ddp": True, "context_parallel_degree": 2}
    with pytest.raises(ConfigError, match="context_parallel_degree is 2, and a search"):
        suggest("gpt2", "ml.p4d.24xlarge", 1, prefer="fastest", parameters=given, budget=1.0)


@pytest.mark.parametrize(
    "script",
    [
        {"engine": "fsdp2", "compiled": True, "activation_checkpointing": "each"},
        {"engine": "fsdp2", "sequence": 128},
        {
            "engine": "fsdp2",
            "compiled": True,
            "float8": True,
            "async_tensor": True,
            "activation_checkpointing": "selective",
        },
        {"rates": FITTED, "float8": True},
        {"activation_checkpointing": "selective"},
    ],
    ids=["fsdp2", "short sequences", "fsdp2 with float8", "rates", "selective"],
)
def test_no_plan_is_faster_than_the_bounds_of_a_search_say(script: dict[str, Any]) -> None:
    """For every configuration of two hosts, and for each of its beginnings, whatever the time of kernels follows from."""
    script = dict(script)
    given = {
        "sequence": script.pop("sequence", 4096),
        "processes_per_host": None,
        "gpu_memory_bytes": None,
        "environment": None,
    }
    request = request_for(
        "llama-3.2-1b", "ml.p5.48xlarge", 2, {"ddp": True, "bf16": True}, workload={"batch": 1, **script}, **given
    )
    region = region_of(request, 32, offloads=False)
    judged, nearest = 0, 0.0
    for at in islice(region.space.all(), 0, None, 23):
        seconds = region.evaluate(at).seconds
        if seconds is None:
            continue
        judged += 1
        for level in range(len(LEVELS) + 1):
            begun = dataclasses.replace(at, **dict.fromkeys(LEVELS[level:]))
            bound = least_seconds(region.needs, region.space, region.card, begun)
            assert bound <= seconds * (1 + 1e-9), f"{bound / seconds:.3f}: {begun}"
        nearest = max(nearest, bound / seconds)
    assert judged > 50
    # The bounds say something, too.
    assert nearest > 0.3
