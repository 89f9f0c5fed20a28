"""Work and bytes become seconds: against values computed by hand, and against the plan, which asks the same card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smp_config import ConfigError
from smp_config.machine.instances import instances
from smp_estimator.planning import plan
from smp_records.rate_card import COLLECTIVE_KINDS, Link, RateCard, sent_bytes
from smp_records.timeline import RankTimeline, StepTimeline, StoredAction

#: Round figures: 100 GFLOP/s reached, 10 GB/s of memory, 1 GB/s and 1 ms inside a host, 0.1 GB/s and 10 ms for each GPU beyond.
ROUND = RateCard(
    name="round",
    gpus_per_host=4,
    flops_per_second={"float32": 200e9, "bfloat16": 400e9},
    matrix_part=0.5,
    memory_bytes_per_second=20e9,
    memory_part=0.5,
    launch_seconds=1e-3,
    inside=Link(bytes_per_second=1e9, latency=1e-3),
    between=Link(bytes_per_second=0.1e9, latency=10e-3),
    host=Link(bytes_per_second=2e9, latency=1e-3),
)


def test_work_takes_the_longer_of_operations_and_memory() -> None:
    assert ROUND.seconds_of_work(100e9, 1e9, "float32") == pytest.approx(1.001)
    assert ROUND.seconds_of_work(100e9, 20e9, "float32") == pytest.approx(2.001)
    assert ROUND.seconds_of_work(0, 0, "float32") == 1e-3
    half = [ROUND.seconds_of_work(100e9, 0, name) for name in ("bfloat16", "torch.bfloat16", "bf16")]
    assert half == [pytest.approx(0.501)] * 3
    # A type without units of its own, and one that no unit is for.
    assert ROUND.seconds_of_work(100e9, 0, "fp16") == ROUND.seconds_of_work(100e9, 0, "int64") == pytest.approx(1.001)


@pytest.mark.parametrize(
    ("kind", "ranks", "hosts", "seconds"),
    [
        # One host: (n − 1)/n of the bytes by its link, n − 1 steps; a sum over all twice.
        ("all_gather", 4, 1, 0.75 + 3e-3),
        ("reduce_scatter", 4, 1, 0.75 + 3e-3),
        ("all_reduce", 4, 1, 1.5 + 6e-3),
        ("broadcast", 4, 1, 1.0 + 3e-3),
        ("reduce", 4, 1, 1.0 + 3e-3),
        ("all_to_all", 4, 1, 0.75 + 1e-3),
        ("gather", 4, 1, 0.75 + 1e-3),
        ("barrier", 4, 1, 6e-3),
        # Two hosts of 4: a ring leaves each by the shares of all four, in 6 steps inside and 1 between.
        ("all_gather", 8, 2, 0.875 / 0.4 + 6e-3 + 10e-3),
        # Its latency is that of a tree: 3 steps inside and 1 between, there and back.
        ("all_reduce", 8, 2, 1.75 / 0.4 + 2 * (3e-3 + 10e-3)),
        # Half of what a rank has leaves its host, by its own share.
        ("all_to_all", 8, 2, 0.5 / 0.1 + 10e-3),
        # One rank on each host: no link inside has a part in it.
        ("all_gather", 8, 8, 0.875 / 0.1 + 70e-3),
        ("all_reduce", 8, 8, 1.75 / 0.1 + 2 * 30e-3),
        ("barrier", 8, 8, 60e-3),
        ("all_reduce", 1, 1, 0.0),
    ],
)
def test_collectives_by_hand(kind: str, ranks: int, hosts: int, seconds: float) -> None:
    """Of 10⁹ bytes, which the link inside carries in a second, and a GPU's share of the network in ten."""
    assert ROUND.seconds_of_collective(kind, 1e9, ranks, hosts) == pytest.approx(seconds)


def test_an_exchange_takes_as_long_as_its_bytes_on_the_busier_link() -> None:
    """A rank sends a seventh to each of the others; between two hosts of 4 ranks, four of them."""
    assert ROUND.seconds_of_exchange(0.7e9, 8, 1) == pytest.approx(0.7 + 1e-3)
    assert ROUND.seconds_of_exchange(0.7e9, 8, 2) == pytest.approx(0.4 / 0.1 + 10e-3)
    assert ROUND.seconds_of_exchange(1e9, 1, 1) == 0.0


