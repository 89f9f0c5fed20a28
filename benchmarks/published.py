"""Measurements that others published on real GPUs, beside the plans of the same jobs.

``python benchmarks/published.py`` writes the tables in docs/how-it-works/planning.md. With ``fit`` it fits the rates of kernels on
the rows that :data:`FITTED` names, with ``search`` it looks for faster configurations of each row (minutes). No constant of the
memory was fitted.

T is pytorch/torchtitan, ``benchmarks/``, commit b5bcd76c6: hosts of 8 H100 of 96 GB with 500 W, 400 Gbit/s per GPU between hosts.
Tokens per second are per GPU. The memory is what PyTorch had reserved at its peak on the fullest GPU, in GiB.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_estimator.planning import ModelShape, Plan, named_shape, plan
from smp_estimator.planning.rates.fitted import CLOCK_AT_500_W
from smp_estimator.planning.rates.fitted import FITTED as FITTED_RATES

if TYPE_CHECKING:
    from smp_estimator.planning.rates.kernel_rates import KernelRates

GIB = 2**30

#: Instances with the GPUs of the rows. An A100 of the published hosts has 80 GB too; their network is assumed.
_INSTANCES = {"H100": "ml.p5.48xlarge", "H200": "ml.p5en.48xlarge", "A100": "ml.p4de.24xlarge"}

_T_8B = "T llama3_h100_202412"
_T_H200 = "T llama3-8b_h200_202506"


@dataclass(frozen=True)
class Row:
    """Settings, memory and speed of a published job.

    Attributes:
        sharded: ranks over which parameters, gradients and optimizer state are sharded, those of context parallelism among them.
        batch: samples per data parallel rank.
        checkpointing: ``"each"``, ``"selective"``: some operations of each layer are computed again, or ``"none"``.
        tokens: per second and GPU.
        gib: reserved; None if it was not published.
        microbatches: of a batch; None: one, or as many as stages.
    """

    number: int
    model: str
    gpus: int
    sharded: int
    sequence: int
    batch: int
    precision: str
    checkpointing: str
    tokens: float
    gib: float | None
    source: str
    tensor: int = 1
    pipeline: int = 1
    pieces: int = 1
    context: int = 1
    gpu: str = "H100"
    microbatches: int | None = None

    def parameters(self) -> dict[str, Any]:
        """Return ``mp_parameters`` with the degrees of the job."""
        given: dict[str, Any] = {"ddp": True, "bf16": True, "sharded_data_parallel_degree": self.sharded}
        if self.microbatches is not None:
            given |= {"microbatches": self.microbatches}
        if self.tensor > 1:
            given |= {"tensor_parallel_degree": self.tensor, "prescaled_batch": True}
        if self.pipeline > 1:
            # Their default is as many microbatches as stages.
            count = self.microbatches or self.pipeline
            given |= {
                "pipeline_parallel_degree": self.pipeline,
                "microbatches": count,
                "active_microbatches": min(count, self.pipeline * self.pieces),
            }
        if self.pieces > 1:
            given["virtual_stages"] = self.pieces
        if self.context > 1:
            given["context_parallel_degree"] = self.context
        return given

    def planned(self, rates: KernelRates = FITTED_RATES, clock: float = CLOCK_AT_500_W) -> Plan:
        """Return the plan of this job.

        Args:
            clock: part of an H100's clock at 500 W.
        """
        is_h100 = self.gpu == "H100"
        if is_h100:
            rates = rates.slowed(clock, memory=2400 / 3350)
        return plan(
            named_shape(self.model),
            _INSTANCES[self.gpu],
            self.gpus // 8,
            self.parameters(),
            self.batch,
            sequence=self.sequence,
            gpu_memory_bytes=96 * 10**9 if is_h100 else None,
            activation_checkpointing=None if self.checkpointing == "none" else self.checkpointing,
            dropout=False,
            fp32_loss=True,
            optimizer="adamw",
            engine="fsdp2",
            compiled="compiled" in self.precision,
            float8="float8" in self.precision,
            async_tensor="async" in self.precision,
            rates=rates,
            # It was switched off in 2024, and on in 2025.
            compiled_loss="compiled" in self.precision and not self.source.startswith(_T_8B),
        )

    @property
    def samples(self) -> int:
        """Return the samples of a step."""
        return self.batch * self.gpus // (self.tensor * self.pipeline * self.context)

    def speed(self, rates: KernelRates = FITTED_RATES, clock: float = CLOCK_AT_500_W) -> float:
        """Return the planned tokens per second and GPU."""
        time = self.planned(rates, clock).time
        assert time is not None, self.number
        return time.tokens_per_second / self.gpus

    @property
    def parallelism(self) -> str:
        """Return the degrees in words."""
        words = [f"sharded {self.sharded}"]
        for name, degree in (("tp", self.tensor), ("pp", self.pipeline), ("cp", self.context)):
            words += [f"{name} {degree}"] if degree > 1 else []
        return ", ".join(words) + (", interleaved" if self.pieces > 1 else "")


def _8b(number: int, gpus: int, precision: str, tokens: float, gib: float, table: int) -> Row:
    source = f"{_T_8B}, table {table}"
    return Row(number, "llama-3.1-8b", gpus, gpus, 8192, 2, precision, "selective", tokens, gib, source)


def _long_8b(number: int, context: int, tokens: float, gib: float) -> Row:
    sequence, source = 32_768 * context, f"{_T_8B}, table 2"
    return Row(
        number, "llama-3.1-8b", 8, 8, sequence, 1, "float8, compiled", "each", tokens, gib, source, context=context
    )


def _405b(
    number: int, sequence: int, batch: int, tokens: float, gib: float, table: int, context: int = 1, pieces: int = 1
) -> Row:
    source = f"{_T_8B}, table {table}"
    precision = "float8, compiled, async tp"
    given = ("llama-3.1-405b", 512, 8, sequence, batch, precision, "each", tokens, gib, source)
    return Row(number, *given, tensor=8, pipeline=8, context=context, pieces=pieces)


_COMPILED, _FLOAT8 = "bf16, compiled", "float8, compiled"

ROWS = [
    _8b(1, 8, "bf16", 5762, 82.4, 1),
    _8b(2, 8, _COMPILED, 6667, 77.0, 1),
    _8b(3, 8, _FLOAT8, 8532, 76.8, 1),
    _8b(4, 128, "bf16", 5605, 67.0, 3),
    _8b(5, 128, _COMPILED, 6514, 62.0, 3),
    _8b(6, 128, _FLOAT8, 8380, 61.8, 3),
    _long_8b(7, 1, 3890, 83.9),
    _long_8b(8, 2, 2540, 84.2),
    _long_8b(9, 4, 1071, 84.0),
    _long_8b(10, 8, 548, 84.5),
    Row(11, "llama-3.1-70b", 256, 32, 8192, 16, _FLOAT8, "each", 829, 71.9, f"{_T_8B}, table 4", 8),
    Row(12, "llama-3.1-70b", 256, 32, 8192, 16, f"{_FLOAT8}, async tp", "each", 876, 67.6, f"{_T_8B}, table 4", 8),
    _405b(13, 8192, 32, 100, 82.5, 5),
    _405b(14, 8192, 32, 128, 72.7, 5, pieces=2),
    _405b(15, 32_768, 8, 76, 75.3, 6),
    _405b(16, 65_536, 8, 47, 75.9, 6, context=2),
    _405b(17, 131_072, 8, 31, 77.1, 6, context=4),
    _405b(18, 262_144, 8, 16, 84.9, 6, context=8),
    Row(19, "llama-3-70b", 256, 32, 8192, 16, _COMPILED, "each", 597, None, "T asyncTP 2025-06", 8),
    Row(20, "llama-3-8b", 64, 8, 8192, 12, _COMPILED, "selective", 4378, None, "T asyncTP 2025-06", 8),
    Row(21, "llama-3.1-8b", 32, 32, 8192, 2, _FLOAT8, "selective", 10_938, 48.0, _T_H200, gpu="H200"),
    Row(22, "llama-3.1-8b", 64, 64, 8192, 2, _FLOAT8, "selective", 10_753, 47.0, _T_H200, gpu="H200"),
]

_T_2024 = "T docs/performance.md of December 2024 (commit 4d88a8a44)"


def _later(number: int, precision: str, tokens: float) -> Row:
    return Row(number, "llama-3.1-405b", 128, 16, 8192, 2, precision, "each", tokens, None, _T_2024, tensor=8)


#: Rows that were found when the rates and all terms of the plan were settled, so they are a test that nothing was chosen for.
LATER = [
    _later(28, _COMPILED, 109),
    _later(29, _FLOAT8, 177),
    _later(30, f"{_FLOAT8}, async tp", 185),
    Row(31, "llama-3-8b", 64, 64, 8192, 1, "bf16", "selective", 2973, None, _T_2024, gpu="A100"),
    Row(32, "llama-3-70b", 64, 64, 8192, 1, "bf16", "each", 331, None, _T_2024, gpu="A100"),
]


def _asynchronous(number: int, base: Row, precision: str, tokens: float) -> Row:
    return dataclasses.replace(base, number=number, precision=precision, tokens=tokens)


#: The other rows of the tables of rows 19 and 20, without products that are scaled by row, whose speed their authors call low. The
#: part of messages that asynchronous products hide is assumed by row 33; nothing was chosen for the others.
ASYNCHRONOUS = [
    _asynchronous(33, ROWS[18], f"{_COMPILED}, async tp", 652.4),
    _asynchronous(34, ROWS[18], _FLOAT8, 809.8),
    _asynchronous(35, ROWS[18], f"{_FLOAT8}, async tp", 942.4),
    _asynchronous(36, ROWS[19], f"{_COMPILED}, async tp", 4809.4),
    _asynchronous(37, ROWS[19], _FLOAT8, 5078.1),
    _asynchronous(38, ROWS[19], f"{_FLOAT8}, async tp", 5570.1),
]

#: Rows on which rates of kernels may be fitted, chosen before the first fit: each model, both GPUs, and both precisions.
FITTED = (2, 6, 11, 13, 15, 19, 21)

#: Rows that test such rates. Nothing is fitted on them.
TESTED = tuple(row.number for row in ROWS if row.number not in FITTED)

COLUMNS = ["#", "model", "GPUs", "parallelism", "sequence, batch", "precision"]
COLUMNS += ["GiB: published", "planned", "ratio", "tok/s: published", "planned", "ratio"]


def table(rows: Iterable[Row] = tuple(ROWS)) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for row in rows:
        made = row.planned()
        gib, speed = made.total_bytes / GIB, row.speed()
        cells: list[Any] = [
            row.number,
            row.model,
            f"{row.gpus} {row.gpu}",
            row.parallelism,
            f"{row.sequence:,}, {row.batch}",
        ]
        published = "–" if row.gib is None else f"{row.gib}"
        ratio = "–" if row.gib is None else f"{gib / row.gib:.2f}"
        cells += [row.precision, published, f"{gib:.1f}", ratio]
        cells += [f"{row.tokens:,.0f}", f"{speed:,.0f}", f"{speed / row.tokens:.2f}"]
        yield f"| {' | '.join(map(str, cells))} |"


#: Ratios of two rows of one published table: (name, row, row that it is divided by).
_RATIOS = (
    ("8B, 8 GPUs: compiled ÷ not", 2, 1),
    ("8B, 8 GPUs: float8 ÷ bf16", 3, 2),
    ("8B, 128 GPUs: compiled ÷ not", 5, 4),
    ("70B: asynchronous tp ÷ tp", 12, 11),
    ("70B in 2025, float8: asynchronous tp ÷ tp", 35, 34),
    ("70B in 2025, bf16: asynchronous tp ÷ tp", 33, 19),
    ("8B in 2025, bf16: asynchronous tp ÷ tp", 36, 20),
    ("8B in 2025, float8: asynchronous tp ÷ tp", 38, 37),
    ("405B: interleaved ÷ 1F1B", 14, 13),
    ("405B: cp 2 ÷ cp 1", 16, 15),
    ("405B: cp 4 ÷ cp 1", 17, 15),
    ("405B: cp 8 ÷ cp 1", 18, 15),
    ("8B: cp 2 ÷ cp 1", 8, 7),
    ("8B: cp 8 ÷ cp 1", 10, 7),
)


def ratios() -> Iterator[tuple[str, float, float]]:
    """Yield ratios of speeds inside a table: the name, as published, and as planned."""
    by_number = {row.number: row for row in (*ROWS, *ASYNCHRONOUS)}
    for name, over, under in _RATIOS:
        a, b = by_number[over], by_number[under]
        yield name, a.tokens / b.tokens, a.speed() / b.speed()


def table_of_ratios() -> Iterator[str]:
    """Yield the lines of the table of ratios."""
    yield "| ratio of speeds | published | planned | planned ÷ published |"
    yield "|---|---|---|---|"
    for name, wanted, planned in ratios():
        yield f"| {name} | {wanted:.3f} | {planned:.3f} | {planned / wanted:.2f} |"


#: Part of a GPU's memory that a proposal may take by its plan. Row 18 took 95 %.
_LIMIT = 0.95


def configurations(
    row: Row, *, contexts: tuple[int, ...] = (1, 2, 4, 8), pieces: tuple[int, ...] = (1, 2)
) -> Iterator[Row]:
    """Yield all configurations of a row's GPUs with its global batch, precision and compilation."""
    layers = named_shape(row.model).layers
    degrees = [2**power for power in range(10)]
    for tensor, pipeline, context in itertools.product(degrees[:4], degrees[:5], contexts):
        replicas = row.gpus // (tensor * pipeline)
        readers = replicas // context
        if not readers or row.gpus % (tensor * pipeline) or row.samples % readers:
            continue
        batch = row.samples // readers
        least = pipeline if pipeline > 1 else 1
        counts = [count for count in range(least, batch + 1) if batch % count == 0]
        shards = {replicas, *(each for each in (8, 32) if context <= each < replicas)} - {1} or {1}
        for count, sharded, each, way in itertools.product(
            counts, sorted(shards), pieces, ("none", "selective", "each")
        ):
            if each > 1 and (pipeline == 1 or pipeline * each > layers):
                continue
            changed = {
                "tensor": tensor,
                "pipeline": pipeline,
                "context": context,
                "microbatches": count,
                "pieces": each,
            }
            yield dataclasses.replace(row, sharded=sharded, batch=batch, checkpointing=way, **changed)


