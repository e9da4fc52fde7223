"""The report as one HTML page that needs no other file: its style and its plots (SVG) are inside."""

from __future__ import annotations

from collections.abc import Mapping

from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from evaluation import plots

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Orthros demo</title>
<style>
:root { color-scheme: light dark;
  --ink: #1f2a37; --soft: #5b6875; --line: #d9dee4; --page: #ffffff; --panel: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ec; --soft: #9fabb8; --line: #343c46; --page: #12161b; --panel: #1b2027; } }
body { margin: 0 auto; max-width: 58rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem;
  display: block; overflow-x: auto; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; text-align: left; }
pre { background: var(--panel); padding: .9rem 1rem; border-radius: 8px; overflow-x: auto;
  font-size: .88rem; line-height: 1.45; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
:not(pre) > code { background: var(--panel); padding: .1em .35em; border-radius: 4px; font-size: .9em; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; color: var(--ink); }
</style>
</head>
<body>
BODY</body>
</html>
"""


def html_page(text: str, figures: Mapping[str, Figure]) -> str:
    """The Markdown `text` as a page in which plots/NAME.png became the SVG of figure NAME."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    for name, figure in figures.items():
        start = body.index(f'<p><img src="plots/{name}.png"')
        end = body.index("</p>", start) + len("</p>")
        body = f"{body[:start]}<figure>{plots.to_svg(figure)}</figure>{body[end:]}"
    return PAGE.replace("BODY", body)
