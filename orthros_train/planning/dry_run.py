"""What a run would be: its resolved configuration, parameters, FLOPs and memory. Starts nothing, writes nothing.

FLOPs are shown beside the other arm's, since an Orthros and a transformer of one size differ about twofold a token.
Whatever the number of ranks, one rank of each pipeline stage is planned here: the ranks of a stage are alike.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..config import Config, config_to_yaml, gradient_accumulation_steps, orthros_config
from ..data.tokenizers import load_tokenizer
from ..model import OrthrosConfig
from ..model.flops import forward_flops, palm_flops_per_token, training_flops
from ..model.parameter_count import parameter_count
from .communication_estimate import bubble_share, traffic
from .memory_estimate import Part, memory_parts, residual_shape
from .stage_plan import Stage, plan_stages

PIPED_WIDTH = 120  # columns of the tables where there is no terminal


def print_dry_run(config: Config, world_size: int, console: Console | None = None) -> None:
    """Print everything about the run that `config` describes on `world_size` ranks.

    Raises InputError if the global batch does not divide over the ranks, or if the vocabulary is neither in the config
    nor in a tokenizer that can be read.
    """
    console = console or Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    accumulation = gradient_accumulation_steps(config, world_size)
    model = orthros_config(config, vocabulary(config))
    stages = plan_stages(config, model, world_size)
    console.rule("Configuration", align="left")
    console.out(config_to_yaml(config), end="")
    tables = [
        _parameter_table(model),
        _step_table(config, model, world_size, accumulation),
        _flops_table(config, model),
        _memory_table(config, model, stages, world_size),
    ]
    if world_size > 1:
        tables.append(_traffic_table(config, model, stages, world_size))
    for table in tables:
        console.print()
        console.print(table)
    for note in _notes(config, model, stages):
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    console.print("Dry run: nothing was started or written.")


def other_arm(model: OrthrosConfig) -> OrthrosConfig:
    """The arm that `model` would be compared with: the full-attention transformer of an Orthros, the Orthros of a
    transformer (with its window, which for full attention means a base stream that sees everything)."""
    orthros = model.architecture == "orthros"
    changes = {
        "architecture": "transformer" if orthros else "orthros",
        "base_window": None if orthros else model.base_window,
        "base_sinks": 0 if orthros else model.base_sinks,
        "query_affine": None,
    }
    return OrthrosConfig(**{**model.to_dict(), **changes})


def describe_arm(model: OrthrosConfig) -> str:
    """An arm in a few words, e.g. `orthros, w=512, 1 sink`."""
    window = "full attention" if model.architecture == "transformer" else "base sees everything"
    window = window if model.base_window is None else f"w={model.base_window}"
    sinks = f", {model.base_sinks} sink{'s' if model.base_sinks > 1 else ''}" if model.base_sinks else ""
    return f"{model.architecture}, {window}{sinks}"


def vocabulary(config: Config) -> int:
    """The tokenizer's size, or `model.vocab_size` where the tokenizer's file is not there to be asked."""
    path = config.tokenizer.path
    if config.model.vocab_size is not None and path is not None and not Path(path).exists():
        return config.model.vocab_size
    return load_tokenizer(config.tokenizer).vocab_size


def _parameter_table(model: OrthrosConfig) -> Table:
    count = parameter_count(model)
    table = _table("Parameters", "part", "parameters", "share")
    for name, parameters in asdict(count).items():
        shown = "tied to the embedding" if name == "head" and model.tie_word_embeddings else f"{parameters:,}"
        table.add_row(name.replace("_", " "), shown, f"{parameters / count.total:.1%}")
    table.add_row("total", f"{count.total:,}", "", style="bold")
    return table


def _step_table(config: Config, model: OrthrosConfig, world_size: int, accumulation: int) -> Table:
    train = config.train
    tokens = train.global_batch_size * train.sequence_length
    step_flops = train.global_batch_size * training_flops(model, [train.sequence_length]).total
    table = _table("One optimizer step, and the run", "quantity", "value")
    parallel = config.parallel
    shared = parallel.tensor * parallel.pipeline
    axes = f"{parallel.tensor} tensor x {world_size // shared} data x {parallel.pipeline} pipeline"
    stages, bubble = parallel.pipeline, bubble_share(parallel.pipeline, accumulation)
    for name, value in (
        ("ranks", f"{world_size:,}" + (f" = {axes}" if shared > 1 else "")),
        ("sequences a rank and forward", f"{train.micro_batch_size:,}"),
        ("forwards a rank and step (gradient accumulation)", f"{accumulation:,}"),
        *([("pipeline bubble (stages - 1) / (forwards + stages - 1)", f"{bubble:.1%}")] if stages > 1 else []),
        ("sequences a step", f"{train.global_batch_size:,}"),
        ("tokens a step", f"{tokens:,}"),
        ("training FLOPs a step", _scaled(step_flops)),
        ("steps", f"{train.steps:,}"),
        ("tokens of the run", f"{tokens * train.steps:,}"),
        ("training FLOPs of the run", _scaled(step_flops * train.steps)),
    ):
        table.add_row(name, value)
    return table


def _flops_table(config: Config, model: OrthrosConfig) -> Table:
    length = config.train.sequence_length
    other = other_arm(model)
    forwards = [forward_flops(arm, [length]) for arm in (model, other)]
    table = _table("FLOPs a token, averaged over one document as long as the sequence", "part", "", "", "ratio")
    table.columns[1].header, table.columns[2].header = f"this run: {describe_arm(model)}", describe_arm(other)
    rows = [(name.replace("_", " "), *(asdict(flops)[name] for flops in forwards)) for name in asdict(forwards[0])]
    rows.append(("forward, both streams", *(flops.total for flops in forwards)))
    rows.append(("training (3 x forward)", *(training_flops(arm, [length]).total for arm in (model, other))))
    rows.append(
        ("training, PaLM's convention", *(palm_flops_per_token(arm, length) * length for arm in (model, other)))
    )
    for index, (name, here, there) in enumerate(rows):
        ratio = f"{here / there:.2f}" if here and there else ""
        style = "bold" if index in (5, 6) else None
        table.add_row(name, _scaled(here / length), _scaled(there / length), ratio, style=style)
    return table


def _memory_table(config: Config, model: OrthrosConfig, stages: Sequence[Stage], world_size: int) -> Table:
    parts = [memory_parts(config, model, stage, world_size) for stage in stages]
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    return _parts_table(
        f"Memory a rank, {ranks}",
        stages,
        parts,
        "without framework, communication buckets, ZeRO-3's gathered layers",
    )


def _traffic_table(config: Config, model: OrthrosConfig, stages: Sequence[Stage], world_size: int) -> Table:
    parts = [traffic(config, model, stage, world_size) for stage in stages]
    return _parts_table("Sent by a rank in one optimizer step", stages, parts, "by ring algorithms")


def _parts_table(title: str, stages: Sequence[Stage], parts: Sequence[Sequence[Part]], remark: str) -> Table:
    """The parts with what they assume; where there are several stages, a row of sizes each."""
    if len(stages) == 1:
        table = _table(title, "part", "size", "assumed")
        table.columns[2].justify = "left"
        for part in parts[0]:
            table.add_row(part.name, _binary(part.size_bytes), part.assumption)
        table.add_row("total", _binary(sum(part.size_bytes for part in parts[0])), remark, style="bold")
        return table
    assumed = {part.name: part.assumption for part in (part for stage_parts in parts for part in stage_parts)}
    table = _table(f"{title}, by stage, in MiB", "stage", "layers", "parameters", *assumed, "total")
    table.collapse_padding, table.pad_edge = True, False
    for stage, stage_parts in zip(stages, parts, strict=True):
        sizes = {part.name: part.size_bytes for part in stage_parts}
        cells = [f"{sizes[name] / 2**20:,.0f}" if name in sizes else "" for name in assumed]
        layers = f"{stage.layers.start}-{stage.layers.stop - 1}"
        total = f"{sum(sizes.values()) / 2**20:,.0f}"
        table.add_row(f"{stage.index}", layers, f"{stage.parameters:,}", *cells, total)
    table.caption = "\n".join(f"{name}: {assumption}" for name, assumption in (*assumed.items(), ("total", remark)))
    table.caption_justify = "left"
    return table


def _notes(config: Config, model: OrthrosConfig, stages: Sequence[Stage]) -> list[str]:
    notes = []
    if len(stages) > 1:
        rows, length = config.train.micro_batch_size, config.train.sequence_length
        notes.append(
            f"between stages travel the residual {residual_shape(config, model)} in {config.precision}, the layout "
            f"{(rows, length)} in int64, and back the residual's gradient"
        )
    if config.parallel.tensor > 1 and (padding := -model.vocab_size % config.parallel.tensor):
        notes.append(
            f"inside, {padding} ids of padding make the vocabulary divide by parallel.tensor; outside there are none"
        )
    notes += run_notes(config)
    if config.model.architecture == "transformer" and config.model.base_window is None:
        notes.append("the Orthros column has no window, its costliest form; a recipe's model.base_window costs less")
    return notes


def run_notes(config: Config) -> list[str]:
    """What of the run the figures of any layout leave out."""
    notes = []
    if config.task == "sft":
        notes.append("task sft has output tokens only where an answer is predicted; the figures assume one everywhere")
    if config.adaptation.freeze == "all_but_affines":
        notes.append("adaptation.freeze trains the query affines alone; the figures assume that all parameters train")
    if config.adaptation.distillation.weight > 0:
        notes.append("the teacher's forward passes are in no figure of FLOPs or time, its weights in the memory")
    return notes


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _scaled(value: float) -> str:
    """1234567 as `1.235 M`, in steps of a thousand."""
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if value < 1000:
            return f"{value:.4g} {prefix}".rstrip()
        value /= 1000
    return f"{value:.4g} Y"


def _binary(size_bytes: int) -> str:
    """Bytes in MiB, or in GiB from one on."""
    return f"{size_bytes / 2**30:,.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.2f} MiB"
