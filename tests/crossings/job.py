"""A case trained as a job: one rank of it, as a script trains it."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from crossings.case import Case
from crossings.training import (
    LARGEST,
    LIMIT,
    SCALE,
    SEED,
    Record,
    Training,
    default_dtype,
    hook_gradients,
    mark_biases,
)
from support.models.models import part
from support.platform.memory_told import told
from torch import nn

if TYPE_CHECKING:
    from crossings.nets import Batch


class Job(Training):
    """A rank of the job, as a script trains it.

    Args:
        folder: for checkpoints; the same on all ranks.
    """

    def __init__(self, case: Case, folder: str) -> None:
        super().__init__(case)
        self._folder = folder
        self.scale = SCALE if case.scaled or case.precision == "fp16" else 1.0
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
            self.optimizer = smp.DistributedOptimizer(self.make_optimizer(), static_loss_scale=SCALE)
            if case.later_group and not self.lacks_group:
                self.add_group()
        if case.hooked:
            hook_gradients(self.last_block())
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
                loss = self.loss(*batch)
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

    def accumulating(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """See :class:`Training`."""
        waits = self.case.without_sync and not is_last
        found: contextlib.AbstractContextManager[None] = self.model.no_sync() if waits else contextlib.nullcontext()
        return found

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
        elif self.case.clipping == "largest":
            largest = nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST, math.inf)
            self.record.norms.append(float(largest))
        elif self.case.clipping == "value":
            nn.utils.clip_grad_value_(self.model.parameters(), LARGEST)

    def resume_partial(self, step: int, *, partial: bool = True) -> None:
        """Save, leave the job, and go on in another with other degrees and other first weights."""
        import smdistributed.modelparallel.torch as smp

        smp.save_checkpoint(self._folder, tag=str(step), partial=partial, model=self.model, optimizer=self.optimizer)
        smp.barrier()
        self._go_on(step, partial=partial)

    def resume_async(self, step: int) -> None:
        """The same by a partial checkpoint that is written while the script changes all weights and trains on."""
        import smdistributed.modelparallel.torch as smp

        saves = {"model": self.model, "optimizer": self.optimizer, "async_save": True}
        if step % 2:  # later saves agree behind the script's back
            smp.save_checkpoint(self._folder, tag=f"before-{step}", **saves)
        smp.save_checkpoint(self._folder, tag=str(step), **saves)
        with torch.no_grad():
            for parameter in self.model.local_parameters():
                parameter.data.mul_(0.5)
            for updated in (p for group in self.optimizer.param_groups for p in group["params"]):
                if isinstance(updated, nn.Parameter) and updated.numel():
                    updated.data.mul_(0.5)
        self._mean(self._train, self.batch(50))
        self.optimizer.step()
        smp.wait_for_checkpoint()
        smp.barrier()
        self._go_on(step)

    def resume_memory(self, step: int) -> None:
        """The same by what ranks have in shared memory when they are started again, and by no file."""
        import smdistributed.modelparallel.torch as smp

        place = Path(self._folder, f"memory-{step}")
        place.mkdir(exist_ok=True)
        before = dict(os.environ)
        try:
            os.environ.update(told(place))
            assert smp.memory_checkpoint(self.model, self.optimizer, {"step": step})
            smp.barrier()
            os.environ.update(told(place, 1))
            self._go_on(step, from_memory=True)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _go_on(self, step: int, *, partial: bool = True, from_memory: bool = False) -> None:
        """Leave the job, and go on in another from the checkpoint of this step."""
        import smdistributed.modelparallel.torch as smp

        self.model = self.optimizer = self._train = self._score = self._scaler = None
        smp.shutdown()
        self._join(SEED + step)
        if self.is_frozen:
            self.hold_frozen()
        if self.is_resting:
            self.rest_block(step)
        if from_memory:
            assert smp.resume_from_checkpoint(f"{self._folder}/no-files")["step"] == step
        else:
            smp.resume_from_checkpoint(self._folder, tag=str(step), partial=partial)

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

        former = smp.tp_size()
        smp.reshape(self.case.settings(self.topology))
        if self.case.hooked and max(former, smp.tp_size()) > 1:  # a warning says that distributed modules are new
            own = [p for p in self.last_block() if not p._backward_hooks]
            hook_gradients(own)
        if step % 2:  # before another step has run
            self.load_again()


def train_case(text: str, folder: str) -> Record:
    """Train a case on this rank.

    Args:
        text: of :meth:`Case.to_json`.
    """
    began = time.process_time()
    found = Job(Case.from_json(text), folder).run()
    found.processor_seconds = time.process_time() - began
    return found
