"""Deferred initialisation: a model is built without memory, and its parameters are computed when they have a place.

While a model is created inside :class:`Deferral`, every operation on tensors is recorded and runs on the meta device,
where tensors have shapes but no storage. :meth:`Deferral.materialize` replays the record with real tensors and the
random numbers of the time of creation, so the parameters are bit for bit those of a creation without deferral.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from smp_runtime.errors import SMPUserError

_META = torch.device("meta")

#: All in-place initialisers of ``torch.nn.init``.
_INITIALISERS = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]


class Deferral(TorchDispatchMode):
    """Records how tensors come about; use it as a context around the creation of a model."""

    def __init__(self) -> None:
        super().__init__()
        self._record: list[tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]] = []
        self._constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._owned: set[int] = set()
        self._random_state: torch.Tensor | None = None

    def __enter__(self) -> Deferral:
        if self._random_state is None:
            self._random_state = torch.get_rng_state()
        self._originals = {name: getattr(nn.init, name) for name in _INITIALISERS}
        for name, original in self._originals.items():
            setattr(nn.init, name, self._recording(original))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        for name, original in self._originals.items():
            setattr(nn.init, name, original)
        super().__exit__(*exception)

    def _recording(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An initialiser that is recorded as one operation: some read values, and skip their work on meta tensors."""

        @functools.wraps(original)
        def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.owns(tensor):
                return original(tensor, *args, **kwargs)
            self._record.append((original, (tensor, *args), kwargs, tensor))
            return tensor

        return record

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default:
            raise SMPUserError(
                "the model reads a tensor's value while it is created (item(), float(), if tensor: …), but with delayed "
                "parameter initialization there is no value yet; compute it with Python numbers, or create the model "
                "without the delay"
            )
        args, kwargs = tree_map(self._without_storage, (args, kwargs))
        on_meta = {**kwargs, "device": _META} if "device" in kwargs or _is_factory(func, args, kwargs) else kwargs
        outputs = func(*args, **on_meta)
        self._record.append((func, args, kwargs, outputs))
        tree_map(self._own, outputs)
        return outputs

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was created in this context and has no values yet."""
        return tensor.device == _META and _storage(tensor) in self._owned

    @property
    def start(self) -> torch.Tensor:
        """The state of the random generator when the creation began."""
        if self._random_state is None:
            raise AssertionError("a deferral that was never entered has no start")
        return self._random_state

    def has_part_in(self, module: nn.Module) -> bool:
        """Whether a parameter or buffer of ``module`` waits for its values here."""
        tensors = [*module.parameters(), *module.buffers()]
        return any(self.owns(tensor) for tensor in tensors)

    @torch.no_grad()
    def materialize(self, module: nn.Module, device: torch.device, start: torch.Tensor) -> torch.Tensor:
        """Give the module's parameters and buffers their values, in place and on ``device``.

        Args:
            start: the random generator's state to replay from.

        Returns:
            The state that the generator has after the replay.
        """
        real: dict[int, torch.Tensor] = {}
        kept: dict[int, torch.Tensor] = {id(meta): value for value, meta in self._constants.values()}

        def value_of(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            # A Parameter is made around a tensor unseen; it lies in the same storage.
            return kept[id(leaf)] if id(leaf) in kept else _view_like(leaf, real)

        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(start)
            for func, args, kwargs, outputs in self._record:
                real_args, real_kwargs = tree_map(value_of, (args, kwargs))
                results = func(*real_args, **real_kwargs)
                for meta, result in zip(_tensors(outputs), _tensors(results), strict=True):
                    kept[id(meta)] = result
                    real.setdefault(_storage(meta), result)
            end = torch.get_rng_state()
        done: dict[int, torch.Tensor] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and self.owns(parameter):
                    # Tied parameters are one object and stay one.
                    value = done.get(id(parameter))
                    if value is None:
                        value = nn.Parameter(_view_like(parameter, real).to(device), parameter.requires_grad)
                        done[id(parameter)] = value
                    owner._parameters[name] = value  # type: ignore[assignment]
            for name, buffer in owner._buffers.items():
                if buffer is not None and self.owns(buffer):
                    owner._buffers[name] = _view_like(buffer, real).to(device)
        return end

    def _without_storage(self, leaf: Any) -> Any:
        """A meta tensor in place of a real one, which becomes a constant of the record."""
        if not isinstance(leaf, torch.Tensor) or leaf.device == _META:
            return leaf
        if id(leaf) not in self._constants:
            self._constants[id(leaf)] = (
                leaf,
                torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META),
            )
        return self._constants[id(leaf)][1]

    def _own(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device == _META:
            self._owned.add(_storage(leaf))
        return leaf


def materialize(deferrals: list[Deferral], module: nn.Module, device: torch.device) -> None:
    """Replay the deferrals that ``module`` was created in, and take them off the list.

    Random numbers follow on each other as in a creation without deferral: a context that began where the one before
    it began continues where that one ended, and so does the script, if it has drawn or seeded nothing since.
    """
    before: tuple[torch.Tensor, torch.Tensor] | None = None
    for deferral in list(deferrals):
        if not deferral.has_part_in(module):
            continue
        continues = before is not None and torch.equal(deferral.start, before[0])
        end = deferral.materialize(module, device, before[1] if before is not None and continues else deferral.start)
        before = (deferral.start, end)
        deferrals.remove(deferral)
    if before is not None and torch.equal(torch.get_rng_state(), before[0]):
        torch.set_rng_state(before[1])


def _is_factory(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation creates a tensor from nothing, and so would create a real one."""
    takes_device = any(argument.name == "device" for argument in func._schema.arguments)
    return takes_device and not _tensors((args, dict(kwargs)))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _view_like(meta: torch.Tensor, real: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The real tensor that lies in its storage as ``meta`` does in its own."""
    source = real[_storage(meta)]
    return torch.empty(0, dtype=meta.dtype, device=source.device).set_(
        source.untyped_storage(), meta.storage_offset(), meta.shape, meta.stride()
    )
