"""A function that calls the model as often as it likes, outside a step: it runs as in one process, on parts of the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.comm.devices import in_order_with_script, keep_for_script
from smp_runtime.microbatch_state.compiled_blocks import run_eagerly
from smp_runtime.microbatch_state.remote_stubs import appearing_on
from smp_runtime.step.first_stage_inputs import Arguments, arguments_of_all
from smp_runtime.step.microbatches import shapes_in
from smp_runtime.step.step import StepCall
from smp_runtime.tensor_parallel.activation_layout import replicated_rows
from smp_runtime.tensor_parallel.group import TensorGroup
from smp_runtime.tensors.nested import clone_inference_tensors
from smp_runtime.tensors.random_state import RandomState

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.model.distributed_model import DistributedModel


@dataclass(frozen=True)
class _Turn:
    """One run of the function.

    Attributes:
        arguments: of it.
        random: with which random numbers it begins.
        is_mine: whether its result is this rank's.
    """

    arguments: Arguments
    random: RandomState
    is_mine: bool


@dataclass(frozen=True)
class _Outcome:
    """What a run has returned, and the random numbers before and after it."""

    result: Any
    before: RandomState
    after: RandomState


def call_whole(
    model: DistributedModel, ranks: Ranks, name: str, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call ``function(*args, **kwargs)`` without gradients, as one process would; every rank calls it, outside steps.

    * *Pipeline*: it runs once, on the root stage, with the arguments of the pipeline's first rank, whole, not in
      microbatches.
    * *Tensor parallelism*: all ranks of a group run it together. If each rank has a batch, they run one rank's
      batch after the other, since sequences may have different lengths.
    * *Sharded parameters*: ranks may call the model a different number of times; one that is done serves the
      others.

    Random numbers are drawn from the script's generator, as in one process.

    Args:
        name: of the function, for messages.

    Returns:
        The function's result; on every rank of a pipeline.
    """
    mine = RandomState.of_now(ranks.device)
    with torch.inference_mode(False), torch.no_grad(), ranks.control.doing(name):
        arguments = (
            model.precision.enter(clone_inference_tensors(args)),
            model.precision.enter(clone_inference_tensors(kwargs)),
        )
        if ranks.size(Group.PP) > 1:
            arguments = arguments_of_all(ranks, ranks.members(Group.PP), arguments, name)[0]
        model.partition(functools.partial(function, *arguments[0], **arguments[1]))
        turns = _turns(ranks, arguments, mine, name)
        model.begin_step()
        try:
            with _on_all_ranks(model, ranks), run_eagerly():
                outcomes = [_run(model, ranks, name, function, turn) for turn in turns]
        except BaseException:  # also Ctrl-C: the next step must not find this one open
            model.abandon_step()
            raise
        model.finish_step()
        ranks.step.count += 1
    outcome = next(outcome for turn, outcome in zip(turns, outcomes, strict=True) if turn.is_mine)
    if outcome.before.is_as(mine):
        outcome.after.on(ranks.device).restore()
    else:  # ran with another rank's random numbers: restore this rank's, and advance them
        mine.restore()
        torch.empty((), dtype=torch.int64, device="cpu").random_()
    return outcome.result


def _turns(ranks: Ranks, arguments: Arguments, random: RandomState, name: str) -> list[_Turn]:
    if ranks.size(Group.TP) == 1:
        return [_Turn(arguments, random, is_mine=True)]
    members = ranks.members(Group.TP)
    randoms = ranks.control.allgather(random, members)
    if ranks.cfg.prescaled_batch:
        return [_Turn(arguments, randoms[0].on(ranks.device), is_mine=True)]
    every = arguments_of_all(ranks, members, arguments, name)
    return [
        _Turn(theirs, state.on(ranks.device), rank == ranks.rank)
        for rank, theirs, state in zip(members, every, randoms, strict=True)
    ]


@contextlib.contextmanager
def _on_all_ranks(model: DistributedModel, ranks: Ranks) -> Iterator[None]:
    with contextlib.ExitStack() as around:
        if ranks.size(Group.TP) > 1:
            around.enter_context(replicated_rows(model.module, TensorGroup.of(ranks)))
        around.enter_context(appearing_on(ranks.device))
        if model.shards is not None:
            around.enter_context(model.shards.on_request())
        yield


def _run(model: DistributedModel, ranks: Ranks, name: str, function: Callable[..., Any], turn: _Turn) -> _Outcome:
    args, kwargs = turn.arguments

    def whole() -> _Outcome:
        turn.random.restore()
        result = function(*args, **kwargs)
        return _Outcome(result, turn.random, RandomState.of_now(ranks.device))

    pipeline = model.pipeline
    if pipeline is None:
        ranks.step.microbatch = 0
        try:
            return whole()
        finally:
            ranks.step.microbatch = None
    call = StepCall(name, (False, model.training), shapes_in(args, kwargs), None)
    with in_order_with_script(ranks.device):
        (outcome,) = pipeline.run_step(None, [whole], call)
    keep_for_script([outcome.result], ranks.device)
    return outcome
