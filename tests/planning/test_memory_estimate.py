"""The dry run's memory estimate against what torch and the ZeRO stages really keep."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule
from torch import nn

from orthros_train.config import Config
from orthros_train.config.adaptation import DistillationSection
from orthros_train.model import OrthrosForCausalLM
from orthros_train.planning.memory_estimate import BYTES, activation_bytes, memory_parts, waiting_bytes
from orthros_train.planning.stage_plan import Stage, plan_stages
from orthros_train.training.distillation import load_teacher

from .stage_runs import VOCABULARY, layout_config, running_stage, small_model

TRANSFORMER = {"architecture": "transformer"}
ZERO_STAGES = [  # precision, ZeRO stage; bytes a parameter of weights, gradients, master weights, moments of 4 replicas
    ("bf16", 1, (2, 6, 1, 2)),
    ("bf16", 2, (2, 1, 1, 2)),
    ("bf16", 3, (0.5, 1, 1, 2)),
    ("fp32", 1, (4, 4, 1, 2)),
    ("fp32", 2, (4, 1, 1, 2)),
    ("fp32", 3, (1, 1, 1, 2)),
]


def kept_by_autograd(module: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes of distinct storages that a training forward holds for its backward when it ends, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: list[weakref.ref[torch.Tensor]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(weakref.ref(tensor))  # the loss has graphs of its own, which it drops chunk by chunk
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    assert output is not None
    held = [tensor.untyped_storage() for reference in saved if (tensor := reference()) is not None]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in held if storage.data_ptr() not in parameters}
    return sum(sizes.values())


def kept_by_one_process(config: Config) -> int:
    """Of a micro-batch's forward with its loss."""
    model = small_model(config)
    module = OrthrosForCausalLM(model).to(torch.bfloat16 if config.precision == "bf16" else torch.float32).train()
    if config.train.activation_checkpointing:
        module.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, model.vocab_size, (config.train.micro_batch_size, config.train.sequence_length))
    arguments: dict[str, Any] = {"num_items_in_batch": ids.numel(), "use_cache": False, "return_logits": False}
    return kept_by_autograd(module, lambda: module(ids, shift_labels=ids, **arguments).loss)


def estimated(config: Config, stage: Stage) -> int:
    """Activations and, on the last stage, the loss's gradients that wait: what autograd keeps."""
    model = small_model(config)
    waiting = waiting_bytes(config, model) if stage.is_last else 0
    return activation_bytes(config, model, stage) + waiting


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"base_sinks": 1},
        {"qk_norm": True},
        {"query_affine": "none"},
        {"num_hidden_layers": 1},
        {"num_key_value_heads": 2},
        {"hidden_size": 128, "intermediate_size": 64, "num_key_value_heads": 4},
        {**TRANSFORMER},
        {**TRANSFORMER, "base_window": None},
    ],
    ids=str,
)
def test_activations_are_what_autograd_keeps(changes: dict[str, Any], precision: str) -> None:
    config = layout_config(precision, **changes)
    (stage,) = plan_stages(config, small_model(config), 1)
    assert estimated(config, stage) == pytest.approx(kept_by_one_process(config), rel=0.1)


def test_depth_costs_no_time() -> None:
    config = layout_config("fp32", num_hidden_layers=10_000)
    shallow = layout_config("fp32", num_hidden_layers=2)
    started = time.perf_counter()
    deep, flat = (estimated(each, plan_stages(each, small_model(each), 1)[0]) for each in (config, shallow))
    assert time.perf_counter() - started < 0.5
    assert deep > 4_000 * flat


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"tensor": 2},
        {"tensor": 4, "sequence": True, "qk_norm": True},
        {"pipeline": 2, "tie_word_embeddings": True},
        {"tensor": 2, "sequence": True, "pipeline": 3, "tie_word_embeddings": True},
        {"tensor": 2, "pipeline": 2, "attention_bias": True, **TRANSFORMER},
    ],
    ids=str,
)
def test_activations_of_a_layout_are_what_autograd_keeps(changes: dict[str, Any], precision: str) -> None:
    config = layout_config(precision, **changes)
    world_size = 2 * config.parallel.tensor * config.parallel.pipeline
    for stage in plan_stages(config, small_model(config), world_size):
        with running_stage(config, world_size, stage.index) as running:
            inputs = running.inputs()
            kept = kept_by_autograd(running.module, lambda: running.forward(inputs))  # noqa: B023 - called at once
        assert estimated(config, stage) == pytest.approx(kept, rel=0.1), stage


