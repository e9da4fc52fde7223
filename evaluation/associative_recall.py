"""Multi-query associative recall: what the output stream's full view of the cache is good for, shown in minutes.

A row begins with key-value pairs; later some positions name a key, and its value is to be predicted there. A stack of
L sliding windows of w tokens carries information over at most L·(w-1) tokens: behind that, a sliding-window-only model
can do no better than guess among the values. Orthros has the same base stream, but its output tokens see every key.

Three small arms are trained from scratch with the same weights, rows and steps, and scored on fresh rows:
transformer (full attention), Orthros, and the transformer with the base window alone. (The task: Arora et al. 2023,
"Zoology".)
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from evaluation.files import prepare_output, write_output
from evaluation.html_page import table, write_report
from evaluation.machine import describe_machine
from evaluation.model_folder import torch_device
from evaluation.plots import COLORS, INK, STYLE
from orthros_train.data.progress import Progress

if TYPE_CHECKING:
    import torch

    from orthros_train.model import OrthrosForCausalLM

ARMS = ("transformer", "orthros", "sliding-window")
TITLES = {"transformer": "transformer", "orthros": "Orthros", "sliding-window": "sliding window only"}
HUES = {**COLORS, "sliding-window": "#b0413e"}
TEST_SEED = 10**6  # of the scored rows, apart from every training seed


@dataclass(frozen=True)
class RecallSetting:
    """The task and the training, the same for all arms.

    Attributes:
        pairs: key-value pairs of a row.
        queries: positions where the value of one of the pairs is asked for.
        values: different values; guessing is right once in so many times.
        keys: different keys.
        length: tokens of a row.
        base_window: w of Orthros and of the sliding-window arm.
        layers, width, heads: of every arm.
        steps, batch_size, learning_rate: of the training (AdamW, warm-up over the first tenth, then cosine to 0).
        solved_loss: an arm whose loss stays below this for 10 steps has solved the task and stops.
        test_rows: scored rows.
        seeds: of initial weights and training rows.
    """

    pairs: int = 8
    queries: int = 40
    values: int = 8
    keys: int = 16
    length: int = 64
    base_window: int = 8
    layers: int = 2
    width: int = 128
    heads: int = 1
    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 3e-3
    solved_loss: float = 0.01
    test_rows: int = 1000
    seeds: tuple[int, ...] = (42, 43, 44)

    @property
    def reach(self) -> int:
        """Tokens over which the stacked windows carry information: L·(w-1)."""
        return self.layers * (self.base_window - 1)

    @property
    def vocabulary(self) -> int:
        """Filler, keys, values."""
        return 1 + self.keys + self.values


@dataclass(frozen=True)
class RecallRows:
    """Rows of the task.

    Attributes:
        ids: (B, T) tokens.
        queries: (B, Q) positions of the asked keys, increasing.
        answers: (B, Q) the values to be predicted there.
        distances: (B, Q) from the pair's value to the query.
    """

    ids: torch.Tensor
    queries: torch.Tensor
    answers: torch.Tensor
    distances: torch.Tensor


def make_rows(setting: RecallSetting, rows: int, generator: torch.Generator) -> RecallRows:
    """Random rows: pairs first, then filler with a pair's key at random places."""
    import torch  # noqa: PLC0415

    P, Q, T = setting.pairs, setting.queries, setting.length

    def distinct(choices: int, count: int) -> torch.Tensor:
        """(rows, count) different numbers below `choices` a row."""
        return torch.rand(rows, choices, generator=generator).argsort(dim=1)[:, :count]

    keys = 1 + distinct(setting.keys, P)
    values = 1 + setting.keys + torch.randint(setting.values, (rows, P), generator=generator)
    queries = (2 * P + distinct(T - 2 * P, Q)).sort(dim=1).values
    asked = torch.randint(P, (rows, Q), generator=generator)  # which pair each query is about
    ids = torch.zeros(rows, T, dtype=torch.int64)
    ids[:, 0 : 2 * P : 2], ids[:, 1 : 2 * P : 2] = keys, values
    ids.scatter_(1, queries, keys.gather(1, asked))
    return RecallRows(ids, queries, values.gather(1, asked), queries - (2 * asked + 1))


