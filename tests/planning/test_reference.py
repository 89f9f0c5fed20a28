"""The published reference configurations: every one is feasible as it stands, and smaller degrees show the growth."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import published
import pytest

from smp_estimator.planning import Kind, Plan, Verdict, plan
from smp_estimator.planning.search.planned import search_plans

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-it-works" / "planning.md"

#: Name, model, instances, sequence, parameters, batch, published global batch (None where the page gives none).
ROWS: list[tuple[str, str, int, int, dict[str, Any], int, int | None]] = [
    ("10B", "gpt2-10b", 16, 512, {"tensor_parallel_degree": 4, "shard_optimizer_state": True}, 40, None),
    ("30B", "gpt2-30b", 16, 512, {"tensor_parallel_degree": 8, "shard_optimizer_state": True}, 32, None),
    (
        "60B",
        "gpt2-60b",
        32,
        512,
        {
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": 8,
            "shard_optimizer_state": True,
            "microbatches": 4,
            "active_microbatches": 2,
        },
        56,
        None,
    ),
    ("NeoX-20B, 2 nodes", "gpt-neox-20b", 2, 2048, {"sharded_data_parallel_degree": 16}, 4, 64),
    ("NeoX-20B, 8 nodes", "gpt-neox-20b", 8, 2048, {"sharded_data_parallel_degree": 32}, 12, 768),
    (
        "65B, seq 2048",
        "gpt-neox-65b",
        64,
        2048,
        {"sharded_data_parallel_degree": 16, "tensor_parallel_degree": 8, "offload_activations": True},
        8,
        512,
    ),
    (
        "65B, seq 4096",
        "gpt-neox-65b",
        64,
        4096,
        {"sharded_data_parallel_degree": 64, "tensor_parallel_degree": 2, "offload_activations": True},
        2,
        512,
    ),
]
IDS = [row[0] for row in ROWS]


def planned(row: tuple[Any, ...], **workload: Any) -> Plan:
    _, model, count, sequence, parameters, batch, _ = row
    prescaled = {"prescaled_batch": True} if "tensor_parallel_degree" in parameters else {}
    return plan(
        model,
        "ml.p4d.24xlarge",
        count,
        {"ddp": True, "fp16": True, **prescaled, **parameters},
        batch,
        sequence=sequence,
        **{"activation_checkpointing": "each", "fused_attention": True, **workload},
    )


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_is_feasible(row: tuple[Any, ...]) -> None:
    made = planned(row)
    assert made.verdict.feasible, str(made)
    assert made.fraction is not None
    assert made.fraction < 1


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_global_batch_is_the_published_one(row: tuple[Any, ...]) -> None:
    if row[-1] is not None:
        assert planned(row).batches.global_batch == row[-1]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_state_is_sixteen_bytes_per_parameter(row: tuple[Any, ...]) -> None:
    """Over all GPUs of one copy of the state; what is replicated (small tensors, 4 bytes without sharding) is on top."""
    made = planned(row)
    parameters, count = made.request.parameters, made.request.shape.parameters
    model_parallel = parameters.pipeline_parallel_degree * parameters.tensor_parallel_degree
    if parameters.shard_optimizer_state:
        # 12 of the optimizer, and 2 of the reduced gradients that a rank updates with.
        expected = count / model_parallel * (4 + 14 / made.topology.rdp_size)
    else:
        expected = 16 * count / model_parallel / parameters.sharded_data_parallel_degree
    mean = sum(stage.state for stage in made.stages) / len(made.stages)
    assert expected * 0.995 < mean < expected * 1.10


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_half_of_a_degree_needs_more(row: tuple[Any, ...]) -> None:
    made = planned(row)
    for name in ("tensor_parallel_degree", "sharded_data_parallel_degree", "pipeline_parallel_degree"):
        degree = getattr(made.request.parameters, name)
        if degree > 1:
            settings = {name: degree // 2}
            if name == "pipeline_parallel_degree":
                settings["partitions"] = degree // 2
            smaller = made.changed(settings)
            assert smaller.worst.state > 1.3 * made.worst.state, name
            assert smaller.total_bytes > made.total_bytes, name


@pytest.mark.parametrize(
    ("number", "settings"),
    [
        (0, {"tensor_parallel_degree": 1, "prescaled_batch": False}),
        (1, {"tensor_parallel_degree": 2}),
        (2, {"pipeline_parallel_degree": 1, "partitions": 1, "tensor_parallel_degree": 4}),
        (3, {"sharded_data_parallel_degree": 8}),
        (4, {"sharded_data_parallel_degree": 8}),
        (5, {"sharded_data_parallel_degree": 2}),
        (6, {"sharded_data_parallel_degree": 8}),
    ],
)
def test_degrees_that_are_too_small_do_not_fit(number: int, settings: dict[str, Any]) -> None:
    assert planned(ROWS[number]).changed(settings).verdict is Verdict.DOES_NOT_FIT


#: The largest batch that is possible by the plan: with logits in half precision, and with a loss in fp32.
LARGEST = {
    "10B": (137, 87),
    "30B": (120, 76),
    "60B": (288, 192),
    "NeoX-20B, 2 nodes": (11, 8),
    "NeoX-20B, 8 nodes": (16, 12),
    "65B, seq 2048": (97, 90),
    "65B, seq 4096": (29, 19),
}


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_the_largest_batch_of_each_row(row: tuple[Any, ...]) -> None:
    """With a loss in fp32, the batch of 12 on eight nodes is the largest; the others' tables end before their memory does."""
    step = row[4].get("microbatches", 1)
    peaks: dict[int, list[str]] = {row[5]: [], row[5] + step: []}
    missed = []
    for most, in_fp32 in zip(LARGEST[row[0]], (False, True), strict=True):
        assert most >= row[5]
        assert planned((*row[:5], most, None), fp32_loss=in_fp32).verdict.feasible
        assert not planned((*row[:5], most + step, None), fp32_loss=in_fp32).verdict.feasible
        rest = []
        for batch, shown in peaks.items():
            made = planned((*row[:5], batch, None), fp32_loss=in_fp32)
            assert made.request.gpu_memory_bytes is not None
            rest.append((made.request.gpu_memory_bytes - made.total_bytes) / 1e9)
            shown.append(f"{made.total_bytes / 1e9:.1f}")
        missed.append(f"{rest[1]:.1f} to {rest[0]:.1f}")
    cells = [row[0], *(cell for batch, each in peaks.items() for cell in (str(batch), ", ".join(each)))]
    cells += ["; ".join(missed), *map(str, LARGEST[row[0]])]
    assert f"| {' | '.join(cells)} |" in DOCUMENT.read_text(encoding="utf-8")


