"""Every operation of PyTorch on tensors of an emulated device becomes work of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from smp_emulation.checked import composites, random_numbers
from smp_emulation.checked.copies import Copies, elements_of
from smp_emulation.checked.streams.memory import StoragePlace, view_of
from smp_emulation.errors import CudaCallError

if TYPE_CHECKING:
    from smp_emulation.checked.streams.device import Devices
    from smp_emulation.checked.streams.execution import Lane

_aten = torch.ops.aten

#: Answer from shapes and types alone, and look at no element.
_OF_SHAPES = {_aten.is_same_size.default}
#: Take indices, and lists, that lie in host memory.
_MIXES = ("aten::index", "aten::_index_put", "aten::_unsafe_index", "aten::_foreach", "aten::_fused", "aten::_amp")
#: What norms with statistics change without saying so in their schemas: positions of arguments.
_UNSAID = {"aten::native_batch_norm": (3, 4), "aten::cudnn_batch_norm": (3, 4)}

_Touched = list[tuple[torch.Tensor, StoragePlace]]


class Operations(TorchDispatchMode):
    """Queues what touches a device; the rest runs at once, and is checked where it touches pinned memory.

    The results of queued work have their shapes at once, from a run on the meta device, and their elements late.
    """

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self._devices = devices
        self._copies = Copies(devices)
        self._shapes: dict[Any, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the compiler would be imported at the first operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        places = [self._devices.memory.place_of(tensor) for tensor in tensors]
        kwargs = composites.place_factory(func, tensors, kwargs)
        asked = kwargs.get("device")
        to_device = asked is not None and torch.device(asked).type == "cuda"
        devices = [place.device for place in places if place is not None and place.device is not None]
        if not to_device and not devices:
            return self._on_host(func, args, kwargs, tensors, places)
        if func.namespace == "c10d":
            return _run_collective(func, args, kwargs)
        if func in (_aten._to_copy.default, _aten.copy_.default):
            return self._copies.run(func, args, kwargs)
        if not tensors or func.overloadpacket in _LIKE:
            if asked is not None and not to_device:
                return self._in_host_memory(func, args, kwargs)  # in the form of a device's tensor
            return self._make(func, args, kwargs, self._device_of_new(tensors, asked))
        if func is _aten._fused_sdp_choice.default:
            return 0  # plain operations: CUDA's fused ones do not run here
        if func in _OF_SHAPES or _only_looks(func):
            return func(*args, **kwargs)
        number = devices[0] if asked is None else self._devices.index(asked)
        call = _DeviceCall(self._devices, func, flat, spec, number)
        if torch.Tag.inplace_view in func.tags:
            return self._reshape(call, func, args, kwargs)
        return self._queue(call)

    # -- host ------------------------------------------------------------------------------------------------------

    def _on_host(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], places: list[StoragePlace | None]
    ) -> Any:
        is_tracked = any(place is not None for place in places)
        if is_tracked and not _only_looks(func):
            self._note_host_access(func, args, kwargs, tensors, places)
        draws = torch.Tag.nondeterministic_seeded in func.tags and func is not _aten._local_scalar_dense.default
        if not draws:
            return self._in_host_memory(func, args, kwargs)
        # Another thread may have lent the host's generator to a device.
        with random_numbers.lock:
            return self._in_host_memory(func, args, kwargs)

    def _note_host_access(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], places: list[StoragePlace | None]
    ) -> None:
        written = set(map(id, _written(func, args, kwargs)))
        for tensor, place in zip(tensors, places, strict=True):
            if place is None or place.device is not None:
                continue
            writes = id(tensor) in written
            self._devices.host_touches(tensor, place, str(func), writes=writes)

    def _in_host_memory(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation at once, and register its result as pinned if it should be."""
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        result = func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
        self._devices.memory.register(result, StoragePlace(None, pinned=True))
        return result

    # -- device ----------------------------------------------------------------------------------------------------

    def _device_of_new(self, tensors: list[torch.Tensor], asked: Any) -> int:
        if asked is not None:
            return self._devices.index(asked)
        return self._devices.device_of(tensors[0]) or 0

    def _make(self, func: Any, args: Any, kwargs: Any, number: int) -> Any:
        """Queue a factory function: its result is new device memory, and tensor arguments only define its shape."""
        flat, spec = tree_flatten((args, {name: value for name, value in kwargs.items() if name != "pin_memory"}))
        forms = [_emptied(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        return self._queue(_DeviceCall(self._devices, func, forms, spec, number))

    def _reshape(self, call: _DeviceCall, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that changes a tensor's shape at once, and grow its storage if needed."""
        result = func(*args, **kwargs)
        place = self._devices.memory.place_of(args[0])
        size = args[0].untyped_storage().nbytes()
        if place is None:  # the storage is another one
            self._devices.adopt(args[0], call.number, call.lane)
        elif place.device is not None and size > (0 if place.block is None else place.block.elements.numel()):
            self._devices.wait_on_host("resize_", [call.lane])
            self._devices.memory.resize(place, size, call.lane)
        return result

    def _queue(self, call: _DeviceCall) -> Any:
        call.check_places()
        forms, spec = self._forms(call)
        if forms is None:
            return self._at_once(call)
        made = [form.on(self._devices, call) if isinstance(form, _Form) else form for form in forms]
        new = [tensor for tensor in made if isinstance(tensor, torch.Tensor)]
        call.touch(new)
        call.queue(new)
        return call.results(tree_unflatten(made, spec))

    def _forms(self, call: _DeviceCall) -> tuple[list[Any] | None, Any]:
        """Return the forms of all new tensors among the results, or None if they depend on tensor elements."""
        returns = call.func._schema.returns
        new = [r for r in returns if r.alias_info is None]
        if not new:
            return [], tree_flatten(())[1]
        if any("Tensor" not in str(r.type) for r in new):
            return None, None  # a number or a truth: the host wants to know
        key = call.key()
        if key not in self._shapes:
            try:
                results, spec = tree_flatten(call.on_zeros() if call.is_narrow else call.on_meta())
            except (NotImplementedError, RuntimeError) as error:
                if not _depends_on_elements(error, call.func):
                    raise
                return None, None
            self._shapes[key] = [_Form.of(leaf) for leaf in results], spec
        return self._shapes[key]

    def _at_once(self, call: _DeviceCall) -> Any:
        """Run an operation that the host must wait for: its result is a number, or its shapes depend on tensor elements."""
        call.touch(())
        call.count(())
        self._devices.wait_on_host(str(call.func), [call.lane])
        with random_numbers.draw_from(self._devices.generators[call.number]):
            results = call.run_on(call.real())
        lane, number = call.lane, call.number

        def made(result: torch.Tensor) -> torch.Tensor:
            tensor = self._devices.new_tensor(result, number, lane)
            place = self._devices.memory.place_of(tensor)
            if place is not None and place.block is not None:
                view_of(place.block, tensor).copy_(result)
            return tensor

        return call.results(tree_map_only(torch.Tensor, made, results))


class _Form:
    """Size, steps and type of a result."""

    def __init__(self, meta: torch.Tensor) -> None:
        self.meta = meta

    @classmethod
    def of(cls, leaf: Any) -> Any:
        return cls(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def on(self, devices: Devices, call: _DeviceCall) -> torch.Tensor:
        return devices.new_tensor(self.meta, call.number, call.lane)


class _DeviceCall:
    """An operation on a device with its arguments."""

    def __init__(self, devices: Devices, func: Any, flat: list[Any], spec: Any, number: int) -> None:
        self.devices = devices
        self.func = func
        self.flat = flat
        self.spec = spec
        self.number = number
        self.lane: Lane = devices.current(number)
        self.what = str(func)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.flat if isinstance(leaf, torch.Tensor)]

    def check_places(self) -> None:
        """Check that all tensors are on one device; a number may come from the host.

        Raises:
            CudaCallError: the tensors are on several devices.
        """
        mixes = self.func._schema.name.startswith(_MIXES) or self.func.overloadpacket in _LIKE
        for tensor in self._tensors:
            number = self.devices.device_of(tensor)
            if number == self.number:
                continue
            may_be_on_host = mixes or not tensor.ndim
            if number is None and may_be_on_host:
                continue
            other = "cpu" if number is None else f"cuda:{number}"
            raise CudaCallError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:{self.number} and {other}! "
                f"(in {self.what})"
            )

    def touch(self, new: Sequence[torch.Tensor]) -> None:
        """Record the tensors that the operation reads and writes."""
        args, kwargs = tree_unflatten(self.flat, self.spec)
        written = {id(tensor) for tensor in (*_written(self.func, args, kwargs), *new)}
        reads: _Touched = []
        writes: _Touched = []
        for tensor in (*self._tensors, *new):
            place = self.devices.memory.place_of(tensor)
            if place is None:
                continue
            if place.device is None:
                # Numbers and indices are read when the work is queued.
                self.devices.host_touches(tensor, place, self.what, writes=False)
            elif id(tensor) in written:
                writes.append((tensor, place))
            else:
                reads.append((tensor, place))
        self.devices.touch(self.lane, self.what, reads, writes)

    def key(self) -> Any:
        """Return the cache key for the forms of the results."""
        parts: list[tuple[Any, ...]] = []
        for leaf in self.flat:
            if isinstance(leaf, torch.Tensor):
                parts.append((leaf.size(), leaf.stride(), leaf.dtype))
            else:
                parts.append((type(leaf), repr(leaf)))
        return self.func, torch.get_default_dtype(), self.spec, tuple(parts)

    def on_meta(self) -> Any:
        """Return the result of the operation on meta tensors."""

        def meta(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
            # Shapes do not depend on random numbers.
            if isinstance(leaf, torch.Generator):
                return None
            return torch.device("meta") if isinstance(leaf, torch.device) else leaf

        args, kwargs = tree_unflatten([meta(leaf) for leaf in self.flat], self.spec)
        return self.func(*args, **kwargs)

    @property
    def is_narrow(self) -> bool:
        """Return whether an argument is in half precision.

        Some CPU kernels keep statistics in other data types then.
        """
        return any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in self._tensors)

    def on_zeros(self) -> Any:
        """Return the result of the operation on host tensors of zeros."""

        def zeros(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype).zero_()
            # Another one: the state of the script's generator must not change here.
            if isinstance(leaf, torch.Generator):
                return torch.Generator()
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        with random_numbers.from_state(torch.default_generator.get_state()):
            return self.run_on([zeros(leaf) for leaf in self.flat])

    def real(self) -> list[Any]:
        """Return the arguments with their elements on the device; those from the host are copied as they are now."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if not isinstance(leaf, torch.Tensor):
                return leaf
            place = self.devices.memory.place_of(leaf)
            # The script may change host memory before the work runs.
            if place is None or place.device is None:
                return leaf.detach().clone()
            return elements_of(leaf, place)

        return [real(leaf) for leaf in self.flat]

    def run_on(self, real: list[Any]) -> Any:
        """Run the operation on the arguments ``real``."""
        args, kwargs = tree_unflatten(real, self.spec)
        return self.func(*args, **kwargs)

    def queue(self, new: Sequence[torch.Tensor]) -> None:
        """Let the stream do it, and put what comes out where the results are."""
        if self.func.overloadpacket in _EMPTY:
            return
        self.count(new)
        real = self.real()
        places = [self.devices.memory.place_of(tensor) for tensor in new]
        targets: list[torch.Tensor | None] = []
        for tensor, place in zip(new, places, strict=True):
            if place is None or place.block is None:
                targets.append(None)
            else:
                targets.append(view_of(place.block, tensor))
        drawn = random_numbers.keep_random_state(self.func, self.run_on, real, self.devices.generators[self.number])
        # Not through self, which would keep the program's tensors alive until the work is done.
        func, spec = self.func, self.spec

        def run() -> None:
            args, kwargs = tree_unflatten(real, spec)
            with drawn():
                results = func(*args, **kwargs)
            leaves = [leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, torch.Tensor)]
            # The new tensors come last; before them are arguments that the operation has changed.
            last = leaves[len(leaves) - len(targets) :]
            for target, result in zip(targets, last, strict=True):
                if target is not None:
                    target.copy_(result)

        self.devices.queue(self.lane, run, self.what)

    def count(self, new: Sequence[torch.Tensor]) -> None:
        """Count the operation in the model of the device."""
        args, kwargs = tree_unflatten(self.flat, self.spec)
        self.devices.model.count_work(self.func, args, kwargs, self._tensors, new)

    def results(self, new: Any) -> Any:
        """Return the operation's results: arguments that it changed, and new tensors."""
        returns = self.func._schema.returns
        if not returns:
            return None
        args, kwargs = tree_unflatten(self.flat, self.spec)
        if all(r.alias_info is None for r in returns):
            return new
        changed = iter(_written(self.func, args, kwargs, whole=True))
        if len(returns) == 1:
            return next(changed)
        fresh = iter(new if isinstance(new, (tuple, list)) else (new,))
        results = []
        for r in returns:
            results.append(next(fresh) if r.alias_info is None else next(changed))
        return tuple(results)


_EMPTY = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
_LIKE = {
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like),
    *(_aten.new_empty, _aten.new_empty_strided, _aten.new_zeros, _aten.new_ones, _aten.new_full),
}


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    """Return empty host memory with a tensor's shape, strides and data type."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def _run_collective(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a barrier, the only collective from C++ that has no tensors of the program."""
    if func.overloadpacket is torch.ops.c10d.barrier:
        return func(*args, **kwargs)
    raise CudaCallError(
        f"{func} with tensors of an emulated device was called from C++, as DistributedDataParallel does; checked devices "
        "see collectives only where Python calls them: use smp.DistributedModel, or SMP_EMULATE_CUDA=1 without checks"
    )


def _only_looks(func: Any) -> bool:
    """Return whether an operation returns a view, or reads and writes no element."""
    returns = func._schema.returns
    for returned in returns:
        alias = returned.alias_info
        if alias is None or alias.is_write:
            return False
    return bool(returns)


def _written(func: Any, args: Any, kwargs: Any, *, whole: bool = False) -> list[Any]:
    """Return the tensor arguments that an operation changes; ``whole`` keeps a list of tensors as one item."""
    found: list[Any] = []
    schema = func._schema
    unsaid = _UNSAID.get(schema.name, ())
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        is_written = info is not None and info.is_write
        is_unsaid = position in unsaid and not whole
        if not is_written and not is_unsaid:
            continue
        if position < len(args):
            value = args[position]
        else:
            value = kwargs.get(argument.name)
        is_list = isinstance(value, (list, tuple))
        if is_list and not whole:
            found += [each for each in value if isinstance(each, torch.Tensor)]
        elif is_list or isinstance(value, torch.Tensor):
            found.append(value)
    return found


def _depends_on_elements(error: Exception, func: Any) -> bool:
    """Return whether a run without elements failed because the operation needs them."""
    if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        return True
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()