def build_arm(arm: str, setting: RecallSetting, seed: int) -> OrthrosForCausalLM:
    """A model of one of ARMS; parameters of the same name start equal in all of them."""
    import torch  # noqa: PLC0415

    from orthros_train.model import OrthrosConfig, OrthrosForCausalLM  # noqa: PLC0415

    config = OrthrosConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.width,
        intermediate_size=setting.width,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        max_position_embeddings=setting.length,
        initializer_range=setting.width**-0.5,
        architecture="orthros" if arm == "orthros" else "transformer",
        base_window=None if arm == "transformer" else setting.base_window,
    )
    model = OrthrosForCausalLM(config)
    model.reset_parameters(seed)
    with torch.no_grad():  # embeddings of standard deviation 1: small ones stall for many hundred steps
        model.model.embed_tokens.weight.div_(config.initializer_range)
    return model


def train_arm(
    model: OrthrosForCausalLM, setting: RecallSetting, seed: int, on_step: Callable[[int, float], None] | None = None
) -> int:
    """Train on rows drawn from `seed`, with output tokens at the queries alone; returns the number of steps taken."""
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, weight_decay=0.0)
    warmup = max(1, setting.steps // 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps - warmup),
        ],
        [warmup],
    )
    model.train()
    solved = 0
    for step in range(setting.steps):
        rows = make_rows(setting, setting.batch_size, generator)
        device = model.device
        output = model(
            rows.ids.to(device),
            output_positions=rows.queries.to(device),
            shift_labels=rows.answers.to(device),
            use_cache=False,
        )
        optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss = output.loss.item()
        if on_step is not None:
            on_step(step + 1, loss)
        solved = solved + 1 if loss < setting.solved_loss else 0
        if solved == 10:
            return step + 1
    return setting.steps


def score_arm(model: OrthrosForCausalLM, setting: RecallSetting) -> dict[str, Any]:
    """Accuracy on fresh rows: of all queries, within the windows' reach, beyond it, and by distance.

    The likeliest token of the whole vocabulary must be the value.
    """
    import torch  # noqa: PLC0415

    rows = make_rows(setting, setting.test_rows, torch.Generator().manual_seed(TEST_SEED))
    hits = []
    model.eval()
    with torch.no_grad():
        for start in range(0, setting.test_rows, 250):
            part = slice(start, start + 250)
            logits = model(
                rows.ids[part].to(model.device),
                output_positions=rows.queries[part].to(model.device),
                use_cache=False,
            ).logits
            hits.append(logits.argmax(dim=-1).cpu() == rows.answers[part])
    hit, distance = torch.cat(hits).flatten().double(), rows.distances.flatten()
    far = distance > setting.reach
    edges = range(1, setting.length, 7)
    buckets = [(low, min(low + 6, setting.length)) for low in edges]
    inside = [(low, high, (distance >= low) & (distance <= high)) for low, high in buckets]
    return {
        "all": float(hit.mean()),
        "near": float(hit[~far].mean()),
        "far": float(hit[far].mean()),
        "far_queries": int(far.sum()),
        "by_distance": [[low, high, float(hit[mask].mean())] for low, high, mask in inside if bool(mask.any())],
    }


def run_recall(setting: RecallSetting, arms: Sequence[str] = ARMS, device: str = "cpu") -> dict[str, Any]:
    """Train and score every arm with every seed; JSON-ready."""
    torch_device(device)
    start, cpu = time.perf_counter(), time.process_time()
    runs: dict[str, dict[str, Any]] = {arm: {} for arm in arms}
    total = len(arms) * len(setting.seeds) * setting.steps
    done = 0
    with Progress("associative recall", total) as progress:
        for seed in setting.seeds:
            for arm in arms:
                model: Any = build_arm(arm, setting, seed)
                model = model.to(device)

                def report(step: int, loss: float, arm: str = arm, seed: int = seed, before: int = done) -> None:
                    progress.update(before + step, f"{TITLES[arm]}, seed {seed}, step {step}, loss {loss:.3f}")

                steps = train_arm(model, setting, seed, report)
                runs[arm][str(seed)] = {"steps": steps, **score_arm(model, setting)}
                done += setting.steps
    return {
        "setting": {**asdict(setting), "reach": setting.reach, "chance": 1 / setting.values},
        "runs": runs,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "machine": describe_machine(),
    }


