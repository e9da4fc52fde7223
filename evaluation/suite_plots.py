"""Plots of suite scores, in the manner of `plots.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from evaluation.plots import COLORS, INK, STYLE
from evaluation.suite_scores import SuiteScore

PALETTE = (*COLORS.values(), "#8b5fbf", "#2f9e8f", "#b0413e")


def score_bars(scores: Mapping[str, SuiteScore]) -> Figure:
    """Headline scores of one suite in percent, one group of bars a task and one bar a run, with standard errors."""
    tasks = list(dict.fromkeys(score.task for suite in scores.values() for score in suite.tasks))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 0.9 + 0.34 * len(tasks) * max(1, len(scores) * 0.7)), layout="constrained")
        axes = figure.add_subplot()
        height = 0.8 / len(scores)
        for index, (run, suite) in enumerate(scores.items()):
            by_task = {score.task: score for score in suite.tasks}
            rows = [(place, by_task[task]) for place, task in enumerate(tasks) if task in by_task]
            axes.barh(
                [place - 0.4 + height * (index + 0.5) for place, _ in rows],
                [100 * score.value for _, score in rows],
                height=height * 0.9,
                xerr=[100 * (score.stderr or 0.0) for _, score in rows],
                color=PALETTE[index % len(PALETTE)],
                ecolor=INK,
                label=run,
            )
        axes.set_yticks(range(len(tasks)), tasks)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("score in percent, with standard error")
        if len(scores) > 1:
            axes.legend()
        return figure


def differences(names: Sequence[str], values: Sequence[tuple[float, float, float]]) -> Figure:
    """Differences of scores in points with their intervals (value, low, high), one row a task."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 1.0 + 0.3 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        for place, (value, low, high) in enumerate(values):
            axes.plot([low, high], [place, place], color=COLORS["orthros"], linewidth=2)
            axes.plot([value], [place], "o", color=COLORS["orthros"], markersize=5)
        axes.axvline(0.0, color=INK, linewidth=1, linestyle=":")
        axes.set_yticks(range(len(names)), list(names))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("difference in points, with 95% interval of the paired bootstrap")
        return figure
