"""Faults of a plain script that facts of its ranks show, and likely causes of a difference between its ranks and one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from smp_records.numerics import BUFFER, GRADIENT, INPUT, LOSS, OUTPUT_GRADIENT, UPDATE, WEIGHT

if TYPE_CHECKING:
    from smp_estimator.numerics.comparison import Compared, Comparison
    from smp_records.plain_job import LoaderFacts, PlainFacts

#: Factors that differ by less are the same number.
_SAME = 1e-3
#: Names that a sentence lists.
_MOST = 4


def explain(found: Comparison, ranks: Sequence[PlainFacts], alone: PlainFacts) -> None:
    """Add findings, causes and notes to a comparison of one process with the ranks of a plain script."""
    _forgive_scaled_losses(found)
    found.findings += [
        *_of_ties(ranks[0]),
        *_of_accumulation(alone),
        *_of_constant_parameters(ranks[0]),
        *_of_orders(ranks),
    ]
    found.causes += _causes(found, ranks, alone)
    found.notes += _notes(ranks, alone)


def _forgive_scaled_losses(found: Comparison) -> None:
    """Drop differences that do not reach an update.

    A script may divide the loss of a rank as it likes, if the gradients that its ranks add up are right. A tensor that is no batch
    is as large on each rank as in one process.
    """
    moments = set()
    for each in found.compared:
        if each.differs and each.key.phase in (GRADIENT, UPDATE):
            moments.add((each.step, each.call))
    kept = []
    for each in found.compared:
        if _is_no_batch(found, each):
            continue
        is_of_loss = each.key.phase in (LOSS, OUTPUT_GRADIENT)
        reaches_update = (each.step, each.call) in moments
        if each.differs and is_of_loss and not reaches_update:
            kept.append(replace(each, allowed=math.inf))
        else:
            kept.append(each)
    found.compared = kept


def _is_no_batch(found: Comparison, each: Compared) -> bool:
    if each.key.phase != INPUT or not math.isinf(each.error):
        return False
    at = each.step, each.call
    ours, theirs = found.one.moments[at][each.key], found.other.moments[at][each.key]
    return ours.elements * len(theirs.pieces) == theirs.elements * len(ours.pieces)


# -- findings ----------------------------------------------------------------------------------------------------------


def _of_ties(facts: PlainFacts) -> Iterator[str]:
    for group in facts.broken_ties:
        yield (
            f"tied weight broken: {' and '.join(group)} were one parameter, and each is a parameter of its own now; tie them again "
            "after to_empty() or load_state_dict(assign=True), and let one fully_shard() call have all modules that share it"
        )


def _of_accumulation(alone: PlainFacts) -> Iterator[str]:
    """Yield a sentence if the mean losses of an update have the weight of several, or of a part of one."""
    for step, weights in enumerate(alone.loss_weights):
        count = len(weights)
        known = [weight for weight in weights if weight is not None]
        if count < 2 or len(known) < count or alone.has_loss_scale:
            continue
        total = sum(known)
        is_wrong = any(abs(total / wrong - 1) < _SAME for wrong in (count, 1 / count))
        if is_wrong:
            how = f"{count} times" if total > 1 else f"1/{count} of"
            yield (
                f"accumulation scale: the {count} backward passes of update {step} add up to {how} the gradient of their mean "
                f"loss; divide each loss by {count}, once"
            )
            return


def _of_constant_parameters(facts: PlainFacts) -> Iterator[str]:
    if not facts.parameters or any(known.has_changed for known in facts.parameters.values()):
        return
    if any(known.has_optimizer for known in facts.parameters.values()):
        yield (
            "no parameter of the model has changed in any update: the gradients never reach the optimizer "
            "(set_requires_gradient_sync(False) in all passes), or the learning rate is 0"
        )
    else:
        yield (
            "no parameter of the model has changed in any update: the optimizer has other tensors; create it after DDP, "
            "fully_shard(), to_empty() and other changes of the model"
        )


def _of_orders(ranks: Sequence[PlainFacts]) -> Iterator[str]:
    for number, loader in enumerate(ranks[0].loaders):
        if not loader.shuffles:
            continue
        others = [facts.loaders[number] for facts in ranks if number < len(facts.loaders)]
        if not all(_same_order(each) for each in others):
            continue
        cure = "do not seed its generator anew in each epoch"
        if loader.is_distributed:
            cure = "call sampler.set_epoch(epoch) before each epoch"
        yield (
            f"same order in each epoch: {loader.sampler} of loader {number + 1} has yielded epoch 2 in the order of epoch 1 on "
            f"every rank; {cure}"
        )


def _same_order(loader: LoaderFacts) -> bool:
    if len(loader.epochs) < 2:
        return False
    first, second = loader.epochs[:2]
    count = min(len(first), len(second))
    known = first[:count]
    if not known or not all(known) or known != second[:count]:
        return False
    # Equal samples have no order.
    return count == 1 or len(set(known)) > 1


# -- causes ------------------------------------------------------------------------------------------------------------


def _causes(found: Comparison, ranks: Sequence[PlainFacts], alone: PlainFacts) -> Iterator[str]:
    drifted, first = found.first_drift, found.first
    if drifted is not None:
        drift = drifted[1]
        yield from _of_copies(drift.key.phase, drift.key.name, drift.step, ranks)
    elif first is not None:
        yield from _of_difference(found, first, ranks, alone)


def _of_copies(phase: str, name: str, step: int, ranks: Sequence[PlainFacts]) -> Iterator[str]:
    if phase == WEIGHT and not step:
        yield (
            "the ranks began with different weights: each has drawn its own; broadcast the parameters of rank 0, wrap the model in "
            "DDP, or seed all ranks alike"
        )
    elif phase == BUFFER:
        yield "each rank has its own buffers: set broadcast_buffers=True of DDP, or broadcast or average them before they are used"
    elif phase == GRADIENT:
        yield from _of_scalings(step, ranks)
        yield (
            "each rank updates with its own gradients: no_sync() in the last backward pass, a call of model.module instead of the "
            "DDP model, or a missing all-reduce"
        )
    elif phase == UPDATE:
        yield from _of_one_rank(name, ranks)
        yield from _of_unequal_rates(step, ranks)


def _of_one_rank(name: str, ranks: Sequence[PlainFacts]) -> Iterator[str]:
    facts_of = {facts.rank: facts.parameters[name] for facts in ranks}
    ranks_by_words = {
        "is frozen": [rank for rank, facts in facts_of.items() if not facts.is_trainable],
        "is in no optimizer": [rank for rank, facts in facts_of.items() if not facts.has_optimizer],
        "never changes": [rank for rank, facts in facts_of.items() if not facts.has_changed],
    }
    for words, some in ranks_by_words.items():
        is_on_some = 0 < len(some) < len(ranks)
        if is_on_some:
            numbers = ", ".join(map(str, some))
            yield f"{name} {words} on rank(s) {numbers} only"


def _of_unequal_rates(step: int, ranks: Sequence[PlainFacts]) -> Iterator[str]:
    rates = [facts.learning_rates[step] for facts in ranks if step < len(facts.learning_rates)]
    if any(rate != rates[0] for rate in rates):
        yield f"the ranks have different learning rates: {_listed(rates)}; let all ranks call the scheduler alike"


def _of_scalings(step: int, ranks: Sequence[PlainFacts]) -> Iterator[str]:
    factors = [facts.scalings[step] for facts in ranks if step < len(facts.scalings)]
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(factors):
        return
    least, most = min(known), max(known)
    if most > least * (1 + _SAME) > 0:
        shown = ", ".join(f"{factor:.4g}" for factor in known)
        yield (
            "between the last backward pass and the update each rank has scaled its gradients by another factor "
            f"({shown}): gradients are clipped by the norm of the rank's own part; use "
            "torch.nn.utils.clip_grad_norm_, or all-reduce the squared norms first"
        )


def _of_clip_norms(step: int, ranks: Sequence[PlainFacts]) -> Iterator[str]:
    norms = [facts.clip_norms[step] for facts in ranks if step < len(facts.clip_norms)]
    if any(not _are_near(found, norms[0]) for found in norms):
        yield (
            f"the ranks have clipped their gradients by different norms ({_listed(norms)}): clip after gradients were all-reduced, "
            "by one norm"
        )


def _are_near(one: Sequence[float], other: Sequence[float]) -> bool:
    if len(one) != len(other):
        return False
    return all(math.isclose(a, b, rel_tol=_SAME) for a, b in zip(one, other, strict=True))


def _of_difference(found: Comparison, first: Compared, ranks: Sequence[PlainFacts], alone: PlainFacts) -> Iterator[str]:
    phase, step = first.key.phase, first.step
    if phase == LOSS:
        yield from _of_loss_factor(found, first)
    if phase in (LOSS, OUTPUT_GRADIENT, GRADIENT):
        yield from _of_scalings(step, ranks)
        yield from _of_clip_norms(step, ranks)
    if phase == UPDATE:
        ours, theirs = (facts.learning_rates[step : step + 1] for facts in (alone, ranks[0]))
        yield from _of_unequal_rates(step, ranks)
        if ours != theirs:
            yield (
                f"the learning rate is {_listed(theirs)} on the ranks and {_listed(ours)} in one process: it is scaled by the "
                "number of ranks, or each rank steps the scheduler several times"
            )


def _of_loss_factor(found: Comparison, first: Compared) -> Iterator[str]:
    at = first.step, first.call
    ours, theirs = (run.moments[at][first.key] for run in (found.one, found.other))
    one, other = (total.projections[0] / max(total.elements, 1) for total in (ours, theirs))
    factor = other / one if one else math.nan
    world = found.other.heads[0].world
    for wrong, text in ((world, f"{world} times"), (1 / world, f"1/{world} of")):
        if abs(factor / wrong - 1) < _SAME:
            yield (
                f"the loss of a rank is {text} that of one process, the number of ranks: DDP and FSDP2 average gradients over "
                "ranks already"
            )


def _listed(rates: Sequence[Sequence[float]]) -> str:
    rows = []
    for rates_of_one in rates:
        rows.append(", ".join(f"{rate:.4g}" for rate in rates_of_one))
    return "; ".join(rows)


# -- notes -------------------------------------------------------------------------------------------------------------


def _notes(ranks: Sequence[PlainFacts], alone: PlainFacts) -> Iterator[str]:
    facts = ranks[0]
    if alone.drew_other_weights:
        yield "one process began with the weights of the ranks, since it draws other ones itself"
    if facts.has_statistics:
        yield "batch norms used their first statistics in both runs, since each rank has its own batch"
    if alone.has_loss_scale:
        yield "a GradScaler multiplies the loss, so the weights of accumulated backward passes were not checked"
    left = [
        name
        for name, known in facts.parameters.items()
        if known.is_trainable and known.has_gradient and not known.has_optimizer
    ]
    if left and len(left) < len(facts.parameters):
        more = f" and {len(left) - _MOST} more" if len(left) > _MOST else ""
        yield f"{', '.join(left[:_MOST])}{more}: has gradients, but is in no optimizer, so it never changes"
    yield from _notes_on_loaders(facts)
    if facts.end:
        yield f"after the recorded updates the script ended early: {facts.end}"


def _notes_on_loaders(facts: PlainFacts) -> Iterator[str]:
    for number, loader in enumerate(facts.loaders, 1):
        if loader.sampler == "RandomSampler" and not loader.is_distributed:
            yield f"loader {number} shuffles without a DistributedSampler: ranks may read the same samples"
    shuffling = [loader for loader in facts.loaders if loader.shuffles]
    has_one_epoch = all(len(loader.epochs) < 2 for loader in shuffling)
    if shuffling and has_one_epoch:
        yield "the script began no second epoch, so the orders of two epochs were not compared"
