"""`python -m evaluation.run` from end to end on a small model and a mirror, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.result_schema import EvalResults, SampleResult, _EvalConfig, _TaskMetrics

from evaluation import associative_recall, report, run
from evaluation.lm_eval_model import OrthrosLM
from evaluation.model_folder import load_folder_tokenizer
from evaluation.model_source import load_evaluated_model
from evaluation.ranks import of_all_ranks
from evaluation.suites import data_sets
from evaluation.suites.catalog import SUITE_NAMES, SuiteOptions, find_suites, find_tasks
from evaluation.suites.data_sources import MirrorSource
from evaluation.suites.harness_tasks import MMLU, MMLU_SUBJECTS
from evaluation.suites.task_card import TaskSetting
from evaluation.task_runs import require_data
from orthros_train.errors import InputError
from orthros_train.training.run_folder import git_commit
from tests.distributed import run_distributed
from tests.evaluation.test_data_sources import PIQA_ROWS, Rows
from tests.evaluation.tiny_models import save_llama, save_merging_tokenizer, save_orthros, tiny_orthros
from tools.mirror_datasets import mirror

PAGE = {"page": " = Title = \n\n The cat , it sat . \n"}
LONG_TEXT = "A film about cats. " * 30
FDA_ROWS = [{"text": f"{LONG_TEXT}Maker: Acme. {LONG_TEXT}", "key": "maker", "value": "Acme"} for _ in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_orthros(tmp_path_factory.mktemp("model") / "orthros")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_orthros(tmp_path_factory.mktemp("long") / "orthros", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror")
    mirror(data_sets.PIQA, Rows(PIQA_ROWS), folder)
    mirror(data_sets.WIKITEXT_PAGES, Rows([PAGE, {"page": " = Dogs = \n\n They bark . \n"}]), folder)
    mirror(data_sets.FDA, Rows(FDA_ROWS), folder)
    return folder


def evaluate(model: Path, data: Path, output: Path, *arguments: str) -> dict[str, Any]:
    command = ["--model", str(model), "--data-dir", str(data), "--output", str(output), *arguments]
    assert run.main(command) == 0
    results: dict[str, Any] = json.loads((output / "results.json").read_text())
    return results


def test_results_reports_and_records(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    results = evaluate(model, data, output, "--suite", "commonsense", "--skip-unavailable", "--samples")
    assert set(results) >= {"results", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "config"}
    assert results["results"]["piqa"]["acc,none"] in {k / 6 for k in range(7)}
    assert results["n-samples"]["piqa"] == {"original": 6, "effective": 6}
    record = results["orthros"]["records"]["piqa"]
    assert record["task"] == {
        "data": {
            "name": "piqa",
            "hub": "baber/piqa",
            "config": None,
            "license": "not stated on the hub",
            "source": "mirror",
            "revision": "abc",
            "mirrored_from": "test",
            "split": "validation",
        },
        "prompt": "Question: GOAL / Answer: SOLUTION",
        "metric": "acc,none",
        "shots": 0,
        "version": "1.0",
    }
    assert [document["doc_id"] for document in record["documents"]] == list(range(6))
    assert set(results["orthros"]["left_out"]) == {
        "lambada_openai", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq"
    }  # fmt: skip
    report = (output / "report.md").read_text()
    assert "| piqa | acc |" in report
    assert "| paper, transformer |  | 53.41 |" in report
    assert "| paper, Orthros |  | 53.98 |" in report
    assert "The rows marked paper are the paper's (arXiv 2610.13735, Table 1: 1.3B, mean of the commonsense" in report
    assert "task list assumed" in report
    assert "the mean is over 1 of 8" in report
    assert "<svg" in (output / "report.html").read_text()
    assert (output / "plots" / "commonsense.png").is_file()
    samples = [json.loads(line) for line in (output / "samples" / "piqa.jsonl").read_text().splitlines()]
    assert samples[0]["arguments"][0][0] == "Question: goal 0\nAnswer:"
    for sample, document in zip(samples, record["documents"], strict=True):
        assert set(sample) == {*SampleResult.__annotations__, *sample["metrics"]}
        assert sample["metrics"] == ["acc", "acc_norm"]
        assert (sample["doc_id"], sample["acc"]) == (document["doc_id"], document["value"])
    assert "written:" in capsys.readouterr().out


def test_a_stopped_evaluation_goes_on_and_other_settings_start_anew(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evaluation.task_runs import TaskRunner  # noqa: PLC0415

    evaluated: list[str] = []
    original = TaskRunner._evaluate

    def counted(self: TaskRunner, card: Any) -> Any:
        evaluated.append(card.name)
        return original(self, card)

    monkeypatch.setattr(TaskRunner, "_evaluate", counted)
    first = evaluate(model, data, tmp_path, "--tasks", "piqa")
    again = evaluate(model, data, tmp_path, "--tasks", "piqa,wikitext")
    assert evaluated == ["piqa", "wikitext"]
    assert again["results"]["piqa"] == first["results"]["piqa"]
    evaluate(model, data, tmp_path, "--tasks", "piqa", "--limit", "2")
    assert evaluated[2:] == ["piqa"]
    evaluate(save_orthros(tmp_path / "other", base_sinks=1), data, tmp_path, "--tasks", "piqa", "--limit", "2")
    assert evaluated[3:] == ["piqa"]


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", lambda config: config["rope_parameters"].update(rope_theta=500.0)),
        ("config.json", lambda config: config.update(rms_norm_eps=1e-2)),
        ("tokenizer.json", lambda content: content["model"]["merges"].pop()),
        ("tokenizer.json", lambda content: content.update(normalizer={"type": "Lowercase"})),
        ("tokenizer_config.json", lambda content: content.update(bos_token="</s>")),
        ("chat_template.jinja", None),
        ("lm_eval", None),
        ("transformers", None),
    ],
)
def test_a_record_of_the_same_weights_under_another_definition_is_made_anew(
    file: str,
    change: Callable[[dict[str, Any]], None] | None,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from evaluation import task_runs  # noqa: PLC0415

    evaluated: list[str] = []
    original = task_runs.TaskRunner._evaluate

    def counted(self: task_runs.TaskRunner, card: Any) -> Any:
        evaluated.append(card.name)
        return original(self, card)

    monkeypatch.setattr(task_runs.TaskRunner, "_evaluate", counted)
    model = save_merging_tokenizer(save_orthros(tmp_path / "model"), adds_bos=False)
    for _ in range(2):
        evaluate(model, data, tmp_path / "out", "--tasks", "piqa", "--limit", "1")
    assert evaluated == ["piqa"]
    if change is not None:
        edit(model / file, change)
    elif file.endswith("jinja"):
        (model / file).write_text("{{ messages }}")
    else:
        known = task_runs.version
        monkeypatch.setattr(task_runs, "version", lambda name: "0.0" if name == file else known(name))
    evaluate(model, data, tmp_path / "out", "--tasks", "piqa", "--limit", "1")
    assert evaluated == ["piqa"] * 2


def test_what_a_tokenizer_was_last_asked_for_is_no_part_of_it(model: Path) -> None:
    from evaluation.fingerprints import tokenizer_fingerprint  # noqa: PLC0415

    tokenizer = load_folder_tokenizer(model)
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "text"], padding=True, truncation=True, max_length=3)
    assert tokenizer_fingerprint(tokenizer) == before


def test_an_edited_text_of_equal_length_is_scored_anew(model: Path, data: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    found = []
    for content in ("the cat sat", "a dog stood", "the cat sat"):
        text.write_bytes(content.encode())
        results = evaluate(model, data, tmp_path / "out", "--suite", "perplexity", "--text", str(text))
        assert (
            results["orthros"]["records"]["text_text"]["task"]["data"]["sha256"]
            == sha256(text.read_bytes()).hexdigest()
        )
        found.append(results["results"]["text_text"]["byte_perplexity,none"])
    assert found[0] != found[1]
    assert found[0] == found[2]


def test_what_is_damaged_is_found_before_the_first_task(model: Path, data: Path, tmp_path: Path) -> None:
    """It is no reason to leave a task out; a file that is not there is."""
    place = Path(shutil.copytree(data, tmp_path / "data"))
    command = ("--tasks", "piqa,recall_fda_512", "--limit", "1")
    (place / "fda" / "validation.parquet").unlink()
    for skip in ((), ("--skip-unavailable",)):
        if skip:
            results = evaluate(model, place, tmp_path / "out", *command, *skip)
            assert "validation.parquet is missing" in results["orthros"]["left_out"]["recall_fda_512"]
            shutil.rmtree(tmp_path / "out")
            (place / "fda" / "validation.parquet").write_bytes(b"other")
        with pytest.raises(InputError, match=r"task recall_fda_512: .*validation\.parquet (is missing|differs)"):
            evaluate(model, place, tmp_path / "out", *command, *skip)
        assert not list((tmp_path / "out").iterdir())


def test_all_ranks_leave_out_what_one_has_no_data_for(data: Path, tmp_path: Path) -> None:
    """Otherwise they would ask different tasks and wait for each other."""
    place = Path(shutil.copytree(data, tmp_path / "data"))
    setting = TaskSetting(MirrorSource(place), tokenizer=None)  # type: ignore[arg-type]

    def work() -> tuple[list[str], dict[str, str]]:
        if torch.distributed.get_rank() == 1:
            shutil.rmtree(place / "piqa")
        torch.distributed.barrier()
        source = setting if torch.distributed.get_rank() == 1 else replace(setting, source=MirrorSource(data))
        present, missing = require_data(find_tasks(["piqa", "wikitext"], SuiteOptions()), source, True, of_all_ranks)
        return [card.name for card in present], missing

    first, second = run_distributed(work, 2)
    assert first == second
    assert first[0] == ["wikitext"]
    assert "holds no data set piqa" in first[1]["piqa"]


def test_a_task_named_twice_is_scored_once(model: Path, data: Path, tmp_path: Path) -> None:
    once = evaluate(model, data, tmp_path / "once", "--tasks", "piqa")
    evaluate(model, data, tmp_path / "twice", "--tasks", "piqa,wikitext,piqa")
    tables = [(tmp_path / name / "report.md").read_text() for name in ("once", "twice")]
    (row,) = [line for line in tables[0].splitlines() if line.startswith("| piqa | acc |")]
    assert tables[1].count(row) == 1
    assert once["orthros"]["suites"]["tasks"]["tasks"] == [["piqa", None]]


def test_samples_are_those_of_the_scores_beside_them(model: Path, data: Path, tmp_path: Path) -> None:
    samples = tmp_path / "samples" / "piqa.jsonl"

    def prompts(*arguments: str) -> int | None:
        evaluate(model, data, tmp_path, "--tasks", "piqa", *arguments)
        return len(samples.read_text().splitlines()) if samples.is_file() else None

    assert prompts() is None
    assert prompts("--samples") == 6  # not only where the scores are new
    before = samples.stat().st_mtime_ns
    assert prompts() == 6
    assert prompts("--samples") == 6
    assert samples.stat().st_mtime_ns == before
    assert prompts("--limit", "2") is None  # those of six documents do not belong to these scores
    assert prompts("--limit", "2", "--samples") == 2
    samples.unlink()
    assert prompts("--limit", "2", "--samples") == 2


def test_contexts_that_exceed_the_model_are_counted_and_stated(model: Path, data: Path, tmp_path: Path) -> None:
    results = evaluate(model, data, tmp_path, "--tasks", "recall_fda_2048,piqa", "--max-length", "200")
    assert results["orthros"]["records"]["recall_fda_2048"]["truncated"] == 3
    assert results["orthros"]["records"]["piqa"]["truncated"] == 0
    report = (tmp_path / "report.md").read_text()
    assert "lost the beginning of theirs: recall_fda_2048 3." in report


def test_perplexity_by_word_byte_and_token(model: Path, data: Path, tmp_path: Path) -> None:
    text = tmp_path / "some text.txt"
    text.write_text("the cat sat on the mat", encoding="utf-8")
    results = evaluate(model, data, tmp_path / "out", "--suite", "perplexity", "--text", str(text))
    found = results["results"]["text_some_text"]
    assert found["byte_perplexity,none"] == pytest.approx(found["token_perplexity,none"])  # a byte is a token here
    assert found["word_perplexity,none"] == pytest.approx(found["byte_perplexity,none"] ** (22 / 6))
    assert 2 ** found["bits_per_byte,none"] == pytest.approx(found["byte_perplexity,none"])
    wikitext = evaluate(model, data, tmp_path / "wiki", "--tasks", "wikitext")["results"]["wikitext"]
    assert wikitext["byte_perplexity,none"] > 1
    assert found["byte_perplexity_stderr,none"] == "N/A"  # of one document
    assert wikitext["word_perplexity_stderr,none"] > 0


def test_a_text_without_spaces_is_one_word_of_infinite_perplexity(model: Path, data: Path, tmp_path: Path) -> None:
    text = tmp_path / "genome.txt"
    text.write_text("GATTACA" * 120, encoding="utf-8")
    results = evaluate(model, data, tmp_path / "out", "--suite", "perplexity", "--text", str(text))
    found = results["results"]["text_genome"]
    assert found["word_perplexity,none"] == "Infinity"  # a string: JSON has no such number, and float() reads it
    assert 1 < found["byte_perplexity,none"] < 1e6

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for file in tmp_path.glob("out/**/*.json"):
        json.loads(file.read_text(), parse_constant=refuse)
    assert "text_genome" in (tmp_path / "out" / "report.md").read_text()


def test_results_have_the_layout_of_lm_evals(data: Path, tmp_path: Path) -> None:
    from lm_eval.utils import make_table  # noqa: PLC0415

    started, llama = time.time(), save_llama(tmp_path / "llama")
    results = evaluate(llama, data, tmp_path / "o", "--tasks", "piqa,wikitext", "--base-window", "8", "--limit", "1")
    lines = make_table(results).splitlines()
    assert {line.split("|")[1].strip() for line in lines} >= {"piqa", "wikitext"}
    assert results["group_subtasks"] == {}
    assert results["n-samples"] == {
        "piqa": {"original": 6, "effective": 1}, "wikitext": {"original": 2, "effective": 1}
    }  # fmt: skip
    assert started <= results["date"] <= time.time()
    assert results["git_hash"] == git_commit()
    assert set(results) == {*EvalResults.__annotations__, "orthros"} - {"groups", "samples"}
    extra = {
        "architecture", "base_window", "base_sinks", "max_length", "model_source", "model_kind", "chat"
    }  # fmt: skip
    assert set(results["config"]) == {*_EvalConfig.__annotations__, *extra}
    for found in results["results"].values():
        assert set(found) >= _TaskMetrics.__required_keys__
    assert results["config"]["bootstrap_iters"] == 1000
    assert results["config"]["fewshot_seed"] == 1234
    assert (results["model_source"], results["model_name"]) == ("orthros", str(llama))
    assert results["tokenizer_eos_token"] == ["<eos>", "257"]
    assert (results["eot_token_id"], results["max_length"]) == (257, 256)
    assert (results["chat_template"], results["fewshot_as_multiturn"]) == (None, False)
    assert 0 < float(results["total_evaluation_time_seconds"]) < time.time() - started
    assert set(results["task_hashes"]) == {"piqa", "wikitext"}
    assert results["config"]["model_args"] == {
        "pretrained": str(llama), "dtype": "float32", "max_length": 256, "base_window": 8, "base_sinks": 1
    }  # fmt: skip


def test_subjects_are_a_group_as_in_lm_eval(long_model: Path, tmp_path: Path) -> None:
    from lm_eval.api.metrics import pooled_sample_stderr  # noqa: PLC0415
    from lm_eval.utils import make_table  # noqa: PLC0415

    row = {"question": "Why?", "choices": ["a", "b", "c", "d"], "answer": 2}
    for number, subject in enumerate(MMLU_SUBJECTS[:3]):
        rows = [{**row, "question": f"Why {i}?", "answer": i % 4} for i in range(6 + 2 * number)]
        mirror(data_sets.mmlu(subject), Rows(rows), tmp_path / "mirror")
    arguments = ("--suite", "conversion", "--skip-unavailable")
    results = evaluate(long_model, tmp_path / "mirror", tmp_path / "out", *arguments)
    members = [f"mmlu_{subject}" for subject in MMLU_SUBJECTS[:3]]
    assert results["group_subtasks"] == {"mmlu": members}
    tasks = [results["results"][name] for name in members]
    group = results["groups"]["mmlu"]
    assert group == results["results"]["mmlu"]
    assert group["acc,none"] == pytest.approx(
        sum(6 * t["acc,none"] + 2 * i * t["acc,none"] for i, t in enumerate(tasks)) / 24
    )
    assert group["acc_stderr,none"] == pytest.approx(
        pooled_sample_stderr([task["acc_stderr,none"] for task in tasks], [6, 8, 10])
    )
    assert (group["sample_len"], group["sample_count"]) == (24, {"acc,none": 24})
    assert (results["n-shot"]["mmlu"], results["higher_is_better"]["mmlu"]) == (5, {"acc": True})
    assert "|mmlu " in make_table(results)
    assert "|mmlu " in make_table(results, "groups")
    report_text = (tmp_path / "out" / "report.md").read_text()
    assert "| mmlu | acc |" in report_text
    assert "mmlu: 57 tasks, 3 scored." in report_text


def test_subjects_that_a_user_names_stay_single(long_model: Path, tmp_path: Path) -> None:
    row = {"question": "Why?", "choices": ["a", "b", "c", "d"], "answer": 2}
    for subject in ("anatomy", "astronomy"):
        rows = [{**row, "question": f"Why {i}?", "answer": i % 4} for i in range(6)]
        mirror(data_sets.mmlu(subject), Rows(rows), tmp_path / "mirror")
    names = ["mmlu_anatomy", "mmlu_astronomy"]
    arguments = ("--tasks", ",".join(names), "--max-length", "2000")
    results = evaluate(long_model, tmp_path / "mirror", tmp_path / "out", *arguments)
    assert "groups" not in results
    compared, _ = report.markdown(report.compare({"x": results, "y": results}), ["x", "y"])
    for text in ((tmp_path / "out" / "report.md").read_text(), compared):
        assert "| mmlu |" not in text
        assert all(f"| {name} |" in text for name in names)


@pytest.mark.parametrize("name", ["piqa", "wikitext", "recall_fda_512", "long_single_600", "text_book"])
def test_the_version_stated_is_that_of_the_task(name: str, long_model: Path, data: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("the cat sat on the mat", encoding="utf-8")
    long = ("--lengths", "600", "--documents", "1") if name.startswith("long") else ()
    text = ("--text", str(book)) if name == "text_book" else ()
    results = evaluate(long_model, data, tmp_path / "out", "--tasks", name, "--limit", "1", *long, *text)
    assert float(results["versions"][name]) == float(results["orthros"]["records"][name]["task"]["version"])


def test_two_tokenizers_runs_are_compared_by_the_rows_that_were_cut(long_model: Path, tmp_path: Path) -> None:
    """Each tokenizer cuts other texts out of the same rows."""
    longer = [{**row, "text": f"Film {n}. {row['text']}"} for n, row in enumerate(FDA_ROWS)]
    mirror(data_sets.FDA, Rows(longer), tmp_path / "mirror")
    merging = save_merging_tokenizer(save_orthros(tmp_path / "merging", max_position_embeddings=2048), adds_bos=False)
    runs = {}
    for each in (long_model, merging):
        arguments = ("--tasks", "recall_fda_512", "--max-length", "600")
        runs[each.name] = evaluate(each, tmp_path / "mirror", tmp_path / f"out-{each.name}", *arguments)
    documents = [run["orthros"]["records"]["recall_fda_512"]["documents"] for run in runs.values()]
    assert not {each["doc_hash"] for each in documents[0]} & {each["doc_hash"] for each in documents[1]}
    found = report.compare(runs)["tasks"]["differences"]["merging"]["tasks"]["recall_fda_512"]
    assert found["documents"] == 3


def test_generated_long_texts(long_model: Path, data: Path, tmp_path: Path) -> None:
    """At the model's own length nothing is cut off; what is longer is left out, by name."""
    arguments = ("--suite", "long", "--lengths", "600,601", "--documents", "2", "--max-length", "600")
    results = evaluate(long_model, data, tmp_path, *arguments)
    kinds = ("single", "multikey", "multivalue", "multiquery")
    assert set(results["results"]) == {f"long_{kind}_600" for kind in kinds}
    assert [record["truncated"] for record in results["orthros"]["records"].values()] == [0] * 4
    assert set(results["orthros"]["left_out"]) == {f"long_{kind}_601" for kind in kinds}
    assert results["orthros"]["left_out"]["long_single_601"].startswith("it takes 601 tokens, and the model reads 600")
    assert "the scores are not RULER's" in (tmp_path / "report.md").read_text()


