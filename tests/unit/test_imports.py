"""The folder says which process runs the code: imports go one way, and importing is light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp_magic

ROOT = Path(fsdp_magic.__file__).parent
MODULES = {
    ".".join(("fsdp_magic", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}

MAY_IMPORT = {
    "core": {"core"},
    "panels": {"core", "panels"},
    "notebook": {"core", "panels", "notebook"},
    "engine": {"core", "engine"},
}
PURE = ("core", "panels")
NEVER = {"notebook": ("torch", "numpy", "transformers"), "engine": ("IPython.display",)}


def imported(module: str, *, only_at_import: bool = False) -> Iterator[str]:
    """Yield the dotted names that a module imports.

    Args:
        module: its dotted name.
        only_at_import: leave out those inside functions and those for type checkers.
    """
    waiting: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if only_at_import and _is_later(node):
            continue
        waiting.extend(ast.iter_child_nodes(node))


def _is_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def folder(module: str) -> str:
    """Return the folder of ours that a module lies in; empty for the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and parts[1] in MAY_IMPORT) else ""


def module_of(name: str) -> str:
    """Return the module of ours that an imported name is, or lies in."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("module", [m for m in MODULES if folder(m)])
def test_imports_go_one_way(module: str) -> None:
    allowed = MAY_IMPORT[folder(module)]
    wrong = [
        name
        for name in imported(module)
        if name.startswith("fsdp_magic") and folder(module_of(name)) not in allowed
    ]
    assert not wrong, f"{module} may import only {sorted(allowed)}"


@pytest.mark.parametrize("module", [m for m in MODULES if folder(m) in PURE])
def test_pure_code_needs_only_the_standard_library(module: str) -> None:
    known = {*sys.stdlib_module_names, "fsdp_magic"}
    assert {name.partition(".")[0] for name in imported(module)} <= known


@pytest.mark.parametrize("module", [m for m in MODULES if folder(m) in NEVER])
def test_a_process_never_imports_what_is_not_its_business(module: str) -> None:
    wrong = [
        name
        for name in imported(module)
        for never in NEVER[folder(module)]
        if name == never or name.startswith(f"{never}.")
    ]
    assert not wrong


def test_no_module_needs_itself_to_be_imported() -> None:
    needs = {
        module: {
            module_of(name)
            for name in imported(module, only_at_import=True)
            if name.startswith("fsdp_magic.")
        }
        for module in MODULES
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a cycle: {' -> '.join((*path, module))}"
        if module not in done:
            for needed in needs[module]:
                visit(needed, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def run(code: str) -> str:
    """Return what a fresh Python prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    ).stdout.strip()


def test_importing_the_package_imports_neither_torch_nor_ipython() -> None:
    code = "import sys, fsdp_magic; print({'torch', 'IPython', 'ipyparallel'} & sys.modules.keys())"
    assert run(code) == "set()"


def test_importing_the_package_imports_little_of_it_since_engines_do_too() -> None:
    heavy = {"fsdp_magic.core.specs", "dataclasses"}
    code = f"import sys, fsdp_magic; print({heavy} & sys.modules.keys())"
    assert run(code) == "set()"
    assert run("import fsdp_magic; print(fsdp_magic.init.__name__, 'init' in dir(fsdp_magic))") == (
        "init True"
    )


def test_loading_the_extension_imports_no_torch_and_registers_the_magics(tmp_path: Path) -> None:
    code = f"""
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(ipython_dir={str(tmp_path)!r})
shell.run_line_magic("load_ext", "fsdp_magic")
assert shell.find_magic("fsdp_init"), "no %fsdp_init"
assert shell.find_cell_magic("fsdp_train"), "no %%fsdp_train"
print({{"torch", "transformers"}} & sys.modules.keys())
"""
    assert run(code) == "set()"


def test_errors_can_be_imported_from_where_the_documentation_says() -> None:
    code = "from fsdp_magic.errors import UsageError; print(UsageError.__name__)"
    assert run(code) == "UsageError"
