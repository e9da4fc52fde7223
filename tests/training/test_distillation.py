"""The teacher's loss, and runs with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from orthros_train.config import Config, orthros_config
from orthros_train.config.adaptation import DistillationSection
from orthros_train.conversion.from_checkpoint import export_hf
from orthros_train.data import PretrainingData, collate, load_tokenizer
from orthros_train.errors import InputError
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.training.distillation import Teacher, kl_divergence, load_teacher
from tests.model.largest_logits import LargestLogits
from tests.model.tiny import assert_close, tiny_config, tiny_model, token_ids
from tests.training.small_runs import MODEL, losses, metrics, run, small_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_against_its_definition(temperature: float) -> None:
    draw = torch.Generator().manual_seed(0)
    ours, theirs = (3 * torch.randn(5, 7, generator=draw) for _ in range(2))
    p, q = (theirs.double() / temperature).softmax(1), (ours.double() / temperature).softmax(1)
    expected = [float((p[row] * (p[row] / q[row]).log()).sum()) * temperature**2 for row in range(5)]
    assert kl_divergence(ours, theirs, temperature).tolist() == pytest.approx(expected, rel=1e-5)
    assert kl_divergence(theirs, theirs, temperature).tolist() == pytest.approx([0] * 5, abs=1e-6)


def blended_loss(teacher: Teacher, student: OrthrosForCausalLM, inputs: dict[str, Any], items: int) -> torch.Tensor:
    """As a training step computes it."""
    options = {"num_items_in_batch": items, "use_cache": False, "return_logits": False}
    return student(**inputs, **options, token_loss=teacher.token_loss(inputs)).loss


def batch() -> dict[str, Any]:
    """Two rows with four slots, two of which carry no label."""
    labels = token_ids(2, 4, seed=1)
    labels[0, 1] = labels[1, 3] = -100
    return {
        "input_ids": token_ids(2, 12),
        "document_ids": torch.tensor([[0] * 5 + [1] * 7, [0] * 12]),
        "output_positions": torch.tensor([[1, 3, 6, 11], [2, 5, 8, -1]]),
        "shift_labels": labels,
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("weight", "temperature"), [(0.25, 2.0), (1.0, 1.0)])
def test_loss_and_gradients_are_those_of_all_logits(
    tied: bool, weight: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 3 tokens and pieces of 2, against autograd through both models' whole logits, label by label."""
    monkeypatch.setattr("orthros_train.model.chunked_loss.CHUNK_TOKENS", 3)
    monkeypatch.setattr("orthros_train.model.chunked_loss.CPU_PIECE_LOGITS", 2 * 61)
    student = tiny_model(tie_word_embeddings=tied)
    reference = tiny_model(architecture="transformer", base_window=None, query_affine="none", hidden_size=48)
    inputs = batch()
    labels = inputs["shift_labels"]
    logits = student(**{**inputs, "shift_labels": None}, use_cache=False).logits
    with torch.no_grad():
        taught = reference(**{**inputs, "shift_labels": None}, use_cache=False).logits
    expected = torch.zeros((), dtype=torch.float64)
    for row, slot in (labels != -100).nonzero().tolist():
        q, p = (each[row, slot].div(temperature).softmax(0) for each in (logits, taught))
        cross_entropy = -logits[row, slot].softmax(0)[labels[row, slot]].log()
        expected = expected + (1 - weight) * cross_entropy + weight * temperature**2 * (p * (p / q).log()).sum()
    (3 * expected / 6).backward()
    wanted = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    student.zero_grad()

    teacher = Teacher(reference, DistillationSection(weight=weight, temperature=temperature))
    loss = blended_loss(teacher, student, inputs, 6)
    (3 * loss).backward()
    assert_close(loss, expected / 6)
    for name, parameter in student.named_parameters():
        assert_close(parameter.grad, wanted[name])
    assert all(parameter.grad is None for parameter in reference.parameters())
    with torch.no_grad():
        assert_close(blended_loss(teacher, student, inputs, 6), expected / 6)


def test_no_more_logits_than_a_chunk_of_either_model_ever_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orthros_train.model.chunked_loss.CHUNK_TOKENS", 3)
    monkeypatch.setattr("orthros_train.model.chunked_loss.CPU_PIECE_LOGITS", 2 * 61)
    student = tiny_model()
    teacher = Teacher(tiny_model(architecture="transformer", query_affine="none"), DistillationSection(weight=0.5))
    with LargestLogits(piece_tokens=2) as largest:
        blended_loss(teacher, student, batch(), 6).backward()
    assert largest.elements == 3 * 61
    assert largest.blocks == 2  # each model's, of all chunks


def test_logits_and_another_loss_exclude_each_other() -> None:
    model = tiny_model()
    teacher = Teacher(model, DistillationSection(weight=0.5))
    with pytest.raises(ValueError, match="token_loss is computed without logits"):
        model(**batch(), token_loss=teacher.token_loss(batch()))


def test_a_conversion_at_full_width_has_nothing_to_learn(tmp_path: Path) -> None:
    """Identity affines and a window over everything: the teacher's own predictions, no gradient from the KL."""
    folder = save_conversion(tmp_path / "conversion", base_window=64)
    config = distilled(tmp_path, folder, weight=1.0)
    teacher = load_teacher(config, orthros_config(config, 259), CPU)
    assert teacher is not None
    student = OrthrosForCausalLM.from_pretrained(folder)
    inputs = batch()
    loss = blended_loss(teacher, student, inputs, 6)
    loss.backward()
    assert abs(loss.item()) <= 1e-5
    gradients = [p.grad.abs().max() for p in student.parameters() if p.grad is not None]
    assert max(gradients) <= 1e-5


