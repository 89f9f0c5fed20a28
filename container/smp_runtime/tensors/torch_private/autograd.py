"""What PyTorch keeps private of autograd, of its hooks, and of ``torch.func``."""

# ruff: noqa: SLF001 - this folder is the place for private names

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

from smp_runtime.tensors.torch_private.lookup import find_private

#: The number of the backward pass that the calling thread runs a part of; -1 outside one.
backward_pass: Callable[[], int] = find_private("tells backward passes apart", "_C._current_graph_task_id")

#: Whether the running backward pass will run a node of the graph; inside a backward pass only.
will_run: Callable[[Any], bool] = find_private(
    "learns whether backward accumulates into parameters", "_C._will_engine_execute_node"
)

#: Call a function without arguments at the end of the running backward pass; inside one only.
at_end_of_backward: Callable[[Callable[[], object]], None] = find_private(
    "acts at the end of a backward pass", "autograd.Variable._execution_engine.queue_callback"
)

#: ``torch.autograd.backward`` and ``grad`` without checks, which cost as much as a small module's backward pass: ``(outputs,
#: gradients, retain_graph, create_graph, inputs, allow_unreachable=…, accumulate_grad=…)``, tuples all three.
run_backward: Callable[..., tuple[torch.Tensor | None, ...]] = find_private(
    "runs backward of one stage", "autograd.Variable._execution_engine.run_backward"
)


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the calling thread's innermost saved-tensor hooks; None also if PyTorch cannot report them, as in 2.4."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None if top is None else top(True)
    return hooks


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one inside ``torch.func`` (``vmap``, ``grad``, …)."""
    known = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)
    return bool(known and known(tensor))


def taken_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a Python function of PyTorch that modes do not see, although they see the calls inside it."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def running_node() -> torch.autograd.graph.Node | None:
    """Return the autograd node that runs its backward on the calling thread."""
    return torch._C._current_autograd_node()


def loss_reduction(node: torch.autograd.graph.Node) -> str | None:
    """Return how the node of a loss function joins its elements, ``"mean"`` or ``"sum"``; None for any other node."""
    return {1: "mean", 2: "sum"}.get(getattr(node, "_saved_reduction", 0))  # at::Reduction, which has 0 for none


#: A context that ``vmap`` and the other transforms do not reach.
outside_transforms: Any = find_private("gathers in vmap", "_functorch.pyfunctorch.temporarily_clear_interpreter_stack")


def indexing_in_transforms() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which numbers inside ``vmap`` may be indices, as in functions for ``flex_attention``."""
    operations: Any = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    return operations.TransformGetItemToIndex()
