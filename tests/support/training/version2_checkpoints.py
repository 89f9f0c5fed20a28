"""Trainings with FSDP1 that save and resume, as scripts for version 2 of the library write them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, BATCH, STEPS, SAVED = 6, 4, 5, 3


class Block(nn.Module):
    """A layer with a buffer, so that everything a state dict has is there; its sizes do not divide by 2 or 4."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH + 1)
        self.outer = nn.Linear(WIDTH + 1, WIDTH)
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        return x + self.outer(torch.tanh(self.inner(x)))


class Training:
    """A model with its optimizer and scheduler on this rank."""

    def __init__(self, seed: int, steps: int = 0, *, joined: bool = False) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block()).to(torch.float64)
        self.model: Any = FullyShardedDataParallel(
            module, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=not joined
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.steps = steps

    def train(self, until: int) -> None:
        import torch.sagemaker as tsm

        while self.steps < until:
            generator = torch.Generator().manual_seed(100 * self.steps + tsm.state.rank)
            batch = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.steps += 1

    def whole(self) -> dict[str, torch.Tensor]:
        """Return whole parameters and buffers, and the optimizer's moments, by name."""
        from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

        with FullyShardedDataParallel.state_dict_type(
            self.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)
        ):
            found = {name: value.clone() for name, value in self.model.state_dict().items()}
        moments = FullyShardedDataParallel.full_optim_state_dict(self.model, self.optimizer, rank0_only=False)["state"]
        return found | {f"{name} {key}": value for name, each in moments.items() for key, value in each.items()}


def gather_moments(config: dict[str, Any], way: str) -> list[str]:
    """Train, gather the optimizer's whole state, load it; return the names of moments that differ then."""
    from torch.distributed.checkpoint import state_dict as torch_state
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with joined(config):
        training = Training(0)
        training.train(2)
        model, optimizer = training.model, training.optimizer
        before = {
            (at, name): torch.as_tensor(value).clone()
            for at, moments in optimizer.state_dict()["state"].items()
            for name, value in moments.items()
        }
        if way == "PyTorch's state_dict":
            options = torch_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
            full = torch_state.get_optimizer_state_dict(model, optimizer, options=options)  # rank 0 gets it
            options = torch_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            torch_state.set_optimizer_state_dict(model, optimizer, full, options=options)
        else:
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                if way == "full_optim_state_dict":
                    full = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
                else:
                    full = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                full = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, full)
            optimizer.load_state_dict(full)
        after = optimizer.state_dict()["state"]
        return [f"{at} {name}" for (at, name), value in before.items() if not torch.equal(value, after[at][name])]


