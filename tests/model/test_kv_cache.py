"""Prefill and decoding against the full forward (invariants 3 and 12), and what `generate` does to a cache."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from orthros_train.model import KVCache
from orthros_train.model.kv_cache import GRANULE, ROOM_TO_DECODE
from tests.model.tiny import assert_close, tiny_config, tiny_model, token_ids

ARMS = [
    {"architecture": "orthros", "base_sinks": 0},
    {"architecture": "orthros", "base_sinks": 1},
    {"architecture": "orthros", "base_sinks": 4},
    {"architecture": "orthros", "qk_norm": True, "attention_bias": True, "tie_word_embeddings": True},
    {"architecture": "transformer", "base_sinks": 1},
    {"architecture": "transformer", "base_window": None},
]
arms = pytest.mark.parametrize("arm", ARMS, ids=lambda arm: "-".join(str(value) for value in arm.values()))


@torch.no_grad()
def check_decoding(model, lengths, steps, chunk_size, bound=1e-9):
    """Ragged prefill, then decoding with given tokens; every logit against the full forward of the row alone."""
    B, T = len(lengths), max(lengths)
    prompts, continuation = token_ids(B, T), token_ids(B, steps, seed=1)
    full = [
        model(torch.cat((prompts[b, :length], continuation[b]))[None]).logits[0] for b, length in enumerate(lengths)
    ]
    uniform = len(set(lengths)) == 1
    logits, cache = model.prefill(prompts, None if uniform else torch.tensor(lengths), chunk_size)
    for step in range(steps + 1):
        assert cache.lengths.tolist() == [length + step for length in lengths]
        for layer in range(model.config.num_hidden_layers):
            assert cache.keys(layer).shape[2] == cache.values(layer).shape[2] == T + step
        for b, length in enumerate(lengths):
            assert_close(logits[b], full[b][length - 1 + step], bound)
        if step < steps:
            logits = model.decode(continuation[:, step], cache)
    return cache


@arms
@pytest.mark.parametrize("chunk_size", [None, 1, 3, 5, 64])
@pytest.mark.parametrize("lengths", [[1], [4], [5], [6], [17], [17, 17], [1, 6, 17]])
def test_prefill_and_decode_equal_the_full_forward(arm, chunk_size, lengths):
    """Lengths 1, w-1, w, w+1, 3w+2 and ragged batches at w = 5, decoded past the window."""
    check_decoding(tiny_model(**arm), lengths, steps=7, chunk_size=chunk_size)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    window=st.integers(1, 12),
    sinks=st.integers(0, 5),
    chunk_size=st.one_of(st.none(), st.integers(1, 41)),
    steps=st.integers(0, 5),
)
def test_any_ragged_batch_decodes_like_its_rows(lengths, window, sinks, chunk_size, steps):
    check_decoding(tiny_model(base_window=window, base_sinks=sinks), lengths, steps, chunk_size)


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_decoding_with_scaled_rope(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope_type == "linear":
        del rope["original_max_position_embeddings"]
    check_decoding(tiny_model(rope_parameters=rope), [3, 30], steps=4, chunk_size=7)


def test_single_precision_stays_within_its_bound():
    check_decoding(tiny_model(torch.float32, initializer_range=0.05), [1, 6, 40], steps=8, chunk_size=7, bound=1e-5)


@torch.no_grad()
def test_history_is_kept_whole_in_every_layer():
    """What was written stays, bit for bit, long past the window."""
    model = tiny_model(base_window=3)
    _, cache = model.prefill(token_ids(2, 11))
    before = [cache.keys(layer).clone() for layer in range(3)]
    for step in range(300):  # past the room that the prefill left
        model.decode(token_ids(2, 1, seed=step)[:, 0], cache)
    for layer in range(3):
        assert torch.equal(cache.keys(layer)[:, :, :11], before[layer])
        assert cache.keys(layer).shape == (2, 2, 311, 8)


@torch.no_grad()
def test_several_tokens_after_a_cache_equal_the_full_forward():
    """A continuation scored in one call on a reused context."""
    model = tiny_model()
    ids = token_ids(2, 30)
    full = model(ids).logits
    _, cache = model.prefill(ids[:, :12])
    some = model(ids[:, 12:], cache=cache, output_positions=torch.tensor([[0, 5, 17], [2, 3, 4]])).logits
    assert_close(some[0], full[0, [12, 17, 29]])
    assert_close(some[1], full[1, [14, 15, 16]])
    assert cache.get_seq_length() == 30


@torch.no_grad()
def test_a_cache_can_be_cropped_and_continued():
    model = tiny_model()
    ids = token_ids(2, 20)
    _, cache = model.prefill(ids)
    cache.crop(-8)
    assert (cache.lengths.tolist(), cache.get_seq_length(), cache.keys(0).shape[2]) == ([12, 12], 12, 12)
    assert_close(model(ids[:, 12:], cache=cache).logits, model(ids).logits[:, 12:])
    _, ragged = model.prefill(ids, torch.tensor([20, 7]))
    ragged.crop(-3)
    logits = model.decode(ids[:, 0], ragged)
    for row, length in ((0, 17), (1, 4)):
        alone = torch.cat((ids[row, :length], ids[row, :1]))[None]
        assert_close(logits[row], model(alone).logits[0, -1])
    with pytest.raises(ValueError, match="minus"):
        ragged.crop(3)


@torch.no_grad()
def test_rows_can_be_reordered_and_repeated():
    model = tiny_model()
    ids, lengths = token_ids(3, 9), torch.tensor([9, 2, 5])
    _, cache = model.prefill(ids, lengths)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.batch_repeat_interleave(2)
    assert cache.lengths.tolist() == [5, 5, 5, 5, 9, 9]
    assert cache.batch_size == 6
    logits = model.decode(token_ids(6, 1)[:, 0], cache)
    for row, source in enumerate([2, 2, 2, 2, 0, 0]):
        alone = torch.cat((ids[source, : lengths[source]], token_ids(6, 1)[row]))[None]
        assert_close(logits[row], model(alone).logits[0, -1])


@torch.no_grad()
def test_a_failed_forward_leaves_the_cache_as_it_was():
    model = tiny_model()
    ids = token_ids(2, 9)
    _, cache = model.prefill(ids[:, :6])
    broken = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.decode(ids[:, 6], cache)
    broken.remove()
    assert_close(model.decode(ids[:, 6], cache), model(ids[:, :7]).logits[:, -1])


@pytest.mark.parametrize("lengths", [None, torch.tensor([16, 11])], ids=["equal", "ragged"])
@torch.no_grad()
def test_a_prefill_that_fails_in_a_chunk_leaves_the_cache_as_it_was(lengths):
    """Running out of memory, one tries again with smaller chunks."""
    model, prefix, text = tiny_model(), token_ids(2, 4), token_ids(2, 16, seed=1)
    _, cache = model.prefill(prefix)
    calls = iter([True, True, False])

    def third_fails(*_):
        assert next(calls)

    broken = model.model.layers[1].register_forward_pre_hook(third_fails)
    with pytest.raises(AssertionError):
        model.prefill(text, lengths, 4, cache=cache)
    broken.remove()
    assert (cache.lengths.tolist(), cache.get_seq_length(), cache.uniform_length) == ([4, 4], 4, 4)
    logits, _ = model.prefill(text, lengths, 2, cache=cache)
    for row, length in enumerate([16, 16] if lengths is None else lengths.tolist()):
        assert_close(logits[row], model(torch.cat((prefix[row], text[row, :length]))[None]).logits[0, -1])


@torch.no_grad()
def test_a_first_call_that_fails_ties_the_cache_to_nothing():
    model, cache = tiny_model(), KVCache(tiny_config())
    broken = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    for call in (model.prefill, model):
        with pytest.raises(ZeroDivisionError):
            call(token_ids(4, 6), cache=cache)
    broken.remove()
    assert (cache.lengths, cache.batch_size) == (None, -1)
    ids = token_ids(2, 9)
    assert_close(model.prefill(ids, cache=cache)[0], model(ids).logits[:, -1])


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@arms
@torch.no_grad()
def test_a_batch_of_padding_alone_stores_nothing_and_is_finite(arm, kernel):
    model = tiny_model(attention_kernel=kernel, **arm)
    ids, cache = token_ids(2, 6), KVCache(model.config)
    logits = model(ids, attention_mask=torch.zeros(2, 6), cache=cache).logits
    assert logits.isfinite().all()
    assert (cache.lengths.tolist(), cache.keys(0).shape[2], cache.get_seq_length()) == ([0, 0], 0, 6)
    assert_close(model(ids, cache=cache).logits, model(ids).logits)


@torch.no_grad()
def test_storage_dtype_is_an_option():
    model = tiny_model(torch.float32)
    cache = KVCache(model.config, dtype=torch.bfloat16)
    ids = token_ids(1, 9)
    logits = model(ids, cache=cache).logits
    assert cache.keys(0).dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, model(ids).logits)


def places(cache):
    return [part.data_ptr() for layer in cache.layers for part in (layer.keys, layer.values)]


@torch.no_grad()
@pytest.mark.parametrize("lengths", [None, [700, 650]])
@pytest.mark.parametrize("capacity", [None, 700 + 200])
@pytest.mark.parametrize("chunk_size", [None, 64])
def test_decoding_after_a_prefill_copies_nothing(lengths, capacity, chunk_size):
    """Asked for or not, there is room for a generation of ordinary length; a prefill in chunks takes it at once."""
    model = tiny_model()
    lengths = None if lengths is None else torch.tensor(lengths)
    logits, cache = model.prefill(token_ids(2, 700), lengths, chunk_size, capacity)
    before, allocated = places(cache), cache.layers[0].keys.shape[2]
    assert allocated <= 700 + ROOM_TO_DECODE + GRANULE
    for _ in range(200):
        logits = model.decode(logits.argmax(-1), cache)
    assert places(cache) == before
    assert cache.layers[0].keys.shape[2] == allocated


@torch.no_grad()
def test_decoding_after_a_forward_copies_nothing():
    model = tiny_model()
    cache = model(token_ids(1, 64), use_cache=True).cache
    before = places(cache)
    for step in range(100):
        model.decode(token_ids(1, 1, seed=step)[:, 0], cache)
    assert places(cache) == before


@torch.no_grad()
@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize(("columns", "calls"), [(64, 128), (1, 3000), (200, 500)])
def test_storage_grows_by_little_and_seldom(columns, calls, reserved):
    """At every moment at most an eighth and some room is empty, and copies add up to eight times what is stored."""
    cache = KVCache(tiny_config())
    new, sizes = torch.ones(1, 2, columns, 8), set()
    for call in range(1, calls + 1):
        if reserved:  # as turns of a conversation do
            cache.reserve(columns)
        cache.begin(1, columns, None, new.device)
        for layer in range(3):
            cache.update(new, new, layer)
        cache.commit()
        size = cache.layers[0].keys.shape[2]
        assert columns * call <= size <= columns * call * 9 / 8 + ROOM_TO_DECODE + GRANULE
        sizes.add(size)
    assert sum(sizes) - max(sizes) < 8 * columns * calls


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["orthros", "transformer"])
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_prefill_continues_a_cache(architecture, chunk_size, ragged):
    """A long text behind a prefix, in chunks, with the storage taken once; rows of the prefix and of the text may
    differ in length."""
    model, ids = tiny_model(architecture=architecture), token_ids(2, 40)
    before, after = ([13, 9], [27, 20]) if ragged else ([13, 13], [27, 27])
    sizes = [None, None] if not ragged else [torch.tensor(before), torch.tensor(after)]
    _, cache = model.prefill(ids[:, :13], sizes[0])
    grown = []
    for layer in cache.layers:
        layer.grow = lambda capacity, layer=layer: (grown.append(capacity), type(layer).grow(layer, capacity))
    logits, same = model.prefill(ids[:, 13:], sizes[1], chunk_size, cache=cache)
    assert same is cache
    assert cache.lengths.tolist() == [a + b for a, b in zip(before, after, strict=True)]
    for row in range(2):
        alone = torch.cat((ids[row, : before[row]], ids[row, 13 : 13 + after[row]]))[None]
        assert_close(logits[row], model(alone, use_cache=False).logits[0, -1])
    assert grown == []
    model.prefill(token_ids(2, 2000, seed=1), None, 100, cache=cache)
    assert len(grown) == 3  # each layer once, for all twenty chunks


def test_a_prefill_takes_one_statement_of_the_capacity():
    model = tiny_model()
    with pytest.raises(TypeError, match="reads and writes a KVCache, not a DynamicCache"):
        model.prefill(token_ids(1, 3), cache=DynamicCache())
    with pytest.raises(ValueError, match="capacity is that of a new cache"):
        model.prefill(token_ids(1, 3), capacity=9, cache=KVCache(model.config))


@torch.no_grad()
def test_a_ragged_write_after_the_longest_row_is_gone_reads_no_further_than_it_must():
    model = tiny_model()
    ids, lengths = token_ids(2, 9), torch.tensor([9, 3])
    _, cache = model.prefill(ids, lengths)
    cache.batch_select_indices(torch.tensor([1]))
    mask = torch.tensor([[1, 0]])
    logits = model(ids[:1, :2], attention_mask=torch.cat((torch.ones(1, 9), mask), dim=1), cache=cache).logits[0, 0]
    assert_close(logits, model(torch.cat((ids[1, :3], ids[0, :1]))[None]).logits[0, -1])
    assert (cache.lengths.tolist(), cache.keys(0).shape[2]) == ([4], 4)


def test_writes_outside_a_forward_and_wrong_rows_are_refused():
    model = tiny_model()
    _, cache = model.prefill(token_ids(2, 3))
    with pytest.raises(RuntimeError, match="between begin and commit"):
        cache.update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 0)
    with pytest.raises(ValueError, match="2 rows but the input has 3"), torch.no_grad():
        model(token_ids(3, 1), cache=cache)
    with pytest.raises(ValueError, match="at least one"):
        model.prefill(token_ids(2, 3), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="chunk_size=0"):
        model.prefill(token_ids(2, 3), chunk_size=0)


@torch.no_grad()
def test_prefill_runs_in_chunks_of_its_own_on_a_cpu(monkeypatch):
    """Six tokens at a time, whatever the number of rows; as many as the rows where those are more."""
    monkeypatch.setattr("orthros_train.model.modeling_orthros.CPU_CHUNK_TOKENS", 6)
    model, columns = tiny_model(), []
    model.model.register_forward_pre_hook(lambda module, arguments: columns.append(arguments[0].shape[1]))
    for rows, expected in ((1, [6, 6, 5]), (2, [3, 3, 3, 3, 3, 2]), (7, [1] * 17)):
        ids = token_ids(rows, 17)
        assert_close(model.prefill(ids)[0], model(ids, use_cache=False).logits[:, -1])
        assert columns[:-1] == expected
        columns.clear()


@torch.no_grad()
@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ({}, [4, 4, 2]),
        ({"architecture": "transformer", "base_window": 5}, [4, 4, 2]),
        ({"architecture": "transformer", "base_window": None}, [10]),
    ],
)
def test_prefill_runs_in_larger_chunks_on_other_devices(arm, expected, monkeypatch):
    """Bounded there, too, unless a chunk behind a cache would leave the causal kernel; a size that is named counts."""
    monkeypatch.setattr("orthros_train.model.modeling_orthros.DEVICE_CHUNK_TOKENS", 8)
    model, columns = tiny_model(**arm), []
    choose = model._chunk_columns
    monkeypatch.setattr(model, "_chunk_columns", lambda B, T, device: choose(B, T, torch.device("cuda")))
    model.model.register_forward_pre_hook(lambda module, arguments: columns.append(arguments[0].shape[1]))
    model.prefill(token_ids(2, 10))
    assert columns == expected
    columns.clear()
    model.prefill(token_ids(2, 10), chunk_size=10)
    model.prefill(token_ids(2, 10), chunk_size=5)
    assert columns == [10, 5, 5]


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["orthros", "transformer"])
def test_several_calls_continue_from_one_prefix(architecture):
    """The prefix is computed once; calls crop back to it, copy it, or have a row of it each."""
    model, prefix = tiny_model(architecture=architecture), token_ids(1, 13)
    continuations = [token_ids(1, 4, seed=seed) for seed in (1, 2, 3)]
    wanted = [model(torch.cat((prefix, each), dim=1), use_cache=False).logits[:, 13:] for each in continuations]
    _, cache = model.prefill(prefix)
    stored = cache.keys(0).clone()
    for continuation, expected in zip(continuations, wanted, strict=True):
        assert_close(model(continuation, cache=copy.deepcopy(cache)).logits, expected)
        assert_close(model(continuation, cache=cache).logits, expected)
        cache.crop(-4)
        assert torch.equal(cache.keys(0), stored)
    cache.batch_repeat_interleave(3)
    assert_close(model(torch.cat(continuations), cache=cache).logits, torch.cat(wanted))
