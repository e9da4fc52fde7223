"""Load a Hugging Face folder that training, conversion or a user wrote; bad input becomes one clear line.

transformers and torch are imported inside the functions, so that a command's `--help` is answered at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthros_train.errors import InputError, damaged_model_errors
from orthros_train.model_folder.json_files import read_json_object
from orthros_train.model_folder.weights import load_weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from orthros_train.model import OrthrosForCausalLM

_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
DTYPES = ("auto", *_TORCH_NAMES)  # torch's names, which lm-eval uses, are as good: see `dtype_name`


def dtype_name(name: str) -> str:
    """Torch's name of a dtype ("float32") as the one of DTYPES; any other text as it is. Also an argparse type."""
    return next((ours for ours, theirs in _TORCH_NAMES.items() if name == theirs), name)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of DTYPES other than `auto`, in either spelling; raises InputError for another."""
    import torch  # noqa: PLC0415

    known = _TORCH_NAMES.get(dtype_name(name))
    if known is None:
        both = ", ".join(f"{ours} ({theirs})" for ours, theirs in _TORCH_NAMES.items())
        raise InputError(f"dtype {name!r} is not known; give one of auto, {both}")
    found: torch.dtype = getattr(torch, known)
    return found


def torch_device(name: str) -> torch.device:
    """The device of that name; raises InputError unless it is the CPU or a CUDA device that is there."""
    import torch  # noqa: PLC0415

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not known; give cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {name} was asked for, but torch sees no CUDA device; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {name} was asked for, but the CUDA devices are 0 to {torch.cuda.device_count() - 1}")
    return device


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch says that a device's memory does not suffice."""
    import torch  # noqa: PLC0415

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


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
    content = read_json_object(path)
    kind = content.get("model_type")
    if kind != "orthros":
        raise InputError(f"{path} says model_type {kind!r}; only folders of model_type 'orthros' can be read")
    return content


@contextmanager
def loading_errors(folder: Path, device: str) -> Iterator[None]:
    """Inside the block what goes wrong while the model in `folder` is read and moved is one line, an InputError."""
    try:
        yield
    except damaged_model_errors() as error:
        if is_out_of_memory(error):
            raise InputError(f"{device} has too little memory for the model in {folder}; use --dtype bf16") from error
        raise InputError(f"cannot load the model in {folder}: {error}") from error


def load_model(
    folder: str | Path, *, dtype: str = "auto", device: str = "cpu", overrides: dict[str, Any] | None = None
) -> OrthrosForCausalLM:
    """The model of `folder` in evaluation mode on `device`.

    `dtype` is one of DTYPES in either spelling (`auto`: the one the folder was saved in); `overrides` replace keys of
    config.json. Raises InputError for a folder that is missing, incomplete or damaged, for a device that is not there
    and for an unknown dtype.
    """
    folder = Path(folder)
    read_config(folder)

    from orthros_train.model import OrthrosConfig  # noqa: PLC0415

    place = torch_device(device)
    wanted: torch.dtype | str = "auto" if dtype == "auto" else torch_dtype(dtype)
    with loading_errors(folder, device):
        config = OrthrosConfig.from_pretrained(folder, **(overrides or {}))
        model, problems = load_weights(folder, config, wanted)
        model.to(place)  # type: ignore[arg-type]
    for name, problem in problems.items():
        more = f" ({len(problems)} tensors in all do not fit)" if len(problems) > 1 else ""
        raise InputError(f"the weights in {folder} do not fit its config.json: {name} {problem}{more}")
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
