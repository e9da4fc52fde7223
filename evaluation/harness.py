"""lm-eval's own command line with the model type `orthros` known to it.

    python -m evaluation.harness --model orthros --model_args pretrained=DIR,base_window=512 --tasks hellaswag

Versions of lm-eval that read the entry-point group `lm_eval.models` need no such detour: `lm_eval --model orthros`.
"""

from __future__ import annotations

import sys

from lm_eval.__main__ import cli_evaluate

from orthros_train.command_line import run_command


def main() -> None:
    """lm-eval's command; a question for its help waits for no model."""
    if not {"-h", "--help"} & set(sys.argv):
        import evaluation.lm_eval_model  # noqa: F401, PLC0415  registers the model type
    cli_evaluate()


if __name__ == "__main__":
    run_command(main)
