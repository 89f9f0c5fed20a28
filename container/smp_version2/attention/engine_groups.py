"""Context parallel groups of ``transformer_engine``'s modules, for models that :func:`transform` does not change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


def setup_transformer_engine_cp_groups(model: nn.Module, global_ranks: Sequence[int], group: Any) -> None:
    """Tell ``transformer_engine``'s modules in a model which ranks share sequences out.

    Args:
        global_ranks: of the group, such as ``get_global_ranks(group)``.
        group: such as ``tsm.state.cp_process_group``.

    Raises:
        SMPUserError: the model has no such module.
    """
    modules: list[Any] = [part for part in model.modules() if hasattr(part, "set_context_parallel_group")]
    if not modules:
        raise SMPUserError(
            "setup_transformer_engine_cp_groups: no module of the model is one of transformer_engine that takes a context parallel "
            "group; pass the model to tsm.transform instead, which shares sequences out in any model",
            code="SMP303",
        )
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None
    for module in modules:
        module.set_context_parallel_group(group, list(global_ranks), stream)
