"""Engines on hand-made batches, without data files or a run: label counts differ wildly, and some samples have none."""

from __future__ import annotations

from typing import Any

import torch

from orthros_train.config import Config
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.parallel.mesh import Mesh
from orthros_train.parallel.quiet_deepspeed import deepspeed
from orthros_train.training.engine import TrainingEngine
from orthros_train.training.engines import build_engine
from orthros_train.training.ranks import Ranks

VOCAB, TOKENS, SAMPLES, STEPS, RATE = 64, 16, 8, 10, 1e-2
KEPT_LABELS = (0.1, 0.9, 0.5, 0.0, 1.0, 0.0, 0.3, 0.05)  # share of the labels of each sample of a step
Batch = dict[str, torch.Tensor]


def small_model(**options: Any) -> OrthrosForCausalLM:
    config = OrthrosConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        base_window=4,
        **options,
    )
    model = OrthrosForCausalLM(config)
    model.reset_parameters(7)
    return model


def engine_config(micro_batch_size: int, zero_stage: int, precision: str = "fp32", **train: Any) -> Config:
    return Config.model_validate(
        {
            "output_dir": "unused",
            "precision": precision,
            "model": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
            "train": {
                "steps": STEPS,
                "micro_batch_size": micro_batch_size,
                "global_batch_size": SAMPLES,
                "sequence_length": TOKENS,
                **train,
            },
            "optimizer": {"affine_lr_scale": 0.5, "clip_grad_norm": 1.0},
            "parallel": {"zero_stage": zero_stage},
        }
    )


def data_parallel_engine(model: OrthrosForCausalLM, config: Config, ranks: Ranks) -> TrainingEngine:
    """Every rank a replica."""
    mesh = Mesh(data_size=ranks.world_size, data_rank=ranks.rank)
    accumulation_steps = SAMPLES // (config.train.micro_batch_size * ranks.world_size)
    return build_engine(model, config, ranks, mesh, accumulation_steps)


def sample(step: int, index: int) -> Batch:
    draw = torch.Generator().manual_seed(1000 * step + index)
    row = torch.randint(0, VOCAB, (1, TOKENS + 1), generator=draw)
    labels = row[:, 1:].clone()
    labels[torch.rand(1, TOKENS, generator=draw) >= KEPT_LABELS[index]] = -100
    documents = (torch.arange(TOKENS) // 7)[None]
    return {"input_ids": row[:, :-1], "shift_labels": labels, "document_ids": documents}


def batch_of(step: int, indices: range) -> Batch:
    samples = [sample(step, index) for index in indices]
    return {key: torch.cat([one[key] for one in samples]) for key in samples[0]}


def valid_labels(step: int) -> int:
    return int((batch_of(step, range(SAMPLES))["shift_labels"] != -100).sum())


def full_moments(engine: TrainingEngine, key: str) -> dict[str, torch.Tensor]:
    """A moment of every trained parameter, gathered from its shards."""
    optimizer = engine.deepspeed.optimizer
    if engine.zero_stage < 3:  # DeepSpeed links moments to parameters before it has made those of all groups
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    return {name: deepspeed.utils.safe_get_full_optimizer_state(p, key) for name, p in named}
