"""``fp8_autocast`` and ``checkpoint``, as ``transformer_engine.pytorch`` has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import checkpoint as checkpointing

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_runtime.fp8 import choosing, current
from smp_runtime.fp8.group import AmaxGroup, ScriptGroup
from smp_runtime.fp8.layers import ChosenLayers, EightBitLayers
from smp_runtime.fp8.recipe import DelayedScaling

if TYPE_CHECKING:
    from torch import nn

#: The layers of this process, and the hook that follows its optimizers.
_running: list[tuple[EightBitLayers, Callable[[], None]]] = []


def running_layers() -> EightBitLayers | None:
    """Return the layers of this process that multiply in 8 bits, or None if nothing has asked for that."""
    return _running[-1][0] if _running else None


def begin(layers: EightBitLayers, *, follows_optimizers: bool) -> Callable[[], None]:
    """Let linear layers multiply in 8 bits; return the function that ends it.

    Args:
        follows_optimizers: whether every update of PyTorch's optimizers is one of the scales.
    """
    choosing.install()
    current.begin(layers)
    hook: Any = None
    if follows_optimizers:
        hook = register_optimizer_step_post_hook(lambda *_: layers.optimizer_stepped())

    def end() -> None:
        if hook is not None:
            hook.remove()
        current.end(layers)
        _running[:] = [each for each in _running if each[0] is not layers]
        if not _running:
            choosing.uninstall()

    _running.append((layers, end))
    return end


def started_layers() -> EightBitLayers:
    """Return the layers of this process; the first call begins."""
    found = running_layers()
    if found is None:
        found = EightBitLayers(DelayedScaling(), speaks=_is_first())
        begin(found, follows_optimizers=True)
        _hand_over.tell(found)
    return found


class _HandOver:
    """What layers that a script's first context starts have to know: its models, and the scales of a checkpoint."""

    def __init__(self) -> None:
        self.chosen: list[ChosenLayers] = []
        self.state: Mapping[str, Any] | None = None

    def tell(self, layers: EightBitLayers) -> None:
        """Tell layers that have just begun."""
        for each in self.chosen:
            layers.adopt_chosen(each)
        if self.state is not None:
            layers.load_state_dict(self.state)


_hand_over = _HandOver()


def note_model(model: nn.Module) -> None:
    """Name a model's layers by their paths in it, now or when the script's first context begins."""
    layers = running_layers()
    if layers is None:
        _hand_over.chosen = [each for each in _hand_over.chosen if each.names]
        _hand_over.chosen.append(ChosenLayers(model))
    else:
        layers.adopt(model)


def scales_to_save() -> dict[str, Any]:
    """Return the scales for a checkpoint; empty if there are none."""
    layers = running_layers()
    return {} if layers is None else layers.state_dict()


def go_on_with(state: Mapping[str, Any]) -> None:
    """Take the scales of a checkpoint, now or when the script's first context begins.

    Raises:
        CheckpointError: they are damaged.
    """
    layers = running_layers()
    if layers is None:
        _hand_over.state = state
    else:
        layers.load_state_dict(state)


def end_all() -> None:
    """End all that has begun in this process, with a job."""
    for _, end in list(_running):
        end()
    _hand_over.chosen.clear()
    _hand_over.state = None


def _is_first() -> bool:
    if not dist.is_available() or not dist.is_initialized():
        return True
    return dist.get_rank() == 0


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: DelayedScaling | None = None,
    fp8_group: dist.ProcessGroup | None = None,
) -> Iterator[None]:
    """Let linear layers multiply in 8 bits inside the block, with the scales that follow from earlier blocks.

    Args:
        enabled: whether they do.
        calibrating: only False: values are noted while layers multiply in 8 bits.
        fp8_recipe: a :class:`.DelayedScaling`; None for its defaults.
        fp8_group: ranks whose greatest values count together; None for all.

    Raises:
        SMPUserError: another recipe, ``calibrating``, or two recipes in blocks inside each other.
    """
    if fp8_recipe is not None and not isinstance(fp8_recipe, DelayedScaling):
        raise SMPUserError(
            f"fp8_autocast got fp8_recipe={kind_of(fp8_recipe)}; pass a DelayedScaling of transformer_engine.common.recipe, or "
            "install transformer_engine for other recipes",
            code="SMP321",
        )
    if calibrating:
        raise SMPUserError(
            "fp8_autocast got calibrating=True, which emulated FP8 does not have: leave it out, and the first steps calibrate",
            code="SMP321",
        )
    group: AmaxGroup = ScriptGroup(fp8_group)
    choosing.install()  # also of a library that was imported since
    with started_layers().context(fp8_recipe, group, enabled=bool(enabled)):
        yield


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Call a function, and again in backward instead of keeping its activations, with the same scales.

    Args:
        distribute_saved_activations: only False.
        get_rng_state_tracker: kept for scripts; split layers draw again what they have drawn.
        tp_group: kept for scripts, as above.
        use_reentrant: of :func:`torch.utils.checkpoint.checkpoint`, whose other arguments may be given too.

    Raises:
        SMPUserError: ``distribute_saved_activations``.
    """
    if distribute_saved_activations:
        raise SMPUserError(
            "checkpoint got distribute_saved_activations=True, and inputs of recomputed functions stay whole here: leave it out, "
            "and save memory with offload_wrapper",
            code="SMP321",
        )
    layers = running_layers()
    window = None if layers is None else layers.open_window

    def call(*inputs: Any, **keywords: Any) -> Any:
        if layers is None or window is None or layers.open_window is window:
            return function(*inputs, **keywords)
        with layers.again(window):
            return function(*inputs, **keywords)

    return checkpointing.checkpoint(call, *args, use_reentrant=use_reentrant, **kwargs)


def is_fp8_available() -> tuple[bool, str]:
    """Return True and no reason: numbers of 8 bits are emulated everywhere."""
    return True, ""
