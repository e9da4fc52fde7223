"""A Markdown report as one self-contained HTML page: readable styles, light and dark, plots inside the text."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

from evaluation.files import require_places, write_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title>
<style>
:root { color-scheme: light dark; --ink: #1f2a37; --soft: #5b6875; --line: #d9dee4; --page: #fff; --panel: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ec; --soft: #9fabb8; --line: #343c46; --page: #12161b; --panel: #1b2027; } }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.8rem; line-height: 1.2; }
h2 { font-size: 1.25rem; margin-top: 2.2rem; padding-top: .8rem; border-top: 1px solid var(--line); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem; display: block;
  overflow-x: auto; }
th, td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); text-align: left; }
pre, code { background: var(--panel); border-radius: 4px; font-size: .9em; }
pre { padding: .8rem 1rem; overflow-x: auto; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; color: var(--ink); }
</style>
</head>
<body>
BODY</body>
</html>
"""


def html_page(title: str, text: str, figures: Mapping[str, Figure]) -> str:
    """The Markdown `text` as a page in which the image plots/NAME.png became the SVG of figure NAME."""
    from evaluation import plots  # noqa: PLC0415 (imports matplotlib)

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    for name, figure in figures.items():
        start = body.index(f'<p><img src="plots/{name}.png"')
        end = body.index("</p>", start) + len("</p>")
        body = f"{body[:start]}<figure>{plots.to_svg(figure)}</figure>{body[end:]}"
    return PAGE.replace("TITLE", html.escape(title)).replace("BODY", body)


def write_report(folder: Path, stem: str, title: str, text: str, figures: Mapping[str, Figure]) -> tuple[Path, Path]:
    """Write STEM.md, STEM.html and plots/NAME.png into `folder`; the text names each plot as an image.

    Returns the paths of the first two.
    """
    from evaluation import plots  # noqa: PLC0415 (imports matplotlib)

    require_places(folder / "plots" / f"{name}.png" for name in figures)
    for name, figure in figures.items():
        plots.save_png(figure, folder / "plots" / f"{name}.png")
    markdown, page = folder / f"{stem}.md", folder / f"{stem}.html"
    write_output(markdown, text)
    write_output(page, html_page(title, text, figures))
    return markdown, page


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1) -> str:
    """A Markdown table whose columns from `numbers_from` on are right-aligned; cells may hold any text."""
    rule = ["---" if index < numbers_from else "---:" for index in range(len(head))]
    lines = [map(_cell, head), rule, *(map(_cell, row) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(text: str) -> str:
    """What would end a cell or its row stands in it as text."""
    return " ".join(text.splitlines()).replace("|", "\\|")
