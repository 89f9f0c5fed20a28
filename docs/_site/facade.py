"""What griffe, which reads code without running it, cannot see: functions that the façade calls with the current session.

And what its pages would show as it stands: roles of Sphinx, by which docstrings name what they mean.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_HOME = "smdistributed.modelparallel.torch.checkpoint"
_WRAPPER = "_of_current_session"
#: A section, where griffe reads a remark.
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc|obj):`~?([^`]+)`")


class SessionFunctions(griffe.Extension):
    """Shows ``save_checkpoint = _of_current_session(module.save_checkpoint)`` as the function that it is, without its session."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Replace the attributes when the package is read."""
        if pkg.path != _HOME.partition(".")[0]:
            return
        module = pkg[_HOME.partition(".")[2]]
        for name, member in list(module.members.items()):
            value = None if member.is_alias else getattr(member, "value", None)
            if not isinstance(value, griffe.ExprCall) or str(value.function) != _WRAPPER:
                continue
            alias, _, function = str(value.arguments[0]).partition(".")
            target = module.members[alias].target_path
            loader.load(target.partition(".")[0])
            found = loader.modules_collection[f"{target}.{function}"]
            shown = griffe.Function(
                name,
                parameters=griffe.Parameters(*list(found.parameters)[1:]),
                returns=found.returns,
                docstring=found.docstring,
                parent=module,
            )
            module.set_member(name, shown)


class PlainNames(griffe.Extension):
    """Shows ``:class:`StepOutput` `` in a docstring as the name alone, and its example as code."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the docstrings of a package when it is read."""
        _plainly(pkg)


def _plainly(owner: griffe.Object) -> None:
    if owner.docstring is not None:
        owner.docstring.value = _EXAMPLE.sub(r"\1Examples:", _ROLE.sub(r"`\1`", owner.docstring.value))
    for member in owner.members.values():
        if not member.is_alias:
            _plainly(member)
