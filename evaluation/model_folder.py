"""Load a Hugging Face folder that training, conversion or a user wrote; bad input becomes one clear line.

transformers and torch are imported inside the functions, so that a command's `--help` is answered at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthros_train.errors import InputError, damaged_model_errors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from orthros_train.model import OrthrosForCausalLM

DTYPES = ("auto", "fp32", "bf16", "fp64")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of DTYPES other than `auto`."""
    import torch  # noqa: PLC0415

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[name]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of `folder`, checked to be an Orthros model's.

    Raises InputError when the folder or the file is missing, is not JSON, or names another model type.
    """
    if not folder.is_dir():
        raise InputError(f"model folder {folder} does not exist; give a folder that holds config.json and safetensors")
    path = folder / "config.json"
    if not path.is_file():
        hint = "export the checkpoint first: python tools/export_hf.py --checkpoint DIR --output DIR"
        raise InputError(f"{folder} holds no config.json, so it is not a model folder; {hint}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind != "orthros":
        raise InputError(f"{path} says model_type {kind!r}; only folders of model_type 'orthros' can be read")
    return content


def require_device(device: str) -> None:
    """Raise InputError for a device that torch does not know or see."""
    import torch  # noqa: PLC0415

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"device {device!r} is none that torch knows; use cpu or cuda") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device} was asked for, but torch sees no CUDA device; use --device cpu")


def load_model(
    folder: str | Path, *, dtype: str = "auto", device: str = "cpu", overrides: dict[str, Any] | None = None
) -> OrthrosForCausalLM:
    """The model of `folder` in evaluation mode on `device`.

    `dtype` is one of DTYPES (`auto`: the one the folder was saved in); `overrides` replace keys of config.json.
    Raises InputError for a folder that is missing, incomplete or damaged, and for a device that is not there.
    """
    folder = Path(folder)
    read_config(folder)
    import torch  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    from orthros_train.model import OrthrosConfig, OrthrosForCausalLM  # noqa: PLC0415

    require_device(device)
    logging.disable_progress_bar()
    wanted: torch.dtype | str = "auto" if dtype == "auto" else torch_dtype(dtype)
    try:
        config = OrthrosConfig.from_pretrained(folder, **(overrides or {}))
        loaded: Any = OrthrosForCausalLM.from_pretrained(folder, config=config, dtype=wanted, output_loading_info=True)
        model: OrthrosForCausalLM = loaded[0].to(torch.device(device))
    except damaged_model_errors() as error:
        raise InputError(f"cannot load the model in {folder}: {error}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in loaded[1].get(problem) or ())
        if names:
            raise InputError(
                f"the weights in {folder} do not fit its config.json: {problem} {names[0]} of {len(names)}"
            )
    return model.eval()


def load_folder_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved beside the weights; raises InputError when there is none that loads."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise InputError(
            f"{folder} holds no tokenizer (tokenizer.json or tokenizer.model); copy the source model's there"
        )
    from transformers import AutoTokenizer  # noqa: PLC0415

    import orthros_train.model  # noqa: F401, PLC0415  registers the model type that the folder's config.json names

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"cannot load the tokenizer in {folder}: {error}") from error
