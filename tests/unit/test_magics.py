"""Every magic in a real shell: its line and cell become the right call of the session."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from fsdp_magic.core.options import options_of
from fsdp_magic.core.specs import (
    MAGICS,
    CompareSpec,
    EvalSpec,
    InitSpec,
    ModelSpec,
    PlanSpec,
    TrainSpec,
    TuneSpec,
)
from fsdp_magic.errors import CellFailedError, UsageError
from fsdp_magic.notebook import magics, sessions


class FakeSession:
    """Notes what it is asked for; ``error`` is raised by every verb if it is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.spec = InitSpec(strategy="shard_grad_op")
        self.runs: list[Any] = []
        self.values: dict[str, Any] = {}
        self.error: BaseException | None = None

    def train_from(self, *args: Any, **options: Any) -> Any:
        self.runs.append(SimpleNamespace(state="done" if self.error is None else "failed"))
        self._note("train_from", args, options)
        return self.runs[-1]

    def eval_from(self, *args: Any, **options: Any) -> str:
        self._note("eval_from", args, options)
        return "evaluation"

    def compare_from(self, *args: Any, **options: Any) -> str:
        self._note("compare_from", args, options)
        return "comparison"

    def tune_from(self, *args: Any, **options: Any) -> str:
        self._note("tune_from", args, options)
        return "tuned"

    def plan_from(self, *args: Any, **options: Any) -> str:
        self._note("plan_from", args, options)
        return "plan"

    def number(self, flag: str, expression: str) -> float:
        self._note("number", (flag, expression), {})
        return self.values[expression]

    def pull(self, expression: str, **options: Any) -> Any:
        self._note("pull", (expression,), options)
        return self.values[expression]

    restarted = "rank 1 has a fresh engine"

    def restart(self) -> FakeSession:
        self._note("restart", (), {})
        return self

    def _note(self, verb: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.calls.append((verb, args, options))
        if self.error is not None:
            raise self.error

    def __getattr__(self, verb: str) -> Callable[..., None]:
        if verb not in ("console", "run", "model_from", "shards", "status", "push", "shutdown"):
            raise AttributeError(verb)
        return lambda *args, **options: self._note(verb, args, options)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[InteractiveShell]:
    config = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell.instance(config=config, ipython_dir=str(tmp_path), colors="nocolor")
    shell.run_line_magic("load_ext", "fsdp_magic")
    yield shell
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    fake = FakeSession()
    monkeypatch.setattr(sessions, "current", lambda: fake)
    return fake


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "current", lambda: None)
    monkeypatch.setattr(sessions, "_CURRENT", [])


def ran(shell: InteractiveShell, cell: str) -> Any:
    """Run a cell that must work; return its value."""
    result = shell.run_cell(cell, store_history=True)
    result.raise_error()
    return result.result


