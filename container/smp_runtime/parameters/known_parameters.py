"""The parameters that a model had when it was laid out; training refuses later changes.

Each rank would train a later parameter by its own gradient: no rank averages this gradient, updates the parameter in
float32, shards its state or saves it. So a change is refused at the next training step or update. Modules are walked
only if PyTorch has called a registration hook for a module of the model, or if a module has more or fewer entries than
before, since hooks do not see deletions.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from torch import nn

#: Faster than a function of Python's, for all modules before each step.
_parameters_of = operator.attrgetter("_parameters")
_modules_of = operator.attrgetter("_modules")

#: Names that a message lists.
_LISTED = 4


class KnownParameters:
    """The parameters of a model, as the ranks and the optimizer know them.

    A parameter may get another name (``nn.utils.prune`` does that), and modules without parameters may come and go.

    Args:
        module: the script's.
        wrapper: has it as ``module``, and must get no other parameters.
    """

    def __init__(self, module: nn.Module, wrapper: nn.Module) -> None:
        self._module = module
        self._wrapper = weakref.ref(wrapper)  # which has this object in turn
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._parameters = list(module.parameters())  # held, so that their identities stay theirs
        self._trained = {id(parameter) for parameter in self._parameters if parameter.requires_grad}
        #: Frozen ones that came later, such as a teacher; they must stay frozen.
        self._frozen_later: dict[str, nn.Parameter] = {}
        self._is_changed = False
        self._note_modules()
        # PyTorch's registration hooks are global, and would keep the model for ever.
        weak = weakref.ref(self)

        def registered(changed: nn.Module, *_: Any) -> None:
            if (me := weak()) is not None:
                me.note(changed)

        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            weakref.finalize(self, register(registered).remove)

    def note(self, changed: nn.Module) -> None:
        """Note that a parameter or a module was registered in a module, of this model or of none."""
        self._is_changed = self._is_changed or id(changed) in self._watched

    def _note_modules(self) -> None:
        """Note the modules as they are."""
        self._modules = list(self._module.modules())
        self._watched = {id(self._wrapper()), *map(id, self._modules)}
        self._entries = self._count()
        self._is_changed = False

    def _count(self) -> int:
        """Return the number of entries of all modules: of parameters and of modules inside."""
        parameters = sum(map(len, map(_parameters_of, self._modules)))
        return parameters + sum(map(len, map(_modules_of, self._modules)))

    def check(self) -> None:
        """Refuse parameters that came or went since the model was laid out.

        Raises:
            SMPUserError: names them.
        """
        trained = _trained_names(self._frozen_later)
        if trained:
            self._refuse(trained[:1], [])
        if not self._is_changed and self._count() == self._entries:
            return
        later, removed = self._differences()
        added = _trained_names(later)
        if added or removed:
            self._refuse(added, removed)
        self._frozen_later = later
        self._note_modules()

    def _differences(self) -> tuple[dict[str, nn.Parameter], list[str]]:
        """Return the parameters that have come since, and the names of trained ones that have left."""
        left = dict(self._names)
        later = {}
        for name, parameter in self._present():
            key = id(parameter)
            left.pop(key, None)
            if key not in self._names:
                later[key] = name, parameter
        removed = [name for key, name in left.items() if key in self._trained]
        return dict(later.values()), removed

    def _present(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters as they are now, with names; also those that a script has set on the wrapper."""
        yield from self._module.named_parameters()
        wrapper = self._wrapper()
        if wrapper is None:
            return
        yield from ((name, p) for name, p in _parameters_of(wrapper).items() if p is not None)
        for name, child in wrapper.named_children():
            if name != "module":  # the script's, or for a while a whole copy of it
                yield from child.named_parameters(name)

    def _refuse(self, added: Sequence[str], removed: Sequence[str]) -> None:
        replaced = [name for name in added if name in removed]
        changes = {
            "replaced": replaced,
            "added": [name for name in added if name not in replaced],
            "removed": [name for name in removed if name not in replaced],
        }
        done = "; ".join(f"{_listed(names)} {_was(names)} {how}" for how, names in changes.items() if names)
        raise SMPUserError(
            f"{done} after smp.DistributedModel had laid out the model's {len(self._names)} parameters over the ranks: nothing "
            "averages the gradients of a new parameter, and optimizer and checkpoints know the former ones; change the model "
            "before smp.DistributedModel. To go on with a changed model, save model.state_dict(), load it into the changed module "
            "and wrap that",
            code="SMP303",
        )


def _trained_names(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    return [name for name, parameter in parameters.items() if parameter.requires_grad]


def _listed(names: Iterable[str]) -> str:
    """Join the first names, with the number of the others."""
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _was(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"
