"""Pretraining samples: their order, their segments, their splits, and what must not change them."""

from __future__ import annotations

import hashlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orthros_train.config import Config, DataSource
from orthros_train.data import (
    PretrainingData,
    Sample,
    SplitTooSmallError,
    batch_indices,
    collate,
    rank_micro_batches,
)
from orthros_train.data.pretraining import split_documents
from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.errors import InputError
from tests.data.conftest import MakeConfig, MakeCorpus
from tests.distributed import run_distributed

T = 16
EOD = ByteTokenizer.eod_id


def random_texts(count: int, seed: int) -> list[str]:
    """Documents of 1 to 40 letters."""
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh", k=rng.randint(1, 40))) for _ in range(count)]


@pytest.fixture
def corpora(make_corpus: MakeCorpus) -> list[tuple[Path, float]]:
    return [(make_corpus("a", random_texts(60, 1)), 0.7), (make_corpus("b", random_texts(40, 2)), 0.3)]


@pytest.fixture
def config(corpora: list[tuple[Path, float]], make_config: MakeConfig) -> Config:
    return make_config(corpora, data__split=(0.8, 0.1, 0.1))


def open_split(config: Config, split: Any = "train") -> PretrainingData:
    return PretrainingData(config, ByteTokenizer(), split)


def rows_of(data: PretrainingData, count: int) -> list[list[int]]:
    return [data.sample(index).input_ids.tolist() for index in range(count)]


# ---- order


def test_every_epoch_of_a_source_visits_each_row_once_in_an_order_of_its_own(config: Config) -> None:
    data = open_split(config)
    ids = [data.sample_id(index) for index in range(5 * sum(data.epoch_sizes))]
    for source, size in enumerate(data.epoch_sizes):
        of_source = [(epoch, row) for s, epoch, row in ids if s == source]
        assert [epoch for epoch, _ in of_source[: 3 * size]] == [0] * size + [1] * size + [2] * size
        orders = [[row for _, row in of_source[e * size : (e + 1) * size]] for e in range(3)]
        assert all(sorted(order) == list(range(size)) for order in orders)
        assert len({tuple(order) for order in orders}) == 3


def test_the_blend_is_exact_at_any_length(config: Config) -> None:
    data = open_split(config)
    sources = [data.sample_id(index)[0] for index in range(200)]
    for count in range(1, 201):
        assert abs(sources[:count].count(0) - 0.7 * count) < 1


def test_the_order_is_pinned(config: Config) -> None:
    """A change here changes every resumed run: if it is meant, raise _ORDER_VERSION, so that the fingerprint tells."""
    data = open_split(config)
    assert [data.sample_id(index) for index in range(6)] == PINNED_IDS
    rows = np.array(rows_of(data, 50), dtype="<i8")
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == PINNED_ROWS


PINNED_IDS = [(0, 0, 16), (0, 0, 10), (1, 0, 20), (0, 0, 57), (0, 0, 38), (1, 0, 17)]
PINNED_ROWS = "169f6426f559de54"


def test_the_order_depends_on_neither_steps_nor_layout(
    corpora: list[tuple[Path, float]], make_config: MakeConfig
) -> None:
    batch, steps = 8, 40  # several epochs
    size = {"train__global_batch_size": batch}
    reference = open_split(make_config(corpora, train__steps=steps, **size))
    ids = [reference.sample_id(index) for index in range(steps * batch)]
    assert max(epoch for _, epoch, _ in ids) >= 2
    for total, micro, world in ((10 * steps, 1, 1), (steps, 4, 2), (7, 2, 4), (7, 1, 8)):
        data = open_split(make_config(corpora, train__steps=total, train__micro_batch_size=micro, **size))
        assert data.fingerprint == reference.fingerprint
        for step in range(steps):
            ranks = [rank_micro_batches(step, batch, micro, rank, world) for rank in range(world)]
            passes = itertools.chain.from_iterable(zip(*ranks, strict=True))  # ranks side by side, pass after pass
            taken = [data.sample_id(index) for micro_batch in passes for index in micro_batch]
            assert taken == [ids[index] for index in batch_indices(step, batch)]


def test_a_later_start_sees_the_same_samples(config: Config) -> None:
    first = rows_of(open_split(config), 60)
    resumed = open_split(config)
    assert [resumed.sample(index).input_ids.tolist() for index in range(37, 60)] == first[37:]


def test_the_seed_changes_rows_and_order(config: Config) -> None:
    other = config.model_copy(deep=True)
    other.train.seed = config.train.seed + 1
    assert rows_of(open_split(config), 20) != rows_of(open_split(other), 20)
    assert open_split(config).fingerprint != open_split(other).fingerprint


