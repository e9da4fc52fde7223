"""Every layout trains to what one process trains to: losses, gradient norms, gradients and moments.

What the ranks hold is put together through a checkpoint, so the state files are tested along with the engines.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from orthros_train.config import Config, gradient_accumulation_steps
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.parallel.factory import factory_for
from orthros_train.parallel.mesh import Mesh, mesh_of
from orthros_train.parallel.pipeline import canonical_name
from orthros_train.training.checkpoints import save_checkpoint
from orthros_train.training.engine import TrainingEngine
from orthros_train.training.engines import build_engine, build_module
from orthros_train.training.initial_model import InitialValues
from orthros_train.training.manifest import Layout, Manifest, Progress, read_manifest, step_folder
from orthros_train.training.optimizer import parameter_groups
from orthros_train.training.ranks import start_ranks
from orthros_train.training.state_files import SavedState, load_state
from orthros_train.training.state_pieces import MOMENTS, start_from_fp32
from tests.distributed import run_distributed
from tests.training.small_engines import SAMPLES, STEPS, TOKENS, Batch, batch_of, engine_config

SEED = 7
RATE = 1e-3  # ten steps far enough to tell, and too near to blow up the rounding of another order of sums
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"vocab_size": 67, "base_sinks": 1},
    "everything": {
        "vocab_size": 65,
        "tie_word_embeddings": True,
        "qk_norm": True,
        "attention_bias": True,
        "num_key_value_heads": 4,
    },
    "259 ids": {"vocab_size": 259, "num_key_value_heads": 4},
    "32003 ids": {"vocab_size": 32003, "num_key_value_heads": 4},
    "transformer": {"vocab_size": 64, "architecture": "transformer", "tie_word_embeddings": True},
}
# name: (ranks, the section `parallel`)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "PP2": (2, {"pipeline": 2}),
    "TP2": (2, {"tensor": 2}),
    "TP2·SP": (2, {"tensor": 2, "sequence": True}),
    "DP2": (2, {}),
    "DP2·ZeRO-2·overlap": (2, {"zero_stage": 2, "overlap_gradients": True}),
    "TP2·ZeRO-3": (2, {"tensor": 2, "zero_stage": 3}),
    "PP2·TP2": (4, {"pipeline": 2, "tensor": 2}),
    "PP2·TP2·SP": (4, {"pipeline": 2, "tensor": 2, "sequence": True}),
    "PP2·DP2": (4, {"pipeline": 2}),
    "TP2·DP2": (4, {"tensor": 2}),
    "TP2·DP2·ZeRO-2": (4, {"tensor": 2, "zero_stage": 2}),
    "TP2·DP2·ZeRO-3": (4, {"tensor": 2, "zero_stage": 3}),
    "TP2·SP·DP2·ZeRO-3": (4, {"tensor": 2, "sequence": True, "zero_stage": 3}),
    "TP4": (4, {"tensor": 4}),
    "PP4": (4, {"pipeline": 4}),
}
USES = ("pretraining", "answers")
# every layout once, every model and use on several
REPRESENTATIVES = [
    ("PP2", "plain", "answers"),
    ("TP2", "everything", "pretraining"),
    ("TP2·SP", "everything", "answers"),
    ("TP2·ZeRO-3", "plain", "pretraining"),
    ("DP2·ZeRO-2·overlap", "plain", "pretraining"),
    ("PP2·TP2", "plain", "pretraining"),
    ("PP2·TP2·SP", "everything", "answers"),
    ("PP2·DP2", "everything", "pretraining"),
    ("TP2·DP2", "transformer", "answers"),
    ("TP2·DP2·ZeRO-2", "everything", "answers"),
    ("TP2·SP·DP2·ZeRO-3", "plain", "answers"),
    ("TP4", "259 ids", "pretraining"),
    ("PP4", "transformer", "pretraining"),
    ("PP4", "32003 ids", "answers"),  # stages of the embedding alone and of the head alone: without affines
]


def fits(layout: str, model: str) -> bool:
    """Whether the KV heads divide by the tensor axis."""
    return model_config(model).num_key_value_heads % LAYOUTS[layout][1].get("tensor", 1) == 0


def model_config(model: str) -> OrthrosConfig:
    defaults: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "base_window": 4,
        "initializer_range": 0.1,
    }
    return OrthrosConfig(**{**defaults, **MODELS[model]})


EVERYTHING = [(layout, model) for layout in LAYOUTS for model in MODELS if fits(layout, model)]


def run_config(parallel: dict[str, Any], precision: str = "fp32", micro_batch_size: int = 2, **train: Any) -> Config:
    config = engine_config(micro_batch_size, 1, precision, seed=SEED, **train)
    values = config.model_dump()
    values["model"]["num_hidden_layers"] = 4
    return Config.model_validate({**values, "parallel": parallel})


def of_use(batch: Batch, use: str) -> Batch:
    """The batch as it is, or output tokens at four of its positions only, fewer in some rows."""
    if use == "pretraining":
        return batch
    rows = batch["input_ids"].shape[0]
    draw = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
    positions = torch.stack([torch.randperm(TOKENS, generator=draw)[:4].sort().values for _ in range(rows)])
    positions[batch["input_ids"][:, 0] % 2 == 0, 2:] = -1
    labels = torch.where(positions >= 0, batch["shift_labels"].gather(1, positions.clamp(min=0)), -100)
    return {**batch, "output_positions": positions, "shift_labels": labels}


def micro_batch(step: int, start: int, size: int, use: str) -> Batch:
    rows = [of_use(batch_of(step, range(index, index + 1)), use) for index in range(start, start + size)]
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def label_count(step: int, use: str) -> int:
    return int((micro_batch(step, 0, SAMPLES, use)["shift_labels"] != -100).sum())


def one_process(model: str, use: str) -> dict[str, Any]:
    """Ten steps in plain PyTorch."""
    module = OrthrosForCausalLM(model_config(model))
    module.reset_parameters(SEED)
    section = run_config({}).optimizer
    groups = parameter_groups(module.named_parameters(), section)
    for group in groups:
        group["lr"] = RATE * group["lr_scale"]
    adam = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.eps)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        options = {"num_items_in_batch": label_count(step, use), "return_logits": False}
        loss = module(**micro_batch(step, 0, SAMPLES, use), **options).loss
        loss.backward()
        result["losses"].append(loss.item())
        result["norms"].append(clip(module, 1.0))
        adam.step()
        adam.zero_grad()
        if step == 0:
            result["gradients"] = {n: adam.state[p]["exp_avg"] / 0.1 for n, p in module.named_parameters()}
    for moment in MOMENTS:
        result[moment] = {name: adam.state[p][moment] for name, p in module.named_parameters()}
    return result


def clip(module: torch.nn.Module, largest: float) -> float:
    """torch's clip_grad_norm_ with sums in float64: over a million elements in fp32 they are off by 1.4e-5."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    norm = float(torch.stack([gradient.double().pow(2).sum() for gradient in gradients]).sum().sqrt())
    for gradient in gradients:
        gradient.mul_(min(1.0, largest / (norm + 1e-6)))
    return norm


