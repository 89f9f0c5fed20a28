"""Masking of secrets in logs and messages, which more people read than should know them.

A hyperparameter or a variable counts as a secret by its name (``hub_token``) or by its value (``hf_…``). The values
that a script receives are never changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from smp_config.errors import show_value

#: Replaces hidden values.
MASK = "***"

#: Words of a name, as in ``api_key``, ``apiKey`` or ``API-KEY``.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

#: Words in a name that mark its value as a secret.
_SECRET_WORDS = frozenset(
    """apikey auth authorization bearer credential credentials key keys passphrase passwd password passwords pat pwd secret
    secrets token tokens""".split()
)
#: Values that show another meaning of such a word: the size of a vocabulary, a switch, a special token.
_HARMLESS = re.compile(
    r"[+-]?\d{1,9}(\.\d*)?([eE][+-]?\d+)?|true|false|none|null|<\|?[\w/ ]{1,30}\|?>|\[[A-Z]{1,10}\]|", re.IGNORECASE
)
_ALWAYS = frozenset("passphrase passwd password pwd".split())

_VALUES = re.compile(
    r"""
      \b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b                                    # AWS: ids of keys
    | (?<![A-Za-z0-9/+])(?=[a-z0-9/+]*[A-Z])(?=[A-Z0-9/+]*[a-z])(?=[A-Za-z/+]*\d)[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])  # keys
    | \b(?:hf|api_org)_[A-Za-z0-9]{16,}                                          # Hugging Face
    | \b(?:gh[pousr]_|github_pat_|glpat-|sk-|xox[abeoprs]-|npm_|dop_v1_|AIza)[A-Za-z0-9_-]{16,}
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*                  # JSON web tokens
    | -----BEGIN[ A-Z]*PRIVATE\ KEY-----.*
    | (?<=://)[^/\s:@]+:[^/\s@]+(?=@)                                            # user:password@host
    """,
    re.VERBOSE | re.DOTALL,
)

#: ``name=value``, ``"name": "value"`` and the like inside a text.
_PAIRS = re.compile(r"""(["']?)([A-Za-z][\w.-]{0,80})\1(\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,;}\]]+)""")


def is_secret_name(name: str) -> bool:
    """Return whether a value of this name is likely a secret."""
    return any(word.lower() in _SECRET_WORDS for word in _WORDS.findall(name))


def mask_secrets(name: str, text: str) -> str:
    """Return the text of the value ``name`` with its secret parts masked."""
    words = {word.lower() for word in _WORDS.findall(name)} & _SECRET_WORDS
    if words and (words & _ALWAYS or not _HARMLESS.fullmatch(text)):
        return MASK
    return masked_text(text)


def masked_text(text: str) -> str:
    """Mask the parts of a text that look like secrets, by their form or by the name before them (``token=…``)."""

    def pair(found: re.Match[str]) -> str:
        quote, name, between, value = found.groups()
        bare = value.strip("\"'")
        hidden = mask_secrets(name, bare) if is_secret_name(name) else bare
        return found[0] if hidden == bare else f"{quote}{name}{quote}{between}{value.replace(bare, hidden)}"

    return _VALUES.sub(MASK, _PAIRS.sub(pair, text))


def masked_words(words: Sequence[str]) -> list[str]:
    """Mask secrets in the words of a command line, including ``--name value`` and ``--name=value``."""
    masked = []
    name = ""  # of the option before the word
    for word in words:
        if name:
            masked.append(mask_secrets(name, word))
        else:
            masked.append(masked_text(word))
        is_option = word.startswith("-") and "=" not in word
        name = word.lstrip("-") if is_option else ""
    return masked


def shown_value(name: Any, value: Any, levels: int = 3) -> str:
    """Return a value as messages show it (see :func:`smp_config.errors.show_value`), with secrets masked."""
    if isinstance(value, Mapping) and value and levels:
        return _shown_mapping(value, levels)
    is_secret = isinstance(name, str) and is_secret_name(name)
    if not is_secret:
        return masked_text(show_value(value))
    if isinstance(value, str):
        hidden = mask_secrets(name, value)
        return f"'{hidden}'"
    return mask_secrets(name, show_value(value))


def _shown_mapping(value: Mapping[Any, Any], levels: int) -> str:
    entries = []
    for key, inner in islice(value.items(), 20):
        entries.append(f"{show_value(key)}: {shown_value(key, inner, levels - 1)}")
    return f"{{{', '.join(entries)}}}"