def test_without_checkpointing_the_larger_batches_do_not_fit() -> None:
    for number in (3, 4):
        assert planned(ROWS[number], activation_checkpointing=None).verdict is Verdict.DOES_NOT_FIT


def test_downsizing_with_sharded_optimizer_state() -> None:
    """The warning of the best practices: what fits on many GPUs does not fit on few, through the optimizer state alone."""
    made = planned(ROWS[1])
    by_count = {smaller.instance_count: smaller for smaller in made.smaller_clusters}
    assert list(by_count) == [8, 4, 2, 1]
    optimizer = [made.worst.kinds[Kind.OPTIMIZER]] + [
        smaller.plan.worst.kinds[Kind.OPTIMIZER] for smaller in by_count.values() if smaller.plan
    ]
    for before, after in pairwise(optimizer):
        assert after == pytest.approx(2 * before, rel=0.02)
    assert by_count[8].plan is not None
    assert by_count[8].plan.verdict.feasible
    assert by_count[1].plan is not None
    assert by_count[1].plan.verdict is Verdict.DOES_NOT_FIT
    assert "the state no longer fits" in str(by_count[1])
    assert "spread over fewer GPUs" in str(by_count[1])


def test_downsizing_says_when_the_state_itself_no_longer_fits() -> None:
    said = {smaller.instance_count: str(smaller) for smaller in planned(ROWS[4]).smaller_clusters}
    assert "no longer fits" not in said[4]
    assert "sharded_data_parallel_degree lowered from 32 to 16" in said[2]
    assert "sharded_data_parallel_degree lowered from 32 to 8" in said[1]
    assert "does not fit" in said[1]
    state = next(s.plan for s in planned(ROWS[4]).smaller_clusters if s.instance_count == 1)
    assert state is not None
    assert state.worst.state == pytest.approx(16 * 20_554_567_680 / 8, rel=0.01)