def initial_values(config: Config, model: str, mesh: Mesh) -> InitialValues:
    return InitialValues(config, model_config(model), factory_for(model_config(model), mesh))


def build(config: Config, model: str) -> TrainingEngine:
    ranks, mesh = start_ranks(60), mesh_of(config.parallel)
    module = build_module(config, mesh, initial_values(config, model, mesh))
    return build_engine(module, config, ranks, mesh, gradient_accumulation_steps(config, ranks.world_size))


def take_steps(engine: TrainingEngine, config: Config, use: str, steps: range) -> tuple[list[float], list[float]]:
    size, mesh = config.train.micro_batch_size, engine.mesh
    losses, norms = [], []
    for step in steps:
        starts = range(mesh.data_rank * size, SAMPLES, size * mesh.data_size)
        batches = [micro_batch(step, start, size, use) for start in starts]
        outcome = engine.step(batches, label_count(step, use), RATE)
        assert outcome.applied
        losses.append(float(engine.ranks.gather([outcome.loss if mesh.speaks else 0.0]).sum()))
        norms.append(outcome.grad_norm)
    return losses, norms


def save(engine: TrainingEngine, config: Config, folder: Path, step: int) -> None:
    parallel = config.parallel
    layout = Layout(engine.ranks.world_size, parallel.zero_stage, parallel.tensor, parallel.pipeline, config.precision)
    manifest = Manifest(Progress(step=step, updates=step), layout, {}, {}, {}, "")
    save_checkpoint(engine, folder, manifest, lambda path: None, keep_last=9)


def laid_out(config: Config, model: str, use: str, folder: Path) -> tuple[list[float], list[float]]:
    """Ten steps in a layout; a checkpoint after the first and the last."""
    engine = build(config, model)
    first = take_steps(engine, config, use, range(1))
    save(engine, config, folder, 1)
    rest = take_steps(engine, config, use, range(1, STEPS))
    save(engine, config, folder, STEPS)
    return first[0] + rest[0], first[1] + rest[1]


