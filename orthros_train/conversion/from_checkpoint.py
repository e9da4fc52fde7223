"""A training checkpoint as a Hugging Face folder: config.json, safetensors, tokenizer, model code, model card.

The weights are the fp32 master weights, put together from the pieces of whatever layout saved them, and cast to the
wanted dtype. The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig

from orthros_train.conversion.model_card import write_model_card
from orthros_train.data.output_folder import check_vacant, finished_folder
from orthros_train.errors import InputError
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.model_folder.model_parameters import model_name
from orthros_train.parallel.quiet_deepspeed import silenced
from orthros_train.training.checkpoint_folders import HF_FOLDER, find_checkpoint
from orthros_train.training.generation_settings import GENERATION_FILE
from orthros_train.training.manifest import InvalidCheckpointError, Manifest, read_manifest, verify_files
from orthros_train.training.state_files import SavedState

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_hf(checkpoint_dir: str | Path, output_dir: str | Path, dtype: str = "fp32") -> Path:
    """Write the checkpoint as a Hugging Face folder and return its path.

    Args:
        checkpoint_dir: a step_* folder, a folder of them, or a run's folder (the newest one is taken).
        output_dir: must not exist yet, or be empty.
        dtype: fp32, bf16 or fp16.

    Raises:
        InputError: no checkpoint there, a damaged one, an unknown dtype, an output_dir that holds something, or no room
            for it.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    checkpoint, output = find_checkpoint(Path(checkpoint_dir)), Path(output_dir)
    check_vacant(output)
    manifest = _verified(checkpoint)
    model = _model(checkpoint, manifest, DTYPES[dtype])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with finished_folder(output, parameters * DTYPES[dtype].itemsize) as folder:
        with silenced():  # a progress bar
            model.save_pretrained(folder)
        for file in folder.glob("*.safetensors"):
            file.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it readable to the owner alone
        for file in (checkpoint / HF_FOLDER).iterdir():
            if file.name == GENERATION_FILE or not (folder / file.name).exists():  # transformers wrote its own
                shutil.copy2(file, folder / file.name)
        write_model_card(
            folder,
            model.config,
            name=model_name(output),
            origin=f"Exported from a training run after {manifest.progress.step:,} steps.",
            state=f"It was trained in {manifest.layout.precision}; these are the master weights as {dtype}.",
            parameters=parameters,
        )
    return output


def checkpoint_model(checkpoint: Path, dtype: torch.dtype) -> OrthrosForCausalLM:
    """The model of a step_* folder on the CPU in evaluation mode: what its export would be loaded as.

    Raises:
        InputError: it is damaged.
    """
    model = _model(checkpoint, _verified(checkpoint), dtype)
    if (checkpoint / HF_FOLDER / GENERATION_FILE).is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint / HF_FOLDER)
    return model.eval()


def _verified(checkpoint: Path) -> Manifest:
    try:
        manifest = read_manifest(checkpoint)
        problem = verify_files(checkpoint, manifest.files)
    except InvalidCheckpointError as error:
        problem = str(error)
    if problem is not None:
        raise InputError(f"checkpoint {checkpoint} is damaged: {problem}")
    return manifest


def _model(checkpoint: Path, manifest: Manifest, dtype: torch.dtype) -> OrthrosForCausalLM:
    config = OrthrosConfig.from_pretrained(checkpoint / HF_FOLDER)
    state = SavedState(checkpoint, manifest)
    weights = {name: state.weight(name).to(dtype) for name in state.parameters}
    with torch.device("meta"):
        model = OrthrosForCausalLM(config)
    unexpected = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left or unexpected:
        raise InputError(f"checkpoint {checkpoint} does not fit its own config.json: {[*left, *unexpected][0]}")
    return model
