"""The check of a split: all parts of a block in one process, compared with the whole block on random numbers.

It computes in float64 or float32.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.module_conversion.in_place.block_calls import BlockCall, in_type, other_mask, tensors, with_tensors
from smp_runtime.module_conversion.splitting import BlockSplit, Number, number_of, prepare
from smp_runtime.nn.split_in_place.linear import is_linear
from smp_runtime.tensor_parallel.block_entry import SharedInput
from smp_runtime.tensor_parallel.deferred import DeferredSlice
from smp_runtime.tensor_parallel.group import TensorGroup, Throttle
from smp_runtime.tensors.torch_private import without_modes

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Work
    from smp_runtime.nn.split_in_place.linear import LinearSplit
    from smp_runtime.parameters.registry import TensorSlice

#: Relative to the greatest element. They allow for another order of additions, even if a block uses float32 in a part.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}
#: A part waits for the others so long, in seconds; one that fails sets them free at once.
_PATIENCE = 60.0


class _Meeting:
    """A place where the parts of a block exchange tensors.

    The parts are threads of this process, and all of them come to every exchange.
    """

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=_PATIENCE)
        self._brought: list[Any] = [None] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every part's tensor."""
        self._brought[rank] = tensor.detach().clone()
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()  # no part brings its next tensor before all have this one
        return found

    def abort(self) -> None:
        """Release all waiting threads with an error."""
        self._barrier.abort()


class _NoWork:
    def wait(self) -> None:
        """Return at once: no collective is in flight."""


class _OfOnePart:
    """The collectives of one part, done by hand."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> Work:
        tensor.copy_(torch.stack(self._meeting.exchange(self._rank, tensor)).sum(0))
        return _NoWork()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: Any) -> Work:
        full.copy_(torch.cat(self._meeting.exchange(self._rank, shard)))
        return _NoWork()

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, group: Any) -> Work:
        total = torch.stack(self._meeting.exchange(self._rank, full)).sum(0)
        shard.copy_(total.view(-1, shard.numel())[self._rank])
        return _NoWork()


class _SimulatedGroup(TensorGroup):
    """One of several ranks that are threads of this process; all of them have one batch."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self._made, self._throttle, self._group = _OfOnePart(meeting, rank), Throttle(-1), None  # type: ignore[assignment]
        self.size, self.rank, self.prescaled, self.slices_activations = size, rank, True, False
        self.device = torch.device("cpu")

    @property
    def is_tracing(self) -> bool:
        """Return False: all simulated ranks run."""
        return False

    @property
    def _collectives(self) -> Any:
        return self._made


