"""``smp.state.module_manager``: what clients ask about distributed modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Translate = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ModuleManager:
    """What is known of the distributed modules of this process.

    Attributes:
        translate_functions: for each kind of Hugging Face model that was distributed, the functions that translate its
            state to Hugging Face's names, and back.
    """

    def __init__(self) -> None:
        self.translate_functions: list[tuple[Translate, Translate]] = []

    def note(self, translations: tuple[Translate, Translate]) -> None:
        """A model with these translations was distributed."""
        if translations not in self.translate_functions:
            self.translate_functions.append(translations)

    def translated(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A full state under Hugging Face's names."""
        for to_hugging_face, _ in self.translate_functions:
            state = to_hugging_face(state)
        return state