def list_parts_of_moments(joins: bool) -> set[str]:
    """Return the types of moments in the sharded state of a model that each rank has whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with joined({"hybrid_shard_degree": 1}):
        training = Training(0, joined=joins)
        training.train(2)
        with _sharded(training):
            state = FullyShardedDataParallel.optim_state_dict(training.model, training.optimizer)["state"]
        return {type(value).__name__ for moments in state.values() for value in moments.values()}


@contextlib.contextmanager
def joined(config: dict[str, Any]) -> Iterator[Any]:
    """Yield ``torch.sagemaker`` within a job."""
    import torch.sagemaker as tsm

    import torch_sagemaker_finder  # noqa: F401

    tsm.init(config)
    try:
        yield tsm
    finally:
        tsm.shutdown()


def _sharded(training: Training) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    return FullyShardedDataParallel.state_dict_type(training.model, StateDictType.SHARDED_STATE_DICT)


def save(training: Training, folder: Path, queue: Any = None) -> None:
    """Save sharded state, in the background with a queue."""
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.sagemaker.distributed.checkpoint import state_dict_saver

    with _sharded(training):
        state = {
            "model": training.model.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(training.model, training.optimizer),
            "scheduler": training.scheduler.state_dict(),
            "steps": training.steps,
            "unread": {"of": ["the", "script"]},
        }
    if tsm.state.ranker.get_rep_rank(tsm.state.rank) != 0:
        return
    group = training.model.process_group
    given: dict[str, Any] = {"checkpoint_id": folder, "process_group": group}
    given["coordinator_rank"] = min(torch.distributed.get_process_group_ranks(group))
    if queue is None:
        state_dict_saver.save(state, **given)
    elif queue == "PyTorch":
        writer = torch.distributed.checkpoint.FileSystemWriter(given.pop("checkpoint_id"))
        torch.distributed.checkpoint.save_state_dict(state, storage_writer=writer, **given)
    else:
        state_dict_saver.async_save(state, queue=queue, **given)


def load(training: Training, folder: Path, by_pytorch: bool = False) -> dict[str, Any]:
    """Load sharded state; scripts use PyTorch's function or version 2's."""
    from torch.distributed.checkpoint import DefaultLoadPlanner
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load as load_state

    model, optimizer, group = training.model, training.optimizer, training.model.process_group
    with _sharded(training):
        state = {"model": model.state_dict(), "scheduler": training.scheduler.state_dict(), "steps": 0}
        reader = DistributedFileSystemReader(folder)
        coordinator = min(torch.distributed.get_process_group_ranks(group))
        given: dict[str, Any] = {"storage_reader": reader, "process_group": group, "coordinator_rank": coordinator}
        load_function = torch.distributed.checkpoint.load_state_dict if by_pytorch else load_state
        load_function(state, planner=DefaultLoadPlanner(), **given)
        model.load_state_dict(state["model"])
        moments = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"],
            optimizer_key="optimizer",
            storage_reader=DistributedFileSystemReader(folder),
            process_group=group,
        )
        optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, moments["optimizer"])
        )
    training.scheduler.load_state_dict(state["scheduler"])
    training.steps = state["steps"]
    return state


def local_state(training: Training) -> dict[str, Any]:
    """Return the local state, inside of ``sm_state_dict_type``."""
    return {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "steps": training.steps,
    }


def local_place(training: Training, root: Path) -> dict[str, Any]:
    """Return folder and group of this rank's local shard."""
    import torch.sagemaker as tsm

    rank = tsm.state.rank
    members = next(ranks for ranks in tsm.state.ranker.get_rep_groups() if rank in ranks)
    group = torch.distributed.new_group(members, use_local_synchronization=True)
    folder = root / f"tp{tsm.state.tp_rank}_ep{tsm.state.ep_rank}_fsdp{training.model.rank}"
    return {"checkpoint_id": str(folder), "process_group": group, "coordinator_rank": min(members)}


def save_local(training: Training, root: Path, queue: Any) -> None:
    from torch.sagemaker.distributed.checkpoint import state_dict_saver
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type

    with sm_state_dict_type(training.model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state_dict_saver.async_save(local_state(training), queue=queue, **local_place(training, root))


def load_local(training: Training, root: Path) -> None:
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load as load_state
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
        SMStateDictType,
        init_optim_state,
        sm_state_dict_type,
    )

    with sm_state_dict_type(training.model, SMStateDictType.SM_LOCAL_STATE_DICT):
        init_optim_state(training.optimizer, skip_empty_param=True)
        state = local_state(training)
        load_state(state, **local_place(training, root))
        load_state(alone := {"steps": 0}, **local_place(training, root))  # as scripts load values of newer checkpoints
        assert alone["steps"] == state["steps"]
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["scheduler"])
    training.steps = state["steps"]


def resume(config: dict[str, Any], way: str, root: Path) -> dict[str, Any]:
    """Train, save on the way, and resume in a new training.

    Returns:
        Names of values that differ from those of the training that was not interrupted, and numbers of saves.
    """
    with joined(config):
        from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue

        queue = AsyncCallsQueue()
        first = Training(seed=0)
        for step in (1, SAVED):  # the second one replaces the first
            first.train(step)
            if way == "local":
                save_local(first, root, queue)
            else:
                save(first, root, {"async": queue, "now": None, "PyTorch": "PyTorch"}[way])
        first.train(STEPS)
        numbers = queue.maybe_finalize_async_calls(blocking=True, process_group=first.model.process_group)
        torch.distributed.barrier()
        second = Training(seed=1)
        load_local(second, root) if way == "local" else load(second, root, way == "PyTorch")
        resumed_at = second.steps
        second.train(STEPS)
        wanted, found = first.whole(), second.whole()
        differing = [name for name in wanted if not torch.equal(wanted[name], found[name])]
        return {"differing": differing, "at": resumed_at, "numbers": numbers, "names": sorted(wanted)}