class _SimulatedLinear(nn.Module):
    """A part of a linear map."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, whole: Any, split: LinearSplit, group: TensorGroup, shared: SharedInput) -> None:
        super().__init__()
        self._how, self._group, self._shared = split, group, shared
        self.where: dict[str, TensorSlice] = {}
        for name in ("weight", "bias"):
            value = getattr(whole, name)
            if value is not None:
                if name in split.dims:
                    part = split.slice(tuple(value.shape), split.dims[name], group.rank, group.size)
                    self.where[name], value = part, part.cut(value)
                value = nn.Parameter(value.detach().clone(), requires_grad=True)
            self.register_parameter(name, value)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._how.apply(input, self.weight, self.bias, self._group, self._shared)


class NotEqualError(Exception):
    """An error: a split block does not compute the same as the whole one; the message reports where.

    Attributes:
        progress: how far it came: -1 if it was not tried, 0 if it did not run, 1 if its results differ, 2 if only
            gradients do.
    """

    def __init__(self, message: str, progress: int = 0) -> None:
        super().__init__(message)
        self.progress = progress


@dataclass(frozen=True)
class _PassResult:
    """What a pass forward and backward gave, by name; of each output, also whether gradients flow through it."""

    outputs: list[tuple[torch.Tensor, bool]]
    inputs: list[torch.Tensor | None]
    parameters: dict[str, torch.Tensor | None]
    slices: dict[str, TensorSlice]

    @property
    def least(self) -> float:
        """Return the smallest magnitude that errors of gradients are compared with.

        Some gradients are 0 except for rounding, such as that of a bias of keys. Their rounding errors are as large as those
        of the other gradients.
        """
        sizes = [float(gradient.abs().max()) for gradient in self.parameters.values() if gradient is not None]
        return max(1e-3, 1e-2 * max(sizes, default=0.0))


class EquivalenceCheck:
    """Compares splits of one block with the whole of it.

    Args:
        block: of the model; it stays as it is.
        call: what it is called with.
        size: into how many parts it is split.
        dtype: to compute in; float32 for blocks that mix float32 in by themselves.

    Raises:
        Exception: whatever the block raises when it is called so by itself.
    """

    def __init__(self, block: nn.Module, call: BlockCall, size: int, dtype: torch.dtype = torch.float64) -> None:
        self._size, self.dtype = size, dtype
        with without_modes(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.block = with_values(block).to(dtype).eval()
            self._call = in_type(call, dtype)
            #: Linear maps by path with what each was called with, in the order of the calls.
            self.seen: list[tuple[str, torch.Tensor]] = []
            with _noting(self.block, self.seen):
                self._whole = self._run(self.block, self._call)
            self._others = list(self._other_passes())

    def _other_passes(self) -> Iterator[tuple[BlockCall, _PassResult]]:
        """Yield the call with a mask if it has none, or without the one it has, and what the whole block makes of it.

        Attention without a mask takes another way through its code, which may read other numbers of heads.
        """
        call = other_mask(self._call)
        if call is not None:
            with contextlib.suppress(Exception):  # a block may refuse it in any way
                yield call, self._run(self.block, call)

    def call_of(self, path: str) -> BlockCall:
        """Return the arguments that an inner module is called with.

        Raises:
            KeyError: it is not called.
        """
        found: dict[str, BlockCall] = {}

        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            found.setdefault(path, in_type(BlockCall(args, kwargs), self.dtype))

        with _hooked(self.block.get_submodule(path), hook), without_modes(), torch.enable_grad():
            args, kwargs = with_tensors((tuple(self._call.args), dict(self._call.kwargs)), lambda tensor: tensor)
            self.block(*args, **kwargs)
        return found[path]

    def is_by_rows(self, batch: int) -> bool:
        """Return whether all tensors with gradients carry the batch in their first dim, without ambiguity.

        With a batch per rank only those can be gathered, and returned to their owners.
        """
        given = [t for t in (*tensors(self._call.args), *tensors(self._call.kwargs)) if t.dim()]
        rows = {tensor.shape[0] for tensor in given}
        # A length that is a multiple of the batch may be the batch of all ranks.
        doubtful = [count for count in rows if count > batch and count % batch == 0]
        if batch not in rows or doubtful:
            return False
        trained_rows = {tensor.shape[0] for tensor in given if tensor.requires_grad}
        if not trained_rows <= {batch}:
            return False
        return all(_is_output_by_rows(tensor, flows, batch) for tensor, flows in self._whole.outputs)

    def prove(self, split: BlockSplit) -> BlockSplit:
        """Check a split, and return it with the parameters that need their gradients summed.

        Raises:
            NotEqualError: it does not compute the same as the whole block.
        """
        with without_modes():
            return self._proved(split)

    def _proved(self, split: BlockSplit) -> BlockSplit:
        split = replace(split, summed=())  # which they are is found out here
        runs = self._all_parts(split, self._call)
        if results := self._sliced_results(runs):
            split = replace(split, results=(*split.results, *results))
            runs = self._all_parts(split, self._call)
        passes = [(runs, self._whole)]
        passes += [(self._all_parts(split, call), whole) for call, whole in self._others]
        # A gradient that is a sum in one call may be none, or only rounding, in another.
        summed = dict.fromkeys(name for parts, whole in passes for name in _compare(parts, whole))
        for parts, whole in passes:
            _require_sums(summed, parts, whole)
        return replace(split, summed=tuple(summed))

    def _sliced_results(self, runs: Sequence[_PassResult]) -> list[DeferredSlice]:
        """Return the results that every part returned its slice of, such as attention weights of its heads."""
        found = []
        for place, (expected, _) in enumerate(self._whole.outputs):
            if expected.dim() < 3:
                continue
            parts = [run.outputs[place][0] for run in runs if place < len(run.outputs)]
            dim = self._sliced_dim(expected, parts)
            if dim is not None and expected.shape[dim] % self._size == 0:
                found.append(DeferredSlice(place, dim, expected.shape[dim]))
        return found

    def _sliced_dim(self, expected: torch.Tensor, parts: Sequence[torch.Tensor]) -> int | None:
        """Return the first dim, after that of the batch, that is divided over the parts; None if there is none."""
        for dim in range(1, expected.dim()):
            shape = _cut(expected.shape, dim, expected.shape[dim] // self._size)
            are_slices = all(part.shape == shape for part in parts)
            if are_slices:
                return dim
        return None

    def slices_of_arguments(self, numbers: Iterable[Number]) -> tuple[DeferredSlice, ...]:
        """Return the arguments with a slice for each head that ``numbers`` reduce, such as a bias of attention scores."""
        heads = {number_of(self.block, path, name) for path, name, _ in numbers}
        found = []
        for place, value in self._call.given().items():
            if not isinstance(value, torch.Tensor) or value.dim() < 3:
                continue
            dims = [dim for dim in (1, 0) if value.shape[dim] in heads]
            if dims:
                found.append(DeferredSlice(place, dims[0], value.shape[dims[0]]))
        return tuple(found)

    def _all_parts(self, split: BlockSplit, call: BlockCall) -> list[_PassResult]:
        meeting, errors = _Meeting(self._size), []
        found: list[_PassResult | None] = [None] * self._size

        def run(rank: int) -> None:
            try:
                group = _SimulatedGroup(meeting, rank, self._size)
                found[rank] = self._run(_part(self.block, split, group), call)
            except BaseException as error:  # a thread would swallow it; it is raised below, on the caller's thread
                errors.append(error)
                meeting.abort()  # the others would wait for this part until the timeout

        # The parts meet in collectives, so all of them must run at the same time.
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
            raise NotEqualError(f"{type(first).__name__}: {first}") from first
        return [run for run in found if run is not None]

    def _run(self, block: nn.Module, call: BlockCall) -> _PassResult:
        inputs: list[torch.Tensor] = []

        def fresh(tensor: torch.Tensor) -> torch.Tensor:
            made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            if made.requires_grad:
                inputs.append(made)
            return made

        block.zero_grad()  # keeps the tensors of the pass before, which are results
        args, kwargs = with_tensors((tuple(call.args), dict(call.kwargs)), fresh)
        with torch.enable_grad():
            outputs = tensors(block(*args, **kwargs))
            floating = [t for t in outputs if t.is_floating_point() and t.requires_grad]
            # Each element of a result has its own weight, so that exchanged elements change the gradients.
            loss = sum((t * torch.linspace(1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in floating)
            if not isinstance(loss, torch.Tensor):
                raise NotEqualError("no result that depends on the inputs")
            loss.backward()
        slices = {}
        for path, part in block.named_modules():
            for name, where in part.__dict__.get("where", {}).items():
                slices[f"{path}.{name}".lstrip(".")] = where
        gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
        return _PassResult(
            [(t.detach(), t.requires_grad) for t in outputs], [t.grad for t in inputs], gradients, slices
        )


def _compare(runs: Sequence[_PassResult], whole: _PassResult) -> list[str]:
    """Compare the passes of all parts with that of the whole block; return whole parameters whose gradients are sums.

    Raises:
        NotEqualError: they differ.
    """
    for run in runs:
        if len(run.outputs) != len(whole.outputs):
            raise NotEqualError("another number of results", 1)
        for (found, _), (expected, _) in zip(run.outputs, whole.outputs, strict=True):
            if not _equal(found, expected):
                raise NotEqualError(f"results differ by {_distance(found, expected)}", 1)
        for mine, theirs in zip(run.inputs, whole.inputs, strict=True):
            if not _equal(mine, theirs):
                raise NotEqualError(f"gradients of the inputs differ by {_distance(mine, theirs)}", 2)
    return _summed(runs, whole)


def _summed(runs: Sequence[_PassResult], whole: _PassResult) -> list[str]:
    """Return the names of whole parameters with a gradient that is the sum of the parts' gradients."""
    least = whole.least
    found = []
    for name, expected in whole.parameters.items():
        parts = [run.parameters[name] for run in runs]
        wanted = [expected] * len(runs)
        is_sliced = name in runs[0].slices
        if is_sliced and expected is not None:
            wanted = [run.slices[name].cut(expected) for run in runs]
        are_equal = [_equal(mine, cut, least) for mine, cut in zip(parts, wanted, strict=True)]
        if all(are_equal):
            continue
        if is_sliced:
            raise NotEqualError(f"the gradient of {name} differs", 2)
        if not _equal(_sum_of(parts), expected, least):
            raise NotEqualError(f"the gradient of {name} differs, and so does its sum", 2)
        found.append(name)
    return found


