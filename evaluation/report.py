"""Compare evaluations: scores side by side, and paired bootstrap differences to the first.

    python -m evaluation.report outputs/eval-transformer outputs/eval-orthros --output outputs/comparison

Only documents that all runs answered, told by their hash, enter a difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from evaluation.bootstrap import Difference, mean_difference, paired_difference
from evaluation.files import write_output
from evaluation.html_page import table, write_report
from evaluation.paper import SUITE_ROWS
from evaluation.suite_plots import differences, score_bars
from evaluation.suite_report import show, suite_scores
from evaluation.suite_scores import SuiteScore, TaskScore
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


def read_results(folder: Path) -> dict[str, Any]:
    """results.json of an evaluation; raises InputError where there is none that this project wrote."""
    path = folder / "results.json" if folder.is_dir() else folder
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); name the output folder of an evaluation"
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if "orthros" not in content:
        raise InputError(f"{path} was not written by python -m evaluation.run; its documents' scores are not there")
    return content


def compare(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Scores of every run and differences to the first, by suite; JSON-ready but for the SuiteScores."""
    scores = {name: suite_scores(results) for name, results in runs.items()}
    first, *others = runs
    suites = [suite for suite in scores[first] if all(suite in scores[other] for other in others)]
    if not suites:
        raise InputError("the runs have no suite in common; evaluate them on the same suites")
    return {
        suite: {
            "title": runs[first]["orthros"]["suites"][suite]["title"],
            "paper": runs[first]["orthros"]["suites"][suite]["paper"],
            "scores": {name: scores[name][suite] for name in runs},
            "differences": {other: _differences(runs[first], runs[other], suite) for other in others},
        }
        for suite in suites
    }


def _differences(first: Mapping[str, Any], second: Mapping[str, Any], suite: str) -> dict[str, Any]:
    """Differences of a suite's tasks (groups as one) and of its mean, with the number of shared documents."""
    a, b = first["orthros"]["records"], second["orthros"]["records"]
    grouped: dict[str, tuple[list[float], list[float]]] = {}
    for name, group in first["orthros"]["suites"][suite]["tasks"]:
        if name not in a or name not in b:
            continue
        left = {each["doc_hash"]: each["value"] for each in a[name]["documents"]}
        right = {each["doc_hash"]: each["value"] for each in b[name]["documents"]}
        pairs = [(left[key], right[key]) for key in left if key in right and isinstance(left[key], int | float)]
        if pairs:
            ours, theirs = grouped.setdefault(group or name, ([], []))
            ours += [pair[0] for pair in pairs]
            theirs += [pair[1] for pair in pairs]
    result: dict[str, Any] = {
        "tasks": {
            task: {**asdict(paired_difference(*values)), "documents": len(values[0])}
            for task, values in grouped.items()
        }
    }
    if first["orthros"]["suites"][suite]["has_mean"] and len(grouped) > 1:
        result["mean"] = asdict(mean_difference(list(grouped.values())))
    return result


def markdown(comparison: Mapping[str, Any], names: Sequence[str]) -> tuple[str, dict[str, Figure]]:
    """The report's text and its figures."""
    figures: dict[str, Figure] = {}
    parts = [
        "# Comparison",
        f"Differences are to **{names[0]}**, in points, with the 95% interval of the paired bootstrap over the "
        "documents of both; an interval without zero is marked *.",
    ]
    for suite, content in comparison.items():
        parts += [f"## {content['title']}", _table(content, names)]
        if paper := SUITE_ROWS.get(content["paper"] or ""):
            parts.append(
                f"The paper's, not measured here ({paper.table}: {paper.setting}): transformer {paper.transformer}, "
                f"Orthros {paper.orthros}."
            )
        shares: dict[str, SuiteScore] = content["scores"]
        if all(score.is_share for each in shares.values() for score in each.tasks):
            figures[f"{suite}-scores"] = score_bars(shares)
            parts.append(f"![Scores](plots/{suite}-scores.png)")
            for number, other in enumerate(names[1:], start=1):
                found = content["differences"][other]["tasks"]
                if not found:
                    continue
                rows = [(100 * d["value"], 100 * d["low"], 100 * d["high"]) for d in found.values()]
                figures[f"{suite}-difference-{number}"] = differences(list(found), rows)
                parts.append(f"{other} minus {names[0]}:")
                parts.append(f"![Differences](plots/{suite}-difference-{number}.png)")
    return "\n\n".join(parts) + "\n", figures


def _table(content: Mapping[str, Any], names: Sequence[str]) -> str:
    scores: Mapping[str, SuiteScore] = content["scores"]
    by_run = {name: {score.task: score for score in scores[name].tasks} for name in names}
    tasks = list(dict.fromkeys(task for name in names for task in by_run[name]))
    rows = []
    for task in tasks:
        cells: list[TaskScore | None] = [by_run[name].get(task) for name in names]
        found = [content["differences"][other]["tasks"].get(task) for other in names[1:]]
        rows.append([task, *map(show, cells), *map(_show_difference, found)])
    if all(scores[name].mean is not None for name in names):
        means = [f"{100 * (scores[name].mean or 0):.2f}" for name in names]
        found = [content["differences"][other].get("mean") for other in names[1:]]
        rows.append(["mean", *means, *map(_show_difference, found)])
    return table(["task", *names, *(f"{other} − {names[0]}" for other in names[1:])], rows)


def _show_difference(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    difference = Difference(*(found[key] for key in ("value", "low", "high", "probability")))
    mark = "*" if difference.is_clear else ""
    return f"{100 * difference.value:+.2f} [{100 * difference.low:+.2f}, {100 * difference.high:+.2f}]{mark}"


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
        write_output(options.output / "comparison.json", json.dumps(plain, indent=1) + "\n")
        write_report(options.output, "comparison", "Comparison of evaluations", text, figures)
    return 0


if __name__ == "__main__":
    run_command(main)