def accuracy_plot(results: Mapping[str, Any]) -> Figure:
    """Accuracy against the distance from the pair, mean over the seeds, with the reach of the windows and chance."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for arm, seeds in results["runs"].items():
            curves = [run["by_distance"] for run in seeds.values()]
            middle = [(low + high) / 2 for low, high, _ in curves[0]]
            mean = [statistics.mean(each[i][2] for each in curves) for i in range(len(middle))]
            axes.plot(middle, mean, "o-", color=HUES[arm], label=TITLES[arm], markersize=4, linewidth=1.5)
        setting = results["setting"]
        axes.axvline(setting["reach"], color=INK, linestyle=":", linewidth=1.2)
        axes.annotate("L·(w−1)", (setting["reach"], 0.02), (5, 0), textcoords="offset points")
        axes.axhline(setting["chance"], color=INK, linestyle="--", linewidth=0.9)
        axes.annotate("chance", (setting["length"] - 6, setting["chance"]), (0, 4), textcoords="offset points")
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("tokens between the pair and the query")
        axes.set_ylabel("accuracy")
        axes.legend(loc="center right")
        return figure


def write_recall_report(results: Mapping[str, Any], folder: Path) -> str:
    """Write report.md, report.html and the plot; returns the Markdown."""
    setting, rows = results["setting"], []
    for arm, seeds in results["runs"].items():
        cells = []
        for key in ("all", "near", "far"):
            values = [run[key] for run in seeds.values()]
            spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{100 * statistics.mean(values):.2f}{spread}")
        rows.append([TITLES[arm], ", ".join(str(run["steps"]) for run in seeds.values()), *cells])
    head = ["arm", "steps", "all queries", f"distance ≤ {setting['reach']}", f"distance > {setting['reach']}"]
    text = "\n\n".join(
        [
            "# Multi-query associative recall",
            f"{setting['pairs']} key-value pairs, then {setting['queries']} queries among filler, {setting['length']} "
            f"tokens a row. {setting['layers']} layers, width {setting['width']}, window w = {setting['base_window']}: "
            f"stacked windows reach over L·(w−1) = {setting['reach']} tokens. At most {setting['steps']} "
            f"steps of {setting['batch_size']} rows, fewer for an arm whose loss is below {setting['solved_loss']} "
            f"before; accuracy in percent on {setting['test_rows']:,} fresh rows, seeds "
            f"{', '.join(map(str, setting['seeds']))}; guessing among the values gives {100 * setting['chance']:.1f}.",
            table(head, rows, numbers_from=2),
            "![Accuracy against distance](plots/recall.png)",
            f"Measured in {results['seconds']:.0f} s ({results['cpu_seconds']:.0f} s of processor time) on "
            f"{results['machine']['processor']}.",
        ]
    )
    write_report(folder, "report", "Multi-query associative recall", text + "\n", {"recall": accuracy_plot(results)})
    return text


def run_synthetic(folder: Path, setting: RecallSetting | None = None, device: str = "cpu") -> dict[str, Any]:
    """The suite `synthetic`: train, score, write results.json and the report into `folder`; print the table."""
    prepare_output(folder / "results.json")
    results = run_recall(setting or RecallSetting(), device=device)
    write_output(folder / "results.json", json.dumps(results, indent=1) + "\n")
    print(write_recall_report(results, folder))
    print(f"\nwritten: {folder / 'results.json'}, {folder / 'report.html'}")
    return results
