"""Train, compare and report both arms on real text; what `make demo` runs.

Each step leaves its result under OUTPUT/results and is not done again; an interrupted training run continues from its
checkpoint. The figures end up in OUTPUT/report.md and OUTPUT/report.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.command_line import whole_numbers
from evaluation.demo import tools
from evaluation.demo.steps import DEFAULT_FOLDER, StepError, Steps, conclude
from evaluation.demo.text import LICENSE_NOTE, own_text, shakespeare, text_sha256, write_corpus
from orthros_train.command_line import CommandParser, run_command
from orthros_train.config import Config, config_to_yaml, load_config
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from orthros_train.data import Tokenizer

DESCRIPTION = """Train a transformer and an Orthros model on real text and compare them.

At equal tokens and at equal training FLOPs; then the cache check, prefill and decoding times, a sample, and a report.
Finished steps are not redone, and an interrupted training run continues from its checkpoint.
"""
EXAMPLES = """\
  python tools/demo.py
  python tools/demo.py --seeds 42,43,44
  python tools/demo.py --text mine.txt --output outputs/mine train.steps=1000"""
DEFAULT_CONFIG = Path("configs/demo.yaml")
ARMS = ("transformer", "orthros", "transformer-equal-flops")
TRANSFORMER = ("model.architecture=transformer", "model.base_window=null")
CHOSEN_RATE = f"the rate of {DEFAULT_CONFIG}, which was chosen on its transformer arm (docs/LOG.md), not for Orthros"
GIVEN_RATE = f"as this run's settings give it; that of {DEFAULT_CONFIG} is another"
PROMPT = "MACBETH.\n"
SAMPLING = ("--temperature", "0.7", "--top-p", "0.9", "--max-new-tokens", "240", "--seed", "42")


class Demo:
    """The demo's steps, in the order in which they are run."""

    def __init__(self, config: Path, overrides: Sequence[str], output: Path, text: Path | None, ranks: int) -> None:
        """Raises InputError for an unfit configuration and for a folder of another demo."""
        self.config_path, self.output, self.text, self.ranks = config, output, text, ranks
        self.overrides = [
            *overrides,
            f"data.train=[{{prefix: {output}/data/train}}]",
            f"data.validation=[{{prefix: {output}/data/validation}}]",
        ]
        self.config = load_config(config, [*self.overrides, f"output_dir={output}"])
        settings = {
            "config": config_to_yaml(self.config),
            "text": str(text) if text else "shakespeare",
            "text_sha256": text_sha256(text) if text else None,
            "ranks": ranks,
        }
        self.steps = Steps(output, settings)
        self.commands: list[str] = []

    def run(self, seeds: Sequence[int], prefill_lengths: Sequence[int]) -> dict[str, Any]:
        """All steps for all seeds; returns everything that the report needs."""
        self._check_lengths(prefill_lengths)
        text = self.steps.run("text", "Text", self._write_text)
        self.steps.run("tokens", "Tokens", self._tokenize)
        from orthros_train.data import load_tokenizer  # noqa: PLC0415

        tokenizer = load_tokenizer(load_config(self.config_path, self._arguments("orthros", seeds[0])).tokenizer)
        runs: dict[str, dict[str, Any]] = {}
        fair: dict[str, Any] = {}
        for seed in seeds:
            fair = self.steps.run(
                f"fairness-{seed}", f"Equal start and FLOPs, seed {seed}", self._fairness, seed, tokenizer
            )
            runs[str(seed)] = {arm: self._arm(arm, seed, fair, tokenizer) for arm in ARMS}
        first = seeds[0]
        check = self.steps.run(f"cache-check-{first}", "Cache check", self._check_cache, first)
        name = "-".join(map(str, (first, "at", *prefill_lengths)))
        times = self.steps.run(f"times-{name}", f"Times, seed {first}", self._time, first, prefill_lengths)
        sample = self.steps.run(f"sample-{first}", "Sample", self._sample, first)
        return {
            "seeds": list(seeds),
            "text": text,
            "model": self.config.model.model_dump(),
            "parameters": fair["parameters"],
            "identical": {"weights": fair["weights"], "samples": fair["samples"]},
            "runs": runs,
            "validation_labels": runs[str(first)]["orthros"]["exported_labels"],
            "cache_check": check,
            "prefill": times["prefill"],
            "decode": times["decode"],
            "training": times["training"],
            "sample": sample,
            "sequence_length": self.config.train.sequence_length,
            "precision": self.config.precision,
            "ranks": self.ranks,
            "timing_threads": times["threads"],
            "recipe": self._recipe(),
            "steps": self.steps.measured,
            "commands": [runs[str(first)][arm]["command"] for arm in ARMS],
        }

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        """Before anything is trained: raises InputError for prompts that the models cannot be timed with."""
        from evaluation.arm_times import DECODE_STEPS  # noqa: PLC0415

        room = self.config.model.max_position_embeddings - DECODE_STEPS - 1
        unfit = [length for length in lengths if not 1 <= length <= room]
        if unfit:
            raise InputError(
                f"--prefill-lengths: {unfit[0]} is not from 1 to {room}, which is model.max_position_embeddings less "
                f"the {DECODE_STEPS + 1} tokens decoded after it"
            )

    def _recipe(self) -> dict[str, Any]:
        """The training settings that the report names; the learning rate with how it was chosen."""
        config = self.config
        rate = config.optimizer.learning_rate
        usual = load_config(DEFAULT_CONFIG, []).optimizer.learning_rate
        return {
            "global_batch_size": config.train.global_batch_size,
            "micro_batch_size": config.train.micro_batch_size,
            "learning_rate": rate,
            "rate_origin": CHOSEN_RATE if rate == usual else GIVEN_RATE,
            "schedule": config.schedule.type,
            "warmup_steps": config.schedule.warmup_steps,
        }

    def _arguments(self, arm: str, seed: int, steps: int | None = None) -> list[str]:
        """Overrides of one run; `output_dir` among them, so that they make a complete configuration."""
        own = [] if arm == "orthros" else list(TRANSFORMER)
        length = [] if steps is None else [f"train.steps={steps}"]
        return [*self.overrides, *own, *length, f"train.seed={seed}", f"output_dir={self._run(arm, seed)}"]

    def _run(self, arm: str, seed: int) -> Path:
        return self.output / "runs" / f"{arm}-{seed}"

    def _model(self, arm: str, seed: int) -> Path:
        return self.output / "models" / f"{arm}-{seed}"

    def _write_text(self) -> dict[str, Any]:
        if self.text is None:
            works = shakespeare(self.output / "cache")
            about = {
                "title": "Shakespeare",
                "source": "Shakespeare's works in modern spelling",
                "license": LICENSE_NOTE,
            }
        else:
            works = own_text(self.text)
            about = {"title": self.text.name, "source": str(self.text), "license": "the user's own file"}
        sizes = write_corpus(self.output / "data", *works)
        print(f"  {sizes['train_bytes']:,} bytes to train on, {sizes['validation_bytes']:,} held out")
        return {**about, **sizes}

    def _tokenize(self) -> dict[str, Any]:
        folder = self.output / "data"
        for split in ("train", "validation"):
            tools.run_tool(
                "tools/preprocess_data.py",
                *("--input", str(folder / f"{split}.jsonl"), "--tokenizer", "byte"),
                *("--output-prefix", str(folder / split)),
            )
        return {}

    def _fairness(self, seed: int, tokenizer: Tokenizer) -> dict[str, Any]:
        from evaluation.demo import comparison  # noqa: PLC0415

        transformer, orthros = (self._load(arm, seed) for arm in ("transformer", "orthros"))
        found = comparison.shared_start(transformer, orthros, tokenizer)
        samples = comparison.shared_samples(transformer, orthros, tokenizer)
        steps = orthros.train.steps
        flops = {
            "transformer": comparison.training_flops_per_step(transformer, tokenizer, steps),
            "orthros": comparison.training_flops_per_step(orthros, tokenizer, steps),
        }
        flops["transformer-equal-flops"] = comparison.steps_for_flops(transformer, tokenizer, sum(flops["orthros"]))
        ratio = sum(flops["orthros"]) / sum(flops["transformer"])
        print(
            f"  {found['weights']} shared weights equal, {samples:,} samples equal; a step of Orthros costs "
            f"{ratio:.3f}× the FLOPs: {steps} steps against {len(flops['transformer-equal-flops'])}"
        )
        return {**found, "samples": samples, "flops_per_step": flops}

    def _load(self, arm: str, seed: int) -> Config:
        return load_config(self.config_path, self._arguments(arm, seed))

    def _arm(self, arm: str, seed: int, fair: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
        """Train, export and score one arm."""
        flops = fair["flops_per_step"][arm]
        what = f"{arm}, seed {seed}"
        title = f"Training: {what}, {len(flops)} steps"
        record = self.steps.run(f"train-{arm}-{seed}", title, self._train, arm, seed, len(flops))
        self.steps.run(f"export-{arm}-{seed}", f"Export: {what}", self._export, arm, seed)
        score = self.steps.run(
            f"score-{arm}-{seed}", f"Validation of the export: {what}", self._score, arm, seed, tokenizer
        )
        return {**record, **score, "flops_per_step": flops}

    def _train(self, arm: str, seed: int, steps: int) -> dict[str, Any]:
        from evaluation.demo import training  # noqa: PLC0415

        arguments = self._arguments(arm, seed, steps)
        run = self._run(arm, seed)
        command = training.train(self.config_path, run, arguments, self.ranks)
        found = training.read_run(run)
        if not found["validation"]:
            raise StepError(f"{run}/metrics.jsonl holds no validation_loss")
        return {**found, "validation_nll": found["validation"][-1][1], "command": command}

    def _export(self, arm: str, seed: int) -> dict[str, Any]:
        run = self._run(arm, seed)
        latest = (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
        checkpoint = run / "checkpoints" / latest
        tools.run_tool("tools/export_hf.py", "--checkpoint", str(checkpoint), "--output", str(self._model(arm, seed)))
        return {"checkpoint": str(checkpoint)}

    def _score(self, arm: str, seed: int, tokenizer: Tokenizer) -> dict[str, Any]:
        from evaluation.likelihood import mean_nll  # noqa: PLC0415
        from evaluation.model_folder import load_model  # noqa: PLC0415
        from orthros_train.data import PretrainingData  # noqa: PLC0415

        config = self._load(arm, seed)
        data = PretrainingData(config, tokenizer, "validation")
        nll, labels = mean_nll(load_model(self._model(arm, seed)), data, config.evaluation.samples)
        print(f"  {nll:.4f} nats per byte over {labels:,} bytes")
        return {"exported_nll": nll, "exported_labels": labels}

    def _check_cache(self, seed: int) -> dict[str, Any]:
        from evaluation.cache_check import check_cache, print_report  # noqa: PLC0415
        from evaluation.model_folder import load_model  # noqa: PLC0415

        model = self._model("orthros", seed)
        report = check_cache(load_model(model))
        print_report(report, f"Cache check of {model}")
        return report.to_dict()

    def _time(self, seed: int, lengths: Sequence[int]) -> dict[str, Any]:
        import torch  # noqa: PLC0415

        from evaluation.arm_times import measure_decode, measure_prefill, measure_training  # noqa: PLC0415
        from evaluation.model_folder import load_model  # noqa: PLC0415

        torch.set_num_threads(1)
        models = {arm: load_model(self._model(arm, seed)) for arm in ("transformer", "orthros")}
        prefill = measure_prefill(models, lengths)
        decode = measure_decode(models, lengths)
        config = self._load("orthros", seed)
        training = measure_training(models, config.train.micro_batch_size, config.train.sequence_length)
        for record in prefill:
            print(f"  prefill {record['length']:>6,} tokens  {record['arm']:<12} {record['seconds'] * 1e3:>9.1f} ms")
        return {"prefill": prefill, "decode": decode, "training": training, "threads": torch.get_num_threads()}

    def _sample(self, seed: int) -> dict[str, Any]:
        model = self._model("orthros", seed)
        text = tools.run_tool("tools/generate.py", "--model", str(model), "--prompt", PROMPT, *SAMPLING, show=False)
        print(text)
        return {"prompt": PROMPT, "text": text.removeprefix(PROMPT), "settings": " ".join(SAMPLING)}


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(DESCRIPTION, EXAMPLES)
    parser.add_argument("--output", type=Path, default=DEFAULT_FOLDER, help=f"default: {DEFAULT_FOLDER}")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}")
    parser.add_argument("--seeds", type=whole_numbers, default=[42], help="one or more, e.g. 42,43,44; default: 42")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text to use instead of Shakespeare's works")
    parser.add_argument("--ranks", type=int, default=2, help="processes to train with; default: 2")
    parser.add_argument(
        "--prefill-lengths",
        type=whole_numbers,
        default=[256, 512, 1024, 2048, 4096, 8192],
        help="prompt lengths to time; default: 256,512,1024,2048,4096,8192",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of the configuration")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_intermixed_args(arguments)
    if len(set(options.seeds)) != len(options.seeds):
        raise InputError(f"--seeds names a seed twice: {options.seeds}")
    if options.ranks < 1:
        raise InputError(f"--ranks must be at least 1, got {options.ranks}")
    demo = Demo(options.config, options.overrides, options.output, options.text, options.ranks)

    def report(results: dict[str, Any]) -> tuple[Sequence[str], Path, Path]:
        from evaluation.demo.findings import findings  # noqa: PLC0415
        from evaluation.demo.report import write_report  # noqa: PLC0415

        return findings(results), *write_report(results, options.output)

    return conclude(demo.steps, lambda: demo.run(options.seeds, options.prefill_lengths), report)


if __name__ == "__main__":
    run_command(main)
