"""The exceptions: one tree, and one line each in a notebook."""

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from fsdp_magic import errors
from fsdp_magic.core.cell_output import CellOutput
from fsdp_magic.core.reply import Failure

FAILURE = Failure(kind="raised", exception_type="ValueError", message="no")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[InteractiveShell]:
    config = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell.instance(config=config, ipython_dir=str(tmp_path), colors="nocolor")
    yield shell
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


def shown(shell: InteractiveShell, error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a cell that raises shows."""
    shell.user_ns["error"] = error
    result = shell.run_cell("raise error")
    assert result.error_in_exec is error
    return capsys.readouterr().out


ONE_OF_EACH: list[Any] = [
    errors.FsdpError("it is broken"),
    errors.UsageError("--steps 0 cannot work"),
    errors.EngineDiedError("rank 1 on here ended (SIGKILL)", rank=1, host="here", signal=9),
    errors.CellInterrupted("interrupted"),
    errors.CellFailedError("rank 0: raised", exceptions={0: FAILURE}),
    errors.OutOfMemoryOnRankError("rank 0: out of memory", exceptions={0: FAILURE}),
]


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda e: type(e).__name__)
def test_a_notebook_shows_its_text_and_no_frame_of_ours(
    error: BaseException, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(shell, error, capsys).strip() == str(error)


def test_an_error_without_text_shows_its_name(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(shell, errors.FsdpError(), capsys).strip() == "FsdpError"


def test_a_text_of_several_lines_keeps_them(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(shell, errors.FsdpError("a\nb"), capsys).strip() == "a\nb"


def test_every_error_of_ours_is_an_fsdp_error_and_an_interrupt_is_an_interrupt() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(k, (errors.FsdpError, KeyboardInterrupt)) for k in kinds)
    assert issubclass(errors.CellInterrupted, KeyboardInterrupt)
    assert not issubclass(errors.CellInterrupted, Exception)
    assert issubclass(errors.OutOfMemoryOnRankError, errors.CellFailedError)


def test_the_tree_in_the_docstring_names_every_error() -> None:
    from fsdp_magic.core import errors as core

    own = [
        name
        for name, kind in vars(core).items()
        if inspect.isclass(kind) and issubclass(kind, core.FsdpError)
    ]
    assert own
    for name in own:
        assert name in (core.__doc__ or "")
        assert name in errors.__all__


def test_a_failed_cell_names_its_ranks_in_order() -> None:
    outputs = [CellOutput(rank=0), CellOutput(rank=1)]
    error = errors.CellFailedError("x", exceptions={3: FAILURE, 1: FAILURE}, outputs=outputs)
    assert error.ranks == (1, 3)
    assert error.exceptions[3] is FAILURE
    assert error.outputs == tuple(outputs)
    assert error.run is None


def test_a_dead_engine_says_who_where_and_how() -> None:
    error = errors.EngineDiedError("gone", rank=1, host="here", signal=9)
    assert (error.rank, error.host, error.signal) == (1, "here", 9)


def test_a_usage_error_survives_pickling() -> None:
    assert str(pickle.loads(pickle.dumps(errors.UsageError("no")))) == "no"
