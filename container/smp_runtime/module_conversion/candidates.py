"""The modules of a model to distribute: the outermost supported ones that can be replaced as a whole.

A whole model or layer is not replaced if its distributed form would lose something: adapters around its linear
maps (LoRA of PEFT), or a ``forward`` that a script has set in place of its class's. Then the supported modules
inside are distributed one by one, and the code around them works as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from smp_runtime.module_conversion import builtin
from smp_runtime.module_conversion.registration import Registration, registration_of
from smp_runtime.module_conversion.scopes import Mark, mark_of
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.nn.split_in_place.linear import is_linear
from smp_runtime.tensor_parallel.block_entry import SharedInput

if TYPE_CHECKING:
    from smp_runtime.module_conversion.splitting import BlockSplit
    from smp_runtime.nn.split_in_place.vocabulary import Tie

#: PEFT's list of the modules of a layer that hold adapters, and the name of the adapted module.
_ADAPTER_NAMES = "adapter_layer_names"
_ADAPTED = "base_layer"


class Candidate(NamedTuple):
    """A module that a script marked, and how it is distributed."""

    name: str
    original: nn.Module
    how: Registration
    mark: Mark

    @property
    def title(self) -> str:
        """Return the name of the module for warnings."""
        return _title(self.name, self.original)


def find_registration(module: nn.Module, mark: Mark, automatic: Mapping[str, Any]) -> Registration | None:
    """Return the registration to distribute a marked module with, or None."""
    can_split_in_place = is_linear(module) or isinstance(module, nn.Embedding)
    if mark.in_place and not can_split_in_place:
        return None
    how = registration_of(module)
    if how is None:
        return None
    if how.only_if is None:
        return how
    settings = {**automatic, **mark.overrides}
    is_wanted = bool(settings.get(how.only_if))
    return how if is_wanted else None


def is_taken(module: nn.Module, automatic: Mapping[str, Any]) -> bool:
    """Return whether a distributed class replaces a marked module as a whole."""
    return (
        not is_linear(module)
        and find_registration(module, mark_of(module), automatic) is not None
        and _lost(module) is None
    )


def find_outermost(
    module: nn.Module,
    automatic: Mapping[str, Any],
    in_place: Mapping[int, BlockSplit],
    ties: Mapping[int, Tie],
    left_alone: Callable[[str, str], None],
) -> list[Candidate]:
    """Return the modules of ``module`` to distribute, in its order.

    Args:
        automatic: arguments of distributed modules that follow from the configuration.
        in_place: by the ``id`` of each block that is split in place, how.
        ties: by the ``id`` of each embedding and head that is split over the vocabulary, its tie to those that share
            its weight.
        left_alone: called for each marked module that is not distributed as marked, with its title and the reason.
    """
    return list(_CandidateSearch(automatic, in_place, ties, left_alone).below(module, ""))


class _CandidateSearch:
    def __init__(
        self,
        automatic: Mapping[str, Any],
        in_place: Mapping[int, BlockSplit],
        ties: Mapping[int, Tie],
        left_alone: Callable[[str, str], None],
    ) -> None:
        self._automatic = automatic
        self._in_place, self._ties = in_place, ties
        self._left_alone = left_alone
        #: Reasons that are reported already. Each is reported for the outermost module only.
        self._said: set[str] = set()

    def below(self, module: nn.Module, name: str) -> Iterator[Candidate]:
        """Yield the candidates in ``module``, itself included."""
        if isinstance(module, DistributedModule):
            return
        if id(module) in self._ties or id(module) in self._in_place:
            yield from self._planned(module, name)
            return
        whole = self._as_a_whole(module, name)
        if whole is not None:
            yield whole
            return
        if _is_adapted(module) and self._must_stay_whole(module, name):
            return
        adapters = _adapter_names(module)
        has_scripts_forward = "forward" in vars(module)
        for child_name, child in module.named_children():
            # A script's own forward may use only the weights of its direct children, without calling them.
            reads_weights = has_scripts_forward and not _has_children(child)
            if child_name not in adapters and not reads_weights:
                path = f"{name}.{child_name}" if name else child_name
                yield from self.below(child, path)

    def _as_a_whole(self, module: nn.Module, name: str) -> Candidate | None:
        """Return the candidate if a distributed class replaces a module, or None."""
        mark = mark_of(module)
        how = find_registration(module, mark, self._automatic) if mark.enabled else None
        if how is None:
            return None
        why = _lost(module)
        if why is not None:
            inside = "; the modules inside it are distributed one by one" if _has_children(module) else ""
            self._leave_alone(module, name, why, f"as a whole it would lose {why}{inside}")
            return None
        # The plan of a model around this one splits modules in it. That model may call it in ways that no distributed class
        # supports.
        is_around = any(id(part) in self._in_place for part in module.modules())
        return None if is_around else Candidate(name, module, how, mark)

    def _must_stay_whole(self, adapted: nn.Module, name: str) -> bool:
        """Return whether the module inside an adapter cannot be distributed, and report it if that was wanted."""
        why = _needs_whole_weight(adapted)
        if why is None:
            return False
        if any(mark_of(part).enabled for part in adapted.modules()):
            self._leave_alone(adapted, name, why, why)
        return True

    def _leave_alone(self, module: nn.Module, name: str, reason: str, text: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._left_alone(_title(name, module), text)

    def _planned(self, module: nn.Module, name: str) -> Iterator[Candidate]:
        """Yield an embedding or head itself, or the linear maps and tables of a block."""
        tie, split = self._ties.get(id(module)), self._in_place.get(id(module))
        if tie is not None:
            yield Candidate(name, module, builtin.of_vocabulary(module, tie), mark_of(module))
        shared = SharedInput()
        for path, how in split.leaves.items() if split is not None else ():
            leaf = module.get_submodule(path)
            yield Candidate(f"{name}.{path}".lstrip("."), leaf, builtin.plan_linear(how, shared), mark_of(leaf))
        for path, tables in split.tables.items() if split is not None else ():
            leaf = module.get_submodule(path)
            yield Candidate(f"{name}.{path}".lstrip("."), leaf, builtin.of_tables(leaf, tables), mark_of(leaf))


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _title(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _lost(module: nn.Module) -> str | None:
    """Return what a distributed form of a module would lose; None if it loses nothing."""
    if "forward" in vars(module):
        return "the forward that was set on it in place of its class's"
    has_adapters = any(_is_adapted(part) for part in module.modules())
    if has_adapters:
        return "the adapters in it"
    return None


def is_patched(module: nn.Module) -> bool:
    """Return whether any part of a module has adapters, or a ``forward`` that is not its class's.

    Such a module is not tried out as a block.
    """
    for part in module.modules():
        if _is_adapted(part):
            return True
        if "forward" in vars(part):
            return True
    return False


def _adapter_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(getattr(module, _ADAPTER_NAMES, ())) if _is_adapted(module) else ()


def _is_adapted(module: nn.Module) -> bool:
    """Return whether a module is one of PEFT's around a module of the original."""
    return hasattr(type(module), _ADAPTER_NAMES) and isinstance(module._modules.get(_ADAPTED), nn.Module)


def _needs_whole_weight(module: nn.Module) -> str | None:
    """Return why the module inside an adapter cannot be distributed; None for LoRA, which only adds to its result."""
    if "lora_A" not in _adapter_names(module):
        return "an adapter around it that is not LoRA may read its whole weight"
    is_variant = getattr(module, "lora_variant", None) or getattr(module, "parameter_name", None)
    if is_variant:
        return "the variant of LoRA around it (DoRA, or one of single parameters) reads its whole weight"
    return None
