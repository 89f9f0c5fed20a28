"""``DistributedModule``: the base of modules with parameters that are split over tensor parallel ranks."""

from __future__ import annotations

import contextlib
import copyreg
import inspect
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.nn.whole_weights import is_read_in_forward, whole_weight
from smp_runtime.parameters.registry import MatrixOrigin, TensorSlice
from smp_runtime.tensor_parallel import traced
from smp_runtime.tensor_parallel.group import TensorGroup
from smp_runtime.tensor_parallel.initialisation import Fill, make_parameter, weight_stream
from smp_runtime.tensor_parallel.random_tracker import RandomTracker


def current_group() -> TensorGroup:
    """Return the tensor parallel group of the current session."""
    group = TensorGroup.of(sessions.current_session().ranks)
    traced.serve(group)
    return group


# A module that is unpickled joins the group of the job that it is in then.
copyreg.pickle(TensorGroup, lambda _: (current_group, ()))


class NotDistributableError(SMPUserError):
    """A module's settings that its distributed form does not have."""

    code = "SMP307"


class IndivisibleError(NotDistributableError):
    """A size that the number of tensor parallel ranks does not divide."""


class _Creation(threading.local):
    """In which type the parameters made now shall be, or None."""

    dtype: torch.dtype | None = None


_creation = _Creation()


@contextlib.contextmanager
def parameters_in(dtype: torch.dtype | None) -> Iterator[None]:
    """Give distributed modules made inside the block parameters of this type; None means PyTorch's default."""
    before, _creation.dtype = _creation.dtype, dtype
    try:
        yield
    finally:
        _creation.dtype = before


class _DrawnFromOneSeed(type):
    """A metaclass: the outermost distributed module draws all its weights from one seed that the ranks agree on."""

    @property
    def __signature__(cls) -> inspect.Signature:
        constructor = inspect.signature(cls.__init__)  # type: ignore[misc]
        return constructor.replace(parameters=list(constructor.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with weight_stream(current_group()):
            return super().__call__(*args, **kwargs)


class DistributedModule(nn.Module, metaclass=_DrawnFromOneSeed):
    """A module that each tensor parallel rank holds a part of.

    Create it on all ranks of the group together, after ``smp.init()``. Subclasses make their parameters with
    :meth:`add_split` and :meth:`add_whole`.

    Attributes:
        tensor_group: the ranks that share it.
        tensor_slices: which part of the whole parameter this rank has, by the parameter's own name.
        reductions: over which group a parameter's gradient is averaged, by its own name.
        matrix_origins: in a module that has replaced another, by name inside it, what its matrices were there, if not the same.

    Example:
        >>> class Scale(smp.nn.DistributedModule):  # each rank multiplies its part of the channels
        ...     def __init__(self, channels):
        ...         super().__init__()
        ...         self.add_split("weight", (channels,), 0, lambda whole, generator: nn.init.ones_(whole))
        >>> Scale(64).weight.shape  # of 64 channels, this rank's
        torch.Size([64])
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensor_group: TensorGroup = current_group()
        RandomTracker.prepare(self.tensor_group)
        self.tensor_slices: dict[str, TensorSlice] = {}
        self.reductions: dict[str, Group] = {}
        self.matrix_origins: dict[str, MatrixOrigin] = {}
        self._dtype = torch.float16 if sessions.current_session().ranks.cfg.fp16_params else _creation.dtype

    def add_split(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int,
        fill: Fill,
        *,
        pieces: Sequence[int] = (),
        owner: int | None = None,
        exists: bool = True,
    ) -> None:
        """Register a parameter that is split over the ranks along ``dim``, or None.

        Args:
            shape: of the whole.
            pieces: lengths along ``dim`` that are split one by one; the ranks divide each. Empty for one piece.
            owner: a rank of the group that has all of it, if the others have nothing.
        """
        if not exists:
            self.register_parameter(name, None)
            return
        group = self.tensor_group
        if owner is None:
            where = TensorSlice.of(shape, dim, group.rank, group.size, pieces)
        else:
            where = TensorSlice.owned(shape, dim, group.rank, owner)
        self.register_parameter(name, make_parameter(shape, fill, where, self.tensor_group.device, self._dtype))
        self.tensor_slices[name] = where
        self.reductions[name] = Group.RDP

    def add_whole(
        self, name: str, shape: tuple[int, ...], fill: Fill, reduction: Group = Group.RDP, *, exists: bool = True
    ) -> None:
        """Register a parameter that every rank has whole, or None.

        Pass ``DP`` as the reduction if its gradient is that of this rank's own batch.
        """
        if not exists:
            self.register_parameter(name, None)
            return
        self.register_parameter(name, make_parameter(shape, fill, None, self.tensor_group.device, self._dtype))
        self.reductions[name] = reduction

    def share_of(self, what: str, size: int) -> int:
        """Return this rank's part of ``size``.

        Raises:
            IndivisibleError: the ranks do not divide it.
        """
        degree = self.tensor_group.size
        if size % degree:
            raise IndivisibleError(
                f"{what} is {size}, which the tensor_parallel_degree {degree} does not divide; use a degree that does, or "
                f"a {what} that is a multiple of {degree}"
            )
        return size // degree

    def become_whole(self, alone: TensorGroup) -> None:
        """Turn this copy of the module into one with whole parameters that computes alone.

        ``alone`` is a group of only this rank. Subclasses that store values derived from the group set them again.
        """
        self.tensor_group = alone
        self.tensor_slices = {name: TensorSlice.of(w.shape, w.dim, 0, 1) for name, w in self.tensor_slices.items()}

    def _own_part(self, name: str) -> Any:
        """Return this rank's part of a parameter, for the module's own ``forward``.

        A replacement takes precedence. The module's own dictionary may have one that autograd sums behind, or that is
        pruned or normed; its class may have one with a parametrization.
        """
        is_replaced = name in self.__dict__ or name not in self._parameters
        return getattr(self, name) if is_replaced else self._parameters[name]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load whole weights too: each rank takes its part of them."""
        for name, where in self.tensor_slices.items():
            value: Any = state_dict.get(prefix + name)
            is_split = where.local_shape != where.shape
            # States of the model before it was wrapped, and of other degrees, have whole tensors.
            is_whole = isinstance(value, torch.Tensor) and tuple(value.shape) == where.shape
            if is_split and is_whole:
                state_dict[prefix + name] = where.cut(value)
        super()._load_from_state_dict(state_dict, prefix, *args)


class ReadByOthers(DistributedModule):
    """A module that may replace one of the script's; code around it may read its weights.

    While a forward pass runs, other code gets the whole weights. The module reads its part by :meth:`_own_part`.
    """

    #: Class of the script's module that it replaces; empty if it replaces none.
    replaced_class: str = ""

    def __getattr__(self, name: str) -> Any:
        """Return a submodule, buffer or parameter; of a split parameter the whole, where a forward pass reads it."""
        value: Any = super().__getattr__(name)
        where = self.__dict__.get("tensor_slices", {}).get(name)
        if where is None or value is None:
            return value
        # Code for the library's own classes knows that they hold parts.
        if not self.replaced_class or self.tensor_group.size == 1:
            return value
        is_part = tuple(value.shape) == where.local_shape
        if not is_part or not is_read_in_forward(self.tensor_group):
            return value
        return whole_weight(f"{name} of a {self.replaced_class}", value, where, self.tensor_group)
