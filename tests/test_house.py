"""The structure of the repository: import rules, sizes of files and folders, names, docstrings, the public surface."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.import_graph import PACKAGES, ROOT, files_of, imported_names, nodes, parse

#: What each package may import of the others.
MAY_IMPORT = {
    "smp_config": set(),
    "smp_records": {"smp_config"},
    "smp_launch": {"smp_config", "smp_records"},
    "smp_estimator": {"smp_launch", "smp_config", "smp_records"},
    "smp_emulation": {"smp_config", "smp_records"},
    "smp_runtime": {"smp_config", "smp_emulation", "smp_records"},
    "smp_integrations": {"smp_config", "smp_records", "smp_runtime"},
    "smp_tools": {"smp_config", "smp_emulation", "smp_records", "smp_runtime"},
    "smp_version2": {"smp_config", "smp_records", "smp_runtime", "smp_tools"},
    "torch_sagemaker": {"smp_config", "smp_runtime", "smp_version2"},
    "smp_transformer_engine": {"smp_runtime", "smp_version2"},
    "smdistributed": {"smp_config", "smp_integrations", "smp_records", "smp_runtime", "smp_tools"},
}
#: Files that reach further, and only inside functions: commands that import the runtime when they run.
COMMANDS = {
    ROOT / "smp_estimator" / "cli" / "commands" / "checkpoint.py": {"smp_runtime", "smp_version2"},
    ROOT / "smp_estimator" / "cli" / "commands" / "numerics.py": {"smp_runtime", "smp_tools"},
}
#: Packages of others that must not be needed there.
FORBIDDEN = {
    "smp_config": {"torch", "sagemaker", "boto3", "numpy"},
    "smp_records": {"torch", "sagemaker", "boto3", "numpy"},
    "smp_launch": {"torch", "sagemaker", "boto3", "numpy"},
    "smp_estimator": {"torch"},
    "smp_emulation": {"sagemaker", "boto3"},
    "smp_runtime": {"sagemaker", "boto3"},
    "smp_tools": {"sagemaker", "boto3"},
    "smp_version2": {"sagemaker"},
    "torch_sagemaker": {"boto3"},
    "smp_transformer_engine": {"sagemaker", "boto3"},
    "smp_integrations": {"sagemaker", "boto3"},
    "smdistributed": {"sagemaker", "boto3"},
}
#: The layers of smp_runtime, the lowest first; a package imports only packages of lower layers.
LAYERS = [
    {"errors"},
    {"tensors"},
    {"comm", "microbatch_state", "parameters"},
    {"fp8", "pipeline", "smddp"},
    {"job"},
    {"activations", "context", "data", "data_parallel", "sharding", "step", "tensor_parallel"},
    {"nn", "optim"},
    {"module_conversion"},
    {"model"},
    {"checkpoint", "generation"},
    {"preemption"},
    {"reshape"},
    {"wrapped_model"},
]
#: They know nothing of one another: what one needs of another is a protocol, or is passed in by the model's recipe.
STRATEGIES = {"activations", "context", "data_parallel", "pipeline", "sharding", "tensor_parallel"}
#: Files of smp_runtime that may ask for the session of the process: what a script calls or creates itself.
TOUCHED_BY_SCRIPTS = {
    "activations/activations.py",
    "activations/marking.py",
    "activations/regions.py",
    "checkpoint/export.py",
    "data/loader.py",
    "data/position.py",
    "generation/generate.py",
    "job/older_names.py",
    "model/creation.py",
    "model/distributed_model.py",
    "nn/distributed_module.py",
    "optim/distributed_optimizer.py",
    "optim/grad_scaler.py",
    "module_conversion/huggingface/translation.py",
    "module_conversion/parameter_layout.py",
    "step/step.py",
}
#: Public names that two versions of a library need: of the SageMaker SDK, and of Lightning's Fabric and Trainer.
PUBLIC_TWICE = {"ContainerJobFailed", "ModelParallel", "SMPStrategy"}
#: Files of a folder, at most: more files than a newcomer can take in at a glance are two packages.
MOST_FILES = 15


def _module(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("container.").removesuffix(".__init__")


@functools.cache
def _graph():
    """By file, the other files of the project that it imports."""
    files = {_module(path): path for package in PACKAGES for path in files_of(package)}
    graph = {}
    for module, path in files.items():
        found = set(imported_names(path))
        # "from package import file" names both; it is the file that is imported.
        named = {name for name in found if name in files}
        packages = {name for name in named if any(other.startswith(f"{name}.") for other in named)}
        graph[module] = named - packages - {module}
    return graph


def _packages():
    """By package of smp_runtime, those that its files import, and one of these imports for each."""
    packages = {}
    for module, imported in _graph().items():
        if module.startswith("smp_runtime."):
            package = module.split(".")[1]
            for name in imported:
                other = name.split(".")[1:2]
                if name.startswith("smp_runtime.") and other and other[0] != package:
                    packages.setdefault(package, {})[other[0]] = f"{module} imports {name}"
    return packages


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_only_go_down(package):
    for path in files_of(package):
        for name in imported_names(path):
            top = name.split(".")[0]
            if top in PACKAGES and top != package:
                allowed = MAY_IMPORT[package] | COMMANDS.get(path, set())
                assert top in allowed, f"{path.relative_to(ROOT)} imports {name}"
            assert top not in FORBIDDEN[package], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("path", COMMANDS)
def test_commands_import_the_runtime_only_when_they_run(path):
    for node in parse(path).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            assert not any(name.split(".")[0] in COMMANDS[path] for name in names), ast.unparse(node)


def test_no_files_import_one_another_in_a_circle():
    list(graphlib.TopologicalSorter(_graph()).static_order())  # raises CycleError, which names them


def _parts():
    """By package, the modules and folders of it that each of its own imports, and one of these imports for each pair."""
    graph = _graph()
    folders = {name.rpartition(".")[0] for name in graph} | {""}
    for folder in folders | {name.rpartition(".")[0] for name in folders}:
        inside = f"{folder}." if folder else ""
        parts = {}
        for module, imported in graph.items():
            part = module.removeprefix(inside).split(".")[0]
            if module.startswith(inside) and module != folder:
                for name in imported:
                    other = name.removeprefix(inside).split(".")[0]
                    if name.startswith(inside) and other != part:
                        parts.setdefault(part, {})[other] = f"{module} imports {name}"
        yield folder, parts


def test_no_parts_of_a_package_import_one_another_in_a_circle():
    for folder, parts in _parts():
        try:
            list(graphlib.TopologicalSorter(parts).static_order())
        except graphlib.CycleError as err:
            circle = err.args[1][::-1]
            steps = [parts[a][b] for a, b in itertools.pairwise(circle)]
            raise AssertionError(f"in {folder or 'the project'}: {'; '.join(steps)}") from err


def test_every_package_is_known_as_own():
    from smp_estimator.cloud.entry import PACKAGES as TRAVELLING
    from smp_records.script_lines import is_ours, is_runtime_module

    assert [package for package, folder in PACKAGES.items() if not is_ours(str(folder / "x.py"))] == []
    runtime = {package for package in PACKAGES if is_runtime_module(f"{package}.x")}
    assert runtime == {
        "smdistributed",
        "smp_integrations",
        "smp_runtime",
        "smp_tools",
        "smp_transformer_engine",
        "smp_version2",
        "torch_sagemaker",
    }
    assert set(TRAVELLING) == PACKAGES.keys() - {"smp_estimator"}


def test_the_layers_of_the_runtime():
    layer_of = {package: level for level, packages in enumerate(LAYERS) for package in packages}
    folder = PACKAGES["smp_runtime"]
    packages = {path.relative_to(folder).parts[0].removesuffix(".py") for path in files_of("smp_runtime")}
    assert layer_of.keys() == packages - {"__init__"}
    for package, others in _packages().items():
        for other, where in others.items():
            assert layer_of[other] < layer_of[package], where


def test_the_layers_of_the_page():
    rows = re.findall(r"^\| (\d+) \| (`[^|]*) \|", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.M)
    layers = {int(level): set(re.findall(r"`(\w+)(?:/|\.py)`", names)) for level, names in rows}
    assert layers == dict(enumerate(LAYERS, start=1))


def test_whoever_wraps_a_model_loads_what_waits_for_it():
    """Generation, adapters and saving in Transformers' format are there for scripts that never name ``smp.DistributedModel``."""
    wrapping = {p for p in files_of("smp_integrations") if re.search(r"(= |return )DistributedModel\(", p.read_text())}
    assert {path.name for path in wrapping} >= {"trainer.py", "accelerator.py"}
    for path in wrapping:
        assert "from smp_runtime.wrapped_model import DistributedModel" in path.read_text(), path


