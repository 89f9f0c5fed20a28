"""Plans and suggestions in a notebook."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from smp_estimator.planning import ModelShape, Plan, Suggestion, plan, suggest

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 4, "bf16": True}


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps the texts and the tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _words(text: str) -> set[str]:
    return set(re.findall(r"[\w.'×≤%]+", text))


@pytest.mark.parametrize(
    "make",
    [
        lambda: plan("gpt2", "ml.p4d.24xlarge", 1, PIPELINE, samples=9),
        lambda: plan("gpt-neox-65b", "ml.g5.xlarge"),
        lambda: suggest("gpt2-60b", "ml.p4d.24xlarge", 32, 7),
        lambda: suggest("gpt-neox-65b", "ml.p4d.24xlarge", 1),
        lambda: suggest("gpt-neox-20b"),
    ],
    ids=["pipeline", "too large", "degrees", "no degrees", "cluster"],
)
def test_the_page_says_what_the_terminal_says(make: Callable[[], Plan | Suggestion]) -> None:
    shown = make()
    tables, start, picture = shown._repr_html_().partition("<svg")
    page = Page(tables)
    assert page.tags <= {"div", "table", "caption", "tr", "th", "td", "b", "br"}
    missing = _words(str(shown)) - _words(" ".join(page.texts))
    assert missing == set()
    if start:
        ElementTree.fromstring(start + picture)
    assert bool(start) == (isinstance(shown, Plan) and shown.topology.world_size > 1)


def test_everything_is_escaped() -> None:
    shape = ModelShape(2, 64, 2, 100, 16, source="<script>alert('&')</script>")
    text = plan(shape, "<b>", processes_per_host=1)._repr_html_()
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)" in text
    assert "1 × &lt;b&gt;" in text
