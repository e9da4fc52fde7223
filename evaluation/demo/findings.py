"""The demo's judgements, each made from the figures: it says which arm was better, whichever that was."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from evaluation.demo.provenance import busy


def findings(results: dict[str, Any]) -> list[str]:
    """What was measured, in sentences that follow the figures (Markdown, one line each)."""
    first = results["runs"][str(results["seeds"][0])]
    ratio = sum(first["orthros"]["flops_per_step"]) / sum(first["transformer"]["flops_per_step"])
    training = {record["arm"]: record["seconds"] for record in results["training"]}
    slower = training["orthros"] / training["transformer"]
    lines = [
        f"**Equal tokens:** Orthros is {_compare(results, 'transformer')}.",
        f"**Equal training FLOPs:** Orthros is {_compare(results, 'transformer-equal-flops')}. One Orthros step costs "
        f"{ratio:.2f}× the FLOPs of a transformer step, so that transformer ran "
        f"{first['transformer-equal-flops']['steps']} steps instead of {first['transformer']['steps']}.",
        f"**Training:** forward and backward of the same bytes take Orthros {slower:.2f}× the transformer's time.",
        f"**Prefill:** Orthros is {_at_both_ends(results['prefill'], 'length', 'at')}.",
        f"**One decoding step:** Orthros is {_at_both_ends(results['decode'], 'context', 'after')}.",
        busy(results),
        cache_finding(results["cache_check"]),
    ]
    return [line for line in lines if line]


def cache_finding(check: dict[str, Any]) -> str:
    """What a cache check found (`CacheCheckReport.to_dict`), in a sentence (Markdown)."""
    differences = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in check["max_difference"].items())
    return (
        f"**Cache:** prefill and decoding {'agree' if check['passed'] else 'DO NOT AGREE'} with the full forward; "
        f"largest difference of a logit {differences}."
    )


def cache_table(check: dict[str, Any]) -> str:
    """The same as a table (Markdown), a row for each dtype."""
    rows = ["| dtype | cases | largest difference | smallest bound | |", "| --- | ---: | ---: | ---: | --- |"]
    for dtype, difference in check["max_difference"].items():
        cases = [case for case in check["cases"] if case["dtype"] == dtype]
        verdict = "pass" if all(case["passed"] for case in cases) else "FAIL"
        bound = min(case["bound"] for case in cases)
        rows.append(f"| {dtype} | {len(cases)} | {difference:.2e} | {bound:.1e} | {verdict} |")
    return "\n".join(rows)


def per_seed(results: dict[str, Any], arm: str, key: str) -> list[Any]:
    """One figure of `arm`'s runs, seed by seed."""
    return [results["runs"][str(seed)][arm][key] for seed in results["seeds"]]


def spread(values: Sequence[float]) -> str:
    """` ± ` and the (sample) standard deviation over seeds; nothing for one seed, of which no spread is known."""
    return f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""


def no_spread(seeds: Sequence[int]) -> str:
    """What stands beside a figure of one seed, with the option that would give it a spread."""
    more = ",".join(str(seeds[0] + number) for number in range(3))
    return f"one seed: no spread known; `--seeds {more}`"


def _compare(results: dict[str, Any], arm: str) -> str:
    """Orthros' validation NLL against `arm`'s, seed by seed."""
    pairs = zip(per_seed(results, "orthros", "validation_nll"), per_seed(results, arm, "validation_nll"), strict=True)
    differences = [ours - theirs for ours, theirs in pairs]
    mean = statistics.fmean(differences)
    word = "worse" if mean > 0 else "better"
    if len(differences) > 1:
        count = sum((difference > 0) == (mean > 0) for difference in differences)
        certainty = f"mean ± standard deviation over {len(differences)} seeds; {word} in {count} of them"
    else:
        certainty = no_spread(results["seeds"])
    return f"{word} than the transformer by {abs(mean):.4f}{spread(differences)} nats per byte ({certainty})"


def _at_both_ends(records: Sequence[dict[str, Any]], key: str, word: str) -> str:
    """Orthros' speed against the transformer's at the shortest and the longest length measured."""
    lengths = sorted({record[key] for record in records})
    ends = lengths if len(lengths) == 1 else [lengths[0], lengths[-1]]
    parts = []
    for length in ends:
        seconds = {record["arm"]: record["seconds"] for record in records if record[key] == length}
        ratio = seconds["transformer"] / seconds["orthros"]
        speed = f"{ratio:.2f}× faster" if ratio >= 1 else f"{1 / ratio:.2f}× slower"
        parts.append(f"{speed} {word} {length:,}")
    return " tokens and ".join(parts) + " tokens"