def test_a_ring_never_takes_longer_for_more_of_its_ranks_on_a_host() -> None:
    for kind in COLLECTIVE_KINDS:
        times = [ROUND.seconds_of_collective(kind, 1e9, 8, hosts) for hosts in (2, 4, 8)]
        assert times == sorted(times), kind


def test_messages_and_copies() -> None:
    assert ROUND.seconds_of_message(1e9, same_host=True) == pytest.approx(1.001)
    assert ROUND.seconds_of_message(1e9, same_host=False) == pytest.approx(10.01)
    assert ROUND.seconds_of_copy(1e9) == pytest.approx(0.501)


def test_what_is_sent_is_what_nobody_can_do_with_fewer_of() -> None:
    sent = {kind: sent_bytes(kind, 4, 100) for kind in COLLECTIVE_KINDS}
    assert sent == {
        "all_reduce": 150, "all_gather": 75, "reduce_scatter": 75, "all_to_all": 75, "broadcast": 100, "reduce": 100,
        "gather": 75, "scatter": 75, "barrier": 0,
    }  # fmt: skip
    assert not any(sent_bytes(kind, 1, 100) for kind in COLLECTIVE_KINDS)


def test_a_card_of_an_instance_has_the_figures_of_the_catalogues() -> None:
    card = RateCard.of_instance("ml.p4d.24xlarge")
    assert card.flops_per_second == {"float32": 19.5e12, "float16": 312e12, "bfloat16": 312e12}
    assert card.memory_bytes_per_second == 1555e9
    assert card.device_bytes == 40 * 2**30
    assert card.inside is not None
    assert card.between is not None
    assert (card.inside.bytes_per_second, card.between.bytes_per_second) == (300e9, 400e9 / 8 / 8)
    assert card.host.bytes_per_second == 31.5e9
    assert card.usd_per_hour == 21.957642
    assert RateCard.of_instance("ml.p4de.24xlarge").memory_bytes_per_second == 2039e9
    two = RateCard.of_instance("ml.p4d.24xlarge", processes_per_host=2).between
    assert two is not None
    assert two.bytes_per_second == 25e9  # the network is shared by fewer
    alone = RateCard.of_instance("ml.g5.xlarge")
    assert alone.inside is None
    # Without units for bfloat16 it takes the way over float32.
    assert RateCard.of_instance("ml.p3.2xlarge").flops_per_second["bfloat16"] == 15.7e12


def test_every_instance_has_a_card_or_says_why_not() -> None:
    without = set()
    for known in instances():
        try:
            card = RateCard.of_instance(known.name)
        except ConfigError as error:
            assert "no peak of the" in str(error)
            without.add(known.gpu)
            continue
        assert RateCard.from_json(card.to_json()) == card
        # A matrix of 8,192² takes longer for its operations than for its bytes, on any of them.
        operations, moved = 2 * 8192**3, 3 * 2 * 8192**2
        assert card.seconds_of_work(operations, moved, "fp16") > 2 * card.seconds_of_work(0, moved, "fp16"), known.name
    assert without == {"RTX PRO 4500"}


def test_a_transformer_layer_comes_to_the_part_of_the_peak_that_was_measured() -> None:
    """GPT-3's layer on A100 with tensor parallelism 8: Narayanan et al. 2021 measured 44–52 % with everything included.

    Kernels by hand, for one microbatch of 2,048 tokens, 12,288 wide, 96 heads: four matrices in forward, two of them for
    each in backward, attention's two products for each head, and elementwise work on what Korthikanti et al. 2022 keep.
    """
    card = RateCard.of_instance("ml.p4d.24xlarge")
    tokens, hidden, shards, heads = 2048, 12288, 8, 96 // 8
    seconds = operations = 0.0
    for narrow in (3 * hidden, hidden, 4 * hidden, 4 * hidden):
        each = 2 * tokens * hidden * narrow / shards
        moved = 2 * (tokens * hidden + hidden * narrow / shards + tokens * narrow / shards)
        operations += 3 * each
        seconds += 3 * card.seconds_of_work(each, moved, "float16")
    for _ in range(2):
        each = 2 * tokens * tokens * hidden / shards
        operations += 3 * each
        seconds += 3 * card.seconds_of_work(each, 2 * (2 * tokens * hidden / shards + heads * tokens**2), "float16")
    elementwise = [(6, heads * tokens**2 * 2), (6, 2 * tokens * hidden), (4, 2 * tokens * 4 * hidden / shards)]
    seconds += sum(3 * count * card.seconds_of_work(0, 2 * size, "float16") for count, size in elementwise)
    seconds += 4 * card.seconds_of_collective("all_reduce", 2 * tokens * hidden, 8, 1)
    assert 0.44 < operations / seconds / 312e12 < 0.52


