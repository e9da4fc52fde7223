"""A teacher: the model that a conversion came from, whose predictions the converted one learns to give.

The teacher is the same weights run as the transformer arm: full attention, one stream. Its folder is the untrained
conversion itself, whose affines are the identity, so nothing of the source is lost or added.

    loss = (1 - a) · CE + a · τ² · Σ_i KL(softmax(teacher_i / τ) || softmax(model_i / τ)) / N

over the N output positions that have labels (Hinton et al. 2015; τ² keeps the gradient's size for any τ).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from orthros_train.config import Config
from orthros_train.config.adaptation import DistillationSection
from orthros_train.errors import InputError, damaged_model_errors
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.model.layer_factory import IGNORE_INDEX
from orthros_train.model_folder.model_parameters import is_affine
from orthros_train.model_folder.weights import load_weights


class Teacher:
    """A frozen transformer, whole on every rank.

    Args:
        model: gives the logits.
        section: weight and temperature.
    """

    def __init__(self, model: OrthrosForCausalLM, section: DistillationSection) -> None:
        self._model = model.eval().requires_grad_(False)
        self._weight, self._temperature = section.weight, section.temperature

    def blended_loss(self, output: Any, inputs: dict[str, Any], normalizer: int) -> Tensor:
        """The loss of a micro-batch, a scalar.

        Args:
            output: the trained model's, with its cross entropy / normalizer and its logits.
            inputs: what it got, on its device.
            normalizer: N, of the global batch.
        """
        labels = inputs["shift_labels"]
        with torch.no_grad():
            asked = {key: value for key, value in inputs.items() if key != "shift_labels"}
            taught = self._model(**asked, use_cache=False).logits
        valid = labels != IGNORE_INDEX
        divergence = kl_sum(output.logits[valid], taught[valid], self._temperature) / normalizer
        return (1 - self._weight) * output.loss + self._weight * divergence


def kl_sum(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """τ² · Σ KL(softmax(taught / τ) || softmax(logits / τ)) over rows: (n, vocab) twice -> a scalar, in float32."""
    ours = F.log_softmax(logits.float() / temperature, dim=-1)
    theirs = F.log_softmax(taught.float() / temperature, dim=-1)
    return temperature**2 * F.kl_div(ours, theirs, reduction="sum", log_target=True)


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
