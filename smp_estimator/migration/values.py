"""The values that a script assigns to its variables, where reading the code shows them."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from smp_estimator.migration.source import assignments, is_literal, literal_value

#: Methods that change a container.
_CHANGING = ("update", "pop", "setdefault", "append")


@dataclass
class Values:
    """Values by variable.

    Attributes:
        assigned: variable → the expressions that are assigned to it.
        changed: variables that the code also changes otherwise, such as in a loop.
    """

    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def read(self, trees: Iterable[ast.AST]) -> None:
        """Take in the assignments of all pieces."""
        for tree in trees:
            for node in ast.walk(tree):
                self._statement(node)

    def _statement(self, node: ast.AST) -> None:
        for target, value in assignments(node):
            self._assign(target, value)
        if isinstance(node, ast.AugAssign):
            self._assign(node.target, None)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._loop(node.target, node.iter)
        elif isinstance(node, ast.arguments):
            self._parameters(node)
        elif isinstance(node, ast.Attribute) and node.attr in _CHANGING:
            # Mentioning the method is enough: what the call does to the value is not followed.
            self._assign(node.value, None)

    def resolve(self, node: ast.AST | None) -> ast.AST | None:
        """Return the only value of a variable, or the node itself if it is another expression."""
        seen = set()
        while isinstance(node, ast.Name) and node.id not in self.changed and node.id not in seen:
            seen.add(node.id)
            found = self.assigned.get(node.id, [])
            if len(found) != 1:
                break
            node = found[0]
        return node

    def possible(self, node: ast.AST | None, depth: int = 4) -> list[object]:
        """Return the literal values that an expression may have, as far as the code shows them."""
        if isinstance(node, ast.IfExp):
            return [*self.possible(node.body, depth), *self.possible(node.orelse, depth)]
        # Names may be assigned from each other in a circle.
        if isinstance(node, ast.Name) and depth:
            found: list[object] = []
            for value in self.assigned.get(node.id, []):
                found += self.possible(value, depth - 1)
            return found
        return [literal_value(node)] if is_literal(node) else []

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            values: list[ast.expr] = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            for part, assigned in itertools.zip_longest(target.elts, values[: len(target.elts)]):
                self._assign(part, assigned)
        elif isinstance(target, ast.Subscript):
            self._assign(target.value, None)
        elif isinstance(target, ast.Name):
            if value is None:
                self.changed.add(target.id)
            else:
                self.assigned.setdefault(target.id, []).append(value)

    def _loop(self, target: ast.expr, items: ast.expr) -> None:
        if isinstance(items, ast.List | ast.Tuple):
            for value in items.elts:
                self._assign(target, value)
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.changed.add(node.id)

    def _parameters(self, node: ast.arguments) -> None:
        names = [*node.posonlyargs, *node.args]
        defaults = [*zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True)]
        defaults += [(each, value) for each, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value]
        for each in (*names, *node.kwonlyargs):
            self.changed.add(each.arg)
        for each, value in defaults:
            self.assigned.setdefault(each.arg, []).append(value)