def _require_sums(names: Iterable[str], runs: Sequence[_PassResult], whole: _PassResult) -> None:
    """Raise an error unless the whole block's gradients of parameters are sums of the parts' gradients."""
    for name in names:
        total = _sum_of([run.parameters[name] for run in runs])
        if not _equal(total, whole.parameters[name], whole.least):
            raise NotEqualError(
                f"the gradient of {name} is a sum with one attention mask, and with another it is not", 2
            )


def _cut(shape: torch.Size, dim: int, length: int) -> torch.Size:
    return torch.Size((*shape[:dim], length, *shape[dim + 1 :]))


@contextlib.contextmanager
def _hooked(module: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _noting(block: nn.Module, seen: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
    def hook(path: str) -> Any:
        return lambda _, args: seen.append((path, args[0])) if args else None

    parts = [(path, part) for path, part in block.named_modules() if is_linear(part)]
    handles = [part.register_forward_pre_hook(hook(path)) for path, part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _part(block: nn.Module, split: BlockSplit, group: TensorGroup) -> nn.Module:
    """Return one rank's copy of a block."""
    shared, memo = SharedInput(), {}
    for path, how in split.leaves.items():
        whole = block.get_submodule(path)
        memo[id(whole)] = _SimulatedLinear(whole, how, group, shared)
    made = copy.deepcopy(block, memo)
    for path, tables in split.tables.items():
        part = made.get_submodule(path)
        part.__dict__["where"] = where = tables.slices(part, group.rank, group.size)
        for name, slice_ in where.items():
            part._parameters[name] = nn.Parameter(slice_.cut(part.get_parameter(name).detach()).clone())
    prepare(made, split, group)
    return made


def with_values(module: nn.Module) -> nn.Module:
    """Return a copy of a module with random values and without hooks; the module may lack values."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                trains = parameter.is_floating_point()
                memo[id(parameter)] = nn.Parameter(_random(parameter, name), requires_grad=trains)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                memo[id(buffer)] = _random(buffer, name)
        leave_out_hooks(part, memo)
    return copy.deepcopy(module, memo)


def leave_out_hooks(part: nn.Module, memo: dict[int, Any]) -> None:
    """Let ``copy.deepcopy`` with ``memo`` copy a module without its hooks."""
    for name, value in vars(part).items():
        is_hooks = name.endswith("_hooks") and isinstance(value, dict)
        if is_hooks:
            memo[id(value)] = type(value)()  # deepcopy takes it for the copy that it has made already


def _random(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if not tensor.is_floating_point():
        return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
    values = torch.randn(tensor.shape, dtype=torch.float64, device="cpu")
    # As in a trained model: matrices keep the size of activations, and the weights of norms lie around 1.
    if tensor.dim() > 1:
        return values / tensor.shape[-1] ** 0.5
    return values * 0.3 + (name != "bias")


def _is_output_by_rows(tensor: torch.Tensor, flows: bool, batch: int) -> bool:
    """Return whether an output carries a multiple of the batch in its first dim, or no gradient flows through it."""
    if tensor.dim() <= 1:
        return False
    return not flows or tensor.shape[0] % batch == 0


def _sum_of(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present).sum(0) if present else None


def _equal(found: torch.Tensor | None, expected: torch.Tensor | None, least: float = 1e-3) -> bool:
    """Return whether two tensors are equal except for rounding, relative to the greatest element or ``least``."""
    if found is None or expected is None:
        return _is_zero(found) and _is_zero(expected)
    if found.shape != expected.shape:
        return False
    if not found.is_floating_point():
        return bool(torch.equal(found, expected))
    tolerance = _TOLERANCES.get(expected.dtype, _TOLERANCES[torch.float32])
    scale = max(least, float(expected.abs().max())) if expected.numel() else 1.0
    return bool(torch.allclose(found, expected, rtol=0.0, atol=tolerance * scale, equal_nan=True))


def _is_zero(tensor: torch.Tensor | None) -> bool:
    return tensor is None or not bool(tensor.count_nonzero())


def _distance(found: torch.Tensor | None, expected: torch.Tensor | None) -> str:
    if found is None or expected is None or found.shape != expected.shape:
        return f"{_shape(found)} and {_shape(expected)}"
    greatest = (found.double() - expected.double()).abs().max()
    return f"{float(greatest):.1g}"


def _shape(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else str(list(tensor.shape))