def test_init_asks_for_the_session_that_the_line_describes(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[InitSpec] = []
    monkeypatch.setattr(sessions, "init_from", lambda spec: asked.append(spec) or "session")
    value = ran(shell, "%fsdp_init -n 2 --device cpu --memory-limit 2GiB --seed 3 --restart # go")
    spec = InitSpec(n=2, device="cpu", memory_limit="2GiB", seed=3, restart=True)
    assert asked == [spec]
    assert value == "session"


def test_a_plain_cell_runs_on_the_ranks_asked_for(
    shell: InteractiveShell, session: FakeSession
) -> None:
    ran(shell, "x = 1")  # In [1]
    ran(shell, "%%fsdp --ranks 0,2-3 --timeout 5\nx = 1\n")
    options = {"ranks": "0,2-3", "timeout": 5.0, "name": "<%%fsdp [2]>"}
    assert session.calls == [("run", ("x = 1\n",), options)]


def test_cells_have_names_that_tell_them_apart(
    shell: InteractiveShell, session: FakeSession
) -> None:
    ran(shell, "%%fsdp\n1")
    ran(shell, "%%fsdp\n1")
    first, second = (options["name"] for _, _, options in session.calls)
    assert first != second


def test_a_model_cell_takes_names_and_strategy(
    shell: InteractiveShell, session: FakeSession
) -> None:
    ran(shell, '%%fsdp_model --strategy zero3 nets["G"] critic\nnets = 1\n')
    [(verb, args, _)] = session.calls
    assert verb == "model_from"
    assert args == (ModelSpec(names=('nets["G"]', "critic")), "nets = 1\n")


def test_a_model_cell_without_options_has_the_sessions_defaults(
    shell: InteractiveShell, session: FakeSession
) -> None:
    ran(shell, "%%fsdp_model\nmodel = 1\n")
    assert session.calls[0][1] == (ModelSpec(strategy="shard_grad_op"), "model = 1\n")


def test_a_training_cell_becomes_a_spec(shell: InteractiveShell, session: FakeSession) -> None:
    run = ran(shell, "%%fsdp_train --data d --steps 3 --accumulate 2\nloss = 1\n")
    [(verb, args, _)] = session.calls
    spec = TrainSpec(data="d", steps=3, accumulate=2)
    assert (verb, args) == ("train_from", (spec, "loss = 1\n"))
    assert run is session.runs[-1]


def test_numbers_of_a_training_cell_may_be_given_by_name(
    shell: InteractiveShell, session: FakeSession
) -> None:
    session.values = {"n_steps": 7, "cfg.lr*2": 0.5}
    ran(shell, "%%fsdp_train --steps n_steps --clip cfg.lr*2\nloss = 1\n")
    asked = [args for verb, args, _ in session.calls if verb == "number"]
    assert asked == [("--steps", "n_steps"), ("--max-grad-norm", "cfg.lr*2")]
    assert session.calls[-1][1][0] == TrainSpec(steps=7, max_grad_norm=0.5)


def test_an_evaluation_cell_becomes_a_spec(shell: InteractiveShell, session: FakeSession) -> None:
    value = ran(shell, "%%fsdp_eval --data d --batch-size 2\nloss = 1\n")
    [(verb, args, _)] = session.calls
    assert (verb, args) == ("eval_from", (EvalSpec(data="d", micro_batch_size=2), "loss = 1\n"))
    assert value == "evaluation"


def test_an_evaluation_is_bound_to_its_name_and_not_shown_twice(
    shell: InteractiveShell, session: FakeSession
) -> None:
    assert ran(shell, "%%fsdp_eval -o found\nloss = 1\n") is None
    assert shell.user_ns["found"] == "evaluation"


@pytest.mark.parametrize(
    ("log", "words"), [("nowhere", "is not there in the notebook"), ("5", "is a int")]
)
def test_a_log_that_is_no_function_is_refused_in_one_line(
    shell: InteractiveShell, session: FakeSession, capsys: Any, log: str, words: str
) -> None:
    result = shell.run_cell(f"%%fsdp_train --log {log}\nloss = 1\n")
    assert isinstance(result.error_in_exec, UsageError)
    assert words in str(result.error_in_exec)
    assert session.calls == []


def test_log_takes_a_function_of_the_notebook(
    shell: InteractiveShell, session: FakeSession
) -> None:
    ran(shell, "class W:\n    def log(self, values, step): pass\nw = W()")
    ran(shell, "%%fsdp_train --log w.log\nloss = 1\n")
    assert session.calls[0][1][0].log == shell.user_ns["w"].log


def test_a_run_is_bound_to_its_name_and_not_shown_twice(
    shell: InteractiveShell, session: FakeSession
) -> None:
    value = ran(shell, "%%fsdp_train -o first --steps 3\nloss = 1\n")
    assert shell.user_ns["first"] is session.runs[-1]
    assert value is None


@pytest.mark.parametrize(
    "error",
    [CellFailedError("rank 0: raised", exceptions={}), KeyboardInterrupt("stopped")],
    ids=["failed", "interrupted"],
)
def test_a_run_is_bound_also_when_it_raises(
    shell: InteractiveShell, session: FakeSession, error: BaseException
) -> None:
    session.error = error
    result = shell.run_cell("%%fsdp_train -o run --steps 3\nloss = 1\n")
    assert result.error_in_exec is error
    assert shell.user_ns["run"].state == "failed"


def test_a_refused_line_binds_no_run_of_an_earlier_cell(
    shell: InteractiveShell, session: FakeSession
) -> None:
    ran(shell, "%%fsdp_train --steps 3\nloss = 1\n")
    result = shell.run_cell("%%fsdp_train -o run --steps 0\nloss = 1\n")
    assert isinstance(result.error_in_exec, UsageError)
    assert "run" not in shell.user_ns


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("%fsdp_status", ("status", (), {})),
        ("%fsdp_status  # look", ("status", (), {})),
        ("%fsdp_shards", ("shards", (), {})),
        ('%fsdp_shards nets["G"]', ("shards", ('nets["G"]',), {})),
        ("%fsdp_shutdown", ("shutdown", (), {})),
    ],
)
def test_line_magics_ask_for_their_verb(
    shell: InteractiveShell, session: FakeSession, line: str, call: Any
) -> None:
    ran(shell, line)
    assert session.calls == [call]


