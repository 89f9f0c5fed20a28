"""A recorder for plain scripts: the same numbers as in a job of this library, from PyTorch's public hooks alone.

The model is the outermost module with parameters that the script calls. An update is one ``step()`` of an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_records.numerics import BUFFER, FORMAT_VERSION, GRADIENT, LOSS, UPDATE, WEIGHT, Head, Trial
from smp_records.plain_job import ParameterFacts, PlainFacts
from smp_runtime.tensors.torch_private import NORMS_WITH_STATISTICS, backward_pass
from smp_tools.numerics.journal import Journal, ValueOwner, part_name
from smp_tools.numerics.module_watch import ModuleWatch
from smp_tools.numerics.plain.layout import is_sharded, local_part, unwrapped
from smp_tools.numerics.plain.loss_weight import LossWeight
from smp_tools.numerics.plain.norm_statistics import keep_statistics_out
from smp_tools.numerics.plain.starting_point import load_start, save_start
from smp_tools.numerics.recorder import difference_of, model_prefix
from smp_tools.numerics.sketch import Sketch, sketch_of
from smp_tools.numerics.trial import disable_dropout

if TYPE_CHECKING:
    from smp_tools.numerics.plain.ties import ParameterTies

#: Gradients are multiples of others if the rest is smaller than this part of their square sum.
_REST = 1e-6
#: The text for the state of random generators: a line of a step has one, and these runs do not compare it.
_NO_STATE = "-"
#: Groups of one rank: plain scripts share out neither layers nor sequences.
_ALONE = (Group.TP, Group.CONTEXT)


class PlainRank:
    """The place of a rank of a plain script, as :class:`~smp_tools.numerics.module_watch.WatchedRank`."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.topology = self
        self.cfg = SimpleNamespace(prescaled_batch=False)
        self.step = SimpleNamespace(microbatch=0, is_tracing=False)

    def size(self, group: Group) -> int:
        """Return the number of ranks in a group: each rank reads a batch of its own."""
        return 1 if group in _ALONE else self.world

    def rank_in(self, group: Group) -> int:
        """Return the number of this rank in a group."""
        return 0 if group in _ALONE else self.rank


@dataclass
class WatchedModel:
    """A model of the script.

    Attributes:
        parameters: by name. FSDP2 shows others while it has gathered them; these are the optimizer's.
    """

    module: nn.Module
    prefix: str
    watch: ModuleWatch
    parameters: dict[str, nn.Parameter]


