"""Finds the mixtures of experts of a model, and shares their experts out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session
from smp_runtime.module_conversion.in_place.experts import is_list_of_experts
from smp_version2.moe.config import MoEConfig
from smp_version2.moe.exchange import ExpertGroup
from smp_version2.moe.experts import ListedExperts, class_in_front, to_tables
from smp_version2.moe.proof import MixtureTrial
from smp_version2.moe.routers import BalancedRouter, ReplayedMixture, RoutedMixture, ShuffledMixture
from smp_version2.moe.saved_experts import ExpertRecord
from smp_version2.state import state

#: Settings that are taken for scripts that have them, and change nothing.
_WITHOUT_EFFECT = {
    "moe_all_to_all_dispatcher": "tokens go to the ranks of their experts alone in any case",
    "use_cpu_initialization": "parameters are created where the script or DelayedParamIniter creates them",
}

#: Arguments of a module with parameters of many experts: tokens, choices, weights.
_ARGUMENTS = 3


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in a model.

    Attributes:
        path: of the mixture in the model.
        module: the mixture itself.
        router: name of its router.
        experts: name of its experts.
        count: how many experts it has.
        is_list: whether they are a list of modules.
    """

    path: str
    module: nn.Module
    router: str
    experts: str
    count: int
    is_list: bool

    def __str__(self) -> str:
        return f"{self.path} ({type(self.module).__name__})"


def find_mixtures(model: nn.Module) -> list[Mixture]:
    """Return the mixtures of a model: modules with experts and a router, which has a row for each of them."""
    found = []
    for path, module in model.named_modules():
        for name, count, is_list in _experts_of(module):
            router = _router_of(module, name, count)
            if router:
                found.append(Mixture(path, module, router, name, count, is_list))
    return found


