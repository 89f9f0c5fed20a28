"""Which save a file of a full checkpoint is from, so that files of two saves are never taken for one checkpoint."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from smp_runtime.errors import CheckpointError

#: A key of the optimizer's state and of the user content, an attribute of a state, and metadata of safetensors.
SAVE_ID = "_smp_save"
_CONTENT = "content"


def new_save_id() -> str:
    """A name for one save."""
    return uuid.uuid4().hex


def marked_state(state: Mapping[str, Any], save_id: str | None) -> OrderedDict[str, Any]:
    """A state that carries the id where ``load_state_dict`` does not look, as it carries PyTorch's own ``_metadata``."""
    marked = OrderedDict(state)
    if save_id is not None:
        setattr(marked, SAVE_ID, save_id)
    return marked


def id_of_state(state: Any) -> str | None:
    """The id of what :func:`marked_state` made; None of any other object."""
    return getattr(state, SAVE_ID, None)


def wrapped(content: Any, save_id: str) -> dict[str, Any]:
    """User content with the id."""
    return {SAVE_ID: save_id, _CONTENT: content}


def unwrapped(content: Any) -> tuple[Any, str | None]:
    """User content and its id; None for content that is not wrapped."""
    if isinstance(content, dict) and content.keys() == {SAVE_ID, _CONTENT}:
        return content[_CONTENT], content[SAVE_ID]
    return content, None


def refuse_other_saves(ids: Mapping[str, str | None]) -> None:
    """Make sure that all files with an id are from one save; those without come from elsewhere.

    Args:
        ids: by the path of the file.

    Raises:
        CheckpointError: they are from several.
    """
    known = {path: found for path, found in ids.items() if found is not None}
    if len(set(known.values())) > 1:
        first, *others = known
        strange = [path for path in others if known[path] != known[first]]
        raise CheckpointError(
            f"{', '.join(strange)} {'is' if len(strange) == 1 else 'are'} of another save than {first}: a save was stopped "
            "before all files were written, or files were copied together; use another tag, or move away what does not belong "
            "there to load the rest"
        )