def proposal(row: Row, limit: float = _LIMIT, **space: Any) -> tuple[Row, int]:
    """Return the fastest configuration of a row that fits by its plan, and how many were planned.

    Args:
        limit: part of a GPU's memory that the plan may take.
        space: for :func:`configurations`.
    """
    best, least, count = row, math.inf, 0
    for tried in configurations(row, **space):
        made = tried.planned()
        assert made.time is not None
        assert made.fraction is not None
        assert made.batches.tokens == row.samples * row.sequence
        count += 1
        # Of two that are equally fast, the first has fewer degrees.
        if made.fraction <= limit and made.time.total < least * (1 - 1e-4):
            best, least = tried, made.time.total
    return best, count


def _way(row: Row) -> str:
    """Return the degrees, microbatches and checkpointing in words."""
    words = [row.parallelism]
    if row.microbatches is not None and row.microbatches > 1:
        words.append(f"{row.microbatches} microbatches of {row.batch // row.microbatches}")
    checkpointing = {"none": "nothing checkpointed", "each": "all checkpointed", "selective": "selective"}
    return ", ".join([*words, checkpointing[row.checkpointing]])


def _figures(row: Row) -> str:
    """Return planned speed, memory, and the part of the arithmetic beside which messages of sharded parameters travel."""
    made = row.planned()
    assert made.time is not None
    return f"{row.speed():,.0f}, {made.total_bytes / GIB:.0f}, {made.time.hidden / made.time.arithmetic:.0%}"


