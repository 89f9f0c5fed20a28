"""Every block of code in README and ``docs/`` is what it says: names, arguments and commands are there."""

from __future__ import annotations

import ast
import configparser
import functools
import re
import statistics
import subprocess
from pathlib import Path

import click
import pytest
from support.documents.doc_blocks import (
    DOCUMENTS,
    ROOT,
    all_blocks,
    blocks,
    commands,
    defined_names,
    free_names,
    imported,
    spans,
    wrong_uses,
)

from smp_estimator.cli.main import main as estimator_command
from smp_launch.__main__ import main as launch_command

#: What a block may mean without saying it: of the reader's script, under the names that all pages use.
READERS = """
    model module optimizer scheduler loader dataset data batch inputs targets ids labels x y loss step steps epoch epochs
    criterion folder path uri estimator hyperparameters parameters total device args config self
    MyModel Decoder TheirLayer train train_step prompts mask pretrained upload mpioptions init_hook forward_hook return_hook
""".split()
#: What every block may use as if it were imported.
PREAMBLE = "import os\nimport torch\nfrom torch import nn\nimport smdistributed.modelparallel.torch as smp\n"
PREAMBLE += "from smp_estimator import MPI, ModelParallel, SMPEstimator\n"

PYTHON = all_blocks("python")
SHELL = all_blocks("sh")


def test_languages_are_those_that_are_checked() -> None:
    found = {block.language for document in DOCUMENTS for block in blocks(document)}
    assert found == {"", "python", "sh"}
    assert len(PYTHON) > 55
    assert len(SHELL) > 12


def test_unchecked_blocks_give_a_reason() -> None:
    unchecked = [block for document in DOCUMENTS for block in blocks(document) if block.unchecked]
    assert all(len(block.unchecked) > 20 for block in unchecked)
    assert len(unchecked) <= 3


#: Pages to look something up in. All others of ``docs/`` itself are about a task.
REFERENCE = {"architecture", "compatibility", "glossary", "models", "state", "stock-images", "troubleshooting"}
TASKS = [path for path in DOCUMENTS if path.parent == ROOT / "docs" and path.stem not in REFERENCE]
MOST_WORDS, WORDS_BEFORE_A_BLOCK, MOST_WORDS_IN_ALL = 900, 80, 25_000
MOST_MARKS_PER_SENTENCE, BLOCKS_PER_1000_WORDS = 1.2, 4


def _prose(document: Path) -> str:
    return re.sub(r"^```.*?^```\s*$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _words(text: str) -> int:
    return len(re.findall(r"\S*\w\S*", text))


def _marks_per_sentence(prose: str) -> float:
    """Commas, semicolons and parentheses for each sentence of the running text, without its code and links."""
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "#"))]
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", "\n".join(lines)))
    sentences = [part for part in re.split(r"(?<=[.:!?])\s+|\n\s*\n|\n[*-] ", text) if _words(part) > 1]
    return sum(map(text.count, ",;(")) / len(sentences)


@pytest.mark.parametrize("document", [ROOT / "README.md", *TASKS], ids=lambda path: path.stem)
def test_a_task_page_is_short_and_shows_code_first(document: Path) -> None:
    text, prose = document.read_text(encoding="utf-8"), _prose(document)
    assert _words(prose) <= MOST_WORDS
    assert _words(text.partition("```")[0]) <= WORDS_BEFORE_A_BLOCK
    assert _marks_per_sentence(prose) <= MOST_MARKS_PER_SENTENCE


def test_task_pages_have_many_blocks_and_few_words() -> None:
    words = {document: _words(_prose(document)) for document in TASKS}
    assert sum(words.values()) <= MOST_WORDS_IN_ALL
    density = [1000 * len(blocks(document)) / words[document] for document in TASKS]
    assert statistics.median(density) >= BLOCKS_PER_1000_WORDS


