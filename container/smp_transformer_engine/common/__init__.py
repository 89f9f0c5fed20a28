"""What all frameworks share."""

from . import recipe

__all__ = ["recipe"]