def table_of_proposals(numbers: Iterable[int]) -> Iterator[str]:
    """Yield the lines of the table of proposals."""
    yield "| # | as published: tok/s, GiB, hidden | proposed | tok/s, GiB, hidden | gain | plans |"
    yield "|---|---|---|---|---|---|"
    for row in ROWS:
        if row.number not in numbers:
            continue
        best, count = proposal(row)
        cells = [str(row.number), _figures(row), _way(best), _figures(best)]
        cells += [f"{best.speed() / row.speed() - 1:+.0%}", f"{count:,}"]
        yield f"| {' | '.join(cells)} |"


#: Layers, width, heads, tensor and pipeline degree, GPUs and samples of a step in Narayanan et al. 2021, table 1.
_MEGATRON = (
    (24, 2304, 24, 1, 1, 32, 512),
    (30, 3072, 32, 2, 1, 64, 512),
    (36, 4096, 32, 4, 1, 128, 512),
    (40, 6144, 48, 8, 1, 256, 1024),
    (48, 8192, 64, 8, 2, 512, 1536),
    (60, 10_240, 80, 8, 4, 1024, 1792),
    (80, 12_288, 96, 8, 8, 1536, 2304),
    (96, 16_384, 128, 8, 16, 1920, 2160),
    (105, 20_480, 128, 8, 35, 2520, 2520),
)


