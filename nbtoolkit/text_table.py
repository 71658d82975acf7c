"""Format values and small tables as text."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from difflib import get_close_matches

_SCIENTIFIC = 1e6  # from this size on, numbers are in scientific notation


def text_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a table as lines of text; each column is as wide as its longest value."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def gib(size: int) -> str:
    """Format bytes as GiB: ``"15.0 GiB"``."""
    return f"{size / 2**30:.1f} GiB"


def number(value: float | None) -> str:
    """Format a number with four significant digits: ``"0.3602"``, ``"12000"``; empty for None."""
    return "" if value is None else _significant(value, 4)


def param(value: object) -> str:
    """Format a parameter: three significant digits of a float, any other value in full."""
    return _significant(value, 3) if isinstance(value, float) else setting(value)


def _significant(value: float, digits: int) -> str:
    """Format a number; whole below a million, in scientific notation from there on."""
    if 10**digits - 0.5 <= abs(value) < _SCIENTIFIC:
        return f"{value:.0f}"
    return _short_exponent(f"{value:.{digits}g}")


def _short_exponent(text: str) -> str:
    """Write ``1e-5`` instead of ``1e-05``."""
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else text


def metric_column(values: Sequence[float | None]) -> list[str]:
    """Format the values of a column with equal decimals, so that a reader can compare them.

    The largest value has four significant digits, outliers above ten times the median aside: a
    trial that diverged does not cost the others their digits. Values from a million on, and columns
    below 0.0001, are in scientific notation. None is an empty text.
    """
    sizes = sorted(abs(value) for value in values if value and math.isfinite(value))
    usual = [size for size in sizes if size <= 10 * sizes[(len(sizes) - 1) // 2]]
    largest = usual[-1] if usual else 1.0
    decimals = max(3 - math.floor(math.log10(largest)), 0)

    def text(value: float | None) -> str:
        if value is None:
            return ""
        if not 1e-4 <= largest < _SCIENTIFIC:
            return _short_exponent(f"{value:.3e}") if value else "0"
        if abs(value) > 1000 * largest:
            return _significant(value, 4)
        return f"{value:.{decimals}f}"

    return [text(value) for value in values]


def duration(seconds: float) -> str:
    """Format a length of time: ``"0.4 s"``, ``"25 s"``, ``"2:41"`` or ``"1 h 05 min"``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def moment(unix: float | None) -> str:
    """Format unix seconds as UTC, to the minute; empty for None and for an impossible time."""
    if unix is None or not math.isfinite(unix):
        return ""
    try:
        return datetime.fromtimestamp(unix, timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return ""


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: ``"1 run"``, ``"2 runs"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def setting(value: object) -> str:
    """Format a setting as in YAML, in at most 48 characters."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return shortened(text, 48)


def one_line(text: str) -> str:
    """Replace control characters, which a terminal would obey, by spaces."""
    return "".join(" " if unicodedata.category(char)[0] == "C" else char for char in text)


def shortened(text: str, length: int) -> str:
    """Put a text on one line of at most ``length`` characters, without its middle if need be.

    The end stays, since names of runs and settings often differ there.
    """
    line = one_line(text)
    if len(line) <= length:
        return line
    end = (length - 1) // 2
    return f"{line[: length - 1 - end]}…{line[-end:]}"


def did_you_mean(name: str, names: Iterable[str], form: str = "{!r}") -> str:
    """Return ``did you mean 'epochs'?`` for the known name nearest to a wrong one; else empty.

    Args:
        name: the wrong name.
        names: the known names.
        form: how the known name is written.
    """
    near = get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"did you mean {form.format(near[0])}?" if near else ""
