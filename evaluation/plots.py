"""Figures of a comparison of arms, drawn once for two uses: a PNG beside report.md, an inline SVG in the HTML page.

Text and axes are drawn in INK; in the SVG that color becomes `currentColor`, so a page's light or dark theme applies.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

SMOOTHING = 10  # steps of which a point of the loss curve is the mean
INK = "#1f2a37"
GRID = "#9aa5b1"
COLORS = {
    "transformer": "#3f7fd0",
    "orthros": "#d9741c",
    "transformer-equal-flops": "#7a9e3a",
    "orthros-0-sinks": "#a34a9c",
    "orthros-1-sink": "#d9741c",
}
LABELS = {
    "transformer": "transformer",
    "orthros": "Orthros",
    "transformer-equal-flops": "transformer, Orthros' FLOPs",
    "orthros-0-sinks": "Orthros, no sink",
    "orthros-1-sink": "Orthros, 1 sink",
}
STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "figure.constrained_layout.use": True,
}


def to_svg(figure: Figure) -> str:
    """The figure as an <svg> element with a transparent background and the page's text color."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "orthros"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def save_png(figure: Figure, path: Path) -> None:
    """The figure on white, at twice the screen's resolution."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144, facecolor="white")


def _figure(columns: int, height: float = 3.3) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.6 * columns, height), layout="constrained")
    return figure, [figure.add_subplot(1, columns, index + 1) for index in range(columns)]


def _smooth(values: Sequence[float], width: int) -> np.ndarray:
    """Mean of the last `width` values at each point."""
    sums = np.cumsum([0.0, *values])
    index = np.arange(1, len(values) + 1)
    start = np.maximum(index - width, 0)
    return (sums[index] - sums[start]) / (index - start)


def loss_curves(runs: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Training loss against tokens and against training FLOPs; dots are validation losses.

    `runs` maps an arm to its record: `loss`, `tokens_seen` (a value a step), `flops_per_step`, `validation`.
    """
    with mpl.rc_context(STYLE):
        figure, (by_tokens, by_flops) = _figure(2)
        for arm, run in runs.items():
            loss = _smooth(run["loss"], width=SMOOTHING)
            tokens = np.asarray(run["tokens_seen"]) / 1e6
            flops = np.cumsum(run["flops_per_step"]) / 1e12
            for axes, x in ((by_tokens, tokens), (by_flops, flops)):
                axes.plot(x, loss, color=COLORS[arm], label=LABELS[arm], linewidth=1.4)
                at = [step - 1 for step, _ in run["validation"]]
                axes.plot(x[at], [value for _, value in run["validation"]], "o", color=COLORS[arm], markersize=4)
        by_tokens.set_xlabel("training tokens (millions)")
        by_flops.set_xlabel("training FLOPs (10¹²)")
        by_tokens.set_ylabel("loss (nats per byte)")
        low = min(min(run["loss"]) for run in runs.values())
        high = max(run["loss"][len(run["loss"]) // 20] for run in runs.values())
        for axes in (by_tokens, by_flops):
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
            axes.set_xlim(left=0)
        by_tokens.legend()
        return figure


def training_loss(runs: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Training loss of each arm (`loss`, `tokens_seen`: a value a step) against tokens."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(1)
        figure.set_size_inches(9.2, 3.3)
        for arm, run in runs.items():
            axes.plot(run["tokens_seen"], run["loss"], color=COLORS[arm], label=LABELS[arm], linewidth=1.4)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlim(left=0)
        axes.set_xlabel("training tokens")
        axes.set_ylabel("loss (nats per token)")
        axes.legend()
        return figure


def nll_against_position(
    nll: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], window: int, width: int = 64
) -> Figure:
    """NLL [when][arm][article][position] against position: a panel for each `when`, means over `width` tokens."""
    with mpl.rc_context(STYLE):
        figure, panels = _figure(len(nll))
        for axes, (when, arms) in zip(panels, nll.items(), strict=True):
            for arm, rows in arms.items():
                means = np.asarray(rows).mean(axis=0)
                kept = means[: len(means) // width * width].reshape(-1, width).mean(axis=1)
                middles = (np.arange(len(kept)) + 0.5) * width
                axes.plot(middles, kept, "o-", color=COLORS[arm], label=LABELS[arm], markersize=3, linewidth=1.4)
            axes.axvline(window, color=INK, linestyle=":", linewidth=1.2)
            axes.set_xlim(left=0)
            axes.set_title(f"{when} training", fontsize=10)
            axes.set_xlabel(f"tokens before (dotted: the window, {window})")
        low, high = (limit([axes.get_ylim()[side] for axes in panels]) for side, limit in ((0, min), (1, max)))
        for axes in panels:
            axes.set_ylim(low, high)
        panels[0].set_ylabel("nats per token")
        panels[0].legend()
        return figure


def validation_nll(nll: Mapping[str, Sequence[float]]) -> Figure:
    """Validation NLL of every seed (dots), its mean (bar) and standard deviation, one row an arm; shorter is better."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(1, height=0.6 * len(nll) + 1.2)
        figure.set_size_inches(9.2, 0.6 * len(nll) + 1.0)
        means = {arm: float(np.mean(values)) for arm, values in nll.items()}
        for row, (arm, values) in enumerate(nll.items()):
            axes.barh(row, means[arm], color=COLORS[arm], alpha=0.85, height=0.55)
            axes.plot(values, [row] * len(values), "o", color=INK, markersize=3.5)
            spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
            axes.annotate(
                f"{means[arm]:.4f}{spread}", (max(values), row), (6, 0), textcoords="offset points", va="center"
            )
        every = [value for values in nll.values() for value in values]
        room = max(0.02, max(every) - min(every))
        axes.set_xlim(min(every) - 2 * room, max(every) + 1.2 * room)
        axes.set_yticks(range(len(nll)), [LABELS[arm] for arm in nll])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        seeds = len(next(iter(nll.values())))
        certainty = "one seed, no spread known" if seeds == 1 else f"mean ± standard deviation over {seeds} seeds"
        axes.set_xlabel(f"validation NLL (nats per byte; {certainty}; the axis does not start at zero)")
        return figure


def kv_growth(growth: Sequence[Mapping[str, Any]], window: int | None) -> Figure:
    """KV entries of every layer while decoding after prompts of several lengths.

    `growth` holds, for each prompt, `prompt_length` and `entries` [layer][step], step 0 after the prefill. Layers that
    hold equally many entries lie on one line.
    """
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(1)
        figure.set_size_inches(9.2, 3.0)
        layers, steps = len(growth[0]["entries"]), len(growth[0]["entries"][0]) - 1
        highest = max(prompt["entries"][0][-1] for prompt in growth)
        labelled = -highest  # where the last label stands; closer ones would overlap
        for prompt in sorted(growth, key=lambda prompt: prompt["prompt_length"]):
            for counts in prompt["entries"]:
                axes.plot(range(len(counts)), counts, color=COLORS["orthros"], linewidth=1.4)
            end = prompt["entries"][0][-1]
            if end - labelled > highest / 12:
                text = f"prompt of {prompt['prompt_length']}"
                axes.annotate(text, (steps, end), (6, 0), textcoords="offset points", va="center", fontsize=8.5)
                labelled = end
        if window is not None:
            axes.axhline(window, color=INK, linestyle=":", linewidth=1.2)
            axes.annotate(f"base window w = {window}", (0, window), (6, -12), textcoords="offset points")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, steps * 1.12)
        axes.set_xlabel("decoding steps")
        axes.set_ylabel(f"KV entries in each of {layers} layers")
        return figure


def times_against_length(prefill: Sequence[Mapping[str, Any]], decode: Sequence[Mapping[str, Any]]) -> Figure:
    """Time of the prefill (left) and of one decoding step (right) against length.

    Dashed: from the longest prompt's measured time backwards, as each arm's exact FLOPs would have it.
    """
    with mpl.rc_context(STYLE):
        figure, (left, right) = _figure(2)
        for axes, records, key in ((left, prefill, "length"), (right, decode, "context")):
            for arm in dict.fromkeys(record["arm"] for record in records):
                mine = [record for record in records if record["arm"] == arm]
                x = [record[key] for record in mine]
                y = np.asarray([record["seconds"] for record in mine]) * 1e3
                axes.plot(x, y, "o-", color=COLORS[arm], label=LABELS[arm], markersize=4, linewidth=1.4)
                if axes is left:
                    flops = np.asarray([record["flops"] for record in mine], dtype=float)
                    axes.plot(x, y[-1] * flops / flops[-1], "--", color=COLORS[arm], linewidth=0.9, alpha=0.8)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        left.set_yscale("log")
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        left.yaxis.set_minor_formatter(NullFormatter())
        right.set_ylim(bottom=0)
        left.set_xlabel("prompt length (tokens)")
        left.set_ylabel("prefill (ms)")
        right.set_xlabel("context (tokens)")
        right.set_ylabel("one decoding step (ms)")
        left.legend()
        return figure
