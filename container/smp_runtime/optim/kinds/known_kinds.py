"""Which kinds of optimizers train rightly where a rank has parts of tensors, or some of the parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from smp_config import Group
from smp_records.script_lines import is_runtime_module
from smp_runtime.errors import SMPUserError
from smp_runtime.optim.fused import TakesNorms
from smp_runtime.optim.matrices.exchange import takes_matrices
from smp_runtime.tensors.parameter_attributes import get_gradient, set_gradient

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.trained import TrainedModel

logger = logging.getLogger("smp")

#: Name parts of optimizers that update an element from others of its tensor, which may lie on another rank.
_NEED_WHOLE_TENSORS = ("adafactor", "came", "lamb", "lars", "muon", "novograd", "shampoo", "soap")
#: Those of PyTorch that update the rows of sparse gradients only.
_TAKE_SPARSE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
#: Name parts of optimizers that update an element from all parameters together.
_NEED_ALL_PARAMETERS = ("lbfgs", "prodigy", "dadapt")


def check_kind(optimizer: torch.optim.Optimizer, why: str, ranks: Ranks) -> None:
    """Refuse an optimizer that is known to need whole tensors, and warn of one that is not known.

    Args:
        why: a rank updates parts of tensors.

    Raises:
        SMPUserError: it is known to train otherwise on parts.
    """
    kind = type(optimizer)
    if isinstance(optimizer, TakesNorms) or takes_matrices(optimizer):
        return
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise SMPUserError(
            f"SparseAdam updates the rows of sparse gradients, but with {why} gradients are made dense and shared out; make the "
            "embeddings with sparse=False and use an optimizer such as AdamW, or turn it off",
            code="SMP304",
        )
    if _is_named(kind, (*_NEED_WHOLE_TENSORS, *_NEED_ALL_PARAMETERS)):
        raise SMPUserError(
            f"{kind.__name__} looks at whole tensors, but with {why} a rank updates parts of them; use an element-wise "
            "optimizer such as AdamW, or FusedLAMB, FusedLANS, FusedLARS or FusedNovoGrad of smp.optimizers, or turn it off",
            code="SMP304",
        )
    if ranks.rank == 0 and not _is_known(kind):
        logger.warning(
            "with %s a rank updates parts of tensors: %s of %s trains rightly only if its update of every element depends on "
            "that element alone (no norm, no matrix of a whole tensor); if not, use AdamW or smp.optimizers.FusedLAMB",
            why,
            kind.__name__,
            kind.__module__,
        )


def check_parts(
    optimizer: torch.optim.Optimizer, model: TrainedModel, trained: Iterable[nn.Parameter], ranks: Ranks
) -> None:
    """Refuse an optimizer that needs all parameters where a rank has some, and warn of one that needs whole tensors.

    Args:
        trained: its parameters.

    Raises:
        SMPUserError: every rank would take another step.
    """
    kind, stages, degree = type(optimizer), ranks.size(Group.PP), ranks.size(Group.TP)
    if isinstance(optimizer, TakesNorms) or takes_matrices(optimizer):
        return
    instead = "use an element-wise optimizer such as AdamW"
    if stages > 1 and _is_named(kind, _NEED_ALL_PARAMETERS):
        raise SMPUserError(
            f"{kind.__name__} looks at all parameters together, but with pipeline_parallel_degree {stages} a rank has those of its "
            f"stage; {instead}, or set pipeline_parallel_degree to 1",
            code="SMP304",
        )
    if degree == 1:
        return
    wanted = set(trained)
    split = [r.name for r in model.registry if r.parameter in wanted and r.placement.tensor_axis is not None]
    if not split:
        return
    parts = f"with tensor_parallel_degree {degree} a rank has parts of {len(split)} parameters, such as {split[0]}"
    if _is_named(kind, _NEED_ALL_PARAMETERS):
        raise SMPUserError(
            f"{kind.__name__} looks at all parameters together, but {parts}; {instead}, or leave their modules out of tensor "
            "parallelism",
            code="SMP304",
        )
    if ranks.rank == 0 and _is_named(kind, _NEED_WHOLE_TENSORS):
        logger.warning(
            "%s looks at whole tensors, but %s: it trains otherwise than in one process; %s or one of smp.optimizers such as "
            "FusedLAMB, or leave their modules out of tensor parallelism",
            kind.__name__,
            parts,
            instead,
        )


def require_one_optimizer(model: TrainedModel, *, has_model: bool, has_others: bool) -> None:
    """Refuse an optimizer of two models with separate copies of their weights, and two optimizers of one such model.

    Args:
        model: the model that an optimizer is bound to.
        has_model: the optimizer updates shards of another model already.
        has_others: other optimizers update shards of ``model`` already.

    Raises:
        SMPUserError: one of the two.
    """
    if has_model:
        what = "one optimizer has parameters of two wrapped models that train in half precision or with sharded state"
        raise SMPUserError(f"{what}; give each model an optimizer of its own", code="SMP304")
    has_copies = model.precision.is_half or model.sharded_state is not None
    if has_others and has_copies:
        raise SMPUserError(
            "a second optimizer was wrapped for a model that trains in half precision or with sharded state; use one "
            "optimizer with several parameter groups, or smp.optimizers.Muon, which has AdamW beside it",
            code="SMP304",
        )


def make_dense(optimizer: torch.optim.Optimizer) -> None:
    """Make sparse gradients dense for an optimizer of PyTorch or of this library that would refuse them."""
    if isinstance(optimizer, _TAKE_SPARSE):
        return
    if not _is_known(type(optimizer)):
        return
    parameters: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    for parameter in parameters:
        gradient = get_gradient(parameter)
        if gradient is not None and gradient.is_sparse:
            set_gradient(parameter, gradient.to_dense())


def _is_known(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether the update of an optimizer's class is PyTorch's or this library's."""
    home = getattr(kind.step, "__module__", None) or ""
    is_of_pytorch = home.partition(".")[0] == "torch"
    return is_of_pytorch or is_runtime_module(home)


def _is_named(kind: type, words: Iterable[str]) -> bool:
    """Return whether the name of a class or of one of its bases contains one of these words."""
    names = " ".join(base.__name__.lower() for base in kind.__mro__)
    return any(word in names for word in words)
