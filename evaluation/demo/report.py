"""The demo's report: one Markdown text, and the same text as a self-contained HTML page with inline plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from evaluation import html_page, plots
from evaluation.demo.findings import cache_table, findings, no_spread, per_seed, spread
from evaluation.demo.provenance import mixture, origin, time_and_load

ARMS = ("transformer", "orthros", "transformer-equal-flops")


def write_report(results: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write report.md with its plots, and report.html, into `folder`; return both paths."""
    return html_page.write_report(folder, "report", "Orthros demo", markdown_report(results), _figures(results))


def _figures(results: dict[str, Any]) -> dict[str, Figure]:
    first = results["runs"][str(results["seeds"][0])]
    return {
        "loss": plots.loss_curves(first),
        "nll": plots.validation_nll({arm: per_seed(results, arm, "validation_nll") for arm in ARMS}),
        "kv": plots.kv_growth(results["cache_check"]["growth"], results["cache_check"]["base_window"]),
        "times": plots.times_against_length(results["prefill"], results["decode"]),
    }


def markdown_report(results: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    sections: list[Callable[[dict[str, Any]], str]] = [
        _head, _findings, _likelihood, _training, _cache, _times, _sample, _method,
    ]  # fmt: skip
    return "\n\n".join(section(results).strip() for section in sections) + "\n"


def _head(results: dict[str, Any]) -> str:
    text, model, parameters = results["text"], results["model"], results["parameters"]
    held_out = ", ".join(text["validation_names"])
    return f"""
# Orthros demo: {text["title"]}

A transformer ({parameters["transformer"]:,} parameters) and an Orthros model ({parameters["orthros"]:,} parameters,
base window {model["base_window"]}) of the same sizes, {model["hidden_size"]} wide and
{model["num_hidden_layers"]} layers deep, were trained from the same weights on the same batches of bytes:
{text["train_bytes"] / 1e6:.1f} MB of {text["source"]}. Validation text, which neither saw: {held_out}. Seeds:
{", ".join(map(str, results["seeds"]))}.

{mixture(results)}

This is a small model on a small machine: it shows that the parts work and what they cost here, and nothing about large
models.
"""


def _findings(results: dict[str, Any]) -> str:
    return "## What this run shows\n\n" + "\n".join(f"- {line}" for line in findings(results))


def _likelihood(results: dict[str, Any]) -> str:
    seeds = results["seeds"]
    nll = "validation NLL" if len(seeds) > 1 else "validation NLL (one seed)"
    rows = [f"| | steps | tokens | training FLOPs | {nll} | bits per byte |", "| --- " + "| ---: " * 5 + "|"]
    for arm in ARMS:
        first = results["runs"][str(seeds[0])][arm]
        values = per_seed(results, arm, "validation_nll")
        mean = statistics.fmean(values)
        rows.append(
            f"| {plots.LABELS[arm]} | {first['steps']} | {first['tokens']:,} | {sum(first['flops_per_step']):.3e} "
            f"| {mean:.4f}{spread(values)} | {mean / math.log(2):.4f} |"
        )
    table = "\n".join(rows)
    recheck = max(abs(a - b) for arm in ARMS for a, b in zip(
        per_seed(results, arm, "validation_nll"), per_seed(results, arm, "exported_nll"), strict=True))  # fmt: skip
    certainty = f"{no_spread(seeds).capitalize()}."
    if len(seeds) > 1:
        certainty = f"Mean ± standard deviation over {len(seeds)} seeds; steps, tokens and FLOPs are seed {seeds[0]}'s."
    return f"""
## Validation loss

{table}

{certainty} NLL is in nats per byte, over
{results["validation_labels"]:,} bytes of text that was not trained on. Each run has its own full learning-rate
schedule. The exported models, loaded again, give the same values to {max(recheck, 1e-9):.0e}.

![Validation NLL](plots/nll.png)

## Training

![Loss curves](plots/loss.png)

Lines are the training loss (mean of {plots.SMOOTHING} steps, seed {results["seeds"][0]}), dots the validation loss.
"""


def _training(results: dict[str, Any]) -> str:
    same = results["identical"]
    rows = ["| | bytes a second | time of all steps |", "| --- | ---: | ---: |"]
    for arm in ARMS:
        speed = statistics.median(per_seed(results, arm, "tokens_per_second"))
        seconds = statistics.fmean(per_seed(results, arm, "training_seconds"))
        rows.append(f"| {plots.LABELS[arm]} | {speed:,.0f} | {seconds:.1f} s |")
    step = {record["arm"]: record for record in results["training"]}
    time_ratio = step["orthros"]["seconds"] / step["transformer"]["seconds"]
    flop_ratio = step["orthros"]["flops"] / step["transformer"]["flops"]
    return "\n".join(rows) + (
        "\n\nThe arms train one after another, so whatever else the machine does shows in these figures. Measured in "
        f"turn ({_repeats(results['training'])} repeats, medians), forward and backward of one micro-batch of "
        f"{results['recipe']['micro_batch_size']} rows take {step['transformer']['seconds'] * 1e3:.0f} ms in the "
        f"transformer and {step['orthros']['seconds'] * 1e3:.0f} ms in Orthros: {time_ratio:.2f}× the time for "
        f"{flop_ratio:.2f}× the FLOPs.\n\n"
        f"Checked for every seed: {same['weights']} shared weight tensors are bitwise equal at the start, and all "
        f"{same['samples']:,} samples of the equal-token runs are the same in the same order."
    )


def _cache(results: dict[str, Any]) -> str:
    check = results["cache_check"]
    lengths = sorted({length for case in check["cases"] for length in case["lengths"]})
    return f"""
## Cache check

The trained Orthros model's prefill and decoding against its full forward, after the prefill and after every step:
prompts of {", ".join(map(str, lengths))} tokens alone and as one ragged batch, several prefill chunk sizes.

{cache_table(check)}

![KV growth](plots/kv.png)

The cache holds every position in every layer: one entry more a step, also beyond the window.
"""


def _times(results: dict[str, Any]) -> str:
    prefill, decode = results["prefill"], results["decode"]
    rows = ["| prompt | transformer | Orthros | time ratio | FLOP ratio |", "| ---: " * 5 + "|"]
    for length in sorted({record["length"] for record in prefill}):
        at = {record["arm"]: record for record in prefill if record["length"] == length}
        base, ours = at["transformer"], at["orthros"]
        rows.append(
            f"| {length:,} | {base['seconds'] * 1e3:,.1f} ms | {ours['seconds'] * 1e3:,.1f} ms "
            f"| {base['seconds'] / ours['seconds']:.2f} | {base['flops'] / ours['flops']:.2f} |"
        )
    steps = ["| context | transformer | Orthros | time ratio |", "| ---: " * 4 + "|"]
    for context in sorted({record["context"] for record in decode}):
        at = {record["arm"]: record["seconds"] for record in decode if record["context"] == context}
        steps.append(
            f"| {context:,} | {at['transformer'] * 1e3:.2f} ms | {at['orthros'] * 1e3:.2f} ms "
            f"| {at['transformer'] / at['orthros']:.2f} |"
        )
    newline = "\n"
    return f"""
## Prefill and decoding time

Batch 1, {results["timing_threads"]} thread, {results["precision"]}, arms measured in turn; medians of
{_repeats(prefill)} prompts of a length and of {_repeats(decode)} decoding steps after it. The slowest repeat of a
prefill took up to {_disturbance(prefill):.1f}× the fastest one's time. A ratio above 1 means that Orthros is faster.
The models were trained at {results["sequence_length"]} tokens; longer prompts are timed, not judged. Dashed
lines in the plot follow the exact FLOPs from the longest prompt backwards.

{newline.join(rows)}

One decoding step:

{newline.join(steps)}

![Times](plots/times.png)
"""


def _repeats(records: list[dict[str, Any]]) -> int:
    return min(len(record["all_seconds"]) for record in records)


def _disturbance(records: list[dict[str, Any]]) -> float:
    """How far repeats of one figure lie apart, slowest over fastest, where that is worst."""
    return max(max(record["all_seconds"]) / min(record["all_seconds"]) for record in records)


def _sample(results: dict[str, Any]) -> str:
    sample = results["sample"]
    text = (sample["prompt"] + sample["text"]).rstrip()
    return f"""
## A sample

The Orthros model of seed {results["seeds"][0]}, `{sample["settings"]}`; the prompt is the first line.

````text
{text}
````
"""


def _method(results: dict[str, Any]) -> str:
    recipe = results["recipe"]
    commands = "\n".join(results["commands"])
    return f"""
## How it was measured

{origin(results)}
- Training: {results["ranks"]} ranks with one thread each, {results["precision"]}; batches of
  {recipe["global_batch_size"]} rows of {results["sequence_length"]} tokens.
- Peak learning rate {recipe["learning_rate"]:g} in every arm, {recipe["rate_origin"]}; {recipe["warmup_steps"]} steps
  of warm-up, then {recipe["schedule"]}.
- Text: {results["text"]["license"]}.
- FLOPs are exact counts of the matrix products of this run's very samples (docs/method.md), training is 3 forwards.
- The base stream's prefill is linear in the prompt's length. Training is not: the output stream's attention stays
  quadratic and every token-wise layer runs twice.
- None of these figures is the paper's, and none of the paper's is reproduced here.

{time_and_load(results)}

The commands of seed {results["seeds"][0]}:

```sh
{commands}
```
"""
