"""Time to first token, decoding speed and peak memory of both arms against the length of the prompt.

* One prompt at a time: batch 1, concurrency 1. A server that batches requests has other figures.
* Time to first token is the prefill until the logits of its last token are there; tokenization and sampling are not
  part of it. Decoding is one token a step.
* The arms are measured in turn, after a warm-up each, and medians are reported. Weights are random: times do not
  depend on them.
* Peak memory is measured in a process of its own for each arm and length: what the prefill needs beyond the weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.benchmarking.models import build_model, check_kernel, recipe_config
from evaluation.benchmarking.peak_memory import MIB, in_own_process, memory_growth_mib
from evaluation.command_line import whole_numbers
from evaluation.files import prepare_output, write_output
from evaluation.html_page import table, write_report
from evaluation.machine import describe_machine
from evaluation.model_folder import DTYPES, torch_device
from evaluation.paper import DECODE, TTFT
from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from orthros_train.model import OrthrosConfig

GIB = 2**30
DESCRIPTION = """Measure time to first token, decoding speed and peak memory of both arms against prompt length.

The model is described by a folder's config.json or a training configuration; the arm it is not is derived from it.
Writes FILE.json and, beside it, FILE.md, FILE.html and a plot.
"""
EXAMPLES = """\
  python -m evaluation.ttft --config configs/orthros_1.3b.yaml --prompt-lengths 2048,8192,32768 --device cuda \\
      --output outputs/ttft.json
  python -m evaluation.ttft --model outputs/demo/models/orthros-42 --prompt-lengths 256,1024 --output outputs/ttft.json
  python -m evaluation.ttft --model Llama-3.2-1B --base-window 1024 --dtype bf16 --output outputs/ttft.json"""


def arm_configs(options: argparse.Namespace) -> dict[str, OrthrosConfig]:
    """Both arms of the model that the options name, with positions for the longest prompt.

    Raises:
        InputError: no such model, or one without a window for the Orthros arm.
    """
    from orthros_train.model import OrthrosConfig  # noqa: PLC0415
    from orthros_train.planning.dry_run import other_arm  # noqa: PLC0415  slow imports

    config = _named_config(options)
    values = config.to_dict()
    if options.base_window is not None:
        values |= {"architecture": "orthros", "query_affine": None, "base_window": options.base_window}
    if options.attention_kernel is not None:
        check_kernel(options.attention_kernel, options.device, _dtype(options), False, config.head_shape[2])
        values["attention_kernel"] = options.attention_kernel
    needed = max(options.prompt_lengths) + options.decode_steps + 1
    values["max_position_embeddings"] = max(config.max_position_embeddings, needed)
    chosen = OrthrosConfig(**values)
    arms = {each.architecture: each for each in (other_arm(chosen), chosen)}
    if arms["orthros"].base_window is None:
        raise InputError("the Orthros arm needs a window: pass --base-window W")
    return {arm: arms[arm] for arm in ("transformer", "orthros")}


def _dtype(options: argparse.Namespace) -> str:
    return "fp32" if options.dtype == "auto" else options.dtype


def _named_config(options: argparse.Namespace) -> OrthrosConfig:
    if options.config is not None:
        return recipe_config(options.config)
    from evaluation.model_folder import read_config  # noqa: PLC0415
    from orthros_train.conversion.source_config import read_source_config  # noqa: PLC0415
    from orthros_train.model import OrthrosConfig  # noqa: PLC0415
    from orthros_train.model_folder.model_parameters import build_config  # noqa: PLC0415

    folder = Path(options.model)
    path = folder / "config.json"
    if path.is_file() and '"orthros"' in path.read_text(encoding="utf-8", errors="replace"):
        read_config(folder)
        return OrthrosConfig.from_pretrained(folder)
    values = {**read_source_config(folder).orthros_values(), "architecture": "transformer", "base_window": None}
    return build_config(values, str(path))


def measure(options: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """All figures, JSON-ready; `command` are the arguments that a child process builds the same models from."""
    import torch  # noqa: PLC0415

    from evaluation.arm_times import measure_decode, measure_prefill  # noqa: PLC0415
    from orthros_train.data.progress import Progress  # noqa: PLC0415
    from orthros_train.model.parameter_count import parameter_count  # noqa: PLC0415

    configs = arm_configs(options)
    models = {arm: build_model(config, _dtype(options), options.device) for arm, config in configs.items()}
    records: dict[tuple[str, int], dict[str, Any]] = {}
    lengths = sorted(set(options.prompt_lengths))
    with Progress("prompt lengths", len(lengths)) as progress:
        for number, length in enumerate(lengths):
            progress.update(number, f"{length:,} tokens")
            for each in measure_prefill(models, [length], options.repeats):
                records[each["arm"], length] = {
                    "arm": each["arm"],
                    "prompt_length": length,
                    "ttft_seconds": each["seconds"],
                    "all_ttft_seconds": each["all_seconds"],
                    "prefill_flops": each["flops"],
                }
            for each in measure_decode(models, [length], options.decode_steps):
                records[each["arm"], length] |= {"decode_tokens_per_second": 1 / each["seconds"]}
    del models
    if options.device.startswith("cuda"):
        torch.cuda.empty_cache()
    for (arm, length), record in records.items():
        record["peak_memory_gib"] = _peak_in_child(command, arm, length)
    return {
        "batch": 1,
        "concurrency": 1,
        "device": options.device,
        "device_name": torch.cuda.get_device_name() if options.device.startswith("cuda") else None,
        "threads": torch.get_num_threads(),
        "dtype": _dtype(options),
        "repeats": options.repeats,
        "decode_steps": options.decode_steps,
        "base_window": configs["orthros"].base_window,
        "base_sinks": configs["orthros"].base_sinks,
        "parameters": {arm: parameter_count(config).total for arm, config in configs.items()},
        "records": [records[arm, length] for length in lengths for arm in configs],
        "ratios": [_ratio(records, length) for length in lengths],
        "machine": describe_machine(),
    }


def _ratio(records: Mapping[tuple[str, int], Mapping[str, Any]], length: int) -> dict[str, Any]:
    """Transformer over Orthros: what exact FLOPs allow, and what was measured."""
    transformer, orthros = records["transformer", length], records["orthros", length]
    return {
        "prompt_length": length,
        "flops": transformer["prefill_flops"] / orthros["prefill_flops"],
        "ttft": transformer["ttft_seconds"] / orthros["ttft_seconds"],
    }


def _peak_in_child(command: Sequence[str], arm: str, length: int) -> float:
    arguments = ["-m", "evaluation.ttft", *command, "--peak-of", f"{arm}:{length}"]
    return float(in_own_process(arguments, f"the peak memory of {arm} at {length} tokens")["peak_memory_gib"])


def peak_memory(options: argparse.Namespace) -> float:
    """GiB that one prefill needs at most beyond what the process holds before it; for `--peak-of`, in this process."""
    import torch  # noqa: PLC0415

    arm, length = options.peak_of.split(":")
    model = build_model(arm_configs(options)[arm], _dtype(options), options.device)
    ids = torch.zeros(1, int(length), dtype=torch.int64, device=model.device)
    return memory_growth_mib(lambda: model.prefill(ids), options.device) * MIB / GIB


def ttft_plot(results: Mapping[str, Any]) -> Figure:
    """Time to first token (left) and the ratio of the arms, measured and by FLOPs (right), against prompt length."""
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415

    from evaluation.plots import COLORS, LABELS, STYLE  # noqa: PLC0415

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 3.4), layout="constrained")
        left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
        for arm in ("transformer", "orthros"):
            mine = [record for record in results["records"] if record["arm"] == arm]
            x = [record["prompt_length"] for record in mine]
            left.plot(x, [record["ttft_seconds"] for record in mine], "o-", color=COLORS[arm], label=LABELS[arm])
        x = [ratio["prompt_length"] for ratio in results["ratios"]]
        right.plot(x, [ratio["ttft"] for ratio in results["ratios"]], "o-", color=COLORS["orthros"], label="measured")
        right.plot(
            x, [r["flops"] for r in results["ratios"]], "--", color=COLORS["transformer"], label="limit by FLOPs"
        )
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.set_xlabel("prompt length (tokens)")
            axes.legend()
        left.set_yscale("log")
        left.set_ylabel("time to first token (s)")
        right.set_ylabel("transformer / Orthros")
        right.set_ylim(bottom=0)
        return figure


def markdown(results: Mapping[str, Any]) -> str:
    """The report's text."""
    ratios = {ratio["prompt_length"]: ratio for ratio in results["ratios"]}
    rows = []
    for record in results["records"]:
        ratio = ratios[record["prompt_length"]]
        own = record["arm"] == "orthros"
        rows.append(
            [
                f"{record['prompt_length']:,}",
                record["arm"],
                f"{record['ttft_seconds']:.4g}",
                f"{ratio['ttft']:.2f}" if own else "",
                f"{ratio['flops']:.2f}" if own else "",
                f"{record['decode_tokens_per_second']:.4g}",
                f"{record['peak_memory_gib']:.3f}",
            ]
        )
    head = ["prompt", "arm", "TTFT (s)", "measured ratio", "FLOP limit", "decode tokens/s", "peak memory (GiB)"]
    device = results["device_name"] or f"{results['machine']['processor']}, {results['threads']} threads"
    return (
        "\n\n".join(
            [
                "# Time to first token",
                f"{device}, {results['dtype']}, {results['parameters']['orthros']:,} parameters, base window "
                f"{results['base_window']}, {results['base_sinks']} sinks. Batch 1, concurrency 1; medians of "
                f"{results['repeats']} prefills and {results['decode_steps']} decoding steps after a warm-up, random "
                "weights. Peak memory is what one prefill needs beyond the weights.",
                table(head, rows, numbers_from=2),
                "![Time to first token](plots/ttft.png)",
                "The ratio is the transformer's time over Orthros'; the FLOP limit is the same ratio of exact FLOPs.",
                f"The paper's, not measured here ({TTFT.table}: {TTFT.setting}): transformer {TTFT.transformer} s, "
                f"Orthros {TTFT.orthros} s, a ratio of {TTFT.transformer / TTFT.orthros:.2f}; decode only, "
                f"{DECODE.transformer} and {DECODE.orthros} tokens/s, which does not imply faster decoding.",
            ]
        )
        + "\n"
    )


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(DESCRIPTION, EXAMPLES, prog="python -m evaluation.ttft")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="DIR", help="folder whose config.json is taken (Orthros or Llama family)")
    model.add_argument("--config", type=Path, metavar="YAML", help="training configuration whose model is taken")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument("--prompt-lengths", type=whole_numbers, default=[2048, 8192], help="default: 2048,8192")
    parser.add_argument("--base-window", type=positive_int, metavar="W", help="w of the Orthros arm")
    parser.add_argument("--attention-kernel", metavar="NAME", help="default: the model's own")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: auto, fp32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument("--repeats", type=positive_int, default=3, help="timed prefills; default: 3")
    parser.add_argument("--decode-steps", type=positive_int, default=32, help="timed steps; default: 32")
    parser.add_argument("--peak-of", metavar="ARM:LENGTH", help="print the peak memory of one prefill and end")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(command)
    if min(options.prompt_lengths) < 1:
        raise InputError(f"--prompt-lengths must be at least 1, got {min(options.prompt_lengths)}")
    torch_device(options.device)
    if options.peak_of:
        print(json.dumps({"peak_memory_gib": peak_memory(options)}))
        return 0
    prepare_output(options.output)
    results = measure(options, command)
    write_output(options.output, json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    write_report(options.output.parent, options.output.stem, "Time to first token", text, {"ttft": ttft_plot(results)})
    print(text)
    return 0


if __name__ == "__main__":
    run_command(main)
