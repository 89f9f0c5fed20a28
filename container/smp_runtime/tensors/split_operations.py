"""Operations that can compute their weights' gradients separately: linear layers, embeddings, convolutions, norms.

:class:`SplitOperations` takes the calls that PyTorch's modules and scripts make of them: ``F.linear``,
``addmm``, ``matmul`` with a parameter, ``F.embedding``, ``F.conv1d`` to ``conv3d``, ``F.layer_norm`` and
``F.group_norm``, also inside ``F.multi_head_attention_forward``. Everything else runs as it is. So does a call
that cannot be split: a weight that is no leaf, autocast, vmap, tensors of other classes.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from smp_runtime.tensors.lazy_tensor import plain_of
from smp_runtime.tensors.nested import rows_of
from smp_runtime.tensors.torch_private import is_transformed, taken_apart, tree_map
from smp_runtime.tensors.weight_gradients import Gradients, SplittableOperation, is_deferrable, split

#: What backward needs; None for what an operation has not.
_Kept = Sequence[Any]
_aten = torch.ops.aten


def _weight_for(weight: torch.Tensor, wanted: Sequence[bool]) -> torch.Tensor:
    """Return the weight for PyTorch's backward functions, which read its elements only for the input's gradient.

    Gradients of weights are computed when the elements may be gone: sharded parameters are freed after the
    backward pass.
    """
    return weight if wanted[0] else torch.empty_like(weight)


class _Linear:
    """``input @ weight.T + bias``: input ``[…, in]``, weight ``[out, in]``, bias ``[out]`` or None."""

    weights = (1, 2)

    def __init__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.tensors: _Kept = (input, weight, bias)

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, _Kept]:
        input, weight, bias = tensors
        return F.linear(input, weight, bias), (input, weight)

    def gradients(self, gradient: torch.Tensor, kept: _Kept, wanted: Sequence[bool]) -> Gradients:
        input, weight = kept
        return (
            gradient @ weight.conj() if wanted[0] else None,
            rows_of(gradient).t() @ rows_of(input).conj() if wanted[1] else None,
            rows_of(gradient).sum(0) if wanted[2] else None,
        )


class _Product:
    """``input @ weight (+ bias)``: input ``[…, in]``, weight ``[in, out]``, bias ``[out]`` or None."""

    weights = (1, 2)

    def __init__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.tensors: _Kept = (input, weight, bias)

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, _Kept]:
        input, weight, bias = tensors
        output = input @ weight if bias is None else torch.addmm(bias, input, weight)
        return output, (input, weight)

    def gradients(self, gradient: torch.Tensor, kept: _Kept, wanted: Sequence[bool]) -> Gradients:
        input, weight = kept
        return (
            gradient @ weight.mH if wanted[0] else None,
            rows_of(input).mH @ rows_of(gradient) if wanted[1] else None,
            rows_of(gradient).sum(0) if wanted[2] else None,
        )


class _Embedding:
    """Rows of a table ``[rows, width]`` by indices of any shape."""

    weights = (1,)

    def __init__(self, indices: torch.Tensor, table: torch.Tensor, padding: int, by_frequency: bool) -> None:
        self.tensors: _Kept = (indices, table)
        self._rows = table.shape[0]
        self._padding = padding
        self._by_frequency = by_frequency

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, _Kept]:
        indices, table = tensors
        output = torch.embedding(table, indices, self._padding, self._by_frequency, False)
        return output, (indices,)

    def gradients(self, gradient: torch.Tensor, kept: _Kept, wanted: Sequence[bool]) -> Gradients:
        if not wanted[1]:
            return None, None
        (indices,) = kept
        found = _aten.embedding_dense_backward(gradient, indices, self._rows, self._padding, self._by_frequency)
        return None, found


class _Convolution:
    """Input ``[batch, in, …]``, weight ``[out, in / groups, …]``, bias ``[out]`` or None."""

    weights = (1, 2)

    def __init__(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: tuple[Any, ...]
    ) -> None:
        self.tensors: _Kept = (input, weight, bias)
        self._how = how  # stride, padding, dilation, groups

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, _Kept]:
        input, weight, bias = tensors
        stride, padding, dilation, groups = self._how
        output = torch.convolution(input, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
        self._bias = None if bias is None else list(bias.shape)
        return output, (input, weight)

    def gradients(self, gradient: torch.Tensor, kept: _Kept, wanted: Sequence[bool]) -> Gradients:
        input, weight = kept
        stride, padding, dilation, groups = self._how
        found: Gradients = _aten.convolution_backward(
            *(
                gradient,
                input,
                _weight_for(weight, wanted),
                self._bias,
                stride,
                padding,
                dilation,
                False,
                [0] * len(stride),
                groups,
            ),
            list(wanted),
        )
        return [each if wants else None for each, wants in zip(found, wanted, strict=True)]


class _LayerNorm:
    """Over the last dimensions, ``shape`` of them; weight and bias of that shape, or None."""

    weights = (1, 2)

    def __init__(
        self,
        input: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> None:
        self.tensors: _Kept = (input, weight, bias)
        self._shape = list(shape)
        self._eps = eps

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, _Kept]:
        input, weight, bias = tensors
        output, mean, scale = torch.native_layer_norm(input, self._shape, weight, bias, self._eps)
        return output, (input, mean, scale, weight, bias)

    def gradients(self, gradient: torch.Tensor, kept: _Kept, wanted: Sequence[bool]) -> Gradients:
        input, mean, scale, weight, bias = kept
        found: Gradients = _aten.native_layer_norm_backward(
            gradient, input, self._shape, mean, scale, _weight_for(weight, wanted), bias, list(wanted)
        )
        return [each if wants else None for each, wants in zip(found, wanted, strict=True)]


class _GroupNorm:
    """Input ``[batch, channels, …]``; weight and bias ``[channels]``, or None."""

    weights = (1, 2)

    def __init__(
        self, input: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> None:
        self.tensors: _Kept = (input, weight, bias)
        batch, channels, *rest = input.shape
        self._sizes = (batch, channels, math.prod(rest), groups)
        self._eps = eps

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, _Kept]:
        input, weight, bias = tensors
        input = input.contiguous()
        output, mean, scale = torch.native_group_norm(input, weight, bias, *self._sizes, self._eps)
        return output, (input, mean, scale, weight)

    def gradients(self, gradient: torch.Tensor, kept: _Kept, wanted: Sequence[bool]) -> Gradients:
        input, mean, scale, weight = kept
        found: Gradients = _aten.native_group_norm_backward(
            gradient.contiguous(), input, mean, scale, _weight_for(weight, wanted), *self._sizes, list(wanted)
        )
        return [each if wants else None for each, wants in zip(found, wanted, strict=True)]


# ---- from calls to operations: None if a call cannot be split ----


def _linear(input: Any, weight: Any, bias: Any = None) -> SplittableOperation | None:
    if not is_deferrable(weight) or weight.dim() != 2:
        return None
    return _Linear(input, weight, bias)


def _addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None
) -> SplittableOperation | None:
    is_plain = beta == 1 and alpha == 1 and out is None
    if not is_plain or not is_deferrable(mat2):
        return None
    is_bias = input.dim() == 1 and input.shape[0] == mat2.shape[1]
    if not is_bias:
        return None
    return _Product(mat1, mat2, input)


def _matmul(input: Any, other: Any, *, out: Any = None) -> SplittableOperation | None:
    if out is not None or not is_deferrable(other):
        return None
    is_linear_map = other.dim() == 2 and input.dim() >= 2
    return _Product(input, other) if is_linear_map else None


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> SplittableOperation | None:
    if max_norm is not None or sparse or not is_deferrable(weight):
        return None
    padding = -1  # none
    if padding_idx is not None:
        padding = padding_idx if padding_idx >= 0 else weight.shape[0] + padding_idx
    return _Embedding(input, weight, padding, scale_grad_by_freq)


def _convolution(dimensions: int) -> Callable[..., SplittableOperation | None]:
    def each(value: Any) -> list[int]:
        if isinstance(value, int):
            return [value] * dimensions
        if len(value) == 1:
            return list(value) * dimensions
        return list(value)

    def convolution(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> SplittableOperation | None:
        # With "same" the two sides may be padded differently; without a batch there is one dimension fewer.
        if padding == "same" or input.dim() != dimensions + 2:
            return None
        if not is_deferrable(weight):
            return None
        padding = 0 if padding == "valid" else padding
        return _Convolution(input, weight, bias, (each(stride), each(padding), each(dilation), groups))

    return convolution


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> SplittableOperation | None:
    fits = is_deferrable(weight) and input.dtype == weight.dtype  # mixed types go through kernels of their own
    return _LayerNorm(input, normalized_shape, weight, bias, eps) if fits else None


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> SplittableOperation | None:
    fits = is_deferrable(weight) and input.dtype == weight.dtype and input.dim() > 2
    return _GroupNorm(input, num_groups, weight, bias, eps) if fits else None


_CALLS: Mapping[Any, Callable[..., SplittableOperation | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.mm: _matmul,
    torch.Tensor.__matmul__: _matmul,
    F.embedding: _embedding,
    F.conv1d: _convolution(1),
    F.conv2d: _convolution(2),
    F.conv3d: _convolution(3),
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
}


#: Made of operations that can be split, but a whole to modes otherwise.
_ATTENTION = taken_apart(F.multi_head_attention_forward)

#: Calls that run a backward pass and that modes can take.
_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


class SplitOperations(TorchFunctionMode):
    """A mode that takes the calls of operations that can be split; for :func:`.weight_gradients.split_inside`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        make = _CALLS.get(func)
        # Context parallelism wraps one of the backward passes.
        is_backward = getattr(func, "__wrapped__", func) in _BACKWARD
        if make is None and not is_backward and func is not F.multi_head_attention_forward:
            return func(*args, **kwargs)
        if make is not None and torch.is_grad_enabled():
            # In a recomputation another stage's tensor is there already; both passes must save the same tensors.
            args, kwargs = tree_map(plain_of, (args, kwargs))
            operation = _operation(make, args, kwargs)
            if operation is not None:
                return split(operation)
        if func is F.multi_head_attention_forward and torch.is_grad_enabled() and _are_plain(args, kwargs):
            with self:
                return _ATTENTION(*args, **kwargs)
        edges = _edges(func, args, kwargs) if is_backward else None
        if edges is None:
            return func(*args, **kwargs)
        # Checkpointed regions run again inside, as they did in the forward pass; calls with tensors would come back here.
        with self:
            return edges()


