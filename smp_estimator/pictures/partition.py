"""Former place of `read_partition`, kept for notebooks that import it from here."""

from smp_estimator.figures.partition import read_partition

__all__ = ["read_partition"]