def test_what_was_left_out_is_told_with_its_reason(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, for all tasks that it holds for; a suite without scores has neither table nor plot."""
    arguments = ("--suite", "long", "--lengths", "300", "--tasks", "piqa", "--limit", "1")
    evaluate(model, data, tmp_path / "out", *arguments)
    said = "Not scored: long_single_300, long_multikey_300, long_multivalue_300, long_multiquery_300: it takes "
    text = (tmp_path / "out" / "report.md").read_text()
    for place in (text, capsys.readouterr().out):
        assert place.count(said) == 1
        assert place.count("it takes 300 tokens, and the model reads 256") == 1
    section = text[text.index("## Long contexts, 300 tokens") : text.index("## Single tasks")]
    assert "Nothing of this suite was scored.\n\nLeft out: long_single_300" in section
    assert "|" not in section
    assert [plot.name for plot in (tmp_path / "out" / "plots").iterdir()] == ["tasks.png"]
    assert report.main([str(tmp_path / "out"), "--output", str(tmp_path / "compared")]) == 0
    compared = (tmp_path / "compared" / "comparison.md").read_text()
    assert "Nothing was scored.\n\nNot scored by all runs: long_multikey_300" in compared
    assert f"out: {said}" in compared
    assert [plot.name for plot in (tmp_path / "compared" / "plots").iterdir()] == ["tasks-scores.png"]


def test_what_a_model_is_too_short_for_does_not_end_the_evaluation(model: Path, data: Path, tmp_path: Path) -> None:
    """GSM8K's answers are as long as this model's positions."""
    results = evaluate(model, data, tmp_path / "out", "--tasks", "piqa,gsm8k", "--limit", "1")
    assert set(results["results"]) == {"piqa"}
    reason = "it takes 257 tokens, and the model reads 256; evaluate a model with more positions"
    assert results["orthros"]["left_out"] == {"gsm8k": reason}
    with pytest.raises(InputError, match="no task is left: recall_fda_512: it takes 49 tokens, and the model reads 48"):
        evaluate(model, data, tmp_path / "out", "--tasks", "recall_fda_512", "--max-length", "48")
    short = ("--tasks", "recall_fda_512", "--max-length", "49", "--limit", "1")
    assert set(evaluate(model, data, tmp_path / "out", *short)["results"]) == {"recall_fda_512"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
def test_a_model_that_gives_no_numbers_is_reported_so(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tiny_orthros().float()
    with torch.no_grad():
        broken.lm_head.weight.fill_(math.nan)
    place = Path(shutil.copytree(model, tmp_path / "nan"))
    broken.save_pretrained(place)
    results = evaluate(place, data, tmp_path / "broken", "--tasks", "piqa,wikitext")
    assert [record["not_finite"] for record in results["orthros"]["records"].values()] == [12, 2]
    said = "which makes the score meaningless**: piqa 12, wikitext 2."
    assert said in (tmp_path / "broken" / "report.md").read_text()
    assert said in capsys.readouterr().out
    results = evaluate(model, data, tmp_path / "whole", "--tasks", "piqa,wikitext")
    assert [record["not_finite"] for record in results["orthros"]["records"].values()] == [0, 0]
    assert "meaningless" not in (tmp_path / "whole" / "report.md").read_text()
    capsys.readouterr()
    assert report.main([str(tmp_path / "whole"), str(tmp_path / "broken"), "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "broken: **Requests whose log-likelihood is NaN or infinite" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| wikitext |")]
    assert row.endswith("| NaN | – |")


def test_a_llama_folder_goes_through_the_same_command(data: Path, tmp_path: Path) -> None:
    llama = save_llama(tmp_path / "llama")
    results = evaluate(llama, data, tmp_path / "t", "--tasks", "piqa")
    assert (results["config"]["architecture"], results["config"]["model_kind"]) == ("transformer", "llama folder")
    results = evaluate(llama, data, tmp_path / "o", "--tasks", "piqa", "--base-window", "8")
    assert (results["config"]["architecture"], results["config"]["base_sinks"]) == ("orthros", 1)


def test_chat_templates_wrap_the_question(data: Path, tmp_path: Path) -> None:
    model = save_merging_tokenizer(save_orthros(tmp_path / "model"), adds_bos=False)
    evaluate(model, data, tmp_path / "out", "--tasks", "piqa", "--chat", "--samples", "--limit", "1")
    (sample,) = (tmp_path / "out" / "samples" / "piqa.jsonl").read_text().splitlines()
    assert json.loads(sample)["arguments"][0][0] == "[user] Question: goal 0\nAnswer:\n[assistant]"
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    template = load_folder_tokenizer(model).chat_template
    assert (results["chat_template"], results["fewshot_as_multiturn"]) == (template, True)
    assert results["chat_template_sha"] == sha256(template.encode()).hexdigest()


def test_examples_come_before_the_question() -> None:
    row = {"question": "Why?", "choices": ["a", "b", "c", "d"], "answer": 2}
    rows = [{**row, "question": f"Why {number}?"} for number in range(6)]
    card = MMLU[1]
    task = card.build(TaskSetting(Rows(rows), tokenizer=None, limit=2))  # type: ignore[arg-type]
    task.set_fewshot_seed(1)
    task.build_all_requests(limit=2, rank=0, world_size=1)
    context, choice = task.instances[4].args
    assert context.startswith("The following are multiple choice questions (with answers) about anatomy.")
    assert [context.count(f"Why {number}?") for number in range(6)] == [1, 2, 1, 1, 1, 0]
    assert context.count("Answer: C") == 5
    assert choice == " A"
    assert card.metadata(TaskSetting(Rows(rows), tokenizer=None))["shots"] == 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "comonsense"], "there is no suite 'comonsense'; did you mean commonsense"),
        (["--tasks", "hellaswagg"], "there is no task 'hellaswagg'; did you mean hellaswag"),
        ([], "nothing to evaluate; give --suite"),
        (["--tasks", "hellaswag"], "task hellaswag: the mirror .* holds no data set hellaswag.*or leave it out with"),
        (["--suite", "recall-512", "--skip-unavailable", "--batch-size", "x"], "batch size 'x' is neither"),
        (["--tasks", "piqa", "--device", "cuda"], "torch sees no CUDA device"),
        (["--tasks", "piqa", "--base-window", "8"], "has its own base window"),
        (["--tasks", "piqa", "--chat"], "has no chat template"),
        (["--tasks", "piqa", "--limit", "0"], "must be at least 1"),
        (["--tasks", "piqa", "--seed", "-1"], "argument --seed: must be at least 0"),
        (["--tasks", "piqa", "--base-sinks", "-1"], "argument --base-sinks: must be at least 0"),
        (["--suite", "perplexity", "--text", "absent.txt"], "cannot read absent.txt"),
        (["--suite", "long", "--lengths", "30"], "0 tokens before the answer have no room for the facts"),
        (["--suite", "long", "--lengths", "300"], "no task is left: long_single_300: it takes 300 .* model reads 256"),
        (["--tasks", "piqa", "--max-length", "257"], "257 exceeds the 256 positions of .*max_position_embeddings in"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(
    arguments: list[str], message: str, model: Path, data: Path, tmp_path: Path
) -> None:
    command = ["--model", str(model), "--data-dir", str(data), "--output", str(tmp_path), *arguments]
    with pytest.raises(InputError, match=message):
        run.main(command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "piqa", "--data-source", "package", "--data-dir", "D"], "--data-dir and --data-source package "),
        (["--tasks", "piqa", "--data-source", "hub", "--data-dir", "D"], "--data-dir and --data-source hub are two"),
        (["--tasks", "piqa", "--cache", "D"], "--cache has no effect without --data-source package"),
        (["--suite", "commonsense", "--text", "TEXT"], "--text has no effect without the suite perplexity"),
        (["--tasks", "piqa", "--lengths", "600"], "--lengths has no effect without the suite long"),
        (["--suite", "perplexity", "--documents", "3"], "--documents has no effect without the suite long"),
        (["--suite", "synthetic", "--model", "M"], "--model has no effect on the suite synthetic"),
        (["--suite", "synthetic", "--limit", "3"], "--limit has no effect on the suite synthetic"),
        (["--suite", "synthetic", "--text", "TEXT"], "--text has no effect without the suite perplexity"),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words", encoding="utf-8")
    given = [str(tmp_path / "text.txt") if each == "TEXT" else each for each in arguments]
    with pytest.raises(InputError, match=message):
        run.main(["--output", str(tmp_path / "out"), *given])


def test_single_tasks_make_use_of_their_suites_options(
    model: Path, long_model: Path, data: Path, tmp_path: Path
) -> None:
    text = tmp_path / "book.txt"
    text.write_text("the cat sat on the mat", encoding="utf-8")
    results = evaluate(model, data, tmp_path / "a", "--tasks", "text_book", "--text", str(text))
    assert set(results["results"]) == {"text_book"}
    long = ("--tasks", "long_single_600", "--lengths", "600", "--documents", "2", "--max-length", "700")
    assert evaluate(long_model, data, tmp_path / "b", *long)["n-samples"]["long_single_600"]["original"] == 2


def test_wikitext_is_known_besides_texts(tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("the cat sat on the mat", encoding="utf-8")
    cards = find_tasks(["wikitext", "text_book"], SuiteOptions(texts=[text]))
    assert [card.name for card in cards] == ["wikitext", "text_book"]
    (suite,) = find_suites(["perplexity"], SuiteOptions(texts=[text]))
    assert [card.name for card in suite.cards] == ["text_book"]


def test_sinks_without_a_window_are_refused(data: Path, tmp_path: Path) -> None:
    llama = save_llama(tmp_path / "llama")
    with pytest.raises(InputError, match="--base-sinks 2 has no effect without --base-window"):
        evaluate(llama, data, tmp_path / "out", "--tasks", "piqa", "--base-sinks", "2")


def test_the_synthetic_suite_refuses_every_option_that_it_does_not_heed(tmp_path: Path) -> None:
    """Whatever the parser has: nothing is ignored in silence."""
    (tmp_path / "text.txt").write_text("words", encoding="utf-8")
    values = {"data_source": "package", "dtype": "fp32", "lengths": "600", "text": str(tmp_path / "text.txt")}
    heeded = {"help", "suite", "tasks", "output", "device"}
    options = [action for action in run.build_parser()._actions if action.dest not in heeded]
    assert {"seed", "batch_size", "dtype", "chat", "skip_unavailable"} <= {option.dest for option in options}
    for option in options:
        (flag,) = option.option_strings
        value = [] if option.nargs == 0 else [values.get(option.dest, "0" if option.dest == "seed" else "1")]
        with pytest.raises(InputError, match=f"{flag}.* (has|have) no effect"):
            run.main(["--suite", "synthetic", "--output", str(tmp_path / "out"), flag, *value])
        assert not (tmp_path / "out").exists()


def test_the_synthetic_suite_is_trained_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Path] = []
    monkeypatch.setattr(associative_recall, "run_synthetic", lambda folder, device: trained.append(folder))
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert run.main(["--suite", "synthetic", "--output", str(tmp_path)]) == 0
    assert trained == [tmp_path / "synthetic"]


@pytest.mark.parametrize("place", ["/proc", "/proc/absent", "FILE/below"])
def test_a_place_that_cannot_be_written_is_found_before_the_model_is_read(place: str, tmp_path: Path) -> None:
    """Also one that is there already."""
    (tmp_path / "FILE").write_text("")
    output = tmp_path / place  # an absolute place stays itself
    with pytest.raises(InputError, match=r"cannot (write into|make) the folder"):
        run.main(["--model", "absent", "--tasks", "piqa", "--output", str(output)])


@pytest.mark.parametrize(
    ("place", "is_folder"),
    [
        ("tasks", False),
        ("samples", False),
        ("plots", False),
        ("tasks/piqa.json", True),
        ("samples/piqa.jsonl", True),
        ("plots/tasks.png", True),
        ("report.md", True),
        ("report.html", True),
    ],
)
def test_what_stands_in_the_outputs_way_is_found_before_the_model_is_read(
    place: str, is_folder: bool, tmp_path: Path
) -> None:
    path = tmp_path / "out" / place
    path.parent.mkdir(parents=True)
    path.mkdir() if is_folder else path.write_text("")
    said = f"{place} is a {'folder' if is_folder else 'file'}, where a .* remove it, or give another --output"
    with pytest.raises(InputError, match=said):
        run.main(["--model", "absent", "--tasks", "piqa", "--output", str(tmp_path / "out")])


@pytest.mark.parametrize(("content", "said"), [("[]", "is no record of a task"), ("{", "is not JSON")])
def test_a_record_that_is_none_is_refused(content: str, said: str, model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "piqa.json").write_text(content)
    with pytest.raises(InputError, match=rf"piqa\.json {said}.*; remove it and run again"):
        evaluate(model, data, tmp_path, "--tasks", "piqa")


@pytest.mark.parametrize("names", [("a/book.txt", "b/book.txt"), ("a/The Book.txt", "a/the-book.md"), ("a/b.txt",) * 2])
def test_texts_that_would_share_a_name_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    texts = [tmp_path / name for name in names]
    for text in texts:
        text.parent.mkdir(exist_ok=True)
        text.write_text("words", encoding="utf-8")
    options = SuiteOptions(texts=texts)
    for find in (lambda: find_suites(["perplexity"], options), lambda: find_tasks(["piqa"], options)):
        with pytest.raises(InputError, match=r"would both be the task text_.*: rename one") as refused:
            find()
        assert all(str(text) in str(refused.value) for text in texts)


def test_models_that_are_none_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder; give an Orthros or Llama-family folder"):
        load_evaluated_model(tmp_path / "absent")
    with pytest.raises(InputError, match="no checkpoint in"):
        load_evaluated_model(tmp_path)
    bare = save_orthros(tmp_path / "bare")
    for file in (*bare.glob("tokenizer*"), *bare.glob("special_tokens*")):
        file.unlink()
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_evaluated_model(bare)
    (bare / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(InputError):
        load_evaluated_model(bare)
    (bare / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        load_evaluated_model(bare)
    with pytest.raises(InputError, match="give --model DIR"):
        run.main(["--tasks", "piqa", "--output", str(tmp_path / "out")])


def test_every_suite_is_complete() -> None:
    for name in SUITE_NAMES[:-1]:
        for suite in find_suites([name], SuiteOptions()):
            assert len({card.name for card in suite.cards}) == len(suite.cards)
            for card in suite.cards:
                assert card.prompt
                assert card.version
                assert card.data["license"]
    (conversion,) = find_suites(["conversion"], SuiteOptions())
    assert len(conversion.cards) == 6 + 57 + 1
    assert len(set(MMLU_SUBJECTS)) == 57
    assert [suite.name for suite in find_suites(["recall"], SuiteOptions())] == [
        "recall-512", "recall-1024", "recall-2048"
    ]  # fmt: skip


def test_tokens_are_counted_without_the_bos_that_the_tokenizer_adds(data: Path, tmp_path: Path) -> None:
    """Perplexity by token is over what is predicted, whether or not the tokenizer adds BOS."""
    text, found = tmp_path / "text.txt", []
    text.write_text("the cat sat on the mat", encoding="utf-8")
    adds = save_merging_tokenizer(save_orthros(tmp_path / "adds"), adds_bos=True)
    plain = Path(shutil.copytree(adds, tmp_path / "plain"))
    tokenizer = json.loads((plain / "tokenizer.json").read_text())
    (plain / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    for model in (adds, plain):
        results = evaluate(model, data, tmp_path / f"out-{model.name}", "--suite", "perplexity", "--text", str(text))
        found.append(results["results"]["text_text"])
    for metric in ("token_perplexity,none", "byte_perplexity,none"):
        assert found[0][metric] == pytest.approx(found[1][metric], rel=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_results_name_the_model_as_the_harness_is_given_it(model: Path, data: Path, tmp_path: Path, dtype: str) -> None:
    """What results.json says of the model makes the same model again."""
    results = evaluate(model, data, tmp_path / "out", "--tasks", "piqa", "--limit", "1", "--dtype", dtype)
    given = results["config"]["model_args"]
    text = ",".join(f"{name}={value}" for name, value in given.items())
    again = OrthrosLM.create_from_arg_string(text, {"batch_size": "1", "device": "cpu"})
    info = again.get_model_info()
    assert {"pretrained": info["model_source"], "dtype": info["model_dtype"], "max_length": info["max_length"]} == given


def test_a_data_set_without_a_pinned_commit_is_reported_so(model: Path, tmp_path: Path) -> None:
    class HubRows(Rows):
        def describe(self, data_set: data_sets.DataSet) -> dict[str, Any]:
            return {"source": "hub", "revision": data_set.revision or "f" * 40}

    mirror(data_sets.FDA, HubRows(FDA_ROWS), tmp_path / "mirror")
    mirror(data_sets.PIQA, HubRows(PIQA_ROWS), tmp_path / "mirror")
    results = evaluate(model, tmp_path / "mirror", tmp_path / "out", "--tasks", "recall_fda_512,piqa", "--limit", "1")
    data = {name: record["task"]["data"] for name, record in results["orthros"]["records"].items()}
    assert data["recall_fda_512"]["revision"] == "f" * 40
    assert data["recall_fda_512"]["revision_note"] == "revision not pinned"
    assert "revision_note" not in data["piqa"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| ffffffffffff (not pinned) |" in report
    assert f"| {data_sets.PIQA.revision[:12]} |" in report  # type: ignore[index]