def test_the_plan_and_the_card_take_the_same_seconds() -> None:
    """Bandwidth alone, since a plan counts no latency: gradients of 16 GPUs on two hosts, and of 8 on one."""
    for count in (1, 2):
        made = plan("gpt2", "ml.p4d.24xlarge", count, {"ddp": True, "bf16": True}, 8)
        assert made.time is not None
        link = {"inside": Link(bytes_per_second=300e9), "between": Link(bytes_per_second=50e9 / 8)}
        card = RateCard.of_instance("ml.p4d.24xlarge").model_copy(update=link)
        size = made.request.shape.parameters * 4
        assert made.time.data == pytest.approx(card.seconds_of_collective("all_reduce", size, 8 * count, count))


def test_a_card_of_ones_own_is_read_and_a_broken_one_refused_by_name() -> None:
    assert RateCard.from_json(ROUND.to_json()) == ROUND
    written = json.loads(ROUND.to_json())
    for change, words in (
        ({"memory_bytes_per_second": 0}, "greater than 0 at memory_bytes_per_second"),
        ({"matrix_part": 1.5}, "at matrix_part"),
        ({"memory_parts": 0.5}, "did you mean 'memory_part'"),
        ({"version": 9}, "has format 9, this package reads up to 1"),
        ({"flops_per_second": {"float32": float("nan")}}, "flops_per_second.float32"),
    ):
        with pytest.raises(ConfigError, match=words):
            RateCard.from_json(json.dumps({**written, **change}), "card.json")
    with pytest.raises(ConfigError, match=r"card\.json is no rate card"):
        RateCard.from_json("{", "card.json")


def test_what_has_no_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="'all_redcue', did you mean 'all_reduce'"):
        ROUND.seconds_of_collective("all_redcue", 1, 2, 1)
    with pytest.raises(ConfigError, match="no link between hosts"):
        ROUND.model_copy(update={"between": None}).seconds_of_message(1, same_host=False)
    with pytest.raises(ConfigError, match="not in the catalogue"):
        RateCard.of_instance("ml.p9.huge")
    with pytest.raises(ConfigError, match="AWS Neuron"):
        RateCard.of_instance("ml.trn1.32xlarge")


def test_durations_of_a_recorded_timeline_take_the_place_of_the_roofline(tmp_path: Path) -> None:
    """Two segments of a microbatch are one duration; the median of microbatches and steps; evaluations do not count."""

    def step(number: int, actions: list[StoredAction], *, failed: bool = False) -> StepTimeline:
        return StepTimeline(number=number, start=0, stop=9, actions=actions, failed=failed)

    training: list[StoredAction] = [
        (0, "F", 0, 0, 0.0, 1.0), (0, "F", 0, 0, 2.0, 3.0), (0, "F", 1, 0, 3.0, 7.0), (0, "B", 0, 1, 7.0, 7.5),
    ]  # fmt: skip
    evaluation: list[StoredAction] = [(0, "F", 0, 0, 0.0, 100.0)]
    again: list[StoredAction] = [(0, "F", 0, 0, 0.0, 3.0), (0, "B", 0, 1, 3.0, 4.0), (0, "S", 0, 2, 4.0, 4.5)]
    steps = [step(1, training), step(2, evaluation), step(3, again), step(4, training, failed=True)]
    made = RankTimeline(job="one", rank=0, stage=0, names=["any"], paths=["h.0", "h.1", ""], steps=steps)
    (tmp_path / made.file_name).write_text(made.model_dump_json())
    for place in (tmp_path, tmp_path / made.file_name):
        card = ROUND.with_measured(place)
        assert card.seconds_of_module("h.0", "forward") == 3.0
        assert card.seconds_of_module("h.1", "backward") == 0.75
        assert card.seconds_of_module("", "step") == 0.5
        assert card.seconds_of_module("h.0", "backward") is None
        assert RateCard.from_json(card.to_json()) == card
    assert {(each.path, each.count) for each in card.measured} == {("", 1), ("h.0", 3), ("h.1", 2)}
    only = made.model_copy(update={"steps": [step(2, evaluation)]})
    (tmp_path / made.file_name).write_text(only.model_dump_json())
    with pytest.raises(ConfigError, match="holds no training step that ended"):
        ROUND.with_measured(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        ROUND.with_measured(tmp_path / "gone.json")
