"""Deferred initialisation: a model is built without memory, and its parameters are computed when they have a place.

While a model is created inside :class:`Deferral`, every operation on tensors is recorded and runs on the meta device,
where tensors have shapes but no storage. :func:`materialize` replays the record with real tensors and the
random numbers of the time of creation, so the parameters are bit for bit those of a creation without deferral.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.torch_private import (
    TorchDispatchMode,
    dispatch_modes,
    schema_of,
    storage_key,
    swap_contents,
    tree_leaves,
    tree_map,
    without_modes,
)

_META = torch.device("meta")
#: Of operations that draw random numbers.
_SEEDED = torch.Tag.nondeterministic_seeded

#: Function, arguments, keywords, and what it returned or wrote.
_Entry = tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]

#: All in-place initialisers of ``torch.nn.init``.
_INITIALISERS = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]

#: Operations that write every element of their first argument without looking at it.
_FILLS = {"fill_", "zero_", "normal_", "uniform_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_"}


class Deferral(TorchDispatchMode):
    """Records how tensors come about; use it as a context around the creation of a model."""

    def __init__(self) -> None:
        super().__init__()
        self._record: list[_Entry] = []
        self._constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._owned: set[int] = set()
        self._random_state: torch.Tensor | None = None

    @classmethod
    def current(cls) -> Deferral | None:
        """The deferral that the caller runs in, or None."""
        return next((mode for mode in reversed(dispatch_modes()) if isinstance(mode, cls)), None)

    def later(self, function: Callable[..., Any], *args: Any) -> None:
        """Let the replay call ``function(*args)`` at this place among the random numbers.

        Args:
            function: if the first of its arguments is a tensor made in this context, it writes all of it without looking
                at what was there; of its other arguments only whole tensors, not what holds them, become real.
        """
        with without_modes():
            args = tree_map(self._alias, args)
        self._record.append((function, args, {}, args[0] if args and isinstance(args[0], torch.Tensor) else None))

    @contextlib.contextmanager
    def taking_over(self) -> Iterator[None]:
        """What is recorded inside runs as soon as what it reads is complete, unless it draws random numbers.

        So what takes a tensor's place does it before the next one is computed, and not all of them exist at once.
        """
        first = len(self._record)
        with self:
            yield
        behind: dict[int, list[_Entry]] = {}
        last: dict[int, int] = {}
        for index, entry in enumerate(self._record):
            touched = _touched(*entry).touched
            moves = index >= first and schema_of(entry[0]) is not None and _SEEDED not in entry[0].tags
            place = max((last.get(storage, -1) for storage in touched), default=-1) if moves else index
            behind.setdefault(place, []).append(entry)
            last.update(dict.fromkeys(touched, place))
        self._record = [entry for place in sorted(behind) for entry in behind[place]]

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
            with without_modes():
                alias = self._alias(tensor)
            self._record.append((original, (alias, *args), kwargs, alias))
            return tensor

        return record

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.lift_fresh.default and not args[0].numel():
            return func(*args)  # torch.tensor([]): Transformers asks it for the device, and initialises nothing on meta
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - the operator's public name
            raise SMPUserError(
                "the model reads a tensor's value while it is created (item(), float(), if tensor: …), but with delayed "
                "parameter initialization there is no value yet; compute it with Python numbers, or create the model "
                "without the delay"
            )
        args, kwargs = tree_map(self._without_storage, (args, kwargs))
        on_meta = {**kwargs, "device": _META} if "device" in kwargs or _is_factory(func, args, kwargs) else kwargs
        outputs = func(*args, **on_meta)
        self._record.append(tree_map(self._alias, (func, args, kwargs, outputs)))
        tree_map(self._own, outputs)
        return outputs

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was created in this context and has no values yet."""
        return tensor.device == _META and storage_key(tensor) in self._owned

    @property
    def start(self) -> torch.Tensor:
        """The state of the random generator when the creation began."""
        if self._random_state is None:
            raise AssertionError("a deferral that was never entered has no start")
        return self._random_state

    @torch.no_grad()
    def replay(self, start: torch.Tensor, finished: Callable[[int, torch.Tensor], None]) -> torch.Tensor:
        """Run the record with real tensors on the CPU.

        No storage lives longer than it must: one that is about to be overwritten is freed and made again, so a model
        whose weights are all initialised once more at the end of its constructor never exists as a whole.

        Args:
            start: the random generator's state to replay from.
            finished: called with every storage (as the recorded tensors know it) and a tensor that lies in the real
                one, when nothing changes it any more.

        Returns:
            The state that the generator has after the replay.
        """
        real: dict[int, torch.Tensor] = {}
        kept: dict[int, torch.Tensor] = {id(meta): value for value, meta in self._constants.values()}
        for value, meta in self._constants.values():
            dense = torch.empty_strided(meta.shape, meta.stride(), dtype=value.dtype, device=value.device)
            real[storage_key(meta)] = dense.copy_(value)
        steps = [_touched(*entry) for entry in self._record]
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
            return _view_like(leaf, real)

        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(start)
            for (func, args, kwargs, outputs), step, after in zip(self._record, steps, _following(steps), strict=True):
                if step.is_view:
                    continue
                real_args, real_kwargs = tree_map(value_of, (args, kwargs))
                results = func(*real_args, **real_kwargs)
                if results is None:  # it wrote what it was given
                    results = real_args[: len(_tensors(outputs))]
                pairs = zip(_tensors(outputs), _tensors(results), strict=True)
                # No name may hold a tensor until the next operation has made its own.
                real.update({storage_key(meta): result for meta, result in pairs if storage_key(meta) not in real})
                del pairs, real_args, real_kwargs, results
                self._release(real, after, finished)
            end = torch.get_rng_state()
        for storage in self._owned & real.keys():  # constants that nothing was done to
            finished(storage, real[storage])
        return end

    def _release(
        self,
        real: dict[int, torch.Tensor],
        after: dict[int, bool | None],
        finished: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Let go of the storages whose content nothing looks at any more."""
        for storage, is_overwritten_next in after.items():
            if is_overwritten_next is None and storage in self._owned:
                finished(storage, real[storage])
            if is_overwritten_next is not False:
                real.pop(storage, None)

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

    def _alias(self, leaf: Any) -> Any:
        """What stays as it is when parameters are made real, and holds none of them."""
        is_constant = any(leaf is meta for _, meta in self._constants.values())
        return leaf.data if isinstance(leaf, torch.Tensor) and not is_constant else leaf

    def _own(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device == _META:
            self._owned.add(storage_key(leaf))
        return leaf


class Deferrals(list[Deferral]):
    """Records of models whose parameters are not computed yet; kept once per job."""


@contextlib.contextmanager
def deferring(deferrals: Deferrals) -> Iterator[None]:
    """Defer what is created inside, and put the record into the list; inside another deferral that one goes on."""
    if Deferral.current() is not None:
        yield
        return
    deferrals.append(Deferral())
    with deferrals[-1]:
        yield


#: A parameter as it was recorded, and the one of the module that waits for its values.
StandIn = tuple[nn.Parameter, nn.Parameter]


def stand_ins(deferrals: Deferrals, module: nn.Module, make: Callable[[nn.Parameter], torch.Tensor]) -> list[StandIn]:
    """Make the parameters of ``module`` real that wait for their values; ``make`` gives the tensor that each becomes.

    They stay the same objects, which an optimizer may hold already.
    """
    found = []
    for parameter in list(module.parameters()):
        if any(deferral.owns(parameter) for deferral in deferrals):
            other = nn.Parameter(make(parameter), parameter.requires_grad)
            other.__dict__.update(parameter.__dict__)
            swap_contents(parameter, other)
            found.append((other, parameter))
    return found


def materialize(
    deferrals: Deferrals,
    module: nn.Module,
    device: torch.device,
    *,
    replaced: list[StandIn] | None = None,
    take: Callable[[nn.Parameter, torch.Tensor], None] | None = None,
    agree: Callable[[torch.Tensor], torch.Tensor] = lambda state: state,
) -> None:
    """Replay the deferrals that ``module`` was created in, and take them off the list.

    Random numbers follow on each other as in a creation without deferral: a context that began where the one before
    it began continues where that one ended, and so does the script, if it has drawn or seeded nothing since.

    Args:
        replaced: what :func:`stand_ins` gave; default: every parameter becomes a real one with its values.
        take: gets each replaced parameter with its value, one after the other; default: they are copied.
        agree: turns this rank's state of the random generator at the start into the one that all ranks replay from.
    """
    if replaced is None:
        replaced = stand_ins(deferrals, module, lambda meta: torch.empty(0, dtype=meta.dtype, device="cpu"))
    take = take or (lambda parameter, value: setattr(parameter, "data", value.to(device)))
    before: tuple[torch.Tensor, torch.Tensor] | None = None
    for deferral in list(deferrals):
        waiting: dict[int, list[StandIn]] = {}
        for meta, parameter in replaced:
            if deferral.owns(meta):
                waiting.setdefault(storage_key(meta), []).append((meta, parameter))
        buffers = _buffers_of(deferral, module)
        if not waiting and not buffers:
            continue
        continues = before is not None and torch.equal(deferral.start, before[0])
        start = before[1] if before is not None and continues else agree(deferral.start)

        def finished(
            storage: int,
            real: torch.Tensor,
            waiting: Mapping[int, list[StandIn]] = waiting,
            buffers: Mapping[int, list[_Buffer]] = buffers,
        ) -> None:
            for meta, parameter in waiting.get(storage, ()):
                take(parameter, _view_like(meta, {storage: real}))
            _place_buffers(buffers.get(storage, ()), {storage: real}, device)

        end = deferral.replay(start, finished)
        before = (deferral.start, end)
        deferrals.remove(deferral)
        is_own = continues or torch.equal(start, deferral.start)
    if before is not None and is_own and torch.equal(torch.get_rng_state(), before[0]):
        torch.set_rng_state(before[1])


#: Its module, its name there, and the tensor as it was recorded.
_Buffer = tuple[nn.Module, str, torch.Tensor]


def _place_buffers(buffers: Iterable[_Buffer], real: Mapping[int, torch.Tensor], device: torch.device) -> None:
    """Give modules their buffers; one with several names stays one."""
    made: dict[int, torch.Tensor] = {}
    for owner, name, buffer in buffers:
        if id(buffer) not in made:
            made[id(buffer)] = _view_like(buffer, real).to(device)
        owner._buffers[name] = made[id(buffer)]


def _buffers_of(deferral: Deferral, module: nn.Module) -> dict[int, list[_Buffer]]:
    """The module's buffers that wait for their values, by storage."""
    buffers: dict[int, list[_Buffer]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and deferral.owns(buffer):
                buffers.setdefault(storage_key(buffer), []).append((owner, name, buffer))
    return buffers


@dataclass
class _Step:
    """What a recorded operation does to storages.

    Attributes:
        touched: those it reads or writes.
        overwritten: those whose former content it does not look at.
        sizes: in bytes.
        is_view: it only gives other views of a storage, which are made again when they are used.
    """

    touched: list[int]
    overwritten: set[int]
    sizes: dict[int, int]
    is_view: bool


def _touched(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> _Step:
    inputs, results = _tensors((args, dict(kwargs))), _tensors(outputs)
    before, after = {storage_key(t) for t in inputs}, {storage_key(t) for t in results}
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in (*inputs, *results)}
    schema = schema_of(func)
    is_view = schema is not None and not schema.is_mutable and bool(results) and after <= before
    if is_view:
        return _Step([], set(), sizes, True)
    overwritten = after - before
    fills = schema is None or str(schema.name).removeprefix("aten::") in _FILLS
    if fills and inputs and inputs[0].is_contiguous():
        target = inputs[0]
        others = {storage_key(t) for t in inputs[1:]}
        if target.numel() * target.element_size() == sizes[storage_key(target)] and storage_key(target) not in others:
            overwritten.add(storage_key(target))
    return _Step(list(dict.fromkeys((*sizes,))), overwritten, sizes, False)


def _following(steps: list[_Step]) -> list[dict[int, bool | None]]:
    """For each step and storage that it touches: whether the next that happens to it overwrites it; None if nothing does."""
    following: list[dict[int, bool | None]] = []
    coming: dict[int, bool | None] = {}
    for step in reversed(steps):
        following.append({storage: coming.get(storage) for storage in step.touched})
        coming.update({storage: storage in step.overwritten for storage in step.touched})
    return following[::-1]


def _is_factory(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation creates a tensor from nothing, and so would create a real one."""
    takes_device = any(argument.name == "device" for argument in schema_of(func).arguments)
    return takes_device and not _tensors((args, dict(kwargs)))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _view_like(meta: torch.Tensor, real: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The real tensor that lies in its storage as ``meta`` does in its own."""
    source = real[storage_key(meta)]
    return torch.empty(0, dtype=meta.dtype, device=source.device).set_(
        source.untyped_storage(), meta.storage_offset(), meta.shape, meta.stride()
    )
