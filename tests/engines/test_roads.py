"""The channel that verbs take, and ipyparallel's own road beside it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import ipyparallel
import pytest

from fsdp_magic.errors import CellInterrupted, EngineDiedError, FsdpError, UsageError
from fsdp_magic.notebook.session import Session


def test_output_of_every_kind_comes_whole_and_in_order_before_the_answer(session: Session) -> None:
    code = """
import sys
from IPython.display import display
for i in range(300):
    print(i)
print("partial", end="")
display("shown")
print("error", file=sys.stderr)
"""
    numbers = "".join(f"{i}\n" for i in range(300))
    for _ in range(20):
        for output in session.run(code, show=False):
            assert output.stdout == f"{numbers}partial'shown'\n"
            assert output.stderr == "error\n"


def test_a_large_request_and_a_large_answer_come_whole(session: Session) -> None:
    sent = os.urandom(5_000_000)
    session.push(sent=sent)
    assert session.pull("sent[::-1]") == sent[::-1]


@pytest.mark.parametrize(
    ("item", "said"),
    [("lambda: 1", "pickle"), ("Own()", "cannot be read in the notebook")],
    ids=["cannot be sent", "cannot be read"],
)
def test_an_answer_that_does_not_travel_is_an_error_and_the_next_cell_works(
    session: Session, item: str, said: str
) -> None:
    session.run("class Own: pass\ndata = [1.0, 2.0]", show=False)
    code = f"import torch; loss = torch.ones(1); collect = {{'own': [{item} for _ in batch]}}"
    with pytest.raises(FsdpError, match=said):
        session.eval(code, data="data", show=False)
    assert [o.result for o in session.run("rank", show=False)] == ["0", "1"]


def test_a_cell_comes_after_the_persons_own_that_was_sent_before(session: Session) -> None:
    waiting = session.client[:].execute("import time; time.sleep(0.4); done = 1", block=False)
    assert [o.result for o in session.run("done", show=False)] == ["1", "1"]
    waiting.get(timeout=5)


def test_the_persons_own_cells_can_be_interrupted(session: Session, tmp_path: Path) -> None:
    client = session.client
    begins = f"import os, time; open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').close()"
    waiting = client[:].execute(f"{begins}; time.sleep(60)", block=False)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.05)
    client.send_signal(signal.SIGINT, block=True)
    with pytest.raises(ipyparallel.error.CompositeError, match="KeyboardInterrupt"):
        waiting.get(timeout=5)
    assert [o.result for o in session.run("rank", show=False)] == ["0", "1"]


def test_an_engine_without_a_channel_is_reached_over_the_controller(session: Session) -> None:
    cluster = session.engines.cluster
    orders, cluster._orders = cluster._orders, {}
    try:
        outputs = session.run("print('far', rank); rank", show=False)
    finally:
        cluster._orders = orders
    assert [(o.stdout, o.result) for o in outputs] == [("far 0\n", "0"), ("far 1\n", "1")]


def test_who_waits_for_an_engine_that_dies_gets_an_error(session: Session) -> None:
    client = session.client
    first = client.ids[0]
    waiting = client[first].apply_async(time.sleep, 60)
    os.kill(session.engines.cluster.hellos[first].pid, signal.SIGKILL)
    with pytest.raises(ipyparallel.error.RemoteError, match="EngineError: Engine"):
        waiting.get(timeout=5)
    assert len(client.ids) == 1
    with pytest.raises(EngineDiedError):
        session.run("1", show=False)


def test_text_that_is_no_unicode_is_shown_as_well_as_it_can_be(session: Session) -> None:
    code = "from IPython.display import display, HTML\ndisplay(HTML('caf\\udce9 x'))\nprint(1)"
    assert [o.stdout for o in session.run(code, show=False)] != []
    assert [o.result for o in session.run("rank", show=False)] == ["0", "1"]


def test_what_the_notebook_cannot_take_fails_its_own_cell_alone(session: Session) -> None:
    code = """
kernel = get_ipython().kernel
if rank == 1:
    no_data = {"metadata": {}}
    kernel.session.send(kernel.iopub_socket, "display_data", no_data, parent=kernel.get_parent())
done = 1
"""
    with pytest.raises(FsdpError, match="what engine 1 sent cannot be read in the notebook"):
        session.run(code, show=False)
    assert [o.result for o in session.run("done", show=False)] == ["1", "1"]


def test_a_cell_of_another_thread_is_refused_while_one_runs(session: Session) -> None:
    seen: list[BaseException | int] = []

    def second() -> None:
        time.sleep(0.3)
        try:
            session.run("2", show=False)
        except BaseException as error:
            seen.append(error)
        seen.append(session.completions("ra") is None)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=second)
    thread.start()
    with pytest.raises(CellInterrupted):
        session.run("import time; time.sleep(60)", show=False)
    thread.join()
    refused, _ = seen
    assert isinstance(refused, UsageError)
    assert "the engines are running a cell" in str(refused)
    assert [o.result for o in session.run("rank", show=False)] == ["0", "1"]


def test_a_cell_from_within_a_run_is_refused(session: Session) -> None:
    session.model("import torch; model = torch.nn.Linear(2, 1)", show=False)
    session.run("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", show=False)

    def log(values: Mapping[str, float], step: int) -> None:
        session.pull("1")

    code = "loss = model(torch.ones(1, 2)).sum(); import time; time.sleep(0.3)"
    run = session.train(code, steps=2, log=log, show=False)
    assert "--log raised UsageError: the engines are running a cell" in run.notes[-1]
