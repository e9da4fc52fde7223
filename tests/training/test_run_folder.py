"""A run's folder: it belongs to one configuration, and says what happened."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard.writer import SummaryWriter  # noqa: F401  the module that the run imports lazily

from orthros_train.config import load_config, orthros_config
from orthros_train.data import PretrainingData, load_tokenizer, storage
from orthros_train.errors import InputError
from orthros_train.model.flops import forward_flops, palm_flops_per_token
from orthros_train.training.loop import train
from orthros_train.training.run_folder import CHANGEABLE, RunFolder, identity
from tests.distributed import run_distributed
from tests.training.small_runs import MODEL, losses, metrics, run, small_config, write_corpus

FIELDS = [
    "step",
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens_seen",
    "loss_tokens",
    "output_tokens",
    "tokens_per_second",
    "step_seconds",
    "data_wait_seconds",
    "forward_seconds_min",
    "forward_seconds_median",
    "forward_seconds_max",
    "slowest_rank",
    "slowest_host",
    "memory_peak_gib",
    "mfu_exact",
    "mfu_palm",
    "skipped_steps",
    "attempt",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Any]:
    """Options of a run that is done, in a folder that tests must not change."""
    options = {"evaluation__interval_steps": 3, "logging__tensorboard": True, "logging__peak_tflops": 0.001}
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run(small_config(folder, corpus, **options), 2) == 0
    return {"folder": folder, "corpus": corpus, **options}


def test_files(finished: dict[str, Any]) -> None:
    names = {path.name for path in finished["folder"].iterdir()}
    assert names == {
        "config.yaml",
        "receipt.json",
        "status.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        ".lock",
    }
    (events,) = (finished["folder"] / "tensorboard").iterdir()
    assert events.name.startswith("events.out.tfevents")


def test_config_yaml_reads_back(finished: dict[str, Any]) -> None:
    assert load_config(finished["folder"] / "config.yaml") == small_config(**finished)


def test_metrics(finished: dict[str, Any]) -> None:
    records = metrics(small_config(**finished))
    for record in records:
        extra = ["validation_loss"] if record["step"] in (3, 6) else []
        assert list(record) == [*FIELDS, *extra]
        assert record["tokens_seen"] == record["step"] * 8 * 32
        assert record["output_tokens"] == 8 * 32 >= record["loss_tokens"] > 0
        assert record["tokens_per_second"] == pytest.approx(8 * 32 / record["step_seconds"])
        assert 0 <= record["data_wait_seconds"] <= record["step_seconds"]
        forward = [record[f"forward_seconds_{which}"] for which in ("min", "median", "max")]
        assert 0 < forward[0] <= forward[1] <= forward[2] < record["step_seconds"]
        assert record["slowest_rank"] in (0, 1)
        assert 0 < record["memory_peak_gib"] < 10
        assert record["mfu_exact"] > 0
        assert record["mfu_palm"] > 0
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]


def test_a_slow_rank_can_be_seen_in_tensorboard(finished: dict[str, Any]) -> None:
    board = EventAccumulator(str(finished["folder"] / "tensorboard"))
    board.Reload()
    for name in ("forward_seconds_min", "forward_seconds_median", "forward_seconds_max", "slowest_rank"):
        shown = [event.value for event in board.Scalars(f"ranks/{name}")]
        assert shown == pytest.approx([record[name] for record in metrics(small_config(**finished))])


def test_mfu_counts_what_was_executed(finished: dict[str, Any]) -> None:
    """Rebuilt from the samples themselves: both streams, the segments of each row, forward and backward."""
    config = small_config(**finished)
    model_config = orthros_config(config, 259)
    data = PretrainingData(config, load_tokenizer(config.tokenizer), "train")
    available = 0.001e12 * 2  # FLOP/s of two devices
    for record in metrics(config):
        flops = 0
        for index in range((record["step"] - 1) * 8, record["step"] * 8):
            documents = data.sample(index).document_ids
            assert documents is not None
            flops += 3 * forward_flops(model_config, np.bincount(documents).tolist()).total
        assert record["mfu_exact"] == pytest.approx(flops / (available * record["step_seconds"]))
        palm = palm_flops_per_token(model_config, 32) * 8 * 32
        assert record["mfu_palm"] == pytest.approx(palm / (available * record["step_seconds"]))


def test_receipt(finished: dict[str, Any]) -> None:
    receipt = json.loads((finished["folder"] / "receipt.json").read_text())
    assert receipt["command"] == ["test"]
    assert receipt["seeds"] == {"train.seed": 42}
    assert receipt["versions"].keys() >= {"python", "torch", "deepspeed", "transformers"}
    assert all(len(value) == 64 for value in receipt["fingerprints"].values())
    assert receipt["start"] <= receipt["end"]
    assert (receipt["first_step"], receipt["last_step"], receipt["exit_code"]) == (0, 6, 0)
    assert (receipt["world_size"], receipt["attempt"], receipt["previous"]) == (2, 1, [])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("optimizer__learning_rate", 0.02),
        ("train__seed", 1),
        ("train__global_batch_size", 16),
        ("precision", "bf16"),
        ("schedule__min_lr_ratio", 0.0),
        ("data__document_mask", False),
        ("model", {**MODEL, "base_window": 4}),
    ],
)
def test_another_run_is_refused_by_name(finished: dict[str, Any], option: str, value: Any) -> None:
    config = small_config(**{**finished, option: value})
    name = "model.base_window" if option == "model" else option.replace("__", ".")
    with pytest.raises(InputError, match=f"holds another run: its {name} is .*; choose another output_dir"):
        RunFolder(config).inspect()


def test_what_may_change(finished: dict[str, Any]) -> None:
    changes = {
        "train__steps": 60,
        "train__micro_batch_size": 1,
        "train__activation_checkpointing": True,
        "train__wall_clock_limit_seconds": 60.0,
        "parallel__zero_stage": 3,
        "checkpoint__keep_last": 7,
        "logging__interval_steps": 1,
        "evaluation__samples": 9,
        "data__prefetch_steps": 0,
    }
    folder = RunFolder(small_config(**{**finished, **changes}))
    folder.inspect()
    assert folder.attempt == 2


def test_every_changeable_option_exists(finished: dict[str, Any]) -> None:
    """A renamed option would otherwise silently belong to a run's identity."""
    config = small_config(**finished)
    dumped = config.model_dump(mode="json")
    for option in CHANGEABLE:
        section = dumped
        for name in option.split("."):
            assert name in section, option
            section = section[name]
        assert option not in identity(config)


