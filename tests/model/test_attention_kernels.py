"""Every kernel against a softmax written as Python loops: outputs and gradients (window, sinks, segments, GQA)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orthros_train.model import attention_kernels
from orthros_train.model import visibility as visibility_module
from orthros_train.model.attention_kernels import attend
from orthros_train.model.flash_runs import attend_runs
from orthros_train.model.visibility import Visibility
from tests.model.attention_reference import brute_force, random_inputs, reference_flash, repeated
from tests.model.tiny import assert_close


def check(kernel, visibility, positions, first, S, seed):
    B, M = positions.shape
    inputs = random_inputs(B, M, S, seed)
    tensors = (repeated(inputs[0], positions, first), *inputs[1:])
    expected = brute_force(*tensors, positions, first, visibility.window, visibility.sinks)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    wanted = torch.autograd.grad((expected * weight).sum(), inputs, retain_graph=True)
    with pytest.MonkeyPatch.context() as patch:
        if kernel.startswith("folded"):
            patch.setattr(visibility_module, "FOLDED_ON", ("cpu",))
        if kernel.endswith("recomputed"):
            patch.setattr(attention_kernels, "KEEPS_SUMS", ())
        if kernel == "flash":
            actual = attend_runs(*tensors, visibility, reference_flash)
        else:
            actual = attend(*tensors, visibility, "eager" if kernel == "eager" else "sdpa")
        gradients = torch.autograd.grad((actual * weight).sum(), inputs)
    assert_close(actual.detach(), expected.detach())
    for gradient, reference in zip(gradients, wanted, strict=True):
        assert_close(gradient, reference)


# As on a GPU: a backward that recomputes its blocks, since kernels there hand out no softmax sums, block by
# block and with those that are alike in one call.
KERNELS = ("eager", "sdpa", "sdpa recomputed", "folded", "folded recomputed", "flash")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks even at lengths that brute force can afford."""
    monkeypatch.setattr("orthros_train.model.visibility.MIN_BLOCK", 2)
    monkeypatch.setattr("orthros_train.model.visibility.MAX_BLOCK", 4)


WINDOWS_AND_SINKS = [(None, 0), *((window, sinks) for window in (1, 2, 3, 7, 8, 15) for sinks in (0, 1, 4, 20))]


def kernels_and(masks):
    """Every kernel with every mask that it can do: flash has no sinks."""
    return [(kernel, *mask) for kernel in KERNELS for mask in masks if kernel != "flash" or mask[1] == 0]


@pytest.mark.parametrize(("kernel", "window", "sinks"), kernels_and(WINDOWS_AND_SINKS))
@pytest.mark.parametrize("length", [7, 8, 15])
def test_contiguous_queries_equal_brute_force(kernel, window, sinks, length):
    """T = w, w+1, 2w+1 at w = 7, and windows of 1, 2, w, w+1, T, none; sinks longer than the row."""
    positions = torch.arange(length)[None]
    first = torch.zeros_like(positions)
    visibility = Visibility(positions, first, window, sinks, contiguous_from=0)
    check(kernel, visibility, positions.expand(2, -1), first.expand(2, -1), length, seed=length)


