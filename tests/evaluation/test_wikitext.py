"""The WikiText protocol on small text: preparation, refusal of altered files, what the report says."""

from __future__ import annotations

import json
import shlex
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from evaluation import reproduce_wikitext
from evaluation.reproduce_wikitext import Protocol, build_arm, draw_batches, nll, verdict
from evaluation.wikitext_data import REVISION, SPLITS, label, parquet_name, read_prepared
from orthros_train.errors import InputError
from tools import prepare_wikitext

LINES = ["", " = A title = \n", " The cat sat on the mat . \n"] * 40
SMALL = ["--steps", "2", "--shared-steps", "1", "--batch-size", "2", "--train-bytes", "600", "--test-bytes", "150"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "parquet"
    for split in SPLITS:
        path = folder / parquet_name(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table({"text": LINES}), path)
    return folder


@pytest.fixture
def prepared(source: Path, tmp_path: Path) -> Path:
    assert prepare_wikitext.main(["--output", str(tmp_path / "wikitext"), "--from-dir", str(source)]) == 0
    return tmp_path / "wikitext"


def test_preparation(prepared: Path) -> None:
    contents, manifest = read_prepared(prepared, SPLITS)
    assert contents["test"] == "".join(LINES).encode()
    assert manifest["revision"] == REVISION
    assert manifest["files"]["train.txt"]["bytes"] == len("".join(LINES))
    assert manifest["files"]["train.txt"]["from"].startswith("file with SHA-256 ")


def test_altered_and_foreign_files_are_refused(prepared: Path, tmp_path: Path) -> None:
    test = prepared / "test.txt"
    test.write_bytes(test.read_bytes().replace(b"cat", b"dog", 1))
    with pytest.raises(InputError, match=r"test.txt was altered"):
        read_prepared(prepared)
    test.unlink()
    with pytest.raises(InputError, match=r"test.txt is missing"):
        read_prepared(prepared)
    manifest = json.loads((prepared / "manifest.json").read_text())
    (prepared / "manifest.json").write_text(json.dumps(manifest | {"revision": "other"}))
    with pytest.raises(InputError, match=f"is of revision other, not of {REVISION}"):
        read_prepared(prepared)
    with pytest.raises(InputError, match=r"holds no manifest.json; make the folder with"):
        read_prepared(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": "wikitext-103-raw-v1"}, "is of config wikitext-103-raw-v1, not of wikitext-2-raw-v1"),
        ({"dataset": "other"}, "is of dataset other, not of Salesforce/wikitext"),
        ({"provenance": None}, "does not say where its text came from"),
        ({"files": None}, r"is not a manifest of tools/prepare_wikitext.py"),
        ({"files": {}}, r"train.txt is missing"),
        ({"files": {"train.txt": {}}}, r"train.txt was altered"),
    ],
)
def test_a_manifest_of_something_else_is_refused(changes: dict[str, Any], message: str, prepared: Path) -> None:
    path = prepared / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=message):
        read_prepared(prepared)


