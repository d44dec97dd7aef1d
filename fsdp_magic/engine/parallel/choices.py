"""ENGINE: whether a module's code calls each of its parts in every forward, on every rank.

A unit is gathered by all ranks at once, so a module that one rank calls and another does not
(an expert, a task's head, the encoder of a picture that is not there) must not be a unit of its
own: the ranks would wait for each other, or mix their weights. Whether that can happen is read
from the source of the module's class. What cannot be read counts as a choice: it costs memory,
never a wrong gradient.

A condition or an index is the same on every rank if it is made of ``self``, constants, counters
of loops and a few functions of these. Code of installed libraries is trusted: their lists of
layers are gone through in order.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType

from torch import nn

from fsdp_magic.engine.parallel.class_source import has_library_forward, own_functions, parsed

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_SAME = frozenset(
    {"len", "range", "enumerate", "isinstance", "hasattr", "getattr", "int", "min", "max", "bool"}
)
"""Functions whose value is the same on every rank if their arguments are."""
_WALKS = frozenset(["enumerate", "zip", "reversed", "list", "tuple", "values", "items", "children"])
"""Calls that hand out all entries of a container."""


def is_choice(owner: nn.Module, attribute: str) -> bool:
    """Return whether some ranks may call a child, or an entry of it, that others do not.

    Args:
        owner: the module that holds the child.
        attribute: the child's name in it.
    """
    child = owner._modules[attribute]
    if isinstance(owner, _CONTAINERS):
        return False  # what is done with its entries is read where it is held itself
    if isinstance(owner, nn.Sequential) and type(owner).forward is nn.Sequential.forward:
        return False
    functions = own_functions(type(owner))
    if "forward" in functions:
        reader = _Reader(functions, attribute, has_entries=isinstance(child, _CONTAINERS))
        reader.read("forward")
        if reader.found:
            return reader.chosen
    # not called by its own class: by a library's, which is trusted, or from where we cannot see
    return isinstance(child, _CONTAINERS) and not has_library_forward(type(owner))


class _Reader(ast.NodeVisitor):
    """Reads a class for the uses of one of its attributes.

    Args:
        functions: the person's functions of the class.
        attribute: the name to look for.
        has_entries: whether what is called are its entries.
    """

    def __init__(
        self, functions: dict[str, FunctionType], attribute: str, *, has_entries: bool
    ) -> None:
        self._functions = functions
        self._attribute = attribute
        self._has_entries = has_entries
        self._open: set[str] = set()
        self._me = ""
        self._same: set[str] = set()
        self._entries: set[str] = set()
        self._conditions = 0
        self.found = False
        self.chosen = False

    def read(self, name: str) -> None:
        """Read one function, and those of ``self`` that it calls where it calls them."""
        tree = parsed(self._functions[name])
        if name in self._open:
            return
        if tree is None or not tree.args.args:
            self.found = self.chosen = True
            return
        before = self._me, self._same, self._entries
        self._open.add(name)
        self._me, self._same, self._entries = tree.args.args[0].arg, set(), set()
        self._read_all(tree.body if isinstance(tree.body, list) else [tree.body])
        self._open.discard(name)
        self._me, self._same, self._entries = before

    def _read_all(self, statements: list[ast.stmt] | list[ast.expr]) -> None:
        """Read statements in order; what follows one that may leave is conditional."""
        before = self._conditions
        for statement in statements:
            self.visit(statement)
            if isinstance(statement, (ast.If, ast.Match, ast.Try)) and _leaves(statement):
                self._conditions += not self._is_same(getattr(statement, "test", None))
        self._conditions = before

    # -- uses

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id == self._me):
            self.generic_visit(node)
        elif node.attr == self._attribute:
            self._use(is_plain=not self._has_entries)
        elif node.attr in self._functions:
            self.read(node.attr)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._entries:
            self._use(is_plain=True)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self._is_held(_innermost(node)):
            self._use(is_plain=all(map(self._is_same, _indices(node))))
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "len":
            return
        self.generic_visit(node)

    def _use(self, *, is_plain: bool) -> None:
        self.found = True
        self.chosen |= bool(self._conditions) or not is_plain

    # -- conditions and loops

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        with self._under(node.test, both=self._mentions(node.body) and self._mentions(node.orelse)):
            self._read_all(node.body)
            self._read_all(node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        with self._under(
            node.test, both=self._mentions([node.body]) and self._mentions([node.orelse])
        ):
            self.visit(node.body)
            self.visit(node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        with self._under(node.values[0]):
            self._read_all(node.values[1:])

    def visit_While(self, node: ast.While) -> None:
        with self._under(None):
            self.visit(node.test)
            self._read_all(node.body)

    def visit_Match(self, node: ast.Match) -> None:
        with self._under(None):
            self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        with self._under(None):
            self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        with self._loop(node.target, node.iter):
            self._conditions += self._may_end(node.body)
            self._read_all(node.body)
        self._read_all(node.orelse)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._comprehension(node.generators, [node.elt])

    visit_SetComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node.generators, [node.key, node.value])

    def _comprehension(self, loops: list[ast.comprehension], made: list[ast.expr]) -> None:
        if not loops:
            self._read_all(made)
            return
        first, *others = loops
        with self._loop(first.target, first.iter):
            for test in first.ifs:
                self._conditions += not self._is_same(test)
            self._comprehension(others, made)

    @contextmanager
    def _loop(self, target: ast.expr, walked: ast.expr) -> Iterator[None]:
        before = self._same, self._entries, self._conditions
        names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
        index = _counter(target, walked)
        if self._hands_out(walked):
            self._same, self._entries = self._same | index, self._entries | (names - index)
        elif self._is_same(walked):
            self._same = self._same | names
        else:
            self.visit(walked)
            self._same = self._same | index
            self._conditions += 1
        try:
            yield
        finally:
            self._same, self._entries, self._conditions = before

    @contextmanager
    def _under(self, test: ast.expr | None, *, both: bool = False) -> Iterator[None]:
        before = self._conditions
        self._conditions += not both and not self._is_same(test)
        try:
            yield
        finally:
            self._conditions = before

    # -- questions

    def _is_held(self, node: ast.AST) -> bool:
        """Whether a node is the attribute, or an entry of it."""
        if isinstance(node, ast.Name):
            return node.id in self._entries
        return (
            isinstance(node, ast.Attribute)
            and node.attr == self._attribute
            and isinstance(node.value, ast.Name)
            and node.value.id == self._me
        )

    def _hands_out(self, node: ast.expr) -> bool:
        """Whether a loop over an expression gets the entries one by one; notes the use."""
        if self._is_held(_innermost(node)):
            self._use(is_plain=all(map(self._is_same, _indices(node))))
            return True
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in _WALKS and self._hands_out(node.func.value)
        is_walk = isinstance(node.func, ast.Name) and node.func.id in _WALKS
        return is_walk and any([self._hands_out(part) for part in node.args])

    def _may_end(self, body: list[ast.stmt]) -> bool:
        """Whether a loop may end earlier on some ranks."""
        return any(
            isinstance(inner, (ast.Break, ast.Return))
            for statement in body
            for node in ast.walk(statement)
            if isinstance(node, ast.If) and not self._is_same(node.test)
            for inner in ast.walk(node)
        )

    def _mentions(self, parts: list[ast.stmt] | list[ast.expr]) -> bool:
        return any(self._is_held(node) for part in parts for node in ast.walk(part))

    def _is_same(self, node: ast.expr | None) -> bool:
        """Whether an expression has the same value on every rank."""
        if node is None:
            return False
        known = self._same | _SAME | {self._me}
        called = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
        return all(n.id in known for n in ast.walk(node) if isinstance(n, ast.Name)) and all(
            isinstance(function, ast.Name) for function in called
        )


def _leaves(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, (ast.Return, ast.Continue, ast.Break)) for node in ast.walk(statement)
    )


def _innermost(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _indices(node: ast.expr) -> list[ast.expr]:
    indices = []
    while isinstance(node, ast.Subscript):
        indices.append(node.slice)
        node = node.value
    return indices


def _counter(target: ast.expr, walked: ast.expr) -> set[str]:
    """Return the name that counts in ``for i, x in enumerate(...)``."""
    called = walked.func if isinstance(walked, ast.Call) else None
    counts = isinstance(called, ast.Name) and called.id == "enumerate"
    if counts and isinstance(target, ast.Tuple):
        return {n.id for n in ast.walk(target.elts[0]) if isinstance(n, ast.Name)}
    return set()
