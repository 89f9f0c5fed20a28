"""Marks for profilers and settings of CUDA's libraries, which have no effect here."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from smp_emulation.calls import CoveredCall, answer_each, answer_with, do_nothing
from smp_emulation.devices import index_of


class _Depth(threading.local):
    """The number of open ranges of a thread."""

    value = 0


_depth = _Depth()


def _push(msg: str) -> int:
    _depth.value += 1
    return _depth.value - 1


def _pop() -> int:
    _depth.value -= 1
    return _depth.value


@contextlib.contextmanager
def _range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    _push(msg)
    try:
        yield
    finally:
        _pop()


@contextlib.contextmanager
def _profile(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _profile_of_cpu(original: Any) -> Any:
    """Return the constructor of PyTorch's profiler without a CUDA device.

    With one it would try to record CUDA events around each operation. Each fails, and prints where.
    """

    @functools.wraps(original)
    def made(self: Any, enabled: bool = True, **kwargs: Any) -> None:
        if kwargs.get("use_device") == "cuda" or kwargs.get("use_cuda"):
            kwargs.update(use_device=None, use_cuda=False, use_cpu=True)
        original(self, enabled, **kwargs)

    return made


#: Settings of tunable operations that a script has made, by name.
_tuned: dict[str, Any] = {}


def _switch(name: str) -> Any:
    def switch(val: Any = True) -> None:
        _tuned[name] = val

    return switch


def _switched(name: str, default: Any) -> Any:
    return lambda: _tuned.get(name, default)


#: Setters of torch.cuda.tunable, the getter of each, and the value that it returns before the first set.
_SETTINGS = (
    ("enable", "is_enabled", False),
    ("tuning_enable", "tuning_is_enabled", True),
    ("record_untuned_enable", "record_untuned_is_enabled", False),
    ("wildcard_fallback_enable", "wildcard_fallback_is_enabled", False),
    ("set_cublaslt_requested_algo_count", "get_cublaslt_requested_algo_count", 1),
    ("set_max_tuning_duration", "get_max_tuning_duration", 30),
    ("set_max_tuning_iterations", "get_max_tuning_iterations", 100),
    ("set_rotating_buffer_size", "get_rotating_buffer_size", 0),
)


def _remembered_size(name: str) -> Any:
    def workspace_size(size: int | None = None, backend: Any = None) -> int:
        if size is not None:
            _tuned[name] = size
        return int(_tuned.get(name, 0))

    return workspace_size


class _PlanCache:
    """The cuFFT plan cache, which is always empty; it keeps its size limit."""

    size = 0
    max_size = 4096

    def clear(self) -> None:
        """Do nothing: the cache is always empty."""

    def __getitem__(self, device: Any) -> _PlanCache:
        index_of(device)
        return self


CALLS: tuple[CoveredCall, ...] = (
    answer_with("torch.cuda.nvtx.range_push", "counts the depth", _push),
    answer_with("torch.cuda.nvtx.range_pop", "counts the depth", _pop),
    answer_with("torch.cuda.nvtx.range_start", "0", lambda msg: 0),
    answer_with("torch.cuda.nvtx.range_end", "nothing", do_nothing),
    answer_with("torch.cuda.nvtx.mark", "nothing", do_nothing),
    answer_with("torch.cuda.nvtx.range", "counts the depth", _range),
    answer_with("torch.cuda.profiler.init", "nothing", do_nothing),
    answer_with("torch.cuda.profiler.start", "nothing", do_nothing),
    answer_with("torch.cuda.profiler.stop", "nothing", do_nothing),
    answer_with("torch.cuda.profiler.profile", "nothing", _profile),
    CoveredCall("torch.autograd.profiler.profile.__init__", "profiles the CPU", _profile_of_cpu),
    *(
        answer_with(f"torch.cuda.tunable.{name}", "remembered, without effect", _switch(name))
        for name, _, _ in _SETTINGS
    ),
    *(
        answer_with(f"torch.cuda.tunable.{teller}", "what was set", _switched(name, default))
        for name, teller, default in _SETTINGS
    ),
    *answer_each(
        "torch.cuda.tunable",
        ("set_filename", "set_numerical_check_tolerances", "write_file_on_exit"),
        "nothing",
        do_nothing,
    ),
    answer_with("torch.cuda.tunable.get_filename", "empty", lambda: ""),
    answer_with("torch.cuda.tunable.dynamic_dims_mask", "nothing", _profile),
    *answer_each("torch.cuda.tunable", ("read_file", "write_file"), "False", lambda filename=None: False),
    *(
        answer_with(f"torch.backends.cuda.{name}", "remembered, without effect", _remembered_size(name))
        for name in ("cublas_workspace_size", "cublaslt_workspace_size", "blas_workspace_size")
    ),
    answer_with("torch.backends.cuda.cufft_plan_cache", "empty", _PlanCache()),
    *answer_each("torch.cuda.tunable", ("get_results", "get_validators"), "empty", tuple),
)
