"""Whatever is typed on a magic's line becomes a spec, or one line that says what is wrong."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from test_magics import FakeSession
from traitlets.config import Config

from fsdp_magic.core.options import options_of
from fsdp_magic.core.specs import MAGICS, STRATEGY_HABITS, RunSpec, parse_ranks
from fsdp_magic.core.units import parse_bytes
from fsdp_magic.errors import UsageError
from fsdp_magic.notebook import completion, sessions
from fsdp_magic.notebook.magic_line import wanted_at
from fsdp_magic.notebook.options import flags_of, parse

LONGEST = 400
QUICK = settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
FLAGS = sorted({flag for spec in MAGICS.values() for flag in flags_of(spec)})
CHOICES = sorted(
    {c for spec in MAGICS.values() for o in options_of(spec).values() for c in o.choices}
    | set(STRATEGY_HABITS)
)

ODD = [
    *("n", "cfg.steps", 'nets["G"]', "f(x)", "len(data)//8", "a,b", "-n", "lambda: 0", "if", "'"),
    *("\\d", "1is", "a b", "{}", "*x", "\x00", "x\u2028y", "(" * 300, "-" * 900, "x" * 900),
    *("1e999", "-0", "0x10", "1_000", "٣", "nan", "inf", "9" * 4400, "1" * 400 + "GiB"),
    *("0,2-3", "0-99999999999", "-1", "1-", "all", "2GiB", "512 MB", "0GiB", "1.5tib", ""),
    *("#", "# a comment --steps 3", "--", "-", "---", "-x", "--=", "--\u2028x", "--" + "y" * 900),
    *(flag[:-1] for flag in FLAGS),
    *(flag.removeprefix("--") + "=3" for flag in FLAGS),
]
NASTY = [
    *("n" + "+1" * 3000, "9" * 4400, "1" * 400 + "GiB", "1" * 30 + "GiB", "x" * 900, "A" * 90),
    *("x\u2028y", "\x00", "0-99999999999", "-" * 900, "'" * 900, "(" * 900, ""),
]
"""Each has broken something somewhere."""
numbers = st.one_of(st.integers(1, 9).map(str), st.integers().map(str), st.floats().map(str))
values = st.one_of(numbers, st.sampled_from(CHOICES), st.sampled_from(ODD), st.text(max_size=6))
typed_values = st.one_of(values, values.map(repr), values.map('"{}"'.format), values.map(str.upper))
SPELLINGS = (str, str.upper, lambda flag: flag[:2] + flag[2:].replace("-", "_"))


def given_option(flags: list[str]) -> st.SearchStrategy[str]:
    """Return words that give an option: mostly a value that it takes, in any spelling."""
    apt = st.sampled_from(["3", "0.5", "data", "run", "cpu", "full_shard", "sum", "step", "2GiB"])
    return st.builds(
        lambda flag, spelled, between, value: f"{spelled(flag)}{between}{value}",
        st.sampled_from(flags),
        st.sampled_from(SPELLINGS),
        st.sampled_from([" ", "=", "  "]),
        st.one_of(apt, apt, typed_values),
    )


def lines_of(magic: str) -> st.SearchStrategy[tuple[str, str]]:
    """Return lines for a magic, of its own options and of anything else."""
    own = sorted(flags_of(MAGICS[magic])) or FLAGS
    word = st.one_of(given_option(own), st.sampled_from(own), given_option(FLAGS), typed_values)
    return st.tuples(st.just(magic), st.lists(word, max_size=5).map(" ".join))


typed = st.sampled_from(sorted(MAGICS)).flatmap(lines_of)


def check(error: UsageError) -> None:
    """Fail unless an error is one line that a person can read."""
    text = str(error)
    assert len(text.splitlines()) == 1, text
    assert text.isprintable(), ascii(text)
    assert len(text) <= LONGEST, text


def numbers_on_engines(flag: str, expression: str) -> float:
    """Stand in for engines, where some names are numbers."""
    if "n" in expression:
        return 3
    raise UsageError(f"{flag} is no number on the engines")


@pytest.mark.parametrize("magic", MAGICS)
def test_nasty_values_of_every_option_are_refused_in_one_line(magic: str) -> None:
    for flag, value in itertools.product(("", *flags_of(MAGICS[magic])), NASTY):
        for line in (f"{flag} {value}", f"{flag}={value}", f"{flag}{value}"):
            with contextlib.suppress(UsageError):
                checked_parse(line, magic)


def checked_parse(line: str, magic: str) -> Any:
    """Parse a line; let an error through if it is one line that a person can read."""
    try:
        found = parse(line, MAGICS[magic], magic=magic, numbers=numbers_on_engines)
        if isinstance(found, RunSpec) and found.ranks is not None:
            parse_ranks(found.ranks, world_size=4)
    except UsageError as error:
        check(error)
        raise
    assert isinstance(found, MAGICS[magic])
    return found


@given(typed=typed)
@settings(QUICK, max_examples=500)
def test_a_line_becomes_a_spec_or_one_line_that_refuses_it(typed: tuple[str, str]) -> None:
    made = 0
    for magic in MAGICS:  # 500 lines on 12 magics
        with contextlib.suppress(UsageError):
            checked_parse(typed[1], magic)
            made += 1
    MADE.append(made)


MADE: list[int] = []
"""How many magics took each line."""


def test_many_of_those_lines_were_right() -> None:
    assert not MADE or sum(map(bool, MADE)) > len(MADE) / 10


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    config = Config({"HistoryManager": {"enabled": False}})
    home: Path = tmp_path_factory.mktemp("ipython")
    shell = InteractiveShell.instance(config=config, ipython_dir=str(home), colors="nocolor")
    shell.run_line_magic("load_ext", "fsdp_magic")
    shell.user_ns |= {"n": 3, "model": object()}
    yield shell
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


class AnySession(FakeSession):
    """Answers every expression."""

    world_size = 2

    def number(self, flag: str, expression: str) -> float:
        return numbers_on_engines(flag, expression)

    def pull(self, expression: str, **options: Any) -> int:
        return 1

    def completions(self, line: str) -> None:
        return None


@given(typed=typed)
@settings(QUICK)
def test_a_magic_does_it_or_raises_its_one_line(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, typed: tuple[str, str]
) -> None:
    magic, line = typed
    monkeypatch.setattr(sessions, "current", AnySession)
    monkeypatch.setattr(sessions, "init_from", lambda spec: spec)
    name = magic.lstrip("%")
    try:
        if magic.startswith("%%"):
            shell.find_cell_magic(name)(line, "loss = 1\n")
        else:
            shell.find_line_magic(name)(line)
    except UsageError as error:
        check(error)


@given(typed=typed, cut=st.integers(0, 30))
@settings(QUICK)
def test_tab_never_raises_and_offers_what_continues_the_line(
    typed: tuple[str, str], cut: int
) -> None:
    line = " ".join(typed)
    begun = line[: len(line) - cut]
    wanted = wanted_at(begun)
    if wanted is not None:
        assert begun.endswith(wanted.fragment)
        assert all(offer.text and offer.about for offer in wanted.offers)


@example(text="0-99999999999", world=2)
@given(text=st.one_of(typed_values, st.from_regex(r"[0-9,\- ]{0,12}")), world=st.integers(1, 64))
@settings(QUICK)
def test_ranks_are_within_the_world_or_refused(text: str, world: int) -> None:
    try:
        ranks = parse_ranks(text, world_size=world)
    except UsageError as error:
        check(error)
    else:
        assert ranks
        assert set(ranks) <= set(range(world))


@example(text="1" * 400 + "GiB")
@given(
    text=st.one_of(typed_values, st.from_regex(r"[0-9.]{1,4} ?[kmgtKMGT]i?[bB]?", fullmatch=True))
)
@settings(QUICK)
def test_a_size_is_a_number_of_bytes_or_refused(text: str) -> None:
    try:
        size = parse_bytes(text, what="--memory-limit")
    except UsageError as error:
        check(error)
    else:
        assert 0 < size < 2**63


def test_the_completion_of_names_is_never_asked_for_without_our_magic() -> None:
    assert wanted_at("x = 1 --s") is None
    assert completion.IDENTIFIER.startswith("fsdp_magic")


@pytest.mark.parametrize(
    "typed", ["%fsdp_push {}", "%%fsdp_train --log {}", "%fsdp_pull {} --rank 0"]
)
def test_what_is_not_in_the_notebook_is_refused_in_one_line(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.setattr(sessions, "current", AnySession)
    magic, _, rest = typed.partition(" ")
    for value in NASTY:
        with contextlib.suppress(UsageError):
            try:
                if magic.startswith("%%"):
                    shell.find_cell_magic(magic[2:])(rest.format(value), "loss = 1\n")
                else:
                    shell.find_line_magic(magic[1:])(rest.format(value))
            except UsageError as error:
                check(error)
                raise
