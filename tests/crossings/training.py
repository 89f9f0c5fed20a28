"""One case, trained as a job and by one process in plain PyTorch: the same batches, updates and events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from crossings.case import BATCH, STEPS, Case, Event
from crossings.nets import LENGTH, NETS, Batch
from support.models import part
from torch import nn

LIMIT, SCALE, SEED = 0.05, 256.0, 7


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
    """

    losses: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    last: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    exact: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)


def mark_biases(module: nn.Module) -> None:
    """Put an attribute on some parameters, before anything is done with the model."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.is_slow = True  # type: ignore[attr-defined]


def grouped(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups of parameters, with rates of their own; :func:`mark_biases` has chosen."""
    slow = [p for p in module.parameters() if getattr(p, "is_slow", False)]
    chosen = set(map(id, slow))
    return [{"params": [p for p in module.parameters() if id(p) not in chosen]}, {"params": slow, "lr": 2e-3}]


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

    def __init__(self, case: Case) -> None:
        self.case, self.net, self.topology = case, NETS[case.net], case.topology
        self.record = Record()
        self.is_frozen = False
        self._begin_step()

    def _begin_step(self) -> None:
        """Take back what an event has changed for one step."""
        self.size, self.length, self.passes = BATCH, LENGTH, self.case.passes
        self.gradient_factor, self.clipped_factor, self.drops_gradients = 1.0, 1.0, False

    def run(self) -> Record:
        """All steps with their events."""
        for step in range(STEPS):
            self._begin_step()
            for event in self.case.events:
                if event.step == step:
                    self.apply(event)
            batch = self.batch(step)
            self.optimizer.zero_grad()
            whole = [self.backward(part(batch, number, self.case.passes)) for number in range(self.passes)]
            self.record.losses.append(sum(whole) / len(whole))
            self.update()
        self.record.last = self.weights()
        return self.record

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

    def _change_gradients(self) -> None:
        """Do to gradients what the script does between backward and the update."""
        self._scale(self.gradient_factor)
        if self.drops_gradients:
            for p in self.net.blocks(self.module)[-1].parameters():
                p.grad = None

    def batch(self, step: int) -> Batch:
        """All samples of a step."""
        found = self.net.batch(step, self.size, self.length)
        return tuple(tensor.to(self.case.dtype) if tensor.is_floating_point() else tensor for tensor in found)

    def apply(self, event: Event) -> None:
        """Let an event happen."""
        if event.goes_to:
            self.topology = event.goes_to
        getattr(self, event.kind)(event.step)

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
        with torch.no_grad():
            self.record.scores.append(self.score(self.batch(99)))
        self.model.train()

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


