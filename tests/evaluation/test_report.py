"""Comparing evaluations: bootstrap, scores, means, and what the report says."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation import report
from evaluation.bootstrap import mean_difference, paired_difference
from evaluation.html_page import html_page, table
from evaluation.suite_report import show, write_suite_report
from evaluation.suite_scores import suite_score, task_score
from evaluation.suites.perplexity import standard_error
from orthros_train.errors import InputError

CONFIG = {
    "model_source": "m",
    "model_kind": "orthros folder",
    "architecture": "orthros",
    "base_window": 5,
    "model_num_parameters": 1,
    "model_dtype": "float32",
    "max_length": 64,
    "limit": None,
    "chat": False,
}


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


@pytest.mark.parametrize(
    ("scored", "has_mean", "said"),
    [
        (["a", "m1"], True, ["mmlu: 3 tasks, 1 scored.", "Left out: m2, m3."]),
        (["m1", "m2"], True, ["mmlu: 3 tasks, 2 scored.", "Left out, so the mean is over 1 of 2: a, m3."]),
        (["a"], True, ["Left out, so the mean is over 1 of 2: m1, m2, m3."]),
        (["a", "m1", "m2", "m3"], True, []),
        (["a", "m1"], False, ["mmlu: 3 tasks, 1 scored.", "Left out: m2, m3."]),
        (["a"], False, ["Left out: m1, m2, m3."]),
    ],
)
def test_what_was_left_out_is_said_as_it_is(scored: list[str], has_mean: bool, said: list[str], tmp_path: Path) -> None:
    content = results({name: record([1.0, 0.0]) for name in scored})
    suite = content["orthros"]["suites"]["commonsense"]
    suite |= {"has_mean": has_mean, "tasks": [["a", None], ["m1", "mmlu"], ["m2", "mmlu"], ["m3", "mmlu"]]}
    text = write_suite_report(content | {"config": CONFIG}, tmp_path)
    assert [line for line in text.splitlines() if line.startswith(("mmlu: ", "Left out"))] == said


def test_what_a_source_lacks_is_said(tmp_path: Path) -> None:
    records = {name: record([1.0, 0.0]) for name in ("a", "b", "c")}
    for name in ("a", "b"):
        records[name]["task"]["data"]["note"] = "the passages lack their titles"
    text = write_suite_report(results(records) | {"config": CONFIG}, tmp_path)
    assert text.endswith("\n\na, b: the passages lack their titles.\n")


def test_any_text_stays_in_its_cell(tmp_path: Path) -> None:
    text = table(["a|b", "n"], [["x | y\nz", "1"], ["plain", "2"]])
    assert text.splitlines() == [r"| a\|b | n |", "| --- | ---: |", r"| x \| y z | 1 |", "| plain | 2 |"]
    cells = re.findall(r"<t[hd].*?>(.*?)</t[hd]>", html_page("t", text, {}))
    assert cells == ["a|b", "n", "x | y z", "1", "plain", "2"]
    worded = record([1.0, 0.0])
    worded["task"]["prompt"] = "no|yes"
    names = ["a|b", "c"]
    page = write_suite_report(results({"t": worded}) | {"config": CONFIG}, tmp_path)
    compared, _ = report.markdown(report.compare(dict.fromkeys(names, results({"t": worded}))), names)
    assert r"| no\|yes |" in page
    assert r"| task | a\|b | c | c − a\|b |" in compared


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


def with_hashes(values: list[float], *hashes: str, **more: Any) -> dict[str, Any]:
    """A record whose documents have these hashes."""
    found = record(values) | more
    for document, name in zip(found["documents"], hashes, strict=True):
        document["doc_hash"] = name
    return found


def test_a_task_without_common_documents_is_no_part_of_the_means() -> None:
    """As of a hub's test split against a package's validation split."""
    first = results({"a": record([0.0, 0.0]), "b": with_hashes([1.0, 1.0], "x", "y"), "c": record([1.0, 1.0])})
    second = results({"a": record([1.0, 1.0]), "b": with_hashes([0.0, 0.0], "z", "w"), "c": record([1.0, 1.0])})
    for runs in ({"p": first, "q": second}, {"p": first, "r": first, "q": second}):
        comparison = report.compare(runs)
        content = comparison["commonsense"]
        assert (content["in_mean"], content["not_paired"], content["not_scored"]) == (["a", "c"], ["b"], [])
        assert (content["scores"]["p"].mean, content["scores"]["q"].mean) == (0.5, 1.0)
        assert content["differences"]["q"]["mean"]["value"] == 0.5
        text, _ = report.markdown(comparison, list(runs))
        assert "| mean of 2 | 50.00 | " in text
        assert "100.00 | " in text
        assert "no document in common, so there is no difference and no part in the mean: b." in text
    text, _ = report.markdown(report.compare({"p": first, "q": second}), ["p", "q"])
    assert "| b | 100.00 | 0.00 | – |" in text
    assert "| mean of 2 | 50.00 | 100.00 | +50.00 [+50.00, +50.00]* |" in text


def test_runs_without_any_common_document_have_no_mean() -> None:
    runs = {"p": results({"a": record([0.0])}), "q": results({"a": with_hashes([1.0], "other")})}
    text, _ = report.markdown(report.compare(runs), ["p", "q"])
    assert "| mean of" not in text
    assert "| a | 0.00 | 100.00 | – |" in text
    assert "no document in common, so there is no difference: a." in text


def test_a_group_is_compared_over_its_tasks_with_common_documents() -> None:
    groups = {"m1": "mmlu", "m2": "mmlu"}
    first = results({"m1": record([1.0, 1.0]), "m2": with_hashes([0.0, 0.0], "x", "y")}, groups)
    second = results({"m1": record([0.0, 1.0]), "m2": with_hashes([1.0, 1.0], "z", "w")}, groups)
    text, _ = report.markdown(report.compare({"p": first, "q": second}), ["p", "q"])
    assert "| mmlu | 100.00 | 50.00 | -50.00" in text
    assert "no part in the mean: m2." in text
    del first["orthros"]["records"]["m1"]
    text, _ = report.markdown(report.compare({"p": first, "q": second}), ["p", "q"])
    assert "| mmlu | 0.00 | 75.00 | – |" in text  # as each run scored it


def test_equal_documents_are_paired_one_by_one() -> None:
    left, right = with_hashes([0.0, 1.0, 0.0], "h", "h", "k"), with_hashes([1.0, 1.0, 0.0], "h", "h", "k")
    content = report.compare({"x": results({"a": left}), "y": results({"a": right})})["commonsense"]
    found = content["differences"]["y"]["tasks"]["a"]
    assert (found["documents"], found["value"]) == (3, pytest.approx(1 / 3))
    right["documents"].pop(1)
    content = report.compare({"x": results({"a": left}), "y": results({"a": right})})["commonsense"]
    assert content["differences"]["y"]["tasks"]["a"]["documents"] == 2


def test_documents_cut_by_two_tokenizers_are_paired_by_their_row() -> None:
    left, right = with_hashes([0.0, 1.0], "cut", "cut2"), with_hashes([1.0, 1.0], "other", "other2")
    for each in (left, right):
        for number, document in enumerate(each["documents"]):
            document["row_hash"] = f"row {number}"
    content = report.compare({"x": results({"a": left}), "y": results({"a": right})})["commonsense"]
    assert content["differences"]["y"]["tasks"]["a"]["documents"] == 2


def test_the_number_of_pairs_is_shown_where_more_were_scored() -> None:
    left, right = record([0.0, 0.0, 1.0]), record([1.0, 0.0, 1.0])
    right["documents"] = right["documents"][1:]
    names = ["x", "y"]
    text, _ = report.markdown(report.compare({"x": results({"a": left}), "y": results({"a": right})}), names)
    assert "| +0.00 [+0.00, +0.00] (2 paired) |" in text
    text, _ = report.markdown(report.compare({"x": results({"a": left}), "y": results({"a": left})}), names)
    assert "paired)" not in text
    pairs = [(-100.0, 50), (-90.0, 40), (-80.0, 30)]
    runs = {"x": perplexities(pairs), "y": perplexities(pairs[:2])}
    assert "(2 paired)" in report.markdown(report.compare(runs), names)[0]


def test_a_mean_with_single_documents_has_no_interval() -> None:
    """Resampling one document shows no spread: its interval would be too narrow."""
    runs = {
        "x": results({"a": record([0.0]), "b": record([0.0, 1.0])}),
        "y": results({"a": record([1.0]), "b": record([0.0, 1.0])}),
    }
    text, _ = report.markdown(report.compare(runs), ["x", "y"])
    assert "| mean of 2 | 25.00 | 75.00 | +50.00 |" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": {"split": "test"}}, "split (x: none, y: test)"),
        ({"data": {"revision": "b" * 40}}, f"revision (x: none, y: {'b' * 40})"),
        ({"data": {"source": "package p", "revision": "r"}}, "source (x: test, y: package p): a, b."),
        ({"data": {"source": "mirror", "mirrored_from": "hub"}}, "source (x: test, y: hub)"),
        ({"data": {"cut_tokens": 512}}, "cut_tokens (x: none, y: 512)"),
        ({"shots": 5}, "shots (x: 0, y: 5)"),
        ({"version": "2"}, "version (x: 1, y: 2)"),
        ({"prompt": "Q"}, "prompt (x: p, y: Q)"),
    ],
)
def test_tasks_that_are_not_alike_are_named(change: dict[str, Any], said: str) -> None:
    def changed() -> dict[str, Any]:
        found = record([1.0, 0.0])
        found["task"] |= {**change, "data": {**found["task"]["data"], **change.get("data", {})}}
        return found

    same = {"a": record([1.0, 0.0]), "b": record([1.0, 0.0])}
    runs = {"x": results(same), "y": results({name: changed() for name in same})}
    text, _ = report.markdown(report.compare(runs), ["x", "y"])
    (line,) = [line for line in text.splitlines() if "Not alike" in line]
    assert line.startswith("**Not alike** in ")
    assert said in line
    assert line.endswith(": a, b.")


@pytest.mark.parametrize("ignored", [{"source": "mirror", "mirrored_from": "test"}, {"note": "n"}, {"license": "y"}])
def test_a_mirror_is_as_good_as_its_source(ignored: dict[str, Any]) -> None:
    other = record([1.0, 0.0])
    other["task"]["data"] |= ignored
    runs = {"x": results({"a": record([1.0, 0.0])}), "y": results({"a": other})}
    assert "alike" not in report.markdown(report.compare(runs), ["x", "y"])[0]


def test_limits_and_settings_are_stated() -> None:
    plain = results({"a": record([1.0, 0.0])})
    alike = plain | {"config": {"limit": None, "chat": False, "fewshot_seed": 1}}
    limited = plain | {"config": {"limit": 2, "chat": True, "fewshot_seed": 1}}
    text, _ = report.markdown(report.compare({"x": alike, "y": limited}), ["x", "y"])
    said = "**The runs are not alike** in limit of documents (x: none, y: 2), chat template (x: False, y: True)."
    assert said in text
    assert "With a limit of documents per task (y: 2) these are checks of the machinery, not benchmarks." in text
    text, _ = report.markdown(report.compare({"x": alike, "y": alike}), ["x", "y"])
    assert "alike" not in text
    assert "checks of the machinery" not in text
    text, _ = report.markdown(report.compare({"x": limited, "y": limited}), ["x", "y"])
    assert "(x: 2, y: 2) these are checks" in text


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


def no_change(content: dict[str, Any]) -> None:
    """As it was written."""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_change, None),
        (lambda ours: ours["suites"].update(a={}), r"orthros\.suites\.a\.title: Field required"),
        (lambda ours: ours["suites"]["commonsense"].pop("tasks"), r"suites\.commonsense\.tasks: Field required"),
        (lambda ours: ours["suites"]["commonsense"].update(tasks=["a"]), r"suites\.commonsense\.tasks\.0: "),
        (lambda ours: ours["records"].update(a=[]), r"orthros\.records\.a: "),
        (lambda ours: ours["records"]["a"].pop("truncated"), r"records\.a\.truncated: Field required"),
        (lambda ours: ours["records"]["a"]["task"].pop("metric"), r"records\.a\.task\.metric: Field required"),
        (lambda ours: ours["records"]["a"]["documents"][0].pop("value"), r"a\.documents\.0\.value"),
        (lambda ours: ours["records"]["a"]["results"].clear(), r"records\.a: .*is not there"),
        (lambda ours: ours.update(left_out=[]), r"orthros\.left_out: "),
    ],
)
def test_an_evaluation_that_lacks_a_part_is_refused(
    change: Callable[[dict[str, Any]], Any], said: str | None, tmp_path: Path
) -> None:
    content = results({"a": record([1.0])})
    change(content["orthros"])
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    if said is None:
        assert report.main([str(path)]) == 0
        return
    with pytest.raises(InputError, match=rf"bad\.json is not as python -m evaluation\.run writes it: .*{said}"):
        report.main([str(path)])


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
