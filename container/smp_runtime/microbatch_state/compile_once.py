"""One compilation of a graph on a host: of the ranks that need it, one compiles, and the others find what it has left.

Inductor keeps what it has made in a folder, under a name that follows from the graph. Ranks that come to equal graphs at the
same time would all find nothing there and all compile it. So the first holds a lock of the graph while it compiles it, backward
pass included; nothing communicates meanwhile, and a process that ends lets go of its locks. A rank for which that takes too long
compiles for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from smp_runtime.tensors.torch_private import backend_of_compiler, compiling_whole_entries

#: Locks of a user on a host; graphs that have one in common wait for each other for nothing.
_LOCKS = 64
#: Seconds for which a rank waits for another's compilation.
_LONGEST_SECONDS = 600.0
#: Seconds between two looks at a lock.
_LOOK_SECONDS = 0.05


@functools.cache
def compiling_once(backend: str) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Any]:
    """A backend of ``torch.compile`` that is the one of this name, but compiles a graph once on a host.

    Raises:
        torch._dynamo.exc.InvalidBackend: there is none of that name.
    """
    compile_graph = backend_of_compiler(backend)

    def compile_one(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with _alone_with(graph, inputs), compiling_whole_entries():
            return compile_graph(graph, inputs)

    return compile_one


@contextlib.contextmanager
def _alone_with(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, no other process of this user on this host is with an equal graph."""
    shapes = [(tuple(map(str, i.shape)), i.dtype) if isinstance(i, torch.Tensor) else str(i) for i in inputs]
    digest = hashlib.sha256(f"{graph.code}{shapes}".encode()).digest()
    path = Path(tempfile.gettempdir()) / f"smp-compile-{os.getuid()}-{digest[0] % _LOCKS}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # a folder that nobody may write to: each compiles for itself
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
        return False
    return True
