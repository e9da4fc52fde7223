"""The conversion demo's figures: gaps are paired with the source at the same time, and the words follow them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evaluation.conversion_demo.arms import ARMS
from evaluation.conversion_demo.gaps import Gap, gap, mean_nll_between, share_closed
from evaluation.conversion_demo.report import findings, markdown_report, write_conversion_report
from tests.evaluation.results import measured

# Nats a token of two articles, below and from position 512 on.
LEVELS: dict[str, dict[str, tuple[tuple[float, float], tuple[float, float]]]] = {
    "before": {
        "transformer": ((3.0, 3.0), (2.0, 2.0)),
        "orthros-0-sinks": ((3.0, 3.5), (2.0, 2.3)),
        "orthros-1-sink": ((3.0, 3.02), (2.0, 2.04)),
    },
    "after": {
        "transformer": ((2.9, 2.9), (1.9, 1.9)),
        "orthros-0-sinks": ((2.9, 3.0), (1.9, 2.0)),
        "orthros-1-sink": ((2.9, 2.9), (1.9, 1.88)),
    },
}


def conversion_results() -> dict[str, Any]:
    """Results in which the arm without a sink wins back three quarters of its gap."""
    nll = {
        when: {arm: [[low] * 512 + [high] * 512 for low, high in rows] for arm, rows in arms.items()}
        for when, arms in LEVELS.items()
    }
    run = {
        "loss": [3.0, 2.9],
        "tokens_seen": [64, 128],
        "tokens_per_second": 10.0,
        "training_seconds": 12.8,
        "commits": ["abc123"],
        "command": "python -m orthros_train configs/demo_convert.yaml",
    }
    case = {"dtype": "float64", "max_difference": 1e-13, "bound": 1e-8, "passed": True}
    return {
        "text": {"train_documents": 7, "train_tokens": 4321, "rows": {"a": [1], "b": [2]}, "license": "free"},
        "window": 128,
        "parameters": {"transformer": 100, "orthros": 110},
        "nll": nll,
        "runs": {"42": {arm.name: run for arm in ARMS}},
        "cache_check": {"passed": True, "max_difference": {"float64": 1e-13}, "cases": [case]},
        "samples": {
            "title": "a",
            "prompt": "It was <b>a</b> stone",
            "prompt_tokens": 400,
            "samples": [{"arm": "transformer", "when": "before", "text": "which <i>rolled</i>"}],
        },
        "steps": {"text": measured("Articles", 3.0), "train-transformer-42": measured("Training", 57.0)},
        "ranks": 2,
        "recipe": {
            "steps": 2,
            "global_batch_size": 2,
            "sequence_length": 32,
            "learning_rate": 1e-4,
            "precision": "bf16",
            "distillation": 0.25,
        },
    }


def test_a_gap_is_paired_article_by_article() -> None:
    found = gap(conversion_results(), "orthros-0-sinks", "before", 512, 1024)
    assert found.mean == pytest.approx(0.4)
    assert found.error == pytest.approx(0.1)  # of 0.5 and 0.3
    assert gap(conversion_results(), "orthros-0-sinks", "before", 0, 512).mean == pytest.approx(0)
    assert gap(conversion_results(), "orthros-0-sinks", "after", 512, 1024).mean == pytest.approx(0.1)


def test_the_mean_is_over_a_range_of_positions() -> None:
    assert mean_nll_between([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], 1, 3) == 4.0


def test_the_share_closed_is_negative_where_the_gap_grew() -> None:
    assert share_closed(Gap(0.4, 0), Gap(0.1, 0)) == pytest.approx(0.75)
    assert share_closed(Gap(0.4, 0), Gap(0.5, 0)) == pytest.approx(-0.25)
    assert share_closed(Gap(0.0, 0), Gap(0.5, 0)) is None
    assert share_closed(Gap(-0.1, 0), Gap(0.5, 0)) is None
    assert share_closed(Gap(0.01, 0.006), Gap(-0.1, 0.006)) is None


def test_the_words_follow_the_figures() -> None:
    results = conversion_results()
    source, without, one, cache = findings(results)
    assert "2.5000 nats a token at positions 512 to 1024, 2.4000 after 128 tokens" in source
    assert "no sink" in without
    assert "+0.4000 ± 0.1000 nats from the source untrained, +0.1000 ± 0.0000" in without
    assert without.endswith("75% of the gap closed.")
    assert one.endswith("133% of the gap closed.")
    assert "agree with the full forward" in cache
    results["nll"]["after"]["orthros-0-sinks"] = results["nll"]["before"]["orthros-0-sinks"]
    assert "the gap grew by 25%" in findings(results)[1]
    results["nll"]["before"]["orthros-1-sink"] = results["nll"]["before"]["transformer"]
    assert "too small a gap to say" in findings(results)[2]
    results["cache_check"]["passed"] = False
    assert "DO NOT AGREE" in findings(results)[3]


def test_the_report_holds_the_measurements(tmp_path: Path) -> None:
    results = conversion_results()
    text = markdown_report(results)
    assert "| Orthros, no sink | before | 2.5000 | 2.5000 | 2.5000 | 2.9000 |" in text
    assert "| Orthros, no sink | after | +0.0000 ± 0.0000 | +0.0000 ± 0.0000 | +0.0000 ± 0.0000 | +0.1000 ± 0.0" in text
    assert "All 2 steps took 1.0 minutes" in text
    assert "2 steps of 2 rows of 32 tokens, peak learning rate\n0.0001, bf16, 2 ranks" in text
    assert "None of these figures is the paper's" in text
    assert "0.75 times the cross entropy and 0.25 times the KL divergence" in text
    results["recipe"]["distillation"] = 0.0
    assert "cross entropy alone" in markdown_report(results)
    write_conversion_report(results, tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "which &lt;i&gt;rolled" in page
    assert "&lt;b&gt;a&lt;/b&gt; stone" in page
    assert (tmp_path / "plots" / "position.png").is_file()
