"""Benchmark suites while a run trains: when, where the scores go, and that training does not notice."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evaluation import run as evaluation_run
from evaluation import scoring
from evaluation.during_training import open_suites
from evaluation.lm_eval_model import OrthrosLM
from evaluation.scoring import Scorer
from evaluation.suites import data_sets
from evaluation.task_runs import TaskRunner
from orthros_train.config import Config
from orthros_train.training.loop import train
from tests.distributed import run_distributed
from tests.evaluation.test_data_sources import PIQA_ROWS, Rows
from tests.training.small_runs import assert_same_state, losses, metrics, small_config, untimed
from tests.training.test_stopping import STOPPED, interrupts_are_heard, send, status, then  # noqa: F401  a fixture
from tools.mirror_datasets import mirror

TEXT = "the cat sat on the mat as it was for that one"


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options: two suites that need no network, six questions and one text."""
    folder = tmp_path_factory.mktemp("suites")
    mirror(data_sets.PIQA, Rows(PIQA_ROWS), folder / "mirror")
    (folder / "text.txt").write_text(TEXT)
    return {
        "names": ["commonsense", "perplexity"],
        "interval_steps": 4,
        "data_dir": str(folder / "mirror"),
        "skip_unavailable": True,
        "texts": [str(folder / "text.txt")],
    }


def run(config: Config, world_size: int = 1) -> int:
    """As small_runs.run, with a way to score suites."""
    codes = run_distributed(train, world_size, config, ["test"], open_suites, timeout_seconds=60, process_group=False)
    assert len(set(codes)) == 1, codes
    return codes[0]


def last_checkpoint(config: Config) -> Path:
    return Path(config.output_dir) / "checkpoints" / "step_00000006"


@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 1), (2, 1), (2, 2)])
def test_training_does_not_notice(
    tmp_path: Path, corpus: Path, suites: dict[str, Any], ranks: int, zero_stage: int
) -> None:
    """Losses, weights and moments are bitwise those of a run without; scores are those of the exported checkpoint."""
    options: dict[str, Any] = {"parallel__zero_stage": zero_stage, "train__activation_checkpointing": True}
    plain = small_config(tmp_path / "plain", corpus, **options)
    scored = small_config(tmp_path / "scored", corpus, **options, evaluation__suites=suites, logging__tensorboard=True)
    assert (run(plain, ranks), run(scored, ranks)) == (0, 0)
    assert losses(scored) == losses(plain)
    assert_same_state(last_checkpoint(scored), last_checkpoint(plain))
    found = {record["step"]: record["suites"] for record in metrics(scored) if "suites" in record}
    assert list(found) == [4, 6]
    assert set(found[4]) == {"commonsense/piqa/acc", "commonsense/mean", "perplexity/text_text/byte_perplexity"}
    assert found[4]["perplexity/text_text/byte_perplexity"] > found[6]["perplexity/text_text/byte_perplexity"]

    board = EventAccumulator(str(tmp_path / "scored" / "tensorboard"))
    board.Reload()
    for name, value in found[6].items():
        assert [event.step for event in board.Scalars(name)] == [4, 6]
        assert board.Scalars(name)[1].value == pytest.approx(value)

    command = ["--model", str(tmp_path / "scored"), "--output", str(tmp_path / "out"), "--skip-unavailable"]
    command += ["--suite", ",".join(suites["names"]), "--data-dir", suites["data_dir"], "--text", suites["texts"][0]]
    assert evaluation_run.main(command) == 0
    exported = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert found[6]["commonsense/piqa/acc"] == exported["piqa"]["acc,none"]
    assert found[6]["perplexity/text_text/byte_perplexity"] == pytest.approx(
        exported["text_text"]["byte_perplexity,none"], rel=1e-6
    )
    kept = json.loads((tmp_path / "scored" / "evaluation" / "step_00000006" / "results.json").read_text())
    assert kept["results"]["piqa"] == exported["piqa"]