def save_whole(config: dict[str, Any], way: str, root: Path) -> dict[str, torch.Tensor]:
    """Train a little and save; returns whole values."""
    with joined(config):
        training = Training(seed=0)
        training.train(SAVED)
        if way == "local":
            from torch.sagemaker.distributed.checkpoint.state_dict_saver import DEFAULT_ASYNC_REQUEST_QUEUE

            save_local(training, root, DEFAULT_ASYNC_REQUEST_QUEUE)  # it is finished by shutdown
        else:
            save(training, root)
        return training.whole()


def load_whole(config: dict[str, Any], way: str, root: Path) -> Any:
    """Load what :func:`save_whole` has saved; returns whole values, or the code and the message of the error."""
    from smp_runtime.errors import SMPError

    with joined(config):
        training = Training(seed=1)
        try:
            load_local(training, root) if way == "local" else load(training, root)
        except SMPError as error:
            if (
                way == "local"
            ):  # without a word to each other: rank 0, which has the store, must not leave before the others
                torch.distributed.barrier()
            return error.code, str(error)
        return training.whole()


def find_copies(strategy: str) -> tuple[list[int], list[list[int]]]:
    """Return positions and groups of ranks with the same shard, for a strategy of the script's own."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    with joined({}) as tsm:
        given: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
        if strategy == "HYBRID_SHARD":
            given["device_mesh"] = torch.distributed.device_mesh.init_device_mesh(
                "cpu", (2, 2), mesh_dim_names=("r", "s")
            )
        FullyShardedDataParallel(nn.Linear(4, 4), **given)
        ranker = tsm.state.ranker
        return [ranker.get_rep_rank(rank) for rank in range(tsm.state.world_size)], ranker.get_rep_groups()


def save_local_copies(way: str, root: Path) -> tuple[str, str]:
    """Save local state of ranks that share nothing; returns the code and the message of the error."""
    from smp_runtime.errors import SMPError

    with joined({"hybrid_shard_degree": 1}):
        from torch.sagemaker.distributed.checkpoint import state_dict_saver
        from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
        from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type

        training, queue = Training(seed=0), AsyncCallsQueue()
        try:
            with sm_state_dict_type(training.model, SMStateDictType.SM_LOCAL_STATE_DICT):
                if way == "now":
                    state_dict_saver.save(local_state(training), **local_place(training, root))
                else:
                    state_dict_saver.async_save(local_state(training), queue=queue, **local_place(training, root))
                    queue.maybe_finalize_async_calls(blocking=True)
        except SMPError as error:
            return error.code, str(error)
        return "", ""


def save_copies(root: Path) -> dict[str, Any]:
    """Save on all ranks that share nothing: the same state, in the background, other keys on one, and where one cannot write."""
    from smp_runtime.errors import CheckpointError

    with joined({"hybrid_shard_degree": 1}) as tsm:
        from torch.sagemaker.distributed.checkpoint import state_dict_saver
        from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemWriter
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load as load_state

        def fail(writer: Any) -> None:
            raise OSError(28, "no space is left")

        training, rank = Training(seed=0), tsm.state.rank
        group = training.model.process_group
        value = torch.full((4,), float(rank))
        state_dict_saver.save({"x": value}, checkpoint_id=root / "a", process_group=group)
        load_state(found := {"x": torch.empty(4)}, checkpoint_id=root / "a", process_group=group)
        state_dict_saver.async_save({"x": value}, checkpoint_id=root / "a", process_group=group)
        ended = state_dict_saver.maybe_finalize_async_calls(blocking=True, process_group=group)
        said = {}
        writer = DistributedFileSystemWriter(root / "c", pre_write_hooks=[fail])
        wrong: dict[str, Any] = {
            "keys": ({f"of rank {rank}": value}, {"checkpoint_id": root / "b"}),
            "failed": ({"x": value}, {"storage_writer": writer}),
        }
        for name, (state, given) in wrong.items():
            try:
                state_dict_saver.save(state, process_group=group, **given)
                said[name] = ""
            except CheckpointError as error:
                said[name] = str(error)
        return {"found": float(found["x"][0]), "ended": len(ended), **said}


def fail_in_background(root: Path) -> dict[str, Any]:
    """Save, fail to save to the same folder on one rank, load, and save again."""
    from smp_runtime.errors import CheckpointError

    with joined({"hybrid_shard_degree": 2}) as tsm:
        from torch.sagemaker.distributed.checkpoint import state_dict_saver
        from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemWriter
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load as load_state

        def fail(writer: Any) -> None:
            if tsm.state.rank == 1:
                raise OSError(28, "no space is left")

        raised = []
        value = torch.full((4,), float(tsm.state.rank))
        state_dict_saver.async_save({"x": value, "y": 1}, checkpoint_id=root)
        value.add_(10)  # a copy is saved
        writer = DistributedFileSystemWriter(root, pre_write_hooks=[fail])
        state_dict_saver.async_save({"x": value, "y": 2}, storage_writer=writer)
        try:
            state_dict_saver.maybe_finalize_async_calls(blocking=True)
        except CheckpointError as error:
            raised.append((error.code, str(error)))
        found = {"x": torch.empty(4), "y": 0}
        load_state(found, checkpoint_id=root)
        missing = ""
        try:
            load_state({"x": torch.empty(4), "z": 0}, checkpoint_id=root)
        except KeyError as error:
            missing = str(error)
        number = state_dict_saver.async_save({"x": value, "y": 3}, checkpoint_id=root)
        numbers = state_dict_saver.maybe_finalize_async_calls(blocking=True)
        load_state(again := {"y": 0}, checkpoint_id=root)
        return {
            "raised": raised,
            "missing": missing,
            "found": (found["x"].tolist(), found["y"]),
            "numbers": (number, numbers),
            "again": again["y"],
        }


def run_page(code: str, folder: Path) -> int:
    """Run the block of the page, and return the step that it has saved."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    before = Path.cwd()
    with joined({"hybrid_shard_degree": 2}) as tsm, contextlib.ExitStack() as last:
        last.callback(os.chdir, before)
        os.chdir(folder)
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load as load_state

        training = Training(seed=0)
        exec(code, {"tsm": tsm, "FSDP": FullyShardedDataParallel, "model": training.model, "step": 7})
        load_state(found := {"step": 0}, checkpoint_id="checkpoints/model-10steps")
        return found["step"]


