"""The report of one evaluation: a table a suite, with errors, mean, and the paper's row marked as the paper's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from evaluation.html_page import table, write_report
from evaluation.left_out import left_out_lines, listed
from evaluation.paper import SUITE_ROWS
from evaluation.suite_plots import score_bars
from evaluation.suite_scores import SuiteScore, TaskScore, suite_score

HEAD = ["task", "metric", "score", "stderr", "documents", "shots", "version"]


def suite_scores(results: Mapping[str, Any]) -> dict[str, SuiteScore]:
    """The scores of every suite of an evaluation's results.json."""
    ours = results["orthros"]
    return {
        name: suite_score([tuple(pair) for pair in suite["tasks"]], ours["records"], suite["has_mean"])
        for name, suite in ours["suites"].items()
    }


def show(score: TaskScore | None, value: float | None = None) -> str:
    """A score for people: shares in percent, perplexities as they are."""
    if score is None:
        return "–"
    number = score.value if value is None else value
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "∞"
    return f"{100 * number:.2f}" if score.is_share else f"{number:.4f}"


def write_suite_report(results: Mapping[str, Any], folder: Path) -> str:
    """Write report.md, report.html and the plots; returns the Markdown."""
    scores, figures = suite_scores(results), {}
    model = results["config"]
    parts = [
        "# Evaluation",
        f"Model: `{model['model_source']}` ({model['model_kind']}), architecture {model['architecture']}, base window "
        f"{model['base_window']}, {model['model_num_parameters']:,} parameters, {model['model_dtype']}, up to "
        f"{model['max_length']:,} tokens. Documents per task: {model['limit'] or 'all'}."
        + (" Chat template applied." if model["chat"] else ""),
    ]
    if model["limit"]:
        parts.append(f"With a limit of {model['limit']} documents these are checks of the machinery, not benchmarks.")
    parts += left_out_lines(results["orthros"].get("left_out", {}))
    for name, score in scores.items():
        parts.append(_suite_section(results["orthros"]["suites"][name], score))
        if score.tasks and all(task.is_share for task in score.tasks):
            figures[name] = score_bars({"this model": score})
            parts.append(f"![Scores of the suite {name}](plots/{name}.png)")
    parts.append(_data_section(results))
    text = "\n\n".join(parts) + "\n"
    write_report(folder, "report", "Evaluation", text, dict[str, Figure](figures))
    return text


def _suite_section(suite: Mapping[str, Any], score: SuiteScore) -> str:
    if not score.tasks:
        return "\n\n".join([f"## {suite['title']}", "Nothing of this suite was scored.", *_left_out(score)])
    rows = [
        [
            task.task,
            task.metric.split(",")[0],
            show(task),
            "–" if task.stderr is None else show(task, task.stderr),
            f"{task.documents:,}",
            str(task.shots),
            task.version,
        ]
        for task in score.tasks
    ]
    if score.mean is not None:
        error = "–" if score.stderr is None else f"{100 * score.stderr:.2f}"
        rows.append([f"mean of {len(score.tasks)}", "", f"{100 * score.mean:.2f}", error, "", "", ""])
    paper = SUITE_ROWS.get(suite["paper"] or "")
    if paper is not None:
        for arm, value in (("transformer", paper.transformer), ("Orthros", paper.orthros)):
            rows.append([f"paper, {arm}", "", f"{value:.2f}", *["–"] * 4])
    lines = [f"## {suite['title']}", table(HEAD, rows, numbers_from=2)]
    if paper is not None:
        lines.append(f"The rows marked paper are {paper.origin}.")
    lines += _left_out(score)
    lines += not_finite_lines(score)
    cut = [f"{task.task} {task.truncated:,}" for task in score.tasks if task.truncated]
    if cut:
        lines.append(
            "Requests longer than the model's context, which lost the beginning of theirs: " + ", ".join(cut) + "."
        )
    if suite["note"]:
        lines.append(suite["note"])
    return "\n\n".join(lines)


def not_finite_lines(score: SuiteScore) -> list[str]:
    """That some scores mean nothing, if the model gave no numbers to score by."""
    broken = [f"{task.task} {task.not_finite:,}" for task in score.tasks if task.not_finite]
    if not broken:
        return []
    return [
        "**Requests whose log-likelihood is NaN or infinite, which makes the score meaningless**: "
        + ", ".join(broken)
        + "."
    ]


def _left_out(score: SuiteScore) -> list[str]:
    """What was not scored, and what that means for the mean, if there is one."""
    lines = [f"{group}: {members} tasks, {scored} scored." for group, scored, members in score.partial]
    if score.missing:
        over = "Left out"
        if score.mean is not None and len(score.tasks) < score.expected:
            over = f"Left out, so the mean is over {len(score.tasks)} of {score.expected}"
        lines.append(f"{over}: {listed(score.missing)}.")
    return lines


def _data_section(results: Mapping[str, Any]) -> str:
    rows: list[list[str]] = []
    notes: dict[str, list[str]] = {}
    for name, record in results["orthros"]["records"].items():
        data = record["task"]["data"]
        if data.get("note"):
            notes.setdefault(data["note"], []).append(name)
        rows.append(
            [
                name,
                str(data.get("hub") or data["name"]),
                str(data.get("split", "–")),
                str(data["source"]),
                str(data.get("revision") or "–")[:12] + (" (not pinned)" if data.get("revision_note") else ""),
                data["license"],
                record["task"]["prompt"],
            ]
        )
    shown = rows if len(rows) <= 30 else [*rows[:30], [f"and {len(rows) - 30} more in results.json", *[""] * 6]]
    head = ["task", "data set", "split", "source", "revision", "license", "prompt"]
    lines = [f"{listed(names)}: {note}." for note, names in notes.items()]
    return "\n\n".join(["## Tasks and data", table(head, shown, numbers_from=7), *lines])
