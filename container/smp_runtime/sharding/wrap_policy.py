"""Grouping of parameters for gathering: one unit per block of the model, cut finer if a block is too large."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters

#: Modules that only hold others and are never called themselves.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class ShardingOptions:
    """The options of sharded data parallelism; all sizes count elements.

    Attributes:
        bucket_elements: most gradient elements that one collective carries.
        persistence_threshold: parameters with fewer elements stay whole on every rank; 0 shards all.
        max_live: most elements of gathered parameters at any time, but for those that are needed together.
        hierarchical: gather in phases between and inside hosts, if a sharding group spans several.
        clipping: L2 norm to which the whole gradient is scaled down before each update.
    """

    bucket_elements: int
    persistence_threshold: int
    max_live: int
    hierarchical: bool
    clipping: float

    @classmethod
    def of(cls, parameters: ModelParallelParameters) -> ShardingOptions:
        """Return the options of a configuration."""
        return cls(
            bucket_elements=parameters.sdp_reduce_bucket_size,
            persistence_threshold=parameters.sdp_param_persistence_threshold,
            max_live=parameters.sdp_max_live_parameters,
            hierarchical=parameters.sdp_hierarchical_allgather,
            clipping=parameters.sdp_gradient_clipping,
        )


@dataclass
class WrapPlan:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        name: of the module they belong to, for messages.
        module: the module with a call that uses them all; None if they only belong to single modules below it.
        parameters: of one type, all trained or all frozen.
        by_tokens: whether the call uses them only if one of its tokens needs them.
    """

    name: str
    module: nn.Module | None
    parameters: list[nn.Parameter]
    by_tokens: bool = False

    @property
    def elements(self) -> int:
        """Return the number of elements of all parameters together."""
        return sum(parameter.numel() for parameter in self.parameters)


def is_sharded(parameter: torch.Tensor, options: ShardingOptions) -> bool:
    """Return whether a parameter is divided over ranks; small and complex ones stay whole."""
    return parameter.is_floating_point() and parameter.numel() >= max(1, options.persistence_threshold)


def plan_units(
    module: nn.Module, parameters: Iterable[nn.Parameter], options: ShardingOptions, apart: Container[int] = ()
) -> list[WrapPlan]:
    """Divide ``parameters`` into units, in the order of the modules.

    Repeated blocks (the children of a ``ModuleList`` or of an ``nn.Sequential`` of blocks) are units; so is any other
    module that holds no such list. A unit has at most half of ``max_live`` elements, so that the next one can be
    fetched while it is used; a module above that is divided into its children. What one module holds itself is never
    divided, even if it is more than ``max_live``. The experts of a mixture are fetched together, where its module is called: which
    of them are used depends on the tokens, and each rank has others.

    Args:
        apart: by ``id``, parameters that are gathered in another way than others, and so in units of their own.
    """
    planner = _Planner({id(parameter): parameter for parameter in parameters}, options, apart)
    planner.visit(module, "", is_root=True)
    return planner.units


class _Planner:
    def __init__(self, left: dict[int, nn.Parameter], options: ShardingOptions, apart: Container[int]) -> None:
        self._left = left
        self._apart = apart
        self._target = max(1, options.max_live // 2)
        self.units: list[WrapPlan] = []

    def visit(self, module: nn.Module, name: str, *, is_root: bool = False) -> None:
        whole = self._of(module.parameters())
        if not whole:
            return
        own = self._of(module.parameters(recurse=False))
        is_indivisible = len(own) == len(whole)
        may_be_one = is_indivisible or _elements(whole) <= self._target
        if may_be_one and not _must_be_divided(module, is_root=is_root):
            together = not is_indivisible or not _has_children(module)
            self._take(module, name, whole, together=together)
            return
        if own:
            self._take(module, name, own, together=False)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}".lstrip(".")
            if _is_experts(child_name, child) and not is_root:
                self._take_experts(module, child, path)
            self.visit(child, path)

    def _take_experts(self, mixture: nn.Module, experts: nn.Module, path: str) -> None:
        """Make a unit of each expert, which belongs to the mixture around."""
        for name, expert in experts.named_children():
            own = self._of(expert.parameters())
            self._take(mixture, f"{path}.{name}", own, together=True, by_tokens=True)

    def _of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [parameter for parameter in parameters if id(parameter) in self._left]

    def _take(
        self, module: nn.Module, name: str, parameters: list[nn.Parameter], *, together: bool, by_tokens: bool = False
    ) -> None:
        kinds: dict[tuple[torch.dtype, torch.device, bool, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            is_apart = id(parameter) in self._apart
            kind = parameter.dtype, parameter.device, parameter.requires_grad, is_apart
            kinds.setdefault(kind, []).append(parameter)
            del self._left[id(parameter)]
        # A parent module's own parameters are gathered when they are read, not while all its children run.
        self.units += [WrapPlan(name, module if together else None, kind, by_tokens) for kind in kinds.values()]


def _elements(parameters: Sequence[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _must_be_divided(module: nn.Module, *, is_root: bool) -> bool:
    if is_root and _has_children(module):
        return True
    if isinstance(module, _CONTAINERS) or _is_stack(module):
        return True
    return _holds_stack(module)


def _is_stack(module: nn.Module) -> bool:
    """Return whether a module runs through several blocks, each of some modules."""
    if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    blocks = 0
    for child in module.children():
        # A layer of nn.Sequential without modules inside is no block.
        is_block = _has_children(child) or not isinstance(module, nn.Sequential)
        if is_block and _has_parameters(child):
            blocks += 1
    return blocks > 1


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_experts(name: str, module: nn.Module) -> bool:
    """Return whether a list holds the experts of a mixture, by its name and shapes; other ranks' experts are empty here."""
    if "experts" not in name or not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    shapes = set()
    for expert in module.children():
        filled = [parameter.shape for parameter in expert.parameters() if parameter.numel()]
        shapes.add(tuple(filled))
    shapes.discard(())
    return len(shapes) == 1


def _holds_stack(module: nn.Module) -> bool:
    return any(_is_stack(part) for part in module.modules() if part is not module)
