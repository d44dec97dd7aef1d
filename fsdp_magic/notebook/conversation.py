"""KERNEL: the request that engines are answering: what they say of it, and to whom it goes.

One at a time. What an engine says of an earlier one is dropped: nobody follows that any more.
"""

from __future__ import annotations

from fsdp_magic.core.channel import Finished, Published
from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.wording import as_typed
from fsdp_magic.notebook.events import Answered, Died, Events, event_of


class Conversation:
    """The newest request. The thread that reads the channels tells it what engines say.

    Attributes:
        number: of the request.
        lost: what of the answers could not be taken; None: nothing.
    """

    def __init__(self) -> None:
        self.number = 0
        self.lost: FsdpError | None = None
        self._events: Events | None = None

    def begin(self) -> Events:
        """Begin another request; return where everything that engines say of it arrives."""
        self.number += 1
        self._events, self.lost = Events(), None
        return self._events

    def hear(self, engine_id: int, message: Published | Finished) -> None:
        """Take what an engine says."""
        events = self._events
        if events is None or message.number != self.number:
            return
        match message:
            case Published():
                event = event_of(engine_id, message.message())
                if event is not None:
                    events.put(event)
            case Finished():
                events.put(Answered(engine_id=engine_id, reply=message.answer()))

    def note_loss(
        self, engine_id: int | None, message: object, error: Exception, *, order: int
    ) -> None:
        """Note that something an engine said could not be taken.

        The request fails once every engine has answered it; one whose answer it may have been
        has none to wait for.
        """
        self.lost = FsdpError(
            f"what engine {order} sent cannot be read in the notebook: {as_typed(str(error))}; "
            "the engines are in order, and go on with the next cell"
        )
        if engine_id is not None and not isinstance(message, Published):
            self._put(Answered(engine_id=engine_id, reply=self.lost))

    def note_death(self, engine_id: int, code: int | None) -> None:
        """Note that an engine has ended."""
        self._put(Died(engine_id=engine_id, exit_code=code))

    def _put(self, event: Answered | Died) -> None:
        if self._events is not None:
            self._events.put(event)
