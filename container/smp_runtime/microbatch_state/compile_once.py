"""One compilation of a graph per host: one of the ranks compiles it, and the others load the result.

Inductor caches its results in a folder, under a name derived from the graph. If several ranks reached equal graphs at
the same time, all would find the cache empty and compile. So the first rank holds a lock on the graph while it compiles
it, including the backward pass. Nothing communicates meanwhile, and a process that ends releases its locks. A rank
that waits too long compiles the graph itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

#: Locks of a user on a host; graphs that have one in common wait for each other for nothing.
_LOCKS = 64
#: Seconds for which a rank waits for another's compilation.
_LONGEST_SECONDS = 600.0
#: Seconds between two looks at a lock.
_LOOK_SECONDS = 0.05


@functools.cache
def compiling_once(backend: str) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Any]:
    """Return the ``torch.compile`` backend of this name, wrapped to compile a graph once per host.

    Raises:
        torch._dynamo.exc.InvalidBackend: no backend has that name.
    """
    compile_graph = _backend_of_compiler(backend)

    def compile_one(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with _alone_with(graph, inputs), _compiling_whole_entries():
            return compile_graph(graph, inputs)

    return compile_one


@contextlib.contextmanager
def _alone_with(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Run the block while no other process of this user on this host compiles an equal graph.

    After the longest wait, or if the lock file cannot be opened, the block runs anyway.
    """
    shapes = [(tuple(map(str, i.shape)), i.dtype) if isinstance(i, torch.Tensor) else str(i) for i in inputs]
    digest = hashlib.sha256(f"{graph.code}{shapes}".encode()).digest()
    path = Path(tempfile.gettempdir()) / f"smp-compile-{os.getuid()}-{digest[0] % _LOCKS}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # the folder is not writable: each process compiles for itself
        yield
        return
    try:
        deadline = time.monotonic() + _LONGEST_SECONDS
        while not _locks(descriptor) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)  # flock itself knows no deadline
        yield
    finally:
        os.close(descriptor)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # another process has it
    return True


def _backend_of_compiler(name: str) -> Callable[..., Any]:
    """Return the function that ``torch.compile`` calls for a backend name; an unknown name raises PyTorch's error."""
    if name == "inductor":  # which would import this in its first call
        importlib.import_module("torch._inductor.compile_fx")
    found: Callable[..., Any] = importlib.import_module("torch._dynamo.backends.registry").lookup_backend(name)
    return found


def _compiling_whole_entries() -> contextlib.AbstractContextManager[Any]:
    """Compile graphs inside the block with their backward pass, and store both in the compiler's folder at once.

    PyTorch compiles a backward pass when it first runs, and stores nothing before. Nor does it store graphs with functions of
    ``torch.autograd.Function``. In the block it does, if the release has these switches.
    """
    config: Any = sys.modules.get("torch._functorch.config")
    wanted = ("autograd_cache_allow_custom_autograd_functions", "force_non_lazy_backward_lowering")
    there = {name: True for name in wanted if hasattr(config, name)}
    return config.patch(there) if there else contextlib.nullcontext()
