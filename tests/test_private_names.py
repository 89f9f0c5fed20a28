"""Private names of PyTorch are used in one package, which has a fallback or an error for each."""

from __future__ import annotations

import ast

from support.import_graph import PACKAGES, ROOT, files_of, nodes

PRIVATE_NAMES = PACKAGES["smp_runtime"] / "tensors" / "torch_private"
#: Private names of others than PyTorch: of named tuples, the interpreter, NumPy.
OF_OTHERS = {"_getframe", "_replace", "_fields", "_exit", "_run_exitfuncs", "_reconstruct"}


def _is_private(name):
    return name.startswith("_") and not name.endswith("__")


def _uses_of_private_names(nodes):
    """Line, name, and whether it is PyTorch's for certain, of the private names of others in a file."""
    torches = {"torch"}
    for node in nodes:
        if isinstance(node, ast.Import):
            torches |= {alias.asname for alias in node.names if alias.name.startswith("torch.") and alias.asname}
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            torches |= {alias.asname or alias.name for alias in node.names}
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part, True) for part in parts if _is_private(part))
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and _is_private(node.attr)
            and ast.unparse(node.value) not in {"self", "cls"}
        ):
            yield node.lineno, node.attr, ast.unparse(node).split(".")[0] in torches


def _definitions(nodes):
    """Names that a file gives to something of its own."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def test_private_names_of_pytorch_are_used_in_one_package():
    import torch

    from smp_runtime.tensors.torch_private import IN_PLACE

    # The emulation takes the place of PyTorch's calls, private ones too.
    packages = PACKAGES.keys() - {"smp_emulation"}
    files = {path: nodes(path) for package in sorted(packages) for path in files_of(package)}
    inside = [path for path in files if path.parent == PRIVATE_NAMES]
    behind = {name for path in inside for _, name, _ in _uses_of_private_names(files.pop(path))}
    own = {name for content in files.values() for _, name in _definitions(content)}
    in_place = {name for names in IN_PLACE.values() for name in names}
    # What a class may override, and what is reached by its name.
    held = (torch.nn.Module(), torch.optim.Optimizer, torch.amp.GradScaler, torch.distributed.ProcessGroup)
    inherited = {name for each in held for name in dir(each) if _is_private(name)}
    for path, content in files.items():
        for line, name, is_certain in _uses_of_private_names(content):
            is_known = name in in_place or (name in own | OF_OTHERS and name not in behind and not is_certain)
            is_known |= "smp_integrations" in path.parts and not is_certain  # of the library that the file adapts
            assert is_known, (
                f"{path.relative_to(ROOT)}:{line} uses {name} of PyTorch: take it through {PRIVATE_NAMES.name}"
            )
        texts = [(n.lineno, n.value) for n in content if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        for line, name in (*texts, *_definitions(content)):
            is_known = name in in_place or name not in inherited
            assert is_known, (
                f"{path.relative_to(ROOT)}:{line} says {name}, a name of PyTorch: list it in {PRIVATE_NAMES.name}"
            )
