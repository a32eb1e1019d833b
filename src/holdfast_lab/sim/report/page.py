"""One HTML page: headings, paragraphs, tables and figures, all in one file that needs nothing else.

Everything that is shown is escaped, so nothing of what a file declares becomes markup; figures are in the page itself,
SVG as it is drawn, in the page's colours.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from holdfast.data.output import whole_file
from holdfast_lab.sim.report.content import Cell, Section, Table

_STYLE = """
:root { color-scheme: light dark;
  --text: #1f2328; --pale: #57606a; --line: #d0d7de; --ground: #ffffff; --band: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --pale: #9da7b1; --line: #3d444d; --ground: #0d1117; --band: #151b23; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); margin: 2rem auto;
  max-width: 68rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: 0.2rem; }
p { max-width: 46rem; }
nav a { margin-right: 1rem; color: inherit; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--pale); padding-bottom: 0.3rem; }
th, td { padding: 0.2rem 0.7rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--band); }
figure { margin: 1rem 0; }
svg { display: block; width: 100%; min-width: 29rem; max-width: 60rem; height: auto; }
img { max-width: 100%; background: #ffffff; padding: 0.5rem; box-sizing: border-box; border: 1px solid var(--line); }
"""


def write_html(path: Path, title: str, sections: Sequence[Section], *, overwrite: bool = False) -> None:
    """Raises ConfigError where the file is there already, and OSError where a figure is not."""
    with whole_file(path, overwrite=overwrite) as partial:
        partial.write_text("\n".join(_page(title, sections)) + "\n", encoding="utf-8")


def _page(title: str, sections: Sequence[Section]) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>"
    if len(sections) > 1:
        links = (f'<a href="#s{n}">{escape(section.title)}</a>' for n, section in enumerate(sections))
        yield f"<nav>{' '.join(links)}</nav>"
    for number, section in enumerate(sections):
        yield from _section(number, section)
    yield "</body>\n</html>"


def _section(number: int, section: Section) -> Iterator[str]:
    yield f'<section id="s{number}">\n<h2>{escape(section.title)}</h2>'
    for paragraph in filter(None, (each.strip() for each in section.text.split("\n\n"))):
        yield f"<p>{escape(paragraph)}</p>"
    for figure in section.figures:
        name = escape(f"{section.title}: {figure.stem}")
        if figure.suffix == ".svg":
            drawn = figure.read_text(encoding="utf-8")
            yield f'<figure class="wide" role="img" aria-label="{name}">{drawn}</figure>'
            continue
        data = base64.b64encode(figure.read_bytes()).decode("ascii")
        yield f'<figure><img alt="{name}" src="data:image/png;base64,{data}"></figure>'
    for table in section.tables:
        yield from _table(table)
    yield "</section>"


def _table(table: Table) -> Iterator[str]:
    yield '<div class="wide"><table>'
    if table.title:
        yield f"<caption>{escape(table.title)}</caption>"
    yield f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in table.header)}</tr></thead>\n<tbody>"
    for row in table.rows:
        yield f"<tr>{''.join(map(_cell, row))}</tr>"
    yield "</tbody></table></div>"


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    return f'<td class="number">{"" if value is None else escape(number_words(value))}</td>'


def number_words(value: float) -> str:
    """With four digits that count, and no more than it has: 4.812, 0.7354, 12,345."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-4 <= abs(value) < 1e15:
        decimals = 0 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.3e}"
