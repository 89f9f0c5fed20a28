"""A rank of ``recovery.py``: the same small GPT trained by one of its systems, which tells of each step when it is over.

A rank's ledger has a line ``step pid time`` for each step, written when all of it is over, what keeps the state included.
Nothing of one system is imported in ranks of another: imports are part of what a restart takes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from decoder import BATCH, SEQ, VOCABULARY, Gpt
from torch import nn

HIDDEN, LAYERS = 256, 4


class Ledger:
    """What a rank tells, and what it is told: after how many steps the training ends."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._file = os.open(folder / f"ledger.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step(self, step: int) -> None:
        os.write(self._file, f"{step} {os.getpid()} {time.monotonic()}\n".encode())

    def is_over(self, step: int) -> bool:
        """Return whether ``step`` is past the last one. The end is set many steps ahead, so that all ranks see it in time."""
        end = self._folder / "end"
        return end.exists() and step >= int(end.read_text())

    def parameters(self, state: Mapping[str, Any]) -> None:
        """Write a digest of each tensor of a rank's final parameters."""
        found = {
            name: hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        (self._folder / f"parameters.{self._rank}").write_text(json.dumps(found, sort_keys=True))


def batch(step: int, replica: int) -> torch.Tensor:
    """Return the ids of a step: [batch, seq]."""
    draw = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randint(0, VOCABULARY, (BATCH, SEQ), generator=draw)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt(HIDDEN, LAYERS)


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def train_here(folder: Path) -> None:
    """Train with this library; the launcher passes the parameters and the place of the state in memory."""
    import smdistributed.modelparallel.torch as smp

    smp.init()
    ledger = Ledger(folder, smp.rank())
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        module = _gpt()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(_adam(model))

    @smp.step
    def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids), ids)
        model.backward(loss)
        return loss

    step = 0
    if smp.newest_memory_checkpoint() is not None:
        step = smp.resume_from_checkpoint(str(folder / "checkpoints"))["step"]
    while not ledger.is_over(step):
        optimizer.zero_grad()
        train_step(model, batch(step, smp.dp_rank()))
        optimizer.step()
        smp.memory_checkpoint(model, optimizer, {"step": step + 1})
        ledger.step(step)
        step += 1
    ledger.parameters(model.local_state_dict())
    smp.barrier()


def train_with_dcp(folder: Path, is_async: bool) -> None:
    """Train with plain DDP under torchrun; save with DCP after each step, and start from the newest complete folder."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, own_group = dist.get_rank(), dist.new_group(backend="gloo")
    ledger, saved = Ledger(folder, rank), folder / "saved"
    model = nn.parallel.DistributedDataParallel(_gpt())
    optimizer = _adam(model)
    # DCP writes .metadata last.
    step = max((int(path.parent.name) for path in saved.glob("*/.metadata")), default=0)
    if step:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=saved / str(step))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    saving = None
    while not ledger.is_over(step):
        optimizer.zero_grad()
        ids = batch(step, rank)
        loss_of(model(ids), ids).backward()
        optimizer.step()
        weights, states = get_state_dict(model, optimizer)
        content, place = {"model": weights, "optimizer": states}, saved / str(step + 1)
        if is_async:
            if saving is not None:
                saving.result()
            saving = dcp.async_save(content, checkpoint_id=place, process_group=own_group)
        else:
            dcp.save(content, checkpoint_id=place, process_group=own_group)
        if rank == 0 and step > 1:  # two complete ones stay, whichever of them is still being written
            shutil.rmtree(saved / str(step - 1), ignore_errors=True)
        ledger.step(step)
        step += 1
    if saving is not None:
        saving.result()
    ledger.parameters(model.module.state_dict())
    dist.barrier()
    dist.destroy_process_group()


def train_with_torchft(folder: Path, is_alone: bool) -> None:
    """Train with DDP of torchft: a lost replica takes the state of the one that is left.

    ``is_alone``: the one that is left trains on meanwhile, with its own batches only; otherwise it waits for the other.
    """
    from torchft import DistributedDataParallel, Manager, ProcessGroupGloo

    replica = int(os.environ["REPLICA_GROUP_ID"])
    ledger, module = Ledger(folder, replica), _gpt()
    inner = _adam(module)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1 if is_alone else 2,
        use_async_quorum=is_alone,  # with it, a replica that comes back adds nothing to its first step
        replica_id=f"gpt_{replica}",
        init_sync=False,
    )

    class Ddp(DistributedDataParallel):
        @staticmethod
        def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch refuses annotations that are texts
            # The hook of torchft 0.2.0 ends the replica that is left with an AssertionError: its future is empty after an error.
            state.allreduce(bucket.buffer()).wait()  # in place; an error is told to the manager, which drops the step
            reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            reduced.set_result(bucket.buffer())
            return reduced

    model = Ddp(manager, module)
    while not ledger.is_over(manager.current_step()):
        manager.start_quorum()
        inner.zero_grad()
        ids = batch(manager.current_step(), replica)
        loss_of(model(ids), ids).backward()
        if manager.should_commit():
            inner.step()
            ledger.step(manager.current_step() - 1)
    ledger.parameters(module.state_dict())
    manager.shutdown(wait=False)
    os._exit(0)  # its threads would wait for the other replica's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("smp", "dcp", "dcp-async", "torchft", "torchft-alone"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.kind == "smp":
        train_here(options.folder)
    elif options.kind.startswith("dcp"):
        train_with_dcp(options.folder, options.kind == "dcp-async")
    else:
        train_with_torchft(options.folder, options.kind == "torchft-alone")


if __name__ == "__main__":
    main()
