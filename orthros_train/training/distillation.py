"""A teacher: the model that a conversion came from, whose predictions the converted one learns to give.

The teacher is the same weights run as the transformer arm: full attention, one stream. Its folder is the untrained
conversion itself, whose affines are the identity, so nothing of the source is lost or added.

    loss = (1 - a) · CE + a · τ² · Σ_i KL(softmax(teacher_i / τ) || softmax(model_i / τ)) / N

over the N output positions that have labels (Hinton et al. 2015; τ² keeps the gradient's size for any τ), in chunks of
tokens from both models' final vectors (`model/chunked_loss.py`): the logits of all tokens never exist.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from orthros_train.config import Config
from orthros_train.config.adaptation import DistillationSection
from orthros_train.errors import InputError, damaged_model_errors
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.model.chunked_loss import TokenLoss
from orthros_train.model.layer_factory import IGNORE_INDEX
from orthros_train.model_folder.model_parameters import is_affine
from orthros_train.model_folder.weights import load_weights
from orthros_train.training.batches import Batch


class Teacher:
    """A frozen transformer, whole on every rank.

    Args:
        model: gives the logits.
        section: weight and temperature.
    """

    def __init__(self, model: OrthrosForCausalLM, section: DistillationSection) -> None:
        self._model = model.eval().requires_grad_(False)
        self._weight, self._temperature = section.weight, section.temperature

    @torch.no_grad()
    def token_loss(self, inputs: Batch) -> TokenLoss:
        """The blend for each token of a micro-batch. The teacher has then read it; its head runs within the loss.

        Args:
            inputs: what the trained model gets, on its device.
        """
        names = {"input_ids": "input_ids", "output_positions": "output_columns", "document_ids": "document_ids"}
        read = {names[key]: value for key, value in inputs.items() if key != "shift_labels"}
        return TokenLoss(self._blend, (self._model.model(**read), self._model.lm_head.weight))

    def _blend(self, logits: Tensor, labels: Tensor, taught: Tensor) -> Tensor:
        """Logits (1, m, vocab) of both models and labels (1, m) -> losses (1, m), 0 where a label is ignored."""
        divergence = kl_divergence(logits, taught, self._temperature).masked_fill(labels == IGNORE_INDEX, 0.0)
        return (1 - self._weight) * self._model.factory.cross_entropy(logits, labels) + self._weight * divergence


def kl_divergence(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """τ² · KL(softmax(taught / τ) || softmax(logits / τ)) of each row, in at least float32: (…, vocab) twice -> (…)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    ours, theirs = (F.log_softmax(each.to(wide) / temperature, dim=-1) for each in (logits, taught))
    return temperature**2 * F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=-1)


def load_teacher(config: Config, model_config: OrthrosConfig, device: torch.device) -> Teacher | None:
    """The run's teacher, None if it has none.

    Raises:
        InputError: the folder holds no model, one of another vocabulary, or one that was trained as an Orthros.
    """
    section = config.adaptation.distillation
    if section.weight == 0:
        return None
    folder = Path(section.teacher or str(config.init_from))  # the config has one of them
    if not (folder / "config.json").is_file():
        raise InputError(f"teacher {folder} has no config.json; give the folder of a converted model")
    try:
        source = OrthrosConfig.from_pretrained(folder)
        if source.vocab_size != model_config.vocab_size:
            raise InputError(
                f"teacher {folder} has vocab_size {source.vocab_size}, this config {model_config.vocab_size}: a "
                "teacher shares the tokenizer; name another with adaptation.distillation.teacher"
            )
        _refuse_trained_affines(folder)
        model, problems = load_weights(
            folder,
            _as_transformer(source, model_config.attention_kernel),
            torch.bfloat16 if config.precision == "bf16" else torch.float32,
        )
    except damaged_model_errors() as error:
        raise InputError(f"teacher {folder} cannot be read: {error}") from error
    for name, problem in problems.items():
        if not is_affine(name):  # a transformer has none
            raise InputError(f"teacher {folder} does not fit its config.json: {name} {problem}")
    model.to(device)  # type: ignore[arg-type]
    return Teacher(model, section)


def _as_transformer(source: OrthrosConfig, kernel: str) -> OrthrosConfig:
    changes = {"architecture": "transformer", "base_window": None, "base_sinks": 0, "query_affine": "none"}
    return OrthrosConfig(**{**source.to_dict(), **changes, "attention_kernel": kernel})


def _refuse_trained_affines(folder: Path) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in filter(is_affine, tensors.keys()):
                identity = 1.0 if name.endswith(".gain") else 0.0
                if not bool((tensors.get_tensor(name) == identity).all()):
                    raise InputError(
                        f"teacher {folder} was trained as an Orthros ({name} is not the identity), so as a transformer "
                        "it is another model; name the untrained conversion with adaptation.distillation.teacher"
                    )
