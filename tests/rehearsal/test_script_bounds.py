"""What a script needs at least, from two rehearsals of one GPU: no configuration is below it, and few are rehearsed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from support.ranks.chains import makespan

from smp_config import ModelParallelParameters
from smp_config.schedules import in_flight_counts
from smp_estimator.planning.batches import layers_of_stage
from smp_estimator.planning.search.bounds import least_bytes, least_seconds
from smp_estimator.planning.search.planned import configuration_of_settings
from smp_estimator.rehearsal.least_work import Alone
from smp_estimator.rehearsal.result import Rehearsed
from smp_estimator.rehearsal.search import ScriptSuggestion, suggest_for_script
from smp_records.rate_card import RateCard
from smp_records.rehearsal import KindReport, MemoryOverTime, ModuleWork, Rehearsal, RehearsalRequest

if TYPE_CHECKING:
    from smp_estimator.planning.search.space import Configuration

CARD = RateCard.of_instance("ml.g5.12xlarge")


@dataclass(frozen=True)
class Kernel:
    """One of a layer's: operations and bytes of activations of a sample, bytes of weights."""

    flops: float
    moved: float
    weights: float

    def seconds(self, samples: float) -> float:
        return CARD.seconds_of_work(self.flops * samples, self.weights + self.moved * samples, "float32")


