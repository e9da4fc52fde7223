"""The byte-level WikiText check of a third party, under the same protocol: does Orthros train like its transformer?

A transformer with full attention takes a few shared pretraining steps; from its weights and on the same batches, both
arms then train alike: the transformer goes on, the Orthros arm adds identity query affines and the base window. The
test split is read once, at the end, and tunes nothing.

Third party: learned positions, batch size and learning rate not given. Ours: RoPE, batch size and learning rate ours.
So this is the same protocol, not a reproduction of their figures, which stand beside ours marked as theirs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.command_line import distinct_seeds, positive_number
from evaluation.files import plain_json, prepare_output, write_output
from evaluation.html_page import table, write_report
from evaluation.machine import describe_machine
from evaluation.model_folder import torch_device
from evaluation.wikitext_data import label, read_prepared
from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.data.progress import Progress
from orthros_train.errors import InputError

if TYPE_CHECKING:
    import torch

    from orthros_train.model import OrthrosForCausalLM

ARMS = ("transformer", "orthros")
THIRD_PARTY: dict[str, dict[str, float]] = {
    "transformer": {"mean": 3.02851, "std": 0.05278},
    "orthros": {"mean": 3.02952, "std": 0.05255},
}
THIRD_PARTY_CACHE = 1.43e-6
CACHE_BOUND = 1e-4  # the third party's
BYTES = 256  # vocabulary
DESCRIPTION = """Train both arms under the third party's byte-level WikiText protocol and compare their test NLL.

