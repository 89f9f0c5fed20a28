"""A tensor that a region keeps for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    import torch


class Stored:
    """A tensor as it was when it was kept.

    Attributes:
        tensor: without its place in the graph; None while it is elsewhere.
        bytes: of its elements.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        self.bytes = tensor.numel() * tensor.element_size()
        # Shared by all views, so that any change in place shows.
        self._version = -1 if tensor.is_inference() else tensor._version

    def take(self, label: str) -> torch.Tensor:
        """The tensor, for the region ``label``.

        Raises:
            SMPUserError: it was changed in place meanwhile.
        """
        if self.tensor is None:
            raise AssertionError("a tensor that is elsewhere was taken")
        self.check(self.tensor, label)
        return self.tensor

    def check(self, tensor: torch.Tensor, label: str = "", since: int | None = None) -> None:
        """Make sure that nobody has changed ``tensor`` since it was kept, or since its version was ``since``.

        Raises:
            SMPUserError: somebody has.
        """
        version = self._version if since is None else since
        if version >= 0 and tensor._version != version:
            where = f" {label!r}" if label else ""
            raise SMPUserError(
                f"an argument of shape {list(tensor.shape)} of the checkpointed region{where} was changed in place "
                f"{tensor._version - version} times after the region began, and backward runs the region again from it; "
                "change a copy (x = x + y instead of x += y)"
            )