def test_text_from_the_hub_is_called_wikitext(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(repository: str, config: str, *, split: str, revision: str) -> dict[str, list[str]]:
        assert (repository, config, revision) == ("Salesforce/wikitext", "wikitext-2-raw-v1", REVISION)
        return {"text": LINES}

    monkeypatch.setattr("datasets.load_dataset", load)
    assert prepare_wikitext.main(["--output", str(tmp_path / "out")]) == 0
    _, manifest = read_prepared(tmp_path / "out")
    assert label(manifest) == f"Salesforce/wikitext (wikitext-2-raw-v1) at revision {REVISION}"


def test_without_the_hub_it_says_what_to_place_where(tmp_path: Path, source: Path) -> None:
    with pytest.raises(InputError, match=rf"hub cannot be reached.*{REVISION}.*--from-dir"):
        prepare_wikitext.main(["--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    (source / parquet_name("test")).unlink()
    with pytest.raises(InputError, match=r"test-00000-of-00001.parquet is missing"):
        prepare_wikitext.main(["--output", str(tmp_path / "out"), "--from-dir", str(source)])
    (source / parquet_name("train")).write_bytes(b"no parquet")
    with pytest.raises(InputError, match="cannot be read as WikiText's parquet"):
        prepare_wikitext.main(["--output", str(tmp_path / "out"), "--from-dir", str(source)])


def test_damaged_parquet_is_what_is_blamed(tmp_path: Path, source: Path) -> None:
    arguments = ["--output", str(tmp_path / "out"), "--from-dir", str(source)]
    path = source / parquet_name("train")
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :])
    with pytest.raises(InputError, match=r"train.*cannot be read as WikiText's parquet \(.*place the three files"):
        prepare_wikitext.main(arguments)
    for values, problem in (([1, 2], "holds int64, not strings"), (["a", None], "lacks 1 of 2 values")):
        parquet.write_table(pyarrow.table({"text": values}), path)
        with pytest.raises(InputError, match=rf"cannot be read as WikiText's parquet \(its column text {problem}"):
            prepare_wikitext.main(arguments)


def test_the_protocol_on_wikitext(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    arguments = ["--data", str(prepared), "--output", str(output), "--seeds", "1,2", *SMALL]
    assert reproduce_wikitext.main(arguments) == 0
    results = json.loads((output / "results.json").read_text())
    for arm in ("transformer", "orthros"):
        assert set(results["runs"][arm]) == {"1", "2"}
        assert len(results["runs"][arm]["1"]["losses"]) == 2
    runs = results["runs"]
    assert runs["orthros"]["1"]["shared_losses"] == runs["transformer"]["1"]["shared_losses"]
    assert runs["orthros"]["1"]["losses"] != runs["transformer"]["1"]["losses"]
    assert results["cache_discrepancy"] < 1e-4
    receipt = json.loads((output / "receipts" / "orthros-2.json").read_text())
    assert receipt["seed"] == 2
    assert shlex.split(receipt["command"]) == ["python", "-m", "evaluation.reproduce_wikitext", *arguments]
    assert receipt["data"]["manifest"]["revision"] == REVISION
    by_hand = "placed by hand, not verified against the hub"
    assert by_hand in receipt["data"]["label"]
    assert receipt["data"]["manifest"]["provenance"] == by_hand
    text = capsys.readouterr().out
    assert by_hand in text
    assert "3.02851 ± 0.05278" in text
    assert "same protocol, not a reproduction" in text
    assert "other text" not in text


def test_other_text_is_labelled_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "a dark 'book'.txt"
    book.write_text("It was a dark night. " * 60)
    arguments = ["--text", str(book), "--output", str(tmp_path / "out"), "--seeds", "1", *SMALL]
    assert reproduce_wikitext.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("# Byte-level WikiText protocol, on other text")
    assert "These figures are not WikiText's." in text
    for receipt in map(json.loads, (path.read_text() for path in tmp_path.glob("out/receipts/*.json"))):
        assert receipt["data"]["sha256"] == sha256(book.read_bytes()).hexdigest()
        assert shlex.split(receipt["command"])[3:] == arguments


@pytest.mark.parametrize(("orthros", "words"), [((2.0, 2.2), "worse"), ((1.0, 1.2), "better"), ((1.5, 1.6), "same")])
def test_the_verdict_follows_the_figures(orthros: tuple[float, float], words: str) -> None:
    runs = {
        "transformer": {"1": {"test_nll": 1.5}, "2": {"test_nll": 1.6}},
        "orthros": {str(i + 1): {"test_nll": value} for i, value in enumerate(orthros)},
    }
    text = verdict({"runs": runs, "seeds": [1, 2]})
    assert words in text
    assert "do not tell the arms apart" not in text


@pytest.mark.parametrize("seeds", ["1", "1,2"])
def test_runs_that_diverge_are_called_so(seeds: str, prepared: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(prepared), "--output", str(tmp_path), "--seeds", seeds, *SMALL, "--learning-rate", "1e8"]
    assert reproduce_wikitext.main(arguments) == 1
    report = (tmp_path / "report.md").read_text()
    assert "No verdict: transformer with seed 1" in report
    assert "| diverged |" in report
    for name in ("results.json", "receipts/orthros-1.json"):
        json.loads((tmp_path / name).read_text(), parse_constant=pytest.fail)  # NaN is no JSON


def test_receipts_are_written_as_seeds_end(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_seed = reproduce_wikitext.run_seed

    def interrupted(seed: int, *arguments: Any) -> Any:
        if seed == 2:
            raise KeyboardInterrupt
        return run_seed(seed, *arguments)

    monkeypatch.setattr(reproduce_wikitext, "run_seed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reproduce_wikitext.main(["--data", str(prepared), "--output", str(tmp_path), "--seeds", "1,2", *SMALL])
    written = sorted(path.name for path in (tmp_path / "receipts").iterdir())
    assert written == ["orthros-1.json", "transformer-1.json"]


def test_a_difference_within_the_spread_is_called_so() -> None:
    runs = {
        "transformer": {"1": {"test_nll": 1.5}, "2": {"test_nll": 1.6}},
        "orthros": {"1": {"test_nll": 1.6}, "2": {"test_nll": 1.51}},
    }
    text = verdict({"runs": runs, "seeds": [1, 2]})
    assert "worse than the transformer by 0.00500" in text
    assert "do not tell the arms apart" in text


def test_every_byte_but_the_first_is_predicted_once() -> None:
    model = build_arm("orthros", Protocol()).double()
    model.reset_parameters(0)
    data = torch.arange(40)
    with torch.no_grad():
        expected = 0.0
        for start, stop in ((0, 17), (16, 33), (32, 40)):
            logits = model(data[None, start : stop - 1], use_cache=False).logits[0].log_softmax(-1)
            expected -= float(logits.gather(1, data[start + 1 : stop, None]).sum())
    assert nll(model, data, 16) == pytest.approx(expected / 39, rel=1e-6)


def test_batches_depend_on_the_seed_alone() -> None:
    data = torch.arange(500)
    first, again, other = (draw_batches(data, Protocol(), seed) for seed in (1, 1, 2))
    assert len(first) == 50
    assert first[0].shape == (16, 65)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "30"], "--width 30 is not 4 heads of an even size"),
        (["--train-bytes", "40"], "needs more bytes"),
        (["--test-bytes", "99999"], "the test text has .* bytes, the protocol asks for 99,999"),
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--seeds", "x"], "argument --seeds: 'x' is not an integer"),
        (["--seeds", "1,2,1"], "argument --seeds: '1,2,1' names a seed twice"),
        (["--seeds", "-1"], "argument --seeds: must be at least 0"),
        (["--learning-rate", "-1"], "argument --learning-rate: must be a finite number above 0"),
        (["--learning-rate", "0"], "argument --learning-rate: must be a finite number above 0"),
        (["--learning-rate", "nan"], "argument --learning-rate: must be a finite number above 0"),
        (["--learning-rate", "fast"], "argument --learning-rate: 'fast' is not a number"),
        (["--steps", "0"], "must be at least 1"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night. " * 3000)
    with pytest.raises(InputError, match=message):
        reproduce_wikitext.main(["--text", str(book), "--output", str(tmp_path / "out"), *arguments])
    with pytest.raises(InputError, match="cannot read"):
        reproduce_wikitext.main(["--text", str(tmp_path / "absent"), "--output", str(tmp_path / "out")])


@pytest.mark.evidence
def test_the_whole_protocol_on_shakespeare(tmp_path: Path) -> None:
    from evaluation.demo.text import shakespeare  # noqa: PLC0415

    works, _ = shakespeare(Path(__file__).parents[2] / ".cache")
    book = tmp_path / "shakespeare.txt"
    book.write_text("\n".join(works.values()), encoding="utf-8")
    output = tmp_path / "out"
    assert reproduce_wikitext.main(["--text", str(book), "--output", str(output)]) == 0
    results = json.loads((output / "results.json").read_text())
    print((output / "report.md").read_text())
    assert results["cache_discrepancy"] < 1e-4
    for arm in ("transformer", "orthros"):
        assert results["summary"][arm]["mean"] < 4.0  # uniform bytes: 5.55
