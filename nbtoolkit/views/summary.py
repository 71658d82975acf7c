"""The page of a run in a cell, under its name of before."""

from nbtoolkit.views.page import page_html as summary
from nbtoolkit.views.text import summary_line

__all__ = ["summary", "summary_line"]
