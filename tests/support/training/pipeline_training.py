"""Training :mod:`support.models.pipeline_models` in one process, or in the stages of a pipeline, and comparing both."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from support.models.models import part
from support.models.pipeline_models import CASES, Pair, built, scattered
from support.training.closeness import close
from support.training.rank_training import training_step
from support.training.reference import Alone, divided


def cast(batch: tuple[torch.Tensor, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The floating point tensors in another type."""
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in batch)


def flat(outputs: Any) -> list[torch.Tensor]:
    """The tensors of a case's outputs."""
    if isinstance(outputs, Pair):
        return [outputs.value]
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def summing_step(model: Any) -> Any:
    """A step function of a wrapped model that trains on the sum of its output."""
    return training_step(model, lambda model, x: model(x).sum())


def small_chain(layers: int) -> Any:
    """A wrapped chain of linear layers of 4 features, ``layers`` on each stage."""
    import smdistributed.modelparallel.torch as smp

    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers * smp.pp_size())))
    for number, layer in enumerate(net):
        smp.set_partition(layer, number // layers)
    return smp.DistributedModel(net)


def messages_of_a_known_step(steps: int, layers: int = 1) -> list[str]:
    """Return the kinds of messages that this rank sends in the last of several equal steps; each stage has ``layers`` layers."""
    from smp_runtime.pipeline.transport.messages import from_plain

    model = small_chain(layers)
    train = summing_step(model)
    for _ in range(steps - 1):
        train(torch.ones(4, 4))
    transport, kinds = model.pipeline.transport, list[str]()
    send = transport.send

    def note(stage: int, head: Any, *args: Any, **kwargs: Any) -> None:
        _, message, _ = head
        kinds.append(type(message and from_plain(message)).__name__)
        send(stage, head, *args, **kwargs)

    transport.send = note
    train(torch.ones(4, 4))
    return kinds


@functools.cache
def alone(
    name: str, *, steps: int, batch: int, dtype: torch.dtype = torch.float32, evaluates: bool = False, **parts: int
) -> dict[str, Any]:
    """One process over the same microbatches, in order: the reference.

    Args:
        parts: numbers of ``microbatches`` and ``replicas``.

    Returns:
        ``losses`` and ``evaluations`` by step, ``gradients`` by step and name, ``outputs`` of the last step, and
        ``state`` at the end.
    """
    case = CASES[name]
    trained = Alone(built(name, dtype), lambda parameters: torch.optim.AdamW(parameters, lr=case.rate))
    model, evaluations = trained.model, []
    outputs: list[list[torch.Tensor]] = []

    def loss_of_piece(model: torch.nn.Module, *piece: torch.Tensor) -> torch.Tensor:
        loss, out = case.loss(model, *piece)
        outputs.append([tensor.detach() for tensor in flat(out)])
        return loss

    for step in range(steps):
        outputs.clear()
        pieces = divided(cast(case.batch(step, batch), dtype), **parts)
        trained.step(pieces, loss_of_piece)
        if evaluates and step % 2:
            model.eval()
            with torch.no_grad():
                losses = [float(case.loss(model, *piece)[0]) for piece in pieces]
            evaluations.append(sum(losses) / len(losses))
            model.train()
    return {
        "losses": trained.losses,
        "gradients": trained.gradients,
        "evaluations": evaluations,
        "outputs": [torch.cat(tensors) for tensors in zip(*outputs, strict=True)],
        "state": {key: value.clone() for key, value in model.state_dict().items()},
    }


def staged(
    name: str,
    steps: int,
    batch: int,
    manual: bool = False,
    dtype: torch.dtype = torch.float32,
    evaluates: bool = False,
) -> dict[str, Any]:
    """One rank's part of the same training in a pipeline; runs inside a rank process after ``smp.init``.

    Returns:
        What :func:`alone` returns, with this rank's gradients only, and ``replayed`` (steps that followed a planned
        order to their end), ``in_flight`` and ``values`` (kept at the end).
    """
    import smdistributed.modelparallel.torch as smp

    case, net = CASES[name], built(name, dtype)
    if manual:
        for path, stage in scattered(net, case, smp.pp_size()).items():
            smp.set_partition(net.get_submodule(path), stage)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=case.rate))

    @smp.step
    def train(*arguments: torch.Tensor) -> Any:
        loss, outputs = case.loss(model, *arguments)
        model.backward(loss)
        return loss, tuple(flat(outputs))

    @smp.step
    def evaluate(*arguments: torch.Tensor) -> Any:
        return case.loss(model, *arguments)[0]

    done: dict[str, Any] = {"losses": [], "gradients": [], "evaluations": [], "replayed": 0}
    for step in range(steps):
        mine = part(cast(case.batch(step, batch), dtype), smp.dp_rank(), smp.dp_size())
        optimizer.zero_grad()
        loss, outputs = train(*mine)
        done["losses"].append(float(loss.reduce_mean()))
        done["gradients"].append({n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None})
        optimizer.step()
        done["outputs"] = [output.concat() for output in outputs]
        done["replayed"] += replayed(model)
        if evaluates and step % 2:
            model.eval()
            with torch.no_grad():
                done["evaluations"].append(float(evaluate(*mine).reduce_mean()))
            model.train()
    pipeline = model.pipeline
    done["in_flight"], done["values"] = pipeline.server.most_in_flight, pipeline.context.values.count
    done["local"] = sorted(name for name, _ in model.local_named_parameters())
    done["state"] = model.state_dict()
    return done


def replayed(model: Any) -> bool:
    """Whether the last step followed a planned order to its end."""
    return bool(model.pipeline.replayed)


def compare(
    results: Sequence[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-5, gradients: bool = True
) -> None:
    """What all ranks found, against one process."""
    for kind in ("losses", "evaluations"):
        mean = [sum(values) / len(values) for values in zip(*(r[kind] for r in results), strict=True)]
        close(torch.tensor(mean), torch.tensor(expected[kind]), f"the {kind}", tolerance)
    for step, theirs in enumerate(expected["gradients"] if gradients else []):
        found = set()
        for rank, result in enumerate(results):
            for name, gradient in result["gradients"][step].items():
                close(gradient, theirs[name], f"step {step}, rank {rank}: the gradient of {name}", tolerance)
                found.add(name)
        assert found == theirs.keys(), f"step {step}: gradients of {found ^ theirs.keys()}"
    for result in results:
        assert result["values"] == 0
        assert result["state"].keys() == expected["state"].keys()
        for name, value in expected["state"].items():
            if "running" in name or "num_batches" in name:
                close(result["state"][name], value, name, tolerance)