def test_threads_see_the_same_samples(config: Config) -> None:
    data = open_split(config)
    expected = rows_of(data, 300)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda index: data.sample(index).input_ids.tolist(), range(300))) == expected


def samples_on_rank(config: Config, folder: Path) -> tuple[str, list[list[int]]]:
    config.data.cache_dir = str(folder / f"host{dist.get_rank()}")
    data = open_split(config)
    return data.fingerprint, rows_of(data, 50)


def test_hosts_with_their_own_cache_folders_see_the_same_samples(config: Config, tmp_path: Path) -> None:
    open_split(config)  # warm: megatron-core is imported before the ranks fork
    first, second = run_distributed(samples_on_rank, 2, config, tmp_path)
    assert first == second
    assert {path.name for path in tmp_path.glob("host*")} == {"host0", "host1"}


def test_a_changed_corpus_is_not_read_through_an_old_index(make_corpus: MakeCorpus, make_config: MakeConfig) -> None:
    for seed in (1, 2):
        prefix = make_corpus(f"c{seed}", random_texts(20, seed))
    config = make_config([(prefix, 1.0)], data__split=(1.0, 0.0, 0.0), data__cache_dir=str(prefix.parent / "cache"))
    open_split(config)
    for suffix in (".bin", ".idx", ".manifest.json"):
        (prefix.parent / f"c1{suffix}").replace(prefix.parent / f"c2{suffix}")
    moved = rows_of(open_split(config), 20)
    config.data.cache_dir = str(prefix.parent / "fresh")
    assert rows_of(open_split(config), 20) == moved


# ---- contents


def test_an_epoch_is_the_documents_joined_and_cut(config: Config, corpora: list[tuple[Path, float]]) -> None:
    config.data.train = config.data.train[:1]
    data = open_split(config)
    size = data.epoch_sizes[0]
    by_row = {data.sample_id(index)[2]: data.sample(index) for index in range(size)}
    stream = [token for row in range(size) for token in by_row[row].input_ids.tolist()]
    cut: list[list[int]] = [[]]
    for token in stream:
        cut[-1].append(token)
        if token == EOD:
            cut.append([])
    expected = [[*text.encode(), EOD] for text in random_texts(60, 1)[:48]]  # 80% of 60
    assert len(cut[:-1]) >= 46  # all but what the last partial row held
    remaining = [document for document in expected if document not in cut[:-1]]
    assert all(document in expected for document in cut[:-1])
    assert sum(map(len, remaining)) - len(cut[-1]) < T + 1


def test_labels_and_segments(config: Config) -> None:
    data = open_split(config)
    for index in range(sum(data.epoch_sizes)):
        sample = data.sample(index)
        assert sample.input_ids.shape == sample.shift_labels.shape == (T,)
        assert sample.document_ids is not None
        ends = sample.input_ids == EOD
        assert (sample.shift_labels[ends] == -100).all()
        inner = ~ends[:-1]
        assert (sample.shift_labels[:-1][inner] == sample.input_ids[1:][inner]).all()
        assert np.diff(sample.document_ids).tolist() == ends[:-1].astype(int).tolist()


def test_without_a_document_mask_a_row_is_one_segment(config: Config) -> None:
    masked = open_split(config)
    config.data.document_mask = False
    data = open_split(config)
    assert data.fingerprint != masked.fingerprint
    for index in range(50):
        sample = data.sample(index)
        assert sample.document_ids is None
        assert sample.input_ids.tolist() == masked.sample(index).input_ids.tolist()
        assert sample.shift_labels[:-1].tolist() == sample.input_ids[1:].tolist()
        assert sample.shift_labels[-1] >= 0


def test_collate_stacks(config: Config) -> None:
    data = open_split(config)
    batch = collate([data.sample(0), data.sample(1)])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (2, T),
        "shift_labels": (2, T),
        "document_ids": (2, T),
    }
    assert batch["input_ids"][1].tolist() == data.sample(1).input_ids.tolist()
    plain = Sample(np.zeros(T, np.int64), np.zeros(T, np.int64), None)
    assert set(collate([plain])) == {"input_ids", "shift_labels"}


@pytest.mark.parametrize("output_slots", [None, 40])
def test_collate_fills_in_the_segment_of_a_row_without_a_document_mask(
    config: Config, output_slots: int | None
) -> None:
    """Conversations beside text with data.document_mask off: a row without ids is one segment."""
    masked_data = open_split(config)
    masked = next(s for s in map(masked_data.sample, range(50)) if np.ptp(s.document_ids) > 0)
    config.data.document_mask = False
    plain = open_split(config).sample(1)
    assert masked.document_ids is not None
    for samples in ([masked, plain], [plain, masked, plain]):
        batch = collate(samples, output_slots)
        expected = [[0] * len(plain.input_ids) if s is plain else masked.document_ids.tolist() for s in samples]
        assert batch["document_ids"].tolist() == expected
        assert batch["document_ids"].dtype == torch.int64


