"""The words of a script's command line, if a job differs from what the script was written for."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

#: A hyperparameter of the platform, which comes with those of the script.
PARAMETERS_WORD = "--mp_parameters"


def forgive_parameters(words: Sequence[str]) -> None:
    """Let parsers of this process that do not know ``--mp_parameters`` pass over it.

    Parsers that take unknown words for mistakes (``parse_args``, Transformers' ``HfArgumentParser``) would refuse the
    script's command line otherwise: Transformers 5 has the argument no more.

    Args:
        words: of the script's command line.
    """
    if PARAMETERS_WORD not in words[:-1]:
        return
    given = [PARAMETERS_WORD, words[words.index(PARAMETERS_WORD) + 1]]
    former = argparse.ArgumentParser.parse_known_args

    @functools.wraps(former)
    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = former(self, args, namespace)
        at = next((at for at in range(len(unknown)) if unknown[at : at + 2] == given), None)
        return found, unknown if at is None else [*unknown[:at], *unknown[at + 2 :]]

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
