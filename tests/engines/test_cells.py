"""``%%fsdp``: what a cell prints, returns, raises, finds; and that the session outlives it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ipyparallel.error import CompositeError

from fsdp_magic.errors import CellFailedError, FsdpError, UsageError
from fsdp_magic.notebook import variables
from fsdp_magic.notebook.session import Session
from fsdp_magic.notebook.world import usable_cores


def results(session: Session, code: str, **options: Any) -> list[str | None]:
    """Return the result of a cell on every rank."""
    return [output.result for output in session.run(code, show=False, **options)]


def failed(session: Session, code: str, **options: Any) -> CellFailedError:
    """Run a cell that must fail; the session must be usable afterwards."""
    with pytest.raises(CellFailedError) as caught:
        session.run(code, **{"show": False, **options})
    together = "import torch.distributed as dist; dist.barrier(); rank"
    assert results(session, together) == [str(rank) for rank in range(session.world_size)]
    return caught.value


# ---------------------------------------------------------------- what a cell prints


def test_equal_output_is_shown_once_and_other_output_by_rank(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("import sys; print('same'); print('mine', rank); print('bad', file=sys.stderr)")
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == [
        "[rank 0] mine 0",
        "[rank 1] mine 1",
        "[ranks 0-1] same",
    ]
    assert shown.err.splitlines() == ["[ranks 0-1] bad"]


def test_a_ranks_lines_keep_their_order(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("for i in range(300): print(f'{rank}:{i}')")
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert own == [f"[rank {rank}] {rank}:{i}" for i in range(300)]


def test_output_comes_while_the_cell_runs(
    session: Session, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen = ""
    was_seen = tmp_path / "was_seen"

    def look() -> None:
        nonlocal seen
        deadline = time.monotonic() + 30
        while "first" not in seen and time.monotonic() < deadline:
            time.sleep(0.05)
            seen += capsys.readouterr().out
        was_seen.touch()

    looker = threading.Thread(target=look)
    looker.start()
    waits = f"while not os.path.exists({str(was_seen)!r}): time.sleep(0.05)"
    session.run(f"import os, time; print('first')\n{waits}\nprint('last')", timeout=30)
    looker.join()
    assert "last" not in seen


def test_outputs_hold_what_each_rank_printed(session: Session) -> None:
    code = "import sys; print('out', rank); sys.stderr.write(f'err {rank}')"
    first, second = session.run(code, show=False)
    assert (first.rank, first.stdout, first.stderr) == (0, "out 0\n", "err 0")
    assert (second.rank, second.stdout, second.stderr) == (1, "out 1\n", "err 1")


def test_without_show_nothing_is_printed(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("print('quiet'); 1", show=False)
    assert capsys.readouterr() == ("", "")


def test_nothing_printed_before_an_error_is_lost(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
import sys
for i in range(2000):
    print(f"out {i}")
print("err", file=sys.stderr)
sys.stdout.write("no newline")
raise ValueError("afterwards")
"""
    error = failed(session, code, show=True)
    expected = "".join(f"out {i}\n" for i in range(2000)) + "no newline"
    assert [output.stdout for output in error.outputs] == [expected, expected]
    assert [output.stderr for output in error.outputs] == ["err\n", "err\n"]
    shown = capsys.readouterr()
    assert [f"[ranks 0-1] out {i}" for i in range(2000)] == [
        line for line in shown.out.splitlines() if "out" in line
    ]
    assert "[ranks 0-1] no newline" in shown.out
    assert "[ranks 0-1] err" in shown.err


def test_what_a_released_rank_printed_is_not_lost(session: Session) -> None:
    error = failed(
        session,
        "import time\nprint('before', rank)\nif rank: raise ValueError('x')\ntime.sleep(30)",
    )
    assert [output.stdout for output in error.outputs] == ["before 0\n", "before 1\n"]


def test_what_is_displayed_is_shown_as_text(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("display({'a': 1})")
    assert capsys.readouterr().out == "[ranks 0-1] {'a': 1}\n"


def test_every_one_of_many_short_requests_is_answered(session: Session) -> None:
    for _ in range(500):
        assert len(session.status(show=False)) == 2


# ---------------------------------------------------------------- what it returns


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("1 + 1", "2"),
        ("x = 3\nx", "3"),
        ("'text'", "'text'"),
        ("None", None),
        ("x = 3", None),
        ("1 + 1;", None),
        ("1 + 1;  # quiet", None),
        ("1 + 1  # shown", "2"),
        ("';'", "';'"),
        ("", None),
        ("def f():\n    return 1", None),
    ],
)
def test_the_result_is_the_last_expression(session: Session, code: str, result: str | None) -> None:
    assert results(session, code) == [result, result]