def test_scores_are_reported(
    tmp_path: Path, corpus: Path, suites: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(small_config(tmp_path / "run", corpus, evaluation__suites=suites)) == 0
    output = capfd.readouterr()
    lines = [line for line in output.out.splitlines() if "commonsense" in line]
    assert [line.split(" | ")[0] for line in lines] == ["step 4/6", "step 6/6"]
    assert lines[0].split(" | ")[1].startswith("commonsense/mean 0.")
    assert lines[0].split(" | ")[2].startswith("perplexity/text_text/byte_perplexity ")
    assert "%|" not in output.err, "no bars of the harness"


MOMENTS: dict[str, tuple[Any, str, int, int, list[str], str]] = {
    # whose n-th call, on which rank; the tasks finished by then, and those that the next attempt scores
    "in the first task": (Scorer, "_run", 2, 1, [], "piqa text_text piqa text_text"),
    "in the second": (OrthrosLM, "loglikelihood_rolling", 1, 0, ["piqa.json"], "text_text piqa text_text"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stop_of_one_rank(
    tmp_path: Path, corpus: Path, suites: dict[str, Any], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """All ranks save the step; the next attempt scores what was not scored, and nothing differs in the end."""
    monkeypatch.setattr(scoring, "CPU_TOKENS", 1)  # a batch for each question
    whole = small_config(tmp_path / "whole", corpus, evaluation__suites=suites)
    stopped = small_config(tmp_path / "stopped", corpus, evaluation__suites=suites)
    assert run(whole, 2) == 0

    owner, name, call, rank, finished, scored = MOMENTS[moment]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, then(send(signal.SIGTERM), getattr(owner, name), call, rank))
        assert run(stopped, 2) == STOPPED
    reason = f"SIGTERM on rank {rank}"
    assert status(stopped) == {"state": "stopped", "exit_code": 75, "step": 4, "attempt": 1, "reason": reason}
    assert "suites" not in metrics(stopped)[-1]
    tasks = tmp_path / "stopped" / "evaluation" / "step_00000004" / "tasks"
    assert sorted(path.name for path in tasks.glob("*")) == finished

    evaluate, asked = TaskRunner._evaluate, []

    def noted(self: TaskRunner, card: Any) -> Any:
        asked.append(card.name)
        (tmp_path / "asked").write_text(" ".join(asked))
        return evaluate(self, card)

    with monkeypatch.context() as patch:
        patch.setattr(TaskRunner, "_evaluate", noted)
        assert run(stopped, 2) == 0
    assert (tmp_path / "asked").read_text() == scored
    assert untimed(stopped) == untimed(whole)
    assert_same_state(last_checkpoint(stopped), last_checkpoint(whole))


def test_a_rank_hears_of_another_ones_stop_between_its_batches(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has 20 batches of its own to go when rank 1 is told to stop: it leaves most of them."""
    mirror(data_sets.PIQA, Rows([{**PIQA_ROWS[0], "goal": f"goal {i}"} for i in range(40)]), tmp_path / "mirror")
    suites = {"names": ["commonsense"], "data_dir": str(tmp_path / "mirror"), "skip_unavailable": True}
    config = small_config(tmp_path / "run", corpus, evaluation__suites=suites)
    stopping = then(send(signal.SIGTERM), Scorer._run, 1)

    def slow(self: Scorer, batch: Any) -> Any:
        with open(tmp_path / f"batches{dist.get_rank()}", "a") as file:
            file.write(".")
        time.sleep(0.1)
        return stopping(self, batch)

    monkeypatch.setattr(scoring, "CPU_TOKENS", 1)
    monkeypatch.setattr(Scorer, "_run", slow)
    assert run(config, 2) == STOPPED
    assert (tmp_path / "batches1").read_text() == "."
    assert 1 <= len((tmp_path / "batches0").read_text()) < 10


def test_a_finished_run_is_scored_when_suites_are_named_later(
    tmp_path: Path, corpus: Path, suites: dict[str, Any]
) -> None:
    plain = small_config(tmp_path / "run", corpus)
    assert run(plain) == 0
    assert run(small_config(tmp_path / "run", corpus, evaluation__suites=suites)) == 0
    assert [("suites" in record, "validation_loss" in record) for record in metrics(plain)[-2:]] == [
        (False, False), (True, True)
    ]  # fmt: skip


def test_data_out_of_reach_is_found_before_anything_is_written(
    tmp_path: Path, corpus: Path, suites: dict[str, Any]
) -> None:
    config = small_config(tmp_path / "run", corpus, evaluation__suites={**suites, "skip_unavailable": False})
    with pytest.raises(AssertionError, match=r"InputError: evaluation\.suites: task lambada_openai: the mirror"):
        run(config, 2)
    assert not (tmp_path / "run").exists()


def test_a_caller_without_a_way_to_score_is_told(tmp_path: Path, corpus: Path, suites: dict[str, Any]) -> None:
    config = small_config(tmp_path / "run", corpus, evaluation__suites=suites)
    with pytest.raises(AssertionError, match=r"InputError: evaluation\.suites\.names is set, but whoever called"):
        run_distributed(train, 1, config, ["test"], process_group=False)
