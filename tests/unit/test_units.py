"""Bytes, seconds, counts and ranks as text."""

import pytest

from fsdp_magic.core.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    bytes_text,
    count_text,
    gib_text,
    parse_bytes,
    ranks_text,
    seconds_text,
)
from fsdp_magic.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * GIB),
        ("2gib", 2 * GIB),
        ("2GB", 2 * GIB),
        ("2G", 2 * GIB),
        ("1.5 GiB", GIB * 3 // 2),
        (" 512 MB ", 512 * MIB),
        ("7K", 7 * KIB),
        ("1TiB", TIB),
    ],
)
def test_a_size_counts_in_powers_of_1024(text: str, size: int) -> None:
    assert parse_bytes(text, what="--memory-limit") == size


@pytest.mark.parametrize("text", ["", "2", "GiB", "-1GiB", "0GiB", "0.0001K", "two GiB", "2 PiB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"--memory-limit .* such as --memory-limit 2GiB"):
        parse_bytes(text, what="--memory-limit")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "n/a"),
        (0, "0 B"),
        (12, "12 B"),
        (KIB, "1.0 KiB"),
        (371 * MIB, "371 MiB"),
        (GIB * 3 // 2, "1.5 GiB"),
        (250 * TIB, "250 TiB"),
        (-2 * GIB, "-2.0 GiB"),
    ],
)
def test_bytes_read_in_three_figures(size: float | None, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize("size", [KIB, 3 * MIB, 7 * GIB])
def test_bytes_written_are_read_back(size: int) -> None:
    assert parse_bytes(bytes_text(size), what="x") == size


@pytest.mark.parametrize(
    ("size", "text"), [(None, "n/a"), (GIB // 2, "0.50"), (GIB * 11, "11.0"), (0, "0.00")]
)
def test_gib_columns_have_no_unit(size: float | None, text: str) -> None:
    assert gib_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "n/a"), (0, "00:00"), (59.9, "00:59"), (60, "01:00"), (3600, "1:00:00"), (-3, "00:00")],
)
def test_seconds_read_as_a_clock(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "n/a"),
        (4.25, "4.2"),
        (9, "9"),
        (42, "42"),
        (298_900, "298.9k"),
        (1.2e6, "1.2M"),
        (3e9, "3.0G"),
    ],
)
def test_counts_read_short(count: float | None, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1), "0-1"),
        ((0, 1, 2, 3, 6), "0-3,6"),
        ((6, 0, 2), "0,2,6"),
        ((0, 2, 3), "0,2-3"),
    ],
)
def test_ranks_read_as_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text
