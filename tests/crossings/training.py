"""The training of one case: the batches, updates and events that a job and one process have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from crossings.case import BATCH, Case, Event
from crossings.nets import LENGTH, Batch, document_positions
from crossings.version2_nets import find_net
from support.models.models import part
from torch import nn

LIMIT, SCALE, SEED = 0.05, 256.0, 7
#: Of single elements of gradients.
LARGEST = 0.005
#: The step before which a later group of parameters is added.
LATE = 2


@dataclass
class Record:
    """What a training has come to.

    Attributes:
        losses: of each update, the mean over all samples.
        scores: of each evaluation.
        norms: of the gradients, where they are clipped.
        first: the weights before the first update, by name.
        last: all of the state dict at the end, by name, in float64.
        parameters: the names of those that are trained.
        exact: the names of those whose float32 weights are in ``last``, not the rounded ones that the model has.
        stale: the names of those whose rounded weights are not these.
        processor_seconds: of this process, all threads, from the beginning of the case.
    """

    losses: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    last: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    exact: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    processor_seconds: float = 0.0


def mark_biases(module: nn.Module) -> None:
    """Put an attribute on some parameters, before anything is done with the model."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.is_slow = True  # type: ignore[attr-defined]


def hook_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Have backward halve the gradients of parameters."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: 0.5 * gradient)


def grouped(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups of parameters, with rates of their own; :func:`mark_biases` has chosen."""
    slow = [p for p in parameters if getattr(p, "is_slow", False)]
    chosen = set(map(id, slow))
    return [{"params": [p for p in parameters if id(p) not in chosen]}, {"params": slow, "lr": 2e-3}]


def by_hand(parameters: Sequence[Any]) -> list[dict[str, Any]]:
    """Groups of Muon: matrices, here by their dimensions, and the rest; groups are divided in two."""
    groups = parameters if isinstance(parameters[0], dict) else [{"params": parameters}]
    found: list[dict[str, Any]] = []
    for group in groups:
        for use in (True, False):
            chosen = [p for p in group["params"] if (p.dim() in (2, 3)) is use]
            found += [{**group, "params": chosen, "use_muon": use}] if chosen else []
    return found


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of a case; with an ``eps`` at which gradients near zero are no signs."""
    import smdistributed.modelparallel.torch as smp

    made = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
        "adam": lambda p: torch.optim.Adam(p, lr=3e-3, eps=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-3, weight_decay=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3),
        "lamb": lambda p: smp.optimizers.FusedLAMB(p, lr=1e-2),
        "novograd": lambda p: smp.optimizers.FusedNovoGrad(p, lr=1e-2),
        "muon": lambda p: smp.optimizers.Muon(
            p if isinstance(p, nn.Module) else by_hand(p), lr=1e-2, adamw_lr=3e-3, adamw_eps=1e-3
        ),
    }[name](parameters)
    assert isinstance(made, torch.optim.Optimizer)
    return made


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters in that type."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