def test_the_document_shows_the_plans_of_published_measurements() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    shown = list(published.table())
    assert len(shown) == 2 + 22
    later = (published.table(published.LATER), published.table(published.ASYNCHRONOUS))
    for lines in (shown, *later, published.table_of_ratios(), published.table_of_others()):
        assert "\n".join(lines) in text, "python benchmarks/published.py prints another table"


def test_the_search_for_published_jobs_finds_what_all_plans_have() -> None:
    """For row 2 without stages of several pieces: the fastest of 90 plans is what the search for a cluster finds with fewer."""
    row = published.ROWS[1]
    best, count = published.proposal(row, limit=0.85, contexts=(1,), pieces=(1,))
    request = row.planned().request.changed({"sharded_data_parallel_degree": 1})
    found = search_plans(request, row.samples, budget=60)
    assert found.plan is not None
    assert found.plan.time is not None
    assert found.plan.time.tokens_per_second / row.gpus == pytest.approx(best.speed(), rel=0.005)
    assert len(found.found.judged) < count
    # The table of the document has the best with more memory, and it is not slower.
    text = DOCUMENT.read_text(encoding="utf-8")
    assert list(published.table_of_proposals([2, 10]))[2] in text


def test_other_published_results_are_planned_where_their_settings_are_known() -> None:
    assert all(0.95 <= each <= 1 for each in published.weak_scaling())
    beside = published.model_flops(async_tensor=True)
    assert 0.41 < min(beside) < max(beside) < 0.50
    # A plan knows no latency of large groups, so it does not see why small ones are faster.
    assert all(each < 1 for each in published.sharding_gains())


@pytest.mark.parametrize("row", published.ROWS, ids=lambda row: str(row.number))
def test_published_measurements_are_planned_with_their_settings(row: published.Row) -> None:
    made = row.planned()
    # Ranks that share sequences out, tensors or stages read the same samples.
    readers = row.gpus // (row.tensor * row.pipeline * row.context)
    assert made.batches.global_batch == readers * row.batch
    assert made.batches.tokens == readers * row.batch * row.sequence
    assert made.topology.world_size == row.gpus
    assert made.request.parameters.sharded_data_parallel_degree == row.sharded


def test_rates_are_fitted_on_seven_rows_and_tested_on_the_others() -> None:
    assert published.FITTED == (2, 6, 11, 13, 15, 19, 21)
    assert published.TESTED == (1, 3, 4, 5, 7, 8, 9, 10, 12, 14, 16, 17, 18, 20, 22)


def test_time_that_others_measured_is_planned_within_its_uncertainty() -> None:
    rows = [row for row in published.ROWS if row.number in published.TESTED]
    error = {row.number: row.speed() / row.tokens - 1 for row in rows}
    assert {number for number, each in error.items() if abs(each) > 0.15} == {9, 10}
    for row in rows:
        time = row.planned().time
        assert time is not None
        assert time.uncertainty is not None
        assert abs(error[row.number]) <= time.uncertainty, row.number
    assert "± 14%" in str(rows[0].planned())
    # Ratios inside a table: compiled, interleaved, context parallelism between hosts; not asynchronous products.
    outside = {name for name, wanted, planned in published.ratios() if abs(planned / wanted - 1) > 0.07}
    of_async = {"70B: asynchronous tp ÷ tp", "8B in 2025, float8: asynchronous tp ÷ tp"}
    assert outside == {*of_async, "8B: cp 2 ÷ cp 1", "8B: cp 8 ÷ cp 1"}


def test_rows_that_were_found_later_are_within_the_uncertainty_that_is_said() -> None:
    """405B on 128 H100 without stages is a test of which nothing was known; the rates are of H100, and A100 reach more."""
    errors = {}
    for row in published.LATER:
        time = row.planned().time
        assert time is not None
        assert time.uncertainty == (0.25 if row.gpu == "A100" else 0.26 if "async" in row.precision else 0.14)
        errors[row.number] = row.speed() / row.tokens - 1
        assert abs(errors[row.number]) <= time.uncertainty
    assert all(abs(errors[number]) < 0.08 for number in (28, 29, 30))
    assert all(errors[number] < -0.15 for number in (31, 32))


