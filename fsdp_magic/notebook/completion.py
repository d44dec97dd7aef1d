"""KERNEL: Tab in a notebook: options of our magics, their values, and names on the engines.

A matcher of IPython (8.6 or later), which asks every matcher and merges what they say. Names on
the engines come from rank 0's own IPython, within a deadline: the kernel is idle meanwhile.
"""

from __future__ import annotations

import re
from typing import Any

from fsdp_magic.core.completion import Completions
from fsdp_magic.notebook import display, sessions
from fsdp_magic.notebook.magic_line import Wanted, magic_of, wanted_at

IDENTIFIER = "fsdp_magic.options"
_PRIORITY = 500
_BODIES = ("%%fsdp", "%%fsdp_model", "%%fsdp_train", "%%fsdp_eval")
_TRAINING = ("batch", "step", "micro_step", "epoch", "micro_batch_size", "total_steps")
"""Names that training and evaluation cells find, beside those on the engines."""
_WORD = re.compile(r"[\w.]*$")
_ELSEWHERE = ("%", "!", "import ", "from ", "#")
"""What begins lines that the notebook's own completion knows better."""


def register(shell: Any) -> None:
    """Offer completions in a shell, once; IPython before 8.6 cannot, and has none."""
    try:
        from IPython.core.completer import context_matcher
    except ImportError:
        return
    unregister(shell)

    @context_matcher(identifier=IDENTIFIER, priority=_PRIORITY)  # type: ignore[untyped-decorator]
    def fsdp_options(context: Any) -> Any:
        if "fsdp" not in context.full_text:
            return _result("")
        try:
            return _matches(context, shell)
        except Exception:  # whatever goes wrong, other completions must not suffer
            return _result("")

    shell.Completer.custom_matchers.append(fsdp_options)


def unregister(shell: Any) -> None:
    """Offer nothing any more; safe where nothing was offered."""
    matchers = getattr(shell.Completer, "custom_matchers", None)
    if matchers is not None:
        matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != IDENTIFIER]


def _matches(context: Any, shell: Any) -> Any:
    lines = context.full_text.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    typed = lines[context.cursor_line][: context.cursor_position]
    magic = magic_of(lines[first])
    if context.cursor_line > first and magic in _BODIES:
        return _in_body(typed, training=magic in _BODIES[2:])
    if typed.lstrip().startswith("%%") and context.cursor_line != first:
        return _result("")
    wanted = wanted_at(typed)
    return _result("") if wanted is None else _on_line(wanted, shell)


def _on_line(wanted: Wanted, shell: Any) -> Any:
    """Return what fits the last word of a magic's line; nothing else of IPython fits there."""
    fragment = wanted.fragment
    # a notebook's list has room for one word, a terminal's for a line of help
    word = ("option" if fragment.startswith("-") else "value") if display.is_notebook() else ""
    values = [(offer.text, word or offer.about) for offer in wanted.values]
    offers = [(offer.text, word or offer.about) for offer in wanted.offers]
    if wanted.completes == "ranks":
        session = sessions.current()
        ranks = range(session.world_size if session is not None else 0)
        offers += [(str(r), "rank") for r in ranks if str(r).startswith(fragment)]
    elif wanted.completes == "notebook":
        hidden = shell.user_ns_hidden
        names = [n for n in shell.user_ns if n not in hidden and not n.startswith("_")]
        offers += [(name, "notebook") for name in names if name.startswith(fragment)]
    elif wanted.completes == "engines" and not fragment.startswith("-"):
        found = _on_engines(fragment)
        if found is not None and found.texts:
            fragment = found.fragment
            if fragment != wanted.fragment:  # of a part of the word
                values = offers = []
            offers = [(text, "engines") for text in found.texts] + offers
    offers = values + offers
    if not offers and wanted.completes == "notebook":
        return _result("")  # an attribute, say, which IPython finds
    # what is there already, where nothing is known: else files and keywords would be offered
    return _result(fragment, offers or [(fragment, "")], alone=True)


def _in_body(typed: str, *, training: bool) -> Any:
    """Return the names on the engines that fit; they stand beside what IPython finds here."""
    if typed.lstrip().startswith(_ELSEWHERE):
        return _result("")
    found = _on_engines(typed)
    if found is not None and found.texts:
        fragment, texts = found.fragment, found.texts
    else:
        fragment, texts = _WORD.findall(typed)[0], ()
    begun = fragment if fragment.isidentifier() or not fragment else "."
    ours = [name for name in _TRAINING if training and name.startswith(begun)]
    return _result(fragment, [(name, "engines") for name in (*texts, *ours)])


def _on_engines(line: str) -> Completions | None:
    """Ask rank 0 what may stand at the end of a line."""
    session = sessions.current()
    return None if session is None else session.completions(line)


def _result(fragment: str, offers: Any = (), *, alone: bool = False) -> Any:
    """Return the answer of a matcher.

    Args:
        fragment: the word that every offer replaces.
        offers: words, and what they are.
        alone: whether what other matchers find does not fit.
    """
    from IPython.core.completer import SimpleCompletion

    about_by_text: dict[str, str] = {}
    for text, about in offers:
        about_by_text.setdefault(text, about)
    return {
        "completions": [SimpleCompletion(text=t, type=a) for t, a in about_by_text.items()],
        "matched_fragment": fragment,
        "ordered": True,
        "suppress": alone,
    }
