"""What a step's timeline, memory and links come to in numbers and in pictures, for light and dark pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from smp_config import ConfigError
from smp_estimator.figures.matplotlib_figure import DARK, LIGHT, Theme
from smp_estimator.figures.svg import COLOURS
from smp_estimator.timeline import JobTimeline
from smp_estimator.timeline.links import LinkTraffic, format_bytes, link_table, save_link_picture
from smp_estimator.timeline.memory import MemoryCurve, _shortened, save_memory_picture
from smp_estimator.timeline.throughput import Throughput, seconds_per_step
from smp_estimator.timeline.views import save_picture
from smp_records.timeline import RankTimeline, StepTimeline


def share(picture: Path, colour: str, tolerance: float = 0.06) -> float:
    """Part of a picture's dots that are of a colour, nearly."""
    from matplotlib.image import imread

    pixels = imread(picture)[..., :3]
    wanted = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return float((abs(pixels - wanted).max(axis=-1) < tolerance).mean())


def job(begins: tuple[float, ...] = (0.0, 1.5, 2.5, 4.1), stages: int = 2) -> JobTimeline:
    """Two stages that take turns: 0.2 s forward each, 0.2 s backward each, so each waits half of 0.8 s."""
    ranks = []
    for stage in range(stages):
        steps = [
            StepTimeline(
                number=number,
                start=begin,
                stop=begin + 0.9 + stage * 0.05,
                actions=[
                    (0, "F", 0, 0, begin + 0.2 * stage, begin + 0.2 * stage + 0.2),
                    (0, "B", 0, 0, begin + 0.4 + 0.2 * (1 - stage), begin + 0.4 + 0.2 * (1 - stage) + 0.2),
                ],
            )
            for number, begin in enumerate(begins)
        ]
        ranks.append(RankTimeline(job="j", rank=stage, stage=stage, names=["h"], paths=["h"], steps=steps))
    return JobTimeline.of([(rank.file_name, rank) for rank in ranks])


# -- throughput ----------------------------------------------------------------------------------------------


def test_a_step_is_as_long_as_from_one_begin_to_the_next() -> None:
    """1.5, 1.0 and 1.6 seconds lie between the begins; the update is between the calls."""
    assert seconds_per_step(job()) == pytest.approx(1.5)
    assert seconds_per_step(job((7.0,))) == pytest.approx(0.95)  # the call of the slower rank


def test_throughput_hours_and_price_by_hand() -> None:
    made = Throughput.of(job(), 96, sequence=1000, instance_count=2, usd_per_hour=36.5)
    assert made.makespan == pytest.approx(0.8)
    assert made.idle == pytest.approx(0.5)
    assert made.samples_per_second == pytest.approx(64)
    assert made.tokens_per_second == pytest.approx(64_000)
    assert made.cost is not None
    assert made.cost.usd_per_step == pytest.approx(2 * 36.5 * 1.5 / 3600)
    training = made.training(steps=2400)
    assert training.seconds == pytest.approx(3600)
    assert training.usd == pytest.approx(73)
    assert training.epochs is None
    # 1,000 samples are ten steps of 96 and 40 left over.
    assert made.training(epochs=3, samples=1000).steps == 30
    assert made.training(steps=5, samples=1000).epochs == 0.5
    assert made.to_dict()["usd_per_step"] == made.cost.usd_per_step
    assert made.lines() == [
        "1.5 s per step, 0.8 of them in the pipeline, of which ranks wait 50.0%",
        "64 samples per second, 64,000 tokens per second",
        "0.0304 USD per step, 0.317 per million tokens: 2 × 36.5 USD per hour",
    ]
    pictures = Throughput.of(job(), 96)
    assert (pictures.tokens_per_second, pictures.cost, pictures.training(steps=1).usd) == (None, None, None)


def test_what_says_nothing_about_a_training_is_refused() -> None:
    made = Throughput.of(job(), 96)
    for given, words in (
        ({}, "give one of the two"),
        ({"steps": 3, "epochs": 2}, "give one of the two"),
        ({"epochs": 2}, "how many samples"),
        ({"epochs": 2, "samples": 95}, "fewer than the 96"),
    ):
        with pytest.raises(ConfigError, match=words):
            made.training(**given)  # type: ignore[arg-type]
    forward = StepTimeline(number=1, start=0, stop=1, actions=[(0, "F", 0, 0, 0.0, 1.0)])
    rank = RankTimeline(job="j", rank=0, stage=0, names=["h"], paths=["h"], steps=[forward])
    with pytest.raises(ConfigError, match="no training step"):
        Throughput.of(JobTimeline.of([("a", rank)]), 1)


# -- memory --------------------------------------------------------------------------------------------------

GB = 10**9


def curve(device: int | None = 10 * GB) -> MemoryCurve:
    """2 GB of parameters all the time, activations of 4 GB at the middle."""
    return MemoryCurve(
        "stage 1, rank 8",
        [0.0, 0.1, 0.2, 0.3],
        {"activation": [0, 2 * GB, 4 * GB, 0], "parameter": [2 * GB] * 4, "a cache": [0, 0, 0, GB]},
        device,
        "h.3, forward",
        [(0.0, 0.2, "forward"), (0.2, 0.4, "backward")],
    )


