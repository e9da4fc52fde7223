"""Convert a real pretrained model, adapt it for minutes, and report what it lost and won back; `make demo-convert`.

Each step leaves its result under OUTPUT/results and is not done again; an interrupted training run continues from its
checkpoint. The figures end up in OUTPUT/report.md and OUTPUT/report.html.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.conversion_demo.arms import ARMS, CONVERTED, SOURCE, Arm
from evaluation.conversion_demo.gaps import AFTER, BEFORE, EDGES, mean_nll_between, ranges
from evaluation.demo import tools
from evaluation.demo.steps import Steps, conclude
from evaluation.demo.text import write_corpus
from orthros_train.command_line import CommandParser, int_between, run_command
from orthros_train.config import config_to_yaml, load_config
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from orthros_train.model import OrthrosForCausalLM

DESCRIPTION = """Convert SmolLM2-135M-Instruct to Orthros, adapt it briefly on Wikipedia articles, and report the loss.

Three arms train on the same batches: the source itself (full attention), and Orthros without and with a base sink.
Held-out articles say what each costs below and beyond the window, before and after; then samples, the cache check, and
a report. Finished steps are not redone, and an interrupted training run continues from its checkpoint.
"""
EXAMPLES = """\
  python tools/demo_convert.py
  python tools/demo_convert.py --output outputs/longer train.steps=200
  python tools/demo_convert.py --output outputs/narrow model.base_window=32"""
DEFAULT_FOLDER = Path("outputs/demo-convert")
DEFAULT_CONFIG = Path("configs/demo_convert.yaml")
LENGTH = EDGES[-1]  # tokens of a held-out article that are scored
HELD_OUT_EVERY = 3  # of the articles that are long enough
HELD_OUT = 20  # at most; a third of all long articles are kept apart, and the first of them scored
SAMPLE_PROMPT_TOKENS, SAMPLE_TOKENS = 400, 100  # a prompt longer than the window
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
SAMPLE_SEED = 42
CACHE_CHECK_STEPS = 16


class ConversionDemo:
    """The demo's steps, in the order in which they are run."""

    def __init__(self, config: Path, overrides: Sequence[str], output: Path, cache: Path, ranks: int) -> None:
        """Raises InputError for an unfit configuration and for a folder of another demo."""
        self.config_path, self.output, self.cache, self.ranks = config, output, cache, ranks
        self.overrides = [*overrides, f"data.train=[{{prefix: {output}/data/train}}]"]
        # the converted folders are not there yet, and would fill in options later that they cannot fill in now
        self.config = load_config(config, [*self.overrides, f"init_from={output}/models", f"output_dir={output}"])
        self.window = self.config.model.base_window
        if self.window is None or self.window >= LENGTH:
            raise InputError(f"model.base_window is {self.window}; give a window below {LENGTH}, the tokens scored")
        self.steps = Steps(output, {"config": config_to_yaml(self.config), "ranks": ranks})
        self.held_out: dict[str, list[int]] = {}  # title -> the first LENGTH + 1 token ids

    def run(self) -> dict[str, Any]:
        """All steps; returns everything that the report needs."""
        self.steps.run("model", "Source model", self._fetch_model)
        text = self.steps.run("text", "Articles", self._write_text)
        self.held_out = text["rows"]
        self.steps.run("tokens", "Tokens", self._tokenize)
        parameters = {
            arm.folder: self.steps.run(f"convert-{arm.folder}", f"Conversion: {arm.folder}", self._convert, arm)
            for arm in (SOURCE, CONVERTED[-1])
        }
        nll: dict[str, dict[str, Any]] = {BEFORE: {}, AFTER: {}}
        for arm in ARMS:
            nll[BEFORE][arm.name] = self._score(arm, BEFORE, self._converted(arm))
        runs = {}
        for arm in ARMS:
            title = f"Training: {arm.name}, {self.config.train.steps} steps"
            runs[arm.name] = self.steps.run(f"train-{arm.name}-{self._seed}", title, self._train, arm)
            self.steps.run(f"export-{arm.name}", f"Export: {arm.name}", self._export, arm)
            nll[AFTER][arm.name] = self._score(arm, AFTER, self._adapted(arm))
        check = self.steps.run("cache-check", "Cache check", self._check_cache)
        samples = self.steps.run("samples", "Samples", self._sample)
        return {
            "text": text,
            "window": self.window,
            "parameters": {name: found["parameters"] for name, found in parameters.items()},
            "nll": nll,
            "runs": {str(self._seed): runs},
            "cache_check": check,
            "samples": samples,
            "steps": self.steps.measured,
            "ranks": self.ranks,
            "recipe": self._recipe(),
        }

    @property
    def _seed(self) -> int:
        return self.config.train.seed

    @property
    def _source(self) -> Path:
        from orthros_train.conversion.smollm2 import smollm2_folder  # noqa: PLC0415

        return smollm2_folder(self.cache)  # made at the first call

    def _converted(self, arm: Arm) -> Path:
        return self.output / "models" / arm.folder

    def _adapted(self, arm: Arm) -> Path:
        return self.output / "models" / f"{arm.name}-adapted"

    def _run(self, arm: Arm) -> Path:
        return self.output / "runs" / arm.name

    def _recipe(self) -> dict[str, Any]:
        config = self.config
        return {
            "steps": config.train.steps,
            "global_batch_size": config.train.global_batch_size,
            "sequence_length": config.train.sequence_length,
            "learning_rate": config.optimizer.learning_rate,
            "precision": config.precision,
            "distillation": config.adaptation.distillation.weight,
        }

    def _fetch_model(self) -> dict[str, Any]:
        return {"folder": str(self._source)}

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer  # noqa: PLC0415

        return AutoTokenizer.from_pretrained(self._source)

    def _write_text(self) -> dict[str, Any]:
        """Every third of the articles that are long enough is held out; every other article is trained on."""
        from evaluation.demo.wikipedia import LICENSE_NOTE, wikipedia_articles  # noqa: PLC0415

        articles, tokenizer = wikipedia_articles(self.cache), self._tokenizer()
        ids = {title: tokenizer(text).input_ids for title, text in articles.items()}
        long = [title for title in articles if len(ids[title]) > LENGTH]
        held_out = long[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        training = {title: text for title, text in articles.items() if title not in held_out}
        sizes = write_corpus(self.output / "data", training, {title: articles[title] for title in held_out})
        rows = {title: ids[title][: LENGTH + 1] for title in held_out[:HELD_OUT]}
        tokens = sum(len(ids[title]) for title in training)
        print(
            f"  {len(training)} articles to train on ({tokens:,} tokens), {len(rows)} of {len(held_out)} others scored"
        )
        return {**sizes, "license": LICENSE_NOTE, "train_tokens": tokens, "rows": rows}

    def _tokenize(self) -> dict[str, Any]:
        data = self.output / "data"
        tools.run_tool(
            "tools/preprocess_data.py",
            *("--input", str(data / "train.jsonl"), "--tokenizer", str(self._source), "--overwrite"),
            *("--output-prefix", str(data / "train")),
        )
        return {}

    def _convert(self, arm: Arm) -> dict[str, Any]:
        from orthros_train.model import OrthrosConfig  # noqa: PLC0415
        from orthros_train.model.parameter_count import parameter_count  # noqa: PLC0415

        form = (
            ("--architecture", "transformer")
            if arm is SOURCE
            else ("--base-window", str(self.window), "--base-sinks", "1")
        )
        folder = self._converted(arm)
        shutil.rmtree(folder, ignore_errors=True)  # of a step that was cut off before its result was kept
        tools.run_tool("tools/convert_llama.py", "--input", str(self._source), "--output", str(folder), *form)
        return {"parameters": parameter_count(OrthrosConfig.from_pretrained(folder)).total}

    def _score(self, arm: Arm, when: str, folder: Path) -> Any:
        title = f"Held-out articles {when} training: {arm.name}"
        return self.steps.run(f"nll-{when}-{arm.name}", title, self._position_nll, arm, folder)["nll"]

    def _position_nll(self, arm: Arm, folder: Path) -> dict[str, Any]:
        import torch  # noqa: PLC0415

        from evaluation.likelihood import nll_by_position  # noqa: PLC0415

        torch.set_num_threads(self.ranks)
        rows = torch.tensor(list(self.held_out.values()))
        nll = nll_by_position(_load(arm, folder), rows).tolist()
        means = ", ".join(f"{start}-{stop}: {mean_nll_between(nll, start, stop):.4f}" for start, stop in ranges())
        print(f"  nats a token at positions {means}")
        return {"nll": nll}

    def _arguments(self, arm: Arm) -> list[str]:
        """Overrides of one run; `output_dir` among them, so that they make a complete configuration."""
        return [*self.overrides, f"init_from={self._converted(arm)}", *arm.overrides, f"output_dir={self._run(arm)}"]

    def _train(self, arm: Arm) -> dict[str, Any]:
        from evaluation.demo import training  # noqa: PLC0415

        command = training.train(self.config_path, self._run(arm), self._arguments(arm), self.ranks)
        return {**training.read_run(self._run(arm)), "command": command}

    def _export(self, arm: Arm) -> dict[str, Any]:
        shutil.rmtree(self._adapted(arm), ignore_errors=True)
        tools.run_tool("tools/export_hf.py", "--checkpoint", str(self._run(arm)), "--output", str(self._adapted(arm)))
        return {}

    def _check_cache(self) -> dict[str, Any]:
        """Of the adapted model with a sink, around the window's edge: fewer cases than a small model's check has."""
        from evaluation.cache_check import check_cache, print_report  # noqa: PLC0415
        from evaluation.model_folder import load_model  # noqa: PLC0415

        w, folder = self.config.model.base_window or 0, self._adapted(CONVERTED[-1])
        report = check_cache(
            load_model(folder),
            lengths=(1, w, w + 1, 2 * w + 1),
            chunk_sizes=(None, w + 1),
            decode_steps=CACHE_CHECK_STEPS,
        )
        print_report(report, f"Cache check of {folder}")
        return report.to_dict()

    def _sample(self) -> dict[str, Any]:
        """How each arm goes on after the beginning of a held-out article: the source, and Orthros before and after."""
        import torch  # noqa: PLC0415

        from evaluation.generation import continue_prompts  # noqa: PLC0415

        tokenizer = self._tokenizer()
        title, ids = next(iter(self.held_out.items()))
        prompt = ids[:SAMPLE_PROMPT_TOKENS]
        samples = []
        for arm in ARMS:
            for when, folder in ((BEFORE, self._converted(arm)), (AFTER, self._adapted(arm))):
                torch.manual_seed(SAMPLE_SEED)
                (text,) = continue_prompts(_load(arm, folder), tokenizer, [prompt], (), SAMPLE_TOKENS, SAMPLING)
                samples.append({"arm": arm.name, "when": when, "text": text})
        return {"title": title, "prompt": tokenizer.decode(prompt), "prompt_tokens": len(prompt), "samples": samples}


def _load(arm: Arm, folder: Path) -> OrthrosForCausalLM:
    """The arm's model in float32; a converted folder serves both numbers of sinks."""
    from evaluation.model_folder import load_model  # noqa: PLC0415

    return load_model(folder, dtype="fp32", overrides={} if arm.sinks is None else {"base_sinks": arm.sinks})


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(DESCRIPTION, EXAMPLES)
    parser.add_argument("--output", type=Path, default=DEFAULT_FOLDER, help=f"default: {DEFAULT_FOLDER}")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache"), help="keeps the downloaded model and articles; default: .cache"
    )
    parser.add_argument(
        "--ranks", type=int_between(1, 64), default=2, metavar="N", help="processes to train with; default: 2"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the configuration")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_intermixed_args(arguments)
    demo = ConversionDemo(options.config, options.overrides, options.output, options.cache, options.ranks)

    def report(results: dict[str, Any]) -> tuple[Sequence[str], Path, Path]:
        from evaluation.conversion_demo.report import findings, write_conversion_report  # noqa: PLC0415

        return findings(results), *write_conversion_report(results, options.output)

    return conclude(demo.steps, demo.run, report)


if __name__ == "__main__":
    run_command(main)