@pytest.mark.parametrize(
    ("kernel", "window", "sinks"), kernels_and([(3, 0), (3, 1), (3, 5), (1, 0), (20, 0), (None, 0)])
)
@pytest.mark.parametrize(("past", "count"), [(0, 1), (11, 1), (11, 6), (2, 9)])
def test_queries_after_a_cache_equal_brute_force(kernel, window, sinks, past, count):
    """Queries that are fewer than keys: the causal diagonal ends bottom-right."""
    positions = torch.arange(past, past + count)[None]
    visibility = Visibility(positions, torch.zeros_like(positions), window, sinks, contiguous_from=past)
    B = 2
    check(
        kernel, visibility, positions.expand(B, -1), torch.zeros(B, count, dtype=torch.int64), past + count, seed=past
    )


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize(("past", "count"), [(11, 6), (1, 9), (0, 7)])
def test_a_chunk_after_a_cache_without_gradients_equals_eager(window, past, count, monkeypatch):
    """Parts of 4 queries, the last one short; a window of 17 reaches everything."""
    monkeypatch.setattr(attention_kernels, "CAUSAL_TAIL_ROWS", 4)
    positions = torch.arange(past, past + count)[None]
    visibility = Visibility(positions, torch.zeros_like(positions), window, 0, contiguous_from=past)
    inputs = [part.detach() for part in random_inputs(2, count, past + count, seed=9)]
    assert_close(attend(*inputs, visibility, "sdpa"), attend(*inputs, visibility, "eager"))
    one_more_key = [inputs[0], *(torch.cat((part, torch.full_like(part[:, :, :1], 1e9)), dim=2) for part in inputs[1:])]
    assert_close(attend(*one_more_key, visibility, "sdpa"), attend(*inputs, visibility, "eager"))


class _LargestResult(TorchDispatchMode):
    """The most elements that any operation's result had; a view of what was there counts nothing."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        given = {part.untyped_storage().data_ptr() for part in tree_leaves((args, kwargs)) if torch.is_tensor(part)}
        for part in tree_leaves(results):
            if torch.is_tensor(part) and part.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, part.numel())
        return results


@pytest.mark.parametrize("past", [0, 500])
@pytest.mark.parametrize("count", [1, 90])
@pytest.mark.parametrize("window", [None, 16])
@torch.no_grad()
def test_grouped_heads_copy_neither_keys_nor_values(window, count, past):
    """Eight query heads over two KV heads: nothing as large as the keys is made, nor the mask of all pairs."""
    stored = past + count if past else count
    positions = torch.arange(past, past + count)[None]
    visibility = Visibility(positions, torch.zeros_like(positions), window, 0, contiguous_from=past)
    queries, keys, values = (part.detach() for part in random_inputs(1, count, stored, seed=1, H=8, G=2, d=64))
    with _LargestResult() as largest:
        attend(queries, keys, values, visibility, "sdpa")
    assert 0 < largest.elements <= max(queries.numel(), keys.numel() - 1)


@st.composite
def scattered(draw):
    """Rows of different lengths, several segments, any increasing positions in them."""
    B, S = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    M = draw(st.integers(1, S))
    positions, first = [], []
    for _ in range(B):
        starts = [0, *sorted(draw(st.sets(st.integers(1, S), max_size=3)))]
        chosen = sorted(draw(st.sets(st.integers(0, S - 1), min_size=M, max_size=M)))
        if draw(st.booleans()):  # a tail of repeats, as padding columns have
            chosen = [min(p, chosen[M // 2]) for p in chosen]
        positions.append(chosen)
        first.append([max(start for start in starts if start <= p) for p in chosen])
    window = draw(st.one_of(st.none(), st.integers(1, 6)))
    sinks = draw(st.integers(0, 4)) if window is not None else 0
    return torch.tensor(positions), torch.tensor(first), window, sinks, S


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "sdpa recomputed", "flash"])
@settings(max_examples=60, deadline=None)
@given(case=scattered(), seed=st.integers(0, 99))
def test_scattered_queries_equal_brute_force(kernel, case, seed):
    positions, first, window, sinks, S = case
    if kernel == "flash":
        sinks = 0
    check(kernel, Visibility(positions, first, window, sinks), positions, first, S, seed)


@pytest.mark.parametrize("bytes_at_once", [1, 3000])
@pytest.mark.parametrize(("window", "sinks", "past"), [(3, 0, 0), (5, 2, 0), (5, 2, 9), (6, 0, 1)])
def test_a_fold_in_several_calls_equals_brute_force(window, sinks, past, bytes_at_once, monkeypatch):
    """One block a call, and some."""
    monkeypatch.setattr(attention_kernels, "FOLDED_BYTES", bytes_at_once)
    positions = torch.arange(past, past + 25)[None]
    visibility = Visibility(positions, torch.zeros_like(positions), window, sinks, contiguous_from=past)
    both = positions.expand(2, -1)
    check("folded recomputed", visibility, both, torch.zeros_like(both), past + 25, seed=4)


@pytest.mark.parametrize(("window", "sinks"), [(3, 0), (3, 2), (None, 0)])
def test_rows_far_apart_gather_their_own_spans(window, sinks):
    """A row of 3 keys beside one of 40: each row's span is its own, not the union."""
    positions = torch.tensor([[1, 2], [38, 39]])
    visibility = Visibility(positions, torch.zeros_like(positions), window, sinks)
    if window is not None:
        (block,) = visibility.blocks(40, torch.float64)
        assert sum(part.shape[1] for part in block.keys) <= window + 1 + sinks
    check("sdpa", visibility, positions, torch.zeros_like(positions), 40, seed=3)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("window", [4, 9])
