"""What results.json says of a run besides its scores, in lm-eval's schema; null where a field has no use here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evaluation.suites.task_card import TaskSetting

if TYPE_CHECKING:
    from evaluation.lm_eval_model import OrthrosLM

OWN_WINDOW = ("orthros folder", "checkpoint", "training")  # kinds of models whose base window is no option
MODEL_TYPE = "orthros"  # the adapter's name in lm-eval


def run_config(lm: OrthrosLM, setting: TaskSetting, chat: bool) -> dict[str, Any]:
    """The `config` of results.json: model and settings.

    The seeds that are null are not set: nothing draws from these generators.
    """
    from evaluation.task_runs import BOOTSTRAP_ITERS  # noqa: PLC0415

    info = lm.get_model_info()
    return {
        "model": MODEL_TYPE,
        "model_args": _model_arguments(info),
        "model_revision": None,
        "model_sha": None,
        **info,
        "batch_size": lm.batch_size,
        "batch_sizes": [],
        "device": str(lm.device),
        "use_cache": None,
        "limit": setting.limit,
        "bootstrap_iters": BOOTSTRAP_ITERS,
        "gen_kwargs": None,
        "random_seed": None,
        "numpy_seed": None,
        "torch_seed": None,
        "fewshot_seed": setting.seed,
        "chat": chat,
    }


def _model_arguments(info: Mapping[str, Any]) -> dict[str, Any]:
    """What lm-eval's command line would be given as --model_args for the same model."""
    arguments = {"pretrained": info["model_source"], "dtype": info["model_dtype"], "max_length": info["max_length"]}
    if info["architecture"] == "orthros" and info["model_kind"] not in OWN_WINDOW:
        arguments |= {"base_window": info["base_window"], "base_sinks": info["base_sinks"]}
    return arguments


def run_facts(lm: OrthrosLM, chat: bool, started: float, seconds: float) -> dict[str, Any]:
    """What lm-eval writes beside `config`: the time, the model's name, its tokens and template, the environment.

    Args:
        lm: the adapter.
        chat: whether the chat template was applied.
        started: UNIX time.
        seconds: of the whole evaluation.
    """
    from lm_eval.loggers.utils import add_tokenizer_info  # noqa: PLC0415
    from lm_eval.utils import hash_string, sanitize_model_name  # noqa: PLC0415

    from orthros_train.training.run_folder import git_commit  # noqa: PLC0415

    source = lm.get_model_info()["model_source"]
    template = lm.chat_template(True) if chat else None
    facts: dict[str, Any] = {
        "date": started,
        "total_evaluation_time_seconds": str(seconds),
        "git_hash": git_commit(),
        "model_source": MODEL_TYPE,
        "model_name": source,
        "model_name_sanitized": sanitize_model_name(source),
        "system_instruction": None,
        "system_instruction_sha": None,
        "fewshot_as_multiturn": chat,
        "chat_template": template,
        "chat_template_sha": None if template is None else hash_string(template),
        **_environment(),
    }
    add_tokenizer_info(facts, lm)
    return facts


@functools.cache
def _environment() -> dict[str, Any]:
    """lm-eval's description of the machine and the libraries, which takes seconds."""
    from lm_eval.loggers.utils import add_env_info  # noqa: PLC0415

    facts: dict[str, Any] = {}
    add_env_info(facts)
    return facts
