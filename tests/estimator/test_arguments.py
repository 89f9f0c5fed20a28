"""The arguments of the estimators are the SDK's and their own, in the signature and for type checkers."""

from __future__ import annotations

import inspect
import logging
import pydoc
from pathlib import Path
from typing import Any

import pytest

from smp_estimator import SMPEstimator, SMPHuggingFace
from smp_estimator.sdk.arguments import SDKArguments
from smp_estimator.sdk.version_2 import HuggingFace, PyTorch, arguments_of

BOTH = [(SMPEstimator, PyTorch), (SMPHuggingFace, HuggingFace)]


@pytest.mark.parametrize(("ours", "theirs"), BOTH)
def test_the_signature_lists_every_argument(ours: type, theirs: type) -> None:
    listed = inspect.signature(ours).parameters
    assert {*arguments_of(theirs)} <= {*listed}
    assert "ship_runtime" in listed
    assert not [p for p in listed.values() if p.kind is p.VAR_KEYWORD]
    own = list(inspect.signature(theirs).parameters)[:-1]
    assert list(listed)[: len(own)] == own, "by position as in the SDK"
    assert listed["max_run"].default == 24 * 60 * 60
    assert "instance_count" in pydoc.render_doc(ours)


@pytest.mark.parametrize(("ours", "theirs"), BOTH)
def test_type_checkers_know_them_too(ours: type, theirs: type) -> None:
    """An older SDK has fewer."""
    written = {name for name, p in inspect.signature(ours).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert {*arguments_of(theirs)} - written <= SDKArguments.__annotations__.keys()


def test_they_are_those_of_the_newest_sdk() -> None:
    import sagemaker

    if tuple(map(int, sagemaker.__version__.split(".")[:2])) < (2, 257):
        pytest.skip("an older SDK has fewer")
    known = {*arguments_of(PyTorch)} | {*arguments_of(HuggingFace)}
    assert SDKArguments.__annotations__.keys() <= known


def test_a_subclass_may_add_its_own(make: Any, script: Path, session: Any) -> None:
    class Mine(SMPEstimator):
        def __init__(self, *args: Any, mine: int = 1, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.mine = mine

    made = Mine("train.py", source_dir=str(script), sagemaker_session=session, mine=2)
    assert (made.mine, made.instance_type) == (2, "local")


def test_what_is_wrong_with_the_script_is_said_at_once_and_refused_later(
    make: Any, script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from smp_config import ConfigError

    with caplog.at_level(logging.WARNING):
        made = make(entry_point="trian.py")
    assert "did you mean 'train.py'" in caplog.text
    with pytest.raises(ConfigError, match="did you mean 'train.py'"):
        made.fit()


@pytest.mark.full
def test_a_partition_that_is_not_there(make: Any, script: Path, tmp_path: Path) -> None:
    """Where the ranks would look: the checkpoints of an earlier job, then the code."""
    import json

    from support.platform.jobs import model_parallel

    from smp_config import ConfigError

    def check(file: str, load: bool = True, **more: Any) -> None:
        parameters = {"partitions": 2, "partition_file": file, "load_partition": load}
        make(distribution=model_parallel(2, **parameters), **more)._check_code()

    with pytest.raises(ConfigError, match=r"'here.json' does not exist; looked for .*scripts/here.json: give the path"):
        check("here.json")
    check("here.json", load=False)
    (script / "here.json").write_text(json.dumps({"stages": 2, "modules": {}}))
    check("here.json")
    (script / "here.json").write_text(json.dumps({"stages": 4, "modules": {}}))
    with pytest.raises(ConfigError, match="is for 4 stages, but pipeline_parallel_degree is 2"):
        check("here.json")
    (script / "here.json").write_text("no JSON")
    with pytest.raises(ConfigError, match="is no partition that a job wrote"):
        check("here.json")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "there.json").write_text(json.dumps({"stages": 2, "modules": {}}))
    check("there.json", checkpoint_s3_uri=f"file://{kept}")
    with pytest.raises(ConfigError, match="and .*train.py is no directory"):
        check(str(script / "train.py" / "x.json"), load=False)
