"""The strategies under which a client library's script is run, and their cases."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest

SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 100, "sdp_gradient_clipping": 1e6}
TENSOR = {"tensor_parallel_degree": 2, "prescaled_batch": True}
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
CONTEXT = {"context_parallel_degree": 2}
#: By name, the number of ranks and the parameters beside ``ddp``.
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp 2": (2, {}),
    "pp 2": (2, STAGES),
    "tp 2": (2, TENSOR),
    "sdp 2": (2, SHARDED),
    "cp 2": (2, CONTEXT),
    "pp 2 × dp 2": (4, STAGES),
    "pp 2 × tp 2": (4, {**STAGES, **TENSOR}),
    "pp 2 × sdp 2": (4, {**STAGES, **SHARDED}),
    "tp 2 × sdp 2": (4, {**TENSOR, **SHARDED}),
    "tp 2 × dp 2": (4, TENSOR),
}


def replicas(size: int, config: dict[str, Any]) -> int:
    """The number of batches that differ in a step."""
    degrees = [config.get(f"{kind}_parallel_degree", 1) for kind in ("pipeline", "tensor", "context")]
    return size // math.prod(degrees)


def strategy_cases(library: str, feature: str, always: Collection[str] = ()) -> list[Any]:
    """A parameter for each strategy, marked as a case of the library; all but ``always`` are part of the big matrices."""
    found = []
    for strategy in STRATEGIES:
        marks = [pytest.mark.client(library, feature, strategy)]
        found.append(pytest.param(strategy, marks=marks if strategy in always else [*marks, pytest.mark.full]))
    return found
