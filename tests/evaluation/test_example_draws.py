"""Few-shot examples do not depend on the number of ranks, and are those of the harness on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.example_draws import draw_as_one_rank
from evaluation.lm_eval_model import OrthrosLM
from evaluation.suites.harness_tasks import GSM8K, LAMBADA
from evaluation.suites.perplexity import WIKITEXT
from evaluation.suites.task_card import TaskCard, TaskSetting
from evaluation.task_runs import TaskRunner
from tests.distributed import run_distributed
from tests.evaluation.test_data_sources import Rows
from tests.evaluation.tiny_models import save_orthros

ROWS = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(40)]


def contexts(rank: int, world_size: int, limit: int = 11) -> dict[int, str]:
    """The prompt of each document that a rank answers for."""
    task = GSM8K.build(TaskSetting(Rows(ROWS), tokenizer=None, limit=limit))  # type: ignore[arg-type]
    task.set_fewshot_seed(7)
    draw_as_one_rank(task, rank, world_size)
    task.build_all_requests(limit=limit, rank=rank, world_size=world_size)
    return {instance.doc_id: instance.args[0] for instance in task.instances}


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_every_document_has_the_same_examples_on_any_number_of_ranks(world_size: int) -> None:
    alone = contexts(0, 1)
    assert len({context.rsplit("Question:", 1)[0] for context in alone.values()}) == len(alone) == 11
    together: dict[int, str] = {}
    for rank in range(world_size):
        together |= contexts(rank, world_size)
    assert together == alone


def test_a_run_of_two_ranks_asks_what_a_run_of_one_does(tmp_path: Path) -> None:
    """Three documents on two ranks, too: the request that the harness repeats is truncated once."""
    model = save_orthros(tmp_path / "model", max_position_embeddings=300)
    found = {1: tmp_path / "one", 2: tmp_path / "two"}

    def work(folder: Path) -> dict[str, Any]:
        torch.set_num_threads(1)
        lm = OrthrosLM(str(model), batch_size=4, dtype="fp32")
        setting = TaskSetting(Rows(ROWS), lm.tokenizer, limit=3)
        return TaskRunner(lm, folder, setting, samples=True).run(GSM8K)

    records = {ranks: run_distributed(work, ranks, folder)[0] for ranks, folder in found.items()}
    asked = {}
    for ranks, folder in found.items():
        lines = [json.loads(line) for line in (folder / "samples" / "gsm8k.jsonl").read_text().splitlines()]
        asked[ranks] = [{key: line[key] for key in ("doc_id", "filter", "arguments", "exact_match")} for line in lines]
        assert [len(answers) for line in lines for answers in line["resps"]] == [1] * 6
    assert asked[1] == asked[2]
    filters = ("strict-match", "flexible-extract")
    assert [(line["filter"], line["doc_id"]) for line in lines] == [(name, n) for name in filters for n in range(3)]
    assert all(line["metrics"] == ["exact_match"] and line["exact_match"] in (0.0, 1.0) for line in lines)
    assert records[1]["truncated"] == records[2]["truncated"] == 3
    assert records[1]["results"] == records[2]["results"]


@pytest.mark.parametrize("card", [WIKITEXT, LAMBADA], ids=lambda card: card.name)
def test_errors_by_resampling_do_not_depend_on_the_number_of_ranks(card: TaskCard, tmp_path: Path) -> None:
    """Ours, of ratios, and lm-eval's."""
    model = save_orthros(tmp_path / "model")
    texts = [" = Title = \n\n " + "the cat sat on it " * n + "\n" for n in range(1, 8)]
    rows = Rows([{"page": text, "text": text.strip()} for text in texts])

    def work(folder: str) -> dict[str, Any]:
        torch.set_num_threads(1)
        lm = OrthrosLM(str(model), batch_size=1, dtype="fp64")
        return TaskRunner(lm, tmp_path / folder, TaskSetting(rows, lm.tokenizer)).run(card)

    one, two = (run_distributed(work, ranks, str(ranks))[0] for ranks in (1, 2))
    numbers = [{k: v for k, v in each["results"].items() if isinstance(v, int | float)} for each in (one, two)]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-9)  # other batches round otherwise
    errors = {name: value for name, value in one["results"].items() if "_stderr" in name}
    assert errors
    assert all(value > 0 for name, value in errors.items() if "perplexity" in name or "bits" in name)