class Alone(Training):
    """One process, in plain PyTorch and without rounding to half precision."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._statistics: dict[int, list[torch.Tensor]] = {}
        torch.manual_seed(SEED)
        with default_dtype(case.dtype):
            self.model = self.net.make()
            mark_biases(self.model)
            if case.begins_frozen:
                self.net.blocks(self.model)[0].requires_grad_(False)
            groups = grouped(self.model) if case.grouped else self.model.parameters()
            self.optimizer = make_optimizer(case.optimizer, groups)
        self.record.parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        self.record.first = self.weights()

    @property
    def module(self) -> nn.Module:
        """See :class:`Training`."""
        return self.model

    def backward(self, batch: Batch) -> float:
        """See :class:`Training`; each replica begins with the running statistics of the first."""
        self._statistics.clear()
        return self._loss(batch, lambda loss, pieces: (loss / pieces / self.case.passes).backward())

    def score(self, batch: Batch) -> float:
        """See :class:`Training`; each replica has the running statistics of its last batch."""
        return self._loss(batch, lambda loss, pieces: None)

    def _loss(self, batch: Batch, use: Callable[[torch.Tensor, int], None]) -> float:
        replicas, microbatches = self.case.replicas(self.topology), self.case.microbatches
        first, total = [buffer.clone() for buffer in self.model.buffers()], 0.0
        for replica in reversed(range(replicas)):  # those of the first stay
            self._take(self._statistics.get(replica, first) if replica else first)
            for number in range(microbatches):
                piece = part(part(batch, replica, replicas), number, microbatches)
                loss = self.net.loss(self.model, *piece)
                use(loss, replicas * microbatches)
                total += float(loss.detach()) / (replicas * microbatches)
            self._statistics[replica] = [buffer.clone() for buffer in self.model.buffers()]
        return total

    def _take(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self.model.buffers(), values, strict=True):
            buffer.copy_(value)

    def clip(self) -> None:
        """See :class:`Training`."""
        if self.case.clipping != "none":
            self.record.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)))

    @torch.no_grad()
    def write_buffers(self, step: int) -> None:
        """See :class:`Training`; every replica writes into its own."""
        super().write_buffers(step)
        for statistics in self._statistics.values():
            for value in statistics:
                if value.is_floating_point():
                    value.mul_(0.75)

    def resume_partial(self, step: int) -> None:
        """One process goes on; replicas have the running statistics of the first."""
        self._statistics.clear()

    resume_full = reshape = resume_partial


class Job(Training):
    """A rank of the job, as a script trains it.

    Args:
        folder: for checkpoints; the same on all ranks.
    """

    def __init__(self, case: Case, folder: str) -> None:
        super().__init__(case)
        self._folder = folder
        self._join(SEED)
        self.record.first = self.weights() if case.delayed else {}

    def _join(self, seed: int) -> None:
        import smdistributed.modelparallel.torch as smp

        case, net = self.case, self.net
        smp.init(case.settings(self.topology))
        if case.recorded:
            smp.record_numerics(self._folder, every=2)
        torch.manual_seed(seed + smp.rdp_rank())  # replicas take the weights of the first
        with default_dtype(case.dtype):
            with smp.delay_param_initialization(enabled=case.delayed):
                module = net.make()
            mark_biases(module)
            if case.begins_frozen:
                net.blocks(module)[0].requires_grad_(False)
            if smp.tp_size() > 1:
                smp.set_tensor_parallelism(module)
            counted = case.passes if case.counted_passes else 1
            bucket_mebibytes = 1e-3 if case.small_buckets else 25
            self.model = model = smp.DistributedModel(
                module, backward_passes_per_step=counted, bucket_cap_mb=bucket_mebibytes
            )
            made = make_optimizer(case.optimizer, grouped(model) if case.grouped else model.parameters())
            self.optimizer = smp.DistributedOptimizer(made, static_loss_scale=SCALE)
        scaler = self._scaler = smp.amp.GradScaler(init_scale=SCALE, enabled=case.scaled)
        if case.checkpointing != "none":
            for number, block in enumerate(net.blocks(self.module)):
                if case.checkpointing != "some" or number % 2:
                    inner = next(iter(block.children()), block) if case.checkpointing == "inner" else block
                    smp.set_activation_checkpointing(inner)

        if case.manual:
            blocks = net.blocks(self.module)
            for number, block in enumerate(blocks):
                smp.set_partition(block, number * smp.pp_size() // len(blocks))

        @smp.step
        def train(*batch: torch.Tensor) -> torch.Tensor:
            with self._autocast():
                loss = net.loss(model, *batch)
            model.backward(scaler.scale(loss / case.passes))
            return loss

        @smp.step
        def score(*batch: torch.Tensor) -> torch.Tensor:
            with self._autocast():
                return net.loss(model, *batch)

        self._train, self._score = train, score

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.case.precision == "autocast")

    @property
    def module(self) -> nn.Module:
        """See :class:`Training`."""
        found: nn.Module = self.model.module
        return found

    def backward(self, batch: Batch) -> float:
        """See :class:`Training`."""
        return self._mean(self._train, batch)

    def update(self) -> None:
        """See :class:`Training`; with a scaler of the script's where the case says so."""
        if not self.case.scaled:
            super().update()
            return
        self._change_gradients()
        self._scaler.unscale_(self.optimizer)
        self.clip()
        self._scale(self.clipped_factor)
        self._scaler.step(self.optimizer)
        self._scaler.update()

    def score(self, batch: Batch) -> float:
        """See :class:`Training`."""
        return self._mean(self._score, batch)

    def _mean(self, call: Callable[..., Any], batch: Batch) -> float:
        import smdistributed.modelparallel.torch as smp

        common = self.case.prescaled
        rank, size = (smp.rdp_rank(), smp.rdp_size()) if common else (smp.dp_rank(), smp.dp_size())
        mean = float(call(*part(batch, rank, size)).reduce_mean())
        return sum(smp.allgather(mean, smp.RDP_GROUP if common else smp.DP_GROUP)) / size

    def run(self) -> Record:
        """See :class:`Training`; an update may be smaller than what rounding changes, so float32 weights are compared."""
        super().run()
        if self.case.is_half:
            masters = self.optimizer.full_state_dict()["fp16_states"]["masters"]
            dtype = torch.bfloat16 if self.case.precision == "bf16" else torch.float16
            for record in (record for record in self.model.registry if record.name in masters):
                master = masters[record.name]
                either = master.double(), master.to(dtype).double()  # batch norms are not rounded
                last = {name: self.record.last[name] for name in record.names}
                self.record.exact |= last.keys()
                self.record.stale |= {n for n, value in last.items() if not any(torch.equal(value, e) for e in either)}
                self.record.last |= dict.fromkeys(last, either[0])
        return self.record

    def clip(self) -> None:
        """See :class:`Training`."""
        if self.case.clipping == "master":
            self.record.norms.append(float(self.optimizer.clip_master_grads(LIMIT)))
        elif self.case.clipping == "torch":
            self.record.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)))
        elif self.case.clipping == "total":
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
            nn.utils.clip_grads_with_norm_(self.model.parameters(), LIMIT, norm)
            self.record.norms.append(float(norm))

    def resume_partial(self, step: int, *, partial: bool = True) -> None:
        """Save, leave the job, and go on in another with other degrees and other first weights."""
        import smdistributed.modelparallel.torch as smp

        tag = str(step)
        smp.save_checkpoint(self._folder, tag=tag, partial=partial, model=self.model, optimizer=self.optimizer)
        smp.barrier()
        self.model = self.optimizer = self._train = self._score = self._scaler = None
        smp.shutdown()
        self._join(SEED + step)
        if self.is_frozen:
            self.hold_frozen()
        smp.resume_from_checkpoint(self._folder, tag=tag, partial=partial)

    def resume_full(self, step: int) -> None:
        """The same by a full checkpoint."""
        self.resume_partial(step, partial=False)

    def fail(self, step: int) -> None:
        """See :class:`Training`."""
        import smdistributed.modelparallel.torch as smp

        net, model = self.net, self.model

        @smp.step
        def train(*batch: torch.Tensor) -> torch.Tensor:
            with self._autocast():
                loss = net.loss(model, *batch)
            model.backward(loss)
            raise ValueError("the script's own")

        try:
            self._mean(train, self.batch(50))
        except (ValueError, RuntimeError) as error:  # a pipeline's has the stage and its module
            assert "the script's own" in str(error)
            self.optimizer.zero_grad()

    def reshape(self, step: int) -> None:
        """Go over to other degrees."""
        import smdistributed.modelparallel.torch as smp

        smp.reshape(self.case.settings(self.topology))
        if step % 2:  # before another step has run
            self.load_again()


def train_case(text: str, folder: str) -> Record:
    """Train a case on this rank.

    Args:
        text: of :meth:`Case.to_json`.
    """
    return Job(Case.from_json(text), folder).run()