def test_asynchronous_products_are_planned_within_the_uncertainty_that_is_said() -> None:
    errors = {}
    for row in published.ASYNCHRONOUS:
        time = row.planned().time
        assert time is not None
        assert time.uncertainty == (0.26 if "async" in row.precision else 0.14)
        errors[row.number] = row.speed() / row.tokens - 1
        assert abs(errors[row.number]) <= time.uncertainty, row.number
    # The job of rows 11 and 12 was published again, with another gain.
    assert all(abs(errors[number]) < 0.05 for number in (33, 34, 35))
    assert errors[38] > 0.2


def test_the_fit_leads_to_the_rates_of_the_plan() -> None:
    rates, clock = published.fit()
    assert clock == pytest.approx(published.CLOCK_AT_500_W, rel=0.01)
    for name in ("matrix", "matrix_float8", "attention"):
        assert getattr(rates, name) == pytest.approx(getattr(published.FITTED_RATES, name), rel=0.01)


def test_memory_that_others_measured_is_planned_within_ten_percent() -> None:
    ratios = {row.number: row.planned().total_bytes / 2**30 / row.gib for row in published.ROWS if row.gib is not None}
    assert len(ratios) == 20
    outside = {number for number, ratio in ratios.items() if abs(ratio - 1) > 0.1}
    assert outside == {11}
    assert all(abs(ratio - 1) < 0.13 for ratio in ratios.values())
    assert statistics.median(abs(ratio - 1) for ratio in ratios.values()) <= 0.04
    impossible = [row.number for row in published.ROWS if not row.planned().verdict.feasible]
    assert impossible == []


def test_the_document_shows_these_numbers() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for row in ROWS:
        made = planned(row)
        assert made.fraction is not None
        shown = f"| {made.total_bytes / 1e9:.1f} | {made.fraction:.0%} | {made.verdict.value} |"
        line = next((line for line in text.splitlines() if line.startswith(f"| {row[0]} |")), "")
        assert line.endswith(shown), f"{DOCUMENT} should end the row of {row[0]} with {shown}, has {line!r}"


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_the_document_shows_how_smaller_degrees_grow(row: tuple[Any, ...]) -> None:
    names = {
        "tp": "tensor_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "sharding": "sharded_data_parallel_degree",
    }
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"| of {row[0]} |"))
    shown = re.findall(r"(tp|pp|sharding) (\d+): ([\d.]+) \(([a-z ]+)\)", line)
    assert len(shown) >= 2
    for kind, degree, size, verdict in shown:
        settings: dict[str, Any] = {names[kind]: int(degree)}
        if kind == "pp":
            settings["partitions"] = int(degree)
        if settings == {"tensor_parallel_degree": 1}:
            settings["prescaled_batch"] = False
        made = planned(row).changed(settings)
        assert (size, verdict) == (f"{made.total_bytes / 1e9:.1f}", made.verdict.value), (kind, degree)


def test_the_document_shows_the_30b_model_on_fewer_instances() -> None:
    sizes = [f"{smaller.plan.total_bytes / 1e9:.1f}" for smaller in planned(ROWS[1]).smaller_clusters if smaller.plan]
    shown = f"30B with tensor parallelism 8 needs {', '.join(sizes[:-1])} and {sizes[-1]} GB per GPU on 8, 4, 2 and 1"
    assert shown in " ".join(DOCUMENT.read_text(encoding="utf-8").split())


@pytest.mark.full
def test_fsdp2_itself_reserves_what_a_plan_says() -> None:
    """Two layers of a Llama on eight ranks, by FSDP2's own code and the model of PyTorch's allocator, without memory."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"intermediate_size": 14_336, "vocab_size": 128_256, "max_position_embeddings": 8192}
    how: dict[str, Any] = {
        "engine": "fsdp2",
        "activation_checkpointing": "selective",
        "optimizer": "adamw",
        "dropout": False,
    }
    made = plan(
        {"model_type": "llama", "tie_word_embeddings": False, **sizes},
        "ml.p5.48xlarge",
        1,
        {"ddp": True, "bf16": True, "sharded_data_parallel_degree": 8},
        2,
        sequence=8192,
        **how,
    )
    script = Path(__file__).parents[2] / "benchmarks" / "rehearsal" / "rehearsed_fsdp2.py"
    found = subprocess.run(
        [sys.executable, str(script), "8", "2"], check=True, capture_output=True, text=True, timeout=300
    )
    reserved = float(found.stdout.split()[-1])
    assert reserved == pytest.approx(made.total_bytes / 2**30, rel=0.03)
