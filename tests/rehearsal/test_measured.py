"""A rehearsal by durations that were measured, not by stated rates."""

import re
from pathlib import Path

import pytest

from smp_config import ConfigError
from smp_estimator.rehearsal import rehearse
from smp_records.rate_card import Link, RateCard
from smp_records.timeline import RankTimeline, StepTimeline

CHAIN = Path(__file__).with_name("chain_script.py")
FORWARD, BACKWARD, MICROBATCHES = 0.020, 0.040, 8


@pytest.fixture
def card(tmp_path):
    """Rates of something that computes next to nothing by itself."""
    made = RateCard(
        name="a slow machine",
        gpus_per_host=8,
        flops_per_second={"float32": 1e15},
        memory_bytes_per_second=1e15,
        launch_seconds=1e-9,
        inside=Link(bytes_per_second=1e9, latency=0.25),
        host=Link(bytes_per_second=1e9),
    )
    path = tmp_path / "card.json"
    path.write_text(made.to_json())
    return path


def timeline(folder, paths):
    """What a process recorded in which each of these modules took its time."""
    actions = [(0, kind, 0, at, 0.0, seconds) for at in range(len(paths)) for kind, seconds in
               (("F", FORWARD), ("B", BACKWARD))]  # fmt: skip
    step = StepTimeline(number=3, start=0.0, stop=9.0, actions=actions)
    made = RankTimeline(job="one", rank=0, stage=0, names=["any"], paths=paths, steps=[step])
    path = folder / made.file_name
    path.write_text(made.model_dump_json())
    return path


def run(stages, paths, folder, card, **given):
    degrees = {"pipeline_parallel_degree": stages} if stages > 1 else {}
    return rehearse(
        CHAIN,
        instance_type="local",
        processes_per_host=given.pop("processes", stages),
        parameters={
            "microbatches": MICROBATCHES,
            "ddp": True,
            "auto_partition": False,
            "default_partition": 0,
            **degrees,
        },
        rates=card,
        measured=timeline(folder, paths),
        **given,
    )


@pytest.mark.job
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_pipeline_of_equal_stages_takes_the_time_of_its_closed_form(stages, tmp_path, card):
    found = run(stages, [f"links.{stage}" for stage in range(stages)], tmp_path, card, steps=3600)
    closed = (MICROBATCHES + stages - 1) * (FORWARD + BACKWARD)
    planned = next(kind for kind in found.rehearsal.kinds if kind.pipeline_seconds)
    assert planned.pipeline_seconds == pytest.approx(closed, rel=0.05)
    work = MICROBATCHES * (FORWARD + BACKWARD)
    assert planned.pipeline_idle == pytest.approx(dict.fromkeys(range(stages), 1 - work / closed), abs=0.05)
    evaluation = MICROBATCHES * FORWARD  # after each update; its order is not the one that is reported
    assert [kind.measured_seconds for kind in found.rehearsal.kinds] == pytest.approx([work + evaluation] * stages)
    assert found.rehearsal.step_seconds == pytest.approx(closed + evaluation, rel=0.05)
    assert re.search(r"s by measured durations \((9\d|100)%\) and the rates of a slow machine", str(found))
    # Of 8 active microbatches the planned order of 1F1B has one in flight on the last stage.
    last = found.rehearsal.kinds[-1]
    assert planned.in_flight[0] >= planned.in_flight[stages - 1]
    assert last.active_microbatches == found.rehearsal.kinds[0].active_microbatches
    for kind in found.rehearsal.kinds:
        more = kind.active_microbatches - planned.in_flight[kind.stage]
        assert found.rehearsal.most_bytes(kind) == kind.peak_bytes + more * kind.microbatch_bytes
        # Input and output of tanh are kept for backward: two times four numbers.
        assert kind.microbatch_bytes >= 2 * 4 * 4
        # All tensors are small, so they share segments of 2 MiB.
        assert kind.reserved_bytes % 2**21 == 0
        assert kind.reserved_bytes >= kind.peak_bytes
    assert "by PyTorch's allocator" in str(found)


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(120)
def test_a_timeline_of_another_model_is_refused_and_collectives_go_by_the_card(tmp_path, card):
    with pytest.raises(ConfigError, match=r"none of the 2 durations in .* \(they are of 'layers.0', …\)"):
        run(1, ["layers.0"], tmp_path, card)
    found = run(1, ["links.0"], tmp_path, card, processes=2)
    (kind,) = found.rehearsal.kinds
    assert kind.measured_seconds == pytest.approx(MICROBATCHES * (2 * FORWARD + BACKWARD))
    # An all-reduce of two ranks waits twice for the link's latency, and they follow one another.
    waited = 2 * 0.25 * sum(row.calls for row in kind.collectives if row.step == 2)
    assert waited >= 2 * 0.25
    assert waited <= kind.step_seconds <= waited + kind.measured_seconds + 0.01


def test_files_that_cannot_be_read_are_refused_before_anything_runs(tmp_path, card):
    with pytest.raises(ConfigError, match=r"gone\.json cannot be read"):
        rehearse(CHAIN, rates=tmp_path / "gone.json")
    with pytest.raises(ConfigError, match=r"timeline does not exist"):
        rehearse(CHAIN, measured=tmp_path / "timeline")
    with pytest.raises(ConfigError, match=r"holds no timeline-rank"):
        rehearse(CHAIN, measured=tmp_path)
    with pytest.raises(ConfigError, match=r"not in the catalogue.*write a rate card of your own"):
        rehearse(CHAIN, instance_type="local", processes_per_host=2, measured=tmp_path)
    (tmp_path / "card.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"card\.json is no rate card"):
        rehearse(CHAIN, rates=tmp_path / "card.json")
