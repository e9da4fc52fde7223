"""Compare evaluations: scores side by side, and paired bootstrap differences to the first.

    python -m evaluation.report outputs/eval-transformer outputs/eval-orthros --output outputs/comparison

Only documents that both runs answered, told by their hash, enter a difference; only tasks with such documents a mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from evaluation.bootstrap import Difference, mean_difference, paired_difference, ratio_difference
from evaluation.files import plain_json, write_output
from evaluation.html_page import table, write_report
from evaluation.left_out import left_out_lines, listed
from evaluation.paper import SUITE_ROWS
from evaluation.results_file import read_results
from evaluation.run_pairs import paired_values, unlike_settings, unlike_tasks
from evaluation.suite_plots import differences, score_bars
from evaluation.suite_report import not_finite_lines, show
from evaluation.suite_scores import SuiteScore, TaskScore, suite_score
from orthros_train.command_line import CommandParser, run_command
from orthros_train.errors import InputError

DESCRIPTION = """Compare evaluations that python -m evaluation.run wrote: tables, differences to the first, plots.

A difference is the second run minus the first over the documents of both, with the 95% interval of 2000 paired
bootstrap resamples.
"""
EXAMPLES = """\
  python -m evaluation.report outputs/eval-transformer outputs/eval-orthros
  python -m evaluation.report outputs/a outputs/b outputs/c --names A B C --output outputs/comparison"""


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(DESCRIPTION, EXAMPLES, prog="python -m evaluation.report")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of an evaluation")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="of the runs in tables; default: their folders'")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write comparison.json, .md, .html and plots there")
    return parser


def compare(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Scores of every run and differences to the first, by suite; JSON-ready but for the SuiteScores."""
    ours = {name: results["orthros"] for name, results in runs.items()}
    first, *others = runs
    suites = [suite for suite in ours[first]["suites"] if all(suite in ours[other]["suites"] for other in others)]
    if not suites:
        raise InputError("the runs have no suite in common; evaluate them on the same suites")
    records = {name: ours[name]["records"] for name in runs}
    return {suite: _compare_suite(suite, runs, records) for suite in suites}