def test_results_are_shown_by_rank_and_equal_ones_once(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("rank * 10")
    session.run("'same'")
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] 0",
        "[rank 1] 10",
        "[ranks 0-1] 'same'",
    ]


def test_variables_stay_for_the_next_cell(session: Session) -> None:
    session.run("x = rank + 5", show=False)
    assert results(session, "x") == ["5", "6"]


# ---------------------------------------------------------------- what it raises


def test_a_traceback_has_the_persons_frames_only_and_equal_ones_once(session: Session) -> None:
    code = """import torch
def multiply():
    return torch.zeros(2, 3) @ torch.zeros(2, 3)
multiply()
"""
    error = failed(session, code)
    assert error.ranks == (0, 1)
    assert [error.exceptions[rank].exception_type for rank in error.ranks] == ["RuntimeError"] * 2
    text = str(error)
    assert text.count("return torch.zeros(2, 3)") == 1
    assert text.count("in multiply") == 1
    assert "line 4, in <module>" in text
    assert "ranks 0-1" in text
    assert "site-packages" not in text
    assert "fsdp_magic/" not in text


def test_different_failures_are_both_told(session: Session) -> None:
    error = failed(session, "raise [ValueError, KeyError][rank]('mine')")
    assert [error.exceptions[rank].exception_type for rank in (0, 1)] == ["ValueError", "KeyError"]
    assert "ValueError: mine" in str(error)
    assert "KeyError: 'mine'" in str(error)


def test_a_failure_in_a_file_of_the_persons_shows_that_file(
    session: Session, tmp_path: Path
) -> None:
    (tmp_path / "persons_module.py").write_text("def fail():\n    raise LookupError('here')\n")
    (tmp_path / "broken_module.py").write_text("import persons_module\npersons_module.fail()\n")
    session.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})", show=False)
    error = failed(session, "import broken_module")
    session.run("sys.path.pop(0)", show=False)
    assert "persons_module.py" in str(error)
    assert "broken_module.py" in str(error)
    assert "raise LookupError('here')" in str(error)
    assert "frozen" not in str(error), "the import machinery is nobody's business"


def test_what_led_to_a_failure_is_told_too(session: Session) -> None:
    error = failed(
        session, "try:\n    1 / 0\nexcept Exception as e:\n    raise ValueError('outer') from e"
    )
    text = str(error)
    assert "ZeroDivisionError: division by zero" in text
    assert text.index("ZeroDivisionError") < text.index("direct cause") < text.index("outer")


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("1 / 0", "ZeroDivisionError", "division by zero"),
        ("nothing_of_that_name", "NameError", "nothing_of_that_name"),
        ("class Own(Exception): pass\nraise Own('text')", "Own", "Own: text"),
        ("assert False, 'no'", "AssertionError", "no"),
        ("import sys; sys.exit(3)", "SystemExit", "3"),
        ("raise StopIteration(3)", "StopIteration", "3"),
        ("def f(): f()\nf()", "RecursionError", "more times"),
        ("class R:\n    def __repr__(self): 1 / 0\nR()", "ZeroDivisionError", "__repr__"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E", "cannot be shown"),
        ("e = ValueError('x'); e.add_note('read this'); raise e", "ValueError", "read this"),
    ],
)
def test_a_failure_keeps_its_type_and_text(
    session: Session, code: str, kind: str, words: str
) -> None:
    error = failed(session, code)
    assert {failure.exception_type for failure in error.exceptions.values()} == {kind}
    assert words in str(error)


