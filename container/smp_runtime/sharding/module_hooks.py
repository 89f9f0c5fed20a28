"""Hooks that follow the use of units: on modules, their outputs, inputs and gradients, and on saved tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.sharding.call_results import copy_views, tensors_in
from smp_runtime.sharding.flat_unit import SavedTensor, SavedView, ShardedUnit, UnitUse
from smp_runtime.sharding.watched_parameters import REGISTERED, WatchedParameters, refuse_copy
from smp_runtime.tensors.torch_private import (
    at_end_of_backward,
    backward_pass,
    saved_tensor_hooks,
    storage_key,
)

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from smp_runtime.sharding.gather_scheduler import GatherScheduler
    from smp_runtime.sharding.sharded_gradients import ShardedGradients


@dataclasses.dataclass
class _ModuleCall:
    """A running module call.

    Attributes:
        units: those that the call needs.
        uses: the call's use of each unit.
        start: when it began, by the clock of the calls.
        caches: whether autocast caches casts of weights outside this call.
    """

    module: nn.Module
    inputs: Any
    units: list[ShardedUnit]
    uses: list[UnitUse]
    start: int
    caches: bool


@dataclasses.dataclass
class _Pass:
    """A backward pass that is running: uses that it has reached and not passed, and how many more of each unit it will.

    Attributes:
        ahead: uses that it has not come to, in the order in which their calls ended: the same on all ranks.
        left_out: uses that it has not reached, but passed.
        held: for each unit, the uses for which this pass keeps it gathered.
        came: for each unit, the positions of the parameters that have got this pass's gradients.
    """

    ahead: list[tuple[ShardedUnit, UnitUse]] = dataclasses.field(default_factory=list)
    open: list[tuple[ShardedUnit, UnitUse]] = dataclasses.field(default_factory=list)
    reached: dict[int, ShardedUnit] = dataclasses.field(default_factory=dict)
    counts: dict[int, int] = dataclasses.field(default_factory=dict)
    left: dict[int, int] = dataclasses.field(default_factory=dict)
    left_out: set[UnitUse] = dataclasses.field(default_factory=set)
    held: dict[int, set[UnitUse]] = dataclasses.field(default_factory=dict)
    came: dict[int, set[int]] = dataclasses.field(default_factory=dict)


class _ThreadCalls(threading.local):
    """The calls that run in a thread, the innermost last, and the hook that sees the tensors that they save."""

    def __init__(self) -> None:
        self.running: list[_ModuleCall] = []
        self.pack: Callable[[torch.Tensor], Any] | None = None


def _may_run_again(module: nn.Module) -> bool:
    """Return whether backward may run parts of a module's call again, as checkpointing inside ``forward`` does.

    That reads parameters without any saved views, through modules without hooks if their block is compiled.
    """
    is_of_pytorch = type(module).__module__.startswith("torch.nn.modules.")
    return not is_of_pytorch or next(module.children(), None) is not None


class ModuleUses:
    """Hooks that gather units before a module's forward and backward, and free them after.

    * Forward: before a module is called, the units of its parameters are gathered; after it, they are freed.
    * Reading a parameter of a module that is not running (``self.child.weight`` in the parent's forward, an
      ``nn.ParameterList``) gathers it too, for the rest of the call that reads it.
    * Backward: when the gradient of a module's output is there, its units are needed again. The exception is a layer of
      PyTorch without saved views of its parameters. Tensors that backward unpacks are gathered in any case.
    * A trained unit is freed when all its gradients have come. A frozen unit, or one that several calls share, is freed
      when the gradients of the call's inputs have. Not all ranks use the same parameters of a unit, but all must free it
      before it is needed again: at the latest when backward reaches the calls before it, or ends.
    * The losses of ranks may depend on the results of other calls. Forward makes the same calls on all ranks, and backward
      runs in the reverse order. So a rank with a backward pass that leaves out a call still takes part for it, with
      gradients of zero: when it reaches an earlier call, or ends. A pipeline has no such order, since its microbatches
      overlap.

    Args:
        gradients: sends the gradients of the units that backward has passed.
        in_order: whether backward passes run in the reverse order of forward's calls, one after the other.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[ShardedUnit],
        scheduler: GatherScheduler,
        gradients: ShardedGradients,
        *,
        in_order: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.gradients = gradients
        self._in_order = in_order
        #: Uses since the last backward pass began, in the order in which their calls ended.
        self._made: list[tuple[ShardedUnit, UnitUse]] = []
        self._clock = 0
        self._passes: dict[int, _Pass] = {}
        self._unit_of = {id(p): unit for unit in units for p in unit.parameters}
        self._by_storage = {unit.storage_key: unit for unit in units}
        self._calls = _ThreadCalls()
        #: Called when a backward pass has reached its first use, before anything is gathered for it.
        self.backward_begins: Callable[[], None] = lambda: None
        self._registered: dict[int, list[ShardedUnit]] = {}
        self._hooks: dict[int, tuple[RemovableHandle, RemovableHandle]] = {}
        whole: dict[int, list[ShardedUnit]] = {}
        for unit in units:
            if unit.module is not None:
                whole.setdefault(id(unit.module), []).append(unit)
        for part in module.modules():
            own = whole.get(id(part), [])
            if not any(True for _ in part.children()):
                own = own + [u for u in self.units_held_by(part) if u not in own and not u.by_tokens]
            self._registered[id(part)] = own
            self._hooks[id(part)] = (
                part.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
                # Also after an error: checkpointing ends a recomputation with one, once it has the tensors that it needs.
                part.register_forward_hook(self._after, always_call=True),
            )
            if self.units_held_by(part) and not isinstance(part._parameters, WatchedParameters):
                part._parameters = WatchedParameters(part._parameters, self)
            for parameter in part.__dict__.get(REGISTERED, ()):
                used = self._unit_of.get(id(parameter))
                if used is not None and used not in own:
                    own.append(used)

        for unit in units:
            if unit.trained:
                self._watch_gradients(unit)

    @property
    def is_running(self) -> bool:
        """Return whether a module call runs in this thread."""
        return bool(self._calls.running)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleUses:
        raise refuse_copy("copied")  # the hooks of a module ask for it

    def reset(self) -> None:
        """Forget calls that an error has ended."""
        self._calls.running.clear()
        self._passes.clear()
        self._made.clear()

    def leave_inside(self, block: nn.Module) -> str | None:
        """Remove the hooks inside a block, so that only the block's own call counts and nothing interrupts it.

        Returns:
            None, or the reason why it is impossible: parameters that the block's own call does not gather.
        """
        inside = [part for part in block.modules() if part is not block]
        for parameter in block.parameters():
            unit = self._unit_of.get(id(parameter))
            if unit is None:
                continue
            if unit.by_tokens:
                return "experts are fetched as tokens want them"
            if unit.module is not block:
                return "parameters are fetched in parts, of what is larger than half of sdp_max_live_parameters or shares some"
        if any(REGISTERED in part.__dict__ for part in inside):
            return "a module inside uses parameters of another, by smp.register_parameter"
        # From here on nothing refuses: a block must not lose a part of its hooks.
        for part in inside:
            for handle in self._hooks.pop(id(part), ()):
                handle.remove()
        for part in block.modules():
            if isinstance(part._parameters, WatchedParameters):
                part._parameters = dict(part._parameters.items())
        return None

    def units_held_by(self, module: nn.Module) -> list[ShardedUnit]:
        """Return the units of the parameters that a module has itself."""
        found: list[ShardedUnit] = []
        for parameter in module._parameters.values():
            unit = self._unit_of.get(id(parameter))
            if unit is not None and unit not in found:
                found.append(unit)
        return found

    # -- forward ---------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        units = list(self._registered.get(id(module), ()))
        uses: list[UnitUse] = []
        self._clock += 1
        call = _ModuleCall(module, (args, kwargs), units, uses, self._clock, torch.is_autocast_cache_enabled())
        self._calls.running.append(call)
        if units:
            # All threads share autocast's cache. Microbatches would share casts of weights, depending on timing, and the order
            # of backward, and with it that of the collectives, would differ between ranks.
            torch.set_autocast_cache_enabled(False)
        for unit in units:
            uses.append(self._enter(unit, call))

    def _enter(self, unit: ShardedUnit, call: _ModuleCall) -> UnitUse:
        # Recomputation finds its unit gathered. It must request nothing: ranks with a loss that leaves the unit out do not
        # recompute, and collectives must be the same on all ranks.
        if unit.calls == 0 and not (unit.ready and unit.open_uses and backward_pass() != -1):
            self.scheduler.need(unit)
        # Of this thread: in a pipeline others may be inside calls of the same unit.
        is_inner = any(unit in outer.units for outer in self._calls.running if outer is not call)
        use = UnitUse(start=call.start, is_inner=is_inner)
        unit.calls += 1
        unit.called = unit.called or call.start
        # Inside other saved-tensor hooks, such as checkpointing's, saved tensors are not reported here.
        # For a unit that only some ranks use, the answer would differ between ranks.
        watches = self._watches() and not unit.by_tokens
        use.saved = False if watches and not _may_run_again(call.module) else None
        use.watched = watches
        use.saves_before = unit.saves
        return use

    def _watches(self) -> bool:
        hooks = saved_tensor_hooks()
        return hooks is not None and hooks[0] is self._calls.pack

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._calls.running:
            return output
        call = self._calls.running.pop()
        if call.module is not module:
            raise AssertionError("module calls ended in another order than they began")
        torch.set_autocast_cache_enabled(call.caches)
        self._clock += 1
        for unit, use in zip(call.units, call.uses, strict=False):
            use.end = self._clock
            if use.watched and unit.saves != use.saves_before:
                use.saved = True
        if call.units:
            output = copy_views(output, call.units)
        if call.units and torch.is_grad_enabled():
            # Skip a call inside one that needs the same unit: the outer call gathers and frees it.
            outer = [(unit, use) for unit, use in zip(call.units, call.uses, strict=False) if not use.is_inner]
            if outer:
                self._watch_inputs(outer, call.inputs)
                self._watch_outputs(outer, output)
        # An error in between leaves units that were not entered yet.
        for unit in call.units[: len(call.uses)]:
            unit.calls -= 1
            self.scheduler.done(unit)
        return output

    def read(self, parameter: torch.Tensor) -> None:
        """Gather the unit of a parameter that is read as a module's attribute during a call."""
        if not self._calls.running:
            return
        unit = self._unit_of.get(id(parameter))
        call = self._calls.running[-1]
        # A call of another thread, another microbatch's, may end before this one does.
        if unit is None or any(unit in outer.units for outer in self._calls.running):
            return
        call.uses.append(self._enter(unit, call))
        call.units.append(unit)

    # -- backward --------------------------------------------------------------------------------------------------

    def _watch_gradients(self, unit: ShardedUnit) -> None:
        # The garbage collector cannot follow references from a tensor to its hooks: strong ones would leak.
        weak, weak_unit = weakref.ref(self), weakref.ref(unit)

        def hook(index: int) -> Callable[[torch.Tensor], None]:
            def gradient_added(parameter: torch.Tensor) -> None:
                me, unit = weak(), weak_unit()
                if me is None or unit is None:
                    return
                if me.gradients.arrived(unit, index, parameter) and not unit.by_tokens:
                    me.note_gradient(unit, index)

            return gradient_added

        for index, parameter in enumerate(unit.parameters):
            parameter.register_post_accumulate_grad_hook(hook(index))

    def _watch_outputs(self, uses: list[tuple[ShardedUnit, UnitUse]], output: Any) -> None:
        tensors = [t for t in tensors_in(output) if t.grad_fn is not None]
        if not tensors:
            return
        weak = weakref.ref(self)
        if backward_pass() == -1:  # a recomputation is part of a use that was counted
            for unit, _ in uses:
                unit.forward_uses += 1
            if self._in_order:
                self._made += uses

        def backward_begins(_: torch.Tensor) -> None:
            if (me := weak()) is not None:
                for unit, use in uses:
                    me.backward_reaches(unit, use)

        for tensor in tensors:
            tensor.register_hook(backward_begins)

    def _watch_inputs(self, uses: list[tuple[ShardedUnit, UnitUse]], inputs: Any) -> None:
        tensors = {id(t): t for t in tensors_in(inputs) if t.grad_fn is not None}
        # The script may keep its tensors, with their hooks, longer than the model.
        weak = weakref.ref(self)

        def gradient_came(_: torch.Tensor) -> None:
            if (me := weak()) is not None:
                for unit, use in uses:
                    use.inputs -= 1
                    if use.inputs <= 0:
                        me.backward_passed(unit, use)
                    else:
                        me.backward_passes(unit, use)

        for _, use in uses:
            use.inputs = len(tensors)
        for tensor in tensors.values():
            tensor.register_hook(gradient_came)

    def backward_reaches(self, unit: ShardedUnit, use: UnitUse) -> None:
        """Handle the first gradient of a call's outputs: backward has reached the call."""
        if use.began:
            return
        use.began = True
        now = self._running_pass()
        if use in now.left_out:  # a result that was there before the call, and that needs nothing of it
            return
        if any(other is use for _, other in now.ahead):
            while now.ahead[-1][1] is not use:
                self._leave_out(now)
            now.ahead.pop()
        self._begin(now, unit, use)

    def _leave_out(self, now: _Pass) -> None:
        """Take part in a call that this rank's backward pass has left out, since other ranks may use it.

        Other ranks may gather its unit and send gradients for it.
        """
        unit, use = now.ahead.pop()
        now.left_out.add(use)
        self._begin(now, unit, use)

    def _begin(self, now: _Pass, unit: ShardedUnit, use: UnitUse) -> None:
        self._reach(now, unit, use)
        unit.open_uses.add(use)
        now.held.setdefault(id(unit), set()).add(use)
        unit.quiet = False
        if use.saved is not False:
            self.scheduler.need(unit)

    def backward_passes(self, unit: ShardedUnit, use: UnitUse) -> None:
        """Handle the gradient of one input, while gradients of other inputs are missing.

        If calls share another input, its gradient comes only after backward of all of them.
        """
        # Saved tensors are gathered again when they are unpacked, so the unit may be freed meanwhile.
        if use in unit.open_uses and all(other.saved is not None for other in unit.open_uses):
            unit.quiet = True

    def backward_passed(self, unit: ShardedUnit, use: UnitUse) -> None:
        """Handle the gradients of all inputs: end the use of the unit if its own gradients do not show the end."""
        if use not in unit.open_uses:
            return
        if unit.trained and unit.forward_uses <= 1 and not unit.by_tokens:
            # The arrival of its gradients shows exactly when everything that reads the weights has run.
            unit.quiet = True
            return
        unit.open_uses.discard(use)
        unit.quiet = unit.quiet and bool(unit.open_uses)
        self.scheduler.done(unit)

    def _running_pass(self) -> _Pass:
        """Return the running backward pass; begin it if this is the first use that it reaches."""
        task = backward_pass()
        if task not in self._passes:
            weak = weakref.ref(self)

            def backward_ends() -> None:
                if (me := weak()) is not None:
                    me.end_pass(task)

            self.backward_begins()
            ahead, self._made = self._made, []
            self._passes[task] = _Pass(ahead)
            at_end_of_backward(backward_ends)
        return self._passes[task]

    def _reach(self, now: _Pass, unit: ShardedUnit, use: UnitUse) -> None:
        """Record that backward has reached a use, so it has passed all calls that began after the use had ended."""
        passed = [other for other in now.open if other[1].start > use.end]
        for other in passed:
            self._leave(now, *other)
        number = id(unit)
        if number not in now.reached:
            now.reached[number] = unit
            now.left[number] = unit.uses_per_pass or unit.forward_uses or 1
        now.counts[number] = now.counts.get(number, 0) + 1
        now.open.append((unit, use))
        self.gradients.reach(unit)

    def _leave(self, now: _Pass, unit: ShardedUnit, use: UnitUse) -> None:
        """Record that backward has passed a use: later operations do not read the weights for it."""
        now.open.remove((unit, use))
        now.left[id(unit)] -= 1
        if now.left[id(unit)] > 0:
            return
        if use in unit.open_uses:
            self._complete(now, unit)
        self.gradients.leave(unit)

    def end_pass(self, task: int) -> None:
        """End a backward pass: it has passed every use that it reached."""
        now = self._passes.pop(task, None)
        if now is None:  # abandoned
            return
        while now.ahead:
            self._leave_out(now)
        for unit, use in now.open:
            if use in unit.open_uses:
                self._complete(now, unit)
        for key, unit in now.reached.items():
            unit.uses_per_pass = now.counts[key]
        self.gradients.end(list(now.reached.values()))

    def note_gradient(self, unit: ShardedUnit, index: int) -> None:
        """Note that a parameter has got its gradient; the last one of a pass ends its use of the unit.

        Gradients of weights that a pipeline has left for later come in a pass of their own, which keeps nothing gathered.
        """
        now = self._passes.get(backward_pass())
        if now is None:
            return
        came = now.came.setdefault(id(unit), set())
        came.add(index)
        if len(came) == len(unit.parameters):
            self._complete(now, unit)

    def _complete(self, now: _Pass, unit: ShardedUnit) -> None:
        """End a pass's uses of a unit, which is freed unless another pass still uses it."""
        unit.open_uses -= now.held.pop(id(unit), set())
        if not unit.open_uses:
            unit.forget_uses()
            self.scheduler.done(unit)

    # -- what autograd saves ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch_saved(self) -> Iterator[None]:
        """Watch for saved views of gathered parameters in the block, and gather them again when backward unpacks them."""
        weak = weakref.ref(self)
        by_storage = self._by_storage

        def pack(tensor: torch.Tensor) -> SavedTensor | SavedView:
            unit = by_storage.get(storage_key(tensor))
            if unit is None:
                return SavedTensor(tensor)
            unit.saves += 1
            return SavedView(unit, tensor.detach())

        def unpack(packed: SavedTensor | SavedView) -> torch.Tensor:
            me = weak()
            return packed.unpack(None if me is None else me.scheduler.need)

        before, self._calls.pack = self._calls.pack, pack
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self._calls.pack = before