def sharding_gains() -> list[float]:
    """Return row 25 as planned: speeds of groups of 32 GPUs ÷ those of one group of 256, with 1 to 8 samples of 2,048 tokens."""

    def speed(batch: int, degree: int) -> float:
        given = {"ddp": True, "fp16": True, "sharded_data_parallel_degree": degree}
        made = plan("gpt2-30b", "ml.p4d.24xlarge", 32, given, batch, sequence=2048, activation_checkpointing="each")
        assert made.time is not None
        return made.time.tokens_per_second

    return [speed(batch, 32) / speed(batch, 256) for batch in (1, 2, 4, 8)]


def weak_scaling() -> list[float]:
    """Return row 26 as planned: tokens per second and GPU on 512 ÷ those on 128 V100, with 1 and with 4 accumulated passes."""
    shape = ModelShape(80, 10_240, 80, 50_257, 1024)

    def speed(hosts: int, accumulation: int) -> float:
        given = {"ddp": True, "fp16": True, "sharded_data_parallel_degree": 128}
        how: dict[str, Any] = {"accumulation": accumulation, "activation_checkpointing": "each"}
        made = plan(shape, "ml.p3dn.24xlarge", hosts, given, 4, **how)
        assert made.time is not None
        return made.time.tokens_per_second / hosts

    return [speed(64, passes) / speed(16, passes) for passes in (1, 4)]


