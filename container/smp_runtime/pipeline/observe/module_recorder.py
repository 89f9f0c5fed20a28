"""Recording of the time of each module of a rank without a pipeline, in the form of a pipeline's timeline.

A pipeline computes in tasks and knows their times. Without a pipeline, a microbatch is cut where the code
of another module begins: in the forward pass at calls of modules, in the backward pass where autograd
reaches a module's output or input. Each piece is a block of the module that ran its own code, without the
time of its submodules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from smp_runtime.pipeline.schedule.actions import TaskKind
from smp_runtime.tensors import computing_time
from smp_runtime.tensors.module_boundaries import ModuleBoundaries
from smp_runtime.tensors.torch_private import backward_pass

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.pipeline.observe.recorder import TimelineRecorder


class ModuleRecorder:
    """A recorder of all modules of a rank, by PyTorch's global hooks, until :meth:`close`.

    Args:
        recorder: keeps the blocks.
        models: returns the models of the job; their modules are named by their paths.
        device: a block on a GPU ends when the GPU has done its work.
    """

    def __init__(
        self, recorder: TimelineRecorder, models: Callable[[], Iterable[nn.Module]], device: torch.device | None = None
    ) -> None:
        self._recorder = recorder
        self._models = models
        self._device = device
        self._names: dict[int, str] = {}
        self._microbatch: int | None = None
        self._open: list[str] = []  # modules with a running forward, the innermost last
        #: What runs, since when; and what ran before backward began to run modules again.
        self._kind, self._path, self._since = TaskKind.FORWARD, "", 0.0
        self._before = ""
        self._owners = ModuleBoundaries("recorder", self._reached)
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks, and write the data that has not been written."""
        for handle in self._handles:
            handle.remove()
        self._recorder.close()

    # -- called by the step ----------------------------------------------------------------------------------------

    def begin_step(self, number: int) -> None:
        """Handle the beginning of a step."""
        self._names = {id(part): path for model in self._models() for path, part in model.named_modules()}
        self._recorder.begin_step(number)

    def end_step(self) -> None:
        """Handle the end of the step, after gradients are reduced."""
        self._recorder.end_step()

    def turn_to(self, microbatch: int | None) -> None:
        """Handle the beginning of another microbatch; None means that the last one has ended."""
        if self._microbatch is not None:
            self._end_block()
        self._open.clear()
        self._microbatch = microbatch
        if microbatch is not None:
            self._settle()
            self._kind, self._path, self._since = TaskKind.FORWARD, "", computing_time.now()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Record the block as the backward pass; afterwards the step function's own code runs."""
        self._cut(TaskKind.BACKWARD, "")
        try:
            yield
        finally:
            self._cut(TaskKind.STEP, "")

    # -- called by PyTorch -----------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._microbatch is None or torch.compiler.is_compiling():
            return
        around = self._open[-1] if self._open else ""
        # A module that is no part of a model, such as a loss, counts as part of its caller.
        path = self._names.get(id(module), around)
        # Backward calls a module only to recompute its activations.
        is_recomputed = backward_pass() != -1
        if is_recomputed and not self._open:
            self._before = self._path
        self._open.append(path)
        if is_recomputed:
            self._cut(TaskKind.BACKWARD, path)
        else:
            self._owners.note(args, around)
            self._cut(TaskKind.FORWARD, path)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open or torch.compiler.is_compiling():
            return
        path = self._open.pop()
        is_outermost = not self._open
        around = "" if is_outermost else self._open[-1]
        if backward_pass() == -1:
            self._owners.note(output, path)
            self._cut(TaskKind.FORWARD, around)
        elif is_outermost:
            # Recomputation is over: backward goes on where it was.
            self._cut(TaskKind.BACKWARD, self._before)
        else:
            self._cut(TaskKind.BACKWARD, around)

    def _reached(self, path: str) -> None:
        if self._microbatch is not None and not self._open:
            self._cut(TaskKind.BACKWARD, path)

    def _cut(self, kind: TaskKind, path: str) -> None:
        """End the current block, and begin one of the given kind and module path."""
        if (kind, path) == (self._kind, self._path) or self._microbatch is None:
            return
        self._end_block()
        self._kind, self._path = kind, path

    def _end_block(self) -> None:
        self._settle()
        now = computing_time.now()
        self._recorder.block(self._kind, self._microbatch or 0, self._path, self._since, now)
        self._since = now

    def _settle(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