def test_strategies_know_nothing_of_one_another():
    for package, others in _packages().items():
        if package in STRATEGIES:
            for other in others.keys() & STRATEGIES:
                raise AssertionError(others[other])


def test_the_session_is_asked_for_by_what_scripts_touch():
    folder = PACKAGES["smp_runtime"]
    asking = {
        str(path.relative_to(folder))
        for path in files_of("smp_runtime")
        if re.search(
            r"\bsessions?\.(current_session|is_initialized|is_tracing)\(|session import .*\bcurrent_session\b",
            path.read_text(),
        )
    }
    assert asking == TOUCHED_BY_SCRIPTS


def test_strategies_take_the_record_of_ranks_and_no_session():
    for module, imported in _graph().items():
        parts = module.split(".")
        if parts[0] == "smp_runtime" and len(parts) > 1 and parts[1] in STRATEGIES - {"activations"}:
            assert "smp_runtime.job.session" not in imported, module


def test_folders_can_be_taken_in_at_a_glance():
    folders = {path.parent for package in PACKAGES for path in files_of(package)}
    for folder in folders | {path.parent for path in (ROOT / "benchmarks").rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder.relative_to(ROOT)


def test_the_recipe_fits_a_page():
    assert len((PACKAGES["smp_runtime"] / "model" / "recipe.py").read_text().splitlines()) <= 60


def test_a_class_name_means_one_thing():
    homes = {}
    for package in PACKAGES:
        for path in files_of(package):
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name for name, places in homes.items() if len(places) > 1} == PUBLIC_TWICE, homes


