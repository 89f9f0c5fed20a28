"""Registrations: the distributed module for each ordinary one, and the translation of their interfaces."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.torch_private import without_modes

if TYPE_CHECKING:
    from smp_runtime.job.module_manager import Translate

#: Arguments of a call: positional ones, and keywords.
Arguments = tuple[Any, Mapping[str, Any]]
_GIVEN = "_smp_arguments"


@dataclass(frozen=True)
class Registration:
    """The way in which one class of modules is distributed.

    Attributes:
        dist_module: the distributed class.
        init_hook: from the original's constructor arguments to the distributed one's.
        forward_hook: likewise for ``forward``.
        return_hook: from what the distributed module returns to what the original would.
        arguments: the constructor arguments of an instance; default: those it was made with.
        is_whole_model: modules inside it are never meant to be distributed on their own.
        only_if: name of a switch that the scope must turn on.
        translations: of a model's state to the original's names, and back.
        state_hook: from a state of the original to one of the distributed module.
        shares_weights: whether others that share weights with an instance are replaced with it, and share those of
            the distributed modules.
        was_initialised: whether an instance has initialized or loaded weights; default: it has.
    """

    dist_module: Any
    init_hook: Callable[..., Any] | None = None
    forward_hook: Callable[..., Any] | None = None
    return_hook: Callable[..., Any] | None = None
    arguments: Callable[[Any], Arguments] | None = None
    is_whole_model: bool = False
    only_if: str | None = None
    translations: tuple[Translate, Translate] | None = None
    state_hook: Translate | None = None
    shares_weights: bool = False
    was_initialised: Callable[[nn.Module], bool] = lambda original: True

    @property
    def to_ours(self) -> Translate | None:
        """Return the translation of the original's state to the distributed module's; None means the same names."""
        return self.translations[1] if self.translations is not None else self.state_hook

    def distributed(
        self, original: nn.Module, overrides: Mapping[str, Any], automatic: Mapping[str, Any] | None = None
    ) -> nn.Module:
        """Create a distributed module like ``original``.

        Args:
            overrides: take precedence over its own arguments.
            automatic: used if neither has a value.
        """
        with without_modes():  # hooks may compute with tensors, even if the creation is deferred
            args, kwargs = self.arguments(original) if self.arguments is not None else original.__dict__[_GIVEN]
            if self.init_hook is not None:
                args, kwargs = _pair("init_hook", self.init_hook(*args, **kwargs))
        signature = inspect.signature(self.dist_module)
        try:
            settings = dict(signature.bind_partial(*args).arguments)
        except TypeError as error:
            raise SMPUserError(
                f"{self.dist_module.__name__} cannot be made with the arguments {args!r} of {type(original).__name__} "
                f"({error}); register it with an init_hook that translates them",
                code="SMP307",
            ) from None
        taken = arguments_of(self.dist_module)
        settings |= {**kwargs, **{name: value for name, value in overrides.items() if name in taken}}
        settings = {name: value for name, value in (automatic or {}).items() if name in taken} | settings
        made = self.dist_module(**settings)
        self._adapt(made)
        return made

    def _adapt(self, made: nn.Module) -> None:
        """Give the distributed module the original's interface."""
        translate_inputs, translate_result = self.forward_hook, self.return_hook
        if translate_inputs is not None:

            def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
                args, kwargs = _pair("forward_hook", translate_inputs(*args, **kwargs))
                return tuple(args), dict(kwargs)

            made.register_forward_pre_hook(before, with_kwargs=True)
        if translate_result is not None:

            def behind(_: nn.Module, args: Any, result: Any) -> Any:
                return translate_result(result)

            made.register_forward_hook(behind)

    def __post_init__(self) -> None:
        # A hook of the library brings along what else it knows of the class.
        for name in ("arguments", "state_hook"):
            if getattr(self, name, None) is None:
                object.__setattr__(self, name, getattr(self.init_hook, name, None))


#: Registrations by the class that they replace.
_by_class: dict[type, Registration] = {}
#: Classes of packages that may not be installed: the full name of the class, and of a function that registers it.
_by_name: dict[str, str] = {}


