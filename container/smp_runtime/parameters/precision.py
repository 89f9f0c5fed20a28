"""Half precision training: which types the model computes, reduces and keeps its weights in."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.parameters.running_buffers import is_running, keeps_statistics
from smp_runtime.tensors.nested import map_leaves
from smp_runtime.tensors.parameter_attributes import get_data

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters

#: How Transformers' models call the frequencies of rotary embeddings, with or without the kind of layer before it.
_ROTARY = "inv_freq"


def is_rotary(name: str) -> bool:
    """Return whether a buffer holds rotary frequencies, which stay in float32 (``inv_freq``, ``original_inv_freq``, …).

    The error of the angle from a rounded frequency grows with the position. Modules compute the angles from these in
    float32, and cast the results. Other buffers, such as masks, meet activations directly and must have their type.
    """
    return name.endswith(_ROTARY)


def stays_wide(owner: nn.Module, name: str) -> bool:
    """Return whether a buffer stays in float32: rotary frequencies and running buffers."""
    return is_rotary(name) or is_running(owner, name)


@dataclass(frozen=True)
class Precision:
    """The types of a training run.

    Attributes:
        compute: of parameters, activations, and buffers that forward only reads; None leaves the model as it is.
        reduce: in which gradients are summed over ranks; None means in their own type. bfloat16 has eight bits of
            mantissa, too few to add many gradients, so they are summed in float32.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    @classmethod
    def of(cls, parameters: ModelParallelParameters) -> Precision:
        """Return the precision that ``fp16`` and ``bf16`` select."""
        if parameters.fp16:
            sums = torch.float32 if parameters.fp32_grad_accumulation else None
            return cls(torch.float16, sums)
        if parameters.bf16:
            return cls(torch.bfloat16, torch.float32)
        return cls()

    @property
    def is_half(self) -> bool:
        """Return whether weights exist twice: in half precision for computing and in float32 for updating."""
        return self.compute is not None

    @torch.no_grad()
    def convert(
        self,
        modules: Iterable[nn.Module],
        skip: Collection[torch.Tensor] = frozenset(),
        *,
        others: Iterable[nn.Module] = (),
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Cast the floating point parameters and buffers that the modules hold directly, in place; not those of ``skip``.

        Rotary frequencies and running buffers are left alone, and norms that keep statistics as a whole.

        Args:
            others: modules of the same model that hand their results to these, such as those of other pipeline stages.

        Returns:
            The float32 weights that were cast, from which training continues; by parameter, tied ones once.
        """
        masters: dict[nn.Parameter, torch.Tensor] = {}
        if self.compute is None:
            return masters
        owners = [module for module in modules if not keeps_statistics(module)]
        distinct: dict[nn.Parameter, None] = {}  # tied ones once
        for owner in owners:
            distinct.update(dict.fromkeys(owner.parameters(recurse=False)))
        for parameter in distinct:
            if not parameter.is_floating_point() or parameter in skip:
                continue
            if parameter.requires_grad:
                masters[parameter] = get_data(parameter).float()  # with a version counter of its own
            parameter.data = parameter.data.to(self.compute)
        self.convert_buffers(owners)
        near = [*owners, *(module for module in others if not keeps_statistics(module))]
        if any(map(_has_wide_buffers, near)):
            for owner in owners:
                _narrow_inputs(owner, self.compute)
        return masters

    def convert_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Cast the floating point buffers that the modules hold directly, but for those that stay wide."""
        if self.compute is None:
            return
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # one with several names stays one
        for owner in modules:
            for name, buffer in owner.named_buffers(recurse=False):
                is_cast = buffer.is_floating_point() and not stays_wide(owner, name)
                if not is_cast:
                    continue
                _, cast = made.setdefault(id(buffer), (buffer, buffer.to(self.compute)))
                setattr(owner, name, cast)

    def type_of(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the type that a parameter has where it is, once it was converted; not for :meth:`wide_parameters`."""
        if self.compute is None or not parameter.is_floating_point():
            return parameter.dtype
        return self.compute

    def wide_parameters(self, modules: Iterable[nn.Module]) -> set[int]:
        """Return the parameters, by ``id``, that stay in float32 in half precision training."""
        wide: set[int] = set()
        if not self.is_half:
            return wide
        for module in modules:
            if keeps_statistics(module):
                wide.update(map(id, module.parameters(recurse=False)))
        return wide

    @contextlib.contextmanager
    def keeping_wide(self, module: nn.Module) -> Iterator[None]:
        """Protect rotary frequencies and running buffers in ``module`` from casts inside the block.

        This applies to half precision training.
        """
        kept = []
        if self.is_half:
            for owner in module.modules():
                for name, buffer in owner.named_buffers(recurse=False):
                    if stays_wide(owner, name):
                        kept.append((owner, name, buffer))
        yield
        for owner, name, buffer in kept:
            setattr(owner, name, buffer.to(getattr(owner, name).device))

    def enter(self, value: Any) -> Any:
        """Cast float32 tensors in the model's inputs to the compute type, at any depth."""
        return value if self.compute is None else _cast(value, torch.float32, self.compute)

    def leave(self, value: Any) -> Any:
        """Cast the model's outputs to float32, so that the script computes losses with full range."""
        return value if self.compute is None else _cast(value, self.compute, torch.float32)


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        is_source = isinstance(leaf, torch.Tensor) and leaf.dtype is source
        return leaf.to(target) if is_source else leaf

    return map_leaves(cast, value)


def _floating(owner: nn.Module) -> list[str]:
    return [name for name, buffer in owner.named_buffers(recurse=False) if buffer.is_floating_point()]


def _narrow_inputs(module: nn.Module, compute: torch.dtype) -> None:
    """Let a module with half precision weights take float32 inputs, which a running buffer of another module makes of them."""
    if not any(parameter.dtype is compute for parameter in module.parameters(recurse=False)):
        return

    def narrow(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), torch.float32, compute)

    module.register_forward_pre_hook(narrow, with_kwargs=True)


def _has_wide_buffers(module: nn.Module) -> bool:
    """Return whether a module keeps buffers in float32 in half precision training, besides rotary frequencies."""
    wide = [name for name in _floating(module) if stays_wide(module, name)]
    return not all(map(is_rotary, wide))
