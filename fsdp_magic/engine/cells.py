"""ENGINE: compiling a cell, running it, and describing how it failed.

A cell is compiled under a file name of its own, under which its source is kept, so tracebacks
show its lines.
"""

from __future__ import annotations

import ast
import asyncio
import symtable
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.reply import Failure, FailureKind
from fsdp_magic.engine import out_of_memory
from fsdp_magic.engine.cell_sources import CellSource
from fsdp_magic.engine.children import children_end
from fsdp_magic.engine.collectives import DivergedError
from fsdp_magic.engine.held import names_filled
from fsdp_magic.engine.interrupts import ReleasedByPeerError
from fsdp_magic.engine.out_of_memory import is_out_of_memory
from fsdp_magic.engine.surrogates import encodable
from fsdp_magic.engine.tracebacks import members_of, message_of, persons_traceback
from fsdp_magic.engine.whereabouts import LOCATOR

_HINTS = {
    "got mixed torch.Tensor and DTensor": (
        "A sharded parameter was used outside its model's forward; gather it around these lines: "
        "with fsdp.unsharded(model):"
    ),
    "FSDP does not support deepcopy": (
        "A sharded model cannot be copied; copy it in the %%fsdp_model cell that builds it: "
        "ema = copy.deepcopy(model)"
    ),
    **dict.fromkeys(
        # torch says the one or the other, by which of its checks comes first
        ("is killed by signal: Killed", "exited unexpectedly"),
        "The system may have killed that worker because memory ran out; give the DataLoader "
        "fewer workers: num_workers",
    ),
}
_MAGIC_CALLS = ("run_line_magic", "run_cell_magic", "magic", "set_next_input", "pinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A compiled cell.

    Attributes:
        source: as it was typed, under its file name in tracebacks.
        body: its statements.
        last: its last expression, whose value is shown; None if there is none.
        assigned: the names that its top level binds.
        used: the names that it reads, other than those.
    """

    source: CellSource
    body: CodeType
    last: CodeType | None
    assigned: frozenset[str]
    used: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for code in (self.body, self.last):
            if code is not None:
                self.source.needed_by(code)

    @property
    def name(self) -> str:
        """Its file name in tracebacks."""
        return self.source.name

    def run(self, namespace: dict[str, Any]) -> Any:
        """Execute in a namespace, and return the value of the last expression."""
        with children_end():
            try:
                exec(self.body, namespace)
            finally:
                self.source.note_classes({n: namespace[n] for n in self.assigned if n in namespace})
            return eval(self.last, namespace) if self.last is not None else None


def compile_cell(code: str, name: str, *, shell: Any) -> Cell:
    """Compile a cell that may use everything IPython offers.

    Args:
        code: the cell as typed.
        name: its file name in tracebacks.
        shell: the engine's IPython, which turns ``!``, ``%`` and ``?`` into Python.

    Raises:
        SyntaxError: if it is not Python.
        FsdpError: if it awaits at top level.
    """
    source = shell.transform_cell(code)
    kept = CellSource(source, name)
    tree = _parsed(source, name)
    last: CodeType | None = None
    shown = tree.body and isinstance(tree.body[-1], ast.Expr) and not _ends_quietly(code)
    if shown:
        expression = tree.body.pop()
        assert isinstance(expression, ast.Expr)
        last = compile(ast.Expression(expression.value), name, "eval")
    body, assigned = compile(tree, name, "exec"), _assigned(tree)
    used = _used(source, name) - assigned
    return Cell(source=kept, body=body, last=last, assigned=assigned, used=used)


def compile_training_cell(code: str, name: str, *, shell: Any) -> Cell:
    """Compile a cell that is executed once per micro-step: Python, and ``!`` commands.

    Raises:
        SyntaxError: if it is not Python.
        FsdpError: if it uses a magic or awaits at top level.
    """
    source = shell.transform_cell(code)
    kept = CellSource(source, name)
    tree = _parsed(source, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _MAGIC_CALLS and _is_shell(node):
            raise FsdpError(
                f"line {node.lineno} uses a magic; a training cell is plain Python that runs "
                "once per micro-step: put the magic into a %%fsdp cell"
            )
    body, assigned = compile(tree, name, "exec"), _assigned(tree)
    used = _used(source, name) - assigned
    return Cell(source=kept, body=body, last=None, assigned=assigned, used=used)


def names_filled_by(code: str, *, shell: Any) -> frozenset[str]:
    """Return the names that a cell binds, and those of containers that it puts something into."""
    try:
        tree = ast.parse(shell.transform_cell(code))
    except SyntaxError:
        return frozenset()
    return _assigned(tree) | names_filled(tree)


def describe(error: BaseException) -> Failure:
    """Return what a person needs to know about an exception, without keeping it alive."""
    if isinstance(error, (ReleasedByPeerError, KeyboardInterrupt, DivergedError)):
        return _stopped(error)
    frames, message = persons_traceback(error), message_of(error)
    if isinstance(error, SyntaxError):
        lines = traceback.format_exception_only(error)
        frames, message = "".join(lines[:-1]), str(error.msg)
    elif isinstance(error, FsdpError):
        return Failure(
            kind="usage", exception_type=type(error).__name__, message=encodable(message)
        )
    because = "" if error.__cause__ is None else message_of(error.__cause__)
    hints = _hints(f"{message}\n{because}")
    notes = (*members_of(error), *getattr(error, "__notes__", ()), *hints)
    return Failure(
        kind="out_of_memory" if is_out_of_memory(error) else "raised",
        memory=out_of_memory.described(error),
        exception_type=type(error).__name__,
        message=encodable(message),
        traceback=encodable(frames),
        notes=tuple(map(encodable, notes)),
    )


def _stopped(error: BaseException) -> Failure:
    """Return the failure of a rank that other ranks or the person kept from going on."""
    where = LOCATOR.of_error(error)
    if isinstance(error, ReleasedByPeerError):
        return Failure(kind="released", exception_type="", message="a peer failed", where=where)
    kind: FailureKind = "diverged" if isinstance(error, DivergedError) else "interrupted"
    return Failure(kind=kind, exception_type=type(error).__name__, message=str(error), where=where)


def _hints(message: str) -> list[str]:
    """Return what to type after an error of torch that does not say it."""
    return [hint for part, hint in _HINTS.items() if part in message]


@contextmanager
def outside_event_loop() -> Iterator[None]:
    """Hide the engine's own event loop inside, so that a cell may call ``asyncio.run``."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        asyncio.set_event_loop(loop)  # asyncio.run leaves none behind


@contextmanager
def forgotten(error: BaseException) -> Iterator[None]:
    """Drop every reference to the frames of a handled exception afterwards.

    The tensors of a failed cell live in its frames; they must not survive it.
    """
    try:
        yield
    finally:
        seen: set[int] = set()
        current: BaseException | None = error
        while current is not None and id(current) not in seen:
            seen.add(id(current))
            traceback.clear_frames(current.__traceback__)
            current.__traceback__ = None
            current = current.__cause__ or current.__context__
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)