def _edges(func: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Return a call of a backward pass with graph edges instead of tensors; None if it cannot be built."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    for name in ("self", "tensors", "outputs", "inputs"):
        given = bound.arguments.get(name)
        if given is None:
            continue
        tensors = [given] if isinstance(given, torch.Tensor) else given
        if isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
            return None
        bound.arguments[name] = [get_gradient_edge(tensor) for tensor in tensors]
    if func is torch.Tensor.backward:
        given = bound.arguments
        return functools.partial(
            torch.autograd.backward,
            given["self"],
            given.get("gradient"),
            retain_graph=given.get("retain_graph"),
            create_graph=given.get("create_graph", False),
            inputs=given.get("inputs"),
        )
    return functools.partial(func, *bound.args, **bound.kwargs)


def _are_plain(args: Any, kwargs: Any) -> bool:
    """Return whether a call's tensors are PyTorch's own, without other code that intercepts operations."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    kinds = set(map(type, tensors))
    if not kinds <= {torch.Tensor, torch.nn.Parameter}:
        return False
    return not any(map(is_transformed, tensors))


def _has_gradient(tensor: torch.Tensor | None) -> bool:
    if tensor is None:
        return False
    return tensor.is_floating_point() or tensor.is_complex()


def _operation(make: Callable[..., SplittableOperation | None], args: Any, kwargs: Any) -> SplittableOperation | None:
    if not _are_plain(args, kwargs):
        return None
    device = next(each.device for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
    if torch.is_autocast_enabled(device.type):
        return None  # autograd itself must handle the casts inside the operation
    try:
        operation = make(*args, **kwargs)
    except TypeError:  # invalid arguments: the operation's own call raises the error
        return None
    if operation is None:
        return None
    types = {tensor.dtype for tensor in operation.tensors if _has_gradient(tensor)}
    return operation if len(types) <= 1 else None