# -- conversion --------------------------------------------------------------------------------------------------------


def _make_wrapped(tsm: Any, make: Any = None) -> Any:
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    from smp_version2.layer_classes import TransformerLayer
    from support.models.version2 import make_llama

    model = tsm.transform((make or make_llama)().double())
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)


def _whole(model: Any) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
    ):
        return {name: value.clone() for name, value in model.state_dict().items()}


def save_split(config: dict[str, Any], root: Path, make: Any = None) -> dict[str, torch.Tensor]:
    """Save a split model as scripts do: a folder for each tensor and expert parallel rank; rank 0 returns the whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with joined(config) as tsm:
        from torch.sagemaker.distributed.checkpoint import state_dict_saver

        torch.manual_seed(3)
        model = _make_wrapped(tsm, make)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict(), "steps": 3}
        folder = root / f"tp{tsm.state.tp_size}-{tsm.state.tp_rank}" / f"ep{tsm.state.ep_size}-{tsm.state.ep_rank}"
        group = model.process_group
        if tsm.state.ranker.get_rep_rank(tsm.state.rank) == 0:
            state_dict_saver.save(state, checkpoint_id=folder, process_group=group)
        return _whole(model)


def load_converted(config: dict[str, Any], root: Path) -> dict[str, torch.Tensor]:
    """Load a converted checkpoint into another model; rank 0 returns the whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with joined(config) as tsm:
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load as load_state

        torch.manual_seed(4)
        model = _make_wrapped(tsm)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict()}
            load_state(state, checkpoint_id=root, process_group=model.process_group)
            model.load_state_dict(state["model"])
        return _whole(model)
