"""KERNEL: the magics. Each parses its line, calls the session, and lets it show the result."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.specs import (
    MAGICS,
    CompareSpec,
    ConsoleSpec,
    EmptySpec,
    EvalSpec,
    InitSpec,
    ModelSpec,
    NamesSpec,
    PlanSpec,
    PullSpec,
    RunSpec,
    ShardsSpec,
    TrainSpec,
    TuneSpec,
)
from fsdp_magic.core.wording import as_typed, quoted
from fsdp_magic.notebook import display, planning, px, sessions
from fsdp_magic.notebook.comparison import Comparison
from fsdp_magic.notebook.evaluation import Evaluation
from fsdp_magic.notebook.help import magic_help
from fsdp_magic.notebook.options import parse
from fsdp_magic.notebook.run import Run
from fsdp_magic.notebook.session import Session
from fsdp_magic.notebook.tuned import Tuned


@magics_class
class FsdpMagics(Magics):
    """``%fsdp_init``, ``%%fsdp``, ``%%fsdp_model``, ``%%fsdp_train`` and what goes with them."""

    @line_magic
    def fsdp_init(self, line: str) -> Session:
        """Start one engine per GPU, or CPU engines where there is none."""
        spec = parse(line, InitSpec, magic="%fsdp_init")
        session = sessions.init_from(spec)
        px.stand_in(self.shell)  # an earlier session's %px ended with it
        return session

    @line_cell_magic
    def fsdp(self, line: str, cell: str | None = None) -> None:
        """Run the cell on every rank, as ordinary Python."""
        cell = _body(cell, "fsdp")
        session = self._session()
        spec = parse(line, RunSpec, magic="%%fsdp", numbers=session.number)
        session.run(cell, ranks=spec.ranks, timeout=spec.timeout, name=self._name("fsdp"))

    @line_cell_magic
    def fsdp_model(self, line: str, cell: str | None = None) -> None:
        """Run the cell on every rank, then shard what it built."""
        cell = _body(cell, "fsdp_model")
        session = self._session()
        spec = parse(line, ModelSpec, magic="%%fsdp_model", completed=session.spec.completed)
        session.model_from(spec, cell, name=self._name("fsdp_model"))

    @line_cell_magic
    def fsdp_train(self, line: str, cell: str | None = None) -> Run | None:
        """Run the cell as training steps; it binds `loss`."""
        cell = _body(cell, "fsdp_train")
        session = self._session()
        spec = parse(line, TrainSpec, magic="%%fsdp_train", numbers=session.number)
        if isinstance(spec.log, str):
            spec = replace(spec, log=self._function(spec.log, "--log"))
        before = len(session.runs)
        try:
            run = session.train_from(spec, cell, name=self._name("fsdp_train"))
        finally:
            if spec.output is not None and len(session.runs) > before:
                self._variables[spec.output] = session.runs[-1]
        return None if spec.output is not None else run

    @line_cell_magic
    def fsdp_eval(self, line: str, cell: str | None = None) -> Evaluation | None:
        """Run the cell over data without gradients, every sample once."""
        cell = _body(cell, "fsdp_eval")
        session = self._session()
        spec = parse(line, EvalSpec, magic="%%fsdp_eval", numbers=session.number)
        evaluation = session.eval_from(spec, cell, name=self._name("fsdp_eval"))
        if spec.output is None:
            return evaluation
        self._variables[spec.output] = evaluation
        return None

    @line_magic
    def fsdp_compare(self, line: str) -> Comparison:
        """Run the last training cell under several strategies: one table."""
        session = self._session()
        spec = parse(line, CompareSpec, magic="%fsdp_compare", numbers=session.number)
        return session.compare_from(spec)

    @line_cell_magic
    def fsdp_tune(self, line: str, cell: str | None = None) -> Tuned | None:
        """Find the micro-batch size by running it; without a cell, of the last training cell."""
        session = self._session()
        magic = "%fsdp_tune" if cell is None else "%%fsdp_tune"
        spec = parse(line, TuneSpec, magic=magic, numbers=session.number)
        tuned = session.tune_from(spec, cell, name=self._name("fsdp_tune"))
        if spec.output is None:
            return tuned
        self._variables[spec.output] = tuned
        return None

    @line_cell_magic
    def fsdp_plan(self, line: str, cell: str | None = None) -> planning.Plan | None:
        """Predict peak memory and the largest batch for hardware that is not here."""
        if cell is None:
            if sessions.current() is None:
                raise UsageError(
                    "%fsdp_plan plans a session's training, and there are no engines; write the "
                    "model into a %%fsdp_plan cell, or type %fsdp_init to start some"
                )
            session = self._session()
            spec = parse(line, PlanSpec, magic="%fsdp_plan", numbers=session.number)
            made = session.plan_from(spec)
        else:
            spec = parse(line, PlanSpec, magic="%%fsdp_plan")
            made = planning.plan_from(spec, cell, name=self._name("fsdp_plan"))
        if spec.output is None:
            return made
        self._variables[spec.output] = made
        return None

    @line_magic
    def fsdp_shards(self, line: str) -> None:
        """Show where every parameter lives."""
        spec = parse(line, ShardsSpec, magic="%fsdp_shards")
        self._session().shards(*spec.names)

    @line_magic
    def fsdp_status(self, line: str) -> None:
        """Show ranks, devices and memory."""
        parse(line, EmptySpec, magic="%fsdp_status")
        self._session().status()

    @line_magic
    def fsdp_console(self, line: str) -> None:
        """Print the command that opens a console on a rank."""
        session = self._session()
        spec = parse(line, ConsoleSpec, magic="%fsdp_console", numbers=session.number)
        display.write("stdout", f"{session.console(spec.rank)}\n")
        if importlib.util.find_spec("jupyter_console") is None:
            display.write("stdout", "It needs one package more: pip install jupyter-console\n")

    @line_magic
    def fsdp_push(self, line: str) -> None:
        """Send variables of the notebook to every rank."""
        spec = parse(line, NamesSpec, magic="%fsdp_push")
        missing = [name for name in spec.names if name not in self._variables]
        if missing or not spec.names:
            what = (
                f"no variable {quoted(missing[0])} in the notebook" if missing else "no name given"
            )
            raise UsageError(f"%fsdp_push: {what}; type %fsdp_push NAME")
        self._session().push(**{name: self._variables[name] for name in spec.names})

    @line_magic
    def fsdp_pull(self, line: str) -> Any:
        """Bring values from a rank; names are bound here, one expression is returned."""
        spec = parse(line, PullSpec, magic="%fsdp_pull")
        if not spec.names:
            raise UsageError("%fsdp_pull: no expression given; type %fsdp_pull NAME")
        session = self._session()
        values = [session.pull(name, rank=spec.rank, yes=spec.yes) for name in spec.names]
        for name, value in zip(spec.names, values, strict=True):
            if name.isidentifier():
                self._variables[name] = value
        return values[0] if len(values) == 1 else values

    @line_magic
    def fsdp_restart(self, line: str) -> None:
        """Replace the engines that died; if none did, every engine by a fresh one."""
        parse(line, EmptySpec, magic="%fsdp_restart")
        session = (sessions.restartable() or self._session()).restart()
        session.status()
        if session.restarted:
            display.write("stdout", f"{session.restarted}\n")
        px.stand_in(self.shell)

    @line_magic
    def fsdp_shutdown(self, line: str) -> None:
        """End the engines."""
        parse(line, EmptySpec, magic="%fsdp_shutdown")
        session = sessions.current()
        if session is not None:
            session.shutdown()

    @property
    def _variables(self) -> dict[str, Any]:
        """The notebook's own variables."""
        assert self.shell is not None
        variables: dict[str, Any] = self.shell.user_ns
        return variables

    def _function(self, expression: str, flag: str) -> Callable[..., Any]:
        """Return the function that an expression stands for in the notebook."""
        what = f"{flag} {as_typed(expression)}"
        try:
            function = eval(expression, dict(self._variables))
        except Exception as error:  # a person's expression may raise anything
            raise UsageError(
                f"{what} is not there in the notebook ({as_typed(str(error))}); define it in a "
                "cell without a magic"
            ) from None
        if not callable(function):
            raise UsageError(
                f"{what} is a {type(function).__name__}; it takes a function, called as "
                "FUNC({...}, step=n)"
            )
        return cast(Callable[..., Any], function)

    def _session(self) -> Session:
        session = sessions.current()
        if session is None:
            raise UsageError("there are no engines yet; type %fsdp_init to start some")
        return session

    def _name(self, magic: str) -> str:
        """Return the file name of a cell in tracebacks: its magic and its number.

        The inputs are counted: IPython raises ``execution_count`` before a cell runs or after
        it, by version.
        """
        assert self.shell is not None
        assert self.shell.history_manager is not None
        number = len(self.shell.history_manager.input_hist_parsed) - 1
        return f"<%%{magic} [{number}]>"


def _body(cell: str | None, magic: str) -> str:
    """Return the cell of a cell magic.

    It is a line magic too only because IPython looks for ``%magic?`` among those.
    """
    if cell is None:
        raise UsageError(f"%{magic} takes a cell; type %%{magic} and the code beneath it")
    return cell


def unregister(shell: Any) -> None:
    """Take the magics away from a shell."""
    manager = shell.magics_manager
    for kind, ours in FsdpMagics.magics.items():
        for name in ours:
            manager.magics[kind].pop(name, None)
    manager.registry.pop(FsdpMagics.__name__, None)


def _document() -> None:
    """Give every magic its options and an example, for ``%magic?``."""
    for magic in MAGICS:
        method = getattr(FsdpMagics, magic.lstrip("%"))
        method.__doc__ = magic_help(magic, method.__doc__)


_document()
