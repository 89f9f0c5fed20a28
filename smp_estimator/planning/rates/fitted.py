"""Rates of kernels that were fitted to published measurements."""

from __future__ import annotations

from smp_estimator.planning.rates.kernel_rates import KernelRates

#: Part of its clock that an H100 has with 500 W instead of 700.
CLOCK_AT_500_W = 0.866

#: Fitted by ``python benchmarks/published.py fit`` on seven rows. The parts of memory and links are assumed, as the same of all
#: GPUs. Each uncertainty is the largest error of published rows that nothing was fitted on: without context parallelism and
#: asynchronous products, with each of them, and on A100, which reach a larger part of their peak.
FITTED = KernelRates(
    matrix=0.573,
    matrix_float8=0.490,
    attention=0.303,
    memory=0.85,
    links=0.8,
    uncertainty=0.14,
    uncertainty_of_context=0.35,
    uncertainty_of_async=0.26,
    uncertainty_elsewhere=0.25,
    gpus=("H100", "H200"),
    sources=(
        "matrix products and attention: rows 2, 6, 11, 13, 15, 19 and 21 of benchmarks/published.py",
        "memory and links: assumed",
    ),
)
