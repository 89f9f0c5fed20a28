"""Cells as notebooks have them: what each means in version 2 of the SDK, and the jobs that it starts after ``migrate``."""

from __future__ import annotations

import ast
import builtins
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import botocore.client
import botocore.loaders
import pytest
from click.testing import CliRunner
from migration import cells_huggingface, cells_pytorch
from migration.facts import TRANSLATED, agree, facts
from support.platform.cloud import ROLE, service
from support.platform.fake_jobs import forget_account
from support.platform.stock_images import fix_day

from smp_estimator.cli.main import main
from smp_estimator.migration.names import HOMES, MOVED
from smp_estimator.migration.source import MARK
from smp_estimator.sdk.installed import installed_major

if TYPE_CHECKING:
    from migration.cell import Cell

CELLS = (*cells_pytorch.CELLS, *cells_huggingface.CELLS)

#: The module of each version that has ``Session``.
SESSIONS = {2: "sagemaker.session", 3: "sagemaker.core.helper.session_helper"}

each_cell = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.kind)


@pytest.fixture(scope="module")
def boto() -> Iterator[Any]:
    """The stand-in of the service, with a role that a user may read."""
    patch = pytest.MonkeyPatch()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # Each session of the SDK reads the descriptions of its services anew, 30 ms each.
    read = functools.cache(botocore.loaders.JSONFileLoader().load_file)
    patch.setattr(botocore.loaders.JSONFileLoader, "load_file", lambda _, path: read(path))
    with service() as session:
        patch.setattr(boto3, "DEFAULT_SESSION", session)
        patch.setattr(session, "client", functools.cache(session.client))
        session.client("iam").create_role(RoleName="trainer", AssumeRolePolicyDocument="{}")
        yield session
    patch.undo()


