"""The pictures of the documents: drawn by the program as it is, and each shown somewhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from support.documents.doc_blocks import DOCUMENTS
from support.documents.doc_pictures import FOLDER, pictures


@pytest.mark.parametrize(("name", "drawn"), pictures().items(), ids=lambda value: value[:30])
def test_a_picture_is_what_the_program_draws(name: str, drawn: str) -> None:
    assert (FOLDER / name).read_text() == drawn, "python tests/support/documents/doc_pictures.py"
    ElementTree.fromstring(drawn)
    assert "prefers-color-scheme:dark" in drawn


def test_every_picture_is_shown_with_a_text_for_those_who_do_not_see_it() -> None:
    shown = [
        (alternative, (document.parent / target).resolve())
        for document in DOCUMENTS
        for alternative, target in re.findall(r"!\[([^\]]*)\]\(([^)#]+)", document.read_text())
    ]
    assert {path.name for _, path in shown} == {path.name for path in FOLDER.iterdir()}
    assert all(path.is_file() and len(alternative) > 15 for alternative, path in shown)
