"""Labels: names as they stand in a plot or a table's head: in one line, short, and no formulas."""

from __future__ import annotations

import unicodedata


def shortened(text: str, length: int) -> str:
    """A text in one line of at most ``length`` characters; what is left out is its middle.

    Names of runs and settings often differ at their ends.
    """
    line = "".join(" " if unicodedata.category(one)[0] == "C" else one for one in text)
    if len(line) <= length:
        return line
    end = (length - 1) // 2
    return f"{line[: length - 1 - end]}…{line[-end:]}"


def plain(text: str, length: int = 28) -> str:
    """A name for a plot, where two dollar signs would enclose a formula."""
    return shortened(text, length).replace("$", r"\$")