@dataclass
class Script:
    """Stands for a script of unequal layers: its rehearsals are simulated kernel by kernel, of stages that hold even shares."""

    layers: list[list[Kernel]]
    kept: list[float]  # bytes of a sample, by layer
    memory: int
    hosts: int
    per_host: int
    samples: int
    checkpoints: bool
    asked: list[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def drawn(cls, seed: int) -> Script:
        draw = random.Random(seed)
        count = draw.choice((4, 5, 6, 8))
        layers, kept = [], []
        for _ in range(count):
            weights = draw.choice((4e6, 2e7, 1e8))
            samples = draw.choice((64, 512, 2048))
            width = math.sqrt(weights / 4)
            matrix = Kernel(2 * samples * weights / 4, 8 * samples * width, weights)
            layers.append([matrix, *(Kernel(0.0, 8 * samples * width, 0.0) for _ in range(draw.randrange(1, 5)))])
            kept.append(draw.uniform(2, 12) * samples * width * 4)
        hosts, per_host = draw.choice(((1, 2), (2, 2), (1, 4), (2, 4), (2, 3)))
        state = 4 * sum(layer[0].weights for layer in layers)
        return cls(
            layers=layers,
            kept=kept,
            memory=round(state * draw.choice((0.3, 0.8, 2.0)) + sum(kept) * draw.choice((0.5, 4.0))),
            hosts=hosts,
            per_host=per_host,
            samples=hosts * per_host * draw.choice((2, 4, 6)),
            checkpoints=draw.random() < 0.3,
        )

    def __call__(self, script: Any, arguments: Sequence[str], **given: Any) -> Rehearsed:
        parameters: Mapping[str, Any] = given["parameters"]
        self.asked.append(parameters)
        settings = ModelParallelParameters.from_mp_parameters(dict(parameters))
        world = given["instance_count"] * given["processes_per_host"]
        at = configuration_of_settings(settings, "again" if self.checkpoints else "kept")
        kind = self._kind(at, int(arguments[1]), world, given["processes_per_host"])
        request = RehearsalRequest(hosts=given["instance_count"], ranks_per_host=given["processes_per_host"], folder="")
        rehearsal = Rehearsal(request=request, mp_parameters=dict(parameters), kinds=[kind], seconds=1.0)
        return Rehearsed(rehearsal, given["gpu_memory_bytes"])

    def _kind(self, at: Configuration, batch: int, world: int, per_host: int) -> KindReport:
        stages, count = at.pipeline or 1, at.microbatches or 1
        parts = [layers_of_stage(len(self.layers), stages, stage) for stage in range(stages)]
        samples = batch / count
        forward, weights, backward = [], [], []
        for part in parts:
            once = sum(kernel.seconds(samples) for layer in part for kernel in self.layers[layer])
            forward.append(once)
            weights.append(once)
            backward.append(2 * once + (once if self.checkpoints else 0.0))
        schedule = at.schedule or "interleaved"
        apart = tuple(weights) if schedule == "zero_bubble" else None
        across = world > per_host
        passed = (
            max(self.kept) / 20 * samples
        )  # small beside the work, as the planner's order would follow it otherwise
        latency = CARD.seconds_of_message(passed, same_host=not across) if stages > 1 else 0.0
        seconds = makespan(tuple(forward), tuple(backward), count, at.active or 1, latency, apart, schedule)
        replicas = world // stages
        later, peaks = 0.0, []
        flying = in_flight_counts(schedule, stages, count, at.active or 1)
        for stage, part in enumerate(parts):
            owned = sum(self.layers[layer][0].weights for layer in part)
            shards = at.sharded if at.sharded > 1 else 1
            updated = owned / (replicas if at.state == "optimizer" else shards)
            sums = self._sums(at, owned, replicas, per_host, stages)
            update = 5 * updated / (CARD.memory_part * CARD.memory_bytes_per_second)
            later = max(later, max(0.0, sums - backward[stage]) + update)
            kept = sum(self.kept[layer] for layer in part) * samples
            held = owned / shards + 2 * updated + (owned / shards if at.sharded == 1 else 0)
            peaks.append(held + (0.1 if at.memory == "offloaded" else 1.0) * flying[stage] * kept)
        alone = sum(layer[0].weights for layer in self.layers)
        rows = [
            ModuleWork(
                module=f"layers.{number}.{at_kernel}",
                phase=phase,
                dtype="float32",
                calls=times,
                flops=times * kernel.flops * batch,
                bytes=round(times * (kernel.weights + kernel.moved * batch)),
                seconds=1.0,
            )
            for number, layer in enumerate(self.layers)
            for at_kernel, kernel in enumerate(layer)
            for phase, times in (("forward", 1), ("backward", 3 if self.checkpoints else 2))
        ]
        update_row = ModuleWork(
            module="", phase="update", dtype="float32", calls=9, flops=0, bytes=round(5 * alone), seconds=1
        )
        return KindReport(
            stage=0, rank=0, stands_for=world, parameters=round(alone / 4), steps=3, peak_bytes=round(max(peaks)),
            peak_phase="backward", peak_module="layers.0", peak_line="", resident_bytes=0, first_step_peak_bytes=0,
            classes={"parameter": round(alone), "optimizer state": round(2 * alone)}, holders=[],
            curve=MemoryOverTime(seconds=[], owners={}), collectives=[], links=[], work=[*rows, update_row],
            step_seconds=seconds + later, pipeline_seconds=seconds if stages > 1 else None, pipeline_idle={0: 0.0},
        )  # fmt: skip

    def _sums(self, at: Configuration, owned: float, replicas: int, per_host: int, stages: int) -> float:
        hosts = max(1, min(self.hosts, replicas * stages // per_host))
        if at.sharded > 1:
            inside = CARD.seconds_of_collective("all_gather", owned, at.sharded, min(hosts, at.sharded))
            copies = replicas // at.sharded
            return 3 * (at.microbatches or 1) * inside + CARD.seconds_of_collective(
                "all_reduce", owned / at.sharded, copies, 1
            )
        if at.state == "optimizer":
            scattered = CARD.seconds_of_collective("reduce_scatter", owned, replicas, hosts)
            return scattered + CARD.seconds_of_collective("all_gather", owned, replicas, hosts)
        return CARD.seconds_of_collective("all_reduce", owned, replicas, hosts)

    def suggested(self) -> ScriptSuggestion:
        return suggest_for_script(
            "train.py",
            ["--batch", "{batch}"],
            instance_type="ml.g5.12xlarge",
            instance_count=self.hosts,
            processes_per_host=self.per_host,
            global_batch=self.samples,
            gpu_memory_bytes=self.memory,
            run=self,
        )

    def every(self, found: ScriptSuggestion) -> Iterator[tuple[Configuration, Rehearsed]]:
        for at in found.space.all():
            yield (
                at,
                self(
                    "train.py",
                    ["--batch", str(found.space.batch(at))],
                    instance_count=self.hosts,
                    processes_per_host=self.per_host,
                    parameters={"ddp": True, **at.settings()},
                    gpu_memory_bytes=self.memory,
                ),
            )


def compared(seed: int) -> tuple[int, int]:
    """Configurations that there are, and those that were rehearsed; what is found is right, or this raises."""
    script = Script.drawn(seed)
    found = script.suggested()
    asked = len(script.asked)
    batch = max(1, script.samples // (script.hosts * script.per_host))
    given = {"instance_count": 1, "processes_per_host": 1, "parameters": {"ddp": True}, "gpu_memory_bytes": None}
    one, other = (script("", ["--batch", str(size)], **given).rehearsal.kinds[0] for size in (batch, 2 * batch))
    card = RateCard.of_instance("ml.g5.12xlarge", processes_per_host=script.per_host)
    needs = Alone((batch, 2 * batch), (one, other)).needs(card)
    best, count = math.inf, 0
    for at, rehearsed in script.every(found):
        count += 1
        kind = rehearsed.rehearsal.kinds[0]
        assert least_seconds(needs, found.space, card, at) <= kind.step_seconds * (1 + 1e-6), f"seed {seed}: {at}"
        assert least_bytes(needs, found.space, at) <= kind.peak_bytes + 1, f"seed {seed}: {at}"
        if rehearsed.verdict.feasible and (rehearsed.fraction or 0) <= 0.85:
            best = min(best, kind.step_seconds)
    worth = math.inf if found.best is None else found.best.worth
    assert worth == best or worth <= 1.02 * best, f"seed {seed}: {worth} s, and brute force finds {best} s"
    return count, asked


@pytest.mark.parametrize("seed", [6, 15])
def test_scripts_against_brute_force(seed: int) -> None:
    every, asked = compared(seed)
    assert asked < 0.25 * every


@pytest.mark.full
def test_scripts_against_brute_force_on_thirty() -> None:
    counts = [compared(seed) for seed in range(30)]
    every, asked = (sum(numbers) for numbers in zip(*counts, strict=True))
    print(f"30 scripts: {asked} of {every} configurations rehearsed; by script {counts}")
    assert asked < 0.15 * every
