"""Time to first token, decoding speed and peak memory of both arms against the length of the prompt.

* One prompt at a time: batch 1, concurrency 1. A server that batches requests has other figures.
* Time to first token is the prefill until the logits of its last token are there; tokenization and sampling are not
  part of it. Decoding is one token a step.
* The arms are measured in turn, after a warm-up each, and medians are reported. Weights are random: times do not
  depend on them.
* Peak memory is measured in a process of its own for each arm and length: what the prefill needs beyond the weights.
* Where memory does not suffice for a length, that and the longer ones are left out, by name; the shorter ones count.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.benchmarking.models import arm_and_length, build_model, check_kernel, enough_memory, recipe_config
from evaluation.benchmarking.peak_memory import MIB, in_own_process, memory_growth_mib
from evaluation.command_line import whole_numbers
from evaluation.files import prepare_output, write_output
from evaluation.html_page import table, write_report
from evaluation.machine import describe_machine
from evaluation.model_folder import DTYPES, dtype_name, torch_device
from evaluation.paper import DECODE, TTFT
from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from orthros_train.model import OrthrosConfig, OrthrosForCausalLM

GIB = 2**30
ARMS = ("transformer", "orthros")
LESS_MEMORY = "use shorter --prompt-lengths or --dtype bf16"
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
    return {arm: arms[arm] for arm in ARMS}


def _dtype(options: argparse.Namespace) -> str:
    return "fp32" if options.dtype == "auto" else options.dtype


def _named_config(options: argparse.Namespace) -> OrthrosConfig:
    if options.config is not None:
        return recipe_config(options.config)
    from evaluation.model_folder import loading_errors, read_config  # noqa: PLC0415
    from orthros_train.conversion.from_llama import OrthrosForm  # noqa: PLC0415
    from orthros_train.conversion.source_config import read_source_config  # noqa: PLC0415
    from orthros_train.model import OrthrosConfig  # noqa: PLC0415
    from orthros_train.model_folder.model_parameters import build_config  # noqa: PLC0415

    folder = Path(options.model)
    path = folder / "config.json"
    if path.is_file() and '"orthros"' in path.read_text(encoding="utf-8", errors="replace"):
        read_config(folder)
        with loading_errors(folder, options.device):
            return OrthrosConfig.from_pretrained(folder)
    architecture = "transformer" if options.base_window is None else "orthros"
    form = OrthrosForm(options.base_window, architecture=architecture)
    return build_config({**read_source_config(folder).orthros_values(), **form.values()}, str(path))


def measure(options: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """All figures, JSON-ready; `command` are the arguments that a child process builds the same models from.

    Raises:
        InputError: as arm_configs, or memory does not suffice for the shortest prompt.
    """
    import torch  # noqa: PLC0415

    from orthros_train.data.progress import Progress  # noqa: PLC0415
    from orthros_train.model.parameter_count import parameter_count  # noqa: PLC0415

    configs = arm_configs(options)
    with enough_memory(options.device, LESS_MEMORY):
        models = {arm: build_model(config, _dtype(options), options.device) for arm, config in configs.items()}
    records: dict[tuple[str, int], dict[str, Any]] = {}
    wanted, reason = sorted(set(options.prompt_lengths)), ""
    with Progress("prompt lengths", len(wanted)) as progress:
        for number, length in enumerate(wanted):
            progress.update(number, f"{length:,} tokens")
            try:
                records |= _times(models, length, options)
            except InputError as error:
                if not records:
                    raise
                reason = str(error)
                break
    lengths = [length for length in wanted if ("orthros", length) in records]
    del models
    for (arm, length), record in records.items():
        record.update(_peak_in_child(command, arm, length))
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
        "left_out": {"prompt_lengths": [length for length in wanted if length not in lengths], "reason": reason},
        "paper": {
            "origin": TTFT.origin,
            "ttft_seconds": {arm: TTFT.of(arm) for arm in ARMS},
            "decode_tokens_per_second": {arm: DECODE.of(arm) for arm in ARMS},
        },
        "machine": describe_machine(),
    }


def _times(
    models: Mapping[str, OrthrosForCausalLM], length: int, options: argparse.Namespace
) -> dict[tuple[str, int], dict[str, Any]]:
    """Records of both arms at one length, without peak memory. Raises InputError where memory does not suffice."""
    from evaluation.arm_times import measure_decode, measure_prefill  # noqa: PLC0415

    records: dict[tuple[str, int], dict[str, Any]] = {}
    with enough_memory(options.device, LESS_MEMORY):
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
    return records


def _ratio(records: Mapping[tuple[str, int], Mapping[str, Any]], length: int) -> dict[str, Any]:
    """Transformer over Orthros: what exact FLOPs allow, and what was measured."""
    transformer, orthros = records["transformer", length], records["orthros", length]
    return {
        "prompt_length": length,
        "flops": transformer["prefill_flops"] / orthros["prefill_flops"],
        "ttft": transformer["ttft_seconds"] / orthros["ttft_seconds"],
    }


def _peak_in_child(command: Sequence[str], arm: str, length: int) -> dict[str, Any]:
    """`peak_memory_gib`; None with a `peak_memory_problem` where it cannot be measured: the times are there already."""
    arguments = ["-m", "evaluation.ttft", *command, "--peak-of", f"{arm}:{length}"]
    try:
        return dict(in_own_process(arguments, f"the peak memory of {arm} at {length} tokens"))
    except InputError as error:
        return {"peak_memory_gib": None, "peak_memory_problem": str(error)}


def peak_memory(options: argparse.Namespace) -> float:
    """GiB that one prefill needs at most beyond what the process holds before it; for `--peak-of`, in this process.

    Raises:
        InputError: as arm_configs, not one of its arms, or memory does not suffice.
    """
    import torch  # noqa: PLC0415

    arm, length = options.peak_of
    if arm not in ARMS:
        raise InputError(f"--peak-of {arm}: the arms are {' and '.join(ARMS)}")
    config = arm_configs(options)[arm]
    with enough_memory(options.device, LESS_MEMORY):
        model = build_model(config, _dtype(options), options.device)
        ids = torch.zeros(1, length, dtype=torch.int64, device=model.device)
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
        for arm in ARMS:
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


def plot_name(output: Path) -> str:
    """Of the plot beside an output file; in characters that a page's link needs no escapes for."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", output.stem)


