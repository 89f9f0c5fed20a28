"""Measurements that others published on real GPUs, beside the plans of the same jobs.

``python benchmarks/published.py`` writes the tables in docs/how-it-works/planning.md; with ``fit`` it fits the rates of kernels on
the rows that :data:`FITTED` names. No constant of the memory was fitted.

T is pytorch/torchtitan, ``benchmarks/``, commit b5bcd76c6: hosts of 8 H100 of 96 GB with 500 W, 400 Gbit/s per GPU between hosts.
Tokens per second are per GPU. The memory is what PyTorch had reserved at its peak on the fullest GPU, in GiB.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_estimator.planning import Plan, named_shape, plan
from smp_estimator.planning.rates.fitted import CLOCK_AT_500_W
from smp_estimator.planning.rates.fitted import FITTED as FITTED_RATES

if TYPE_CHECKING:
    from smp_estimator.planning.rates.kernel_rates import KernelRates

GIB = 2**30

_T_8B = "T llama3_h100_202412"
_T_H200 = "T llama3-8b_h200_202506"


@dataclass(frozen=True)
class Row:
    """Settings, memory and speed of a published job.

    Attributes:
        sharded: ranks over which parameters, gradients and optimizer state are sharded, those of context parallelism among them.
        batch: samples per data parallel rank.
        checkpointing: ``"each"``, or ``"selective"``: some operations of each layer are computed again.
        tokens: per second and GPU.
        gib: reserved; None if it was not published.
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

    def parameters(self) -> dict[str, Any]:
        """Return ``mp_parameters`` with the degrees of the job."""
        given: dict[str, Any] = {"ddp": True, "bf16": True, "sharded_data_parallel_degree": self.sharded}
        if self.tensor > 1:
            given |= {"tensor_parallel_degree": self.tensor, "prescaled_batch": True}
        if self.pipeline > 1:
            # Their default is as many microbatches as stages.
            given |= {
                "pipeline_parallel_degree": self.pipeline,
                "microbatches": self.pipeline,
                "active_microbatches": self.pipeline,
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
            "ml.p5.48xlarge" if is_h100 else "ml.p5en.48xlarge",
            self.gpus // 8,
            self.parameters(),
            self.batch,
            sequence=self.sequence,
            gpu_memory_bytes=96 * 10**9 if is_h100 else None,
            activation_checkpointing=self.checkpointing,
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

#: Rows on which rates of kernels may be fitted, chosen before the first fit: each model, both GPUs, and both precisions.
FITTED = (2, 6, 11, 13, 15, 19, 21)

#: Rows that test such rates. Nothing is fitted on them.
TESTED = tuple(row.number for row in ROWS if row.number not in FITTED)

COLUMNS = ["#", "model", "GPUs", "parallelism", "sequence, batch", "precision"]
COLUMNS += ["GiB: published", "planned", "ratio", "tok/s: published", "planned", "ratio"]


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for row in ROWS:
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
    ("405B: interleaved ÷ 1F1B", 14, 13),
    ("405B: cp 2 ÷ cp 1", 16, 15),
    ("405B: cp 4 ÷ cp 1", 17, 15),
    ("405B: cp 8 ÷ cp 1", 18, 15),
    ("8B: cp 2 ÷ cp 1", 8, 7),
    ("8B: cp 8 ÷ cp 1", 10, 7),
)


def ratios() -> Iterator[tuple[str, float, float]]:
    """Yield ratios of speeds inside a table: the name, as published, and as planned."""
    by_number = {row.number: row for row in ROWS}
    for name, over, under in _RATIOS:
        a, b = by_number[over], by_number[under]
        yield name, a.tokens / b.tokens, a.speed() / b.speed()


def table_of_ratios() -> Iterator[str]:
    """Yield the lines of the table of ratios."""
    yield "| ratio of speeds | published | planned | planned ÷ published |"
    yield "|---|---|---|---|"
    for name, wanted, planned in ratios():
        yield f"| {name} | {wanted:.3f} | {planned:.3f} | {planned / wanted:.2f} |"


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
    else:
        print("\n".join((*table(), "", *table_of_ratios())))
