"""Deferred initialisation: a model is built without memory, and its parameters are computed when they have a place.

While a model is created inside :class:`Deferral`, every operation on tensors is recorded and runs on the meta device,
where tensors have shapes but no storage. :func:`materialize` replays the record with real tensors and the
random numbers of the time of creation, so the parameters are bit for bit those of a creation without deferral.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.parameters.creation_appearance import Appearances
from smp_runtime.tensors.torch_private import (
    DisableTorchFunction,
    TorchDispatchMode,
    dispatch_modes,
    schema_of,
    storage_key,
    tree_leaves,
    tree_map,
    without_modes,
)

#: Where tensors without values lie.
_META = torch.device("meta")
#: Of operations that draw random numbers.
_SEEDED = torch.Tag.nondeterministic_seeded

#: Function, arguments, keywords, its result or written tensors, and the default type of tensors at that moment.
_Entry = tuple[Any, tuple[Any, ...], Mapping[str, Any], Any, torch.dtype]

#: Operations that write every element of their first argument without looking at it.
_FILLS = {"fill_", "zero_", "normal_", "uniform_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_"}


class RandomNumbers(NamedTuple):
    """Where the random numbers of a creation come from.

    Attributes:
        start: the state of the generator at the begin.
        seedings: later ones, by the number of the draw that they come before.
    """

    start: torch.Tensor
    seedings: dict[int, torch.Tensor]

    def before(self, draw: int) -> None:
        """Seed the generator where the script did."""
        if draw in self.seedings:
            torch.set_rng_state(self.seedings[draw])


class Deferral(TorchDispatchMode):
    """Records how tensors come about; use it as a context around the creation of a model."""

    def __init__(self) -> None:
        super().__init__()
        self._record: list[_Entry] = []
        self._constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._owned: set[int] = set()
        self._start: torch.Tensor | None = None
        self._agreed: RandomNumbers | None = None
        #: By the number of the random draw that it comes before, a state that the script has set the generator to.
        self._seedings: dict[int, torch.Tensor] = {}
        self._draws = 0
        #: By storage, the device that its tensors will be on; without those that the script wants on the meta device.
        self._devices: dict[int, torch.device] = {}
        self._appearances = Appearances(self._device_of, self._skipped, self._without_storage)
        self._is_taking_over = False

    @classmethod
    def current(cls) -> Deferral | None:
        """Return the deferral that the caller runs in, or None."""
        return next((mode for mode in reversed(dispatch_modes()) if isinstance(mode, cls)), None)

    def later(self, function: Callable[..., Any], *args: Any) -> None:
        """Let the replay call ``function(*args)`` at this place among the random numbers.

        Args:
            function: if the first of its arguments is a tensor made in this context, it writes all of it without looking
                at what was there; of its other arguments only whole tensors, not what holds them, become real.
        """
        with without_modes():
            args = tree_map(self._alias, args)
        self._draw()
        self._note(function, args, {}, args[0] if args and isinstance(args[0], torch.Tensor) else None)

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> None:
        self._record.append((function, args, kwargs, outputs, torch.get_default_dtype()))

    @contextlib.contextmanager
    def taking_over(self) -> Iterator[None]:
        """Run operations recorded in the block as soon as their inputs are complete, except random ones.

        So a tensor's replacement takes its place before the next tensor is computed. Not all of them exist at once.
        """
        first = len(self._record)
        self._is_taking_over = True
        try:
            with self:
                yield
        finally:
            self._is_taking_over = False
        behind: dict[int, list[_Entry]] = {}
        last: dict[int, int] = {}
        for index, entry in enumerate(self._record):
            touched = _touched(*entry[:4]).touched
            moves = index >= first and schema_of(entry[0]) is not None and _SEEDED not in entry[0].tags
            place = max((last.get(storage, -1) for storage in touched), default=-1) if moves else index
            behind.setdefault(place, []).append(entry)
            last.update(dict.fromkeys(touched, place))
        self._record = [entry for place in sorted(behind) for entry in behind[place]]

    def __enter__(self) -> Deferral:
        if not self._is_taking_over:  # the library's own code must see which tensors have no values
            #: The state of the generator as this left it; another one is the script's doing.
            self._generator = torch.get_rng_state()
            if self._start is None:
                self._start = self._generator
            self._appearances.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if not self._is_taking_over:
            self._appearances.__exit__(*exception)

    def _skipped(self, initialiser: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> None:
        """Record an initialiser as one operation: it reads values, so that on the meta device it does nothing."""
        with without_modes():
            alias = self._alias(tensor)
        self._draw()
        self._note(initialiser, (alias, *args), {}, alias)

    def _draw(self) -> None:
        """Note that the next operation draws random numbers, and where from if the script has seeded the generator."""
        if not self._is_taking_over:
            with without_modes():
                state = torch.get_rng_state()
                if not torch.equal(state, self._generator):
                    self._seedings[self._draws] = state
                # A script that seeds the generator with the same number again brings it back to another state than this.
                torch.rand(1, device="cpu")
                self._generator = torch.get_rng_state()
        self._draws += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # A method that PyTorch hands to no function mode, such as set_, would meet appearances here.
        with DisableTorchFunction():
            return self._recorded(func, args, dict(kwargs or {}))

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.lift_fresh.default and not args[0].numel():
            return func(*args)  # torch.tensor([]): Transformers asks it for the device, and initialises nothing on meta
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - the operator's public name
            raise SMPUserError(
                "the model reads a tensor's value while it is created (item(), float(), if tensor: …), but with delayed "
                "parameter initialization there is no value yet; compute it with Python numbers, or create the model "
                "without the delay",
                code="SMP303",
            )
        args, kwargs = tree_map(self._without_storage, (args, kwargs))
        asked = kwargs.get("device")
        if asked == _META and not (self._appearances.asks_for_meta or self._is_taking_over):
            # PyTorch's own code makes it beside a tensor that it sees there, such as the number of ``mask[index] = 0``.
            asked, kwargs = None, {**kwargs, "device": torch.device("cpu")}
        on_meta = {**kwargs, "device": _META} if "device" in kwargs or _is_factory(func, args, kwargs) else kwargs
        if _SEEDED in func.tags:
            self._draw()
        outputs = func(*args, **on_meta)
        self._note(*tree_map(self._alias, (func, args, kwargs, outputs)))
        self._own(_tensors(outputs), self._place((args, kwargs), asked))
        return outputs

    def _place(self, inputs: Any, asked: torch.device | None) -> torch.device | None:
        """Return the device for an operation's results; None if the script wants them on the meta device."""
        if asked is not None:
            device = torch.device(asked)
            return None if device == _META else device
        tensors = _tensors(inputs)
        if any(self._device_of(tensor) is None for tensor in tensors):
            return None
        # Numbers on the CPU may be combined with tensors on any device.
        with_dims = [tensor for tensor in tensors if tensor.dim()]
        if not with_dims:
            return torch.device("cpu")
        return self._device_of(with_dims[0])

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was created in this context and has no values yet."""
        return tensor.device == _META and storage_key(tensor) in self._owned

    def _device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the device that a tensor of this context will be on; None for others."""
        if not isinstance(tensor, torch.Tensor) or tensor.device != _META or tensor.layout != torch.strided:
            return None
        return self._devices.get(storage_key(tensor))

    @property
    def numbers(self) -> RandomNumbers:
        """Return the random generator's states: at the start of the creation, and those that the script has set inside."""
        if self._start is None:
            raise AssertionError("a deferral that was never entered has no start")
        return RandomNumbers(self._start, self._seedings)

    def agree(self, share: Callable[[Any], Any]) -> None:
        """Choose the random numbers to replay from, once.

        Args:
            share: turns this rank's numbers into those that all ranks replay from; every one of them calls it.
        """
        if self._agreed is None:
            self._agreed = RandomNumbers(*share(tuple(self.numbers)))

    @property
    def agreed(self) -> RandomNumbers:
        """Return the random numbers to replay from; those of this rank before :meth:`agree`."""
        return self._agreed or self.numbers

    @property
    def left(self) -> torch.Tensor:
        """Return the state of the random generator at the end of the context."""
        return self._generator

    @torch.no_grad()
    def replay(self, numbers: RandomNumbers, finished: Callable[[int, torch.Tensor], None]) -> torch.Tensor:
        """Run the record with real tensors on the CPU.

        No storage lives longer than it must. A storage is freed and made again if the next operation overwrites it. So a
        model never exists as a whole if its constructor initialises all weights once more at its end.

        Args:
            numbers: the random generator's states to replay from.
            finished: called with every storage (as the recorded tensors know it) and a tensor that lies in the real
                one, when nothing changes it any more.

        Returns:
            The state that the generator has after the replay.
        """
        kept: dict[int, torch.Tensor] = {id(meta): value for value, meta in self._constants.values()}
        real = self._real_constants()
        steps = [_touched(*entry[:4]) for entry in self._record]
        sizes = {storage: size for step in steps for storage, size in step.sizes.items()}

        def value_of(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in kept:
                return kept[id(leaf)]
            storage = storage_key(leaf)
            if storage not in real:
                real[storage] = torch.empty(sizes[storage], dtype=torch.uint8, device="cpu")
            # A Parameter is made around a tensor unseen; it lies in the same storage.
            return view_like(leaf, real)

        with torch.random.fork_rng(devices=[]), unchanged_default_dtype():
            torch.set_rng_state(numbers.start)
            draws = itertools.count()
            for (func, args, kwargs, outputs, dtype), step, after in zip(
                self._record, steps, _following(steps), strict=True
            ):
                if step.is_view:
                    continue
                torch.set_default_dtype(dtype)  # of what arithmetic makes out of whole numbers, for example
                if _draws(func):
                    numbers.before(next(draws))
                real_args, real_kwargs = tree_map(value_of, (args, kwargs))
                results = func(*real_args, **real_kwargs)
                # A function without a result has written into its first arguments.
                written = _tensors(real_args[: len(_tensors(outputs))] if results is None else results)
                pairs = zip(_tensors(outputs), written, strict=True)
                # No name may hold a tensor until the next operation has made its own.
                real.update({storage_key(meta): result for meta, result in pairs if storage_key(meta) not in real})
                del pairs, real_args, real_kwargs, results, written
                self._release(real, after, finished)
            end = torch.get_rng_state()
        for storage in self._owned & real.keys():  # constants that nothing was done to
            finished(storage, real[storage])
        return end

    def _real_constants(self) -> dict[int, torch.Tensor]:
        """Return copies of the record's constants, by storage."""
        real: dict[int, torch.Tensor] = {}
        for value, meta in self._constants.values():
            dense = torch.empty_strided(meta.shape, meta.stride(), dtype=value.dtype, device=value.device)
            real[storage_key(meta)] = dense.copy_(value)
        return real

    def _release(
        self,
        real: dict[int, torch.Tensor],
        after: dict[int, bool | None],
        finished: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Release the storages with content that no later operation reads."""
        for storage, is_overwritten_next in after.items():
            if is_overwritten_next is None and storage in self._owned:
                finished(storage, real[storage])
            if is_overwritten_next is not False:
                real.pop(storage, None)

    def _without_storage(self, leaf: Any) -> Any:
        """Return a meta tensor in place of a real one, which becomes a constant of the record."""
        if not isinstance(leaf, torch.Tensor) or leaf.device == _META:
            return leaf
        if id(leaf) not in self._constants:
            with DisableTorchFunction():
                meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)
            self._constants[id(leaf)] = (leaf, meta)
            self._devices[storage_key(meta)] = leaf.device
        return self._constants[id(leaf)][1]

    def _alias(self, leaf: Any) -> Any:
        """Return an alias of a tensor that stays as it is when parameters are made real, and keeps none alive."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_constant = any(leaf is meta for _, meta in self._constants.values())
        return leaf if is_constant else leaf.data

    def _own(self, tensors: list[torch.Tensor], place: torch.device | None) -> None:
        for tensor in tensors:
            if tensor.device != _META:
                continue
            key = storage_key(tensor)
            self._owned.add(key)
            if place is not None:
                self._devices.setdefault(key, place)


class Deferrals(list[Deferral]):
    """Records of models with parameters that are not computed yet; kept once per job."""

    def agree(self, module: nn.Module, share: Callable[[Any], Any]) -> None:
        """Agree on the random numbers that ``module`` is created from; see :meth:`Deferral.agree`."""
        tensors = [*module.parameters(), *module.buffers()]
        for deferral in self:
            if any(deferral.owns(tensor) for tensor in tensors):
                deferral.agree(share)


@contextlib.contextmanager
def defer_creation(deferrals: Deferrals) -> Iterator[None]:
    """Defer creations inside the block, and append the record to the list.

    Inside another deferral, that one continues.
    """
    if Deferral.current() is not None:
        yield
        return
    deferrals.append(Deferral())
    with deferrals[-1]:
        yield


@contextlib.contextmanager
def unchanged_default_dtype() -> Iterator[None]:
    """Restore PyTorch's default dtype at the end."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class _Step:
    """The effects of a recorded operation on storages.

    Attributes:
        touched: those it reads or writes.
        overwritten: those that it writes without reading their former content.
        sizes: in bytes.
        is_view: it only returns other views of a storage, which are made again when they are used.
    """

    touched: list[int]
    overwritten: set[int]
    sizes: dict[int, int]
    is_view: bool


def _touched(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> _Step:
    inputs, results = _tensors((args, dict(kwargs))), _tensors(outputs)
    before = {storage_key(tensor) for tensor in inputs}
    after = {storage_key(tensor) for tensor in results}
    sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in (*inputs, *results)}
    schema = schema_of(func)
    returns_parts = bool(results) and after <= before
    if returns_parts and schema is not None and not schema.is_mutable:
        return _Step([], set(), sizes, is_view=True)
    overwritten = after - before
    fills = schema is None or str(schema.name).removeprefix("aten::") in _FILLS
    if fills and inputs and _is_whole_storage(inputs[0]):
        target, *read = map(storage_key, inputs)
        if target not in read:
            overwritten.add(target)
    return _Step(list(sizes), overwritten, sizes, is_view=False)


def _is_whole_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has all elements of its storage."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _following(steps: list[_Step]) -> list[dict[int, bool | None]]:
    """Return, for each step and touched storage, whether the next step that touches it overwrites it.

    The value is None if no later step touches it.
    """
    following: list[dict[int, bool | None]] = []
    coming: dict[int, bool | None] = {}
    for step in reversed(steps):
        following.append({storage: coming.get(storage) for storage in step.touched})
        coming.update({storage: storage in step.overwritten for storage in step.touched})
    return following[::-1]


def _draws(func: Any) -> bool:
    """Return whether a recorded operation may draw random numbers."""
    return schema_of(func) is None or _SEEDED in func.tags


def _is_factory(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation creates a tensor from nothing, and so would create a real one."""
    takes_device = any(argument.name == "device" for argument in schema_of(func).arguments)
    return takes_device and not _tensors((args, dict(kwargs)))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def view_like(meta: torch.Tensor, real: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the real tensor that lies in its storage as ``meta`` does in its own."""
    source = real[storage_key(meta)]
    return torch.empty(0, dtype=meta.dtype, device=source.device).set_(
        source.untyped_storage(), meta.storage_offset(), meta.shape, meta.stride()
    )