def markdown(results: Mapping[str, Any], plot: str) -> str:
    """The report's text; `plot` is the plot's name."""
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
                "–" if record["peak_memory_gib"] is None else f"{record['peak_memory_gib']:.3f}",
            ]
        )
    for arm in ARMS:
        ratio = f"{TTFT.transformer / TTFT.orthros:.2f}" if arm == "orthros" else ""
        rows.append(["128K", f"paper, {arm}", f"{TTFT.of(arm)}", ratio, "", f"{DECODE.of(arm)}", "–"])
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
                *_gaps(results),
                f"![Time to first token](plots/{plot}.png)",
                "The ratio is the transformer's time over Orthros'; the FLOP limit is the same ratio of exact FLOPs.",
                f"The rows marked paper are {TTFT.origin}. Its tokens/s are of decoding alone; these two do not imply "
                "faster decoding.",
            ]
        )
        + "\n"
    )


def _gaps(results: Mapping[str, Any]) -> list[str]:
    """Sentences on what could not be measured."""
    left_out = results["left_out"]
    lengths = ", ".join(f"{length:,}" for length in left_out["prompt_lengths"])
    problems = [record["peak_memory_problem"] for record in results["records"] if "peak_memory_problem" in record]
    gaps = [f"Left out, prompts of {lengths} tokens: {left_out['reason']}."] if lengths else []
    return [*gaps, *(f"Left out: {problem}." for problem in problems)]


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
    parser.add_argument("--dtype", type=dtype_name, choices=DTYPES, default="auto", help="default: auto, fp32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument("--repeats", type=positive_int, default=3, help="timed prefills; default: 3")
    parser.add_argument("--decode-steps", type=positive_int, default=32, help="timed steps; default: 32")
    parser.add_argument(
        "--peak-of", type=arm_and_length, metavar="ARM:LENGTH", help="print the peak memory of one prefill and end"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code, 1 where a length or a peak had to be left out."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(command)
    if min(options.prompt_lengths) < 1:
        raise InputError(f"--prompt-lengths must be at least 1, got {min(options.prompt_lengths)}")
    torch_device(options.device)
    if options.peak_of:
        print(json.dumps({"peak_memory_gib": peak_memory(options)}))
        return 0
    if options.output.suffix in (".md", ".html"):
        raise InputError(f"{options.output} is the JSON file, with a report of its name beside it; call it .json")
    prepare_output(options.output)
    results = measure(options, command)
    write_output(options.output, json.dumps(results, indent=1) + "\n")
    plot = plot_name(options.output)
    text = markdown(results, plot)
    write_report(options.output.parent, options.output.stem, "Time to first token", text, {plot: ttft_plot(results)})
    print(text)
    return 1 if _gaps(results) else 0


if __name__ == "__main__":
    run_command(main)
