"""The linear layers of a process that multiply in 8 bits: when they do, and when their scales change."""

from __future__ import annotations

import base64
import contextlib
import functools
import logging
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.fp8.choosing import find_layers, may_multiply
from smp_runtime.fp8.linear import multiply
from smp_runtime.fp8.recipe import DelayedScaling
from smp_runtime.fp8.scales import GRADIENT, INPUT, TENSORS, WEIGHT, LinearScales
from smp_runtime.fp8.windows import Window
from smp_runtime.tensors.torch_private import backward_pass

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.fp8.current import Multiply
    from smp_runtime.fp8.group import AmaxGroup

logger = logging.getLogger("smp")

_EVERYTHING = (INPUT, WEIGHT, GRADIENT)

#: Logged once per process.
EMULATED = (
    "FP8 is emulated: products are of numbers rounded to 8 bits with transformer_engine's scales, computed in the model's type, "
    "which is no faster"
)


class ChosenLayers:
    """The layers of a model that can multiply in 8 bits, by their paths, and those that cannot.

    It is made while the model is whole: weights that FSDP has sharded have no shape of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = weakref.WeakKeyDictionary({module: name for name, module in find_layers(model)})
        others = [module for module in model.modules() if module not in self.names and may_multiply(module)]
        self.left_out: weakref.WeakSet[nn.Module] = weakref.WeakSet(others)


class EightBitLayers:
    """The linear layers that multiply in 8 bits.

    Args:
        recipe: of the scales, until a context names another.
        always: whether layers that were adopted multiply in 8 bits in all passes, and not in a script's contexts alone.
        group: the ranks whose greatest values count, with ``always``.
        speaks: whether this rank logs.
    """

    def __init__(
        self, recipe: DelayedScaling, *, always: bool = False, group: AmaxGroup | None = None, speaks: bool = True
    ) -> None:
        self.recipe = recipe
        self._group = group
        self._speaks = speaks
        self._always = Window(recipe, records=True, keeps=False) if always else None
        self._open: Window | None = None
        self._is_off = False
        self._held: Window | None = None  # around a context that is switched off
        self._layers: weakref.WeakKeyDictionary[nn.Module, LinearScales] = weakref.WeakKeyDictionary()
        self._left_out: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._by_name: dict[str, LinearScales] = {}
        self._by_weight: Any = WeakIdKeyDictionary()
        self._names: list[str] = []  # on all ranks of the group
        self._waiting: dict[str, Mapping[str, Any]] = {}
        self._is_recorded = False  # a context has ended whose values do not count yet
        self._are_gradients_reduced = False
        self._updates_late = False  # values of a checkpoint wait for an update

    # -- layers ----------------------------------------------------------------------------------------------------

    def adopt(self, model: nn.Module) -> int:
        """Take all layers of a model that can multiply in 8 bits, under their paths; return how many there are."""
        found = ChosenLayers(model)
        self.adopt_chosen(found)
        return len(found.names)

    def adopt_chosen(self, chosen: ChosenLayers) -> None:
        """Take layers that were chosen before their weights were sharded."""
        self._left_out.update(chosen.left_out)
        for module, name in sorted(chosen.names.items(), key=lambda item: item[1]):
            if module not in self._layers:
                self._register(name, module)
        self._say()

    def scales_in(self, model: nn.Module) -> dict[int, LinearScales]:
        """Return the scales of a model's layers by the ``id`` of their weights."""
        found = {}
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is not None and module in self._layers:
                found[id(weight)] = self._layers[module]
        return found

    def note_weights(self, model: nn.Module) -> None:
        """Remember the weights of layers that modules around them apply; call it when the weights have their place."""
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is not None and module in self._layers:
                self._by_weight[weight] = self._layers[module]

    def _register(self, name: str, module: nn.Module) -> LinearScales:
        free, number = name, 1
        while free in self._by_name:
            number += 1
            free = f"{name}#{number}"
        scales = LinearScales(free, self.recipe, torch.device("cpu"))
        self._by_name[free] = self._layers[module] = scales
        if free in self._waiting:
            _restore(scales, self._waiting.pop(free))
            if self._updates_late and self._open is not None:  # the others were updated when the context began
                scales.update()
        return scales

    def _say(self) -> None:
        if self._speaks:
            self._speaks = False
            logger.info(EMULATED)

    # -- calls -----------------------------------------------------------------------------------------------------

    def find_call(self, module: nn.Module) -> Multiply | None:
        """Return the function in place of ``F.linear`` for this call of a module; None for ``F.linear``."""
        scales = self._layers.get(module)
        if scales is not None:
            return self._call_with(scales)
        if self._open is None or module in self._left_out:
            return None
        if not may_multiply(module):
            return None
        return self._call_with(self._register(f"layer {len(self._by_name)}", module))

    def find_by_weight(self, weight: torch.Tensor) -> Multiply | None:
        """Return the same for a layer whose weight is applied by the module around it."""
        scales = self._by_weight.get(weight)
        return None if scales is None else self._call_with(scales)

    def _call_with(self, scales: LinearScales) -> Multiply | None:
        recomputes = backward_pass() != -1
        window = self._open
        if window is None and not self._is_off:
            window = self._always
        if not recomputes:
            scales.last = window
        elif window is None:
            window = scales.last  # by a function that knows nothing of contexts
        if window is None:
            return None
        window.is_used = True
        records = window.records and not recomputes  # recomputing adds nothing to a context that has ended
        if window is self._always:  # of a whole job's passes, some record nothing at first
            records = torch.is_grad_enabled()
        return functools.partial(multiply, scales=scales, window=window, records=records)

    # -- contexts of a script --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def context(self, recipe: DelayedScaling | None, group: AmaxGroup, *, enabled: bool) -> Iterator[None]:
        """Multiply in 8 bits inside the block, or not; the outermost block that does counts as a step of the scales."""
        former = self._open, self._is_off, self._held
        if enabled and self._open is None:  # inside one that is switched off inside another one
            self._open = self._held
        is_outermost = enabled and self._open is None
        if is_outermost:
            self._begin(recipe or DelayedScaling(), group)
        elif enabled and recipe not in (None, self.recipe):
            raise SMPUserError(
                "an fp8_autocast inside another one has another recipe, and scales follow one: pass the same, or leave it out",
                code="SMP321",
            )
        self._is_off = not enabled
        if not enabled:
            self._open, self._held = None, self._open or self._held
        window = self._open
        try:
            yield
        finally:
            self._open, self._is_off, self._held = former
        if is_outermost and window is not None:
            self._finish(window, group)

    def _finish(self, window: Window, group: AmaxGroup) -> None:
        """Take the greatest numbers of all ranks after an outermost context that has recorded some."""
        if not window.is_used or not window.records:
            return
        # Gradients follow after backward.
        if window.recipe.reduce_amax:
            self._reduce(group, (INPUT, WEIGHT))
        self._is_recorded, self._are_gradients_reduced = True, False

    def _begin(self, recipe: DelayedScaling, group: AmaxGroup) -> None:
        self._say()
        if self._always is not None:
            logger.warning("the script has contexts of FP8 of its own, which win over the parameter fp8")
            self._always = None
        self.finish_gradients()
        self._group = group
        if recipe != self.recipe:
            self.recipe = recipe
            for scales in self._by_name.values():
                scales.change_recipe(recipe)
        if self._is_recorded:
            self._is_recorded = False
            for scales in self._by_name.values():
                scales.update()
        self._open = Window(recipe, records=torch.is_grad_enabled(), keeps=True)

    @contextlib.contextmanager
    def again(self, window: Window | None) -> Iterator[None]:
        """Run the block with the scales of a window that may have ended, for recomputing."""
        former, self._open = self._open, window
        try:
            yield
        finally:
            self._open = former

    @property
    def open_window(self) -> Window | None:
        """Return the window of the script's innermost context."""
        return self._open

    # -- updates ---------------------------------------------------------------------------------------------------

    def optimizer_stepped(self) -> None:
        """Let the values of the passes before an update of the optimizer count; every rank calls it."""
        if self._always is not None:
            # Without a condition: a pipeline stage may have no such layer.
            if self._group is not None and self.recipe.reduce_amax:
                self._reduce(self._group, _EVERYTHING)
            for scales in self._by_name.values():
                scales.update()
        else:
            self.finish_gradients()

    def finish_gradients(self) -> None:
        """Take the greatest gradients of all ranks, if a context has ended since."""
        if self._group is None or not self._is_recorded:
            return
        # Once per context: the ranks must reduce the same number of times.
        if self._are_gradients_reduced:
            return
        self._are_gradients_reduced = True
        if self.recipe.reduce_amax:
            self._reduce(self._group, (GRADIENT,))

    def _reduce(self, group: AmaxGroup, tensors: Sequence[int]) -> None:
        """Take the greatest values of all ranks of a group; those of layers that this rank does not have count for others."""
        if group.size == 1:
            return
        names = self._agree(group)
        own = [self._by_name[name].amax for name in names if name in self._by_name]
        device = own[0].device if own else torch.device("cpu")
        zero = torch.zeros(TENSORS, device=device)
        rows = [self._by_name[name].amax.to(device) if name in self._by_name else zero for name in names]
        if not rows:
            return
        greatest = group.greatest(torch.stack(rows)[:, list(tensors)].contiguous())
        for name, row in zip(names, greatest, strict=True):
            if name in self._by_name:
                amax = self._by_name[name].amax
                amax[list(tensors)] = row.to(amax.device)

    def _agree(self, group: AmaxGroup) -> list[str]:
        """Return the names of the layers of all ranks, in the same order on all."""
        names = sorted({*self._names, *self._by_name})
        checksum = zlib.crc32("\n".join(names).encode())
        if not group.have_same(checksum):
            names = sorted(set().union(*group.all_of(names)))
        self._names = names
        return names

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return scales, histories and values that do not count yet, by layer, as text; the same on all ranks of the group."""
        used = {name: scales for name, scales in sorted(self._by_name.items()) if scales.has_values}
        return {name: _describe(scales) for name, scales in used.items()}

    def check_state(self, state: Any) -> None:
        """Raise an error unless a state can be loaded.

        Raises:
            CheckpointError: it cannot.
        """
        if not isinstance(state, Mapping) or not all(isinstance(each, Mapping) for each in state.values()):
            raise CheckpointError(
                f"the scales of FP8 are {str(state)[:100]}; the checkpoint is damaged: resume from another",
                code="SMP401",
            )
        for name, found in state.items():
            try:
                values = {key: _read(found[key]) for key in ("scale", "history", "amax")}
            except (KeyError, ValueError, TypeError) as error:
                raise CheckpointError(
                    f"the scales of FP8 of {name} are damaged ({error}); resume from another tag", code="SMP401"
                ) from None
            lengths = len(values["scale"]), len(values["amax"]), len(values["history"]) % TENSORS
            if lengths != (TENSORS, TENSORS, 0):
                raise CheckpointError(
                    f"the scales of FP8 of {name} have other lengths; resume from another tag", code="SMP401"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved scales, also for layers that are still to come."""
        self.check_state(state)
        self._waiting = {}
        has_amax = False
        for name, found in state.items():
            if name in self._by_name:
                _restore(self._by_name[name], found)
            else:
                self._waiting[name] = found
            has_amax = has_amax or bool(_read(found["amax"]).any())
        is_recorded = self._always is None and has_amax
        self._is_recorded = self._are_gradients_reduced = self._updates_late = is_recorded


def _describe(scales: LinearScales) -> dict[str, str]:
    history = scales.history
    used = int(history.any(1).nonzero().max()) + 1 if bool(history.any()) else 0
    return {"scale": _write(scales.scale), "history": _write(history[:used]), "amax": _write(scales.amax)}


def _restore(scales: LinearScales, found: Mapping[str, Any]) -> None:
    history = _read(found["history"]).view(-1, TENSORS)
    scales.restore(_read(found["scale"]), history, _read(found["amax"]))


def _write(values: torch.Tensor) -> str:
    return base64.b64encode(values.detach().cpu().contiguous().numpy().astype("<f4").tobytes()).decode()


def _read(text: str) -> torch.Tensor:
    content = bytearray(base64.b64decode(text, validate=True))
    return torch.frombuffer(content, dtype=torch.float32).clone() if content else torch.zeros(0)
