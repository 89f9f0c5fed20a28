"""The log of version 2, and the times of parts of a script."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

#: Above all levels: a logger with it is silent.
OFF = logging.CRITICAL + 10


class Version2Logger(logging.Logger):
    """A logger with the level ``OFF``, which scripts can set."""

    def off(self, message: object, *args: object) -> None:
        """Log a message that only a logger at the level ``OFF`` shows."""
        self.log(OFF, message, *args)


def get_logger() -> logging.Logger:
    """Return the logger of version 2, ``torch.sagemaker``; it prints to standard error unless a script has set up logging."""
    logging.addLevelName(OFF, "OFF")
    found = logging.Logger.manager.loggerDict.get(_NAME)
    if isinstance(found, Version2Logger):
        return found
    made = Version2Logger(_NAME, logging.INFO)
    made.parent = logging.getLogger()
    if not made.parent.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[smp] %(message)s"))
        made.addHandler(handler)
    logging.Logger.manager.loggerDict[_NAME] = made
    return made


_NAME = "torch.sagemaker"


@contextlib.contextmanager
def timeit(enabled: bool, label: str, rank: int = 0) -> Iterator[None]:
    """Log the seconds that a block takes, on rank 0.

    Args:
        enabled: False only runs the block.
        rank: this process's.
    """
    begin = time.perf_counter()
    yield
    if enabled and rank == 0:
        get_logger().info("%s took %.2f s", label, time.perf_counter() - begin)
