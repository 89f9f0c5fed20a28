"""The tree of a model's modules, with the cost of each: the input of every partition decision.

A module is one node, however often it is registered: the first path in registration order is its path, the
others are aliases. All figures of a node belong to its *own frame*, which is the module's own code without
that of the modules it calls. Add up a subtree for the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import parametrize

from smp_runtime.errors import SMPUserError

#: These hold modules and have no code of their own that calls them.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
#: These read the parameters of the modules inside them directly, some only in evaluation, or call them past Python.
_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, torch.jit.ScriptModule)
#: These look up rows: their work does not grow with their parameters.
_TABLES = (nn.Embedding, nn.EmbeddingBag)


@dataclass
class HeldParameter:
    """A parameter that a module holds directly."""

    name: str  # full name of its first holder's attribute: the same for all holders of a shared parameter
    elements: int
    bytes: int
    trained: bool  # whether it gets a gradient and optimizer state


@dataclass
class ModuleNode:
    """One module. All figures are of its own frame and of one microbatch."""

    path: str  # as in ``named_modules()``; the root is ``""``
    type_name: str
    #: Modules registered in it, in the order in which they, or modules in them, were first called; those that were not called
    #: follow in registration order.
    children: list[ModuleNode] = field(default_factory=list)
    parameters: list[HeldParameter] = field(default_factory=list)  # held directly, each once
    aliases: list[str] = field(default_factory=list)  # other paths of the same module
    calls: int = 0  # how often it was called
    order: int = -1  # number of its first call among all first calls; -1 if it was not called
    #: Floating point operations of forward and backward; work on elements counts as the operations that the device could do while
    #: it moves the bytes.
    flops: float = 0.0
    seconds: float = 0.0  # of the forward pass; 0 unless execution times were traced
    activation_bytes: int = 0  # kept for backward
    input_bytes: int = 0  # tensors among the arguments of one call, the most over all calls
    output_bytes: int = 0  # tensors among the results of one call, the most over all calls
    is_container: bool = False  # whether it was not called but holds modules that were: its parent calls them
    is_divisible: bool = True  # whether the modules in it may be on other stages than itself

    def walk(self) -> Iterator[ModuleNode]:
        """Yield this node and all nodes below it, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def elements(self) -> int:
        """Return the number of parameter elements in the whole subtree, each parameter counted once."""
        held = {parameter.name: parameter.elements for node in self.walk() for parameter in node.parameters}
        return sum(held.values())


@dataclass(frozen=True)
class ModuleFlow:
    """Tensors that one module's own frame makes, or holds as a parameter, and others compute with.

    Paths of modules, and bytes of one microbatch.
    """

    producer: str
    consumers: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class ForeignUse:
    """One module's use of a parameter, buffer, attribute or module of another one, as ``kind`` states.

    A buffer or attribute counts if it changes there.
    """

    user: str  # its path
    holder: str  # the other one's
    parameter: str  # its full name; of a buffer or attribute, too
    #: ``parameter``, ``buffer`` or ``attribute``; ``module`` if every call puts it there; ``function`` for an autograd
    #: function that calls the holder.
    kind: str = "parameter"


@dataclass
class Trace:
    """The knowledge about a model before it is split."""

    root: ModuleNode
    #: Modules that compute with values of another module; empty if the model was not traced.
    flows: list[ModuleFlow] = field(default_factory=list)
    foreign_uses: list[ForeignUse] = field(default_factory=list)  # see there; empty if the model was not traced
    #: Path and name of each attribute with tensors that the module, or another one, sets in forward.
    attributes: list[tuple[str, str]] = field(default_factory=list)
    traced: bool = False  # whether the model ran; otherwise the figures are guessed from parameters
    timed: bool = False  # whether ``seconds`` were measured
    #: Paths of modules that the calls have replaced, each after the path of the module that had it.
    replaced: tuple[tuple[str, str], ...] = ()

    def nodes(self) -> dict[str, ModuleNode]:
        """Return all nodes by path."""
        return {node.path: node for node in self.root.walk()}


def together_with_reasons(trace: Trace) -> list[tuple[tuple[str, ...], str]]:
    """Return groups of modules that must be on one stage, each with its reason, such as ``parameter head.weight``."""
    bound: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for node in trace.root.walk():
        for parameter in node.parameters:
            bound[f"parameter {parameter.name}"][node.path] = None
    for use in trace.foreign_uses:
        paths = bound[f"{use.kind} {use.parameter}"]
        paths.update({use.holder: None, use.user: None})
    return [(tuple(paths), reason) for reason, paths in bound.items() if len(paths) > 1]


def note_recomputed(trace: Trace, regions: Mapping[str, bool]) -> None:
    """Adjust the costs of modules that keep at most their inputs for backward, which runs their forward pass again.

    Args:
        trace: changed in place.
        regions: paths of modules, none in another one, and whether their inputs are kept.
    """
    nodes = trace.nodes()
    for path, keeps_inputs in regions.items():
        if path not in nodes:
            continue
        for node in nodes[path].walk():
            node.activation_bytes = 0
            # Backward takes twice the time of forward, so one forward more is a third more of both.
            node.flops *= 4 / 3
            node.seconds *= 4 / 3
        nodes[path].activation_bytes = nodes[path].input_bytes if keeps_inputs else 0