def tp_register(
    dist_module: type,
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
    state_hook: Translate | None = None,
) -> Callable[[type], type]:
    """Return a decorator that registers ``dist_module`` as the distributed form of a class.

    Args:
        dist_module: a subclass of ``smp.nn.DistributedModule``.
        init_hook: from the arguments of the original's ``__init__`` (without self) to ``(args, kwargs)`` of
            ``dist_module``'s.
        forward_hook: likewise for ``forward``.
        return_hook: from what ``dist_module`` returns to what the original would.
        state_hook: from a ``state_dict`` of the original to a whole one of ``dist_module``, so that the weights stay.
            Needed if names or shapes differ; without it such a module gets new weights, with a warning.

    Returns:
        The decorator, which returns the class unchanged.

    Raises:
        SMPUserError: ``dist_module`` is no such subclass, or a hook cannot be called.

    Example:
        >>> @smp.tp_register(smp.nn.DistributedLinear)
        ... class Projection(nn.Linear):
        ...     pass
    """

    def mark(module_cls: type) -> type:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook, state_hook)
        return module_cls

    return mark


def tp_register_with_module(
    module_cls: type,
    dist_module: type,
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
    state_hook: Translate | None = None,
) -> None:
    """Register ``dist_module`` as the distributed form of ``module_cls``.

    For a class of your own use :func:`tp_register`. Call it before the modules are created, since their arguments
    are recorded then.

    Args:
        module_cls: class; its instances are replaced.
        dist_module: subclass of ``smp.nn.DistributedModule``.
        init_hook: from the original's constructor arguments to ``(args, kwargs)`` of the distributed one's.
        forward_hook: likewise for ``forward``.
        return_hook: from what the distributed module returns to what the original would.
        state_hook: from a state of the original to one of the distributed module.

    Raises:
        SMPUserError: a class that is none of these, or a hook that cannot be called.

    Example:
        >>> class TheirLinear(nn.Linear):
        ...     pass
        >>> smp.tp_register_with_module(TheirLinear, smp.nn.DistributedLinear)
    """
    from smp_runtime.nn.distributed_module import DistributedModule

    for what, given, base in (("module_cls", module_cls, nn.Module), ("dist_module", dist_module, DistributedModule)):
        if not (isinstance(given, type) and issubclass(given, base)):
            raise SMPUserError(f"{what} is {given!r}; it must be a subclass of {base.__name__}", code="SMP307")
    hooks: dict[str, Any] = {
        "init_hook": init_hook,
        "forward_hook": forward_hook,
        "return_hook": return_hook,
        "state_hook": state_hook,
    }
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise SMPUserError(f"{name} is {hook!r}; pass a function, or None", code="SMP307")
    register(module_cls, Registration(dist_module, **hooks))
    _note_arguments(module_cls)


def register(module_cls: type, how: Registration) -> None:
    """Register a class; a later registration replaces an earlier one."""
    _by_class[module_cls] = how


def register_later(class_name: str, function_name: str) -> None:
    """Register a class by its full name; ``function_name`` names a function that does it when one is met."""
    _by_name[class_name] = function_name


def registration_of(module: nn.Module) -> Registration | None:
    """Return a module's registration, or None; subclasses of a registered class have none."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind not in _by_class and name in _by_name:
        place, _, function = _by_name[name].rpartition(".")
        getattr(importlib.import_module(place), function)(kind)
    return _by_class.get(kind)


def arguments_of(dist_module: Any) -> set[str]:
    """Return the names of a distributed module's arguments.

    ``**options`` are those of its base class and of a transformer layer.
    """
    from smp_runtime.nn.settings import LayerSettings

    names: set[str] = set()
    for base in inspect.getmro(dist_module):
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        names |= {parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD and p.name == "options" for p in parameters):
            return names
        names |= set(LayerSettings.names())
    return names


def _note_arguments(module_cls: Any) -> None:
    """Let instances remember their constructor arguments."""
    original = vars(module_cls).get("__init__", module_cls.__init__)
    if getattr(original, "smp_notes", False):
        return

    @functools.wraps(original)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        # A subclass is made anew with what its own constructor got, not with what that has passed on.
        if type(self) is module_cls:
            self.__dict__[_GIVEN] = (args, kwargs)
        original(self, *args, **kwargs)

    noting.__dict__["smp_notes"] = True
    module_cls.__init__ = noting


def was_noted(module: nn.Module) -> bool:
    """Return whether a module remembers its arguments; one made before its class was registered does not."""
    return _GIVEN in module.__dict__


def _pair(name: str, value: Any) -> Arguments:
    is_pair = isinstance(value, tuple) and len(value) == 2
    if not is_pair or not isinstance(value[1], Mapping):
        raise SMPUserError(
            f"{name} returned {value!r}; it must return (args, kwargs): a sequence of positional arguments and a dictionary",
            code="SMP307",
        )
    return tuple(value[0]), value[1]


def distributed_classes() -> list[Any]:
    """Return the distributed classes of all registrations."""
    return [how.dist_module for how in _by_class.values()]