@pytest.mark.parametrize(
    "changes",
    [{}, TRANSFORMER, {"tensor": 2}, {"tensor": 2, "sequence": True}],
    ids=["orthros", "transformer", "TP", "SP"],
)
def test_checkpointing_keeps_one_tensor_a_layer(changes: dict[str, Any]) -> None:
    kept, estimates = [], []
    for layers in (3, 5):
        config = layout_config("fp32", checkpointing=True, num_hidden_layers=layers, **changes)
        (stage,) = plan_stages(config, small_model(config), config.parallel.tensor)
        estimates.append(estimated(config, stage))
        if config.parallel.tensor == 1:
            kept.append(kept_by_one_process(config))
            continue
        with running_stage(config, config.parallel.tensor, 0) as running:
            inputs = running.inputs()
            kept.append(kept_by_autograd(running.module, lambda: running.forward(inputs)))  # noqa: B023
    assert estimates[1] - estimates[0] == pytest.approx(kept[1] - kept[0], rel=0.01)
    assert estimates[1] < estimated(layout_config("fp32", num_hidden_layers=5, **changes), stage)


def sizes(config: Config, world_size: int, stage: int = 0) -> dict[str, int]:
    """Bytes by part."""
    model = small_model(config)
    stages = plan_stages(config, model, world_size)
    return {part.name: part.size_bytes for part in memory_parts(config, model, stages[stage], world_size)}


@pytest.mark.parametrize(("precision", "zero_stage", "bytes_a_parameter"), ZERO_STAGES)
@pytest.mark.parametrize("tensor", [1, 2])
def test_zero_stages_share_among_replicas_what_they_promise(
    tensor: int, precision: str, zero_stage: int, bytes_a_parameter: tuple[float, ...]
) -> None:
    config = layout_config(precision, zero_stage=zero_stage, tensor=tensor)
    (stage,) = plan_stages(config, small_model(config), tensor)
    found = sizes(config, 4 * tensor)
    for name, expected in zip(
        ("weights", "gradients", "master weights", "Adam moments"), bytes_a_parameter, strict=True
    ):
        assert found[name] == pytest.approx(expected * stage.parameters, rel=1e-3), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}, {**TRANSFORMER, "base_window": None}], ids=str)
def test_keys_and_values_are_those_of_a_real_cache(changes: dict[str, Any], precision: str) -> None:
    config = layout_config(precision, **changes)
    model, train = small_model(config), config.train
    module = OrthrosForCausalLM(model).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    ids = torch.randint(0, model.vocab_size, (train.micro_batch_size, train.sequence_length))
    with torch.no_grad():
        _, cache = module.prefill(ids)
    layers = range(model.num_hidden_layers)
    assert sizes(config, 1)["KV"] == sum(cache.keys(layer).nbytes + cache.values(layer).nbytes for layer in layers)
    shared = layout_config(precision, tensor=2, **changes)
    assert sizes(shared, 2)["KV"] == sizes(config, 1)["KV"] // 2
    again = layout_config(precision, checkpointing=True, **changes)
    assert sizes(again, 1)["KV"] == sizes(config, 1)["KV"] // model.num_hidden_layers