def note_replaced(trace: Trace) -> None:
    """Bind modules that every call replaces to the stage of their owner, because the replacements run there.

    Args:
        trace: changed in place.
    """
    nodes = trace.nodes()
    for owner, path in trace.replaced:
        trace.foreign_uses += [ForeignUse(owner, node.path, path, "module") for node in nodes[path].walk()]


class ModuleTree:
    """The tree of a live model, and the mapping from its modules and parameters to nodes.

    Raises:
        SMPUserError: the parameters of a lazy module have no shape yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._nodes: dict[int, ModuleNode] = {}
        #: By identity: all modules, and the parameters with the nodes and full names of their first holders.
        self.modules: dict[int, nn.Module] = {}
        self.parameters: dict[int, tuple[nn.Parameter, ModuleNode, str]] = {}
        #: The buffers with their modules and names in them.
        self.buffers: dict[int, tuple[torch.Tensor, nn.Module, str]] = {}
        self.root = self._build(model, "")

    def node_of(self, module: nn.Module) -> ModuleNode | None:
        """Return the node of a module; None for a module that is not part of the model."""
        return self._nodes.get(id(module))

    def nodes(self) -> list[tuple[int, ModuleNode]]:
        """Return identity and node of every module."""
        return list(self._nodes.items())

    def _build(self, module: nn.Module, path: str) -> ModuleNode:
        node = ModuleNode(
            path,
            type(module).__name__,
            is_divisible=not (isinstance(module, _INDIVISIBLE) or parametrize.is_parametrized(module)),
        )
        self._nodes[id(module)], self.modules[id(module)] = node, module
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self._hold(node, parameter, _join(path, name))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self.buffers.setdefault(id(buffer), (buffer, module, name))
        for name, child in module._modules.items():
            if child is None:
                continue
            if id(child) in self._nodes:
                self._add_alias(child, _join(path, name))
            else:
                node.children.append(self._build(child, _join(path, name)))
        return node

    def _add_alias(self, module: nn.Module, path: str, above: tuple[int, ...] = ()) -> None:
        """Add another path of a known module, and so of all modules in it."""
        if id(module) in above:
            raise SMPUserError(
                f"module {path!r} is one of those that it lies in, so the model has no tree to split; keep one of the two "
                "references in a list, or a weak reference, instead of an attribute",
                code="SMP305",
            )
        self._nodes[id(module)].aliases.append(path)
        for name, child in module._modules.items():
            if child is not None:
                self._add_alias(child, _join(path, name), (*above, id(module)))

    def _hold(self, node: ModuleNode, parameter: nn.Parameter, name: str) -> None:
        if nn.parameter.is_lazy(parameter):
            raise SMPUserError(
                f"parameter {name} has no shape yet: its module is lazy; run one forward pass of the model before "
                "wrapping it, or use the module that is not lazy",
                code="SMP305",
            )
        _, _, first = self.parameters.setdefault(id(parameter), (parameter, node, name))
        if all(held.name != first for held in node.parameters):
            size = parameter.numel() * parameter.element_size()
            node.parameters.append(HeldParameter(first, parameter.numel(), size, parameter.requires_grad))


def tree_without_tracing(model: nn.Module) -> Trace:
    """Return the tree without running the model: order of registration, costs from the number of parameters only.

    For ``skip_tracing``. It is not known then which modules use parameters of others directly. Modules that
    hold the same parameter, and lists of parameters with their owner, still stay together.

    Raises:
        SMPUserError: the parameters of a lazy module have no shape yet.
    """
    tree = ModuleTree(model)
    uses = []
    nodes = dict(tree.nodes())
    for identity, module in tree.modules.items():
        node = nodes[identity]
        node.is_container = isinstance(module, _CONTAINERS)
        elements = sum(parameter.elements for parameter in node.parameters)
        node.flops = 1.0 if isinstance(module, _TABLES) else 1.0 + elements
        for child in module.children():
            if isinstance(child, nn.ParameterList | nn.ParameterDict):
                held = nodes[id(child)]
                uses += [ForeignUse(node.path, held.path, parameter.name) for parameter in held.parameters]
    return Trace(tree.root, foreign_uses=uses)


def order_by_call(root: ModuleNode) -> None:
    """Sort the children of every node as described in :class:`ModuleNode`, and find the containers."""

    def first_call(node: ModuleNode) -> float:
        inside = min((first_call(child) for child in node.children), default=float("inf"))
        was_called = node.order >= 0
        node.is_container = not was_called and inside < float("inf")
        node.children.sort(key=lambda child: earliest[child.path])
        earliest[node.path] = min(inside, node.order) if was_called else inside
        return earliest[node.path]

    earliest: dict[str, float] = {}
    first_call(root)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