def save_conversion(folder: Path, **changes: Any) -> Path:
    """An Orthros as a conversion leaves it: random weights, identity affines."""
    config = OrthrosConfig(**{**MODEL, "vocab_size": 259, **changes})
    model = OrthrosForCausalLM(config)
    model.reset_parameters(5)
    model.save_pretrained(folder)
    return folder


def distilled(folder: Path, source: Path, corpus: Path = Path("unused"), **section: Any) -> Config:
    """A run from `source` with a teacher."""
    options = {"init_from": str(source), "adaptation__distillation": {"weight": 0.5, **section}}
    return small_config(folder / "run", corpus, **options)


def test_is_the_model_that_was_converted(tmp_path: Path) -> None:
    """Its logits are those of transformers' own Llama with the same weights."""
    folder = save_conversion(tmp_path / "conversion", base_window=4, base_sinks=1)
    config = distilled(tmp_path, folder)
    teacher = load_teacher(config, orthros_config(config, 259), CPU)
    assert teacher is not None
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    converted = OrthrosForCausalLM.from_pretrained(folder)
    llama = LlamaForCausalLM(
        LlamaConfig(
            **{name: getattr(converted.config, name) for name in sizes},
            rms_norm_eps=converted.config.rms_norm_eps,
            max_position_embeddings=64,
        )
    ).eval()
    assert not llama.load_state_dict(converted.state_dict(), strict=False).missing_keys
    ids = token_ids(2, 30)
    with torch.no_grad():
        assert (teacher._model(ids).logits - llama(ids).logits).abs().max() <= 1e-5


@pytest.mark.parametrize(("ranks", "zero_stage", "micro"), [(1, 1, 4), (2, 3, 2)])
def test_a_run_with_a_teacher(tmp_path: Path, corpus: Path, ranks: int, zero_stage: int, micro: int) -> None:
    """The first loss is the blend on the whole batch, whatever the layout; validation is plain cross entropy."""
    folder = save_conversion(tmp_path / "conversion")
    config = distilled(tmp_path, folder, corpus, temperature=2.0)
    config.parallel.zero_stage = zero_stage  # type: ignore[assignment]
    config.train.micro_batch_size = micro
    assert run(config, ranks) == 0
    data = PretrainingData(config, load_tokenizer(config.tokenizer), "train")
    inputs = collate([data.sample(index) for index in range(8)])
    labels = int((inputs["shift_labels"] != -100).sum())
    teacher = load_teacher(config, orthros_config(config, 259), CPU)
    assert teacher is not None
    with torch.no_grad():
        student = OrthrosForCausalLM.from_pretrained(folder)
        plain = student(**inputs, num_items_in_batch=labels).loss.item()
        expected = blended_loss(teacher, student, inputs, labels).item()
    assert losses(config)[0] == pytest.approx(expected, abs=1e-5)
    assert losses(config)[0] != pytest.approx(plain, abs=1e-2)
    assert metrics(config)[-1]["validation_loss"] > 3


def test_learns_from_the_teacher_alone(tmp_path: Path, corpus: Path) -> None:
    """With weight 1 the labels count for nothing, and the divergence that the window causes shrinks everywhere."""
    folder = save_conversion(tmp_path / "conversion", base_window=2, initializer_range=0.3)
    config = distilled(tmp_path, folder, corpus, weight=1.0)
    config.model.base_window, config.optimizer.learning_rate = 2, 1e-3
    config.train.steps, config.schedule.type = 40, "constant"
    assert run(config) == 0
    teacher = load_teacher(config, orthros_config(config, 259), CPU)
    assert teacher is not None
    data = PretrainingData(config, load_tokenizer(config.tokenizer), "validation")
    inputs = collate([data.sample(index) for index in range(data.epoch_sizes[0])])
    divergences = []
    for model in (folder, export_hf(config.output_dir, tmp_path / "exported")):
        with torch.no_grad():
            divergences.append(blended_loss(teacher, OrthrosForCausalLM.from_pretrained(model), inputs, 1).item())
    assert divergences[1] < 0.8 * divergences[0]


def test_unfit_teachers(tmp_path: Path, corpus: Path) -> None:
    folder = save_conversion(tmp_path / "conversion")
    trained = small_config(tmp_path / "trained", corpus, init_from=str(folder), train__steps=2)
    assert run(trained) == 0
    exported = export_hf(trained.output_dir, tmp_path / "exported")
    small = save_conversion(tmp_path / "small", vocab_size=100)
    broken = save_conversion(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"broken")
    for teacher, message in (
        (exported, r"was trained as an Orthros \(model.layers.0.self_attn.base_query.gain is not the identity\)"),
        (small, "has vocab_size 100, this config 259"),
        (tmp_path / "nowhere", "has no config.json"),
        (broken, "cannot be read"),
    ):
        config = distilled(tmp_path, folder, corpus, teacher=str(teacher))
        with pytest.raises(InputError, match=message):
            load_teacher(config, orthros_config(config, 259), CPU)


def test_no_teacher_without_a_weight(tmp_path: Path, corpus: Path) -> None:
    config = small_config(tmp_path, corpus)
    assert load_teacher(config, tiny_config(), CPU) is None
