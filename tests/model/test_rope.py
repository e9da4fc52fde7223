"""RoPE against transformers: every scaling type, both spellings, beyond the trained range."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from orthros_train.model import OrthrosConfig
from orthros_train.model.rope import RotaryEmbedding, rotate
from tests.model.tiny import SHAPE, assert_close

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-mscale": {"factor": 40.0, "original_max_position_embeddings": 512, "mscale": 0.707, "mscale_all_dim": 1.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    "llama3.2": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


def rope_type(name):
    return name.split("-")[0].removesuffix(".2")


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("positions", [range(40), range(500, 530), range(9000, 9010)])
def test_rotation_equals_transformers(name, positions):
    """Values past 8,192 positions too, where a wrong llama3 factor would show."""
    shape = {**SHAPE, "head_dim": 64}
    parameters = {"rope_type": rope_type(name), "rope_theta": 500000.0, **SCALINGS[name]}
    ids = torch.tensor([list(positions)])
    heads = torch.randn(1, ids.shape[1], 3, 64, generator=torch.Generator().manual_seed(0))
    theirs = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_parameters=dict(parameters)))
    expected, _ = apply_rotary_pos_emb(heads, heads, *theirs(heads, ids), unsqueeze_dim=2)
    ours = RotaryEmbedding(OrthrosConfig(**shape, rope_parameters=dict(parameters)))
    assert_close(rotate(heads, *ours(ids, torch.float32)), expected, 1e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_both_spellings_mean_the_same(name):
    old = OrthrosConfig(**SHAPE, rope_theta=5000.0, rope_scaling={"rope_type": rope_type(name), **SCALINGS[name]})
    new = OrthrosConfig(**SHAPE, rope_parameters={"rope_type": rope_type(name), "rope_theta": 5000.0, **SCALINGS[name]})
    assert old.rope_parameters == new.rope_parameters
    assert "rope_scaling" not in old.to_dict()


def test_the_oldest_spelling_of_the_type_is_read():
    config = OrthrosConfig(**SHAPE, rope_scaling={"type": "linear", "factor": 4.0})
    assert config.rope_parameters["rope_type"] == "linear"


def test_casting_the_model_leaves_the_frequencies_alone():
    rope = RotaryEmbedding(OrthrosConfig(**SHAPE))
    positions = torch.arange(4000)[None]
    before = rope(positions, torch.float32)
    after = rope.to(torch.bfloat16)(positions, torch.float32)
    assert torch.equal(before[0], after[0])