#: A docstring that begins with one of them begins with no verb.
_NO_VERBS = """
    A All An And Any Are As At Both By Each Every For From How If In Inside Is It Its Likewise No None Number Of On One Or Same Some
    That The Their These They This Those To What When Where Whether Which Who Whom Whose With
""".split()
_DIALECT = re.compile(r"\b(?:nobody|somebody|everybody|of whom)\b", re.IGNORECASE)


def test_docstrings_of_functions_begin_with_a_verb():
    for package in PACKAGES:
        for path in files_of(package):
            for node in nodes(path):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                    first = re.match(r"\W*(\w*)", text)[1]
                    assert first not in _NO_VERBS, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {text[:60]}"


def test_docstrings_are_plain():
    for package in PACKAGES:
        for path in files_of(package):
            for node in nodes(path):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    found = _DIALECT.search(ast.get_docstring(node) or "")
                    assert not found, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} has {found[0]!r}"


def test_no_file_is_too_long_to_read():
    of_packages = (path for package in PACKAGES for path in files_of(package))
    for path in (*of_packages, *(ROOT / "tests").rglob("*.py")):
        assert len(path.read_text().splitlines()) <= 500, path.relative_to(ROOT)


def _files_with(is_found, packages=PACKAGES):
    """Return the files of packages with a node of that kind."""
    paths = [path for package in packages for path in files_of(package)]
    return {str(path.relative_to(ROOT)) for path in paths if any(map(is_found, nodes(path)))}


def test_a_schedule_is_named_in_two_files():
    from smp_config.schedules import SCHEDULES

    names = set(SCHEDULES) - {"simple"}
    found = _files_with(lambda node: isinstance(node, ast.Constant) and node.value in names)
    assert found == {"container/smp_config/schedules.py", "container/smp_runtime/pipeline/schedule/policies.py"}


