"""The runtime's paths for CUDA on emulated devices, whose work is executed late and in many orders: as on the CPU, no faults."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.training.closeness import close
from support.training.emulated_training import PATHS

#: What depends on times.
UNEQUAL = {"figures", "followed", "tapes", "replayed", "in_flight", "local", "runs"}
#: Those that always run, with one order.
SAMPLE = {"reduction", "sharding", "pipeline", "writing, bf16", "writing, sharded state", "writing, sharding"}
#: What makes the host wait for its device in them, apart from the program: once, or where only the device knows.
MAY_WAIT = {
    "reduction": {"_adopt_measured_order"},
    "sharding": set(),
    "fp16, sharded state": {"_adopt_measured_order", "_unscale"},
    "writing, bf16": {"_adopt_measured_order"},
    "writing, sharded state": {"_adopt_measured_order"},
    "writing, sharding": set(),
}


_OF_A_STEP = (
    *("data_parallel/reducer.py", "sharding/sharded_gradients.py", "comm/flag_all_reduce.py"),
    *("optim/gradient_norms.py", "optim/master_gradients.py", "optim/master_writes.py", "parameters/script_writes.py"),
    *(
        "parameters/optimizer_shards.py",
        "sharding/script_gradients.py",
        "sharding/detached_parameters.py",
        "sharding/flat_unit.py",
    ),
)


def _run(seed, path, folder):
    from support.ranks import emulated
    from support.training import emulated_training

    return emulated_training.run(
        path, folder, emulated.on_host if seed is None else functools.partial(emulated.on_devices, seed)
    )


_expected: dict[str, list[Any]] = {}


def check(ranks, tmp_path, name, seed):
    path = PATHS[name]
    if name not in _expected:
        _expected[name] = ranks(_run, path.world, None, path, str(tmp_path / "host"), init=False, timeout=120)
    found = ranks(_run, path.world, seed, path, str(tmp_path / f"{seed}"), init=False, timeout=120)
    for mine, theirs in zip(_merged(found), _merged(_expected[name]), strict=True):
        assert mine.keys() - {"waits"} == theirs.keys()
        assert mine["waits"]
        for kind in theirs.keys() - UNEQUAL:
            _compare(mine[kind], theirs[kind], f"{name}: {kind}", path.tolerance)
    return found


def _merged(results):
    """Where each parameter is trained depends on how long modules took: gradients by name, from all ranks."""
    if "gradients" not in results[0]:
        return results
    steps = zip(*(result["gradients"] for result in results), strict=True)
    gradients = [{name: value for each in step for name, value in each.items()} for step in steps]
    return [{**result, "gradients": gradients} for result in results]


def _compare(mine, theirs, what, tolerance):
    if isinstance(mine, torch.Tensor):
        close(mine, theirs, what, tolerance)
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), what
        for key, value in mine.items():
            _compare(value, theirs[key], f"{what} {key}", tolerance)
    elif isinstance(mine, (list, tuple)):
        for position, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            _compare(one, other, f"{what} {position}", tolerance)
    elif isinstance(mine, float):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance), what
    else:
        assert mine == theirs, what


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SAMPLE else pytest.mark.full) for n in PATHS])
def test_results_are_those_of_the_cpu(ranks, tmp_path, name):
    found = check(ranks, tmp_path, name, seed=1)
    if name in MAY_WAIT:
        lines = {line for mine in found for _, line in mine["waits"] if line.startswith(_OF_A_STEP)}
        assert {line.rpartition(" in ")[2] for line in lines} <= MAY_WAIT[name]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PATHS)
def test_in_fifty_orders(ranks, tmp_path, name):
    for seed in range(2, 52):
        check(ranks, tmp_path, name, seed)
