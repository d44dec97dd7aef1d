"""Figures, tables and HTML from ranks, up to the page; the page itself is recorded."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest

from fsdp_magic.errors import CellFailedError
from fsdp_magic.notebook import session as session_module
from fsdp_magic.notebook.session import Session

TABLE = """
class Table:
    def _repr_html_(self): return '<table>'
    def __repr__(self): return 'T'
"""


class Recorder:
    """A notebook's page: what it shows, from above."""

    is_rich = True

    def __init__(self) -> None:
        self.items: list[Any] = []

    def write(self, stream: str, text: str) -> None:
        self.items.append(text.rstrip("\n"))

    def flush(self) -> None:
        pass

    def progress(self, lines: Any, notes: Any, *, final: bool) -> None:
        if final:
            self.items.append([line.labelled for line in lines])

    def display(self, bundle: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
        self.items.append(dict(bundle))
        return _Handle(self.items, len(self.items) - 1)


class _Handle:
    def __init__(self, items: list[Any], place: int) -> None:
        self.items, self.place = items, place

    def update(self, bundle: dict[str, Any], *, metadata: dict[str, Any], raw: bool) -> None:
        self.items[self.place] = bundle


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(session_module, "Page", lambda: recorder)
    return recorder


def html(text: str) -> dict[str, str]:
    return {"text/plain": "<IPython.core.display.HTML object>", "text/html": text}


def test_what_all_ranks_display_is_shown_once_with_its_text_around(
    session: Session, page: Recorder
) -> None:
    code = "from IPython.display import HTML\nprint('a'); display(HTML('<b>x</b>')); print('b')"
    session.run(f"import torch.distributed as dist; dist.barrier()\n{code}")
    assert page.items == ["[ranks 0-1] a", "[ranks 0-1]", html("<b>x</b>"), "[ranks 0-1] b"]


def test_the_last_expression_is_shown_rich_and_returned_as_its_repr(
    session: Session, page: Recorder
) -> None:
    outputs = session.run(f"{TABLE}Table()")
    assert page.items == ["[ranks 0-1]", {"text/plain": "T", "text/html": "<table>"}]
    assert [output.result for output in outputs] == ["T", "T"]


def test_results_that_differ_are_shown_by_rank(session: Session, page: Recorder) -> None:
    session.run("from IPython.display import HTML\nHTML(str(rank))")
    assert page.items == ["[rank 0]", html("0"), "[rank 1]", html("1")]


def test_without_a_page_the_text_is_shown(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run(f"{TABLE}Table()")
    assert capsys.readouterr().out == "[ranks 0-1] T\n"


def test_a_result_of_many_lines_is_labelled_on_each(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run("class Two:\n    def __repr__(self): return 'one\\ntwo'\nTwo()")
    assert capsys.readouterr().out == "[ranks 0-1] one\n[ranks 0-1] two\n"


def test_a_value_with_a_display_of_its_own_is_shown_once(session: Session, page: Recorder) -> None:
    code = "class Own:\n    def _ipython_display_(self): print('mine')\nOwn()"
    session.run(code)
    assert page.items == ["[ranks 0-1] mine"]


def test_updates_and_cleared_output_stay_in_their_places(session: Session, page: Recorder) -> None:
    code = """
from IPython.display import HTML, clear_output
handle = display(HTML("first"), display_id=True)
for i in range(3):
    clear_output(wait=True)
    display(HTML(f"plot {i}"))
    print("epoch", i)
handle.update(HTML("last"))
"""
    session.run(code, ranks="0")
    # the handle's display is one of those that were cleared
    assert page.items == ["[rank 0]", html("plot 2"), ["[rank 0] epoch 2"]]


def test_huge_displays_and_widgets_are_one_line_each(session: Session, page: Recorder) -> None:
    code = """
display({"text/plain": "x", "image/png": "a" * 6_000_000}, raw=True)
display({"text/plain": "x", "application/vnd.jupyter.widget-view+json": {}}, raw=True)
"""
    session.run(code, ranks="0")
    large, widget = page.items
    assert "the limit is 5 MB" in large
    assert "a widget cannot work on an engine" in widget


def test_what_was_displayed_before_an_error_is_shown(session: Session, page: Recorder) -> None:
    with pytest.raises(CellFailedError):
        session.run("from IPython.display import HTML\ndisplay(HTML('x')); 1 / 0", ranks="1")
    assert page.items == ["[rank 1]", html("x")]


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib: pip install it"
)
def test_figures_are_shown_as_in_a_notebook(session: Session, page: Recorder) -> None:
    session.run("import matplotlib.pyplot as plt")
    session.run("_ = plt.plot([1, 2]); print('drawn')")
    session.run("_ = plt.plot([2, rank]); plt.show(); print('shown')")
    kinds = [sorted(item) if isinstance(item, dict) else item for item in page.items]
    figure = ["image/png", "text/plain"]
    assert kinds[:3] == ["[ranks 0-1] drawn", "[ranks 0-1]", figure]
    assert kinds.count(figure) == 3
    assert sorted(item for item in kinds[3:] if isinstance(item, str)) == [
        "[rank 0]", "[rank 1]", "[ranks 0-1] shown",
    ]  # fmt: skip


def test_what_ipython_does_after_a_cell_is_done_after_ours(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run(
        "def after(): print('after')\nget_ipython().events.register('post_execute', after)",
        show=False,
    )
    try:
        session.run("print('within')")
        assert capsys.readouterr().out == "[ranks 0-1] within\n[ranks 0-1] after\n"
    finally:
        session.run("get_ipython().events.unregister('post_execute', after)", show=False)


def test_a_loop_of_updates_does_not_drown_the_page(session: Session, page: Recorder) -> None:
    code = """
import time
from IPython.display import HTML
handle = display(HTML("0"), display_id=True)
publisher, sent, until = get_ipython().display_pub, [], time.monotonic() + 0.6
send = publisher.session.send
publisher.session.send = lambda stream, message, *args, **kwargs: (
    sent.append(message["msg_type"]), send(stream, message, *args, **kwargs))
i = 0
while time.monotonic() < until or i <= 50:
    i += 1
    handle.update(HTML(f"number {i}"))
display(HTML(f"after {i}"))
del publisher.session.send
(i, sent.count("update_display_data"))
"""
    i, sent = eval(str(session.run(code, ranks="0", timeout=20)[0].result))
    assert sent <= i // 10
    assert page.items[:4] == ["[rank 0]", html(f"number {i}"), "[rank 0]", html(f"after {i}")]


def test_a_later_cell_updates_what_an_earlier_one_displayed(
    session: Session, page: Recorder
) -> None:
    session.run("from IPython.display import HTML\nhandle = display(HTML('a'), display_id=True)")
    session.run("handle.update(HTML('b')); print('updated')")
    assert page.items == ["[ranks 0-1]", html("b"), "[ranks 0-1] updated"]


def test_what_a_thread_displays_is_looked_at_too(session: Session, page: Recorder) -> None:
    code = r"""
import threading
def show():
    display({"text/plain": "x", "image/png": "a" * 6_000_000}, raw=True)
    display({"text/plain": "x", "text/html": "caf\udce9"}, raw=True)
thread = threading.Thread(target=show)
thread.start()
thread.join()
"""
    session.run(code, ranks="0", timeout=20)
    large, label, text = page.items
    assert "the limit is 5 MB" in large
    assert (label, text["text/html"]) == ("[rank 0]", "caf\\udce9")