def test_a_backend_of_collectives_is_named_in_two_files():
    from smp_config.machine.collective_backends import TRAITS

    passed = set()  # groups for objects in host memory have the same backend in every job

    def is_named(node):
        passed.update(id(word.value) for word in getattr(node, "keywords", ()) if word.arg == "backend")
        is_of_list = getattr(node, "module", "") == "smp_config.machine.collective_backends"
        imported = {alias.name.lower() for alias in node.names} if is_of_list else set()
        is_name = isinstance(node, ast.Constant) and node.value in TRAITS and id(node) not in passed
        return is_name or bool(imported & TRAITS.keys())

    of_nccl_itself = {"container/smp_config/machine/shared_gpu.py"}  # a variable for tests of NCCL
    of_smddp_itself = {"container/smp_config/smddp.py"}
    found = _files_with(is_named, PACKAGES.keys() - {"smp_emulation"})  # it stands in for NCCL
    assert found - of_nccl_itself - of_smddp_itself == {
        "container/smp_config/machine/collective_backends.py",
        "container/smp_runtime/job/backend_implementations.py",
    }


def test_a_launcher_is_named_in_two_files():
    from smp_config.machine.launchers import TRAITS

    of_pytorch = {"", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}  # scripts read them under any launcher
    used = {name for traits in TRAITS.values() for name in (*traits.place, traits.local_rank, traits.local_size)}

    def is_named(node):
        is_member = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("Launcher", "LauncherKind")
        return is_member or (isinstance(node, ast.Constant) and node.value in used - of_pytorch)

    # The platform's jobs run under mpirun, and what a stock image starts can import nothing yet.
    of_mpirun = {"container/smp_launch/ranks/rank.py", "smp_estimator/cloud/entry.py"}
    assert _files_with(is_named) - of_mpirun == {
        "container/smp_config/machine/launchers.py",
        "container/smp_launch/anywhere/detect_launcher.py",
    }


def test_the_facade_holds_no_logic():
    for path in files_of("smdistributed"):
        for node in nodes(path):
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
                assert not isinstance(node, ast.If | ast.For | ast.While | ast.Try), path.relative_to(ROOT)


def _written_names(path):
    """Of a package whose names load later: by name, the module that type checkers read; and ``__all__``."""
    typed, listed = {}, []
    for node in parse(path).body:
        if isinstance(node, ast.If):
            typed |= {alias.name: each.module for each in node.body for alias in each.names}
        elif isinstance(node, ast.ImportFrom) and node.module != "typing":
            typed |= {alias.name: node.module for alias in node.names if not alias.asname}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
    return typed, listed


@pytest.mark.parametrize("package", ["smp_config", "smdistributed.modelparallel.torch"])
def test_names_that_load_later_are_those_of_type_checkers(package):
    typed, listed = _written_names(PACKAGES[package.split(".")[0]].joinpath(*package.split(".")[1:], "__init__.py"))
    loaded = importlib.import_module(package)
    assert sorted(typed.keys() - {"lazy_names"}) == sorted(listed)
    for name in listed:
        assert getattr(loaded, name) is getattr(importlib.import_module(typed[name]), name), name
    assert set(listed) <= set(dir(loaded))


def test_what_scripts_import_loads_little_beside_pytorch():
    most = {"smdistributed.modelparallel.torch": 96, "smp_config": 2, "smp_runtime.step.step": 96}
    code = (
        "import importlib, os, sys, torch\n"
        "before = set(sys.modules)\n"
        "for module in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"  # each from PyTorch alone
        "        importlib.import_module(module)\n"
        "        new = set(sys.modules) - before\n"
        "        print(module, len(new), *(m for m in ('pydantic', 'torch._dynamo', 'sympy') if m in new), flush=True)\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0\n"
    )
    said = subprocess.run([sys.executable, "-c", code, *most], capture_output=True, text=True, check=True).stdout
    found = {module: (int(count), heavy) for module, count, *heavy in map(str.split, said.splitlines())}
    assert found.keys() == most.keys()
    for module, (count, heavy) in found.items():
        assert count <= most[module], f"{module} loads {count} modules"
        assert heavy == []


def test_the_estimator_imports_fast_and_without_heavy_packages():
    code = "import smp_estimator, sys; print([m for m in ('torch', 'sagemaker', 'boto3', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


