"""Running the blocks of a page: one after the other in one process, as a reader would paste them into a script.

A page is run in passages. A passage begins with a *scene*, a function that makes what the block presupposes of the reader (a
model, a loader, a file), and goes on until the next scene of the page; a page without one is a passage of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.documents.doc_blocks import DOCUMENTS, ROOT, Block, blocks

#: Of a block, for tables: its page, and words that no other block of the page has.
Key = tuple[str, str]
Names = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """What comes before a block.

    Args:
        config: with what ``smp.init`` is called before; None where the block calls it, or needs none.
        ranks: processes that run the passage together.
        needs: packages without which it cannot run.
        instead: words of the block, and what is run in their place: sizes and places of the reader.
        full: for ``make test-full`` only, because it takes seconds.
        then: looks at the names after the passage.
    """

    key: Key
    make: Callable[[Names], None]
    config: dict[str, Any] | None
    ranks: int
    needs: tuple[str, ...]
    instead: dict[str, str]
    full: bool
    then: Callable[[Names], None] | None


SCENES: dict[Key, Scene] = {}


def scene(
    page: str,
    words: str,
    *,
    config: dict[str, Any] | None = None,
    ranks: int = 1,
    needs: tuple[str, ...] = (),
    instead: dict[str, str] | None = None,
    full: bool = False,
    then: Callable[[Names], None] | None = None,
) -> Callable[[Callable[[Names], None]], Callable[[Names], None]]:
    """The function makes the scene of the block of ``page`` in which ``words`` are: see :class:`Scene`."""

    def registered(make: Callable[[Names], None]) -> Callable[[Names], None]:
        assert (page, words) not in SCENES
        SCENES[page, words] = Scene((page, words), make, config, ranks, needs, instead or {}, full, then)
        return make

    return registered


@dataclass(frozen=True)
class Passage:
    """Blocks that are run together, and the scene before the first of them."""

    blocks: tuple[Block, ...]
    scene: Scene | None

    @property
    def name(self) -> str:
        return self.blocks[0].name


def matching(key: Key, language: str) -> list[Block]:
    """The blocks that a key means: one, if it is right."""
    page, words = key
    (document,) = [document for document in DOCUMENTS if _page(document) == page]
    return [block for block in blocks(document) if block.language == language and words in block.code]


def _page(document: Path) -> str:
    return str(document.relative_to(ROOT)).removeprefix("docs/")


def key_of(block: Block, keys: Any) -> Key | None:
    """The key among these that means a block."""
    found = [key for key in keys if key[0] == _page(block.document) and key[1] in block.code]
    assert len(found) <= 1, f"{block.name} is meant by {found}"
    return found[0] if found else None


def passages(left_out: Any) -> list[Passage]:
    """Passages of all pages, without the Python blocks that keys in ``left_out`` mean."""
    found = []
    for document in DOCUMENTS:
        current: list[Block] = []
        opening: Scene | None = None
        for block in blocks(document):
            if block.language != "python" or block.unchecked or key_of(block, left_out):
                continue
            if (key := key_of(block, SCENES)) is not None:
                if current:
                    found.append(Passage(tuple(current), opening))
                current, opening = [], SCENES[key]
            current.append(block)
        if current:
            found.append(Passage(tuple(current), opening))
    return found


def play(passage: Passage, folder: str, stand_ins: Callable[[], Names]) -> None:
    """Run a passage in a folder; its own errors come through, with the page and line in the traceback."""
    from smp_runtime.job import session

    opening = passage.scene
    with _at(folder), estimators():
        try:
            if opening and opening.config is not None:
                session.init(opening.config)
            names = {"__name__": "__main__", **stand_ins()}
            if opening:
                opening.make(names)
            for block in passage.blocks:
                _run(block, opening, names)
            if opening and opening.then:
                opening.then(names)
        finally:
            session.shutdown()


def _run(block: Block, opening: Scene | None, names: Names) -> None:
    code, before = block.code, block.line - 1
    if opening is not None and block.code.find(opening.key[1]) >= 0:
        for words, other in opening.instead.items():
            assert words in code, f"{block.name} has no {words}"
            code = code.replace(words, other)
    exec(compile("\n" * before + code, block.document, "exec"), names)


@contextmanager
def _at(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def estimators() -> Iterator[None]:
    """Estimators whose jobs do not start: ``fit`` only looks at the code, as it does before a job."""
    import smp_estimator

    #: What `...` stands for, in calls that show one argument of many.
    usual = {"entry_point": "train.py", "instance_type": "local"}
    usual["role"] = "arn:aws:iam::111122223333:role/training"

    class Estimator(smp_estimator.SMPEstimator):
        __doc__ = smp_estimator.SMPEstimator.__doc__

        def __init__(self, *given: Any, **named: Any) -> None:
            if ... in given or ... in named.values():
                named = usual | {name: value for name, value in named.items() if value is not ...}
                named.setdefault("distribution", smp_estimator.ModelParallel(ddp=True) | smp_estimator.MPI(2))
            super().__init__(**named)

        model_data = "file:///…/model.tar.gz"

        def fit(self, *given: Any, **named: Any) -> None:
            self._check_code()

        def logs(self) -> None:
            pass

        fit.__doc__ = smp_estimator.SMPEstimator.fit.__doc__
        logs.__doc__ = smp_estimator.SMPEstimator.logs.__doc__

    for name in ("train.py", "scripts/train.py"):
        Path(name).parent.mkdir(exist_ok=True)
        if not Path(name).exists():
            Path(name).write_text("import smdistributed.modelparallel.torch as smp\n\nsmp.init()\n")
    # Of a reader who has set up AWS; no service is asked.
    region = patch.dict(os.environ, {"AWS_DEFAULT_REGION": "us-west-2"})
    with region, patch.object(smp_estimator, "SMPEstimator", Estimator):
        yield
