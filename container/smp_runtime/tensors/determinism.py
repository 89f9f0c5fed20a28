"""Bit-equal reruns: the settings of PyTorch, CUDA and the generators, and the script lines that prevent them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from smp_records.script_lines import is_script_s, script_line
from smp_runtime.errors import SMPUserError

logger = logging.getLogger("smp")

#: What CUDA's libraries read when they start: cuBLAS needs workspaces of its own, and sums inside switches have no fixed order.
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}

#: Of generators that the script has left as they were.
_SEED = 0
#: PyTorch draws greater seeds for a generator without a seed. A script's seeds are usually smaller.
_DRAWN = 1 << 32

#: In PyTorch's error, the operation that it refuses.
_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")


class Determinism:
    """The settings of a deterministic job in this process; :meth:`end` restores the former ones.

    Generators without a seed get one: PyTorch's gets 0. Python's and NumPy's always get PyTorch's seed, since
    it is not known if they were seeded.

    Args:
        environ: of the process, before anything was computed on a GPU.
        tells: whether this rank logs the messages that hold for all ranks.
    """

    def __init__(self, environ: MutableMapping[str, str], *, tells: bool) -> None:
        self._environ = environ
        self._lacking = [name for name in VARIABLES if name not in environ]
        environ.update({name: VARIABLES[name] for name in self._lacking})
        self._algorithms = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        cudnn = torch.backends.cudnn
        self._cudnn = cudnn.deterministic, cudnn.benchmark
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        if torch.initial_seed() >= _DRAWN:
            torch.manual_seed(_SEED)
        seed = torch.initial_seed() % _DRAWN
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed)
        self._draws = UnseededDraws()
        if tells and not environ.get("PYTHONHASHSEED", "random").isdecimal():
            logger.warning(
                "deterministic: Python orders sets of texts otherwise in each run, which matters where a script goes through one (a"
                " vocabulary); sort them, or start the ranks with PYTHONHASHSEED=0"
            )

    def end(self) -> None:
        """Put everything back but the generators."""
        self._draws.end()
        algorithms, warns = self._algorithms
        torch.use_deterministic_algorithms(algorithms, warn_only=warns)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = self._cudnn
        for name in self._lacking:
            self._environ.pop(name, None)


class UnseededDraws:
    """Wrappers that log each script line that draws unseeded numbers from the machine, until :meth:`end`."""

    def __init__(self) -> None:
        self._told: set[tuple[str, int]] = set()
        self._lock = threading.Lock()  # guards the set
        self._put: list[tuple[Any, str, Any, Any]] = []  # owner, name of the attribute, former value, new value
        self._replace(random, "seed", "random.seed()", lambda given: _has_no_seed(given, "a"))
        self._replace(torch, "seed", "torch.seed()", lambda given: True)
        self._replace(torch.random, "seed", "torch.seed()", lambda given: True)
        self._replace(os, "urandom", "os.urandom()", lambda given: True)
        if (numpy := sys.modules.get("numpy")) is not None:
            for name in ("seed", "default_rng"):
                self._replace(numpy.random, name, f"numpy.random.{name}()", lambda given: _has_no_seed(given, "seed"))

    def _replace(
        self, owner: Any, name: str, called: str, is_drawn: Callable[[tuple[tuple[Any, ...], dict[str, Any]]], bool]
    ) -> None:
        former = getattr(owner, name)

        @functools.wraps(former)
        def drawing(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)  # noqa: SLF001 - inspect.currentframe() and its f_back take several times as long
            if is_script_s(frame.f_code.co_filename) and is_drawn((args, kwargs)):
                self._tell(called, frame.f_code.co_filename, frame.f_lineno)
            return former(*args, **kwargs)

        setattr(owner, name, drawing)
        self._put.append((owner, name, former, drawing))

    def _tell(self, called: str, file: str, line: int) -> None:
        with self._lock:
            if (file, line) in self._told:
                return
            self._told.add((file, line))
        logger.warning(
            "deterministic: %s in %s, line %d takes numbers from the machine, others in each run; another run will not be equal to "
            "this one: give it a seed",
            called,
            file,
            line,
        )

    def end(self) -> None:
        """Restore the functions, except those that were replaced again since."""
        for owner, name, former, drawing in self._put:
            if getattr(owner, name) is drawing:
                setattr(owner, name, former)
        self._put = []


def _has_no_seed(given: tuple[tuple[Any, ...], dict[str, Any]], name: str) -> bool:
    args, kwargs = given
    return (args[0] if args else kwargs.get(name)) is None


@contextlib.contextmanager
def explain_operations() -> Iterator[None]:
    """Run the block, and report an operation without a deterministic implementation with the script's line.

    Raises:
        SMPUserError: instead of PyTorch's error, which is its cause.
    """
    try:
        yield
    except RuntimeError as error:
        refused = _REFUSED.search(str(error))
        if refused is None:
            raise
        file, line = _line_of(error)
        where = f" in {file}, line {line}," if file else ", in a backward pass,"
        raise SMPUserError(
            f"the operation {refused[1]}{where} has no implementation that gives the same bits in each run, and this job is to be "
            'repeatable ("deterministic": true). Where the line is that of a backward pass, a warning before this error shows the '
            "forward line. Use another operation there (index_add for put_, a convolution of stride 1 behind nearest-neighbour "
            'upsampling, …), let it run on the CPU, or set "deterministic" to false',
            code="SMP303",
        ) from error


def explained(error: BaseException) -> BaseException:
    """Return the error of :func:`explain_operations` for an error that was caught, or that error itself."""
    try:
        with explain_operations():
            raise error
    except BaseException as known:
        return known


def _line_of(error: BaseException) -> tuple[str, int]:
    """Return file and line of the script's innermost frame in an error's traceback.

    If the traceback has no frame of the script, return the script's line in this thread's stack.
    """
    found = "", 0
    trace = error.__traceback__
    while trace is not None:
        if is_script_s(trace.tb_frame.f_code.co_filename):
            found = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return found if found[0] else script_line(2)


class TracedFirstStep:
    """A mode in which PyTorch records, in the first step, the line that made each part of the graph.

    So a warning names the forward line of a backward pass that fails. Later steps have the same operations, at
    full speed.
    """

    def __init__(self) -> None:
        self._mode: torch.autograd.set_detect_anomaly | None = None
        self._is_over = False

    def begin(self) -> None:
        """Turn on anomaly detection if this is the first step."""
        if not self._is_over and not torch.is_anomaly_enabled():
            self._mode = torch.autograd.set_detect_anomaly(True, check_nan=False)
        self._is_over = True

    def end(self, *_: object) -> None:
        """Turn off anomaly detection at the end of a step, or of the job."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