def test_a_syntax_error_points_at_its_place_and_runs_nothing(session: Session) -> None:
    error = failed(session, "ran = True\nx = = 1")
    assert "SyntaxError" in str(error)
    assert "x = = 1" in str(error)
    assert "line 2" in str(error)
    assert results(session, "'ran' in globals()") == ["False", "False"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import asyncio\nawait asyncio.sleep(0)", "line 2 awaits at top level"),
        ("async with x: pass", "awaits at top level"),
        ("input('name? ')", "%fsdp_push"),
        ("breakpoint()", "%fsdp_pull"),
        ("exit()", "%fsdp_shutdown"),
        ("quit", "%fsdp_shutdown"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_in_one_line(
    session: Session, code: str, words: str
) -> None:
    error = failed(session, code)
    assert words in str(error)
    assert len(str(error).splitlines()) == 1


def test_an_await_inside_a_function_is_fine(session: Session) -> None:
    code = (
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 7\nasyncio.run(f())"
    )
    assert results(session, code) == ["7", "7"]


def test_the_tensors_of_a_failed_cell_are_free_again(session: Session) -> None:
    code = """
import weakref, torch
class Held(torch.nn.Module): pass
def fail():
    held = Held()
    globals()["watched"] = weakref.ref(held)
    raise ValueError("x")
fail()
"""
    failed(session, code)
    assert results(session, "watched() is None") == ["True", "True"]


# ---------------------------------------------------------------- one rank fails


WAITING = {
    "in a collective": "import torch.distributed as dist; dist.barrier()",
    "in an asynchronous collective": "dist.all_reduce(torch.ones(3), async_op=True).wait()",
    "for an object": "dist.broadcast_object_list([None], 0)",
    "in a sleep": "import time; time.sleep(60)",
    "in a Python loop": "while True: pass",
    "catching Exception": "while True:\n    try: time.sleep(0.01)\n    except Exception: pass",
    "catching a collective's error": (
        "while True:\n    try: dist.barrier()\n    except Exception: time.sleep(0.01)"
    ),
    "in a thread's join": "import threading\nthreading.Event().wait()",
}


@pytest.mark.parametrize("where", WAITING)
def test_a_rank_that_waits_is_released_when_its_peer_fails(session: Session, where: str) -> None:
    code = f"""
import time, torch, torch.distributed as dist
if rank == 0:
    time.sleep(0.1)
    raise ValueError("the reason")
{WAITING[where]}
"""
    session.run("import torch.distributed, time", show=False)
    started = time.monotonic()
    with pytest.raises(CellFailedError) as caught:
        session.run(code, show=False)
    assert time.monotonic() - started < 3.0
    assert caught.value.ranks == (0,)
    assert "ValueError: the reason" in str(caught.value)
    assert "rank 1 released" in str(caught.value)
    together = "dist.barrier(); x = torch.ones(2); dist.all_reduce(x); x[0].item()"
    assert results(session, together) == ["2.0", "2.0"]


def test_equal_runtime_errors_of_all_ranks_are_their_own_and_no_release(session: Session) -> None:
    for _ in range(5):
        assert failed(session, "raise RuntimeError('mine')").ranks == (0, 1)


def test_a_group_made_before_a_failure_works_after_it(session: Session) -> None:
    session.run("import torch, torch.distributed as dist; g = dist.new_group([0, 1])", show=False)
    failed(session, "if rank == 1: raise ValueError('x')\ndist.barrier(g)")
    code = "x = torch.ones(1); dist.all_reduce(x, group=g); x.item()"
    assert results(session, code) == ["2.0", "2.0"]


def test_a_rank_that_waits_for_a_new_group_is_released_and_groups_can_be_made_again(
    session: Session,
) -> None:
    code = "if rank == 0: raise ValueError('x')\ndist.new_group([0, 1])"
    session.run("import torch.distributed as dist", show=False)
    assert failed(session, code).ranks == (0,)
    session.run("dist.barrier(dist.new_group([0, 1]))", show=False, timeout=5)


def test_the_last_line_of_many_scripts_ends_nothing(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run(
        "import torch.distributed as dist\nown = dist.new_group()\n"
        "dist.destroy_process_group(own)\ndist.destroy_process_group()"
    )
    assert "dist.destroy_process_group() does nothing here" in capsys.readouterr().err
    assert session.run("dist.barrier(); 1", show=False)[0].result == "1"


def test_many_failures_in_a_row_leave_the_session_in_order(session: Session) -> None:
    session.run("import torch.distributed as dist", show=False)
    for i in range(10):
        with pytest.raises(CellFailedError):
            session.run(f"if rank == {i % 2}: raise ValueError('x')\ndist.barrier()", show=False)
    assert results(session, "dist.barrier(); 'fine'") == ["'fine'", "'fine'"]


# ---------------------------------------------------------------- IPython in cells


def test_ipythons_own_syntax_works_in_a_cell(session: Session) -> None:
    outputs = session.run("!echo from the shell\nx = !echo one\nx[0]", show=False)
    assert [output.stdout.strip() for output in outputs] == ["from the shell"] * 2
    assert [output.result for output in outputs] == ["'one'"] * 2
    assert "Wall time" in session.run("%%time\nsum(range(10))", show=False)[1].stdout
    assert session.run("%pwd", show=False)[0].result == repr(os.getcwd())


def test_help_on_a_name_is_printed(session: Session) -> None:
    assert "number of items" in session.run("len?", show=False)[1].stdout


# ---------------------------------------------------------------- names


def test_every_cell_finds_its_place_in_the_world(session: Session) -> None:
    names = "(rank, world_size, dp_rank, dp_size, str(device))"
    assert results(session, names) == ["(0, 2, 0, 2, 'cpu')", "(1, 2, 1, 2, 'cpu')"]


def test_a_persons_own_value_of_such_a_name_is_back_after_the_cell(session: Session) -> None:
    assert [output.stderr for output in session.run("rank = 'mine'", show=False)] == ["", ""]
    first, second = session.run("rank", show=False), session.run("rank", show=False)
    assert [output.result for output in (*first, *second)] == ["0", "1", "0", "1"]
    assert all("`rank`" in output.stderr for output in first), "its hiding is said"
    assert [output.stderr for output in second] == ["", ""], "but only once"
    assert session.client[:].pull("rank", block=True) == ["mine", "mine"]


def test_our_names_are_gone_outside_cells(session: Session) -> None:
    session.run("1", show=False)
    for name in ("rank", "world_size", "dp_rank", "device"):
        with pytest.raises(CompositeError, match="NameError"):
            session.client[:].pull(name, block=True)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(("ranks", "chosen"), [("1", [1]), ([0], [0]), ("0-1", [0, 1]), ("0", [0])])
def test_a_cell_runs_on_the_ranks_asked_for_only(
    session: Session, ranks: Any, chosen: list[int]
) -> None:
    outputs = session.run("ran = True; rank", ranks=ranks, show=False)
    assert [output.rank for output in outputs] == chosen
    assert [output.result for output in outputs] == [str(rank) for rank in chosen]
    there = [str(rank in chosen) for rank in (0, 1)]
    assert results(session, "'ran' in globals()") == there


def test_a_rank_outside_the_world_is_refused(session: Session) -> None:
    with pytest.raises(UsageError, match="this world has ranks 0 to 1"):
        session.run("1", ranks="2", show=False)


def test_a_failure_on_some_ranks_only_leaves_the_others_in_order(session: Session) -> None:
    assert failed(session, "raise ValueError('x')", ranks="1").ranks == (1,)


@pytest.mark.parametrize("code", ["import time; time.sleep(60)", "while True: pass"])
def test_a_cell_is_stopped_after_its_time(session: Session, code: str) -> None:
    started = time.monotonic()
    error = failed(session, code, timeout=0.3)
    assert time.monotonic() - started < 2.0
    assert "stopped after 0.3 s" in str(error)


def test_a_collective_that_one_rank_never_joins_is_stopped_after_its_time(
    session: Session,
) -> None:
    started = time.monotonic()
    error = failed(
        session, "import torch.distributed as dist\nif rank == 0: dist.barrier()", timeout=0.3
    )
    assert time.monotonic() - started < 2.0
    assert "stopped after 0.3 s" in str(error)


def test_a_cell_within_its_time_is_left_alone(session: Session) -> None:
    assert results(session, "1", timeout=30) == ["1", "1"]


# ---------------------------------------------------------------- push and pull


def test_what_is_pushed_arrives_on_every_rank(session: Session) -> None:
    session.push(x=[1, 2], text="hello")
    assert results(session, "(x, text)") == ["([1, 2], 'hello')"] * 2


def test_ranks_own_copies_of_what_was_pushed(session: Session) -> None:
    session.push(x=[1])
    session.run("x.append(rank)", show=False)
    assert session.pull("x", rank="all") == [[1, 0], [1, 1]]


def test_a_tensor_comes_detached_and_whole(session: Session) -> None:
    session.run("import torch; w = torch.arange(6.0, requires_grad=True) * (rank + 1)", show=False)
    pulled = session.pull("w", rank=1)
    assert pulled.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert not pulled.requires_grad
    nested = session.pull("{'a': [w, 1]}")
    assert nested["a"][1] == 1
    assert not nested["a"][0].requires_grad


def test_pull_takes_an_expression_and_a_rank(session: Session) -> None:
    session.run("x = rank + 5", show=False)
    assert session.pull("x * 2") == 10
    assert session.pull("x * 2", rank=1) == 12
    assert session.pull("x", rank="1") == 6
    assert session.pull("x", rank="all") == [5, 6]
    assert session.pull("None", rank="all") == [None, None]


def test_pull_takes_what_only_one_rank_has(session: Session) -> None:
    session.run("import torch; mine = {'x': torch.ones(2)}", ranks=1, show=False)
    assert session.pull("mine['x']", rank=1).tolist() == [1.0, 1.0]
    for rank in (0, "all"):
        with pytest.raises(CellFailedError, match="name 'mine' is not defined") as caught:
            session.pull("mine", rank=rank)
        assert caught.value.ranks == (0,)
    session.model("import torch\nmodel = torch.nn.Linear(4, 4)", show=False)
    session.run("del model", ranks=0, show=False)
    with pytest.raises(CellFailedError, match="sharded and not there on every rank"):
        session.pull("model.weight", rank=1)
    with pytest.raises(UsageError, match="1 \\+ is not Python; it takes an expression"):
        session.pull("1 +")
    with pytest.raises(UsageError, match=r"model.0.weight is not Python; write model\[0\].weight"):
        session.pull("model.0.weight")
    with pytest.raises(CellFailedError, match="a model stays on the engines; pull its weights"):
        session.pull("model", rank=1)
    assert session.pull("rank", rank=1) == 1


def test_pull_from_a_rank_that_is_not_there_is_refused(session: Session) -> None:
    with pytest.raises(UsageError, match="--rank 2 does not exist"):
        session.pull("1", rank=2)


class OnlyHere:
    """A class that no engine can import."""


def one_line(call: Any) -> str:
    """Return the text of the error that a call must raise, which must be one line."""
    with pytest.raises(FsdpError) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_value_that_cannot_travel_is_refused_in_one_line(session: Session) -> None:
    assert "f cannot be sent" in one_line(lambda: session.push(f=lambda: 1))
    assert "a function cannot be brought" in one_line(lambda: session.pull("lambda: 1"))
    session.run("class OnlyThere: pass\nx = OnlyThere()", show=False)
    assert "x cannot be read in the notebook" in one_line(lambda: session.pull("x"))
    assert results(session, "1") == ["1", "1"]


def test_an_object_of_a_class_the_engines_lack_is_refused_in_one_line(session: Session) -> None:
    assert "x cannot be read on the engines" in one_line(lambda: session.push(x=OnlyHere()))
    assert results(session, "1") == ["1", "1"]


def test_an_expression_that_fails_is_the_persons_error(session: Session) -> None:
    with pytest.raises(CellFailedError, match="NameError") as caught:
        session.pull("nothing_of_that_name")
    assert "<string>" not in str(caught.value), "there is no line to point at"
    with pytest.raises(UsageError, match="a b is not Python"):
        session.pull("a b")


@pytest.mark.parametrize("value", ["torch.zeros(1000)", "'x' * 4000", "[torch.zeros(500)] * 2"])
def test_a_large_value_comes_only_if_it_was_meant(
    session: Session, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run("import torch", show=False)
    monkeypatch.setattr(variables, "PULL_LIMIT_BYTES", 3000)
    assert "--yes" in one_line(lambda: session.pull(value))
    assert session.pull(value, yes=True) is not None
    assert session.pull("torch.zeros(10)") is not None


# ---------------------------------------------------------------- status and surroundings


def test_status_says_what_each_rank_is(session: Session) -> None:
    statuses = session.status(show=False)
    pids = [int(pid or 0) for pid in results(session, "import os; os.getpid()")]
    assert [status.rank for status in statuses] == [0, 1]
    assert [status.local_rank for status in statuses] == [0, 1]
    assert [status.pid for status in statuses] == pids
    assert {status.host for status in statuses} == {os.uname().nodename}
    assert {status.device for status in statuses} == {"cpu"}
    assert all(status.models == () and status.steps == 0 for status in statuses)
    for status in statuses:
        assert 0 <= status.allocated_bytes <= status.reserved_bytes <= status.used_bytes
        assert status.used_bytes < (status.capacity_bytes or 0)


def test_status_counts_what_tensors_take(session: Session) -> None:
    before = session.status(show=False)[0].allocated_bytes
    session.run("import torch; x = torch.ones(25 * 2**20)", show=False)
    after = session.status(show=False)[0].allocated_bytes
    assert 100 * 2**20 <= after - before < 110 * 2**20


def test_status_is_shown_as_a_table(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    # without a notebook it goes to the log
    assert len(session.status()) == 2
    assert capsys.readouterr().err == ""


def test_accelerate_sees_every_rank(session: Session) -> None:
    code = (
        "from accelerate import Accelerator\na = Accelerator()\n(a.num_processes, a.process_index)"
    )
    assert results(session, code) == ["(2, 0)", "(2, 1)"]


def test_cells_have_the_environment_of_torchrun(session: Session) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    code = f"import os; [os.environ[name] for name in {names}]"
    first, second = results(session, code)
    assert first == str(["0", "0", "2", "2", "127.0.0.1"])
    assert second == str(["1", "1", "2", "2", "127.0.0.1"])
    assert all(results(session, "int(os.environ['MASTER_PORT']) > 0"))


def test_cores_are_shared_out_over_the_engines(session: Session) -> None:
    share = os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // 2)))
    code = "import os, torch; (os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"
    assert results(session, code) == [f"('{share}', {share})"] * 2


def test_random_draws_are_the_same_on_all_ranks(session: Session) -> None:
    code = "import random, torch; (torch.rand(2).tolist(), random.random())"
    first, second = results(session, code)
    assert first == second


def test_the_engines_can_be_reached_with_ipyparallel_too(session: Session) -> None:
    view = session.client[:]
    view.push({"x": 3}, block=True)
    assert results(session, "x") == ["3", "3"]
    assert view.pull("x", block=True) == [3, 3]


def test_an_exception_that_is_its_own_cause_is_shown(session: Session) -> None:
    error = failed(session, "e = ValueError('self')\nraise e from e")
    assert "ValueError: self" in str(error)
    assert results(session, "1") == ["1", "1"]


def test_values_of_dict_like_classes_come_as_they_are(session: Session) -> None:
    session.run("import collections, torch", show=False)
    assert session.pull("collections.Counter('aab')") == {"a": 2, "b": 1}
    assert session.pull("collections.defaultdict(list, a=[1])")["missing"] == []
    assert session.pull("collections.OrderedDict(x=torch.ones(2))")["x"].tolist() == [1.0, 1.0]


def test_autoreload_sees_what_changed_in_a_file(session: Session, tmp_path: Path) -> None:
    module = tmp_path / "changing_module.py"
    module.write_text("def value(): return 'old'\n")
    session.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})", show=False)
    try:
        session.run("%load_ext autoreload\n%autoreload 2\nimport changing_module", show=False)
        session.run("pass", show=False)
        module.write_text("def value(): return 'much newer'\n")
        os.utime(module, ns=(time.time_ns(), time.time_ns() + 5_000_000_000))
        assert session.run("changing_module.value()", show=False)[0].result == "'much newer'"
    finally:
        session.run(
            "%autoreload 0\nsys.path.pop(0)\ndel sys.modules['changing_module']", show=False
        )


def test_what_listens_to_cells_hears_each_once(session: Session) -> None:
    session.run("""
heard = []
def before(info): heard.append(info.raw_cell)
def after(result): heard.append(type(result.error_in_exec).__name__)
get_ipython().events.register("pre_run_cell", before)
get_ipython().events.register("post_run_cell", after)
import torch
w = torch.ones(1, requires_grad=True)
opt = torch.optim.SGD([w], 0.1)
""")
    try:
        session.train("loss = w.sum()", steps=3)
        with pytest.raises(CellFailedError):
            session.run("1 / 0", show=False)
        session.pull("w")
        heard = session.pull("heard")
    finally:
        session.run(
            "get_ipython().events.unregister('pre_run_cell', before)\n"
            "get_ipython().events.unregister('post_run_cell', after)",
            show=False,
        )
    assert heard == ["NoneType", "loss = w.sum()", "NoneType", "1 / 0", "ZeroDivisionError"]