def saved_state(folder: Path, step: int) -> SavedState:
    checkpoint = folder / step_folder(step)
    return SavedState(checkpoint, read_manifest(checkpoint))


def difference(one: Any, two: Any) -> float:
    """max|one - two| / max(1, max|two|)."""
    one, two = torch.as_tensor(one), torch.as_tensor(two)
    assert one.shape == two.shape
    return float((one - two).abs().max() / two.abs().max().clamp(min=1.0))


def assert_same_training(layout: str, model: str, use: str, folder: Path, **train: Any) -> None:
    world_size, parallel = LAYOUTS[layout]
    expected = run_distributed(one_process, 1, model, use)[0]
    config = run_config(parallel, **train)
    for losses, norms in run_distributed(laid_out, world_size, config, model, use, folder):
        assert difference(losses, expected["losses"]) <= 1e-5
        assert difference(norms, expected["norms"]) <= 1e-5
    first, last = saved_state(folder, 1), saved_state(folder, STEPS)
    assert first.parameters.keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert difference(first.tensor(name, "exp_avg") / 0.1, gradient) <= 1e-5, name
        for moment in MOMENTS:  # averages of the gradients of all ten steps and of their squares
            assert difference(last.tensor(name, moment), expected[moment][name]) <= 1e-5, (moment, name)


@pytest.mark.parametrize(("layout", "model", "use"), REPRESENTATIVES)
def test_a_layout_changes_nothing(tmp_path: Path, layout: str, model: str, use: str) -> None:
    assert_same_training(layout, model, use, tmp_path)


@pytest.mark.evidence
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("layout", "model"), EVERYTHING)
def test_every_layout_model_and_use(tmp_path: Path, layout: str, model: str, use: str) -> None:
    assert_same_training(layout, model, use, tmp_path)


@pytest.mark.parametrize("layout", ["PP2·TP2·SP", "TP2·ZeRO-3"])
def test_activation_checkpointing(tmp_path: Path, layout: str) -> None:
    assert_same_training(layout, "everything", "pretraining", tmp_path, activation_checkpointing=True)


def assert_bf16_follows(layout: str, model: str, use: str, folder: Path) -> None:
    """bf16 has 8 bits of mantissa: losses agree to 1%, gradient norms to 10% over ten steps at a high rate."""
    world_size, parallel = LAYOUTS[layout]
    expected = run_distributed(one_process, 1, model, use)[0]
    config = run_config(parallel, "bf16")
    for losses, norms in run_distributed(laid_out, world_size, config, model, use, folder):
        assert difference(losses, expected["losses"]) <= 0.01
        assert difference(norms, expected["norms"]) <= 0.1


@pytest.mark.parametrize("layout", ["PP2·TP2·SP", "TP2·DP2·ZeRO-3"])
def test_bf16_follows_fp32(tmp_path: Path, layout: str) -> None:
    assert_bf16_follows(layout, "everything", "pretraining", tmp_path)


@pytest.mark.evidence
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("layout", "model"), [(layout, model) for layout, model in EVERYTHING if "ids" not in model])
def test_bf16_follows_fp32_everywhere(tmp_path: Path, layout: str, model: str, use: str) -> None:
    assert_bf16_follows(layout, model, use, tmp_path)


def test_a_tied_head_stays_the_embedding() -> None:
    """Its two copies, on the first and on the last stage, after ten steps."""

    def copies(config: Config) -> torch.Tensor:
        engine = build(config, "everything")
        take_steps(engine, config, "pretraining", range(STEPS))
        (weight,) = (p for name, p in engine.module.named_parameters() if "embed_tokens" in name)
        return weight.detach().clone()

    world_size, parallel = LAYOUTS["PP2·DP2"]
    first, *others = run_distributed(copies, world_size, run_config(parallel))
    assert all(torch.equal(first, other) for other in others)


def test_a_tied_pipeline_warns_of_nothing() -> None:
    """torch warns of wrong gradients if autograd sees DeepSpeed broadcast the tied weight."""

    def warned_of(config: Config) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            take_steps(build(config, "everything"), config, "pretraining", range(1))
        return [str(warning.message) for warning in caught if "c10d" in str(warning.message)]

    assert run_distributed(warned_of, 2, run_config({"pipeline": 2})) == [[], []]


FROZEN = "model.layers.1.self_attn.q_proj.weight"  # split over the tensor axis
SOURCES = ["PP2·TP2·SP", "PP2·DP2", "TP2·ZeRO-3", "TP2·DP2·ZeRO-2", "DP2"]