def test_restart_shows_the_fresh_ranks(shell: InteractiveShell, session: FakeSession) -> None:
    ran(shell, "%fsdp_restart")
    assert [verb for verb, _, _ in session.calls] == ["restart", "status"]


def test_restart_starts_engines_that_were_ended(
    shell: InteractiveShell, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "current", lambda: None)
    monkeypatch.setattr(sessions, "_CURRENT", [session])
    ran(shell, "%fsdp_restart")
    assert [verb for verb, _, _ in session.calls] == ["restart", "status"]


def test_push_sends_the_notebooks_variables(shell: InteractiveShell, session: FakeSession) -> None:
    shell.user_ns |= {"a": 1, "b": [2]}
    ran(shell, "%fsdp_push a b")
    assert session.calls == [("push", (), {"a": 1, "b": [2]})]


@pytest.mark.parametrize("line", ["%fsdp_push", "%fsdp_push nothing_like_it"])
def test_push_without_a_variable_is_refused(
    shell: InteractiveShell, session: FakeSession, line: str
) -> None:
    assert isinstance(shell.run_cell(line).error_in_exec, UsageError)
    assert session.calls == []


def test_pull_binds_names_and_returns_the_value(
    shell: InteractiveShell, session: FakeSession
) -> None:
    session.values = {"x": 5}
    assert ran(shell, "%fsdp_pull x --rank all --yes") == 5
    assert shell.user_ns["x"] == 5
    assert session.calls == [("pull", ("x",), {"rank": "all", "yes": True})]


def test_pull_of_expressions_binds_only_those_that_are_names(
    shell: InteractiveShell, session: FakeSession
) -> None:
    session.values = {"x": 5, "y[0]": 6}
    assert ran(shell, "%fsdp_pull x y[0]") == [5, 6]
    assert shell.user_ns["x"] == 5
    assert "y[0]" not in shell.user_ns


def test_pull_without_an_expression_is_refused(
    shell: InteractiveShell, session: FakeSession
) -> None:
    assert isinstance(shell.run_cell("%fsdp_pull --rank 1").error_in_exec, UsageError)


def test_a_failed_pull_binds_nothing(shell: InteractiveShell, session: FakeSession) -> None:
    session.values = {"x": 5}
    assert shell.run_cell("%fsdp_pull x missing").error_in_exec is not None
    assert "x" not in shell.user_ns


