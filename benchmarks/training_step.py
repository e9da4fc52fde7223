"""What does a training step cost: both arms, transformers' LlamaForCausalLM, pretraining and fine-tuning?

Forward and backward of rows of random tokens (`pt`: logits at every position; `sft`: at the answers alone, a given
share of the tokens, at the end of each conversation); with --optimizer AdamW's update, too, in the model's own dtype.
The cases take turns, so that a slow moment of the machine hits all of them; medians count. Beside each time stand the
exact FLOPs.

With --peak-memory each case also runs in a process of its own, which tells how far a step's memory grew beyond the
weights: activations, gradients, logits and, with --optimizer, AdamW's moments. Exits 1 if that could not be measured
of a case; the times are written all the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evaluation.benchmarking.models import (
    APART,
    add_model_options,
    arm_configs,
    build_arms,
    enough_memory,
    shape_settings,
)
from evaluation.benchmarking.result import Record, Result, counted_calls, set_against, timed
from evaluation.command_line import positive_number
from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from orthros_train.model import OrthrosConfig

EXAMPLES = """\
  python benchmarks/training_step.py --output outputs/benchmarks/training_step.json
  python benchmarks/training_step.py --output memory.json --length 4096 --repeats 1 --peak-memory [--all-logits]
  python benchmarks/training_step.py --output packed.json --conversations 4 --answer-share 0.5
  python benchmarks/training_step.py --output gpu.json --config configs/orthros_1.3b.yaml --dtype bf16 --device cuda \\
      --length 4096 --rows 4 --optimizer --profile
  python benchmarks/training_step.py --output compiled.json --compile --uses pt"""
NOTES = (
    "speed-up: over the transformer arm in the same use; FLOP limit: what exact FLOPs allow; share: how much of it was",
    "reached; over peer: time over LlamaForCausalLM's. FLOPs are those of forward and backward that the task needs,",
    "for LlamaForCausalLM with logits at every position; recomputation, masked scores and the optimizer count 0.",
)
USES = ("pt", "sft")
IGNORED = -100
Batch = dict[str, "torch.Tensor"]


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    add_model_options(parser)
    parser.add_argument("--length", type=positive_int, default=2048, help="T, base tokens of a row; default: 2048")
    parser.add_argument("--rows", type=positive_int, default=1, help="of a step; default: 1")
    parser.add_argument("--conversations", type=positive_int, default=1, help="packed into a row; default: 1")
    parser.add_argument("--answer-share", type=float, default=0.1, help="answer tokens of all tokens; default: 0.1")
    parser.add_argument("--uses", type=use_names, default=list(USES), help="pt, sft or both; default: pt,sft")
    parser.add_argument("--all-logits", action="store_true", help="our arms hold them, too; default: loss in chunks")
    parser.add_argument("--optimizer", action="store_true", help="an AdamW step after the backward pass")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing, layer by layer")
    parser.add_argument("--compile", action="store_true", help="our arms' layers, as train.compile does")
    parser.add_argument(
        "--peak-tflops", type=positive_number, metavar="N", help="of the device; default: its data sheet's"
    )
    parser.add_argument("--repeats", type=positive_int, default=5, help="timed rounds; default: 5")
    parser.add_argument("--peak-memory", action="store_true", help="measure it, too, each case in its own process")
    parser.add_argument("--profile", action="store_true", help="show the largest kernels of each case")
    parser.add_argument("--peak-of", metavar="CASE", help='print the MiB that a step of, say, "orthros pt" needs; end')
    return parser


def use_names(text: str) -> list[str]:
    """An argparse type: some of USES, separated by commas."""
    names = text.split(",")
    if not set(names) <= set(USES):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(USES)}")
    return [use for use in USES if use in names]


def case_names(options: argparse.Namespace) -> list[str]:
    """What is measured, such as `orthros sft`."""
    return [f"{arm} {use}" for use in options.uses for arm in options.arms]


def arm_of(case: str) -> str:
    """`orthros` of `orthros sft`."""
    return case.partition(" ")[0]


def batch_for(use: str, options: argparse.Namespace, vocabulary: int) -> Batch:
    """The rows of a use, as our arms take them: conversations of equal length, the answer at each one's end."""
    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    size = (options.rows, options.length)
    batch = {"input_ids": torch.randint(vocabulary, size), "shift_labels": torch.randint(vocabulary, size)}
    columns = torch.arange(options.length)
    share = options.length // options.conversations
    document = (columns // share).clamp(max=options.conversations - 1)
    if options.conversations > 1:
        batch["document_ids"] = document.expand(size)
    if use == "sft":
        answers = max(1, round(share * options.answer_share))
        ends = torch.where(document == options.conversations - 1, options.length, (document + 1) * share)
        chosen = (columns >= ends - answers).nonzero()[:, 0]
        batch |= {
            "output_positions": chosen.expand(options.rows, -1),
            "shift_labels": batch["shift_labels"][:, chosen],
        }
    return batch


def for_llama(batch: Batch) -> Batch:
    """The same rows and loss for LlamaForCausalLM: labels at every position, and documents by their positions."""
    import torch  # noqa: PLC0415

    ids, labels = batch["input_ids"], batch["shift_labels"]
    if "output_positions" in batch:
        labels = torch.full_like(ids, IGNORED).scatter(1, batch["output_positions"], labels)
    theirs = {"input_ids": ids, "labels": labels, "shift_labels": labels}  # without `labels` it has no loss
    if "document_ids" in batch:
        documents = batch["document_ids"].contiguous()  # ascending: each starts where it is first found
        starts = torch.searchsorted(documents, documents)
        theirs["position_ids"] = torch.arange(ids.shape[1]) - starts  # from 0 on, transformers masks what lies before
    return theirs


def flops_of(case: str, configs: Mapping[str, OrthrosConfig], batch: Batch) -> int:
    """Exact FLOPs of forward and backward; a Llama's are the transformer arm's with logits at every position."""
    from orthros_train.model.flops import training_flops  # noqa: PLC0415
    from orthros_train.training.batches import output_columns, segment_lengths  # noqa: PLC0415

    arm = arm_of(case)
    if arm == "llama":
        return training_flops(configs["transformer"], segment_lengths(batch)).total
    return training_flops(configs[arm], segment_lengths(batch), output_columns([batch])).total


def step_call(model: PreTrainedModel, batch: Batch, options: argparse.Namespace) -> Callable[[], None]:
    """One step, which leaves no gradients.

    For --peak-of what is compiled is compiled here: memory of the compiler is none of the step's. The optimizer makes
    no step yet, since its moments are.
    """
    import torch  # noqa: PLC0415

    from evaluation.arm_times import finish  # noqa: PLC0415
    from orthros_train.config import OptimizerSection  # noqa: PLC0415
    from orthros_train.model import OrthrosForCausalLM  # noqa: PLC0415
    from orthros_train.training.optimizer import build_optimizer  # noqa: PLC0415

    model.train()
    if options.recompute:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    optimizer = (
        build_optimizer(model.named_parameters(), OptimizerSection(), model.device) if options.optimizer else None
    )
    ours = isinstance(model, OrthrosForCausalLM)
    inputs: dict[str, Any] = {k: v.to(model.device) for k, v in (batch if ours else for_llama(batch)).items()}
    if ours:
        inputs["return_logits"] = options.all_logits

    def backward() -> torch.Tensor:
        with torch.enable_grad():
            loss: torch.Tensor = model(**inputs, use_cache=False).loss
            loss.backward()
        return loss

    if ours and options.compile and options.peak_of is not None:
        backward()
        model.zero_grad(set_to_none=True)

    def call() -> None:
        loss = backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        finish(loss)

    return call


def step_calls(
    cases: Sequence[str], configs: Mapping[str, OrthrosConfig], options: argparse.Namespace
) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """A call and the FLOPs of each case; the cases of one arm share its model.

    Raises:
        InputError: nothing here compiles what --compile asks for.
    """
    from orthros_train.model import OrthrosForCausalLM  # noqa: PLC0415
    from orthros_train.training.compilation import compile_layers  # noqa: PLC0415

    arms = [arm for arm in options.arms if any(arm_of(case) == arm for case in cases)]
    models = build_arms(configs, arms, options.dtype, options.device)
    for model in models.values():
        if options.compile and isinstance(model, OrthrosForCausalLM):
            try:
                compile_layers(model, model.device)
            except InputError as error:
                raise InputError(
                    "--compile needs a C++ compiler, and there is none on PATH: install one, name it in CXX, or leave "
                    "--compile out"
                ) from error
    batches = {case: batch_for(case.split()[1], options, configs["orthros"].vocab_size) for case in cases}
    calls = {case: step_call(models[arm_of(case)], batch, options) for case, batch in batches.items()}
    return calls, {case: flops_of(case, configs, batch) for case, batch in batches.items()}


def measure(options: argparse.Namespace, configs: Mapping[str, OrthrosConfig]) -> tuple[list[Record], dict[str, Any]]:
    """One record a case, and the kernels of each if they were asked for."""
    from evaluation.arm_times import interleaved  # noqa: PLC0415
    from evaluation.benchmarking.kernels import largest_kernels  # noqa: PLC0415

    cases = case_names(options)
    calls, flops = step_calls(cases, configs, options)
    with counted_calls("training step", len(cases) * (options.repeats + 1)) as on_call:
        seconds = interleaved(calls, options.repeats, on_call)
    records = {case: timed(case, seconds[case], flops[case], arm=arm_of(case)) for case in cases}
    peak = _peak_flops(options)
    for record in records.values():
        record["tokens_per_second"] = options.rows * options.length / record["seconds"]
        record["mfu_exact"] = None if peak is None else record["flops_per_second"] / peak
    for use in options.uses:
        set_against({arm: records[f"{arm} {use}"] for arm in options.arms})
    kernels = {case: largest_kernels(call, options.device) for case, call in calls.items()} if options.profile else {}
    return list(records.values()), kernels


def _peak_flops(options: argparse.Namespace) -> float | None:
    import torch  # noqa: PLC0415

    from orthros_train.training.device_peaks import known_peak_flops  # noqa: PLC0415

    if options.peak_tflops is not None:
        return options.peak_tflops * 1e12
    if options.dtype != "bf16" or not options.device.startswith("cuda"):
        return None
    return known_peak_flops(torch.cuda.get_device_name(options.device))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    from evaluation.benchmarking.kernels import print_kernels  # noqa: PLC0415
    from evaluation.benchmarking.peak_memory import add_peaks, memory_growth_mib  # noqa: PLC0415

    given = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(given)
    if not 0 < options.answer_share <= 1:
        raise InputError(f"--answer-share is {options.answer_share}: give a share above 0 and at most 1")
    if options.conversations > options.length:
        raise InputError("--conversations must be at most --length")
    if options.compile and options.recompute:
        raise InputError("--compile and --recompute exclude each other, as train.activation_checkpointing does")
    configs = arm_configs(options, options.length, gradients=True)
    if options.peak_of is not None:
        if options.peak_of not in case_names(options):
            raise InputError(f"--peak-of {options.peak_of!r} is none of {', '.join(case_names(options))}")
        call = step_calls([options.peak_of], configs, options)[0][options.peak_of]
        print(json.dumps(memory_growth_mib(call, options.device)))
        return 0
    result = Result("training step", options, APART, shape=shape_settings(configs["orthros"]))
    with enough_memory(options.device):
        records, kernels = measure(options, configs)
    problems = []
    if options.peak_memory:
        problems = add_peaks(records, lambda record: [__file__, *given, "--peak-of", record["case"]])
    result.write(records, [*NOTES, *problems], kernels=kernels)
    for case, found in kernels.items():
        print_kernels(case, found)
    return 1 if problems else 0


if __name__ == "__main__":
    run_command(main)
