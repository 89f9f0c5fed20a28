"""Blocks of a model that run wholly on this rank and are compiled by ``torch.compile``, each kind once.

They are the blocks that a script has marked (``smp.compile``) and, with ``"compile": true``, repeated blocks. Repeated
blocks are elements of ``nn.ModuleList`` and ``nn.Sequential`` of one class. The outermost ones with no part on another
rank are compiled.

Only their ``forward`` is compiled. Their hooks, checkpointing and the pipeline stay outside, so that they do not break
the graph. A class may name another method, which runs after the Python code that communicates with other ranks.

Blocks of one class share one compiled function, which takes their parameters as inputs. It is compiled when the first
of them is called, once more for another shape, and then for any shape.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smp_runtime.microbatch_state.compile_once import compiling_once
from smp_runtime.tensors.lazy_tensor import LazyTensor
from smp_runtime.tensors.torch_private import (
    DisableTorchFunction,
    compile_errors,
    count_function_modes,
    tree_leaves,
    tree_map,
)

logger = logging.getLogger("smp")

#: On a module that a script has marked, the backend.
_MARK = "_smp_compile"


class _Eagerly:
    """The number of calls that want blocks to run eagerly now, on any thread."""

    count = 0


@contextlib.contextmanager
def run_eagerly() -> Iterator[None]:
    """Run compiled blocks eagerly inside the block, as for generation, with its new length for every token."""
    _Eagerly.count += 1
    try:
        yield
    finally:
        _Eagerly.count -= 1


class BlockClass:
    """Blocks of one class: they share a compiled function, and all run eagerly if it cannot be compiled.

    Args:
        tells: whether this rank reports it.
    """

    def __init__(self, kind: type[nn.Module], method: str, backend: str, *, tells: bool) -> None:
        self.name = kind.__name__
        self.method = method
        self.compiled: Callable[..., Any] | None = torch.compile(getattr(kind, method), backend=compiling_once(backend))
        self._tells = tells

    def give_up(self, path: str, why: str) -> None:
        """Run all blocks of this class eagerly from now on, and log one line about it."""
        self.compiled = None
        level = logging.WARNING if self._tells else logging.DEBUG
        logger.log(level, "blocks of the kind %s (%r …) are not compiled and run eagerly: %s", self.name, path, why)


class CompiledForward:
    """Stands in for the compiled method of a block; a copy of the block, or one read from a file, has its own again."""

    def __init__(
        self, block: nn.Module, path: str, kind: BlockClass, interrupts: Callable[[nn.Module], str | None] | None = None
    ) -> None:
        self._block = block
        self._path = path
        self._kind = kind
        self._interrupts: Callable[[nn.Module], str | None] | None = interrupts
        #: Makes the context that the block's class needs around a compiled call.
        self._around: Callable[[], contextlib.AbstractContextManager[None]] = getattr(
            block, "around_compiled", contextlib.nullcontext
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's result, computed eagerly from the first call on that cannot be compiled."""
        if self._interrupts is not None:
            reason, self._interrupts = self._interrupts(self._block), None
            if reason is not None and self._kind.compiled is not None:
                self._kind.give_up(self._path, reason)
        compiled = self._kind.compiled
        if compiled is None or _Eagerly.count:
            return self._eager(*args, **kwargs)
        if any(isinstance(leaf, LazyTensor) for leaf in tree_leaves((args, kwargs))):
            args, kwargs = tree_map(_plain, (args, kwargs))
        # A function mode would be compiled too; with none, entering this would be one more thing that compiled code depends on.
        modes_off = DisableTorchFunction() if count_function_modes() else contextlib.nullcontext()
        try:
            with modes_off, self._around():
                return compiled(self._block, *args, **kwargs)
        except compile_errors() as error:
            said = " ".join(str(error).split("\n\n")[0].split())
            self._kind.give_up(self._path, f"{type(error).__name__}: {said}")
            return self._eager(*args, **kwargs)

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self._block), self._kind.method)(self._block, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return functools.partial(getattr(type(self._block), self._kind.method), memo[id(self._block)])

    def __reduce__(self) -> Any:
        return functools.partial, (getattr(type(self._block), self._kind.method), self._block)


def _plain(leaf: Any) -> Any:
    return leaf.plain() if isinstance(leaf, LazyTensor) else leaf


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is a compiled block."""
    return isinstance(vars(module).get(_method_of(type(module))), CompiledForward)


def _method_of(kind: type[nn.Module]) -> str:
    return str(getattr(kind, "compiled_method", "forward"))


def mark(module: nn.Module, backend: str) -> None:
    """Mark a module to be compiled once it is placed; in a list of modules, mark each element."""
    for part in module if isinstance(module, nn.ModuleList | nn.Sequential) else [module]:
        part.__dict__[_MARK] = backend


def find_compile_marks(model: nn.Module) -> dict[str, str]:
    """Return the backends of the marked modules of a model, by path."""
    return {path: vars(part)[_MARK] for path, part in model.named_modules() if _MARK in vars(part)}


def carry_over(before: Mapping[str, str], model: nn.Module) -> nn.Module:
    """Mark the modules that have replaced marked ones, and return the model.

    Args:
        before: from :func:`find_compile_marks`, before modules were replaced.
    """
    now = dict(model.named_modules())
    for path, backend in before.items():
        if path in now:
            now[path].__dict__[_MARK] = backend
    lost = [path for path in before if path not in now]
    if lost:
        logger.warning(
            "%d modules (%s …) given to smp.compile are not compiled: the modules around them were replaced by distributed ones; "
            'set "compile": true, which compiles the layers of those',
            *(len(lost), lost[0]),
        )
    return model


@dataclass(frozen=True)
class Compiling:
    """The selection of a model's blocks to compile.

    Attributes:
        repeated: backend of repeated blocks; None if only marked modules are compiled.
        has: whether the module at a path is here.
        hinders: returns the reason why a block must run eagerly, or None; it may make sure that nothing interrupts the
            block.
        interrupts: the same for changes that a script may still make until the block's first call.
        tells: whether this rank reports the blocks that are not compiled.
    """

    repeated: str | None
    has: Callable[[str], bool]
    hinders: Callable[[nn.Module], str | None]
    interrupts: Callable[[nn.Module], str | None] | None = None
    tells: bool = True

    def begin(self, model: nn.Module) -> list[str]:
        """Compile the blocks on this rank when they are first called, and return their paths."""
        found = {path: (block, backend) for path, block, backend in self._blocks(model, "")}
        reasons: dict[str, str] = {}
        for path, (block, _) in found.items():
            reason = self.hinders(block)
            if reason is not None:
                reasons[path] = reason
        for reason in dict.fromkeys(reasons.values()):
            paths = [path for path, said in reasons.items() if said == reason]
            self._say(f"{len(paths)} of {len(found)} blocks ({paths[0]} …) are not compiled and run eagerly: {reason}")
        kinds: dict[tuple[type, str], BlockClass] = {}
        for path, (block, backend) in found.items():
            if path in reasons:
                continue
            key, method = (type(block), backend), _method_of(type(block))
            if key not in kinds:
                kinds[key] = BlockClass(type(block), method, backend, tells=self.tells)
            block.__dict__[method] = CompiledForward(block, path, kinds[key], self.interrupts)
        if not found and self.repeated is not None:
            self._say(
                "compile has no effect on this rank: it has no repeated blocks, which are elements of nn.ModuleList or "
                "nn.Sequential of one class; name the modules to compile by smp.compile(module)"
            )
        return [path for path in found if path not in reasons]

    def _say(self, said: str) -> None:
        if self.tells:
            logger.warning("%s", said)

    def _backend_of(self, module: nn.Module, *, is_repeated: bool) -> str | None:
        """Return the backend that a script gave a module, or that its blocks get."""
        own = vars(module).get(_MARK)
        if own:
            return own
        return self.repeated if is_repeated else None

    def _blocks(
        self, module: nn.Module, path: str, *, is_repeated: bool = False
    ) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield path, module and backend of the outermost marked or repeated blocks that are wholly here."""
        backend = self._backend_of(module, is_repeated=is_repeated)
        if backend is not None:
            places = {self.has(f"{path}.{name}".strip(".")) for name, _ in module.named_modules()}
            if places == {True}:
                yield path, module, backend
                return
            if _MARK in vars(module) and len(places) > 1:
                name = path or type(module).__name__
                self._say(f"{name}, given to smp.compile, is not compiled: parts of it are on other pipeline stages")
        for name, child in module.named_children():
            path_below = f"{path}.{name}".lstrip(".")
            yield from self._blocks(child, path_below, is_repeated=_is_repeated(child, module))


def _is_repeated(child: nn.Module, parent: nn.Module) -> bool:
    """Return whether a child has parameters and stands in a list with others of its class."""
    if not isinstance(parent, nn.ModuleList | nn.Sequential) or next(child.parameters(), None) is None:
        return False
    alike = [other for other in parent.children() if type(other) is type(child)]
    return len(alike) > 1