class Training:
    """What is alike in both ways to train a case."""

    model: Any
    optimizer: Any
    #: Of the loss, and so of gradients before the update.
    scale = 1.0

    def __init__(self, case: Case) -> None:
        self.case, self.net, self.topology = case, find_net(case.net), case.topology
        self.record = Record()
        self.is_frozen = self.is_resting = False
        self.lacks_group = case.later_group
        self._begin_step()

    def _begin_step(self) -> None:
        """Take back what an event has changed for one step."""
        self.size, self.length, self.passes = BATCH, LENGTH, self.case.passes
        self.gradient_factor, self.clipped_factor, self.drops_gradients, self.first_gradient = 1.0, 1.0, False, 0.0
        self.evaluates_within = False

    def run(self) -> Record:
        """All steps with their events."""
        for step in range(self.case.steps):
            self._begin_step()
            for event in self.case.events:
                if event.step == step:
                    self.apply(event)
            if step == LATE and self.lacks_group:
                self.add_group()
            batch = self.batch(step)
            # The optimizer alone does not clear what is in no group yet.
            holder = self.model if self.case.later_group else self.optimizer
            holder.zero_grad(set_to_none=not self.case.zeroes)
            if self.first_gradient:
                self._begin_gradients()
            whole = []
            for number in range(self.passes):
                with self.accumulating(is_last=number == self.passes - 1):
                    whole.append(self.backward(part(batch, number, self.case.passes)))
                if self.evaluates_within and number == 0:
                    self.evaluate(step)
            self.record.losses.append(sum(whole) / len(whole))
            self.update()
        self.record.last = self.weights()
        return self.record

    def accumulating(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Run a pass inside; unless it is the last, its gradients need not be averaged yet."""
        return contextlib.nullcontext()

    def update(self) -> None:
        """Change the weights by the gradients."""
        self._change_gradients()
        self.clip()
        self._scale(self.clipped_factor)
        self.optimizer.step()

    def _scale(self, factor: float) -> None:
        if factor != 1.0:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(factor)

    def _begin_gradients(self) -> None:
        for p in self.model.parameters():
            if p.requires_grad:
                p.grad = torch.full_like(p, self.first_gradient * self.scale)

    def _change_gradients(self) -> None:
        """Do to gradients what the script does between backward and the update."""
        self._scale(self.gradient_factor)
        if self.drops_gradients:
            for p in self.last_block():
                p.grad = None

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        """The loss of a step, which may call the model twice or read its parameters."""
        model, use = self.model, self.case.use
        if use == "twice":
            return 0.75 * self.net.loss(model, *batch) + 0.25 * self.net.loss(model, *batch)
        if use == "teacher":
            with torch.no_grad():
                factor = self.net.loss(model, *batch)
            return (1.0 + 0.1 * factor) * self.net.loss(model, *batch)
        loss = self.net.loss(model, *batch)
        if use == "penalty":
            loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)
        return loss

    def batch(self, step: int) -> Batch:
        """All samples of a step."""
        found = self.net.batch(step, self.size, self.length)
        if self.case.packed:
            found += (document_positions(step, self.size, self.length),)
        return tuple(tensor.to(self.case.dtype) if tensor.is_floating_point() else tensor for tensor in found)

    def apply(self, event: Event) -> None:
        """Let an event happen."""
        if event.goes_to:
            self.topology = event.goes_to
        getattr(self, event.kind)(event.step)

    def last_block(self) -> list[nn.Parameter]:
        """The parameters of the last block."""
        return list(self.net.blocks(self.module)[-1].parameters())

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the case, with the groups that it has by now."""
        parameters = list(self.model.parameters())
        if self.case.later_group:
            later = set(map(id, self.last_block()))
            parameters = [p for p in parameters if id(p) not in later]
        elif self.case.optimizer == "muon" and not self.case.grouped:
            return make_optimizer("muon", self.model)
        return make_optimizer(self.case.optimizer, grouped(parameters) if self.case.grouped else parameters)

    def add_group(self) -> None:
        """The last block's parameters train from now on."""
        self.lacks_group = False
        group: dict[str, Any] = {"params": self.last_block(), "lr": 2e-3}
        for each in by_hand([group]) if self.case.optimizer == "muon" else [group]:
            self.optimizer.add_param_group(each)

    def freeze(self, step: int) -> None:
        """The first block trains no more, or again."""
        self.is_frozen = not self.is_frozen
        self.hold_frozen()

    def hold_frozen(self) -> None:
        """Mark the first block's parameters."""
        for p in self.net.blocks(self.module)[0].parameters():
            p.requires_grad_(not self.is_frozen)

    def double_batch(self, step: int) -> None:
        """The next batch is twice as large."""
        self.size = 2 * BATCH

    def shorten_samples(self, step: int) -> None:
        """The samples of the next batch are shorter."""
        self.length = LENGTH - 2

    def scale_gradients(self, step: int) -> None:
        """The script halves the next step's gradients."""
        self.gradient_factor = 0.5

    def scale_clipped(self, step: int) -> None:
        """The same behind the clipping."""
        self.clipped_factor = 0.5

    def leave_pass_out(self, step: int) -> None:
        """The next update comes after one of its passes."""
        self.passes = 1

    def set_gradients(self, step: int) -> None:
        """The gradients of the next step are added to those that the script sets before it."""
        self.first_gradient = 0.01

    def drop_gradients(self, step: int) -> None:
        """The script drops the last block's gradients of the next step."""
        self.drops_gradients = True

    @torch.no_grad()
    def swap_weights(self, step: int) -> None:
        """Score other weights, and put the trained ones back, as averages of weights are used."""
        former = [p.detach().clone() for p in self.model.parameters()]
        for p in self.model.parameters():
            p.copy_(p * 0.5)
        self.evaluate(step)
        for p, value in zip(self.model.parameters(), former, strict=True):
            p.copy_(value)

    @torch.no_grad()
    def write_buffers(self, step: int) -> None:
        """The script changes buffers."""
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                buffer.mul_(0.75)

    def fail(self, step: int) -> None:
        """A step raises behind the backward pass of its model; the script goes on without it."""

    def lower_rate(self, step: int) -> None:
        """The learning rate is halved."""
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    @torch.no_grad()
    def change_weights(self, step: int) -> None:
        """The script writes into parameters, in one of four ways."""
        for p in self.model.parameters():
            if step % 4 == 0:
                p.clamp_(-0.3, 0.3)
            elif step % 4 == 1:
                p.data.mul_(0.9)
            elif step % 4 == 2:
                p.data = p.data * 0.95
            else:
                p.detach().add_(0.01)

    def reload_state(self, step: int) -> None:
        """What model and optimizer give is loaded again; the weights smaller, so that it counts."""
        self.load_again(0.75)

    def load_again(self, factor: float = 1.0) -> None:
        """Load what model and optimizer give, the model's state times a factor."""
        state = self.model.state_dict()
        self.model.load_state_dict({name: v * factor if v.is_floating_point() else v for name, v in state.items()})
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def evaluate(self, step: int) -> None:
        """Score a batch of its own in evaluation mode."""
        self.model.eval()
        with torch.inference_mode() if step % 2 else torch.no_grad():
            self.record.scores.append(self.score(self.batch(99)))
        self.model.train()
        self.is_resting = False

    def evaluate_within(self, step: int) -> None:
        """The script evaluates behind the first pass of the next update, whose gradients wait for other passes or the update."""
        self.evaluates_within = True

    def rest_block(self, step: int) -> None:
        """The first block is in evaluation mode until the model is in training mode again."""
        self.is_resting = True
        self.net.blocks(self.module)[0].eval()

    def generate(self, step: int) -> None:
        """Write on, greedily; what comes out is a score."""
        prompts = self.net.batch(step, 2, LENGTH)[0]
        tokens = self.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=False
        )
        self.record.scores += [float(token) for token in tokens.flatten()]

    @property
    def module(self) -> nn.Module:
        """The script's model."""
        raise NotImplementedError

    def backward(self, batch: Batch) -> float:
        """Add the gradients of a pass; gives its loss."""
        raise NotImplementedError

    def score(self, batch: Batch) -> float:
        """The loss without gradients."""
        raise NotImplementedError

    def clip(self) -> None:
        """Clip the gradients where the case says so, and note their norm."""
        raise NotImplementedError

    def weights(self) -> dict[str, torch.Tensor]:
        """All of the state dict."""
        return {name: value.detach().clone().double() for name, value in self.model.state_dict().items()}
