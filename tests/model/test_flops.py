"""Invariant 13: the FLOP counter equals a brute-force count, and what the eager reference really multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from orthros_train.model import OrthrosForCausalLM, attention_kernels
from orthros_train.model.flops import (
    Flops,
    decode_flops,
    forward_flops,
    palm_flops_per_token,
    prefill_flops,
    training_flops,
)
from orthros_train.model.parameter_count import parameter_count
from orthros_train.model.visibility import Visibility

from .tiny import tiny_config, token_ids


def brute_force(config: Any, lengths: list[int], positions: list[int] | None) -> Flops:
    """Walk through layers, tokens and an explicit mask; share no formula with the counter."""
    segment = np.repeat(np.arange(len(lengths)), lengths)
    first = np.array([np.flatnonzero(segment == s)[0] for s in segment], dtype=int)
    T = len(segment)
    outputs = list(range(T)) if positions is None else positions
    i, j = np.mgrid[0:T, 0:T]
    causal = (segment[:, None] == segment[None]) & (j <= i)
    windowed = causal
    if config.base_window is not None:
        windowed = causal & ((j > i - config.base_window) | (j < first[:, None] + config.base_sinks))
    D, H, G, d = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    projections = base = output = ffn = 0
    for layer in range(config.num_hidden_layers):
        last = layer == config.num_hidden_layers - 1
        projections += sum(2 * D * G * d for _ in range(T))  # k and v of every base token
        if config.architecture == "orthros":
            queried = len(outputs) + (0 if last else T)
            base += 0 if last else int(windowed.sum())
            output += int(causal[outputs].sum())
        else:
            queried = len(outputs) if last else T
            base += int(windowed[outputs].sum()) if last else int(windowed.sum())
        projections += queried * (D * H * d + H * d * D)
        ffn += queried * 3 * D * config.intermediate_size
    head = len(outputs) * D * config.vocab_size
    return Flops(2 * projections, 2 * base * 2 * H * d, 2 * output * 2 * H * d, 2 * ffn, 2 * head)


shapes = st.fixed_dictionaries(
    {
        "num_hidden_layers": st.integers(1, 3),
        "num_attention_heads": st.just(4),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.sampled_from([8, 12]),
    }
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, list[int], list[int] | None]:
    window = draw(st.none() | st.integers(1, 12))
    config = tiny_config(
        architecture=draw(st.sampled_from(["orthros", "transformer"])),
        base_window=window,
        base_sinks=0 if window is None else draw(st.integers(0, 6)),
        **draw(shapes),
    )
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    columns = st.lists(st.integers(0, sum(lengths) - 1), unique=True, max_size=sum(lengths)).map(sorted)
    return config, lengths, draw(st.none() | columns)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_equals_brute_force(case: tuple[Any, list[int], list[int] | None]) -> None:
    config, lengths, positions = case
    assert forward_flops(config, lengths, positions) == brute_force(config, lengths, positions)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_rows_add_up(case: tuple[Any, list[int], list[int] | None]) -> None:
    config, lengths, _ = case
    rows = sum((forward_flops(config, [n]) for n in lengths), start=Flops(0, 0, 0, 0, 0))
    assert rows == forward_flops(config, lengths)
    assert rows.total == rows.projections + rows.base_attention + rows.output_attention + rows.ffn + rows.head
    assert training_flops(config, lengths).total == 3 * rows.total


@settings(max_examples=50, deadline=None)
@given(cases())
def test_decoding_after_prefill_adds_up_to_the_full_forward(case: tuple[Any, list[int], list[int] | None]) -> None:
    """Prefill of n tokens and m decoding steps multiply what one forward with outputs at those positions does."""
    config, lengths, _ = case
    prompt, steps = lengths[0], 3
    cached = sum((decode_flops(config, prompt + k) for k in range(steps)), start=prefill_flops(config, prompt))
    assert cached == forward_flops(config, [prompt + steps], list(range(prompt - 1, prompt + steps)))


@contextmanager
def counting_visible_pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect, for each call of the eager kernel, FLOPs over the pairs that its mask lets through."""
    counts: list[int] = []
    reference = attention_kernels.eager

    def counting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visibility: Visibility) -> torch.Tensor:
        mask = visibility.sees(slice(None), torch.arange(k.shape[2])[None])
        pairs = int(mask.expand(q.shape[0], q.shape[2], -1).sum())
        counts.append(2 * 2 * pairs * q.shape[1] * q.shape[3])
        return reference(q, k, v, visibility)

    with monkeypatch.context() as patch:
        patch.setitem(attention_kernels._KERNELS, "eager", counting)
        yield counts


def products(counter: FlopCounterMode) -> tuple[int, int]:
    """FLOPs of 2-D products (the linears) and of batched ones (attention over dense masks)."""
    counts = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    batched = counts.pop("aten.bmm", 0)
    assert set(counts) <= {"aten.mm", "aten.addmm"}
    return sum(counts.values()), batched


