"""Each path of the runtime with code of its own for CUDA, on the GPU and on the CPU.

``tests/support/training/emulated_training.py`` lists the paths. Tests run them on emulated devices.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from support.ranks.rank_pool import RankPool
from support.training import emulated_training

from gpu_check import environment
from gpu_check.device import is_real
from gpu_check.results import Finding, case, round_significant
from gpu_check.training import compute_distance

#: Variables of the ranks by kind of device.
_ENVIRONS = {"cpu": {"CUDA_VISIBLE_DEVICES": ""}, "gpu": {}}
_TINY = ("reduction", "pipeline", "offloading")
_MOST_RANKS = 4
#: Parts of a result that may differ between devices, such as counts of what waited.
_MAY_DIFFER = {"figures", "followed", "tapes", "replayed", "in_flight", "local", "runs", "waits", "device"}

#: By rank; an exception if the ranks have failed.
Results = list[Any] | BaseException


def check_paths() -> None:
    """Run all paths on both devices at the same time, and compare what they return."""
    names = _TINY if environment.is_tiny() else tuple(emulated_training.PATHS)
    results: dict[str, dict[str, Results]] = {}
    with tempfile.TemporaryDirectory(prefix="smpcheck-paths-") as folder:
        pools = {kind: _start_pool(environ) for kind, environ in _ENVIRONS.items()}

        def run(kind: str) -> None:
            results[kind] = _run_all(pools[kind], kind, names, folder)

        threads = [threading.Thread(target=run, args=(kind,)) for kind in pools]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name in names:
        with case(name) as finding:
            _judge(finding, name, results["gpu"][name], results["cpu"][name])


def _start_pool(environ: Mapping[str, str]) -> RankPool:
    """Start ranks with these variables, which a rank needs before it looks for GPUs."""
    before = dict(os.environ)
    os.environ.update(environ)
    try:
        return RankPool(_MOST_RANKS)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_all(pool: RankPool, kind: str, names: Sequence[str], folder: str) -> dict[str, Results]:
    results: dict[str, Results] = {}
    for number, name in enumerate(names):
        ranks = emulated_training.PATHS[name].world
        own = f"{folder}/{kind}-{number}"
        try:
            results[name] = pool.run(_run_on_rank, ranks, name, own, init=False, timeout=90, env=dict(_ENVIRONS[kind]))
        except BaseException as error:
            results[name] = error
            with contextlib.suppress(BaseException):
                pool.close()
            pool = RankPool(_MOST_RANKS)
    pool.close()
    return results


def _run_on_rank(name: str, folder: str) -> Any:
    """Run a path on this rank, and return its result in host memory."""
    import importlib

    from support.ranks import emulated
    from support.training import emulated_training
    from torch.utils._pytree import tree_map_only

    from smp_runtime.job import session

    def start(config: dict[str, Any], function: Callable[..., Any], *args: Any) -> Any:
        session.init(config)
        device = session.current_session().ranks.device

        def move(own: Callable[..., Any]) -> Callable[..., Any]:
            def moved(*given: Any, **named: Any) -> Any:
                return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), own(*given, **named))

            return moved

        # Functions that return batches in host memory, which they would for a CPU.
        with contextlib.ExitStack() as stack:
            for module_name, functions in emulated._BATCHES.items():
                module = importlib.import_module(module_name)
                for each in functions:
                    if hasattr(module, each):
                        own = getattr(module, each)
                        stack.callback(setattr, module, each, own)
                        setattr(module, each, move(own))
            result = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), function(*args))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            session.shutdown()
        if isinstance(result, dict):
            result["device"] = str(device)
        return result

    return emulated_training.run(emulated_training.PATHS[name], folder, start)


def _judge(finding: Finding, name: str, mine: Results, wanted: Results) -> None:
    if isinstance(mine, BaseException) and "takes one rank per GPU" in str(mine) and is_real():
        # The backend smddp refuses shared GPUs, as it should.
        finding |= {"ok": None, "note": "refused where ranks share a GPU, as it should be"}
        return
    for kind, each in (("cpu", wanted), ("gpu", mine)):
        if isinstance(each, BaseException):
            raise AssertionError(f"on {kind}: {each}"[-1500:])
    assert isinstance(mine, list)
    tolerance = emulated_training.PATHS[name].tolerance
    apart = _compute_distance(_merge_gradients(mine), _merge_gradients(wanted))
    device = mine[0].get("device")
    finding |= {"apart": round_significant(apart), "tolerance": tolerance, "device": device}
    is_there = not is_real() or str(device).startswith("cuda")
    # A GPU rounds in its own way: ten times what emulated devices may differ by.
    finding["ok"] = apart <= max(1e-3, 10 * tolerance) and is_there


def _merge_gradients(results: Any) -> Any:
    """Return results with the gradients of all ranks by name, since the CPU's ranks may hold others of them."""
    if "gradients" not in results[0]:
        return results
    steps = zip(*(result["gradients"] for result in results), strict=True)
    gradients = [{name: value for each in step for name, value in each.items()} for step in steps]
    return [{**result, "gradients": gradients} for result in results]


def _compute_distance(mine: Any, theirs: Any) -> float:
    """Return the largest relative distance of two results; infinite if they are not alike."""
    if isinstance(mine, torch.Tensor):
        if mine.is_floating_point() and mine.numel():
            return compute_distance(mine, theirs)
        return 0.0 if torch.equal(mine, theirs) else 1.0
    if isinstance(mine, dict):
        pairs = [(mine[key], theirs[key]) for key in theirs if key not in _MAY_DIFFER]
        return max((_compute_distance(a, b) for a, b in pairs), default=0.0)
    if isinstance(mine, list | tuple):
        if len(mine) != len(theirs):
            return math.inf
        return max((_compute_distance(a, b) for a, b in zip(mine, theirs, strict=True)), default=0.0)
    if isinstance(mine, float):
        return abs(mine - theirs) / max(abs(theirs), 1e-6)
    return 0.0 if mine == theirs else math.inf
