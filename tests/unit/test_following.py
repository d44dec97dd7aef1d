"""Following a request: an interrupt is seen however much the ranks say."""

from __future__ import annotations

from typing import Any

from fsdp_magic.core.cell_output import PrintedReport
from fsdp_magic.core.reply import Reply
from fsdp_magic.notebook.events import Answered, Event, Events, Printed
from fsdp_magic.notebook.live import Follower, Interruptions
from fsdp_magic.notebook.output import Output
from fsdp_magic.notebook.screen import Nowhere


class Chatter(Events):
    """An engine that prints without end until it is asked to stop."""

    asked = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Event:
        if self.asked:
            return Answered(engine_id=0, reply=Reply(rank=0))
        return Printed(engine_id=0, stream="stdout", report=PrintedReport(parts=("x\n",)))

    def press(self, times: int) -> float:
        self.asked += 1
        return 1.0

    def force(self) -> None:
        raise AssertionError


def test_an_interrupt_is_seen_while_a_rank_says_more_than_can_be_taken() -> None:
    events, interruptions, ticks = Chatter(), Interruptions(), 0

    def tick(*_: Any) -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 2:
            interruptions.count = 1

    outcome = Follower(
        ranks={0: 0},
        events=events,
        output=Output([0], screen=Nowhere()),
        interruptions=interruptions,
        escalation=events,
        on_tick=tick,
    ).follow()
    assert set(outcome.replies) == {0}
    assert events.asked == 1
