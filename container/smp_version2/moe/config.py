"""The configuration of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smp_config.errors import kind_of, suggest
from smp_config.formats.values import is_integer, is_number
from smp_runtime.errors import SMPUserError

#: Ways to spread tokens over experts; see :mod:`smp_version2.moe.balancing`.
BALANCINGS = ("sinkhorn", "balanced", "aux_loss", "none")

_FLAGS = ("smp_moe", "global_token_shuffle", "moe_all_to_all_dispatcher", "use_cpu_initialization")
_COEFFICIENTS = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


@dataclass(frozen=True)
class MoEConfig:
    """Settings of a model's mixtures of experts, for ``tsm.transform(model, config=…)``.

    Attributes:
        smp_moe: whether routers balance as set here; False leaves the model's own routing.
        random_seed: seed of the token shuffle; the expert parallel rank is added.
        moe_load_balancing: one of :data:`BALANCINGS`.
        global_token_shuffle: whether the tokens of expert parallel ranks are mixed before routers see them.
        moe_all_to_all_dispatcher: kept for scripts; tokens always go to the ranks of their experts alone.
        moe_aux_loss_coeff: weight of the balancing loss of ``aux_loss``.
        moe_z_loss_coeff: weight of the loss that keeps a router's results small.
        use_cpu_initialization: kept for scripts.

    Raises:
        SMPUserError: a wrong type or value.
    """

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False

    def __post_init__(self) -> None:
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _wrong(name, value, "True or False")
        for name in _COEFFICIENTS:
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < float("inf"):
                raise _wrong(name, value, "a number of 0 or more, such as 0.001")
        seed = self.random_seed
        if not is_integer(seed) or seed < 0:
            raise _wrong("random_seed", seed, "a whole number of 0 or more, such as 12345")
        if self.moe_load_balancing not in BALANCINGS:
            near = suggest(str(self.moe_load_balancing), BALANCINGS)
            raise _wrong("moe_load_balancing", self.moe_load_balancing, f"one of {', '.join(BALANCINGS)}{near}")


def _wrong(name: str, value: Any, allowed: str) -> SMPUserError:
    return SMPUserError(f"MoEConfig got {name}={value!r}, {kind_of(value)}; pass {allowed}", code="SMP303")