def with_a_frozen_parameter(config: Config, model: str) -> TrainingEngine:
    ranks, mesh = start_ranks(60), mesh_of(config.parallel)
    module = build_module(config, mesh, initial_values(config, model, mesh))
    for name, parameter in module.named_parameters():
        if (name if mesh.pipeline_size == 1 else canonical_name(name)) == FROZEN:
            parameter.requires_grad_(False)
    return build_engine(module, config, ranks, mesh, gradient_accumulation_steps(config, ranks.world_size))


def saved_after_three_steps(config: Config, model: str, folder: Path) -> None:
    engine = with_a_frozen_parameter(config, model)
    take_steps(engine, config, "pretraining", range(3))
    save(engine, config, folder, 3)


def loaded_and_saved(config: Config, model: str, source: Path, target: Path) -> list[float]:
    """From other initial weights; the loss of one more step."""
    engine = with_a_frozen_parameter(config, model)
    checkpoint = source / step_folder(3)
    load_state(engine, checkpoint, read_manifest(checkpoint))
    save(engine, config, target, 3)
    return take_steps(engine, config, "pretraining", range(3, 4))[0]


def assert_loads_bitwise(source: str, targets: list[str], model: str, precision: str, folder: Path) -> None:
    """Every weight and moment, whatever layout saved and whatever layout loads; then one more step has one loss."""
    ranks, parallel = LAYOUTS[source]
    run_distributed(saved_after_three_steps, ranks, run_config(parallel, precision), model, folder / "source")
    expected = saved_state(folder / "source", 3)
    next_losses = []
    for target in targets:
        ranks, parallel = LAYOUTS[target]
        config = Config.model_validate({**run_config(parallel, precision).model_dump(), "train": OTHER_SEED})
        losses = run_distributed(loaded_and_saved, ranks, config, model, folder / "source", folder / target)
        next_losses += [loss for (loss,) in losses]
        found = saved_state(folder / target, 3)
        assert found.parameters.keys() == expected.parameters.keys()
        for name in expected.parameters:
            assert torch.equal(found.weight(name), expected.weight(name)), (target, name)
            for moment in MOMENTS if name != FROZEN else ():
                assert torch.equal(found.tensor(name, moment), expected.tensor(name, moment)), (target, name, moment)
    assert max(next_losses) - min(next_losses) <= (1e-5 if precision == "fp32" else 1e-2) * max(next_losses)


OTHER_SEED = {**run_config({}).train.model_dump(), "seed": 8}


@pytest.mark.parametrize(
    ("source", "targets", "precision"),
    [
        ("PP2·TP2·SP", ["TP2·ZeRO-3", "PP2·DP2"], "fp32"),
        ("TP2·ZeRO-3", ["PP2·TP2", "DP2"], "bf16"),
        ("PP2·DP2", ["TP2·DP2·ZeRO-3"], "fp32"),
    ],
)
def test_another_layout_loads_the_same_numbers(tmp_path: Path, source: str, targets: list[str], precision: str) -> None:
    assert_loads_bitwise(source, targets, "everything", precision, tmp_path)


@pytest.mark.evidence
@pytest.mark.parametrize(
    ("model", "precision"), [("everything", "fp32"), ("everything", "bf16"), ("259 ids", "fp32"), ("plain", "fp32")]
)
@pytest.mark.parametrize("source", SOURCES)
def test_every_layout_loads_the_same_numbers(tmp_path: Path, source: str, model: str, precision: str) -> None:
    assert_loads_bitwise(source, [layout for layout in LAYOUTS if fits(layout, model)], model, precision, tmp_path)


def start_in_bf16(config: Config, model: str, folder: Path) -> None:
    engine = build(config, model)
    start_from_fp32(engine, initial_values(config, model, engine.mesh))
    save(engine, config, folder, 0)


@pytest.mark.parametrize("layout", ["DP2", "TP2·ZeRO-3", "PP2·TP2·SP"])
def test_bf16_starts_from_fp32_master_weights(tmp_path: Path, layout: str) -> None:
    """Bitwise those of the fp32 model, which DeepSpeed has rounded before it makes its own."""
    world_size, parallel = LAYOUTS[layout]
    run_distributed(start_in_bf16, world_size, run_config(parallel, "bf16"), "everything", tmp_path)
    module = OrthrosForCausalLM(model_config("everything"))
    module.reset_parameters(SEED)
    saved = saved_state(tmp_path, 0)
    assert all(torch.equal(saved.weight(name), parameter) for name, parameter in module.named_parameters())
