"""ENGINE: what cells print and display, on its way out.

A hook on each stream, which runs in ipykernel's publishing thread, turns what a cell prints into
``PrintedReport`` records: ordinary text, and the state of progress bars. A cell may send 2,500
lines or 200 kB (that many lines of 80 characters), which a page still scrolls through and a saved
notebook still holds; the rest goes straight into a log file. The cap is here and not in the
kernel, because what is published cannot be slowed down by its reader: it would pile up.

Text of a thread that outlives its cell goes to the engine's own log.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from fsdp_magic.core.cell_output import CHARACTERS, LINES, PRINTED_KEY, PrintedReport, line_end
from fsdp_magic.engine.bundles import allowed
from fsdp_magic.engine.display_updates import DisplayUpdates
from fsdp_magic.engine.streams import drain, follow_threads, print_to_parent
from fsdp_magic.engine.surrogates import encodable, encodable_bundle
from fsdp_magic.engine.terminal_lines import TerminalLines

_TAIL_LINES, _TAIL_CHARACTERS = 10, 4000
_LOG_BYTES, _LOGS_BYTES = 2**28, 2**30
"""Of one cell's log, and of all of a rank; the oldest make room."""

_OURS = 1000


class Call:
    """What one cell prints: counted, and logged beyond what may be sent.

    Args:
        parent: header of the request that runs it; marks its output.
        log: where the text goes that is too much.
    """

    def __init__(self, parent: dict[str, Any], log: Path | None) -> None:
        self.parent = parent
        self._log_path = log
        self._log: IO[str] | None = None
        self._logged = 0
        self._streams = {"stdout": TerminalLines(), "stderr": TerminalLines()}
        self._kept: list[str] = []
        self._lines_left, self._bytes_left = LINES, CHARACTERS
        self._left_out = 0
        self._tail: dict[str, str] = {"stdout": "", "stderr": ""}

    def take(self, name: str, text: str) -> PrintedReport:
        """Take what was printed on a stream, and return what is to be sent."""
        lines = self._streams[name]
        change = lines.feed(text)
        parts = [
            part if isinstance(part, int) else self._allowed(name, part) for part in change.parts
        ]
        return PrintedReport(
            parts=tuple(part for part in parts if part != ""),
            taken_back=change.taken_back,
            bars=lines.changed_bars(),
            left_out=self._left_out,
            log=str(self._log_path or ""),
        )

    def clear(self, *, wait: bool) -> None:
        """Let what is printed from here on replace what was printed since the last clearing."""
        for lines in self._streams.values():
            lines.clear(wait=wait)

    def finish(self) -> Iterator[tuple[str, PrintedReport]]:
        """Yield the last reports, by stream; nothing if nothing is left to say."""
        for name, lines in self._streams.items():
            bars, tail = lines.changed_bars(), self._tail[name]
            tail = "\n".join(map(line_end, tail.split("\n")))
            if bars is not None or tail:
                yield (
                    name,
                    PrintedReport(
                        bars=bars,
                        left_out=max(0, self._left_out - tail.count("\n")),
                        log=str(self._log_path or ""),
                        tail=tail,
                    ),
                )
        if self._log is not None:
            with suppress(OSError):
                self._log.close()

    @property
    def logged(self) -> tuple[Path, int] | None:
        """The log and its characters; None if all could be sent."""
        return (self._log_path, self._logged) if self._log_path and self._logged else None

    def _allowed(self, name: str, text: str) -> str:
        """Return the part of a text that may still be sent; the rest is logged and counted."""
        sent = ""
        if self._lines_left > 0 and self._bytes_left > 0:
            fits = text.count("\n") <= self._lines_left
            head = text if fits else "".join(text.splitlines(keepends=True)[: self._lines_left])
            sent = head[: self._bytes_left]
            self._lines_left -= sent.count("\n")
            self._bytes_left -= len(sent)
            self._kept.append(sent)
        if len(sent) < len(text):
            self._lines_left = 0
            self._write_log("".join(self._kept))
            self._kept.clear()
            self._leave_out(name, text[len(sent) :])
        return sent

    def _leave_out(self, name: str, text: str) -> None:
        self._left_out += text.count("\n")
        self._write_log(text)
        # of a huge text only the end is looked at
        end = self._tail[name] + text[-_TAIL_CHARACTERS:]
        ending = "" if end.endswith("\n") else "\n"
        last = deque(f"{end}{ending}".splitlines(keepends=True), maxlen=_TAIL_LINES)
        self._tail[name] = "".join(last)[-_TAIL_CHARACTERS:].removesuffix(ending)

    def _write_log(self, text: str) -> None:
        """Append to the log; a full disk must not fail the cell."""
        if self._log_path is None or self._logged > _LOG_BYTES:
            return
        with suppress(OSError):
            if self._log is None:
                self._log_path.parent.mkdir(mode=0o700, exist_ok=True)
                self._log = self._log_path.open("w", encoding="utf-8", errors="backslashreplace")
            self._logged += len(text)
            self._log.write(text)
            if self._logged > _LOG_BYTES:
                self._log.write("\n… this log ends at 256 MiB\n")


