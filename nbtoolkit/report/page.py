"""Page: a report as one HTML file that needs nothing else, light or dark as its reader's system."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nbtoolkit.report.picture import Picture
from nbtoolkit.report.section import Section

# Text on ground has a contrast of 15 and more, what is dimmed 6 and more (WCAG AA wants 4.5).
_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1f2328; --dim: #59636e;
  --line: #d1d9e0; --band: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #111; --text: #e6e6e6; --dim: #9aa4af; --line: #3d444d; --band: #1c1f23; } }
body { background: var(--ground); color: var(--text); margin: 0 auto; max-width: 76rem;
  padding: 1rem 1.5rem 4rem; font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .5rem;
  border-top: 1px solid var(--line); } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
nav a { color: inherit; margin-right: 1rem; } .dim { color: var(--dim); }
.part { overflow-x: auto; margin: .4rem 0; } .part p { margin: 0; }
table { border-collapse: collapse; width: max-content;
  font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--line); padding: .25rem .6rem; min-width: 1.2rem;
  white-space: nowrap; }
thead th, tbody th { background: var(--band); font-weight: 600; }
svg { display: block; height: auto; max-width: 100%; }
"""


def page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The whole page.

    Args:
        title: its heading.
        subtitle: a sentence below.
        sections: its contents.
    """
    links = "".join(f'<a href="#{_id(one)}">{escape(one.title)}</a>' for one in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="dim">{escape(subtitle)}</p>
<nav>{links}</nav>
{"".join(map(_section, sections))}
</body>
</html>
"""


def _section(section: Section) -> str:
    parts = "\n".join(f'<div class="part">{_markup(part)}</div>' for part in section.parts)
    return f'<h2 id="{_id(section)}">{escape(section.title)}</h2>\n{parts}\n'


def _markup(part: str | Picture) -> str:
    return part.svg() if isinstance(part, Picture) else part


def _id(section: Section) -> str:
    return section.title.lower().replace(" ", "-")
