"""The values a run starts from: drawn from the seed, or read from a Hugging Face folder of an Orthros model.

* One way for every layout: each parameter is filled by its name in OrthrosForCausalLM with the part that this rank
  holds (`LayerFactory.slices`). No rank ever holds more of the model than its own part and one tensor's.
* A folder is checked against the whole model before any of it is loaded, so all ranks see the same error.
* Query affines that a folder lacks start as the identity: a Llama's has none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from orthros_train.config import Config
from orthros_train.errors import InputError, damaged_model_errors
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.model.layer_factory import LayerFactory
from orthros_train.model_folder.model_parameters import check_parameters, empty_model, is_affine
from orthros_train.model_folder.tensor_folder import TensorFolder

# What must agree with the folder's config.json. Window, sinks and kernel may differ: one trains to adapt to them.
COMPARED_OPTIONS = (
    "architecture",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
    "attention_output_bias",
    "qk_norm",
)


class InitialValues:
    """The value of every parameter at step 0.

    Args:
        config: says where the values come from: `init_from`, or `train.seed`.
        model_config: the whole model's; takes over `source_config` of a folder that was converted.
        factory: builds the layers; None: plain PyTorch.

    Raises:
        InputError: `init_from` is no Orthros folder, is damaged, or is one of another model than the configuration
            describes.
    """

    def __init__(self, config: Config, model_config: OrthrosConfig, factory: LayerFactory | None = None) -> None:
        self.model_config, self.factory = model_config, factory or LayerFactory(model_config)
        self._seed = config.train.seed
        self._tensors = None if config.init_from is None else _open_folder(Path(config.init_from), model_config)

    def set_all(self, module: nn.Module, canonical_name: Callable[[str], str] = str) -> None:
        """Give every parameter of a model, or of a part of one, its value.

        Args:
            module: what this rank holds, in fp32 and not on the meta device.
            canonical_name: from a parameter's name in `module` to its name in OrthrosForCausalLM; default: the same.
        """
        for name, parameter in module.named_parameters():
            self.set(canonical_name(name), parameter)

    @torch.no_grad()
    def set(self, name: str, parameter: Tensor) -> None:
        """Give this rank's part of the parameter with this name in OrthrosForCausalLM its value."""
        tensors = self._tensors
        if tensors is None or name not in tensors.infos:  # the folder was found to lack affines alone
            self.factory.reset_parameter(name, parameter, self._seed)
            return
        part = tensors.read(name, self.factory.slices(parameter, tensors.infos[name].shape))
        parameter.zero_()  # what lies beyond the part pads the vocabulary
        parameter[tuple(slice(0, size) for size in part.shape)] = part


def build_model(values: InitialValues) -> OrthrosForCausalLM:
    """The fp32 model at step 0, or this rank's part of it where the factory is a parallel one.

    The values are the same on every rank and in every layout.
    """
    with no_init_weights():  # every parameter is set below; it leaves out tying, too
        model = OrthrosForCausalLM(values.model_config, values.factory)
    model.tie_weights()
    values.set_all(model)
    return model


def _open_folder(folder: Path, model_config: OrthrosConfig) -> TensorFolder:
    """The tensors of `init_from`, found to be those of the model that the configuration describes."""
    if not (folder / "config.json").is_file():
        raise InputError(f"init_from {folder} has no config.json; give a Hugging Face folder of an Orthros model")
    try:
        source = OrthrosConfig.from_pretrained(folder)
        _refuse_other_model(folder, source, model_config)
    except damaged_model_errors() as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise InputError(f"init_from {folder} cannot be read: {reason}") from error
    if hasattr(source, "source_config"):  # of the model that was converted: an export needs it for the way back
        model_config.source_config = source.source_config
    shapes = {name: tuple(parameter.shape) for name, parameter in empty_model(model_config).named_parameters()}
    try:
        tensors = TensorFolder(folder)
        wanted = {name: shape for name, shape in shapes.items() if name in tensors.infos or not is_affine(name)}
        check_parameters(tensors, wanted, model_config.tie_word_embeddings)
    except InputError as error:
        raise InputError(f"init_from does not fit the model: {error}") from error
    return tensors


def _refuse_other_model(folder: Path, source: OrthrosConfig, wanted: OrthrosConfig) -> None:
    for option in COMPARED_OPTIONS:
        theirs, ours = getattr(source, option), getattr(wanted, option)
        if theirs != ours:
            raise InputError(f"init_from {folder} has {option} {theirs!r}, this config {ours!r}; make them agree")
    if source.query_affine != wanted.query_affine == "none":
        raise InputError(
            f"init_from {folder} has query affines, which model.query_affine none leaves out; set it to elementwise"
        )
