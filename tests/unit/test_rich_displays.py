"""What ranks display: once where it is the same, in its place where it is updated."""

from __future__ import annotations

from typing import Any

from fsdp_magic.notebook.output import Output
from fsdp_magic.notebook.rich_displays import DisplayNames, Shown


class Page:
    """A page on which displays are kept in order, as a notebook does."""

    is_rich = True

    def __init__(self, ranks: int) -> None:
        self.items: list[Any] = []
        self.output = Output(range(ranks), screen=self)

    def write(self, stream: str, text: str) -> None:
        self.items.append(text)

    def flush(self) -> None:
        pass

    def progress(self, lines: Any, notes: Any, *, final: bool) -> None:
        raise AssertionError

    def display(self, bundle: Any, metadata: Any) -> Any:
        return Handle(self.items, bundle)

    def show(self, rank: int, html: str, **options: Any) -> None:
        self.output.display(rank, Shown(bundle={"text/html": html}, **options), now=0.0)


class Handle:
    def __init__(self, items: list[Any], bundle: Any) -> None:
        self.items, self.place = items, len(items)
        items.append(bundle["text/html"])

    def update(self, bundle: Any, *, metadata: Any, raw: bool) -> None:
        assert raw
        self.items[self.place] = bundle["text/html"]


def test_equal_displays_are_shown_once_under_their_ranks() -> None:
    page = Page(2)
    page.show(0, "same")
    page.show(1, "same")
    page.show(0, "mine")
    page.output.finish()
    assert page.items == ["[ranks 0-1]\n", "same", "[rank 0]\n", "mine"]


def test_displays_and_lines_keep_a_ranks_order() -> None:
    from fsdp_magic.core.cell_output import PrintedReport

    page = Page(1)
    for text in ("a", "b"):
        page.output.add(0, "stdout", PrintedReport(parts=(f"{text}\n",)), now=0.0)
        page.show(0, f"<{text}>")
    page.output.add(0, "stdout", PrintedReport(parts=("unfinished",)), now=0.0)
    page.show(0, "<c>")
    page.output.finish()
    assert [x for x in page.items if x != "[rank 0]\n"] == [
        "[rank 0] a\n", "<a>", "[rank 0] b\n", "<b>", "[rank 0] unfinished\n", "<c>",
    ]  # fmt: skip


def test_an_update_takes_the_place_of_that_ranks_display() -> None:
    page = Page(2)
    for rank in (0, 1):
        page.show(rank, f"first {rank}", display_id=f"id of {rank}")
    page.show(0, "second 0", display_id="id of 0", update=True)
    page.output.finish()
    assert page.items == ["[rank 0]\n", "second 0", "[rank 1]\n", "first 1"]


def test_an_update_by_all_ranks_of_a_shared_display_is_made_once() -> None:
    page = Page(2)
    for text, update in (("a", False), ("b", True), ("c", True)):
        for rank in (0, 1):
            page.show(rank, text, display_id=f"id {rank}", update=update)
    page.output.finish()
    assert page.items == ["[ranks 0-1]\n", "c"]


def test_an_update_that_ranks_do_not_share_leaves_the_others_alone() -> None:
    page = Page(2)
    for rank in (0, 1):
        page.show(rank, "same", display_id="x")
    page.show(1, "other", display_id="x", update=True)
    page.show(1, "newest", display_id="x", update=True)
    page.output.finish()
    assert page.items == ["[ranks 0-1]\n", "same", "[rank 1]\n", "newest"]


def test_a_live_plot_that_clears_its_output_stays_in_one_place() -> None:
    page = Page(2)
    page.show(0, "kept")
    for step in range(5):
        page.output.clear(1)
        page.show(1, f"plot {step}")
        page.show(1, f"table {step}")
    page.output.finish()
    assert page.items == [
        "[rank 0]\n", "kept", "[rank 1]\n", "plot 4", "[rank 1]\n", "table 4",
    ]  # fmt: skip


def test_displays_without_end_are_counted_in_the_end() -> None:
    page = Page(1)
    for i in range(250):
        page.show(0, str(i))
    page.output.finish()
    assert page.items[-1] == "… 50 more displays\n"
    assert len(page.items) == 401


def test_where_there_is_no_page_the_text_is_printed() -> None:
    page = Page(2)
    page.is_rich = False
    for rank in (0, 1):
        bundle = {"text/plain": "a table", "text/html": "<table>"}
        page.output.display(rank, Shown(bundle=bundle), now=0.0)
    page.output.finish()
    assert page.items == ["[ranks 0-1] a table\n"]
    assert page.output.collected(1, "stdout") == "a table\n"


def test_a_place_is_drawn_four_times_a_second_and_in_the_end_with_the_newest() -> None:
    page = Page(1)
    page.show(0, "0", display_id="x")
    drawn = []
    for i in range(1, 1001):
        page.show(0, str(i), display_id="x", update=True)
        page.output.show(now=i / 1000)
        drawn.append(page.items[-1])
    assert len(set(drawn)) <= 5
    page.output.finish()
    assert page.items == ["[rank 0]\n", "1000"]


def test_a_later_cell_updates_what_an_earlier_one_displayed() -> None:
    page, names = Page(2), DisplayNames()
    page.output = Output(range(2), screen=page, names=names)
    for rank in (0, 1):
        page.show(rank, "old", display_id=f"id {rank}")
    page.output.finish()
    page.output = Output(range(2), screen=page, names=names)
    for rank in (0, 1):
        page.show(rank, "new", display_id=f"id {rank}", update=True)
    page.output.finish()
    assert page.items == ["[ranks 0-1]\n", "new"]


def test_names_of_displays_are_not_kept_without_end() -> None:
    page, names = Page(1), DisplayNames()
    for cell in range(20):
        page.output = Output(range(1), screen=page, names=names)
        for i in range(100):
            page.show(0, "old", display_id=f"{cell} {i}")
        page.output.finish()
    page.items.clear()
    page.output = Output(range(1), screen=page, names=names)
    page.show(0, "lost", display_id="0 0", update=True)
    assert page.items == []
    assert names.place(0, "19 99") is not None
    assert names.place(0, "0 0") is None


def test_updates_that_become_alike_stay_in_their_places() -> None:
    page = Page(2)
    for rank in (0, 1):
        page.show(rank, f"of {rank}", display_id="x")
    page.output.show(now=1.0)
    for rank in (0, 1):
        page.show(rank, "alike", display_id="x", update=True)
    page.output.finish()
    assert page.items == ["[rank 0]\n", "alike", "[rank 1]\n", "alike"]
