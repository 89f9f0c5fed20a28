"""The search against brute force: small jobs, simulated configuration by configuration, and plans of whole spaces."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.ranks.chains import makespan, segments

from smp_config import ConfigError, Group
from smp_config.schedules import in_flight_counts
from smp_estimator.planning.batches import idle_fraction, layers_of_stage
from smp_estimator.planning.request import Request, request_for
from smp_estimator.planning.search.bounds import Needs
from smp_estimator.planning.search.branch_and_bound import (
    Evaluated,
    Search,
    SearchRegion,
    computes_no_less,
    keeps_no_less,
)
from smp_estimator.planning.search.planned import region_of, search_plans
from smp_estimator.planning.search.space import LEVELS, Configuration, Space
from smp_records.rate_card import Link, RateCard
from smp_runtime.pipeline.schedule import planner
from smp_runtime.pipeline.schedule.policies import policy_named

#: A small cluster: 100 GB/s between the GPUs of a host, 4 GB/s for each between hosts.
CARD = RateCard(
    name="small",
    flops_per_second={"float32": 1e13},
    memory_bytes_per_second=1e12,
    inside=Link(bytes_per_second=100e9, latency=5e-6),
    between=Link(bytes_per_second=4e9, latency=20e-6),
    host=Link(bytes_per_second=20e9, latency=5e-6),
)


@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
@pytest.mark.parametrize(
    ("stages", "microbatches"),
    [(2, 4), (4, 7), *(pytest.param(p, m, marks=pytest.mark.full) for p in (2, 3, 4, 6) for m in (1, 7, 12))],
)
def test_the_closed_form_of_idle_time_is_what_the_runtime_plans(stages: int, microbatches: int, schedule: str) -> None:
    """Stages of equal time, and any number of microbatches in flight, more or fewer than stages."""
    chain = list(segments([1.0] * stages, [2.0] * stages, microbatches))
    for active in range(1, microbatches + 1):
        made = planner.plan(chain, policy=policy_named(schedule), active=active)
        closed = 3.0 * microbatches / (1 - idle_fraction(stages, microbatches, schedule, active))
        assert made.makespan == pytest.approx(closed, rel=0.02), active


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("stages", "microbatches"),
    [(2, 4), (4, 4), *(pytest.param(p, m, marks=pytest.mark.full) for p in (2, 3, 4, 6) for m in (1, 2, 7, 12))],
)
def test_the_closed_form_of_zero_bubble_is_what_the_runtime_plans(stages: int, microbatches: int, again: bool) -> None:
    """Forward, gradients of inputs and of weights of equal time, and where forward is computed again."""
    ones = [1.0] * stages
    whole = 4.0 if again else 3.0
    chain = list(segments(ones, [whole - 1] * stages, microbatches, ones))
    for active in range(1, microbatches + 1):
        made = planner.plan(chain, policy=policy_named("zero_bubble"), active=active)
        closed = whole * microbatches / (1 - idle_fraction(stages, microbatches, "zero_bubble", active, again=again))
        # The planner needs two more than there are stages; a last wave that is not whole takes a little less.
        near = active > stages or microbatches % active == 0
        if active != stages + 1:
            assert made.makespan == pytest.approx(closed, rel=0.02 if near else 0.08), active
        assert made.makespan >= 0.92 * closed, active


# -- a job of unequal layers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Layers with seconds of a sample forward, elements and bytes that they keep of a sample, on a cluster."""

    seconds: list[float]
    elements: list[int]
    kept: list[int]
    hidden: int
    launch: float
    device: int
    space: Space
    asked: list[Configuration] = field(default_factory=list)

    @classmethod
    def drawn(cls, seed: int) -> Job:
        draw = random.Random(seed)
        layers = draw.choice((4, 5, 6, 8, 9))
        elements = [draw.randrange(20, 60) * 10**6 for _ in range(layers)]
        hidden = draw.choice((4, 16, 40)) * 10**6
        world, per_host = draw.choice(((2, 2), (4, 2), (4, 4), (8, 4), (6, 3), (8, 2)))
        state = 16 * sum(elements)
        return cls(
            seconds=[draw.uniform(1e-3, 4e-3) for _ in range(layers)],
            elements=elements,
            kept=[draw.randrange(6, 18) * hidden for _ in range(layers)],
            hidden=hidden,
            launch=draw.choice((1e-5, 3e-4)),
            device=round(state * draw.choice((0.25, 0.6, 1.2, 2.0)) / draw.choice((1.0, math.sqrt(world)))),
            space=Space(
                world=world,
                per_host=per_host,
                samples=world * draw.choice((2, 4, 6)),
                layers=layers,
                heads=draw.choice((0, 4, 12)),
            ),
        )

    def needs(self) -> Needs:
        forward, layers = sum(self.seconds), len(self.seconds)
        return Needs(
            forward=forward,
            backward=2 * forward,
            again=forward,
            launches=3 * layers * self.launch,
            elements=sum(self.elements),
            kept_bytes=8,
            updated_bytes=8,
            layers=layers,
            layer_elements=layers * min(self.elements),
            tensor_bytes=4 * layers * self.hidden,
            tensor_bytes_again=2 * layers * self.hidden,
        )

    def evaluate(self, at: Configuration) -> Evaluated:
        self.asked.append(at)
        stages, tensor = at.pipeline or 1, at.tensor or 1
        parts = [layers_of_stage(len(self.seconds), stages, stage) for stage in range(stages)]
        count = at.microbatches or 1
        samples = self.space.batch(at) / count
        tensor_ring, data_ring = self.space.ring(at, Group.TP), self.space.ring(at, Group.RDP)
        summed = 2 * CARD.seconds_of_collective("all_reduce", samples * self.hidden, tensor, tensor_ring[1])
        forward, backward, weights = [], [], []
        for part in parts:
            once = sum(samples * self.seconds[layer] / tensor + self.launch + summed for layer in part)
            inputs = samples * self.hidden * len(part)
            copies = max(0.0, CARD.seconds_of_copy(inputs) - once) if at.memory == "offloaded" else 0.0
            forward.append(once + copies)
            weights.append(once - summed * len(part))
            backward.append(2 * once - summed * len(part) + (once if at.recomputes else 0.0) + copies)
        across = self.space.ring(at, Group.PP)[1] > 1
        latency = CARD.seconds_of_message(samples * self.hidden / tensor, same_host=not across) if stages > 1 else 0.0
        schedule = at.schedule or "interleaved"
        apart = tuple(weights) if schedule == "zero_bubble" else None
        seconds = makespan(tuple(forward), tuple(backward), count, at.active or 1, latency, apart, schedule)
        exposed, peaks = 0.0, []
        flying = in_flight_counts(schedule, stages, count, at.active or 1)
        for stage, part in enumerate(parts):
            elements = sum(self.elements[layer] for layer in part) / tensor
            exposed = max(exposed, self._data(at, elements, data_ring) - 0.5 * count * backward[stage])
            peaks.append(self._held(at, elements) + flying[stage] * samples * self._kept(at, part) / tensor)
        peak = round(max(peaks))
        fits = peak <= self.device
        return Evaluated(seconds + max(0.0, exposed), peak, fits, "" if fits else f"{peak} of {self.device} bytes")

    def _data(self, at: Configuration, elements: float, ring: tuple[int, int]) -> float:
        replicas = self.space.replicas(at)
        if at.sharded == 1:
            return CARD.seconds_of_collective("all_reduce", 4 * elements, replicas, ring[1])
        shards = self.space.ring(at, Group.SHARD)[1]
        # Every microbatch gathers twice and sums once.
        inside = 3 * (at.microbatches or 1) * CARD.seconds_of_collective("all_gather", 4 * elements, at.sharded, shards)
        copies = self.space.ring(at, Group.REPLICA)[1]
        part = 4 * elements / at.sharded
        return inside + CARD.seconds_of_collective("all_reduce", part, replicas // at.sharded, copies)

    def _held(self, at: Configuration, elements: float) -> float:
        if at.sharded > 1:
            return 16 * elements / at.sharded + 4 * min(elements, 2 * max(self.elements))
        return elements * (8 + 8 / (self.space.replicas(at) if at.state == "optimizer" else 1))

    def _kept(self, at: Configuration, part: range) -> float:
        if at.memory == "kept":
            return sum(self.kept[layer] for layer in part)
        return max(self.kept[layer] for layer in part) + (0 if at.memory == "offloaded" else self.hidden * len(part))

    def region(self) -> SearchRegion:
        return SearchRegion(self.space, self.needs(), CARD, self.evaluate, self.device)


def compared(seed: int) -> tuple[int, int]:
    """Configurations that there are, and those that the search evaluated; it is right, or this raises."""
    job = Job.drawn(seed)
    region = job.region()
    every = list(job.space.all())
    evaluated = [(job.evaluate(at), at) for at in every]
    for found, at in evaluated:
        bound = region.bound(at)
        assert found.seconds is not None
        # The simulator counts whole nanoseconds.
        assert bound == math.inf or bound <= found.seconds * (1 + 1e-6), f"seed {seed}: the bound of {at} is too high"
        assert not (found.fits and bound == math.inf), f"seed {seed}: {at} fits, and its bound says that it cannot"
    best = min((found.seconds or math.inf for found, _ in evaluated if found.fits), default=math.inf)
    job.asked.clear()
    result = Search([region], gap=0.01).run()
    assert len(job.asked) == len(set(job.asked)) == len(result.judged)
    assert result.is_proven == (best < math.inf) or result.possible_gain <= 0.01
    worth = math.inf if result.best is None else result.best.worth
    assert worth == best or worth <= 1.02 * best, f"seed {seed}: {worth} s, and brute force finds {best} s"
    return len(every), len(job.asked)


@pytest.mark.parametrize("seed", [3, 8, 20])
def test_against_brute_force(seed: int) -> None:
    every, asked = compared(seed)
    assert asked < 0.5 * every


@pytest.mark.full
def test_against_brute_force_on_thirty_jobs() -> None:
    counts = [compared(seed) for seed in range(30)]
    every, asked = (sum(numbers) for numbers in zip(*counts, strict=True))
    print(f"30 jobs: {asked} of {every} configurations evaluated; by job {counts}")
    assert asked < 0.2 * every


def test_a_budget_ends_the_search_and_says_what_might_be_missed() -> None:
    """A clock that moves a second with each evaluation: after five nothing more is asked for."""
    job = Job.drawn(20)
    now = [0.0]

    def slow(at: Configuration) -> Evaluated:
        now[0] += 1.0
        return job.evaluate(at)

    region = SearchRegion(job.space, job.needs(), CARD, slow, job.device)
    whole = Search([job.region()]).run()
    cut = Search([region], budget=5, clock=lambda: now[0]).run()
    assert len(cut.judged) == 5 < len(whole.judged)
    assert not cut.is_proven
    assert whole.best is not None
    assert cut.bound <= whole.best.worth
    if cut.best is not None:
        assert cut.best.worth * (1 - cut.possible_gain) <= whole.best.worth
    for wrong in ({"budget": 0}, {"gap": 1.0}):
        with pytest.raises(ConfigError, match="give"):
            Search([region], **wrong)  # type: ignore[arg-type]


def test_two_clusters_are_compared_by_their_price() -> None:
    """The second is half as fast, and a third of the price: time chooses one, price the other."""
    job = Job.drawn(20)

    def halved(at: Configuration) -> Evaluated:
        found = job.evaluate(at)
        return Evaluated(2 * (found.seconds or 0), found.peak_bytes, found.fits)

    def named(weights: tuple[float, float]) -> str:
        fast = SearchRegion(job.space, job.needs(), CARD, job.evaluate, job.device, weights[0], "fast")
        slow = SearchRegion(job.space, job.needs(), CARD, halved, job.device, weights[1], "slow")
        best = Search([slow, fast]).run().best
        assert best is not None
        return best.region.name

    assert named((1.0, 1.0)) == "fast"
    assert named((3.0, 1.0)) == "slow"


def test_the_single_change_that_helps_most() -> None:
    """Of all neighbours in one level, by brute force."""
    job = Job.drawn(20)
    search = Search([job.region()])
    start = Configuration(1, 1, "whole", "again", 1, "interleaved", 1, "DPT")
    before = search.judge(start)
    changes = list(search.changes(start))
    neighbours = {name: math.inf for name, _ in job.space.neighbours(start)}
    for name, other in job.space.neighbours(start):
        found = job.evaluate(other)
        if found.fits:
            neighbours[name] = min(neighbours[name], found.seconds or math.inf)
    assert changes
    assert all(judged.evaluated.fits and judged.worth < before.worth for _, judged in changes)
    name, best = changes[0]
    assert best.worth == min(neighbours.values()) < before.worth
    assert best.worth == neighbours[name]
    assert sum(getattr(best.configuration, level) != getattr(start, level) for level in LEVELS) >= 1


def test_a_second_question_knows_the_answers_to_the_first() -> None:
    """Nothing is evaluated twice, and what changes have shown counts where the budget has ended."""
    job = Job.drawn(20)
    now = [0.0]
    search = Search([job.region()], budget=1, clock=lambda: now[0])
    start = Configuration(1, 1, "whole", "again", 1, "interleaved", 1, "DPT")
    changes = list(search.changes(start))
    now[0] = 2.0
    asked = len(job.asked)
    best = search.run().best
    assert best is not None
    assert best.worth == min(judged.worth for _, judged in changes)
    now[0] = 0.0
    assert search.run().is_proven
    assert len(job.asked) == len(set(job.asked)) > asked


def test_what_makes_settings_fit_is_the_change_that_helps() -> None:
    """Faster settings that do not fit either are no help."""
    job = Job.drawn(20)
    too_large = [at for at in job.space.all() if not job.evaluate(at).fits and at.memory == "kept"]
    start = max(too_large, key=lambda at: at.effort)  # simpler ones that do not fit either are beside it
    changes = list(Search([job.region()]).changes(start))
    assert changes
    assert all(judged.evaluated.fits for _, judged in changes)
    fitting = {name for name, other in job.space.neighbours(start) if job.evaluate(other).fits}
    assert {name for name, _ in changes} <= fitting


def test_what_one_configuration_says_of_others() -> None:
    """Over all pairs: what keeps no less needs no less memory, and what computes no less takes no less time."""
    pairs = [0, 0]
    for seed in (8, 19):
        job = Job.drawn(seed)
        found = {at: job.evaluate(at) for at in job.space.all()}
        for (one, first), (other, second) in itertools.permutations(found.items(), 2):
            if (one.pipeline, one.tensor) != (other.pipeline, other.tensor):
                continue
            if keeps_no_less(one, other):
                pairs[0] += 1
                assert (first.peak_bytes or 0) >= 0.99 * (second.peak_bytes or 0), (one, other)
            if computes_no_less(one, other):
                pairs[1] += 1
                assert (first.seconds or 0) >= 0.99 * (second.seconds or 0), (one, other)
    assert min(pairs) > 300


def test_a_good_one_that_is_known_hides_no_better_one() -> None:
    """It begins with a configuration that fits and saves memory; the best one keeps more, and is found."""
    job = Job.drawn(20)
    alone = Search([job.region()]).run().best
    assert alone is not None
    best = alone.configuration
    saving = next(
        at
        for at in job.space.all()
        if (at.pipeline, at.tensor) == (best.pipeline, best.tensor)
        and keeps_no_less(best, at)
        and job.evaluate(at).fits
        and (job.evaluate(at).seconds or 0) > 1.05 * alone.worth
    )
    known = Search([job.region()]).run([saving])
    assert known.judged[0].configuration == saving
    assert known.best is not None
    assert known.best.configuration == best


def test_nothing_fits_and_that_is_proven() -> None:
    job = Job.drawn(3)
    region = SearchRegion(job.space, job.needs(), CARD, lambda at: Evaluated(1.0, 10**15, False, "too large"), None)
    none = Search([region]).run()
    assert none.best is None
    assert none.nearest is not None
    small = SearchRegion(job.space, job.needs(), CARD, job.evaluate, 1000.0)
    found = Search([small]).run()
    assert (found.best, found.judged, found.is_proven) == (None, (), True)  # the bounds of memory were enough


# -- plans ---------------------------------------------------------------------------------------------------


def request(model: Any, kind: str, count: int, **workload: Any) -> Request:
    parameters = {
        "ddp": True,
        workload.pop("precision", "bf16"): True,
        "pipeline": workload.pop("schedule", "interleaved"),
    }
    return request_for(
        model,
        kind,
        count,
        parameters,
        sequence=workload.pop("sequence", None),
        processes_per_host=None,
        gpu_memory_bytes=None,
        environment=None,
        workload={"batch": 1, **workload},
    )


@pytest.mark.parametrize(
    ("model", "kind", "count", "samples", "workload"),
    [
        ("gpt2-xl", "ml.g5.12xlarge", 2, 64, {"accumulation": 2}),
        ("gpt2-xl", "ml.g5.12xlarge", 1, 32, {"schedule": "zero_bubble"}),
        pytest.param("gpt2-xl", "ml.g5.12xlarge", 2, 48, {"schedule": "simple"}, marks=pytest.mark.full),
        pytest.param("gpt2-xl", "ml.g5.12xlarge", 3, 96, {}, marks=pytest.mark.full),
        pytest.param("gpt-neox-20b", "ml.p4d.24xlarge", 2, 64, {}, marks=pytest.mark.full),
        pytest.param("gpt2", "ml.p4d.24xlarge", 2, 64, {"precision": "fp16"}, marks=pytest.mark.full),
    ],
)
def test_plans_of_a_whole_space(model: str, kind: str, count: int, samples: int, workload: dict[str, Any]) -> None:
    """No plan beats its bound, and the search finds the best one."""
    made = request(model, kind, count, **workload)
    region = region_of(made, samples, offloads=False)
    best = math.inf
    for at in region.space.all():
        found, bound = region.evaluate(at), region.bound(at)
        if found.seconds is not None:
            assert bound == math.inf or bound <= found.seconds * (1 + 1e-9), at
        assert not (found.fits and bound == math.inf), at
        if found.fits:
            best = min(best, found.seconds or math.inf)
    searched = search_plans(made, samples).found
    assert searched.best is not None
    assert searched.best.worth <= 1.005 * best
    assert len(searched.judged) < 100
