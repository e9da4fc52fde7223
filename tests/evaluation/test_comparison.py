"""The comparison of arms is fair, and is refused where it would not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.demo import comparison
from evaluation.demo.steps import StepError
from orthros_train.config import Config, orthros_config
from orthros_train.data import PretrainingData, batch_indices
from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.model import OrthrosForCausalLM
from orthros_train.model.flops import training_flops
from tests.training.small_runs import small_config, write_corpus

TRANSFORMER = {"model__architecture": "transformer", "model__base_window": None}
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write_corpus(folder, [f"document {n} " + "xyz" * (n % 9) for n in range(300)])


def arms(corpus: Path, **options: Any) -> tuple[Config, Config]:
    folder = corpus.parent / "run"
    return small_config(folder, corpus, **TRANSFORMER, **options), small_config(folder, corpus, **options)


def test_the_arms_share_their_start_and_their_samples(corpus: Path) -> None:
    transformer, orthros = arms(corpus)
    found = comparison.shared_start(transformer, orthros, TOKENIZER)
    assert found["weights"] == 2 * 9 + 3
    affines = 3 * 2 * 32  # gain and shift of output_query in both layers, of base_query in the first
    assert found["parameters"]["orthros"] - found["parameters"]["transformer"] == affines
    assert comparison.shared_samples(transformer, orthros, TOKENIZER) == 6 * 8


def test_another_start_or_other_samples_are_refused(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, orthros = arms(corpus)
    other_seed = arms(corpus, train__seed=1)[1]
    with pytest.raises(StepError, match="same weights"):
        comparison.shared_start(transformer, other_seed, TOKENIZER)
    with pytest.raises(StepError, match="same data"):
        comparison.shared_samples(transformer, other_seed, TOKENIZER)

    def unseeded(self: OrthrosForCausalLM, seed: int) -> None:
        with torch.no_grad():
            self.lm_head.weight.normal_()

    monkeypatch.setattr(OrthrosForCausalLM, "reset_parameters", unseeded)
    with pytest.raises(StepError, match="differs"):
        comparison.shared_start(transformer, orthros, TOKENIZER)


def test_flops_are_those_of_the_very_samples(corpus: Path) -> None:
    _, orthros = arms(corpus)
    data = PretrainingData(orthros, TOKENIZER, "train")
    model = orthros_config(orthros, TOKENIZER.vocab_size)
    expected = []
    for step in range(2):
        total = 0
        for index in batch_indices(step, orthros.train.global_batch_size):
            documents = data.sample(index).document_ids
            assert documents is not None
            lengths = [int((documents == document).sum()) for document in sorted(set(documents.tolist()))]
            total += training_flops(model, lengths).total
        expected.append(total)
    assert comparison.training_flops_per_step(orthros, TOKENIZER, 2) == expected
    assert expected[0] != expected[1]  # documents end in other places


def test_equal_flops_is_the_shortest_run_that_costs_as_much(corpus: Path) -> None:
    transformer, orthros = arms(corpus)
    wanted = sum(comparison.training_flops_per_step(orthros, TOKENIZER, 6))
    spent = comparison.steps_for_flops(transformer, TOKENIZER, wanted)
    assert sum(spent[:-1]) < wanted <= sum(spent)
    assert len(spent) > 6
    assert spent[:6] == comparison.training_flops_per_step(transformer, TOKENIZER, 6)
