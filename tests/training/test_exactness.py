"""A step on the engine equals a plain PyTorch loop: losses, gradient norms, gradients, weights, moments.

The batches are hand-made: label counts differ wildly between micro-batches, and some have none.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch

from orthros_train.config import Config
from orthros_train.errors import InputError
from orthros_train.parallel.quiet_deepspeed import deepspeed
from orthros_train.training.compilation import compile_layers
from orthros_train.training.optimizer import parameter_groups
from orthros_train.training.ranks import start_ranks
from tests.distributed import run_distributed
from tests.training.small_engines import (
    RATE,
    SAMPLES,
    STEPS,
    batch_of,
    data_parallel_engine,
    engine_config,
    full_moments,
    small_model,
    valid_labels,
)


def reference(**changes: Any) -> dict[str, Any]:
    """The ten steps in plain PyTorch, each on the whole batch at once."""
    model = small_model(**changes)
    section = engine_config(SAMPLES, 1).optimizer
    groups = parameter_groups(model.named_parameters(), section)
    for group in groups:
        group["lr"] = RATE * group["lr_scale"]
    optimizer = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.eps)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        options = {"num_items_in_batch": valid_labels(step), "return_logits": False}
        loss = model(**batch_of(step, range(SAMPLES)), **options).loss
        loss.backward()
        result["losses"].append(loss.item())
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            result["gradients"] = {n: optimizer.state[p]["exp_avg"] / 0.1 for n, p in model.named_parameters()}
    result["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    result["moments"] = {name: optimizer.state[p]["exp_avg_sq"] for name, p in model.named_parameters()}
    return result


def on_engine(config: Config, options: dict[str, Any]) -> dict[str, Any]:
    """The ten steps, this rank on its share of the batch. Adam's first moment after one step is the gradient."""
    ranks = start_ranks(60)
    size, world = config.train.micro_batch_size, ranks.world_size
    engine = data_parallel_engine(small_model(**options), config, ranks)
    named = dict(engine.module.named_parameters())
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        starts = range(ranks.rank * size, SAMPLES, size * world)
        micro_batches = [batch_of(step, range(start, start + size)) for start in starts]
        outcome = engine.step(micro_batches, valid_labels(step), RATE)
        assert outcome.applied
        result["losses"].append(float(ranks.gather([outcome.loss]).sum()))
        result["norms"].append(outcome.grad_norm)
        if step == 0:
            result["gradients"] = {name: state / 0.1 for name, state in full_moments(engine, "exp_avg").items()}
    result["weights"] = {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in named.items()}
    result["moments"] = full_moments(engine, "exp_avg_sq")
    return result


def difference(one: Any, two: Any) -> float:
    """max|one - two| / max(1, max|two|)."""
    one, two = torch.as_tensor(one), torch.as_tensor(two)
    return float((one - two).abs().max() / two.abs().max().clamp(min=1.0))


def assert_equal(result: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    assert difference(result["losses"], expected["losses"]) <= bound
    assert difference(result["norms"], expected["norms"]) <= bound
    for kind in ("gradients", "weights", "moments"):
        assert result[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            assert difference(result[kind][name].view_as(tensor), tensor) <= bound, (kind, name)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return run_distributed(reference, 1)[0]


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_stages_and_ranks(expected: dict[str, Any], world_size: int, zero_stage: int) -> None:
    """Two ranks, two micro-batches each, or one rank with four."""
    results = run_distributed(on_engine, world_size, engine_config(2, zero_stage), {})
    for result in results:
        assert_equal(result, expected, 1e-5)


@pytest.mark.parametrize("accumulation_steps", [1, 4, 8])
def test_gradient_accumulation(expected: dict[str, Any], accumulation_steps: int) -> None:
    """Unequal and empty label counts weigh as tokens, not as micro-batches."""
    result = run_distributed(on_engine, 1, engine_config(SAMPLES // accumulation_steps, 2), {})[0]
    assert_equal(result, expected, 1e-5)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bf16_follows_fp32(expected: dict[str, Any], zero_stage: int) -> None:
    """bf16 has 8 bits of mantissa: losses agree to 1%, gradient norms to 2%.

    Norms of the first five steps: after that they say where the high learning rate has led, not how it was computed.
    """
    result = run_distributed(on_engine, 2, engine_config(1, zero_stage, "bf16"), {})[0]
    assert difference(result["losses"], expected["losses"]) <= 0.01
    assert difference(result["norms"][:5], expected["norms"][:5]) <= 0.02
    assert {tensor.dtype for tensor in (*result["weights"].values(), *result["moments"].values())} == {torch.float32}


def test_tied_embeddings() -> None:
    options = {"tie_word_embeddings": True}
    expected = run_distributed(lambda: reference(**options), 1)[0]
    for zero_stage in (1, 3):
        assert_equal(run_distributed(on_engine, 2, engine_config(2, zero_stage), options)[0], expected, 1e-5)


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
def test_compiled_layers_change_nothing(expected: dict[str, Any]) -> None:
    """Losses, norms and gradients: a fused kernel rounds otherwise, and Adam divides small gradients by themselves. And
    layers are compiled: a graph for what lies before attention and one for what follows, not one a layer and step."""

    def compiled() -> tuple[dict[str, Any], int]:
        torch._dynamo.utils.counters.clear()  # of what other tests have compiled before the fork
        result = on_engine(engine_config(4, 2, compile=True), {})
        return result, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    result, graphs = run_distributed(compiled, 1)[0]
    for kind in ("losses", "norms"):
        assert difference(result[kind], expected[kind]) <= 1e-5
    for name, gradient in expected["gradients"].items():
        assert difference(result["gradients"][name].view_as(gradient), gradient) <= 1e-5, name
    assert 2 <= graphs <= 8


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler and no-such-compiler is not on PATH"):
        compile_layers(small_model(), torch.device("cpu"))


def test_activation_checkpointing_changes_nothing(expected: dict[str, Any]) -> None:
    config = engine_config(4, 3, activation_checkpointing=True)
    assert_equal(run_distributed(on_engine, 2, config, {})[0], expected, 1e-5)


def test_activation_checkpointing_recomputes() -> None:
    """The option reaches the layers: every layer's FFN runs a second time in the backward."""

    def ffn_calls(config: Config) -> int:
        model = small_model()
        calls = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        engine = data_parallel_engine(model, config, start_ranks(60))
        engine.step([batch_of(0, range(SAMPLES))], valid_labels(0), RATE)
        return len(calls)

    plain = engine_config(SAMPLES, 1)
    saving = engine_config(SAMPLES, 1, activation_checkpointing=True)
    assert [run_distributed(ffn_calls, 1, config)[0] for config in (plain, saving)] == [1, 2]
