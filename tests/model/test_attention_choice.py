"""Which kernel runs: what is asked for, what the machine has, and what each mask wants."""

import importlib
import importlib.util
import types

import pytest
import torch
import torch.nn.functional as F

from orthros_train.model import attention_kernels, flash_runs
from orthros_train.model.attention_kernels import attend, choose_kernel
from orthros_train.model.flash_runs import attend_runs, flash_obstacle
from orthros_train.model.visibility import Visibility
from tests.model.attention_reference import brute_force, random_inputs, reference_flash
from tests.model.tiny import assert_close, tiny_model, token_ids

CUDA, HALF = torch.device("cuda"), torch.bfloat16


@pytest.mark.parametrize(
    ("kernel", "gradients", "reason"),
    [("flash", False, "CUDA"), ("flex", True, "no backward on CPU"), ("magic", False, "unknown")],
)
def test_a_kernel_that_cannot_run_says_why(kernel, gradients, reason):
    with pytest.raises(ValueError, match=reason):
        choose_kernel(kernel, torch.device("cpu"), torch.float32, gradients, 64)


@pytest.fixture
def flash_attn(monkeypatch):
    """A function that puts a module in flash-attn's place: one that works, one that cannot be imported, or none."""
    flash_runs._import_problem.cache_clear()

    def put(error=None, there=True, capability=(9, 0), **contents):
        def load(name):
            if error is not None:
                raise error
            return types.SimpleNamespace(**contents)

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
        monkeypatch.setattr(importlib, "import_module", load)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        flash_runs._import_problem.cache_clear()

    yield put
    flash_runs._import_problem.cache_clear()


WORKS = {"flash_attn_varlen_func": reference_flash}


@pytest.mark.parametrize(
    ("machine", "dtype", "head_dim", "reason"),
    [
        ({"there": False}, HALF, 64, "not installed"),
        ({"error": ImportError("undefined symbol")}, HALF, 64, r"cannot be imported \(undefined symbol\)"),
        ({}, HALF, 64, "no flash_attn_varlen_func"),
        ({"capability": (7, 5), **WORKS}, HALF, 64, "compute capability 8.0.*not 7.5"),
        (WORKS, HALF, 320, "at most 256 channels, not 320"),
        (WORKS, torch.float32, 64, "bfloat16"),
    ],
)
def test_each_obstacle_is_named_and_auto_goes_around_it(flash_attn, machine, dtype, head_dim, reason):
    flash_attn(**machine)
    with pytest.raises(ValueError, match=f"attention_kernel=flash cannot run: .*{reason}.*use attention_kernel=sdpa"):
        choose_kernel("flash", CUDA, dtype, True, head_dim)
    assert choose_kernel("auto", CUDA, dtype, True, head_dim) == "sdpa"


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_auto_is_flash_where_it_can_run(flash_attn, gradients, capability):
    """A prefill and a validation, too."""
    flash_attn(capability=capability, **WORKS)
    assert flash_obstacle(CUDA, HALF, 256) is None
    assert choose_kernel("auto", CUDA, HALF, gradients, 256) == "flash"
    assert choose_kernel("auto", torch.device("cpu"), HALF, gradients, 256) == "sdpa"


@pytest.fixture
def flash_calls(monkeypatch):
    """A model that believes in flash-attn: the windows of the calls that reach it, with their numbers of queries."""
    calls = []

    def record(queries, keys, values, visibility):
        calls.append((visibility.window, queries.shape[2]))
        return attend_runs(queries, keys, values, visibility, reference_flash)

    monkeypatch.setitem(attention_kernels._KERNELS, "flash", record)
    monkeypatch.setattr("orthros_train.model.modeling_orthros.choose_kernel", lambda *arguments: "flash")
    return calls


@pytest.mark.parametrize("sinks", [0, 1])
@torch.no_grad()
def test_each_stream_takes_flash_where_its_mask_allows(flash_calls, sinks):
    """Sinks keep the base stream alone from it; three layers, of which the last has no base queries."""
    model = tiny_model(base_sinks=sinks)
    ids = token_ids(2, 17)
    actual = model(ids).logits
    assert sorted(flash_calls, key=str) == [(5, 17)] * (0 if sinks else 2) + [(None, 17)] * 3
    plain = tiny_model(base_sinks=sinks, attention_kernel="eager")
    plain.model._kernel = lambda base: "eager"
    assert_close(actual, plain(ids).logits)


