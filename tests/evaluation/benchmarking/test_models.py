"""The models that are timed beside each other compute the same thing, and FLOPs are those of what each computes."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from evaluation.benchmarking.llama import filled_llama_cache, llama_prefill_flops
from evaluation.benchmarking.models import (
    add_model_options,
    arm_and_length,
    arm_configs,
    arm_names,
    build_arms,
    enough_memory,
    shape_settings,
)
from orthros_train.command_line import CommandParser
from orthros_train.errors import InputError
from orthros_train.model.flops import forward_flops, prefill_flops
from tests.model.tiny import assert_close, token_ids

SMALL = ("--width", "32", "--ffn", "48", "--layers", "3", "--heads", "4", "--kv-heads", "2", "--vocabulary", "61")
ROOT = Path(__file__).parents[3]


def options(*arguments: str) -> argparse.Namespace:
    parser = CommandParser("", "")
    add_model_options(parser)
    return parser.parse_args(["--output", "x", "--threads", "1", *arguments])


def test_all_three_compute_the_same_where_they_can() -> None:
    """A window as long as the prompt makes an Orthros with identity affines a transformer."""
    configs = arm_configs(options(*SMALL, "--window", "16"), positions=16)
    models = build_arms(configs, ("transformer", "orthros", "llama"), "fp32", "cpu")
    assert models["llama"].config._attn_implementation == "sdpa"
    ids = token_ids(1, 9)
    caches = {}
    logits = {}
    for arm, model in models.items():
        logits[arm], caches[arm] = model.prefill(ids)
    assert_close(logits["orthros"], logits["transformer"], 1e-5)
    assert_close(logits["llama"], logits["transformer"], 1e-5)
    following = {arm: model.decode(ids[:, 0], caches[arm]) for arm, model in models.items()}
    assert_close(following["orthros"], following["transformer"], 1e-5)
    assert_close(following["llama"], following["transformer"], 1e-5)


def test_the_order_of_the_arms_does_not_matter() -> None:
    configs = arm_configs(options(*SMALL, "--window", "4"), positions=16)
    llama = build_arms(configs, ("llama", "orthros"), "bf16", "cpu")["orthros"]
    assert {parameter.dtype for parameter in llama.parameters()} == {torch.bfloat16}
    assert llama.model.layers[0].self_attn.base_query.gain.eq(1).all()


def test_llama_flops_are_the_last_layers_at_every_position() -> None:
    """Beyond the transformer arm: query, o and FFN of T - 1 positions, and the attention of all but the last."""
    config = arm_configs(options(*SMALL, "--window", "4"), positions=1)["transformer"]
    D, F, H, d, T = 32, 48, 4, 8, 9
    more = 2 * (T - 1) * (2 * D * H * d + 3 * D * F) + 2 * 2 * H * d * T * (T - 1) // 2
    assert llama_prefill_flops(config, T).total == prefill_flops(config, T).total + more
    assert asdict(llama_prefill_flops(config, T))["ffn"] == asdict(forward_flops(config, [T]))["ffn"]


def test_a_filled_cache_is_as_long_as_what_it_was_given() -> None:
    configs = arm_configs(options(*SMALL), positions=16)
    model = build_arms(configs, ["llama"], "fp32", "cpu")["llama"]
    keys = torch.randn(2, 2, 5, 8)
    assert filled_llama_cache(model.config, keys, keys).get_seq_length() == 5


def test_the_shape_of_a_recipe() -> None:
    configs = arm_configs(options("--config", str(ROOT / "configs" / "llama3.1_8b_conversion.yaml")), positions=200_000)
    assert shape_settings(configs["orthros"]) == {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "base_window": 512,
        "vocab_size": 128256,
        "head_dim": 128,
        "base_sinks": 1,
        "tie_word_embeddings": False,
    }
    assert configs["transformer"].base_window is None
    assert configs["transformer"].max_position_embeddings == 200_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--width", "30", "--heads", "4"), "--width 30 is not a multiple of --heads 4"),
        (("--heads", "4", "--kv-heads", "3"), "num_key_value_heads"),
        (("--config", "configs/demo.yaml", "--layers", "2"), "--layers contradicts --config"),
        (("--config", "absent.yaml"), "absent.yaml does not exist"),
        (("--device", "cuda"), "torch sees no CUDA device"),
        (("--attention-kernel", "quick"), "choose one of auto, eager"),
        (("--attention-kernel", "flash"), "needs a CUDA device"),
        (("--arms", "transformer,mamba"), "not a list of transformer, orthros, llama"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        arm_configs(options(*arguments), positions=1)


def test_a_transformer_recipe_lacks_the_window() -> None:
    with pytest.raises(InputError, match=r"no model\.base_window, which the Orthros arm needs"):
        arm_configs(options("--config", str(ROOT / "configs" / "transformer_130m.yaml")), positions=1)


def test_argument_types() -> None:
    assert arm_names("llama,transformer") == ["transformer", "llama"]
    assert arm_and_length("orthros:4096") == ("orthros", 4096)
    for text in ("orthros", "orthros:0", "mamba:4", "orthros:x"):
        with pytest.raises(argparse.ArgumentTypeError, match="not an arm and a length"):
            arm_and_length(text)


def test_too_little_memory_is_one_line() -> None:
    with pytest.raises(InputError, match="cpu has too little memory for this"), enough_memory("cpu"):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="other"), enough_memory("cpu"):
        raise RuntimeError("another thing, or other")
