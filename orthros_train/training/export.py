"""A training checkpoint as a Hugging Face folder: config.json, safetensors, tokenizer.

The weights are the fp32 master weights, put together from the shards of whatever ZeRO stage saved them, and cast to the
wanted dtype. The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from orthros_train.errors import InputError
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.training.checkpoint_folders import HF_FOLDER, find_checkpoint
from orthros_train.training.manifest import InvalidCheckpointError, read_manifest, verify_files
from orthros_train.training.master_weights import master_weights
from orthros_train.training.quiet_deepspeed import silenced

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_hf(checkpoint_dir: str | Path, output_dir: str | Path, dtype: str = "fp32") -> Path:
    """Write the checkpoint as a Hugging Face folder and return its path.

    Args:
        checkpoint_dir: a step_* folder, a folder of them, or a run's folder (the newest one is taken).
        output_dir: must not exist yet, or be empty.
        dtype: fp32, bf16 or fp16.

    Raises:
        InputError: no checkpoint there, a damaged one, an unknown dtype, or an output_dir that holds something.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    checkpoint = find_checkpoint(Path(checkpoint_dir))
    output = Path(output_dir)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} exists and is not empty; choose another output folder")
    try:
        manifest = read_manifest(checkpoint)
        problem = verify_files(checkpoint, manifest.files)
    except InvalidCheckpointError as error:
        problem = str(error)
    if problem is not None:
        raise InputError(f"checkpoint {checkpoint} is damaged: {problem}")

    temporary = output.absolute().with_name(f".{output.name}.unfinished")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        model = _model(checkpoint, DTYPES[dtype])
        with silenced():  # a progress bar
            model.save_pretrained(temporary)
        for file in (checkpoint / HF_FOLDER).iterdir():
            if not (temporary / file.name).exists():
                shutil.copy2(file, temporary / file.name)
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output


def _model(checkpoint: Path, dtype: torch.dtype) -> OrthrosForCausalLM:
    config = OrthrosConfig.from_pretrained(checkpoint / HF_FOLDER)
    weights = {name: tensor.to(dtype) for name, tensor in master_weights(checkpoint).items()}
    with torch.device("meta"):
        model = OrthrosForCausalLM(config)
    unexpected = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left or unexpected:
        raise InputError(f"checkpoint {checkpoint} does not fit its own config.json: {[*left, *unexpected][0]}")
    return model
