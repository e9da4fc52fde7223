"""The weights of a Hugging Face folder, loaded without transformers' own words: callers say in one line what is wrong.

transformers is imported inside the functions, so that a command's `--help` is answered at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from orthros_train.model import OrthrosConfig, OrthrosForCausalLM

MISSING = "is missing"


def load_weights(
    folder: Path, config: OrthrosConfig, dtype: torch.dtype | str
) -> tuple[OrthrosForCausalLM, dict[str, str]]:
    """The model that `config` describes with the weights of `folder`, and what does not fit.

    Args:
        folder: holds safetensors.
        config: need not be the folder's own.
        dtype: of the parameters; "auto": the one they were saved in.

    Returns:
        The model, and for each tensor that does not fit what is wrong with it: it `MISSING`, is unknown, or has another
        shape. A parameter that is missing or misshapen has its starting value.

    Raises:
        Exception: one of `damaged_model_errors` where the files cannot be read.
    """
    from orthros_train.model import OrthrosForCausalLM  # noqa: PLC0415

    with _quiet_transformers():
        loaded: Any = OrthrosForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    model, info = loaded
    problems = dict.fromkeys(sorted(info["missing_keys"]), MISSING)
    problems |= dict.fromkeys(sorted(info["unexpected_keys"]), "is unknown")
    for name, found, wanted in sorted(info["mismatched_keys"]):
        problems[name] = f"has shape {list(found)} instead of {list(wanted)}"
    return model, problems


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Inside the block transformers logs errors alone and shows no progress bars; afterwards it is as it was."""
    from transformers.utils import logging  # noqa: PLC0415

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
