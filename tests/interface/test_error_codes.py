"""Every error that a user can meet has a code, every code a section, and both reach whoever reads the message."""

from __future__ import annotations

import ast
import functools
import pickle
import re
import sys
import traceback
from pathlib import Path

import pytest
import torch
from support.documents import error_code_page
from support.import_graph import nodes
from support.platform.command_line import call, flat

from smp_config import ConfigError, Topology
from smp_config.error_codes import FAMILIES, Coded, append_code, catalogue, code_of
from smp_estimator.cloud import entry
from smp_launch.failures import known_mistakes
from smp_launch.failures.failure import FailureCollector
from smp_records.records import FailureRecord
from smp_runtime.errors import DeadlineError, SMPUserError
from smp_runtime.step.microbatches import StepOutput

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "smp_estimator", *(ROOT / "container").glob("smp_*")]


def _module(path: Path) -> str:
    base = ROOT if path.is_relative_to(ROOT / "smp_estimator") else ROOT / "container"
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _trees() -> dict[str, list[ast.AST]]:
    """What each module's code is made of; read when a test asks, since every worker collects this file."""
    return {_module(path): nodes(path) for folder in FOLDERS for path in sorted(folder.rglob("*.py"))}


@functools.cache
def _classes() -> dict[str, type]:
    """Stand-ins of the classes of errors with codes, by name and with their ancestors: importing all of them takes long."""
    found: dict[str, type] = {"Coded": Coded}
    defined = [
        (node.name, [ast.unparse(base) for base in node.bases], _own_code(node))
        for nodes in _trees().values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    ]
    while True:
        more = {
            name: type(name, tuple(found[base] for base in bases if base in found), code)
            for name, bases, code in defined
            if name not in found and found.keys() & set(bases)
        }
        if not more:
            return found
        found |= more


def _own_code(node: ast.ClassDef) -> dict[str, str]:
    """Return the code that a class names for its errors, as an attribute."""
    for each in node.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "code":
            return {"code": ast.literal_eval(each.value)}
    return {}


@functools.cache
def _made() -> list[tuple[str, str | None]]:
    """Place and code of each error with a code that the library makes; those that reword another one take that one's."""
    made = []
    for module, tree in _trees().items():
        rewording = {
            id(node.value) for node in tree if isinstance(node, ast.Attribute) and node.attr == "of_the_kind_of"
        }
        for node in tree:
            if not isinstance(node, ast.Call) or id(node) in rewording:
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            name = node.func.attr if isinstance(node.func, ast.Attribute) else name
            if name in _classes() and name != "Coded":
                written = [each.value for each in node.keywords if each.arg == "code"]
                code = ast.literal_eval(written[0]) if written else _classes()[name].code  # type: ignore[attr-defined]
                made.append((f"{module}:{node.lineno} {name}", code))
    return made


def test_every_class_of_errors_is_known() -> None:
    assert _classes().keys() >= {
        "ConfigError",
        "LaunchError",
        "SMPUserError",
        "CheckpointError",
        "StageError",
        "SDKMissing",
    }
    assert len(_made()) > 500


#: Built-in errors that begin in these modules never reach a user as they are, or must be those of Python or PyTorch.
_INSIDE = {
    "readers, whose callers name the file or the setting and raise an error with a code": """
        smp_config.formats.numbers_given smp_records.numerics smp_config.parameters smp_config.formats.strict_json
        smp_records.timeline smp_config.version2.parameters
        smp_estimator.cloud.entry smp_estimator.timeline.profiles
        smp_estimator.timeline.files smp_launch.sagemaker.platform_files smp_launch.ranks.messages
        smp_runtime.checkpoint.files.archive_checksums smp_runtime.checkpoint.files.manifest
        smp_runtime.checkpoint.files.records smp_runtime.checkpoint.full.flat_groups smp_runtime.checkpoint.full.full_manifest
        smp_runtime.checkpoint.full_transaction
        smp_runtime.checkpoint.memory.host_folder
        smp_runtime.checkpoint.memory.newest smp_runtime.comm.plain_data smp_version2.checkpoint.s3_filesystem""",
    "what PyTorch says on a machine with GPUs, word for word": """
        smp_emulation.checked.communicators smp_emulation.checked.streams.device smp_emulation.checked.streams.streams
        smp_emulation.checked.tensors smp_emulation.devices smp_emulation.covered.memory smp_emulation.covered.ordering
        smp_emulation.gpu_model.memory_calls""",
    "what Python says of a name that a module or an object does not have": """
        smp_estimator smp_estimator.local smp_estimator.local.client smp_estimator.model_trainer
        smp_version2.eight_bits.names smp_version2.state""",
    "a name that a package does not have, as Python says it": "smp_config.lazy_names",
    "what gloo says of a collective that others have left, word for word": "smp_runtime.comm.host.shared_memory",
}
_BUILT_IN = set(
    """ArithmeticError AttributeError Exception FileNotFoundError ImportError IndexError KeyError LookupError NotImplementedError
    OSError PermissionError RuntimeError TimeoutError TypeError ValueError""".split()
)


