"""Mixtures of experts: what scripts of version 2 ask for, and what they get."""

from __future__ import annotations

from typing import Any, NoReturn

from smp_runtime.errors import SMPUserError


def refuse_config() -> NoReturn:
    """Refuse a configuration of mixtures of experts.

    Raises:
        SMPUserError: always.
    """
    raise SMPUserError(
        "a MoEConfig asks for the original's mixture of experts, with its balancing and dispatch, which are not here: "
        "call tsm.transform(model) without config; the model keeps its own router, and tensor_parallel_degree splits every expert"
    )


class MoEConfig:
    """The original's configuration of mixtures of experts, which is refused."""

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse_config()