def model_flops(*, async_tensor: bool) -> list[float]:
    """Return row 27 as planned: parts of an H100's peak for configurations of Megatron-LM with 4,096 tokens, in bf16."""
    found = []
    for layers, hidden, heads, tensor, pipeline, gpus, samples in _MEGATRON:
        batch = samples * tensor * pipeline // gpus
        given = {"ddp": True, "bf16": True, "tensor_parallel_degree": tensor, "pipeline_parallel_degree": pipeline}
        given |= {"prescaled_batch": True, "shard_optimizer_state": True, "active_microbatches": pipeline + 2}
        given["microbatches"] = batch if pipeline > 1 else max(1, batch // 4)
        shape = ModelShape(layers, hidden, heads, 51_200, 4096)
        how: dict[str, Any] = {"rates": FITTED_RATES, "compiled": True, "dropout": False, "async_tensor": async_tensor}
        made = plan(shape, "ml.p5.48xlarge", gpus // 8, given, batch, **how)
        assert made.time is not None
        operations = made.batches.tokens * (6 * shape.parameters + 12 * layers * hidden * 4096)
        found.append(operations / (made.time.total * gpus * made.time.peak))
    return found


def _range(values: Iterable[float]) -> str:
    """Return the least and the greatest of numbers, in percent."""
    found = sorted(values)
    return f"{100 * found[0]:.1f} to {100 * found[-1]:.1f} %"


def table_of_others() -> Iterator[str]:
    """Yield the lines of the table of rows 25 to 27, whose settings were published in part."""
    yield "| # | published | planned |"
    yield "|---|---|---|"
    gain = _range(each - 1 for each in sharding_gains())
    yield f"| 25 | GPT-2 30B on 256 A100: groups of GPUs are 39.7 % faster than ZeRO-3 | {gain} |"
    yield f"| 26 | 100 billion parameters, from 128 to 512 V100: 99.4 % of the speed | {_range(weak_scaling())} |"
    apart, beside = (_range(model_flops(async_tensor=each)) for each in (False, True))
    yield f"| 27 | models to 462 billion parameters on H100: 41 to 48 % of the peak | {apart}; messages beside products {beside} |"


def fit() -> tuple[KernelRates, float]:
    """Return the rates and the clock at which the time of the fitted rows is nearest, by the squares of logarithms.

    Three parts of a peak and the clock are searched, one after the other, in steps that become smaller. The parts of the memory's
    bandwidth and of links stay as they are assumed.
    """
    rows = [row for row in ROWS if row.number in FITTED]

    def error(values: tuple[float, ...]) -> float:
        matrix, float8, attention, clock = values
        rates = dataclasses.replace(FITTED_RATES, matrix=matrix, matrix_float8=float8, attention=attention)
        return sum(math.log(row.speed(rates, clock) / row.tokens) ** 2 for row in rows)

    best: tuple[float, ...] = (0.7, 0.6, 0.5, 0.8)
    step = 1.2
    least = error(best)
    while step > 1.002:
        found = False
        for place in range(len(best)):
            for factor in (step, 1 / step):
                tried = (*best[:place], min(1.0, best[place] * factor), *best[place + 1 :])
                if (now := error(tried)) < least:
                    best, least, found = tried, now, True
        if not found:
            step = math.sqrt(step)
    matrix, float8, attention, clock = best
    return dataclasses.replace(FITTED_RATES, matrix=matrix, matrix_float8=float8, attention=attention), clock


if __name__ == "__main__":
    if sys.argv[1:] == ["fit"]:
        print(fit())
    elif sys.argv[1:2] == ["search"]:
        for line in table_of_proposals([int(each) for each in sys.argv[2:]] or [row.number for row in ROWS]):
            print(line, flush=True)
    else:
        print(
            "\n".join(
                (*table(), "", *table(LATER), "", *table(ASYNCHRONOUS), "", *table_of_ratios(), "", *table_of_others())
            )
        )
