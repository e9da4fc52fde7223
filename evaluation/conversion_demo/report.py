"""The conversion demo's report: what the figures say, in Markdown and as a self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from evaluation import html_page, plots
from evaluation.conversion_demo.arms import ARMS, CONVERTED, SOURCE
from evaluation.conversion_demo.gaps import AFTER, BEFORE, EDGES, gap, mean_nll_between, ranges, share_closed
from evaluation.demo.findings import cache_finding, cache_table
from evaluation.demo.provenance import mixture, origin

FAR = ranges()[-1]  # the positions farthest beyond the window


def write_conversion_report(results: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write report.md with its plots, and report.html, into `folder`; return both paths."""
    figures: dict[str, Figure] = {
        "position": plots.nll_against_position(results["nll"], results["window"]),
        "loss": plots.training_loss(next(iter(results["runs"].values()))),
    }
    return html_page.write_report(folder, "report", "Orthros conversion demo", markdown_report(results), figures)


def findings(results: dict[str, Any]) -> list[str]:
    """What was measured, in sentences that follow the figures (Markdown, one line each)."""
    where = f"positions {FAR[0]} to {FAR[1]}"
    trained = f"{_trained_tokens(results):,} tokens"
    lines = [
        f"**The source** has {_mean(results, BEFORE, SOURCE.name):.4f} nats a token at {where}, "
        f"{_mean(results, AFTER, SOURCE.name):.4f} after {trained} of articles."
    ]
    for arm in CONVERTED:
        before, after = (gap(results, arm.name, when, *FAR) for when in (BEFORE, AFTER))
        lines.append(
            f"**{plots.LABELS[arm.name]}**, window {results['window']}: {before.mean:+.4f} ± {before.error:.4f} nats "
            f"from the source untrained, {after.mean:+.4f} ± {after.error:.4f} from the source that saw the same "
            f"batches: {_change(share_closed(before, after))}."
        )
    lines.append(cache_finding(results["cache_check"]))
    return lines


def _change(closed: float | None) -> str:
    if closed is None:
        return "too small a gap to say what part of it closed"
    return f"{closed:.0%} of the gap closed" if closed >= 0 else f"the gap grew by {-closed:.0%}"


def _trained_tokens(results: dict[str, Any]) -> int:
    recipe = results["recipe"]
    return recipe["steps"] * recipe["global_batch_size"] * recipe["sequence_length"]


def _mean(results: dict[str, Any], when: str, arm: str) -> float:
    return mean_nll_between(results["nll"][when][arm], *FAR)


def markdown_report(results: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    sections = (_head, _findings, _likelihood, _training, _cache, _samples, _method)
    return "\n\n".join(section(results).strip() for section in sections) + "\n"


def _head(results: dict[str, Any]) -> str:
    parameters, text = results["parameters"], results["text"]
    return f"""
# Orthros conversion demo: SmolLM2-135M-Instruct

A pretrained Llama ({parameters["transformer"]:,} parameters) became an Orthros with a base window of
{results["window"]} tokens ({parameters["orthros"]:,} parameters: the query affines are new, and the identity at first),
without a base sink and with one. All three arms, the source itself among them, were then trained on the same
{_trained_tokens(results):,} tokens, drawn from {text["train_documents"]} Wikipedia articles of {text["train_tokens"]:,}
tokens, and scored on {len(text["rows"])} others.

{mixture(results)}
"""


def _findings(results: dict[str, Any]) -> str:
    return "## What this run shows\n\n" + "\n".join(f"- {line}" for line in findings(results))


def _likelihood(results: dict[str, Any]) -> str:
    header = "".join(f" {start}-{stop} |" for start, stop in ranges())
    rows = [f"| | |{header}", "| --- | --- |" + " ---: |" * len(ranges())]
    for when in (BEFORE, AFTER):
        for arm in ARMS:
            nll = results["nll"][when][arm.name]
            values = "".join(f" {mean_nll_between(nll, *each):.4f} |" for each in ranges())
            rows.append(f"| {plots.LABELS[arm.name]} | {when} |{values}")
    gaps = [f"| gap to the source | |{header}", "| --- | --- |" + " ---: |" * len(ranges())]
    for arm in CONVERTED:
        for when in (BEFORE, AFTER):
            found = [gap(results, arm.name, when, *each) for each in ranges()]
            values = "".join(f" {each.mean:+.4f} ± {each.error:.4f} |" for each in found)
            gaps.append(f"| {plots.LABELS[arm.name]} | {when} |{values}")
    newline = "\n"
    return f"""
## Held-out articles

Nats a token, by how many tokens of the article go before; the first {EDGES[-1]} tokens of
{len(results["text"]["rows"])} articles, in float32. The window is {results["window"]}.

{newline.join(rows)}

The gap is paired by article; ± is its standard error over articles. After the training it is to the source **trained on
the same batches**, which learned from the text, too.

{newline.join(gaps)}

![NLL against position](plots/position.png)
"""


def _training(results: dict[str, Any]) -> str:
    recipe = results["recipe"]
    runs = next(iter(results["runs"].values()))
    rows = ["| | tokens a second | time of all steps |", "| --- | ---: | ---: |"]
    rows += [
        f"| {plots.LABELS[name]} | {run['tokens_per_second']:,.0f} | {run['training_seconds']:.0f} s |"
        for name, run in runs.items()
    ]
    newline = "\n"
    return f"""
## Training

{recipe["steps"]} steps of {recipe["global_batch_size"]} rows of {recipe["sequence_length"]} tokens, peak learning rate
{recipe["learning_rate"]:g}, {recipe["precision"]}, {results["ranks"]} ranks with one thread each.

{newline.join(rows)}

![Training loss](plots/loss.png)

{_teaching(recipe["distillation"])}
"""


def _teaching(weight: float) -> str:
    if weight == 0:
        return "All arms train on cross entropy alone."
    return (
        f"The loss of the Orthros arms is {1 - weight:g} times the cross entropy and {weight:g} times the KL "
        "divergence from the source's own predictions; that of the transformer is the cross entropy."
    )


def _cache(results: dict[str, Any]) -> str:
    return f"""
## Cache check

Prefill and decoding of the adapted model with a sink against its full forward:

{cache_table(results["cache_check"])}
"""


def _samples(results: dict[str, Any]) -> str:
    found = results["samples"]
    texts = [
        f"{plots.LABELS[sample['arm']]}, {sample['when']} training:\n\n````text\n{sample['text'].strip()}\n````"
        for sample in found["samples"]
    ]
    end = found["prompt"][-300:]
    return f"""
## Samples

What each model writes after the first {found["prompt_tokens"]} tokens of the held-out article “{found["title"]}”, which
end with “…{" ".join(end.split())}” (temperature 0.7, top-p 0.9, the same seed):

{(chr(10) * 2).join(texts)}
"""


def _method(results: dict[str, Any]) -> str:
    commands = "\n".join(run["command"] for run in next(iter(results["runs"].values())).values())
    total = sum(step["seconds"] for step in results["steps"].values())
    return f"""
## How it was measured

{origin(results)}
- All {len(results["steps"])} steps took {total / 60:.1f} minutes; an interrupted step counts from its last start.
- Text: {results["text"]["license"]}.
- None of these figures is the paper's: it converts Llama-3.1-8B, with far more tokens.

```sh
{commands}
```
"""
