"""lm-eval's own command line with the model type `orthros` known to it.

    python -m evaluation.harness --model orthros --model_args pretrained=DIR,base_window=512 --tasks hellaswag

Versions of lm-eval that read the entry-point group `lm_eval.models` need no such detour: `lm_eval --model orthros`.
Where no --device is given it is the GPUs that are there (under torchrun one a rank), else the CPU; lm-eval's own
default is the first GPU, whether there is one or not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lm_eval.__main__ import cli_evaluate

from orthros_train.command_line import run_command

OTHER_COMMANDS = ("ls", "validate")  # that load no model
OWN_DEVICE = ("--device", "--config", "-C")  # a configuration may name one, which an option would override


def with_device(arguments: Sequence[str]) -> list[str]:
    """The arguments with a --device that is there, where they run a model and name none."""
    import torch  # noqa: PLC0415

    named = any(argument.split("=")[0] in OWN_DEVICE for argument in arguments)
    if not arguments or named or arguments[0] in OTHER_COMMANDS:
        return list(arguments)
    return [*arguments, "--device", "cuda" if torch.cuda.is_available() else "cpu"]


def main() -> None:
    """lm-eval's command; a question for its help waits for no model."""
    if not {"-h", "--help"} & set(sys.argv):
        import evaluation.lm_eval_model  # noqa: F401, PLC0415  registers the model type

        sys.argv[1:] = with_device(sys.argv[1:])
    cli_evaluate()


if __name__ == "__main__":
    run_command(main)