def test_commands_are_not_hidden_in_blocks_of_output() -> None:
    for block in all_blocks(""):
        first = block.code.split("\n")[0]
        is_command = re.match(r"(smp-estimator|make|pip|python|torchrun|mpirun|smp-launch run) ", first)
        assert not is_command, f"{block.name} begins with a command: mark it as sh, apart from what it prints"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks(document: Path) -> None:
    before = defined_names(PREAMBLE)
    wrong = []
    for block in blocks(document):
        if block.language != "python" or block.unchecked:
            continue
        ast.parse(block.code)
        unknown = free_names(block.code) - before - set(READERS)
        if unknown:
            wrong.append(
                f"{block.name} uses {', '.join(sorted(unknown))}, which neither it nor a block before it defines"
            )
        known = {name: value for name, value in _preamble().items() if name not in defined_names(block.code)}
        known |= imported(block.code)
        wrong += [f"{block.name}, {text}" for text in wrong_uses(block.code, known)]
        before |= defined_names(block.code)
    assert not wrong


@functools.cache
def _preamble() -> dict[str, object]:
    return imported(PREAMBLE)


# -- the shell -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_shell_blocks(block, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True, capture_output=True)
    # Files of the reader are not here.
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: value)
    monkeypatch.setattr(click.File, "convert", lambda self, value, param, ctx: value)
    for words in commands(block.code):
        if "smp-launch" in words:  # also behind mpirun, srun or torchrun
            words = words[words.index("smp-launch") :]
        check = CHECKS.get(words[0])
        assert check is not None or words[0] in OF_SYSTEM, f"{block.name}: nobody knows {words[0]}"
        if check is not None:
            check(words[1:])


def _parse(command: click.Command, words: list[str]) -> None:
    """Read words as the command would, without running it; raises click's errors."""
    with command.make_context(command.name, list(words)) as context:
        if isinstance(command, click.Group):
            name, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            assert inner is not None, name
            _parse(inner, rest)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_targets_of_make_in_the_text(document: Path) -> None:
    for span in spans(document, "make"):
        _make([word.strip("…") for word in span.split()[1:] if word.strip("…")])


def _make(words: list[str]) -> None:
    targets = {
        name
        for line in re.findall(r"^([\w.-][\w. -]*):", (ROOT / "Makefile").read_text(), re.M)
        for name in line.split()
    }
    assert {word for word in words if "=" not in word} <= targets


def _pip(words: list[str]) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])
    named = {extra for word in words for extra in re.findall(r"\[(\w+)\]", word) if "smp" in word or word[0] == "."}
    assert words[0] in ("install", "download")
    assert named <= extras


def _python(words: list[str]) -> None:
    if words[0] == "-m":
        assert words[1] in ("venv", "pip")
        return
    if not words[0].startswith(("examples/", "benchmarks/", "tests/", "entrypoints/")):
        return  # a script of the reader
    path = ROOT / words[0]
    text = (path / "__main__.py" if path.is_dir() else path).read_text(encoding="utf-8")
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in text, option


CHECKS = {
    "smp-estimator": functools.partial(_parse, estimator_command),
    "smp-launch": functools.partial(_parse, launch_command),
    "make": _make,
    "pip": _pip,
    "python": _python,
    "python3": _python,
}
#: Programs of others, whose words are not checked.
OF_SYSTEM = {".", "mkdir", "tar", "printf", "mpirun", "torchrun", "srun", "cd", "git", "kubectl"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_the_text(document: Path) -> None:
    """Names of commands and options; values are often those of the reader."""
    for program, command in (("smp-estimator", estimator_command), ("smp-launch", launch_command)):
        for span in spans(document, program):
            words = re.sub(r"[\[\]]", " ", span.split(" -- ")[0]).split()[1:]
            found: click.Command = command
            while isinstance(found, click.Group) and words and not words[0].startswith(("-", "…")):
                names = words[0].split("|")
                assert all(name in found.commands for name in names), f"{document.name}: {span}"
                found = found.commands[names[0]]
                words = words[1:]
            options = {option for param in found.params for option in (*param.opts, *param.secondary_opts)} | {
                "--help",
                "--version",
            }
            named = [word.split("=")[0] for word in words if word.startswith("--")]
            assert set(named) <= options, f"{document.name}: {span}"
