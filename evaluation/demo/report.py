"""The demo's report: one Markdown text, and the same text as a self-contained HTML page with inline plots.

Every sentence with a judgement is made from the figures: it says which arm was better, whichever that was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from evaluation import plots
from evaluation.files import write_output

ARMS = ("transformer", "orthros", "transformer-equal-flops")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Orthros demo</title>
<style>
:root { color-scheme: light dark;
  --ink: #1f2a37; --soft: #5b6875; --line: #d9dee4; --page: #ffffff; --panel: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ec; --soft: #9fabb8; --line: #343c46; --page: #12161b; --panel: #1b2027; } }
body { margin: 0 auto; max-width: 58rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem;
  display: block; overflow-x: auto; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; text-align: left; }
pre { background: var(--panel); padding: .9rem 1rem; border-radius: 8px; overflow-x: auto;
  font-size: .88rem; line-height: 1.45; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
:not(pre) > code { background: var(--panel); padding: .1em .35em; border-radius: 4px; font-size: .9em; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; color: var(--ink); }
</style>
</head>
<body>
BODY</body>
</html>
"""


def write_report(results: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write report.md with its plots, and report.html, into `folder`; return both paths."""
    figures = _figures(results)
    for name, figure in figures.items():
        plots.save_png(figure, folder / "plots" / f"{name}.png")
    text = markdown_report(results)
    write_output(folder / "report.md", text)
    write_output(folder / "report.html", html_page(text, figures))
    return folder / "report.md", folder / "report.html"


def html_page(text: str, figures: dict[str, Figure]) -> str:
    """The Markdown `text` as a page in which plots/NAME.png became the SVG of figure NAME."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    for name, figure in figures.items():
        start = body.index(f'<p><img src="plots/{name}.png"')
        end = body.index("</p>", start) + len("</p>")
        body = f"{body[:start]}<figure>{plots.to_svg(figure)}</figure>{body[end:]}"
    return PAGE.replace("BODY", body)


def _figures(results: dict[str, Any]) -> dict[str, Figure]:
    first = results["runs"][str(results["seeds"][0])]
    return {
        "loss": plots.loss_curves(first),
        "nll": plots.validation_nll({arm: _per_seed(results, arm, "validation_nll") for arm in ARMS}),
        "kv": plots.kv_growth(results["cache_check"]["growth"], results["cache_check"]["base_window"]),
        "times": plots.times_against_length(results["prefill"], results["decode"]),
    }


def _per_seed(results: dict[str, Any], arm: str, key: str) -> list[float]:
    return [results["runs"][str(seed)][arm][key] for seed in results["seeds"]]


def markdown_report(results: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    sections: list[Callable[[dict[str, Any]], str]] = [
        _head, _findings, _likelihood, _training, _cache, _times, _sample, _method,
    ]  # fmt: skip
    return "\n\n".join(section(results).strip() for section in sections) + "\n"


def _head(results: dict[str, Any]) -> str:
    text, model = results["text"], results["model"]
    held_out = ", ".join(text["validation_names"])
    return f"""
# Orthros demo: {text["title"]}

A transformer and an Orthros model of the same sizes ({model["hidden_size"]} wide, {model["num_hidden_layers"]} layers,
{results["parameters"]["orthros"]:,} parameters, base window {model["base_window"]}) were trained from the same weights
on the same batches of bytes: {text["train_bytes"] / 1e6:.1f} MB of {text["source"]}. Validation text, which neither
saw: {held_out}. Seeds: {", ".join(map(str, results["seeds"]))}.

This is a small model on a small machine: it shows that the parts work and what they cost here, and nothing about large
models.
"""


def findings(results: dict[str, Any]) -> list[str]:
    """What was measured, in sentences that follow the figures (Markdown, one line each)."""
    first = results["runs"][str(results["seeds"][0])]
    ratio = sum(first["orthros"]["flops_per_step"]) / sum(first["transformer"]["flops_per_step"])
    training = {record["arm"]: record["seconds"] for record in results["training"]}
    slower = training["orthros"] / training["transformer"]
    short, long = (_ratio_at(results["prefill"], "length", index) for index in (0, -1))
    step = _ratio_at(results["decode"], "context", -1)
    check = results["cache_check"]
    differences = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in check["max_difference"].items())
    return [
        f"**Equal tokens:** Orthros is {_compare(results, 'transformer')}.",
        f"**Equal training FLOPs:** Orthros is {_compare(results, 'transformer-equal-flops')}. One Orthros step costs "
        f"{ratio:.2f}× the FLOPs of a transformer step, so that transformer ran "
        f"{first['transformer-equal-flops']['steps']} steps instead of {first['transformer']['steps']}.",
        f"**Training:** forward and backward of the same bytes takes {slower:.2f}× the time in Orthros.",
        f"**Prefill:** Orthros is {_faster(short[1])} at {short[0]:,} tokens and {_faster(long[1])} at {long[0]:,}.",
        f"**One decoding step:** Orthros is {_faster(step[1])} after {step[0]:,} tokens.",
        f"**Cache:** prefill and decoding {'agree' if check['passed'] else 'DO NOT AGREE'} with the full forward; "
        f"largest difference of a logit {differences}.",
    ]


def _findings(results: dict[str, Any]) -> str:
    return "## What this run shows\n\n" + "\n".join(f"- {line}" for line in findings(results))


def _compare(results: dict[str, Any], arm: str) -> str:
    """Orthros' validation NLL against `arm`'s, seed by seed."""
    pairs = zip(_per_seed(results, "orthros", "validation_nll"), _per_seed(results, arm, "validation_nll"), strict=True)
    differences = [ours - theirs for ours, theirs in pairs]
    mean = statistics.fmean(differences)
    word = "worse" if mean > 0 else "better"
    spread = ""
    if len(differences) > 1:
        worse = sum(difference > 0 for difference in differences)
        deviation = statistics.stdev(differences)
        spread = f" (standard deviation {deviation:.4f} over {len(differences)} seeds, worse in {worse} of them)"
    return f"{word} than the transformer by {abs(mean):.4f} nats per byte{spread}"


def _ratio_at(records: Sequence[dict[str, Any]], key: str, index: int) -> tuple[int, float]:
    """The shortest (0) or longest (-1) length, and the transformer's time there over Orthros'."""
    at = sorted({record[key] for record in records})[index]
    seconds = {record["arm"]: record["seconds"] for record in records if record[key] == at}
    return at, seconds["transformer"] / seconds["orthros"]


def _faster(ratio: float) -> str:
    return f"{ratio:.2f}× faster" if ratio >= 1 else f"{1 / ratio:.2f}× slower"


def _likelihood(results: dict[str, Any]) -> str:
    rows = ["| | steps | tokens | training FLOPs | validation NLL | bits per byte |", "| --- " + "| ---: " * 5 + "|"]
    for arm in ARMS:
        first = results["runs"][str(results["seeds"][0])][arm]
        values = _per_seed(results, arm, "validation_nll")
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        mean = statistics.fmean(values)
        rows.append(
            f"| {plots.LABELS[arm]} | {first['steps']} | {first['tokens']:,} | {sum(first['flops_per_step']):.3e} "
            f"| {mean:.4f}{spread} | {mean / 0.6931471805599453:.4f} |"
        )
    table = "\n".join(rows)
    recheck = max(abs(a - b) for arm in ARMS for a, b in zip(
        _per_seed(results, arm, "validation_nll"), _per_seed(results, arm, "exported_nll"), strict=True))  # fmt: skip
    return f"""
## Validation loss

{table}

NLL is in nats per byte, over {results["validation_labels"]:,} bytes of text that was not trained on. Each run has its
own full learning-rate schedule. The exported models, loaded again, give the same values to {max(recheck, 1e-9):.0e}.

![Validation NLL](plots/nll.png)

## Training

![Loss curves](plots/loss.png)

Lines are the training loss (mean of {plots.SMOOTHING} steps, seed {results["seeds"][0]}), dots the validation loss.
"""


def _training(results: dict[str, Any]) -> str:
    same = results["identical"]
    rows = ["| | bytes a second | time of all steps |", "| --- | ---: | ---: |"]
    for arm in ARMS:
        speed = statistics.median(_per_seed(results, arm, "tokens_per_second"))
        seconds = statistics.fmean(_per_seed(results, arm, "training_seconds"))
        rows.append(f"| {plots.LABELS[arm]} | {speed:,.0f} | {seconds:.1f} s |")
    step = {record["arm"]: record for record in results["training"]}
    time_ratio = step["orthros"]["seconds"] / step["transformer"]["seconds"]
    flop_ratio = step["orthros"]["flops"] / step["transformer"]["flops"]
    return "\n".join(rows) + (
        "\n\nThe arms train one after another, so whatever else the machine does shows in these figures. Measured in "
        f"turn, forward and backward of one micro-batch take {step['transformer']['seconds'] * 1e3:.0f} ms in the "
        f"transformer and {step['orthros']['seconds'] * 1e3:.0f} ms in Orthros: {time_ratio:.2f}× the time for "
        f"{flop_ratio:.2f}× the FLOPs.\n\n"
        f"Checked for every seed: {same['weights']} shared weight tensors are bitwise equal at the start, and all "
        f"{same['samples']:,} samples of the equal-token runs are the same in the same order."
    )


def _cache(results: dict[str, Any]) -> str:
    check = results["cache_check"]
    rows = ["| dtype | cases | largest difference | smallest bound | |", "| --- | ---: | ---: | ---: | --- |"]
    for dtype, difference in check["max_difference"].items():
        cases = [case for case in check["cases"] if case["dtype"] == dtype]
        verdict = "pass" if all(case["passed"] for case in cases) else "FAIL"
        bound = min(case["bound"] for case in cases)
        rows.append(f"| {dtype} | {len(cases)} | {difference:.2e} | {bound:.1e} | {verdict} |")
    table = "\n".join(rows)
    lengths = sorted({length for case in check["cases"] for length in case["lengths"]})
    return f"""
## Cache check

The trained Orthros model's prefill and decoding against its full forward, after the prefill and after every step:
prompts of {", ".join(map(str, lengths))} tokens alone and as one ragged batch, several prefill chunk sizes.

{table}

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

Batch 1, {results["machine"]["timing_threads"]} thread, {results["precision"]}, arms measured in turn, medians. A ratio
above 1 means that Orthros is faster. The models were trained at {results["sequence_length"]} tokens; longer prompts
are timed, not judged. Dashed lines in the plot follow the exact FLOPs from the longest prompt backwards.

{newline.join(rows)}

One decoding step:

{newline.join(steps)}

![Times](plots/times.png)
"""


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
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    commands = "\n".join(results["commands"])
    return f"""
## How it was measured

- Machine: {machine["processor"]}, {machine["cores"]} cores, {machine["memory_gib"]:.0f} GiB; {versions}.
- Training: {results["ranks"]} ranks with one thread each, {results["precision"]}. Commit {results["commit"]}.
- Text: {results["text"]["license"]}.
- FLOPs are exact counts of the matrix products of this run's very samples (docs/method.md), training is 3 forwards.
- The base stream's prefill is linear in the prompt's length. Training is not: the output stream's attention stays
  quadratic and every token-wise layer runs twice.
- None of these figures is the paper's, and none of the paper's is reproduced here.

The commands of seed {results["seeds"][0]}:

```sh
{commands}
```
"""