CELLS = [
    "%%fsdp\n1",
    "%%fsdp_model\nm = 1",
    "%%fsdp_train\nloss = 1",
    "%%fsdp_tune\nloss = 1",
    "%fsdp_tune",
    "%fsdp_shards",
    "%fsdp_status",
    "%fsdp_push a",
    "%fsdp_pull a",
    "%fsdp_restart",
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.split()[0])
def test_without_engines_one_line_says_how_to_start_some(
    shell: InteractiveShell, no_session: None, cell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns["a"] = 1
    result = shell.run_cell(cell)
    assert isinstance(result.error_in_exec, UsageError)
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 1
    assert "%fsdp_init" in lines[0]


def test_shutting_down_nothing_is_fine(shell: InteractiveShell, no_session: None) -> None:
    ran(shell, "%fsdp_shutdown")


@pytest.mark.parametrize(
    "cell", [*CELLS, "%fsdp_init", "%fsdp_shutdown"], ids=lambda c: c.split()[0]
)
def test_an_unknown_option_is_one_line_that_names_the_magic(
    shell: InteractiveShell,
    session: FakeSession,
    cell: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line, newline, body = cell.partition("\n")
    result = shell.run_cell(f"{line} --unknown-thing{newline}{body}")
    assert isinstance(result.error_in_exec, UsageError)
    shown = capsys.readouterr().out.strip()
    assert len(shown.splitlines()) == 1
    assert line.split()[0] in shown
    assert "--unknown-thing" in shown
    assert session.calls == []


def help_of(shell: InteractiveShell, magic: str) -> str:
    """Return what ``%magic?`` shows."""
    return str(shell.object_inspect(f"%{magic.lstrip('%')}")["docstring"])


@pytest.mark.parametrize("magic", MAGICS)
def test_help_lists_every_option_and_an_example(shell: InteractiveShell, magic: str) -> None:
    text = help_of(shell, magic)
    words = " ".join(text.split())
    for option in options_of(MAGICS[magic]).values():
        assert " ".join(option.help.split()) in words
        assert all(flag in words for flag in option.flags[:1])
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize("magic", MAGICS)
def test_examples_in_the_help_can_be_typed(shell: InteractiveShell, magic: str) -> None:
    example = textwrap.dedent(help_of(shell, magic).partition("Example:\n")[2])
    typed, _, rest = example.splitlines()[0].partition(" ")
    assert typed == magic
    magics.parse(rest, MAGICS[magic], magic=magic)
    compile("\n".join(example.splitlines()[1:]), "<example>", "exec")


def ours(shell: InteractiveShell) -> set[str]:
    """Return the names of our magics that a shell knows."""
    kinds = shell.magics_manager.magics.values()
    return {name for kind in kinds for name in kind if name.startswith("fsdp")}


def test_every_magic_is_in_the_table_that_help_and_completion_read(shell: InteractiveShell) -> None:
    assert ours(shell) == {magic.lstrip("%") for magic in MAGICS}


def test_unloading_leaves_nothing_and_loading_again_brings_all_back(
    shell: InteractiveShell,
) -> None:
    matchers = list(shell.Completer.custom_matchers)
    shell.run_line_magic("unload_ext", "fsdp_magic")
    assert ours(shell) == set()
    assert "FsdpMagics" not in shell.magics_manager.registry
    assert len(shell.Completer.custom_matchers) == len(matchers) - 1
    for _ in range(2):
        shell.run_line_magic("reload_ext", "fsdp_magic")
    assert len(ours(shell)) == len(MAGICS)
    assert len(shell.Completer.custom_matchers) == len(matchers)


@pytest.mark.parametrize("magic", ["fsdp", "fsdp_model", "fsdp_train"])
def test_help_is_found_with_one_percent_sign_too(shell: InteractiveShell, magic: str) -> None:
    info = shell.object_inspect(f"%{magic}")
    assert info["found"]
    assert "Example:" in info["docstring"]


def test_a_cell_magic_on_one_line_says_that_it_takes_a_cell(
    shell: InteractiveShell, session: FakeSession
) -> None:
    with pytest.raises(UsageError, match="type %%fsdp_train and the code beneath it"):
        shell.run_line_magic("fsdp_train", "--steps 5")
    assert session.calls == []


def test_a_plan_of_a_cell_needs_no_engines(
    shell: InteractiveShell, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(magics.planning, "plan_from", lambda *a, **o: asked.append((a, o)) or "p")
    assert ran(shell, "%%fsdp_plan --gpus 4 -o plan  # a comment\nmodel = net") is None
    ((spec, cell), options) = asked[0]
    assert (spec, cell) == (PlanSpec(world_size=4, output="plan"), "model = net\n")
    assert options["name"].startswith("<%%fsdp_plan [")
    assert shell.user_ns["plan"] == "p"
    assert session.calls == []


def test_a_plan_without_a_cell_is_the_sessions(
    shell: InteractiveShell, session: FakeSession
) -> None:
    assert ran(shell, "%fsdp_plan --strategies ddp") == "plan"
    assert session.calls == [("plan_from", (PlanSpec(strategies=("ddp",)),), {})]


def test_compare_asks_for_the_strategies_of_the_line(
    shell: InteractiveShell, session: FakeSession
) -> None:
    value = ran(shell, "%fsdp_compare --strategies full_shard,ddp+bf16 --steps 3")
    spec = CompareSpec(strategies=("full_shard", "ddp+bf16"), steps=3)
    assert session.calls == [("compare_from", (spec,), {})]
    assert value == "comparison"


def test_a_search_of_a_cell_gets_the_cell(shell: InteractiveShell, session: FakeSession) -> None:
    assert ran(shell, "%%fsdp_tune --data d --max 8 -o found  # quickly\nloss = 1") is None
    [(verb, (spec, cell), options)] = session.calls
    assert (verb, spec, cell) == (
        "tune_from",
        TuneSpec(data="d", max=8, output="found"),
        "loss = 1\n",
    )
    assert options["name"].startswith("<%%fsdp_tune [")
    assert shell.user_ns["found"] == "tuned"


def test_a_search_without_a_cell_is_of_the_last_one(
    shell: InteractiveShell, session: FakeSession
) -> None:
    session.values = {"most": 64}
    assert ran(shell, "%fsdp_tune --max most --objective throughput") == "tuned"
    verb, args, _ = session.calls[-1]
    assert (verb, args) == ("tune_from", (TuneSpec(max=64, objective="throughput"), None))