Writes results.json, report.md, report.html and, for every seed and arm, receipts/ARM-SEED.json.
"""
EXAMPLES = """\
  python tools/prepare_wikitext.py --output data/wikitext
  python -m evaluation.reproduce_wikitext --data data/wikitext --seeds 42,43,44 --output outputs/wikitext
  python -m evaluation.reproduce_wikitext --text book.txt --output outputs/other-text"""


@dataclass(frozen=True)
class Protocol:
    """Sizes of the check; the defaults are the third party's, batch size and learning rate ours.

    Attributes:
        shared_steps: of the transformer before the arms part.
        steps: of each arm after that.
        width, layers, heads: of both arms.
        base_window: w of Orthros.
        length: bytes of a row.
        train_bytes: from the beginning of the training split.
        test_bytes: from the beginning of the test split.
        batch_size: rows of a step.
        learning_rate: AdamW's, constant.
    """

    shared_steps: int = 10
    steps: int = 40
    width: int = 64
    layers: int = 2
    heads: int = 4
    base_window: int = 16
    length: int = 64
    train_bytes: int = 32768
    test_bytes: int = 4096
    batch_size: int = 16
    learning_rate: float = 3e-3

    def check(self) -> None:
        """Raise InputError for sizes that no model can have."""
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise InputError(f"--width {self.width} is not {self.heads} heads of an even size; choose another")
        if min(self.train_bytes, self.test_bytes) <= self.length:
            raise InputError(f"--length {self.length} needs more bytes of training and test text than that")


def build_arm(arm: str, protocol: Protocol) -> OrthrosForCausalLM:
    """A model of one of ARMS with weights of its own."""
    from orthros_train.model import OrthrosConfig, OrthrosForCausalLM  # noqa: PLC0415

    return OrthrosForCausalLM(
        OrthrosConfig(
            vocab_size=BYTES,
            hidden_size=protocol.width,
            intermediate_size=4 * protocol.width,
            num_hidden_layers=protocol.layers,
            num_attention_heads=protocol.heads,
            max_position_embeddings=max(2 * protocol.length, 4 * protocol.base_window + 16),
            architecture=arm,
            base_window=protocol.base_window if arm == "orthros" else None,
        )
    )


def draw_batches(data: torch.Tensor, protocol: Protocol, seed: int) -> list[torch.Tensor]:
    """The rows (batch_size, length + 1) of every step of the run: random windows of the training bytes."""
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    span = protocol.length + 1
    batches = []
    for _ in range(protocol.shared_steps + protocol.steps):
        starts = torch.randint(len(data) - span + 1, (protocol.batch_size,), generator=generator)
        batches.append(torch.stack([data[start : start + span] for start in starts.tolist()]))
    return batches


def train(
    model: OrthrosForCausalLM,
    batches: Sequence[torch.Tensor],
    learning_rate: float,
    on_step: Callable[[], None] | None = None,
) -> list[float]:
    """AdamW from a fresh state over the batches; returns the loss of every step in nats per byte."""
    import torch  # noqa: PLC0415

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    losses = []
    model.train()
    for batch in batches:
        rows = batch.to(model.device)
        loss = model(rows[:, :-1], shift_labels=rows[:, 1:], use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if on_step is not None:
            on_step()
    return losses


def nll(model: OrthrosForCausalLM, data: torch.Tensor, length: int) -> float:
    """Nats per byte over disjoint windows that predict every byte but the first; the last window may be shorter."""
    import torch  # noqa: PLC0415

    model.eval()
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(data) - 1, length):
            row = data[start : start + length + 1][None].to(model.device)
            output = model(row[:, :-1], shift_labels=row[:, 1:], num_items_in_batch=1, use_cache=False)
            total += float(output.loss)
    return total / (len(data) - 1)


def run_seed(
    seed: int,
    protocol: Protocol,
    train_data: torch.Tensor,
    test_data: torch.Tensor,
    device: str,
    tick: Callable[[], None],
) -> dict[str, dict[str, Any]]:
    """Both arms of one seed: losses, test NLL, cache discrepancy, seconds."""
    from evaluation.cache_check import check_cache  # noqa: PLC0415

    batches = draw_batches(train_data, protocol, seed)
    shared: Any = build_arm("transformer", protocol)
    shared = shared.to(device)
    shared.reset_parameters(seed)
    shared_losses = train(shared, batches[: protocol.shared_steps], protocol.learning_rate, tick)
    records = {}
    for arm in ARMS:
        start = time.perf_counter()
        model: Any = build_arm(arm, protocol)
        model = model.to(device)
        missing = model.load_state_dict(shared.state_dict(), strict=False).missing_keys
        if any("_query." not in name for name in missing):
            raise RuntimeError(f"the arms share every weight but the query affines; missing: {missing}")
        losses = train(model, batches[protocol.shared_steps :], protocol.learning_rate, tick)
        w = protocol.base_window
        checked = check_cache(model, lengths=[1, w, w + 1, 2 * w + 1], decode_steps=8, dtypes=["float32"], seed=seed)
        records[arm] = {
            "test_nll": nll(model, test_data, protocol.length),
            "shared_losses": shared_losses,
            "losses": losses,
            "cache_discrepancy": checked.max_difference("float32"),
            "cache_passed": checked.passed and checked.max_difference("float32") < CACHE_BOUND,
            "seconds": time.perf_counter() - start,
        }
    return records


def reproduce(
    protocol: Protocol,
    train_text: bytes,
    test_text: bytes,
    origin: Mapping[str, Any],
    seeds: Sequence[int],
    device: str,
    on_run: Callable[[str, int, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """The whole check; JSON-ready but for NaN. Raises InputError where a text is shorter than the protocol asks for.

    `on_run` is given every arm, seed and record as soon as a seed ends.
    """
    import torch  # noqa: PLC0415

    protocol.check()
    torch_device(device)
    for name, text, wanted in (
        ("training", train_text, protocol.train_bytes),
        ("test", test_text, protocol.test_bytes),
    ):
        if len(text) < wanted:
            raise InputError(f"the {name} text has {len(text):,} bytes, the protocol asks for {wanted:,}; lower it")
    data = [
        torch.tensor(list(text[:size]), dtype=torch.int64)
        for text, size in ((train_text, protocol.train_bytes), (test_text, protocol.test_bytes))
    ]
    total = len(seeds) * (protocol.shared_steps + 2 * protocol.steps)
    runs: dict[str, Any] = {arm: {} for arm in ARMS}
    with Progress("training", total) as progress:
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            progress.update(done, f"step {done} of {total}")

        for seed in seeds:
            for arm, record in run_seed(seed, protocol, data[0], data[1], device, tick).items():
                runs[arm][str(seed)] = record
                if on_run is not None:
                    on_run(arm, seed, record)
    summary = {arm: _mean_and_std([run["test_nll"] for run in runs[arm].values()]) for arm in ARMS}
    return {
        "protocol": asdict(protocol),
        "data": dict(origin),
        "seeds": list(seeds),
        "device": device,
        "runs": runs,
        "summary": summary,
        "cache_discrepancy": _largest([run["cache_discrepancy"] for arm in ARMS for run in runs[arm].values()]),
        "third_party": {**THIRD_PARTY, "cache_discrepancy": THIRD_PARTY_CACHE},
        "machine": describe_machine(),
    }


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _mean_and_std(values: Sequence[float]) -> dict[str, float | None]:
    """NaN without spread where a run diverged."""
    if not all(map(math.isfinite, values)):
        return {"mean": math.nan, "std": None}
    return {"mean": statistics.mean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def diverged(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The runs whose test NLL is no finite number, as "ARM with seed SEED"."""
    return [
        f"{arm} with seed {seed}"
        for arm in ARMS
        for seed, run in runs[arm].items()
        if not math.isfinite(run["test_nll"])
    ]


