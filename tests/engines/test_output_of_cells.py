"""What cells print beside plain lines: bars, floods, C code, children, threads, warnings."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp_magic.errors import CellFailedError
from fsdp_magic.notebook.session import Session


def printed(session: Session, code: str, **options: Any) -> tuple[str, str]:
    """Return what rank 1 printed on both streams."""
    output = session.run(code, show=False, **options)[-1]
    return output.stdout, output.stderr


# ---------------------------------------------------------------- progress bars


def test_a_progress_bar_leaves_its_last_state_and_not_its_redraws(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
import sys
from tqdm.auto import tqdm
for i in tqdm(range(30), desc="outer", mininterval=0, file=sys.stderr):
    for j in tqdm(range(2), desc="inner", mininterval=0, leave=False, file=sys.stderr):
        pass
print("after")
"""
    outputs = session.run(code)
    for output in outputs:
        assert output.stdout == "after\n"
        (line,) = output.stderr.splitlines()
        assert line.startswith("outer: 100%")
    shown = capsys.readouterr()
    assert shown.out.count("after") <= 2
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith("[ranks 0-1] outer: 100%")


def test_a_counter_that_returns_to_its_line_is_one_line(session: Session) -> None:
    code = "for i in range(1000): print(i, end='\\r')\nprint('done')"
    assert printed(session, code) == ("done\n", "")


