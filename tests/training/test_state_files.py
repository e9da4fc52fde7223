"""Whatever layout saved it and whatever layout loads it, a checkpoint holds the same numbers: master weights, moments
and step counters, bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orthros_train.config import Config
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.parallel.quiet_deepspeed import deepspeed
from orthros_train.training import engine as engine_module
from orthros_train.training.checkpoints import save_checkpoint
from orthros_train.training.engine import TrainingEngine
from orthros_train.training.manifest import Layout, Manifest, Progress, read_manifest
from orthros_train.training.ranks import start_ranks
from orthros_train.training.state_files import SavedState, load_state
from tests.distributed import run_distributed
from tests.training.small_engines import (
    RATE,
    SAMPLES,
    batch_of,
    data_parallel_engine,
    engine_config,
    full_moments,
    valid_labels,
)

UPDATES = 3
NAME = f"step_{UPDATES:08d}"
FROZEN = "model.layers.0.self_attn.output_query.shift"


def awkward_model(seed: int) -> OrthrosForCausalLM:
    """Two gains of one head make a whole group: on two ranks, ZeRO-1/2 leaves the second without any of it."""
    config = OrthrosConfig(
        vocab_size=64,
        hidden_size=6,
        intermediate_size=10,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=2,
        base_window=4,
    )
    model = OrthrosForCausalLM(config)
    model.reset_parameters(seed)
    model.model.layers[0].self_attn.output_query.shift.requires_grad_(False)
    return model


def build(config: Config, seed: int = 3) -> TrainingEngine:
    return data_parallel_engine(awkward_model(seed), config, start_ranks(60))


def full_state(engine: TrainingEngine) -> dict[str, Any]:
    trainable = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    states = engine.deepspeed.optimizer.optimizer.state.values()
    return {
        "weights": {name: deepspeed.utils.safe_get_full_fp32_param(p).clone() for name, p in trainable},
        "exp_avg": full_moments(engine, "exp_avg"),
        "exp_avg_sq": full_moments(engine, "exp_avg_sq"),
        "steps": {float(state["step"]) for state in states},
    }


def save(config: Config, folder: Path) -> dict[str, Any]:
    """Three updates and a checkpoint; what it holds."""
    engine = build(config)
    ranks, size = engine.ranks, config.train.micro_batch_size
    for step in range(UPDATES):
        starts = range(ranks.rank * size, SAMPLES, size * ranks.world_size)
        engine.step([batch_of(step, range(start, start + size)) for start in starts], valid_labels(step), RATE)
    write(engine, config, folder)
    return full_state(engine)


def write(engine: TrainingEngine, config: Config, folder: Path) -> None:
    manifest = Manifest(
        progress=Progress(step=UPDATES, updates=UPDATES),
        layout=Layout(engine.ranks.world_size, config.parallel.zero_stage, 1, 1, config.precision),
        config={},
        fingerprints={},
        versions={},
        saved_at="",
    )
    save_checkpoint(engine, folder, manifest, lambda path: None, keep_last=1)


def load(config: Config, folder: Path) -> dict[str, Any]:
    """The checkpoint in a fresh engine that started from other weights, saved again in a folder of its own."""
    engine = build(config, seed=4)
    load_state(engine, folder / NAME, read_manifest(folder / NAME))
    write(engine, config, folder / f"{engine.ranks.world_size}-{engine.zero_stage}")
    assert [group["name"] for group in engine.deepspeed.optimizer.param_groups] == ["decay", "no_decay", "affine"]
    assert [group["weight_decay"] for group in engine.deepspeed.optimizer.param_groups] == [0.1, 0.0, 0.0]
    live = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    with deepspeed.zero.GatheredParameters(list(live.values()), enabled=engine.zero_stage == 3):
        weights = {name: p.detach().float().clone() for name, p in live.items()}
    return {**full_state(engine), "live": weights}


@pytest.mark.parametrize(("source", "precision"), [((2, 1), "bf16"), ((2, 3), "fp32"), ((1, 2), "fp32")])
def test_bitwise_with_awkward_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: tuple[int, int], precision: str
) -> None:
    """Three groups, one of them on one rank alone, a frozen parameter, and ZeRO-3 in sub-groups of a few parameters."""
    original = engine_module.deepspeed_config

    def small_sub_groups(config: Config, accumulation_steps: int) -> dict[str, Any]:
        settings = original(config, accumulation_steps)
        settings["zero_optimization"]["sub_group_size"] = 150
        return settings

    monkeypatch.setattr(engine_module, "deepspeed_config", small_sub_groups)
    saved = run_distributed(save, source[0], engine_config(2, source[1], precision), tmp_path)[0]
    for ranks, zero_stage in ((1, 3), (2, 1), (2, 2), (2, 3)):
        for loaded in run_distributed(load, ranks, engine_config(2, zero_stage, precision), tmp_path):
            assert loaded["steps"] == {UPDATES}
            for kind in ("weights", "exp_avg", "exp_avg_sq"):
                assert loaded[kind].keys() == saved[kind].keys()
                assert all(torch.equal(loaded[kind][n], saved[kind][n]) for n in saved[kind]), (ranks, zero_stage, kind)
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            rounded = {name: tensor.to(dtype).float() for name, tensor in saved["weights"].items()}
            assert all(torch.equal(loaded["live"][name], rounded[name]) for name in rounded), (ranks, zero_stage)
        checkpoint = tmp_path / f"{ranks}-{zero_stage}" / NAME
        exported = SavedState(checkpoint, read_manifest(checkpoint))
        assert {name for name in exported.parameters if not name.endswith("shift")} == saved["weights"].keys()
        assert all(torch.equal(exported.weight(name), tensor) for name, tensor in saved["weights"].items())
        assert not exported.weight(FROZEN).any()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