def verdict(results: Mapping[str, Any]) -> str:
    """Which arm was better, in a sentence that follows the figures whichever way they point."""
    runs = results["runs"]
    if lost := diverged(runs):
        return f"No verdict: {', '.join(lost)} diverged."
    deltas = [
        runs["orthros"][str(seed)]["test_nll"] - runs["transformer"][str(seed)]["test_nll"] for seed in results["seeds"]
    ]
    mean = statistics.mean(deltas)
    if mean == 0:
        return "Both arms have the same test NLL."
    spread = f" ± {statistics.stdev(deltas):.5f}" if len(deltas) > 1 else ""
    better = sum(delta < 0 for delta in deltas)
    word = "worse" if mean > 0 else "better"
    noise = ""
    if len(deltas) > 1 and abs(mean) < statistics.stdev(deltas):
        noise = " The difference is smaller than its spread over the seeds: they do not tell the arms apart."
    return (
        f"Orthros is {word} than the transformer by {abs(mean):.5f}{spread} nats per byte (paired over the seeds); it "
        f"is better with {better} of {len(deltas)} seeds.{noise}"
    )


def write_wikitext_report(results: Mapping[str, Any], folder: Path) -> str:
    """Write report.md and report.html; returns the Markdown."""
    p, origin, rows = results["protocol"], results["data"], []
    for arm in ARMS:
        each = [_figure(results["runs"][arm][str(seed)]["test_nll"]) for seed in results["seeds"]]
        rows.append([arm, *each, _show(results["summary"][arm]), _show(THIRD_PARTY[arm])])
    same = origin["kind"] == "wikitext"
    head = ["arm", *(f"seed {seed}" for seed in results["seeds"]), "mean ± std", "third party's, on WikiText"]
    discrepancy = results["cache_discrepancy"]
    held = "below" if discrepancy < CACHE_BOUND else "NOT below"
    parts = [
        "# Byte-level WikiText protocol" if same else "# Byte-level WikiText protocol, on other text",
        f"Text: {origin['label']}." + ("" if same else " These figures are not WikiText's."),
        f"{p['shared_steps']} shared pretraining steps, then {p['steps']} steps an arm on the same batches; width "
        f"{p['width']}, {p['layers']} layers, window {p['base_window']}, length {p['length']}, {p['train_bytes']:,} "
        f"training and {p['test_bytes']:,} test bytes. Ours: RoPE, batch {p['batch_size']}, AdamW at "
        f"{p['learning_rate']:g}. The test text tuned nothing.",
        "Test NLL in nats per byte:",
        table(head, rows),
        verdict(results),
        f"Largest difference of a logit between the cache and the full forward: {discrepancy:.2e}, {held} the third "
        f"party's bound of {CACHE_BOUND:g} (theirs: {THIRD_PARTY_CACHE:.2e}).",
        "The third party used learned positions and full attention as its baseline, and gave neither batch size nor "
        "learning rate: same protocol, not a reproduction of their figures.",
    ]
    text = "\n\n".join(parts) + "\n"
    write_report(folder, "report", "Byte-level WikiText protocol", text, {})
    return text