def _experts_of(module: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """Yield the names of a module's experts, how many there are, and whether they are a list."""
    for name, child in module.named_children():
        if is_list_of_experts(child):
            yield name, len(list(child.children())), True
            continue
        counts = set()
        for parameter in child.parameters(recurse=False):
            if parameter.dim() == 3:
                counts.add(parameter.shape[0])
        arguments = inspect.signature(child.forward).parameters
        if len(counts) == 1 and len(arguments) == _ARGUMENTS:
            yield name, counts.pop(), False


def _router_of(module: nn.Module, experts: str, count: int) -> str:
    """Return the name of a mixture's router, or an empty text if no child can be one."""
    for name, child in module.named_children():
        if name != experts and _has_row_per_expert(child, count):
            return name
    return ""


def _has_row_per_expert(module: nn.Module, count: int) -> bool:
    for parameter in module.parameters(recurse=False):
        if parameter.dim() == 2 and parameter.shape[0] == count:
            return True
    return False


def convert(model: nn.Module, mixtures: list[Mixture], config: MoEConfig | None) -> list[nn.Module]:
    """Share the experts of a model out over the expert parallel ranks, let routers balance, and return the mixtures.

    Every mixture is tried on a few tokens first: it must compute as before, with the exchange but all experts on one rank.

    Args:
        mixtures: as :func:`find_mixtures` has found them, before tensor parallelism splits blocks.
        config: how routers balance; None leaves the model's routing.

    Raises:
        SMPUserError: the model has no mixture, or one that cannot be shared out.
    """
    group = ExpertGroup.of_job()
    balances = config is not None and config.smp_moe
    for name, sentence in _WITHOUT_EFFECT.items():
        if config is not None and getattr(config, name) != getattr(MoEConfig, name):
            session.say_once(f"MoEConfig got {name}={getattr(config, name)}, which has no effect: {sentence}")
    found = [replace(mixture, module=model.get_submodule(mixture.path)) for mixture in mixtures]
    if group.size == 1 and not balances:
        return [mixture.module for mixture in found]
    if not found:
        asks = f"expert_parallel_degree is {group.size}" if group.size > 1 else "tsm.transform got a MoEConfig"
        raise SMPUserError(
            f"{asks}, and {kind_of(model)} has no mixture of experts, that is a module with a router and a list of experts, or a "
            "module with parameters [experts, …] that takes tokens, choices and weights: leave it out for this model",
            code="SMP303",
        )
    for mixture in found:
        _require_own_forward(mixture)
        _require_whole_tables(mixture)
        if mixture.count % group.size:
            fitting = ", ".join(str(n) for n in range(1, mixture.count + 1) if not mixture.count % n)
            raise SMPUserError(
                f"expert_parallel_degree is {group.size}, and {mixture} has {mixture.count} experts, which cannot be divided by "
                f"it: use one of {fitting}",
                code="SMP303",
            )
        _convert_one(mixture, config if balances else None, group)
    return [mixture.module for mixture in found]


def _require_own_forward(mixture: Mixture) -> None:
    """Raise an error if something has replaced the ``forward`` of one of the modules, which would come before the new one."""
    parts = {"": mixture.module} | {
        name: mixture.module.get_submodule(name) for name in (mixture.router, mixture.experts)
    }
    replaced = [f"{mixture.path}.{name}".strip(".") for name, part in parts.items() if "forward" in vars(part)]
    if replaced:
        raise SMPUserError(
            f"{', '.join(replaced)} has a forward of its own beside that of its class, as hooks of accelerate have: remove it "
            "before tsm.transform",
            code="SMP303",
        )


def _require_whole_tables(mixture: Mixture) -> None:
    """Raise an error if a module of many experts has something of another kind, such as a shared bias."""
    module = mixture.module.get_submodule(mixture.experts)
    if mixture.is_list:
        return
    tensors = [*module.named_parameters(), *module.named_buffers()]
    other = [name for name, tensor in tensors if tensor.dim() == 0 or tensor.shape[0] != mixture.count]
    if other:
        raise SMPUserError(
            f"{mixture}: {', '.join(other)} in its experts does not belong to one expert each, so they cannot be shared out: set "
            "expert_parallel_degree to 1",
            code="SMP303",
        )


def _convert_one(mixture: Mixture, config: MoEConfig | None, group: ExpertGroup) -> None:
    trial = MixtureTrial.of(mixture.module, mixture.router, mixture.experts)
    module: Any = mixture.module
    routes_lists = config is not None and mixture.is_list
    if routes_lists:
        _require_plain(mixture)
    if mixture.is_list:
        experts: Any = ListedExperts(module.get_submodule(mixture.experts))
        setattr(module, mixture.experts, experts)
        module.part_names = (mixture.router, mixture.experts)
        front: type[nn.Module] = RoutedMixture if routes_lists else ReplayedMixture
        if routes_lists:
            module.moe_config, module.choices = config, trial.choices
            module.returns_logits = trial.returns_logits(mixture.count)
        module.__class__ = class_in_front(front, type(module))
    else:
        experts = to_tables(module.get_submodule(mixture.experts), mixture.count)
    if not routes_lists:
        experts.is_tried = True
        trial.compare(module, str(mixture))
        experts.is_tried = False
    if config is not None and not mixture.is_list:
        _balance(mixture, config, trial)
    if config is not None and config.global_token_shuffle:
        module.moe_config, module.shuffle_group = config, group
        module.__class__ = class_in_front(ShuffledMixture, type(module))
    experts.share_out(group)
    _note(mixture, experts)


def _note(mixture: Mixture, experts: Any) -> None:
    """Let checkpoints know which experts this rank has."""
    record = ExpertRecord.of(state.joined)
    path = f"{mixture.path}.{mixture.experts}".lstrip(".")
    if mixture.is_list:
        record.others |= {f"{path}.{name}" for number, name in enumerate(experts.names) if number not in experts.here}
        return
    tensors = [*experts.named_parameters(recurse=False), *experts.named_buffers(recurse=False)]
    record.tables |= {f"{path}.{name}": mixture.count for name, _ in tensors}


def _require_plain(mixture: Mixture) -> None:
    """Raise an error if a mixture has parameters besides those of a linear router and listed experts."""
    parts = {mixture.router, mixture.experts}
    names = [name.partition(".")[0] for name, _ in mixture.module.named_parameters()]
    others = [name for name in dict.fromkeys(names) if name not in parts]
    router = mixture.module.get_submodule(mixture.router)
    if others or not isinstance(router, nn.Linear):
        what = f"has {', '.join(others)} besides" if others else f"has a {type(router).__name__} as"
        raise SMPUserError(
            f"{mixture} {what} its router {mixture.router} and its experts, and MoEConfig balances mixtures of a linear router and "
            "experts alone: pass MoEConfig(smp_moe=False), which keeps the model's routing",
            code="SMP303",
        )


def _balance(mixture: Mixture, config: MoEConfig, trial: MixtureTrial) -> None:
    """Let a router of its own class balance.

    Raises:
        SMPUserError: it does not return results, weights and choices.
    """
    if not trial.router_chooses(mixture.count):
        raise SMPUserError(
            f"the router {mixture.router} of {mixture} does not return its results, weights and choices, so MoEConfig cannot "
            "balance it: pass MoEConfig(smp_moe=False), which keeps the model's routing",
            code="SMP303",
        )
    router: Any = mixture.module.get_submodule(mixture.router)
    router.moe_config = config
    router.__class__ = class_in_front(BalancedRouter, type(router))
