"""What a script saves beside model and optimizer: checked when it is saved, read back without running code."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from smp_runtime.checkpoint.files.whole_file import UNREADABLE, arrays_are_safe, refused_object
from smp_runtime.errors import CheckpointError, SMPUserError


def to_bytes(content: Any, *, trusted: bool = False) -> bytes:
    """The content of a ``user_content`` file, after making sure that it can be read back.

    Args:
        content: dictionaries, lists, tuples, sets, numbers, strings, tensors, NumPy arrays, in any nesting.
        trusted: True lets any object pass that can be pickled.

    Raises:
        SMPUserError: something else inside, or something that cannot be pickled at all.
    """
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SMPUserError(
            f"user_content holds something that cannot be saved ({str(error).splitlines()[0]}: pickle refuses it); keep to "
            "dictionaries, lists, numbers, strings, tensors and arrays"
        ) from None
    if trusted:
        return buffer.getvalue()
    buffer.seek(0)
    try:
        with arrays_are_safe():
            torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        raise SMPUserError(
            f"user_content holds an object that could not be loaded back safely ({refused_object(error)}); keep to dictionaries, "
            "lists, numbers, strings, tensors and arrays, for example vars(args) instead of args, or pass "
            "trust_user_content=True to save_checkpoint and to resume_from_checkpoint"
        ) from None
    return buffer.getvalue()


def read(path: Path, *, trusted: bool = False) -> Any:
    """Read a ``user_content`` file; an absent or empty one is None.

    Args:
        trusted: True loads any object, which may run code.

    Raises:
        CheckpointError: it is damaged, or holds objects and is not trusted.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return None
    try:
        # Opened here, because PyTorch reads a path that ends in .safetensors as such a file, and tags may.
        with arrays_are_safe(), open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds an object that may run code when it is loaded ({refused_object(error)}); if you trust who wrote "
            "it, pass trust_user_content=True to resume_from_checkpoint"
        ) from None
    except UNREADABLE as error:
        raise CheckpointError(
            f"the checkpoint file {path} cannot be read ({refused_object(error)}); it was cut, damaged or written "
            "by something else: resume from another tag"
        ) from error
