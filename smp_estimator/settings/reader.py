"""One estimator's distribution: read when it is new or has changed, kept, and spoken of once."""

from __future__ import annotations

import logging
from typing import Any

from smp_estimator.settings.distribution import Distribution, read
from smp_estimator.settings.translation import stock_image_conflicts

logger = logging.getLogger(__name__)


class SettingsReader:
    """Reads the distribution of one estimator, on the way to a job several times, and keeps what it read.

    An estimator's attributes may be changed at any time, and its dictionaries from inside. So every step to a job asks
    again, and what is read here is remembered with what it was read from.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._source = ""
        self._kept: Distribution | None = None

    def say(self, sentence: str) -> None:
        """Warn, but of one thing only once."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning("%s", sentence)

    def read(self, distribution: dict[str, Any], *, stock_image: bool, **where: Any) -> Distribution:
        """The typed distribution.

        Args:
            stock_image: the launcher of a stock image starts the job.
            where: the other arguments of :func:`smp_estimator.settings.distribution.read`.

        Raises:
            ConfigError: as there; nothing is kept then.
        """
        # As text: it does not change with the user's dictionaries, and does not take True for 1.
        source = repr((distribution, stock_image, where))
        if self._kept is None or source != self._source:
            found = read(distribution, say=self.say, **where)
            for sentence in stock_image_conflicts(found.settings) if stock_image else ():
                self.say(sentence)
            self._source, self._kept = source, found
        return self._kept