class Printing:
    """The streams of an engine, and the cell that they belong to at the moment."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.rank = 0
        self._streams: tuple[Any, ...] = ()
        self._shell: Any = None
        self._updates: DisplayUpdates | None = None
        self._call: Call | None = None
        self._ours: deque[str] = deque(maxlen=_OURS)
        self._logs: deque[tuple[Path, int]] = deque()

    def install(self, shell: Any) -> None:
        """Stand between ipykernel's streams and what they publish; called in the main thread."""
        streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
        self._streams, self._shell = streams, shell
        # a crash is told by the engine's log: what stands in a pipe dies with its reader
        faulthandler.enable(streams[1]._original_stdstream_copy)
        for stream in streams:
            # a hook belongs to the thread that registers it, and flushes happen in that one
            stream.pub_thread.schedule(lambda s=stream: s.register_hook(self._printed))
        self._updates = DisplayUpdates(shell.display_pub, streams[0].pub_thread)
        # its hooks are of one thread each; these are of all, since any may display
        shell.display_pub._thread_local = SimpleNamespace(hooks=[self._displayed])
        os.register_at_fork(after_in_child=lambda: print_to_parent(streams))
        follow_threads(streams)

    @contextmanager
    def cell(self, name: str) -> Iterator[None]:
        """Count what is printed inside as a cell's.

        Args:
            name: of the cell; its log is called after it.
        """
        if not self._streams:
            yield
            return
        parent = dict(self._shell.display_pub.parent_header)
        for stream in self._streams:
            # ipykernel tells ``sys.stdout``, which the person may have put something around
            stream.set_parent(parent)
        self._ours.append(parent.get("msg_id", ""))
        call = self._call = Call(parent, self._log_path(name))
        try:
            yield
        finally:
            self._streams[0].pub_thread.schedule(lambda: self._finish(call))

    def flush(self) -> None:
        """Send everything that was printed until now, by C code and subprocesses too."""
        drain(self._streams)
        for stream in (sys.stdout, sys.stderr):
            if stream not in self._streams:
                with suppress(Exception):  # whatever the person has put in its place
                    stream.flush()
        for stream in self._streams:
            stream.flush()

    def _log_path(self, name: str) -> Path | None:
        if self.directory is None:
            return None
        short = "-".join(re.findall(r"\w+", name)) or "cell"
        return self.directory / "output" / f"{short}-rank{self.rank}.txt"

    # -- in the publishing thread

    def _printed(self, message: dict[str, Any]) -> dict[str, Any]:
        """Turn a stream message of a cell into a report; never swallow one: more may follow."""
        parent = message["parent_header"].get("msg_id", "")
        call, content = self._call, message["content"]
        content["text"] = encodable(content["text"])
        if call is not None and parent == call.parent.get("msg_id", ""):
            report = call.take(content["name"], content["text"])
            content.update({"text": "", PRINTED_KEY: asdict(report)})
        elif parent in self._ours:
            self._write_engine_log(content["text"])
            message["parent_header"] = {}  # ipyparallel ignores what belongs to nothing
            content["text"] = ""
        return message

    def _finish(self, call: Call) -> None:
        if self._updates is not None:
            self._updates.finish()
        for name, report in call.finish():
            stream = next(s for s in self._streams if s.name == name)
            content = {"name": name, "text": "", PRINTED_KEY: asdict(report)}
            message = stream.session.msg("stream", content, parent=call.parent)
            stream.session.send(stream.pub_thread, message, ident=stream.topic)
        if call.logged is not None:
            self._make_room(call.logged)

    def _make_room(self, log: tuple[Path, int]) -> None:
        """Keep a log, and remove the oldest where all together are too large."""
        self._logs.append(log)
        while sum(size for _, size in self._logs) > _LOGS_BYTES and len(self._logs) > 1:
            path, _ = self._logs.popleft()
            with suppress(OSError):
                path.unlink()

    def _write_engine_log(self, text: str) -> None:
        descriptor = getattr(self._streams[0], "_original_stdstream_copy", None)
        if descriptor is not None:
            with suppress(OSError):
                os.write(descriptor, text.encode(errors="replace"))

    # -- in the thread that displays

    def _displayed(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Look at what is displayed: its size, widgets, the clearing of output, and updates."""
        call, content, kind = self._call, message["content"], message["header"]["msg_type"]
        updates = self._updates
        assert updates is not None
        if kind != "update_display_data" and updates.any_wait:
            # in their order: a display may take over the name of an older one
            self._streams[0].pub_thread.schedule(updates.send)
            self._streams[0].flush()
        if kind == "clear_output":
            if call is not None:
                wait = bool(content.get("wait"))
                self._streams[0].pub_thread.schedule(lambda: call.clear(wait=wait))
        else:
            content["data"] = encodable_bundle(allowed(content["data"]))
            content["metadata"] = encodable_bundle(content.get("metadata", {}))
        thinned = kind == "update_display_data" and self._is_of_cell(message)
        return updates.take(message) if thinned else message

    def _is_of_cell(self, message: dict[str, Any]) -> bool:
        """Return whether a message is of the cell that runs, or ran last."""
        call, parent = self._call, message["parent_header"].get("msg_id", "")
        return call is not None and parent == call.parent.get("msg_id", "")


PRINTING = Printing()
"""A process has one, as it has one standard output."""
