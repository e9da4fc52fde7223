"""The models that benchmarks time beside each other: both arms, and transformers' LlamaForCausalLM of the same shape.

All start from the same random weights. The shape is that of the command line, or of a training configuration.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.model_folder import dtype_name, is_out_of_memory, torch_device, torch_dtype
from orthros_train.command_line import CommandParser, positive_int
from orthros_train.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from orthros_train.model import OrthrosConfig, OrthrosForCausalLM

ARMS = ("transformer", "orthros", "llama")
# Command-line options of the shape: OrthrosConfig's name, default, and what it is.
SHAPE: dict[str, tuple[str, int, str]] = {
    "width": ("hidden_size", 512, "D"),
    "ffn": ("intermediate_size", 1408, "width of the FFN"),
    "layers": ("num_hidden_layers", 4, "L"),
    "heads": ("num_attention_heads", 8, "H"),
    "kv-heads": ("num_key_value_heads", 8, "G"),
    "window": ("base_window", 512, "w of the Orthros arm"),
    "vocabulary": ("vocab_size", 32000, "ids"),
}
APART = (*(name.replace("-", "_") for name in SHAPE), "peak_of", "profile", "peak_memory")


def add_model_options(parser: CommandParser) -> None:
    """Options that say which models are timed, and where."""
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--config", type=Path, metavar="YAML", help="training configuration that gives the shape")
    for name, (_, default, meaning) in SHAPE.items():
        parser.add_argument(f"--{name}", type=positive_int, metavar="N", help=f"{meaning}; default: {default}")
    parser.add_argument("--arms", type=arm_names, default=list(ARMS), help=f"default: {','.join(ARMS)}")
    parser.add_argument("--attention-kernel", default="auto", metavar="NAME", help="of our arms; default: auto")
    parser.add_argument("--dtype", type=dtype_name, choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument("--threads", type=positive_int, default=usable_cores(), help="CPU threads; default: every core")


def arm_names(text: str) -> list[str]:
    """An argparse type: names of ARMS, separated by commas; they come back in the order of ARMS."""
    names = text.split(",")
    if not set(names) <= set(ARMS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(ARMS)}")
    return [name for name in ARMS if name in names]


def arm_and_length(text: str) -> tuple[str, int]:
    """An argparse type: `orthros:4096`."""
    arm, _, length = text.partition(":")
    if arm not in ARMS or not length.isdecimal() or int(length) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an arm and a length such as orthros:4096")
    return arm, int(length)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def arm_configs(options: argparse.Namespace, positions: int, gradients: bool = False) -> dict[str, OrthrosConfig]:
    """The configurations of both arms, with RoPE positions for at least `positions` tokens; sets the threads, too.

    Raises:
        InputError: the device is not there, the sizes make no model, or the attention kernel cannot run (with
            `gradients`).
    """
    import torch  # noqa: PLC0415

    from orthros_train.model_folder.model_parameters import build_config  # noqa: PLC0415
    from orthros_train.planning.dry_run import other_arm  # noqa: PLC0415

    torch_device(options.device)
    torch.set_num_threads(options.threads)
    values = _shape(options)
    values["max_position_embeddings"] = max(values["max_position_embeddings"], positions)
    values["attention_kernel"] = options.attention_kernel
    chosen = build_config(values, "the command line" if options.config is None else str(options.config))
    check_kernel(options.attention_kernel, options.device, options.dtype, gradients, chosen.head_shape[2])
    arms = {each.architecture: each for each in (chosen, other_arm(chosen))}
    if arms["orthros"].base_window is None:
        raise InputError(f"{options.config} has no model.base_window, which the Orthros arm needs")
    return {name: arms[name] for name in ("transformer", "orthros")}


def check_kernel(name: str, device: str, dtype: str, gradients: bool, head_dim: int) -> None:
    """Raise InputError unless the attention kernel can run there."""
    from orthros_train.model.attention_kernels import choose_kernel  # noqa: PLC0415

    try:
        choose_kernel(name, torch_device(device), torch_dtype(dtype), gradients, head_dim)
    except ValueError as error:
        raise InputError(str(error)) from error


def _shape(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name.replace("-", "_")) for name in SHAPE}
    if options.config is None:
        values: dict[str, Any] = {SHAPE[name][0]: value or SHAPE[name][1] for name, value in given.items()}
        if values["hidden_size"] % values["num_attention_heads"]:
            raise InputError(
                f"--width {values['hidden_size']} is not a multiple of --heads {values['num_attention_heads']}"
            )
        return {**values, "architecture": "orthros", "max_position_embeddings": 1}
    clashing = [name for name, value in given.items() if value is not None]
    if clashing:
        raise InputError(f"--{clashing[0]} contradicts --config, which gives the whole shape; leave one of them out")
    return recipe_config(options.config).to_dict()


def recipe_config(path: Path) -> OrthrosConfig:
    """The model of a training configuration; its tokenizer is read only where the vocabulary is not given.

    Raises:
        InputError: the file cannot be read, or is no training configuration.
    """
    from orthros_train.config import Config, orthros_config  # noqa: PLC0415
    from orthros_train.config.loading import load_yaml  # noqa: PLC0415
    from orthros_train.data.tokenizers import load_tokenizer  # noqa: PLC0415

    config = load_yaml(Config, path)
    return orthros_config(config, config.model.vocab_size or load_tokenizer(config.tokenizer).vocab_size)


def shape_settings(config: OrthrosConfig) -> dict[str, Any]:
    """What a result records of the shape."""
    names = (*(name for name, *_ in SHAPE.values()), "head_dim", "base_sinks", "tie_word_embeddings")
    return {name: getattr(config, name) for name in names}


@contextmanager
def enough_memory(device: str, remedy: str = "ask for less of it, or for fewer --arms") -> Iterator[None]:
    """Turn torch's error about memory that does not suffice into one line with a remedy, an InputError."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(f"{device} has too little memory for this; {remedy}") from error


@contextmanager
def _new_tensors(dtype: str, device: str) -> Iterator[None]:
    import torch  # noqa: PLC0415

    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch_dtype(dtype))
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(previous)


def build_model(config: OrthrosConfig, dtype: str, device: str) -> OrthrosForCausalLM:
    """A model with random weights, made on its device; `dtype` as in `evaluation.model_folder.torch_dtype`."""
    from orthros_train.model import OrthrosForCausalLM  # noqa: PLC0415

    with _new_tensors(dtype, device):
        return OrthrosForCausalLM(config).eval()


def build_arms(
    configs: Mapping[str, OrthrosConfig], names: Sequence[str], dtype: str, device: str
) -> dict[str, PreTrainedModel]:
    """The models of ARMS named, with the same weights; affines are the identity."""
    from orthros_train.model_folder.model_parameters import is_affine  # noqa: PLC0415

    models: dict[str, PreTrainedModel] = {}
    weights: dict[str, torch.Tensor] | None = None
    for name in names:
        if name == "llama":
            from evaluation.benchmarking.llama import PeerForCausalLM, peer_config  # noqa: PLC0415

            with _new_tensors(dtype, device):
                models[name] = PeerForCausalLM(peer_config(configs["transformer"])).eval()
        else:
            models[name] = build_model(configs[name], dtype, device)
        if weights is None:
            weights = models[name].state_dict()
        else:
            missing, unexpected = models[name].load_state_dict(weights, strict=False)
            assert all(map(is_affine, (*missing, *unexpected))), (missing, unexpected)
    return models