def test_bars_in_a_training_cell_are_bars_too(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("import torch\nfrom tqdm.auto import tqdm\nw = torch.ones(1, requires_grad=True)")
    session.run("opt = torch.optim.SGD([w], 0.1)")
    session.train("for _ in tqdm(range(5), desc='bar'): pass\nloss = w.sum()", steps=3)
    lines = [line for line in capsys.readouterr().err.splitlines() if "bar" in line]
    assert len(lines) == 3
    assert all("100%" in line for line in lines)


# ---------------------------------------------------------------- floods


def test_a_flood_is_capped_and_its_log_has_all_of_it(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = session.run("for i in range(50_000): print(rank, i)", name="<%%fsdp [flood]>")
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2500 + 20
    assert "… 97,480 more lines" in shown.err
    for output in outputs:
        log = Path(session.engines.cluster.directory, "output", f"fsdp-flood-rank{output.rank}.txt")
        assert log.read_text() == "".join(f"{output.rank} {i}\n" for i in range(50_000))
        assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700
        assert f"… 47,490 more lines; all of it is in {log}\n" in output.stdout
        assert output.stdout.startswith(f"{output.rank} 0\n")
        assert output.stdout.endswith(f"{output.rank} 49999\n")


@pytest.mark.parametrize(
    "code",
    [
        "while True: print('x' * 10_000)",
        "import subprocess; subprocess.run(['yes'])",
    ],
)
def test_a_flood_without_end_is_stopped_in_time_and_piles_up_nowhere(
    session: Session, code: str
) -> None:
    def resident() -> list[int]:
        text = Path("/proc/self/statm").read_text()
        of_engines = session.run("open('/proc/self/statm').read()", show=False)
        return [int(t.strip("'").split()[1]) for t in (text, *(o.result or "" for o in of_engines))]

    before = resident()
    started = time.monotonic()
    with pytest.raises(CellFailedError, match=r"stopped after 1 s"):
        session.run(code, show=False, timeout=1)
    assert time.monotonic() - started < 10.0
    grown = [after - first for first, after in zip(before, resident())]
    assert max(grown) * 4096 < 40 * 2**20, "an engine keeps at most what a moment prints"
    assert printed(session, "print('next')") == ("next\n", "")


# ---------------------------------------------------------------- where text comes from


def test_c_code_commands_and_subprocesses_are_heard(session: Session) -> None:
    code = """
import os, subprocess
os.write(1, b"from C\\n")
subprocess.run(["echo", "from a subprocess"])
os.system("echo from a shell")
os.write(2, b"bad news\\n")
"""
    expected = "from C\nfrom a subprocess\nfrom a shell\n"
    assert printed(session, code) == (expected, "bad news\n")


def test_forked_children_are_heard(session: Session) -> None:
    code = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        print("item", i)
        return i
_ = list(torch.utils.data.DataLoader(Data(), num_workers=1))
"""
    assert printed(session, code)[0] == "item 0\nitem 1\n"


def test_what_a_thread_prints_after_its_cell_is_not_the_next_cells(session: Session) -> None:
    code = """
import threading, time
told, go = threading.Event(), threading.Event()
def late():
    print("in time")
    told.set()
    go.wait()
    print("late")
thread = threading.Thread(target=late)
thread.start()
told.wait()
"""
    assert printed(session, code)[0] == "in time\n"
    assert printed(session, "go.set(); thread.join(); print('next')")[0] == "next\n"


def test_a_pool_of_an_earlier_cell_prints_into_the_cell_that_uses_it(session: Session) -> None:
    session.run(
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\n"
        "pool.submit(print, 'first').result()",
        show=False,
    )
    assert printed(session, "pool.submit(print, 'second').result()")[0] == "second\n"


def test_a_warning_is_told_once_with_its_line(session: Session) -> None:
    code = "import warnings\ndef f():\n    warnings.warn('careful')\nfor i in range(3): f()"
    _, text = printed(session, code, name="<%%fsdp [7]>")
    assert text == "<%%fsdp [7]>:3: UserWarning: careful\n  warnings.warn('careful')\n"


def test_what_px_prints_is_px_own_and_stays_with_its_result(session: Session) -> None:
    view = session.client[:]
    result = view.execute("print('of px')", silent=False, block=False)
    assert printed(session, "print('ours')")[0] == "ours\n"
    result.get(10)
    result.wait_for_output(10)
    assert result.stdout == ["of px\n"] * 2


def test_a_cell_on_some_ranks_prints_there(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("import os; _ = os.write(1, b'C\\n')", ranks="1")
    session.run("print(rank)", ranks="1")
    assert capsys.readouterr().out.splitlines() == ["[rank 1] C", "[rank 1] 1"]


# ---------------------------------------------------------------- what cells make


def test_every_call_has_lines_of_its_own_in_tracebacks(session: Session) -> None:
    session.run("def old(): 1 / 0  # the old line", show=False)
    with pytest.raises(CellFailedError) as caught:
        session.run("x = 1\nold()", show=False)
    assert "the old line" in str(caught.value)
    assert str(caught.value).count("[run ") == 2


def test_a_cell_that_is_edited_and_run_again_shows_its_new_lines(session: Session) -> None:
    for word in ("first", "second"):
        code = f"def f(): 1 / 0  # {word}\nf()"
        with pytest.raises(CellFailedError, match=f"# {word}"):
            session.run(code, show=False, name="<%%fsdp [3]>")


def test_the_source_of_functions_and_classes_of_cells_is_there(session: Session) -> None:
    code = """
import dataclasses, inspect
def function():
    return 1  # here
@dataclasses.dataclass
class Fields:
    x: int = 1  # there
class Methods:
    def method(self): pass  # everywhere
"""
    session.run(code, show=False)
    asked = "[inspect.getsource(x).count('ere') for x in (function, Fields, Methods)]"
    assert session.run(asked, show=False)[0].result == "[1, 1, 1]"


def test_sources_are_kept_while_they_are_needed_and_no_longer(session: Session) -> None:
    def kept() -> set[str]:
        code = "import gc, linecache; gc.collect(); [n for n in linecache.cache if '<%%' in n]"
        return set(eval(session.run(code, show=False)[0].result or ""))

    before = kept()  # torch remembers every class that was sharded, and each holds its code
    session.run("def kept(): 1 / 0  # still here", show=False, name="<%%fsdp [kept]>")
    for i in range(20):
        session.run(f"def passing(): return {i}\npassing()", show=False)
    left = kept() - before
    assert "<%%fsdp [kept]>" in left
    assert len(left) < 8
    with pytest.raises(CellFailedError, match="still here"):
        session.run("kept()", show=False)


def test_what_cells_make_can_be_saved_sent_and_compiled(session: Session) -> None:
    code = """
import dataclasses, io, multiprocessing, pickle, typing, torch
@dataclasses.dataclass
class Made:
    x: "typing.List[int]"
def square(i): return i * i
file = io.BytesIO()
torch.save(Made([1]), file)
file.seek(0)
with multiprocessing.get_context("fork").Pool(1) as pool:
    squares = pool.map(square, range(3))
(torch.load(file, weights_only=False), pickle.loads(pickle.dumps(Made)) is Made, squares,
 typing.get_type_hints(Made)["x"] == typing.List[int], torch.jit.script(square)(3))
"""
    expected = "(Made(x=[1]), True, [0, 1, 4], True, 9)"
    code = code.replace("def square(i)", "def square(i: int) -> int")
    assert session.run(code, show=False)[1].result == expected


def test_the_members_of_a_group_are_told_with_their_frames(session: Session) -> None:
    code = """
import asyncio
async def fail(): raise ValueError("in a task")
async def main():
    async with asyncio.TaskGroup() as group: group.create_task(fail())
asyncio.run(main())
"""
    with pytest.raises(CellFailedError) as caught:
        session.run(code, show=False)
    text = str(caught.value)
    assert "exception 1 of 1:" in text
    assert 'async def fail(): raise ValueError("in a task")' in text
    assert "ValueError: in a task" in text
    assert "asyncio/" not in text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import pdb; pdb.set_trace()", "a debugger has no terminal"),
        ("import pdb\ntry: 1 / 0\nexcept ArithmeticError: pdb.post_mortem()", "a debugger has"),
        ("%debug", "a debugger has no terminal"),
        ("%pdb on", "a debugger has no terminal"),
        ("import getpass; getpass.getpass()", "%fsdp_push answer"),
    ],
)
def test_debuggers_and_questions_are_refused_in_one_line(
    session: Session, code: str, words: str
) -> None:
    with pytest.raises(CellFailedError) as caught:
        session.run(code, show=False)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_client_keeps_nothing_of_our_cells(session: Session) -> None:
    client = session.client
    before = len(client.history)
    for _ in range(20):
        session.run("print('x')", show=False)
    assert len(client.history) == before
    assert not client.results
    assert len(client.metadata) <= 2


# ---------------------------------------------------------------- text that is no UTF-8


def test_text_that_no_message_can_carry_is_spelt_out(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    code = r"""
print('caf\udce9'); print('a\ud800')
display({'text/plain': 'shown \udce9', 'application/json': {'\udce9': ['\udce9']}}, raw=True)
'of \udce9'
"""
    output = session.run(code, timeout=20)[0]
    assert output.stdout == "caf\\udce9\na\\ud800\nshown \\udce9\n"
    assert output.result == "'of \\udce9'"
    assert "caf\\udce9" in capsys.readouterr().out
    with pytest.raises(CellFailedError, match=r"name \\udce9") as raised:
        session.run(r"raise ValueError('name \udce9')", timeout=20)
    str(raised.value).encode()


# ---------------------------------------------------------------- streams replaced or closed


def test_what_a_cell_puts_around_standard_output_shows_later_cells_too(session: Session) -> None:
    code = """
import sys
class Tee:
    def write(self, text): keep.write(text)
    def flush(self): keep.flush()
keep = sys.stdout
sys.stdout = Tee()
print("first")
"""
    try:
        assert printed(session, code) == ("first\n", "")
        assert printed(session, "print('later')") == ("later\n", "")
        assert printed(session, "sys.stdout = keep; print('back')") == ("back\n", "")
    finally:
        session.run("sys.stdout = keep", show=False)


def test_closing_standard_output_closes_nothing(session: Session) -> None:
    code = "import sys; sys.stdout.close(); sys.stderr.close(); print('on')"
    assert printed(session, code, timeout=10) == ("on\n", "")
    assert printed(session, "print('later')") == ("later\n", "")


# ---------------------------------------------------------------- forked children


@pytest.mark.parametrize(
    ("ending", "status", "told"),
    [
        ("raise ValueError('in child')", 1, "ValueError: in child"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no luck')", 1, "no luck"),
        ("print('reached the end')", 0, ""),
    ],
)
def test_a_child_that_a_cell_forks_ends_where_the_cell_ends(
    session: Session, ending: str, status: int, told: str
) -> None:
    fork = f"import os, sys\npid = os.fork()\nif pid == 0:\n    {ending}\nelse:\n    "
    code = f"{fork}print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    stdout, stderr = printed(session, code, timeout=20)
    assert stdout.endswith(f"{status}\n")
    assert told in stderr
    assert printed(session, "print('still one')") == ("still one\n", "")


def test_a_child_forked_in_a_training_cell_has_no_vote(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("import os, torch\nw = torch.ones(1, requires_grad=True)")
    session.run("opt = torch.optim.SGD([w], 0.1)")
    code = """
pid = os.fork()
if pid == 0:
    raise ValueError("in child")
os.waitpid(pid, 0)
loss = w.sum()
"""
    assert session.train(code, steps=2, timeout=20).state == "done"
    assert capsys.readouterr().err.count("ValueError: in child") in (2, 3, 4)


def test_a_huge_result_stays_on_the_engine(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "class Huge:\n    def __repr__(self): return 'z' * 20_000_000 + '\\nend'\nHuge()"
    result = session.run(code, timeout=20)[0].result
    assert result is not None
    assert len(result) < 202_000
    assert result.endswith("zz\nend")
    assert len(capsys.readouterr().out) < 202_000
