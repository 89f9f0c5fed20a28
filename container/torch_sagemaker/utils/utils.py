"""Times of parts of a script."""

from smp_version2.logs import timeit

__all__ = ["timeit"]