VARIANTS: dict[str, dict[str, Any]] = {
    "orthros": {},
    "orthros with sinks": {"base_sinks": 2},
    "orthros without window": {"base_window": None},
    "orthros, tied, biases, qk_norm": {"tie_word_embeddings": True, "attention_bias": True, "qk_norm": True},
    "orthros, one layer": {"num_hidden_layers": 1},
    "orthros, no grouping": {"num_key_value_heads": 4, "head_dim": 16},
    "transformer": {"architecture": "transformer", "base_window": None},
    "transformer with window": {"architecture": "transformer", "base_window": 4},
    "transformer with sinks": {
        "architecture": "transformer",
        "base_window": 3,
        "base_sinks": 1,
        "num_hidden_layers": 2,
    },
}
LENGTHS = [9, 1, 14]
POSITIONS: dict[str, list[int] | None] = {"everywhere": None, "some": [3, 8, 9, 22], "last": [23], "none": []}


def eager_model(**changes: Any) -> OrthrosForCausalLM:
    return OrthrosForCausalLM(tiny_config(attention_kernel="eager", **changes))


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_equals_what_the_eager_reference_multiplies(
    changes: dict[str, Any], positions: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = eager_model(**changes)
    ids = token_ids(1, sum(LENGTHS))
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    columns = None if positions is None else torch.tensor([positions], dtype=torch.long)
    with counting_visible_pairs(monkeypatch) as pairs, FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, output_positions=columns, document_ids=documents, use_cache=False)
    linears, dense_attention = products(counter)
    flops = forward_flops(model.config, LENGTHS, positions)
    assert flops.projections + flops.ffn + flops.head == linears
    assert flops.base_attention + flops.output_attention == sum(pairs)
    assert dense_attention >= sum(pairs)  # the eager kernel also multiplies what its mask hides


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_backward_multiplies_twice_what_forward_does(changes: dict[str, Any]) -> None:
    model = eager_model(**changes)
    ids = token_ids(1, 12)
    with FlopCounterMode(display=False) as forward:
        loss = model(ids, labels=ids, use_cache=False).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert products(backward) == tuple(2 * flops for flops in products(forward))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_prefill_and_decode_equal_what_they_multiply(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = eager_model(**changes)
    prompt = token_ids(1, 11)
    with counting_visible_pairs(monkeypatch) as pairs, FlopCounterMode(display=False) as counter:
        _, cache = model.prefill(prompt)
    assert prefill_flops(model.config, 11).total == products(counter)[0] + sum(pairs)
    with counting_visible_pairs(monkeypatch) as pairs, FlopCounterMode(display=False) as counter:
        model.decode(prompt[:, 0], cache)
    assert decode_flops(model.config, 11).total == products(counter)[0] + sum(pairs)


def test_window_makes_prefill_linear_and_decoding_does_not_forget() -> None:
    config = tiny_config(base_window=64, base_sinks=1)
    short, long = prefill_flops(config, 4096), prefill_flops(config, 8192)
    assert long.base_attention < 2.04 * short.base_attention
    assert decode_flops(config, 8192).output_attention > 1.99 * decode_flops(config, 4096).output_attention


def test_long_rows_do_not_overflow() -> None:
    config = tiny_config(base_window=None)
    n = 3_000_000
    pairs = n * (n + 1) // 2
    assert forward_flops(config, [n]).output_attention == 2 * 2 * config.num_hidden_layers * 32 * pairs


def test_palm_convention() -> None:
    config = tiny_config(vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=2, head_dim=4)
    parameters = sum(p.numel() for p in OrthrosForCausalLM(config).parameters())
    assert palm_flops_per_token(config, 100) == 6 * parameters + 12 * 2 * 4 * 4 * 100


@pytest.mark.parametrize(("lengths", "positions"), [([4, -1], None), ([4], [4]), ([4], [-1]), ([], [0])])
def test_impossible_rows_are_refused(lengths: list[int], positions: list[int] | None) -> None:
    with pytest.raises(ValueError, match="must"):
        forward_flops(tiny_config(), lengths, positions)


def test_empty_rows_cost_nothing() -> None:
    assert forward_flops(tiny_config(), []).total == 0
    assert forward_flops(tiny_config(), [0], []).total == 0


@settings(max_examples=40, deadline=None)
@given(
    changes=st.fixed_dictionaries(
        {
            "architecture": st.sampled_from(["orthros", "transformer"]),
            "tie_word_embeddings": st.booleans(),
            "attention_bias": st.booleans(),
            "attention_output_bias": st.none() | st.booleans(),
            "qk_norm": st.booleans(),
        }
    ),
    affine=st.booleans(),
    shape=shapes,
)
def test_parameter_count_equals_the_model_on_the_meta_device(
    changes: dict[str, Any], affine: bool, shape: dict[str, int]
) -> None:
    query_affine = "elementwise" if affine and changes["architecture"] == "orthros" else "none"
    config = tiny_config(query_affine=query_affine, **changes, **shape)
    with torch.device("meta"):
        model = OrthrosForCausalLM(config)
    count = parameter_count(config)
    assert count.total == sum(parameter.numel() for parameter in model.parameters())
    by_part = {
        "embedding": model.model.embed_tokens,
        "ffn": torch.nn.ModuleList(layer.mlp for layer in model.model.layers),
        "query_affines": torch.nn.ModuleList(
            stream
            for layer in model.model.layers
            for stream in (layer.self_attn.base_query, layer.self_attn.output_query)
        ),
    }
    for part, module in by_part.items():
        assert getattr(count, part) == sum(parameter.numel() for parameter in module.parameters()), part