class PlainRecorder:
    """Records the first updates of a script on this rank.

    Args:
        folder: for the numbers and facts.
        finished: is called after the last update that is recorded.
    """

    def __init__(self, place: PlainRank, folder: Path, trial: Trial, ties: ParameterTies, finished: Callable[[], None]):
        self.facts = PlainFacts(rank=place.rank, world=place.world)
        self.updates = 0
        self._place, self._folder, self._trial = place, folder, trial
        self._ties, self._finished = ties, finished
        self._journal = Journal(folder, _head(place))
        self._models: list[WatchedModel] = []
        self._ignored: set[nn.Module] = set()
        self._known: set[nn.Module] = set()
        self._has_state = False
        self._depth = 0
        self._weights: list[float | None] = []
        self._norms: list[float] = []
        self._after_backward: dict[str, torch.Tensor] = {}
        self._before: list[tuple[ValueOwner, Sketch]] = []

    @property
    def is_over(self) -> bool:
        """Return whether all updates were recorded."""
        return self.updates >= self._trial.steps

    # -- forward -----------------------------------------------------------------------------------------------------

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at a module that the script, or another module, is about to call."""
        if self.is_over:
            return
        if module not in self._known:
            self._meet(module, args, kwargs)
        if self._has_state or not torch.is_grad_enabled():
            return
        models = [model.module for model in self._models]
        # By identity: a module may define an equality of its own.
        if any(model is module for model in models):
            self._has_state = True
            self._note_state()

    def _meet(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Watch a model from its first call on."""
        inner = unwrapped(module)
        if not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return  # an evaluation, or a loss function: it may have a model inside later
        self._known |= {*module.modules(), *inner.modules()}
        number = len(self._models)
        prefix = model_prefix(number)
        watch = ModuleWatch(
            inner, prefix, self._place, self._listens, self._note, lambda: 1.0 / self._place.world, _raise
        )
        parameters = {prefix + name: parameter for name, parameter in inner.named_parameters()}
        self._models.append(WatchedModel(inner, prefix, watch, parameters))
        self.facts.broken_ties += [[prefix + name for name in group] for group in self._ties.broken(inner)]
        self.facts.parameters.update({name: ParameterFacts() for name in parameters})
        disable_dropout(inner)
        if self._trial.save:
            save_start(Path(self._trial.save), number, self._place.rank, inner)
        if self._trial.replay:
            differs = load_start(Path(self._trial.replay), number, inner)
            self.facts.drew_other_weights = self.facts.drew_other_weights or differs
        self.facts.has_statistics = keep_statistics_out(inner) or self.facts.has_statistics
        if inner is module:  # hooks that are added now are not called in this call
            watch.entered(prefix, (args, kwargs))

    def _listens(self) -> bool:
        if self.is_over:
            return False
        return torch.is_grad_enabled() or backward_pass() != -1

    @torch.no_grad()
    def _note_state(self) -> None:
        for model in self._models:
            for name, parameter in model.parameters.items():
                self._note_part(WEIGHT, name, parameter)
            modules = dict(model.module.named_modules())
            for name, buffer in model.module.named_buffers():
                # Statistics of a batch norm are those of a rank's own batch: only ranks that should have copies can be compared.
                owner = modules.get(name.rpartition(".")[0])
                is_of_batch = isinstance(owner, NORMS_WITH_STATISTICS)
                is_comparable = not is_of_batch or self._place.world > 1
                if buffer.numel() and is_comparable:
                    self._note(ValueOwner(BUFFER, model.prefix + name), buffer)

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(self, run: Callable[[], None], tensors: Any) -> None:
        """Run a backward pass of the script, and look at its loss and its gradients."""
        if self.is_over or not self._models or backward_pass() != -1:
            run()
            return
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        is_loss = len(roots) == 1 and roots[0].numel() == 1
        weight = LossWeight(roots[0]) if is_loss else None
        if is_loss:
            microbatch = self._place.step.microbatch
            self._note(ValueOwner(LOSS, "", 0, microbatch, self._place.rank), roots[0].detach())
        run()
        if weight is None:
            self._weights.append(None)
        else:
            weight.close()
            self._weights.append(weight.value)
        self._place.step.microbatch += 1
        # Copies, since the script may scale or clip the gradients in place before the update.
        self._after_backward = {name: gradient.clone() for name, gradient in self._gradients()}

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of the gradient of each parameter that has one."""
        for name, parameter in self._parameters():
            if parameter.grad is not None:
                yield name, local_part(parameter.grad)[0]

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model in self._models:
            yield from model.parameters.items()

    # -- update ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients as the optimizer sees them."""
        self._depth += 1  # some optimizers call the step of another one
        if self._depth > 1 or self.is_over or not self._models:
            return
        updated: set[int] = set()
        for group in optimizer.param_groups:
            updated.update(id(parameter) for parameter in group["params"])
        self._note_facts(optimizer, updated)
        for name, parameter in self._parameters():
            has_gradient = parameter.grad is not None
            if has_gradient and id(parameter) in updated:
                self._note_part(GRADIENT, name, parameter, parameter.grad)
            local, region = local_part(parameter)
            place = ValueOwner(UPDATE, name, part=part_name(region))
            self._before.append((place, sketch_of(local, region, precise=True)))
        self._journal.flush(self.updates, 0, _NO_STATE)

    def clipped(self, norm: torch.Tensor) -> None:
        """Note the norm by which the script has clipped gradients; that of sharded ones is the same on all ranks."""
        if not self.is_over and not is_sharded(norm):
            self._norms.append(float(norm))

    def _note_facts(self, optimizer: torch.optim.Optimizer, updated: set[int]) -> None:
        self.facts.learning_rates.append([float(group.get("lr", 0.0)) for group in optimizer.param_groups])
        self.facts.scalings.append(self._scaling())
        self.facts.loss_weights.append(self._weights)
        self.facts.clip_norms.append(self._norms)
        self._weights, self._norms = [], []
        for name, parameter in self._parameters():
            known = self.facts.parameters[name]
            known.is_trainable = parameter.requires_grad
            known.has_optimizer = known.has_optimizer or id(parameter) in updated
            known.has_gradient = known.has_gradient or name in self._after_backward

    def _scaling(self) -> float | None:
        """Return the factor by which the script has multiplied all gradients since the last backward pass."""
        gradients = list(self._gradients())
        pairs = []
        for name, now in gradients:
            old = self._after_backward.get(name)
            # In float64: in half precision, sums of this many squares would overflow.
            if old is not None and old.numel():
                pairs.append((now.double().flatten(), old.double().flatten()))
        base = sum(float(old @ old) for _, old in pairs)
        if not base or len(pairs) < len(gradients):
            return None
        # The best factor by least squares; it counts only if almost nothing is left.
        factor = sum(float(now @ old) for now, old in pairs) / base
        rest = sum(float((now - factor * old).square().sum()) for now, old in pairs)
        is_exact = rest <= _REST * factor**2 * base
        if not is_exact:
            return None
        return factor

    @torch.no_grad()
    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the updates that the optimizer has made."""
        self._depth -= 1
        if self._depth or not self._before:
            return
        before, self._before = dict(self._before), []
        for name, parameter in self._parameters():
            local, region = local_part(parameter)
            place = ValueOwner(UPDATE, name, part=part_name(region))
            change = difference_of(sketch_of(local, region, precise=True), before[place])
            self._journal.add(place, change)
            known = self.facts.parameters[name]
            known.has_changed = known.has_changed or bool(change.bits.any())
        self._journal.flush(self.updates, 0)
        self.updates += 1
        self._has_state = False
        self._after_backward = {}
        self._place.step.microbatch = 0
        for model in self._models:
            model.watch.begin()
        self.facts.write(self._folder)
        if self.is_over:
            self._finished()

    # -- numbers -----------------------------------------------------------------------------------------------------

    def _note_part(self, phase: str, name: str, parameter: torch.Tensor, tensor: torch.Tensor | None = None) -> None:
        local, region = local_part(parameter if tensor is None else tensor)
        sketch = sketch_of(local, region, counts_small=phase == GRADIENT)
        self._journal.add(ValueOwner(phase, name, part=part_name(region)), sketch)

    def _note(self, place: ValueOwner, tensor: torch.Tensor, factor: float = 1.0) -> None:
        self._journal.add(place, sketch_of(tensor), factor)


def _raise(error: Exception) -> None:
    """Raise an error of the watch: numbers with a gap would be compared as if they were whole."""
    raise error


def _head(place: PlainRank) -> Head:
    """Return the description of this rank in its file."""
    return Head(
        numerics=FORMAT_VERSION,
        rank=place.rank,
        world=place.world,
        degrees={"pp": 1, "tp": 1, "rdp": place.world, "sharded": 1},
        place={"pp": 0, "tp": 0, "rdp": place.rank},
        microbatches=1,
        owners=place.world,
        every=1,
        rounding=0.0,
        is_plain=True,
    )