def test_the_public_surface_is_frozen():
    import smdistributed.modelparallel.torch as smp

    expected = """
        CommGroup DP_GROUP DistributedModel DistributedOptimizer MP_GROUP PP_GROUP RDP_GROUP RankType StepOutput
        TP_GROUP WORLD __version__ allgather amp auto_resume barrier broadcast comm comm_hooks compile
        cp_process_group cp_rank cp_size data
        delay_param_initialization dp_barrier
        dp_rank dp_size exceptions get_cp_group get_cp_process_group
        get_dp_group get_dp_process_group get_mp_group get_mp_process_group get_pp_group
        get_pp_process_group get_rdp_group get_rdp_process_group get_tp_group get_tp_process_group
        get_world_process_group hvd_average_grads init is_initialized is_tracing load local_rank local_size log memory_checkpoint
        model model_creation mp_barrier mp_rank mp_size newest_memory_checkpoint nn optimizer optimizers partition patches
        pp_rank pp_size rank rdp_rank rdp_size
        record_numerics recv_from register_parameter reshape
        resume_from_checkpoint save save_checkpoint send set_activation_checkpointing set_partition set_tensor_parallelism
        shutdown size
        state step tensor_parallelism tp_rank tp_register tp_register_with_module tp_size utils
        wait_for_checkpoint weight_gradient_later
    """.split()
    assert sorted(smp.__all__) == sorted(expected)
    for name in expected:
        assert hasattr(smp, name), name
    assert smp.model.DistributedModel is smp.DistributedModel
    assert not smp.is_tracing()
    assert not hasattr(smp, "nothing_of_the_kind")
    assert "session" not in str(inspect.signature(smp.save_checkpoint))


def test_modules_that_the_training_toolkit_imports():
    import smdistributed.dataparallel.exceptions
    import smdistributed.modelparallel.backend.exceptions
    import smdistributed.modelparallel.torch.exceptions
    from smdistributed.modelparallel import __version__

    assert tuple(int(part) for part in __version__.split(".")[:2]) >= (1, 15)
    assert issubclass(smdistributed.modelparallel.torch.exceptions.SMPUserError, ValueError)


#: What each package of the pipeline may import of the others.
PIPELINE_PACKAGES = {
    "partition": set(),
    "schedule": set(),
    "transport": set(),
    "agreement": {"transport"},
    "program": {"transport"},
    "execution": {"agreement", "program", "schedule", "transport"},
    "observe": {"execution", "schedule"},
}


@pytest.mark.parametrize("package", PIPELINE_PACKAGES)
def test_the_packages_of_the_pipeline(package):
    for path in (PACKAGES["smp_runtime"] / "pipeline" / package).glob("*.py"):
        for node in nodes(path):  # imports for type checkers too
            parts = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
            if parts[:2] == ["smp_runtime", "pipeline"] and len(parts) > 2:
                assert parts[2] in {package} | PIPELINE_PACKAGES[package], (
                    f"{path.relative_to(ROOT)} imports {node.module}"
                )


def test_who_answers_a_module_is_written_in_one_place():
    for path in files_of("smp_runtime"):
        if path.name != "module_calls.py":
            assert '__dict__["_call_impl"]' not in path.read_text(), path.relative_to(ROOT)


@pytest.mark.parametrize(
    "name",
    [
        "docs/architecture.md",
        *(f"docs/internals/{page}.md" for page in ("gradients", "job", "patches", "pipeline", "terms", "walks")),
        "CONTRIBUTING.md",
    ],
)
def test_documents_name_files_that_are_there(name):
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a working copy of git")
    files = {f"/{file}" for file in listed.stdout.splitlines() if (ROOT / file).exists()}
    folders = {f"{parent}/" for file in files for parent in Path(file).parents}
    # Files of Python and folders anywhere, in pictures too; other files where they are marked as code.
    text = (ROOT / name).read_text()
    named = set(re.findall(r"(?<![\w/.:<$-])\.?\w[\w./-]*(?:\.py\b|/(?=[\s`|,;:.)]))", text))
    named |= set(re.findall(r"`(\.?\w[\w./-]*\.(?:md|toml|yaml))`", text))
    assert len(named) > 5
    for path in sorted(named):
        assert any(file.endswith(f"/{path}") for file in files | folders), f"{name} names {path}"
