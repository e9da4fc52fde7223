"""The likelihood of an exported model is training's validation loss: sum over labels divided by labels."""

from __future__ import annotations

import pytest
import torch

from evaluation.likelihood import mean_nll, nll_by_position
from orthros_train.data import PretrainingData
from orthros_train.data.tokenizers import ByteTokenizer
from tests.model.tiny import tiny_model
from tests.training.small_runs import small_config, write_corpus


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PretrainingData:
    folder = tmp_path_factory.mktemp("data")
    corpus = write_corpus(folder, [f"document {n} " + "abc" * (n % 7) for n in range(200)])
    return PretrainingData(small_config(folder / "run", corpus), ByteTokenizer(), "train")


def test_it_is_the_token_weighted_mean_whatever_the_batch_size(data: PretrainingData) -> None:
    model = tiny_model(vocab_size=ByteTokenizer.vocab_size)
    total, labels = 0.0, 0
    for index in range(7):  # one segment at a time: no packing, no batch
        sample = data.sample(index)
        assert sample.document_ids is not None
        for document in set(sample.document_ids.tolist()):
            inside = sample.document_ids == document
            ids, wanted = torch.from_numpy(sample.input_ids[inside]), torch.from_numpy(sample.shift_labels[inside])
            with torch.no_grad():
                scores = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
            kept = wanted != -100
            total -= float(scores[kept].gather(1, wanted[kept, None]).sum())
            labels += int(kept.sum())
    for batch_size in (1, 3, 16):
        nll, count = mean_nll(model, data, samples=7, batch_size=batch_size)
        assert count == labels < 7 * 32
        assert nll == pytest.approx(total / labels, abs=1e-9)


def test_by_position_it_is_each_rows_own(data: PretrainingData) -> None:
    model = tiny_model(vocab_size=ByteTokenizer.vocab_size)
    rows = torch.randint(256, (3, 21), generator=torch.Generator().manual_seed(0))
    found = nll_by_position(model, rows)
    assert found.shape == (3, 20)
    for row, nll in zip(rows, found, strict=True):
        for position in (0, 7, 19):
            with torch.no_grad():
                scores = model(row[None, : position + 1], use_cache=False).logits[0, -1].float().log_softmax(-1)
            assert float(nll[position]) == pytest.approx(-float(scores[row[position + 1]]), abs=1e-5)