def test_other_data_is_refused(tmp_path: Path, corpus: Path) -> None:
    config = small_config(tmp_path / "run", corpus)
    assert run(config) == 0
    (tmp_path / "other").mkdir()
    other = write_corpus(tmp_path / "other", ["another text altogether " * 10] * 30)
    with pytest.raises(AssertionError, match=r"InputError: .*was trained with another data"):
        run(small_config(tmp_path / "run", other))


def test_a_run_is_not_overwritten_where_resuming_is_off(finished: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"already holds this run and checkpoint\.resume is false"):
        RunFolder(small_config(**finished, checkpoint__resume=False)).inspect()


def test_fewer_steps_than_done_are_refused(finished: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=r"InputError: .* is past train\.steps \(4\)"):
        run(small_config(**{**finished, "train__steps": 4, "schedule__decay_steps": None}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", "{}", "holds metrics.jsonl but no config.yaml"),
        ("config.yaml", "a: [", "holds no run's config.yaml; choose another"),
        ("config.yaml", "text", "holds no run's config.yaml; choose another"),
    ],
)
def test_foreign_folder(tmp_path: Path, corpus: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        RunFolder(small_config(tmp_path, corpus)).inspect()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_output_dir_is_a_file(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="is a file; choose a folder"):
        RunFolder(small_config(tmp_path / "run", corpus)).inspect()


def test_a_second_launch_is_refused(tmp_path: Path, corpus: Path) -> None:
    """And leaves the first one's status alone."""
    config = small_config(tmp_path / "run", corpus)
    first = RunFolder(config)
    first.open()
    first.write_status("running", 3)
    with pytest.raises(AssertionError, match="FolderBusyError: another process is training in"):
        run(config)
    assert first.read_status() == {"state": "running", "exit_code": None, "step": 3, "attempt": 1, "reason": None}
    first.release()
    assert run(config) == 0


def test_metrics_past_the_checkpoint_are_cut_on_resume(tmp_path: Path, corpus: Path) -> None:
    """What a killed attempt recorded after its last checkpoint, and a half-written line, do not stay."""
    options = {"checkpoint__interval_steps": 3, "schedule__decay_steps": 6}
    config = small_config(tmp_path / "run", corpus, train__steps=3, **options)
    assert run(config) == 0
    first = losses(config)
    with open(tmp_path / "run" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 4, "loss": 99.0}\n{"step": 5, "lo')
    longer = small_config(tmp_path / "run", corpus, train__steps=6, **options)
    assert run(longer) == 0
    assert [record["step"] for record in metrics(longer)] == [1, 2, 3, 4, 5, 6]
    assert losses(longer)[:3] == first
    assert 99.0 not in losses(longer)


def test_output_dir_that_cannot_be_written(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match=r"InputError: output_dir .* cannot be written .*Not a directory"):
        run(small_config(tmp_path / "file" / "run", corpus))


DAMAGE = {
    "empty": b"",
    "binary": b"\xff\xfe",
    "no JSON": b"{\n",
    "a list": b"[1]\n",
    "another shape": b'{"step": "x"}\n',
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name in ("status.json", "receipt.json", "metrics.jsonl")
        for damage in DAMAGE
        if (name, damage) != ("metrics.jsonl", "empty")  # a run without records yet
    ],
)
def test_a_damaged_file_of_the_run_is_named_before_anything_changes(
    tmp_path: Path, corpus: Path, name: str, damage: str
) -> None:
    config = small_config(tmp_path / "run", corpus, train__steps=1, schedule={})
    folder = RunFolder(config)
    folder.open()
    folder.write_status("stopped", 1)
    folder.write_receipt({"attempt": 1})
    folder.release()
    (folder.path / name).write_bytes(DAMAGE[damage])
    before = {path: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    with pytest.raises(InputError, match=rf"{re.escape(name)} is damaged; restore it"):
        RunFolder(config).inspect()
    assert before == {path: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", ["nul\0byte", "x" * 5000])
def test_an_impossible_path_is_one_line(corpus: Path, name: str) -> None:
    with pytest.raises(InputError, match="is no possible path"):
        RunFolder(small_config(Path(name), corpus)).inspect()


@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_a_kernel_that_cannot_train_here_is_refused_before_anything_is_written(
    tmp_path: Path, corpus: Path, kernel: str
) -> None:
    config = small_config(tmp_path / "run", corpus, model={**MODEL, "attention_kernel": kernel})

    def refused() -> None:
        with pytest.raises(InputError, match=f"model.attention_kernel={kernel} cannot run"):
            train(config, ["test"])

    run_distributed(refused, 1, process_group=False)  # in a process of its own: train joins process groups
    assert not (tmp_path / "run").exists()


def test_a_failed_second_start_leaves_the_status_of_a_running_one(tmp_path: Path, corpus: Path) -> None:
    config = small_config(tmp_path / "run", corpus)
    running = RunFolder(config)
    running.open()
    running.write_status("running", 3)

    def second_start() -> None:
        other = small_config(tmp_path / "run", corpus, data__train=[{"prefix": "nowhere"}])
        with pytest.raises(InputError):
            train(other, ["test"])

    run_distributed(second_start, 1, process_group=False)
    assert running.read_status() == {"state": "running", "exit_code": None, "step": 3, "attempt": 1, "reason": None}
    running.release()


@pytest.mark.parametrize("locks", [True, False])
def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], locks: bool
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    if not locks:
        monkeypatch.setattr(storage.fcntl, "flock", refuse)
    assert run(small_config(tmp_path / "run", corpus)) == 0
    shown = capfd.readouterr()
    assert ("offers no locks" in " ".join((shown.out + shown.err).split())) is not locks