def _parsed(source: str, name: str) -> ast.Module:
    tree = ast.parse(source, name)
    for node in _top_level(tree):
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            raise FsdpError(
                f"line {node.lineno} awaits at top level, which a cell on engines cannot; "
                "wrap it: asyncio.run(main())"
            )
    return tree


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the cell runs, not those inside functions and classes."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _top_level(child)


def _assigned(tree: ast.AST) -> frozenset[str]:
    """Return the names that the top level of a cell binds."""
    names: set[str] = set()
    for node in _top_level(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((a.asname or a.name).partition(".")[0] for a in node.names)
    return frozenset(names)


def _used(source: str, name: str) -> frozenset[str]:
    """Return the names outside of it that a cell reads anywhere; not parameters of functions."""
    used: set[str] = set()
    tables = [symtable.symtable(source, name, "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        outermost = table.get_type() == "module"
        used.update(
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (outermost or symbol.is_global())
        )
    return frozenset(used)


def _is_shell(node: ast.Attribute) -> bool:
    call = node.value
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "get_ipython"
    )


def _ends_quietly(code: str) -> bool:
    """Return whether a cell's last statement ends in a semicolon, comments aside."""
    lines = [line.partition(" #")[0].rstrip() for line in code.rstrip().splitlines()]
    spoken = [line for line in lines if line and not line.lstrip().startswith("#")]
    return bool(spoken) and spoken[-1].endswith(";")