def distilled(precision: str, folder: Path, **changes: Any) -> Config:
    """A run with a teacher as a conversion leaves it, in `folder`."""
    config = layout_config(precision, **changes)
    OrthrosForCausalLM(small_model(config)).save_pretrained(folder)
    config.adaptation.distillation = DistillationSection(weight=0.5, teacher=str(folder))
    return config


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "qk_norm": True}], ids=str)
def test_a_teacher_is_counted_as_it_is_loaded(precision: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = distilled(precision, tmp_path, **changes)
    teacher = load_teacher(config, small_model(config), torch.device("cpu"))
    assert teacher is not None
    held = sum(parameter.nbytes for parameter in teacher._model.parameters())
    assert sizes(config, 1)["teacher"] == sizes(config, 8)["teacher"] == held
    assert "teacher" not in sizes(layout_config(precision, **changes), 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_distillation_keeps_is_what_autograd_keeps(precision: str, tmp_path: Path) -> None:
    config = distilled(precision, tmp_path)
    model = small_model(config)
    teacher = load_teacher(config, model, torch.device("cpu"))
    assert teacher is not None
    module = OrthrosForCausalLM(model).to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
    ids = torch.randint(0, VOCABULARY, (config.train.micro_batch_size, config.train.sequence_length))
    inputs = {"input_ids": ids, "shift_labels": ids}
    options: dict[str, Any] = {"num_items_in_batch": ids.numel(), "use_cache": False, "return_logits": False}

    def forward() -> torch.Tensor:
        return module(**inputs, **options, token_loss=teacher.token_loss(inputs)).loss

    (stage,) = plan_stages(config, model, 1)
    assert estimated(config, stage) == pytest.approx(kept_by_autograd(module, forward), rel=0.1)
    element, tokens = BYTES[precision], ids.numel()
    of_a_chunk = tokens * VOCABULARY * (2 * element + 5 * 4)
    assert sizes(config, 1)["logits"] == of_a_chunk + tokens * 64 * element + waiting_bytes(config, model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("taught", [False, True])
def test_what_a_chunk_takes_is_what_the_loss_allocates(
    precision: str, taught: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a chunk in one piece, as on a GPU."""
    monkeypatch.setattr("orthros_train.model.chunked_loss.CPU_PIECE_LOGITS", 2**40)
    config = distilled(precision, tmp_path) if taught else layout_config(precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = OrthrosForCausalLM(small_model(config)).to(dtype)
    tokens = config.train.micro_batch_size * config.train.sequence_length
    hidden = torch.randn(1, tokens, model.config.hidden_size, dtype=dtype).requires_grad_()
    loss = None
    if taught:
        teacher = load_teacher(config, model.config, torch.device("cpu"))
        assert teacher is not None
        loss = teacher.token_loss({"input_ids": torch.zeros(1, tokens, dtype=torch.int64)})
    with torch.profiler.profile(profile_memory=True) as profile:
        model.lm_head(hidden, torch.zeros(1, tokens, dtype=torch.int64), loss)
    growth = [each.nbytes() for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    peak = max(accumulate(growth))
    given = tokens * model.config.hidden_size * dtype.itemsize if taught else 0  # to the loss
    assert sizes(config, 1)["logits"] - given == pytest.approx(peak, rel=0.1)


def test_activations_and_logits_do_not_depend_on_the_replicas() -> None:
    one, many = sizes(layout_config("bf16"), 1), sizes(layout_config("bf16"), 8)
    assert one["activations"] == many["activations"]
    assert one["logits"] == many["logits"] == 2 * 96 * 301 * (2 + 3 * 4) + 64 * (4 * 301 + 2 * 2 * 96)
    assert "boundaries" not in one


def test_long_rows_have_the_logits_of_a_chunk_alone() -> None:
    config = layout_config("bf16")
    config.train.sequence_length = 4096
    tokens = 2 * 4096
    assert sizes(config, 1)["logits"] == 1024 * 301 * (2 + 3 * 4) + 64 * (4 * 301 + 2 * tokens)


def test_stages_hold_what_their_place_needs() -> None:
    config = layout_config("bf16", pipeline=3, tensor=2, num_hidden_layers=9)
    first, middle, last = (sizes(config, 6, stage) for stage in range(3))
    assert "logits" not in first
    assert "logits" not in middle
    assert last["logits"] == 2 * 96 * 151 * (2 + 2 * 4) + 64 * (4 * 151 + 2 * 2 * 96)  # the padded vocabulary's half
    residual = 2 * 2 * 96 * 64 * 2  # [X;Y] of two rows in bf16
    assert first["boundaries"] == (3 + 1) * residual
    assert middle["boundaries"] == 2 * (2 + 1) * residual
    assert last["boundaries"] == (1 + 1) * residual


def in_flight(stages: int, stage: int, micro_batches: int) -> int:
    """The most forwards without their backward in DeepSpeed's own schedule."""
    most = now = 0
    for commands in TrainSchedule(micro_batches, stages, stage):
        now += sum(isinstance(command, ForwardPass) for command in commands)
        most = max(most, now)
        now -= sum(isinstance(command, BackwardPass) for command in commands)
    return most


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_micro_batches_in_flight_are_those_of_the_schedule(stages: int, micro_batches: int) -> None:
    for index in range(stages):
        stage = Stage(index, stages, range(1), 0, 0, megatron=True)
        assert stage.micro_batches_in_flight(micro_batches) == in_flight(stages, index, micro_batches)
