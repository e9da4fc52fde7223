"""One way in for every model that can be evaluated, so that both arms go through the same code.

* an Orthros folder (`model_type: orthros`), of either architecture;
* a training checkpoint, or a run's folder, which stands for its newest checkpoint;
* a Llama-family folder: read as the transformer arm, or as Orthros where a base window is given, with identity affines.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.model_folder import load_folder_tokenizer, load_model, loading_errors, torch_device, torch_dtype
from orthros_train.errors import InputError
from orthros_train.model_folder.weights import MISSING, load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from orthros_train.model import OrthrosForCausalLM


@dataclass(frozen=True)
class EvaluatedModel:
    """A model ready to be scored.

    Attributes:
        source: what the user named.
        kind: "orthros folder", "checkpoint", or "MODEL_TYPE folder".
    """

    source: str
    kind: str
    model: OrthrosForCausalLM
    tokenizer: PreTrainedTokenizerBase


def load_evaluated_model(
    source: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    base_window: int | None = None,
    base_sinks: int | None = None,
) -> EvaluatedModel:
    """Load whatever `source` is.

    Args:
        source: a folder as listed above.
        dtype: one of model_folder.DTYPES, or torch's name of it; auto is the dtype that the weights are stored in.
        device: a torch device.
        base_window: read a Llama-family folder as Orthros with this window.
        base_sinks: its sinks; None: 1, as in a conversion.

    Raises:
        InputError: not a model of these kinds, damaged, without tokenizer, an unknown dtype, or a window for a model
            that has its own.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise InputError(
            f"model {folder} is not a folder; give an Orthros or Llama-family folder or a run's output_dir (models are "
            "not downloaded: `hf download ORGANIZATION/MODEL --local-dir DIR` does that)"
        )
    model_type = _model_type(folder)
    if model_type not in (None, "orthros"):
        if base_sinks is not None and base_window is None:
            raise InputError(
                f"--base-sinks {base_sinks} has no effect without --base-window: {folder} is read as the transformer "
                "arm then, which has no sinks; give both, or neither"
            )
        tokenizer = load_folder_tokenizer(folder)
        model = _load_llama(folder, dtype, device, base_window, base_sinks)
        return EvaluatedModel(str(source), f"{model_type} folder", model, tokenizer)
    if base_window is not None or base_sinks is not None:
        raise InputError(
            f"{folder} has its own base window; --base-window and --base-sinks turn a Llama-family folder into Orthros"
        )
    if model_type is None:
        return _load_checkpoint(folder, dtype, device)
    tokenizer = load_folder_tokenizer(folder)
    return EvaluatedModel(str(source), "orthros folder", load_model(folder, dtype=dtype, device=device), tokenizer)


def settled_source(source: str | Path) -> str:
    """The checkpoint that `source` stands for at this moment, where it is a run's folder; else `source` itself."""
    from orthros_train.training.checkpoint_folders import find_checkpoint  # noqa: PLC0415

    folder = Path(source)
    if (folder / "config.json").is_file():
        return str(source)
    with suppress(InputError):  # loading it says what is wrong
        return str(find_checkpoint(folder))
    return str(source)


def _model_type(folder: Path) -> str | None:
    """`model_type` of the folder's config.json; None where the folder looks like a training run instead."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    return str(content.get("model_type")) if isinstance(content, dict) else "unknown"


def _load_checkpoint(folder: Path, dtype: str, device: str) -> EvaluatedModel:
    place = torch_device(device)
    from orthros_train.conversion.from_checkpoint import checkpoint_model  # noqa: PLC0415  imports DeepSpeed
    from orthros_train.training.checkpoint_folders import HF_FOLDER, find_checkpoint  # noqa: PLC0415

    checkpoint = find_checkpoint(folder)
    tokenizer = load_folder_tokenizer(checkpoint / HF_FOLDER)
    with loading_errors(checkpoint, device):
        model = checkpoint_model(checkpoint, torch_dtype("fp32" if dtype == "auto" else dtype))
        model.to(place)  # type: ignore[arg-type]
    return EvaluatedModel(str(checkpoint), "checkpoint", model, tokenizer)


def _load_llama(
    folder: Path, dtype: str, device: str, base_window: int | None, base_sinks: int | None
) -> OrthrosForCausalLM:
    """The weights of a Llama-family folder in our own classes, without writing a folder."""
    place = torch_device(device)
    from orthros_train.conversion.from_llama import OrthrosForm  # noqa: PLC0415
    from orthros_train.conversion.source_config import read_source_config  # noqa: PLC0415
    from orthros_train.model_folder.model_parameters import build_config, is_affine  # noqa: PLC0415

    described = read_source_config(folder)
    if base_window is not None and described.active_window is not None:
        raise InputError(
            f"{folder} attends in a sliding window of {described.active_window} tokens; as Orthros its output stream "
            "would see more: convert it with tools/convert_llama.py --widen-output-window and evaluate the result"
        )
    window = base_window if base_window is not None else described.active_window
    architecture = "transformer" if base_window is None else "orthros"
    sinks = base_sinks if base_window is not None else 0
    form = OrthrosForm(base_window=window, base_sinks=sinks, architecture=architecture)
    config = build_config({**described.orthros_values(), **form.values()}, f"{folder}/config.json")
    wanted: Any = "auto" if dtype == "auto" else torch_dtype(dtype)
    with loading_errors(folder, device):
        model, problems = load_weights(folder, config, wanted)
        model.to(place)  # type: ignore[arg-type]
    for name, problem in problems.items():
        if problem != MISSING or not is_affine(name):  # no Llama has query affines
            raise InputError(f"the weights in {folder} do not fit its config.json: {name} {problem}")
    return model.eval()
