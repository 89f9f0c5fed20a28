"""What a release consists of says one version, and is whole."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from support.documents.doc_blocks import ROOT

from smp_config.version import __version__
from smp_estimator.cloud import source

yaml = pytest.importorskip("yaml")


def test_every_place_has_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["cff-version"] == "1.2.0"
    assert {"title", "message", "authors", "license"} <= citation.keys()
    for document in (ROOT / "README.md", ROOT / "docs" / "start.md"):
        wheels = re.findall(r"smp_estimator-([\d.]+)-py3", document.read_text())
        assert set(wheels) == {__version__}, document.name
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == __version__


def test_the_wheel_has_what_the_packages_read(tmp_path: Path) -> None:
    """Files that are no Python, as git knows them."""
    listed = subprocess.run(["git", "ls-files", "smp_estimator", "container"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a working copy of git")
    wanted = {name.removeprefix("container/") for name in listed.stdout.splitlines()}
    wanted.remove(
        "sitecustomize.py"
    )  # where the wheel is unpacked another one is written; an installation has the path file
    with zipfile.ZipFile(source.build_wheel(tmp_path)) as archive:
        assert wanted - set(archive.namelist()) == set()


def test_the_reference_has_every_public_name() -> None:
    import smdistributed.modelparallel.torch as smp

    text = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    described = set(re.findall(r"^::: smdistributed\.modelparallel\.torch\.(\w+)", text, re.MULTILINE))
    modules = {"comm", "model", "optimizer", "nn"}  # hold the same names once more, or have a page of their own
    groups = {"WORLD", "MP_GROUP", "DP_GROUP", "TP_GROUP", "PP_GROUP", "RDP_GROUP"}
    assert set(smp.__all__) - described - modules - groups == {"__version__"}


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"^ +- ([\w./-]+\.md)$", text, re.MULTILINE))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    notebooks = {f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.ipynb")}
    assert named - pages == {"index.md", "CONTRIBUTING.md", "CHANGELOG.md", *notebooks}
    assert pages - named == set()