def test_errors_without_a_code_stay_inside() -> None:
    """A sentence for a user is never that of a built-in class; those of ``__getattr__`` and of methods to override have none."""
    plain = {
        module
        for module, nodes in _trees().items()
        for node in nodes
        if isinstance(node, ast.Raise) and isinstance(call := node.exc, ast.Call)
        if ast.unparse(call.func) in _BUILT_IN and not all(isinstance(word, ast.Name) for word in call.args)
    }
    assert plain == {module for modules in _INSIDE.values() for module in modules.split()}


def test_errors_of_an_image_without_the_runtime_say_their_code() -> None:
    assert str(entry.ImageError("the image has no PyTorch")).endswith(" [SMP206]")
    assert "SMP206" in catalogue()


def test_every_error_that_is_made_has_a_code() -> None:
    without = [place for place, code in _made() if code not in catalogue()]
    assert not without, 'name a code of container/smp_config/data/error_codes.json: ConfigError("…", code="SMP101")'


def test_every_code_is_that_of_an_error() -> None:
    met = {code for _, code in _made()} | {kind.code for kind in _classes().values()}  # type: ignore[attr-defined]
    met.add("SMP206")  # of a class that cannot import what gives codes
    met.add(known_mistakes.JOB_LACKS)  # of Python's own errors
    assert catalogue().keys() - met == set()


def test_every_code_has_a_section_with_cause_and_cure() -> None:
    text = error_code_page.PAGE.read_text(encoding="utf-8")
    assert text == error_code_page.page(), "write it anew: python tests/support/documents/error_code_page.py"
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == list(catalogue())
    for row in catalogue().values():
        assert re.fullmatch(r"SMP\d{3}", row.code)
        assert row.code[3] in FAMILIES
        assert row.cause.endswith(".")
        assert row.cure.endswith(".")
        page, _, anchor = row.page.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, row.page


# -- where it is seen ----------------------------------------------------------------------------------------


def test_the_code_is_the_one_that_was_named() -> None:
    with pytest.raises(ConfigError) as raised:
        Topology(8, pipeline=3)
    assert code_of(raised.value) == "SMP102"
    assert str(raised.value).endswith("whose product divides 8"), "the message stays as it was written"
    assert append_code(str(raised.value), raised.value).endswith("divides 8 [SMP102]")
    assert code_of(pickle.loads(pickle.dumps(raised.value))) == "SMP102"
    reworded = ConfigError("in other words").of_the_kind_of(raised.value)
    assert code_of(reworded) == "SMP102"
    assert code_of(ValueError("of a script")) is None
    assert code_of(DeadlineError("too long")) == "SMP501"
    assert code_of(SMPUserError("raised by no part of the library")) is None
    assert code_of(DeadlineError("too long, and known better", code="SMP504")) == "SMP504"


def test_errors_that_python_expects_have_codes_too() -> None:
    several = StepOutput([torch.zeros(()), torch.ones(())])
    with pytest.raises(TypeError, match="reduce_mean") as raised:
        float(several)
    assert code_of(raised.value) == "SMP302"
    with pytest.raises(AttributeError) as missing:
        several.item()
    assert code_of(missing.value) == "SMP302"
    assert not hasattr(several, "item")


def test_a_class_whose_constructor_is_another_s_has_its_code() -> None:
    from smp_estimator.local.client import NotOnThisMachine

    assert code_of(NotOnThisMachine("no such call")) == "SMP115"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tracebacks show notes from Python 3.11 on")
def test_a_traceback_shows_it() -> None:
    try:
        Topology(8, pipeline=3)
    except Coded as error:
        last = traceback.format_exception(error)[-1]
    assert last.strip() == "[SMP102] Degrees that do not fit the processes: smp-estimator explain SMP102"


def test_the_command_line_shows_it() -> None:
    assert flat(call("topology", "--world", "8", "--pp", "3", code=1)).endswith("whose product divides 8 [SMP102]")
    # Said in the words of the command line, with the code of what was said first.
    assert flat(call("plan", "nothing-of-the-kind", code=1)).endswith("[SMP110]")


@pytest.mark.parametrize("length", [10, 10_000])
def test_the_reason_of_a_failed_job_shows_it(length: int) -> None:
    error = DeadlineError("a " * length)
    collector = FailureCollector(lambda rank: f"algo-{rank + 1}")
    collector.records.append(FailureRecord.of(1, "algo-2", error, "Traceback"))
    headline = collector.first_cause(1).headline
    assert headline.startswith("rank 1 (algo-2): DeadlineError: a a")
    assert headline.endswith(" [SMP501]"), "also where the message is cut"
    assert len(headline) <= 640
    plain = FailureRecord.of(1, "algo-2", KeyError("x"), "Traceback")
    assert plain.code == ""


@pytest.mark.parametrize("given", ["SMP501", "smp501", "501", "[SMP501]"])
def test_a_code_is_explained(given: str) -> None:
    said = flat(call("explain", given))
    row = catalogue()["SMP501"]
    assert said.startswith(f"SMP501 {row.title}")
    assert row.cause in said
    assert row.cure in said


def test_all_codes_are_listed() -> None:
    said = call("explain").output
    assert all(f"{row.code}  {row.title}" in said for row in catalogue().values())
    assert "did you mean 'SMP501'" in flat(call("explain", "SMP51", code=1))