def test_the_peak_and_who_holds_it() -> None:
    made = curve()
    assert made.peak == (0.2, 6 * GB)
    assert made.at_peak == {"parameter": 2 * GB, "activation": 4 * GB, "a cache": 0}
    assert list(made.at_peak) == ["parameter", "activation", "a cache"]  # what stays lies below
    assert [curve(size).fits for size in (None, 6 * GB, 6 * GB - 1)] == [None, True, False]


def test_a_long_curve_keeps_its_peak() -> None:
    many = 12_345
    held = [1000 + at % 7 for at in range(many)]
    held[7777] = 5000
    made = MemoryCurve("rank 0", [at * 1e-3 for at in range(many)], {"activation": held}).thinned(500)
    assert len(made.seconds) <= 500
    assert made.peak == (7.777, 5000)


def test_curves_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 times and 1 sizes of activation"):
        MemoryCurve("r", [0.0, 1.0], {"activation": [1]})
    with pytest.raises(ConfigError, match="not ascending"):
        MemoryCurve("r", [1.0, 0.0], {"activation": [1, 2]})
    with pytest.raises(ConfigError, match="nothing to draw"):
        MemoryCurve("r", [], {"activation": []})
    with pytest.raises(ConfigError, match="no rank was given"):
        save_memory_picture([], tmp_path / "m.png")
    with pytest.raises(ConfigError, match=r"use \.png, \.svg or \.pdf"):
        save_memory_picture([curve()], tmp_path / "m.docx")


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_pictures_have_what_they_are_of(tmp_path: Path, theme: Theme) -> None:
    """By the colours of the dots: owners in the parts of the area that they have, and the theme's page around them."""
    memory = save_memory_picture([curve()], tmp_path / "memory.png", theme)
    assert share(memory, theme.background) > 0.4
    parameter, activation = (share(memory, COLOURS[at], 0.2) for at in (0, 1))
    # 2 GB for four parts of the time, and 2 + 4 GB for one each; a colour lies 90 % over the page.
    assert activation / parameter == pytest.approx(6 / 8, rel=0.15)
    does_not_fit = save_memory_picture([curve(5 * GB)], tmp_path / "small.png", theme)
    assert share(does_not_fit, theme.warning) > 1.5 * share(memory, theme.warning)
    links = [
        LinkTraffic("stage 0", "stage 1", 4_000_000, 8, "activations", same_host=False),
        LinkTraffic("stage 1", "stage 0", 1_000_000, 8, "gradients"),
    ]
    drawn = save_link_picture(links, tmp_path / "links.png", theme)
    assert share(drawn, COLOURS[0]) > 0.02
    assert share(drawn, theme.warning) > 0.001  # the frame of what goes between hosts
    inside = save_link_picture(links[1:], tmp_path / "inside.png", theme)
    assert share(inside, theme.warning) == 0
    step = save_picture(job().step(), tmp_path / "step.png", theme)
    assert share(step, theme.background) > 0.3
    assert share(step, {LIGHT: DARK, DARK: LIGHT}[theme].background) < 0.05


def test_vectors_are_written_too(tmp_path: Path) -> None:
    curves = [curve()] * 9
    assert "<svg" in save_memory_picture(curves, tmp_path / "m.svg").read_text()
    links = [LinkTraffic(f"host {at}", f"host {(at + 1) % 40}", 1000 + at, 1, "", same_host=False) for at in range(40)]
    assert "<svg" in save_link_picture(links, tmp_path / "l.svg").read_text()


# -- links ---------------------------------------------------------------------------------------------------


def test_the_table_of_links_begins_with_the_most(tmp_path: Path) -> None:
    links = [
        LinkTraffic("stage 0", "stage 1", 1_500_000, 3, "activations"),
        LinkTraffic("stage 1", "stage 1", 3 * GB, 12, "all_reduce", same_host=False),
    ]
    console = Console(width=120, record=True, file=(tmp_path / "said").open("w"))
    console.print(link_table(links))
    said = console.export_text()
    assert said.index("3 GB") < said.index("1.5 MB")
    assert ["250 MB" in said, "500 kB" in said, "between hosts" in said] == [True] * 3
    assert [format_bytes(size) for size in (0, 999, 1000, 12_340_000_000_000)] == ["0 B", "999 B", "1 kB", "12.3 TB"]


def test_who_sends_nothing_has_no_row(tmp_path: Path) -> None:
    from matplotlib.image import imread

    links = [
        LinkTraffic(f"stage {at}", to, 10**9, 1) for at in (0, 1) for to in ("dp", "shard", "tp", f"stage {1 - at}")
    ]
    height, width = imread(save_link_picture(links, tmp_path / "l.png")).shape[:2]
    assert width > 1.7 * height  # two rows of five columns, with their names below


def test_of_a_long_path_the_end_is_drawn() -> None:
    path = "backward " + ".".join(f"module{at}" for at in range(20))
    assert len(_shortened(path)) == 80
    assert _shortened(path).startswith("backward module0.")
    assert _shortened(path).endswith(".module18.module19")
    assert _shortened("backward blocks.1") == "backward blocks.1"


def test_links_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no bytes per link to draw"):
        save_link_picture([LinkTraffic("a", "b", 0, 0)], tmp_path / "l.png")
    many = [LinkTraffic(f"rank {at}", f"rank {at + 1}", 1, 1) for at in range(300)]
    with pytest.raises(ConfigError, match="301 ends"):
        save_link_picture(many, tmp_path / "l.png")