@torch.no_grad()
def test_a_decoding_step_copies_no_cache_for_flash(flash_calls):
    """One query a row reads the cache where it lies; the prompt and later chunks have many."""
    model = tiny_model()
    ids = token_ids(2, 12)
    _, cache = model.prefill(ids[:, :8])
    assert flash_calls  # the base stream of the prompt
    assert all(queries > 1 for _, queries in flash_calls)
    flash_calls.clear()
    model.decode(ids[:, 8], cache)
    assert flash_calls == []
    model.model(ids[:, 9:], cache=cache)
    assert len(flash_calls) == 5


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [0, 1, 2])
def test_flash_copies_no_keys_where_runs_read_all_of_them_in_order(window, documents):
    positions = torch.arange(12)[None].expand(2, -1)
    first = torch.where(positions < 6, 0, 6) if documents == 2 else torch.zeros_like(positions)
    contiguous = 0 if documents == 0 else None
    queries, keys, values = (part.detach() for part in random_inputs(2, 12, 12, seed=7))
    projected = [part.transpose(1, 2).contiguous() for part in (keys, values)]  # (B, S, G, d), as the products are
    keys, values = (part.transpose(1, 2) for part in projected)
    given = []

    def record(q, k, v, **options):
        given.extend((k, v))
        return reference_flash(q, k, v, **options)

    visibility = Visibility(positions, first, window, 0, contiguous)
    actual = attend_runs(queries, keys, values, visibility, record)
    assert [part.data_ptr() for part in given] == [part.data_ptr() for part in projected]
    assert_close(actual, attend(queries, keys, values, visibility, "eager"))


def test_flash_copies_of_a_cache_what_a_chunks_window_reaches():
    positions = torch.arange(50, 54)[None]
    visibility = Visibility(positions, torch.zeros_like(positions), 3, 0, contiguous_from=50)
    inputs = [part.detach() for part in random_inputs(2, 4, 54, seed=7)]
    sizes = []

    def record(q, k, v, **options):
        sizes.append(len(k))
        return reference_flash(q, k, v, **options)

    actual = attend_runs(*inputs, visibility, record)
    assert sizes == [2 * (4 + 3 - 1)]
    assert_close(actual, attend(*inputs, visibility, "eager"))


# --- backends of PyTorch's attention ---


def test_masked_calls_keep_clear_of_cudnn(monkeypatch):
    """pytorch#196678. Forward and backward of blocks, also those that have no mask; a CPU's settings stay untouched."""
    allowed = []
    real = F.scaled_dot_product_attention

    def record(*arguments, **options):
        allowed.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
        return real(*arguments, **options)

    backends = attention_kernels._masked_backends
    monkeypatch.setattr(attention_kernels, "_masked_backends", lambda device: backends(CUDA))
    monkeypatch.setattr(attention_kernels, "KEEPS_SUMS", ())
    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    positions = torch.arange(9)[None]
    inputs = random_inputs(1, 9, 9, seed=0)
    attend(*inputs, Visibility(positions, torch.zeros_like(positions), 3, 1, 0), "sdpa").sum().backward()
    forward_and_backward = len(allowed)
    assert set(allowed) == {(False, True)}
    with torch.no_grad():
        attend(*inputs, Visibility(positions, positions, None, 0), "sdpa")
    assert allowed[forward_and_backward:] == [(False, True)]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_a_cpu_keeps_its_backends():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with attention_kernels._masked_backends(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize(("past", "count"), [(11, 6), (1, 9)])
def test_the_one_call_of_a_chunk_aligns_bottom_right(past, count):
    """What a GPU's flash kernel computes by itself, with the mask made on a CPU."""
    inputs = [part.detach() for part in random_inputs(2, count, past + count, seed=9)]
    positions = torch.arange(past, past + count).expand(2, -1)
    expected = brute_force(*inputs, positions, torch.zeros_like(positions), None, 0)
    assert_close(attention_kernels._lower_right(*inputs), expected)


@torch.no_grad()
def test_a_chunk_on_a_gpu_takes_that_call_where_its_kernel_can_run(monkeypatch):
    """On the meta device, which is no CPU: only the way there is looked at."""
    taken = []
    monkeypatch.setattr(attention_kernels, "_lower_right", lambda q, k, v: taken.append("call") or q)
    monkeypatch.setattr(attention_kernels, "_blockwise", lambda q, k, v, visibility: taken.append("blocks") or q)
    positions = torch.arange(11, 17)[None]
    visibility = Visibility(positions, torch.zeros_like(positions), None, 0, contiguous_from=11)
    inputs = [part.detach().to("meta") for part in random_inputs(2, 6, 17, seed=9)]
    for can_run in (True, False):
        monkeypatch.setattr(attention_kernels, "can_use_flash_attention", lambda parameters, can=can_run: can)
        attend(*inputs, visibility, "sdpa")
    assert taken == ["call", "blocks"]