@pytest.fixture
def requests(boto: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every CreateTrainingJob request, whichever session sends it; the working folder has the script."""
    sent: list[dict[str, Any]] = []
    call = botocore.client.BaseClient._make_api_call

    def kept(client: Any, operation: str, parameters: dict[str, Any]) -> Any:
        if operation == "CreateTrainingJob":
            sent.append(parameters)
        return call(client, operation, parameters)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", kept)
    credentials = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    forget_account(monkeypatch, tmp_path / "home")
    for name, value in credentials.items():  # the stand-in's
        monkeypatch.setenv(name, value)
    fix_day(monkeypatch)
    config = tmp_path / "sdk.yaml"
    config.write_text("SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n")
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(config))
    for folder in ("scripts", "lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "train.py").write_text("")
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return sent


def migrate(cell: Cell, folder: Path) -> tuple[list[str], list[str]]:
    """Run the command on a notebook of the cell; return the changed pieces, and what the command lists."""
    path = folder / "notebook.ipynb"
    rows = [{"cell_type": "code", "source": text} for text in (*cell.pieces, *cell.for_a_person)]
    path.write_text(json.dumps({"cells": rows}))
    done = CliRunner().invoke(main, ["migrate", str(path), "--write"])
    assert done.exit_code == 0, done.output
    listed = [line.partition(": ")[2] for line in done.output.splitlines() if line.startswith("look at ")]
    return [row["source"] for row in json.loads(path.read_text())["cells"]], listed


def as_python(text: str) -> str:
    """Code as the kernel hands it to Python."""
    lines, is_magic = [], False
    for line in text.splitlines():
        is_magic = is_magic or line.startswith(("!", "%")) or line.endswith("?")
        lines.append("" if is_magic else line.replace("= !ls scripts", "= ['train.py']"))
        is_magic = is_magic and line.endswith("\\")
    return "\n".join([*lines, ""])


def undefined(code: str) -> set[str]:
    """Names that code reads and neither defines nor imports."""
    read, bound = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return read - bound


def run(pieces: tuple[str, ...] | list[str], cell: Cell, patch: pytest.MonkeyPatch) -> None:
    """Run pieces in one namespace, as the notebook's kernel does."""
    major = installed_major()
    session = SESSIONS[major]  # type: ignore[index]
    if not cell.is_user:
        patch.setattr(f"{session}.Session.get_caller_identity_arn", lambda _: ROLE)
    if major == 3:
        from sagemaker.core.resources import TrainingJob

        patch.setattr(TrainingJob, "wait", lambda job, **_: job.refresh())
        patch.setattr("smp_estimator.cloud.log.POLL_SECONDS", 0.01)
    else:
        patch.setattr("sagemaker.session.Session.logs_for_job", lambda *_, **__: None)
        patch.setattr("sagemaker.session.Session.wait_for_job", lambda *_, **__: None)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, text in enumerate(pieces):
        exec(compile(as_python(text), f"cell {number}", "exec"), namespace)


def distributed(boto: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the strategy that travels with a job of version 3."""
    (row,) = [row for row in request["InputDataConfig"] if row["ChannelName"] == "sm_drivers"]
    bucket, _, prefix = row["DataSource"]["S3DataSource"]["S3Uri"].removeprefix("s3://").partition("/")
    body = boto.client("s3").get_object(Bucket=bucket, Key=f"{prefix.rstrip('/')}/distributed.json")["Body"]
    return json.loads(body.read()) or {}


def test_there_are_enough_cells() -> None:
    assert len(CELLS) == 25
    assert len({cell.kind for cell in CELLS}) == 25


@each_cell
def test_what_version_2_sends(cell: Cell, requests: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts of each cell, as version 2 of the SDK reads it."""
    if installed_major() != 2:
        pytest.skip("needs version 2 of the SageMaker SDK")
    run(cell.pieces, cell, monkeypatch)
    found = [facts(request, None) for request in requests]
    assert len(found) == len(cell.jobs)
    for expected, each in zip(cell.jobs, found, strict=True):
        each["strategy"] = TRANSLATED.get(each.get("strategy", "none"), each.get("strategy", "none"))
        if each["strategy"] == "none":
            del each["strategy"]
        assert agree(expected, each), f"{expected}\n{each}"


@each_cell
def test_the_changed_code(cell: Cell, tmp_path: Path) -> None:
    after, listed = migrate(cell, tmp_path)
    code = "".join(as_python(text) for text in after)
    assert not undefined(code), "\n".join(after)
    written = " ".join("\n".join(after).replace(MARK, "#").replace("#", " ").split())
    for sentence in listed:
        assert " ".join(sentence.split()) in written, sentence
    for part in cell.marks:
        assert any(part in " ".join(sentence.split()) for sentence in listed), f"{part!r} is not in {listed}"
    unasked = [each for each in listed if not any(part in " ".join(each.split()) for part in cell.marks)]
    assert not unasked, unasked
    path = tmp_path / "notebook.ipynb"
    content = path.read_text()
    assert CliRunner().invoke(main, ["migrate", str(path), "--write"]).exit_code == 0
    assert path.read_text() == content, "there is nothing more to change"


@each_cell
def test_the_jobs_of_the_changed_code(
    cell: Cell, boto: Any, requests: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed_major() != 3:
        pytest.skip("needs version 3 of the SageMaker SDK: make test-v3")
    if not cell.jobs:
        pytest.skip("a person has to change it first")
    after, _ = migrate(cell, tmp_path)
    run(after[: len(cell.pieces)], cell, monkeypatch)
    assert len(requests) == len(cell.jobs)
    for expected, request in zip(cell.jobs, requests, strict=True):
        found = facts(request, distributed(boto, request))
        assert agree(expected, found), f"{expected}\n{found}"


def test_version_3_has_what_is_imported() -> None:
    import importlib

    if installed_major() != 3:
        pytest.skip("needs version 3 of the SageMaker SDK: make test-v3")
    for full, home in [*MOVED.items(), *HOMES.items()]:
        name = full.rpartition(".")[2]
        module = importlib.import_module(home)
        assert hasattr(module, name) or importlib.import_module(f"{home}.{name}"), f"{home} has no {name}"
