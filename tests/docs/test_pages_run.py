"""Every Python block of README and ``docs/`` runs: here, in another test, or there is a reason why it does not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support.documents.doc_scenes  # noqa: F401 - it registers the scenes
from support.documents.doc_blocks import ROOT, all_blocks
from support.documents.doc_runs import SCENES, Key, Passage, matching, passages, play
from support.documents.doc_stand_ins import stand_ins

#: Blocks that another file of tests runs: it reads the page itself.
ELSEWHERE: dict[str, list[Key]] = {
    "tests/docs/test_examples_run.py": [
        ("start.md", "samples = torch.randn(512, 64)"),
        ("start.md", "config = LlamaConfig("),
        ("start.md", 'from_pretrained("exported")'),
        ("start.md", "SMPEstimator("),
        ("cloud.md", "SMPEstimator("),
    ],
    "tests/clients/test_library_docs.py": [("lightning.md", "import lightning.pytorch"), ("lightning.md", "Fabric(")],
    "tests/model_trainer/test_jobs.py": [("sdk-v3.md", "trainer.train("), ("README.md", "trainer.train(")],
    "tests/version2/test_docs.py": [("version-2.md", "tsm.init()"), ("version-2.md", "SMPEstimator(")],
    "tests/version2/test_fp8.py": [("how-it-works/fp8.md", "fp8_autocast(")],
    "tests/model_trainer/test_version2.py": [("version-2.md", "Torchrun(")],
    "tests/version2/test_checkpoints.py": [("version-2.md", "async_save(")],
    "tests/smddp/test_docs.py": [
        ("smddp.md", 'init_process_group("smddp")'),
        ("smddp.md", 'instance_type="local"'),
        ("smddp.md", 'instance_type="ml.p4d.24xlarge"'),
    ],
}
#: Blocks that nothing runs.
NOT_RUN: dict[Key, str] = {
    ("launchers.md", "TorchTrainer"): "it starts a Ray cluster, and the tests install no Ray",
}
LEFT_OUT = [*NOT_RUN, *(key for keys in ELSEWHERE.values() for key in keys)]
PASSAGES = passages(LEFT_OUT)


def test_every_entry_means_a_block() -> None:
    for key in (*LEFT_OUT, *SCENES):
        assert len(matching(key, "python")) == 1, f"{key} means {len(matching(key, 'python'))} blocks"


def test_every_block_is_run_or_listed() -> None:
    run = [block for passage in PASSAGES for block in passage.blocks]
    listed = [matching(key, "python")[0] for key in LEFT_OUT]
    assert sorted(block.name for block in (*run, *listed)) == sorted(block.name for block in all_blocks("python"))


@pytest.mark.parametrize("place", ELSEWHERE)
def test_another_file_reads_the_page(place: str) -> None:
    text = (ROOT / place).read_text(encoding="utf-8")
    assert all(Path(page).name in text or f'"{Path(page).stem}' in text for page, _ in ELSEWHERE[place])


def test_what_is_not_installed_is_not() -> None:
    assert importlib.util.find_spec("ray") is None, "its block can be run"


def _parameters() -> list[Any]:
    return [
        pytest.param(index, marks=[pytest.mark.full] if passage.scene and passage.scene.full else [], id=passage.name)
        for index, passage in enumerate(PASSAGES)
    ]


@pytest.mark.parametrize("index", _parameters())
def test_a_passage_runs(index: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    passage: Passage = PASSAGES[index]
    scene = passage.scene
    for package in scene.needs if scene else ():
        pytest.importorskip(package)
    if scene is None or scene.ranks == 1:
        play(passage, str(tmp_path), stand_ins)
        return
    ranks: Callable[..., Any] = request.getfixturevalue("ranks")
    ranks(_play, scene.ranks, scene.key, str(tmp_path), init=False)


def _play(key: Key, folder: str) -> None:
    from support.documents import doc_runs, doc_stand_ins

    for passage in doc_runs.passages(()):
        if passage.scene and passage.scene.key == key:
            doc_runs.play(passage, folder, doc_stand_ins.stand_ins)