def test_collate_leaves_ids_out_where_every_row_is_one_segment(config: Config) -> None:
    """The model then knows that positions are consecutive, without a look at a tensor."""
    data = open_split(config)
    samples = [data.sample(index) for index in range(sum(data.epoch_sizes))]
    whole = [sample for sample in samples if np.ptp(sample.document_ids) == 0]
    packed = next(sample for sample in samples if np.ptp(sample.document_ids) > 0)
    assert len(whole) > 1
    assert "document_ids" not in collate(whole[:2])
    assert "document_ids" in collate([whole[0], packed])


# ---- splits


@pytest.mark.parametrize("documents", [1, 2, 7, 50, 99, 1000, 123_457])
@pytest.mark.parametrize("shares", [(0.98, 0.01, 0.01), (0.9, 0.1, 0.0), (1.0, 0.0, 0.0), (0.5, 0.25, 0.25)])
def test_splits_are_megatron_cores(documents: int, shares: tuple[float, float, float]) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (  # noqa: PLC0415
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(",".join(map(str, shares))))
    for split, ends in zip(("train", "validation", "test"), matrix, strict=True):
        found = split_documents(documents, shares, split)  # type: ignore[arg-type]
        expected = range(0) if ends is None else range(*(round(end * float(documents)) for end in ends))
        assert (len(found) == len(expected) == 0) or found == expected


def documents_seen(data: PretrainingData) -> set[int]:
    return {int(document) for rows in data._rows for document in rows.document_index}


def test_splits_share_no_document(config: Config) -> None:
    config.data.train = config.data.train[:1]
    train, validation, test = (documents_seen(open_split(config, split)) for split in ("train", "validation", "test"))
    assert (len(train), len(validation), len(test)) == (48, 6, 6)
    assert train | validation | test == set(range(60))


def test_named_validation_sources_are_used_whole_and_training_keeps_its_share(
    config: Config, make_corpus: MakeCorpus
) -> None:
    config.data.train = config.data.train[:1]
    config.data.validation = [config.data.train[0].model_copy(update={"prefix": str(make_corpus("v", ["x" * 99] * 3))})]
    assert len(documents_seen(open_split(config, "train"))) == 54
    assert len(documents_seen(open_split(config, "test"))) == 6
    validation = open_split(config, "validation")
    assert len(documents_seen(validation)) == 3
    assert set(np.concatenate(rows_of(validation, 5)).tolist()) <= {ord("x"), EOD}


# ---- bad input


def test_no_source(make_config: MakeConfig) -> None:
    with pytest.raises(InputError, match=r"data.train names no source"):
        open_split(make_config([]))


def test_validation_on_a_training_source_is_refused(config: Config, tmp_path: Path) -> None:
    config.data.validation = [config.data.train[1]]
    with pytest.raises(InputError, match=r"data.validation names .*, which data.train trains on"):
        open_split(config, "validation")
    linked = tmp_path / "linked"
    for suffix in (".bin", ".idx", ".manifest.json"):
        Path(f"{linked}{suffix}").symlink_to(Path(f"{config.data.train[1].prefix}{suffix}").resolve())
    config.data.validation = [DataSource(prefix=str(linked))]
    with pytest.raises(InputError, match=r"data.validation names .*linked, which data.train trains on"):
        open_split(config, "validation")
    config.data.validation = []
    with pytest.raises(InputError, match=r"data.validation is empty"):
        open_split(config, "validation")


def test_too_few_tokens_for_one_sample(config: Config) -> None:
    config.train.sequence_length = 300
    with pytest.raises(
        SplitTooSmallError, match=r"validation split of .*/a has 6 of 60 documents and \d+ tokens, .* 301"
    ):
        open_split(config, "validation")


def test_exactly_one_sample_is_enough(make_corpus: MakeCorpus, make_config: MakeConfig) -> None:
    prefix = make_corpus("one", ["x" * T])
    data = open_split(make_config([(prefix, 1.0)]))
    assert data.epoch_sizes == (1,)
    assert data.sample_id(3) == (0, 3, 0)
    with pytest.raises(SplitTooSmallError, match="has 0 of 1 documents"):
        open_split(make_config([(prefix, 1.0)]), "validation")


def test_a_model_vocabulary_below_the_ids_is_refused(config: Config) -> None:
    config.model.vocab_size = 200
    with pytest.raises(InputError, match="holds token id 257, outside the model's vocabulary of 200"):
        open_split(config)


def test_a_negative_index_is_an_error(config: Config) -> None:
    with pytest.raises(IndexError):
        open_split(config).sample(-1)