def _figure(value: float) -> str:
    return f"{value:.5f}" if math.isfinite(value) else "diverged"


def _show(summary: Mapping[str, Any]) -> str:
    return _figure(summary["mean"]) + ("" if summary["std"] is None else f" ± {summary['std']:.5f}")


def build_parser() -> CommandParser:
    """The command line."""
    defaults = Protocol()
    parser = CommandParser(DESCRIPTION, EXAMPLES, prog="python -m evaluation.reproduce_wikitext")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--data", type=Path, metavar="DIR", help="a folder of tools/prepare_wikitext.py")
    text.add_argument("--text", type=Path, metavar="FILE", help="other text: its beginning trains, what follows tests")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=distinct_seeds, default=[42, 43, 44], help="default: 42,43,44")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    for name, help_ in (
        ("shared_steps", "before the arms part"),
        ("steps", "of each arm"),
        ("width", "of both arms"),
        ("layers", "of both arms"),
        ("heads", "of both arms"),
        ("base_window", "of Orthros"),
        ("length", "bytes of a row"),
        ("train_bytes", "of training text"),
        ("test_bytes", "of test text"),
        ("batch_size", "rows of a step"),
    ):
        value = getattr(defaults, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=positive_int, default=value, metavar="N", help=f"{help_}; default: {value}")
    parser.add_argument(
        "--learning-rate", type=positive_number, default=defaults.learning_rate, help="default: %(default)g"
    )
    return parser


def read_text(options: argparse.Namespace, protocol: Protocol) -> tuple[bytes, bytes, dict[str, Any]]:
    """Training and test bytes, and what they are; raises InputError for files that are missing or altered."""
    if options.data is not None:
        contents, manifest = read_prepared(options.data)
        about = {"kind": "wikitext", "label": label(manifest), "manifest": manifest}
        return contents["train"], contents["test"], about
    try:
        content = options.text.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {options.text}: {error.strerror or error}") from error
    cut = protocol.train_bytes
    about = {
        "kind": "other",
        "label": f"the file {options.text.name}, {len(content):,} bytes",
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return content[:cut], content[cut:], about


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 where the cache is not within its bound or a run diverged."""
    options = build_parser().parse_args(arguments)
    protocol = Protocol(**{name: getattr(options, name) for name in asdict(Protocol())})
    prepare_output(options.output / "results.json")
    train_text, test_text, origin = read_text(options, protocol)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "evaluation.reproduce_wikitext", *given])
    common = {"protocol": asdict(protocol), "data": origin, "device": options.device, "machine": describe_machine()}

    def write_receipt(arm: str, seed: int, record: dict[str, Any]) -> None:
        receipt = {"command": command, "arm": arm, "seed": seed, **record, **common}
        _write_json(options.output / "receipts" / f"{arm}-{seed}.json", receipt)

    results = reproduce(protocol, train_text, test_text, origin, options.seeds, options.device, write_receipt)
    _write_json(options.output / "results.json", results)
    print(write_wikitext_report(results, options.output))
    passed = all(run["cache_passed"] for runs in results["runs"].values() for run in runs.values())
    return 0 if passed and not diverged(results["runs"]) else 1


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_output(path, json.dumps(plain_json(content), indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
