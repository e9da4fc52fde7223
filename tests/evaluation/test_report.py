"""Comparing evaluations: bootstrap, scores, means, and what the report says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation import report
from evaluation.bootstrap import mean_difference, paired_difference
from evaluation.suite_report import show
from evaluation.suite_scores import suite_score, task_score
from evaluation.suites.perplexity import standard_error
from orthros_train.errors import InputError


def record(values: list[float], metric: str = "acc,none", higher: bool = True, truncated: int = 0) -> dict[str, Any]:
    mean = sum(values) / len(values)
    return {
        "task": {
            "metric": metric,
            "shots": 0,
            "version": "1",
            "data": {"name": "d", "source": "test", "license": "x"},
            "prompt": "p",
        },
        "results": {metric: mean, metric.replace(",", "_stderr,"): 0.1},
        "documents": [{"doc_id": i, "doc_hash": f"h{i}", "value": v} for i, v in enumerate(values)],
        "truncated": truncated,
        "higher_is_better": higher,
    }


def results(suite: dict[str, dict[str, Any]], groups: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "orthros": {
            "suites": {
                "commonsense": {
                    "title": "Commonsense",
                    "tasks": [[name, (groups or {}).get(name)] for name in suite],
                    "has_mean": True,
                    "note": "",
                    "paper": "commonsense",
                }
            },
            "records": suite,
        }
    }


def test_a_difference_without_noise_is_certain() -> None:
    found = paired_difference([0.0, 1.0, 0.0, 1.0], [1.0, 2.0, 1.0, 2.0])
    assert (found.value, found.low, found.high, found.probability) == (1.0, 1.0, 1.0, 1.0)
    assert found.is_clear


def test_equal_runs_differ_by_nothing() -> None:
    found = paired_difference([0.0, 1.0, 1.0], [0.0, 1.0, 1.0])
    assert (found.value, found.low, found.high, found.probability) == (0.0, 0.0, 0.0, 0.5)
    assert not found.is_clear


def test_the_interval_is_that_of_the_mean_of_paired_differences() -> None:
    rng = np.random.default_rng(0)
    first = rng.normal(size=400)
    second = first + rng.normal(0.1, 0.5, size=400)  # pairing takes out the spread of the documents
    found = paired_difference(first.tolist(), second.tolist())
    error = float(np.std(second - first) / 20)
    assert found.value == pytest.approx(float((second - first).mean()))
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_tasks_weigh_the_same_in_a_suites_difference() -> None:
    found = mean_difference([([0.0] * 10, [1.0] * 10), ([0.0] * 1000, [0.0] * 1000)])
    assert found.value == 0.5


def test_the_mean_and_its_error() -> None:
    records = {"a": record([0.0, 1.0]), "b": record([1.0, 1.0])}
    score = suite_score([("a", None), ("b", None), ("c", None)], records, has_mean=True)
    assert score.mean == 0.75
    assert score.stderr == pytest.approx((2 * 0.1**2) ** 0.5 / 2)
    assert (score.expected, score.missing) == (3, ("c",))


def test_tasks_of_a_group_count_as_one_weighted_by_documents() -> None:
    records = {"m1": record([1.0]), "m2": record([0.0, 0.0, 0.0]), "a": record([1.0])}
    score = suite_score([("a", None), ("m1", "mmlu"), ("m2", "mmlu")], records, has_mean=True)
    assert [(task.task, task.value, task.documents) for task in score.tasks] == [("a", 1.0, 1), ("mmlu", 0.25, 4)]
    assert score.mean == 0.625
    pooled_variance = (1 * 0 * 0.1**2 + 3 * 2 * 0.1**2) / (4 - 2)  # of single documents, within the tasks
    assert score.tasks[1].stderr == pytest.approx((pooled_variance / 4) ** 0.5)


def test_a_group_of_single_documents_has_no_error() -> None:
    score = suite_score([("m1", "m"), ("m2", "m")], {"m1": record([1.0]), "m2": record([0.0])}, has_mean=True)
    assert (score.tasks[0].value, score.tasks[0].stderr) == (0.5, None)


def test_perplexities_are_no_shares() -> None:
    assert not task_score("w", record([3.0], "byte_perplexity,none", higher=False)).is_share
    assert task_score("w", record([0.3])).is_share


def perplexity_record(pairs: list[tuple[float, int]]) -> dict[str, Any]:
    worded = record([1.0], "byte_perplexity,none", higher=False)
    total = sum(value for value, _ in pairs) / sum(count for _, count in pairs)
    worded["results"] = {"byte_perplexity,none": math.exp(-total), "byte_perplexity_stderr,none": "N/A"}
    worded["documents"] = [{"doc_id": i, "doc_hash": f"h{i}", "value": list(pair)} for i, pair in enumerate(pairs)]
    return worded


def perplexities(pairs: list[tuple[float, int]]) -> dict[str, Any]:
    content = results({"wikitext": perplexity_record(pairs)})
    content["orthros"]["suites"]["commonsense"] |= {"has_mean": False, "paper": None}
    return content


def random_documents(documents: int = 60) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(500, 5000, size=documents)
    nats = rng.normal(1.0, 0.2, size=documents)
    first = [(float(-n * s), int(s)) for n, s in zip(nats, sizes, strict=True)]
    second = [
        (float(-(n + d) * s), int(s)) for n, d, s in zip(nats, rng.normal(0.01, 0.02, documents), sizes, strict=True)
    ]
    return first, second


def test_the_error_of_a_perplexity_is_that_of_a_ratio_of_sums() -> None:
    """Against the delta method for Σx / Σn over independent documents, which many documents approach."""
    items, _ = random_documents(400)
    values, sizes = np.array(items).T
    ratio = values.sum() / sizes.sum()
    error = float(np.sqrt(((values - ratio * sizes) ** 2).sum()) / sizes.sum())
    assert standard_error("token_perplexity", items) == pytest.approx(math.exp(-ratio) * error, rel=0.05)
    assert standard_error("bits_per_byte", items) == pytest.approx(error / math.log(2), rel=0.05)
    assert standard_error("bits_per_byte", items[:1]) is None
    assert standard_error("word_perplexity", [(-5000.0, 1), (-6000.0, 1)]) is None  # the perplexity is infinite


def test_perplexities_differ_in_nats_with_a_paired_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = random_documents()
    runs = {"x": perplexities(first), "y": perplexities(second)}
    found = report.compare(runs)["commonsense"]["differences"]["y"]["tasks"]["wikitext"]
    (a, sizes), (b, _) = np.array(first).T, np.array(second).T
    delta = (a.sum() - b.sum()) / sizes.sum()
    error = float(np.sqrt(((a - b - delta * sizes) ** 2).sum()) / sizes.sum())
    assert found["value"] == pytest.approx(delta)
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * error, rel=0.15)  # far below that of either run
    assert (found["documents"], found["unit"]) == (60, "nats per byte")
    for name, content in runs.items():
        save(tmp_path / name, content)
    assert report.main([str(tmp_path / "x"), str(tmp_path / "y"), "--output", str(tmp_path / "out")]) == 0
    expected = f"{found['value']:+.4f} [{found['low']:+.4f}, {found['high']:+.4f}] nats per byte"
    assert expected in capsys.readouterr().out
    assert (
        "mean" not in json.loads((tmp_path / "out" / "comparison.json").read_text())["commonsense"]["differences"]["y"]
    )


def test_one_document_has_a_difference_without_interval() -> None:
    comparison = report.compare({"x": perplexities([(-100.0, 50)]), "y": perplexities([(-110.0, 50)])})
    text, _ = report.markdown(comparison, ["x", "y"])
    assert "| +0.2000 nats per byte |" in text


def test_the_papers_figures_stand_in_each_arms_column() -> None:
    arms = {"x": "transformer", "y": "orthros", "z": "orthros"}
    runs = {
        name: results({"a": record([1.0]), "b": record([0.0])}) | {"config": {"architecture": arm}}
        for name, arm in arms.items()
    }
    text, _ = report.markdown(report.compare(runs), list(runs))
    assert "| paper | 53.41 | 53.98 | 53.98 | +0.57 | +0.57 |" in text
    assert "The row paper is the paper's (arXiv 2610.13735, Table 1: 1.3B, mean of the commonsense tasks)" in text
    del runs["y"]["config"]
    text, _ = report.markdown(report.compare({"y": runs["y"], "z": runs["z"]}), ["y", "z"])
    assert "| paper | – | 53.98 | – |" in text
    text, _ = report.markdown(report.compare({"z": runs["z"], "again": runs["z"]}), ["z", "again"])
    assert "| paper | 53.98 | 53.98 | – |" in text


def test_numbers_that_json_lacks_are_read_and_shown() -> None:
    worded = record([3.0], "word_perplexity,none", higher=False)
    worded["results"]["word_perplexity,none"] = "Infinity"
    score = task_score("w", worded)
    assert score.value == float("inf")
    assert show(score) == "∞"


def save(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(content))
    return folder


def test_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(tmp_path / "first", results({"a": record([0.0] * 40), "b": record([1.0, 0.0] * 20)}))
    second = save(tmp_path / "second", results({"a": record([1.0] * 40), "b": record([1.0, 0.0] * 20)}))
    output = tmp_path / "out"
    assert report.main([str(first), str(second), "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "| a | 0.00 | 100.00 | +100.00 [+100.00, +100.00]* |" in text
    assert "| b | 50.00 | 50.00 | +0.00 [+0.00, +0.00] |" in text
    assert "| mean of 2 | 25.00 | 75.00 | +50.00 [+50.00, +50.00]* |" in text
    assert "| paper | – | – | – |" in text
    content = json.loads((output / "comparison.json").read_text())
    assert content["commonsense"]["differences"]["second"]["tasks"]["a"]["documents"] == 40
    assert (output / "comparison.html").read_text().count("<svg") == 2


def test_means_are_over_the_tasks_of_all_runs() -> None:
    full = results({"a": record([1.0, 0.0]), "b": record([1.0, 1.0]), "c": record([0.0, 0.0])})
    lacking = results({"a": record([1.0, 1.0]), "b": record([1.0, 0.0])})
    lacking["orthros"]["suites"]["commonsense"]["tasks"].append(["c", None])  # left out: the source has no such data
    for runs in ({"x": full, "y": lacking}, {"y": lacking, "x": full}, {"x": full, "z": full, "y": lacking}):
        comparison = report.compare(runs)
        assert [score.mean for score in comparison["commonsense"]["scores"].values()] == [0.75] * len(runs)
        for found in comparison["commonsense"]["differences"].values():
            assert found["mean"]["value"] == 0.0
        text, _ = report.markdown(comparison, list(runs))
        assert "| mean of 2 |" in text
        assert "The mean is over the tasks that all runs scored; others: c." in text
    text, _ = report.markdown(report.compare({"x": full, "z": full}), ["x", "z"])
    assert "| mean of 3 |" in text
    assert "The mean is over" not in text


def test_groups_are_compared_over_the_tasks_of_all_runs() -> None:
    groups = {"m1": "mmlu", "m2": "mmlu"}
    full = results({"m1": record([1.0]), "m2": record([0.0]), "a": record([1.0])}, groups)
    lacking = results({"m1": record([1.0]), "a": record([1.0])}, groups)
    lacking["orthros"]["suites"]["commonsense"]["tasks"].append(["m2", "mmlu"])
    comparison = report.compare({"x": full, "y": lacking})
    scores = {
        name: {t.task: t.value for t in score.tasks} for name, score in comparison["commonsense"]["scores"].items()
    }
    assert scores == {"x": {"mmlu": 1.0, "a": 1.0}, "y": {"mmlu": 1.0, "a": 1.0}}
    assert [score.mean for score in comparison["commonsense"]["scores"].values()] == [1.0, 1.0]
    text, _ = report.markdown(comparison, ["x", "y"])
    assert "The mean is over the tasks that all runs scored; others: m2." in text


def test_only_documents_of_both_are_compared() -> None:
    left, right = record([0.0, 0.0, 1.0]), record([1.0, 0.0, 1.0])
    right["documents"] = right["documents"][1:]
    content = report.compare({"x": results({"a": left}), "y": results({"a": right})})
    found = content["commonsense"]["differences"]["y"]["tasks"]["a"]
    assert (found["value"], found["documents"]) == (0.0, 2)


@pytest.mark.parametrize(
    "content",
    [5, None, [], "orthros", {}, {"orthros": None}, {"orthros": {}}, {"orthros": []}, {"orthros": {"suites": {}}}],
)
def test_json_that_is_no_evaluation_is_refused(content: Any, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"was not written by python -m evaluation\.run"):
        report.main([str(tmp_path)])


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name the output folder of an evaluation"):
        report.main([str(tmp_path / "absent")])
    good = save(tmp_path / "good", results({"a": record([1.0])}))
    with pytest.raises(InputError, match="not distinct"):
        report.main([str(good), str(good)])
    with pytest.raises(InputError, match="2 runs but 1 --names"):
        report.main([str(good), str(good), "--names", "x"])
    other = save(tmp_path / "other", {"orthros": {"suites": {}, "records": {}}})
    with pytest.raises(InputError, match="no suite in common"):
        report.main([str(good), str(other)])
    foreign = save(tmp_path / "foreign", {"results": {}})
    with pytest.raises(InputError, match="was not written by"):
        report.main([str(foreign)])
    (foreign / "results.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        report.main([str(foreign)])