def _compare_suite(
    suite: str, runs: Mapping[str, Mapping[str, Any]], records: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    first, *others = runs
    about = runs[first]["orthros"]["suites"][suite]
    tasks = {name: [(task, group) for task, group in runs[name]["orthros"]["suites"][suite]["tasks"]] for name in runs}
    every = dict.fromkeys(task for name in runs for task, _ in tasks[name])
    scored = [task for task in every if all(task in records[name] for name in runs)]
    shared = [task for task in scored if all(paired_values(records[first][task], records[n][task])[0] for n in others)]
    in_mean = list(dict.fromkeys(group or task for task, group in tasks[first] if task in shared))
    return {
        "title": about["title"],
        "paper": about["paper"],
        "architectures": {name: runs[name].get("config", {}).get("architecture") for name in runs},
        "scores": {name: _shared_score(tasks[name], records[name], shared, about["has_mean"]) for name in runs},
        "in_mean": in_mean if about["has_mean"] else [],
        "not_scored": sorted(set(every) - set(scored)),
        "left_out": {name: _reasons(runs[name], [task for task, _ in tasks[name]]) for name in runs},
        "not_paired": sorted(set(scored) - set(shared)),
        "settings": unlike_settings(runs),
        "unlike": unlike_tasks(scored, records),
        "differences": {
            other: _differences(tasks[first], records[first], records[other], shared, about["has_mean"])
            for other in others
        },
    }


def _reasons(run: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, str]:
    """Why some of a suite's tasks were left out of a run."""
    return {task: reason for task, reason in run["orthros"].get("left_out", {}).items() if task in tasks}


def _shared_score(
    tasks: Sequence[tuple[str, str | None]], records: Mapping[str, Any], shared: Collection[str], has_mean: bool
) -> SuiteScore:
    """All scores of a run; means, of the suite and of groups, are over the `shared` tasks.

    A group without a shared task is shown as the run scored it.
    """
    restricted = {group for task, group in tasks if group is not None and task in shared}
    left_out = {task for task, group in tasks if group in restricted and task not in shared}
    of_all = {task: record for task, record in records.items() if task in shared}
    shown = {task: record for task, record in records.items() if task not in left_out}
    mean = suite_score(tasks, of_all, has_mean)
    return replace(suite_score(tasks, shown, has_mean=False), mean=mean.mean, stderr=mean.stderr)


def _differences(
    tasks: Sequence[tuple[str, str | None]],
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    shared: Collection[str],
    has_mean: bool,
) -> dict[str, Any]:
    """Differences of a suite's tasks (groups as one) and of its mean, with the number of shared documents.

    Args:
        tasks: of the suite, with their groups.
        a: records of the first run.
        b: records of the second.
        shared: tasks of which all compared runs have documents in common with the first; means, of the suite and of
            groups, are over these.
        has_mean: of the suite.
    """
    found: dict[str, Any] = {}
    grouped: dict[str, tuple[list[float], list[float]]] = {}
    in_mean = {group or name for name, group in tasks if name in shared}
    for name, group in tasks:
        if name not in a or name not in b or (group is not None and name not in shared):
            continue
        left, right = paired_values(a[name], b[name])
        if not left:
            continue
        if isinstance(left[0], list):
            found[name] = _nats_difference(a[name], left, right)
            continue
        ours, theirs = grouped.setdefault(group or name, ([], []))
        ours += left
        theirs += right
    found |= {task: _described(paired_difference(*values), len(values[0])) for task, values in grouped.items()}
    result: dict[str, Any] = {"tasks": found}
    of_all = [values for task, values in grouped.items() if task in in_mean]
    if has_mean and of_all:
        result["mean"] = _plain(mean_difference(of_all), min(len(values[0]) for values in of_all))
    return result


def _plain(difference: Difference, documents: int) -> dict[str, Any]:
    """JSON-ready; one document, of any task that has a part in it, has no interval."""
    alone = {} if documents > 1 else dict.fromkeys(("low", "high", "probability"))
    return {**asdict(difference), **alone}


def _described(difference: Difference, documents: int, **more: str) -> dict[str, Any]:
    """The difference of a task."""
    return {**_plain(difference, documents), "documents": documents, **more}


def _nats_difference(record: Mapping[str, Any], first: Sequence[Any], second: Sequence[Any]) -> dict[str, Any]:
    """Of perplexities: in nats per word, byte or token, the logarithm of their ratio.

    Args:
        record: of the task.
        first: (log-likelihood, units) of each document in the first run.
        second: those of the second.
    """
    unit = record["task"]["metric"].split("_")[0]  # word_perplexity
    nats = [[(-float(value), float(units)) for value, units in run] for run in (first, second)]
    return _described(ratio_difference(*nats), len(first), unit=f"nats per {unit}")


def markdown(comparison: Mapping[str, Any], names: Sequence[str]) -> tuple[str, dict[str, Figure]]:
    """The report's text and its figures."""
    figures: dict[str, Figure] = {}
    parts = [
        "# Comparison",
        f"Differences are to **{names[0]}**, in points (of perplexities in nats: the logarithm of their ratio), with "
        "the 95% interval of the paired bootstrap over the documents of both, whose number stands beside it where more "
        "were scored; an interval without zero is marked *.",
        *dict.fromkeys(line for content in comparison.values() for line in content["settings"]),
    ]
    for suite, content in comparison.items():
        shares: dict[str, SuiteScore] = content["scores"]
        scored = any(each.tasks for each in shares.values())
        parts += [f"## {content['title']}", *([_table(content, names)] if scored else ["Nothing was scored."])]
        parts += [f"{name}: {line}" for name in names for line in not_finite_lines(shares[name])]
        parts += [*content["unlike"], *_left_out(content)]
        if scored and (paper := SUITE_ROWS.get(content["paper"] or "")):
            parts.append(f"The row paper is {paper.origin}; each run's column has its arm's figure.")
        if scored and all(score.is_share for each in shares.values() for score in each.tasks):
            figures[f"{suite}-scores"] = score_bars(shares)
            parts.append(f"![Scores](plots/{suite}-scores.png)")
            for number, other in enumerate(names[1:], start=1):
                if figure := _difference_figure(content["differences"][other]["tasks"]):
                    figures[f"{suite}-difference-{number}"] = figure
                    parts.append(f"{other} minus {names[0]}:")
                    parts.append(f"![Differences](plots/{suite}-difference-{number}.png)")
    return "\n\n".join(parts) + "\n", figures


def _left_out(content: Mapping[str, Any]) -> list[str]:
    """What has no difference, or no part in the mean, and why."""
    lines = []
    if others := content["not_paired"]:
        mean = " and no part in the mean" if content["in_mean"] else ""
        lines.append(f"The runs have no document in common, so there is no difference{mean}: {listed(others)}.")
    if others := content["not_scored"]:
        said = (
            "The mean is over the tasks that all runs scored; others"
            if content["in_mean"]
            else "Not scored by all runs"
        )
        lines.append(f"{said}: {listed(others)}.")
    by_line: dict[str, list[str]] = {}
    for run, reasons in content["left_out"].items():
        for line in left_out_lines(reasons):
            by_line.setdefault(line, []).append(run)
    lines += [f"{', '.join(runs)}: {line}" for line, runs in by_line.items()]
    return lines


def _difference_figure(tasks: Mapping[str, Mapping[str, Any]]) -> Figure | None:
    """Of the tasks whose difference has an interval, in points; None without any."""
    found = {task: each for task, each in tasks.items() if each["low"] is not None and math.isfinite(each["value"])}
    rows = [(100 * each["value"], 100 * each["low"], 100 * each["high"]) for each in found.values()]
    return differences(list(found), rows) if found else None


def _table(content: Mapping[str, Any], names: Sequence[str]) -> str:
    scores: Mapping[str, SuiteScore] = content["scores"]
    by_run = {name: {score.task: score for score in scores[name].tasks} for name in names}
    tasks = list(dict.fromkeys(task for name in names for task in by_run[name]))
    rows = []
    for task in tasks:
        cells: list[TaskScore | None] = [by_run[name].get(task) for name in names]
        found = [content["differences"][other]["tasks"].get(task) for other in names[1:]]
        scored = [max(each.documents if each else 0 for each in (cells[0], other)) for other in cells[1:]]
        rows.append([task, *map(show, cells), *map(_show_difference, found, scored)])
    if content["in_mean"]:
        means = [f"{100 * (scores[name].mean or 0):.2f}" for name in names]
        found = [content["differences"][other].get("mean") for other in names[1:]]
        rows.append([f"mean of {len(content['in_mean'])}", *means, *map(_show_difference, found)])
    if paper := SUITE_ROWS.get(content["paper"] or ""):
        rows.append(_paper_cells([paper.of(content["architectures"][name]) for name in names]))
    return table(["task", *names, *(f"{other} − {names[0]}" for other in names[1:])], rows)


def _paper_cells(figures: Sequence[float | None]) -> list[str]:
    """The paper's figure of each run's arm, and its difference to that of the first run, if that is the other arm."""
    first, *others = figures
    gains = ["–" if first is None or each in (None, first) else f"{(each or 0) - first:+.2f}" for each in others]
    return ["paper", *("–" if each is None else f"{each:.2f}" for each in figures), *gains]


def _show_difference(found: Mapping[str, Any] | None, scored: int = 0) -> str:
    """A cell; with the number of its documents if that is below `scored`."""
    if found is None or math.isnan(found["value"]):
        return "–"
    scale, digits, unit = (1, 4, f" {found['unit']}") if "unit" in found else (100, 2, "")
    interval = mark = ""
    paired = f" ({found['documents']:,} paired)" if found.get("documents", scored) < scored else ""
    if found["low"] is not None:
        difference = Difference(*(found[key] for key in ("value", "low", "high", "probability")))
        interval = f" [{scale * difference.low:+.{digits}f}, {scale * difference.high:+.{digits}f}]"
        mark = "*" if difference.is_clear else ""
    return f"{scale * found['value']:+.{digits}f}{interval}{unit}{mark}{paired}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    names = options.names or [run.name or str(run) for run in options.runs]
    if len(names) != len(options.runs):
        raise InputError(f"{len(options.runs)} runs but {len(names)} --names; give one each")
    if len(set(names)) != len(names):
        raise InputError(f"the runs' names are not distinct ({', '.join(names)}); give --names")
    comparison = compare({name: read_results(run) for name, run in zip(names, options.runs, strict=True)})
    text, figures = markdown(comparison, names)
    print(text)
    if options.output is not None:
        plain = {
            suite: {**content, "scores": {name: score.to_dict() for name, score in content["scores"].items()}}
            for suite, content in comparison.items()
        }
        write_output(options.output / "comparison.json", json.dumps(plain_json(plain), indent=1) + "\n")
        write_report(options.output, "comparison", "Comparison of evaluations", text, figures)
    return 0


if __name__ == "__main__":
    run_command(main)