def test_a_block_touches_its_window_and_sinks_only(window, sinks):
    positions = torch.arange(1000)[None]
    visibility = Visibility(positions, torch.zeros_like(positions), window, sinks, contiguous_from=0)
    blocks = list(visibility.blocks(1000, torch.float64))
    touched = sum(part.stop - part.start for block in blocks for part in block.keys)
    assert touched <= 1000 + len(blocks) * (window - 1 + sinks)
    assert len({id(block.mask) for block in blocks}) <= 12  # those past the first window share theirs


def test_gradients_of_keys_add_up_in_single_precision():
    """A bf16 key that a hundred blocks read: the sum is rounded once, not at every block."""
    positions = torch.arange(256)[None]
    visibility = Visibility(positions, torch.zeros_like(positions), 200, 0, contiguous_from=0)
    generator = torch.Generator().manual_seed(0)
    half = [torch.randn(1, heads, 256, 8, generator=generator).bfloat16().requires_grad_() for heads in (2, 1, 1)]
    exact = [part.detach().double().requires_grad_() for part in half]
    gradients = [
        torch.autograd.grad(attend(*inputs, visibility, "sdpa").double().sum(), inputs[2])[0].double()
        for inputs in (half, exact)
    ]
    assert_close(gradients[0], gradients[1], 4e-3)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_segment_never_reads_another(kernel):
    """Exactly: infinite keys of segment 1 do not reach segment 2, nor the other way round."""
    first = torch.tensor([[0, 0, 0, 3, 3, 3, 3]])
    visibility = Visibility(torch.arange(7)[None], first, 2, 2)
    queries, keys, values = (part.detach() for part in random_inputs(1, 7, 7, seed=5))
    before = attend(queries, keys, values, visibility, kernel)
    values[:, :, :3] = 1e30
    after = attend(queries, keys, values, visibility, kernel)
    assert torch.equal(before[:, :, 3:], after[:, :, 3:])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("window", "sinks"), [(3, 0), (3, 2), (None, 0)])
def test_flex_equals_eager(window, sinks, monkeypatch):
    """The mask of FlexAttention, uncompiled: compiling is the library's business and takes a minute on CPU."""
    monkeypatch.setattr(attention_kernels, "_compiled", lambda function: function)
    positions = torch.stack((torch.arange(20), torch.arange(2, 22)))
    first = torch.tensor([0, 7])[:, None].expand(2, 20).clamp(max=positions)
    queries, keys, values = (part.detach() for part in random_inputs(2, 20, 24, seed=6, d=16))
    visibility = Visibility(positions, first, window, sinks)
    with torch.no_grad():
        expected = attend(queries, keys, values, visibility, "eager")
        assert_close(attend(queries, keys, values, visibility, "flex"), expected)
        assert_close(attend(queries, keys, values, visibility, "flex"), expected)  # with the mask that is kept
