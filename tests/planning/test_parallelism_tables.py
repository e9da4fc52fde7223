"""The tables of docs/parallelism.md are what the dry run says."""

from __future__ import annotations

from pathlib import Path

import pytest

from orthros_train.config import gradient_accumulation_steps, load_config, orthros_config
from orthros_train.planning.communication_estimate import bubble_share, traffic
from orthros_train.planning.memory_estimate import memory_parts
from orthros_train.planning.stage_plan import plan_stages

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "orthros_1.3b.yaml"
PAGE = ROOT / "docs" / "parallelism.md"
TP, PP, SP = "parallel.tensor", "parallel.pipeline", "parallel.sequence=true"
ROWS = [
    (8, "parallel.zero_stage=1"),
    (8, "parallel.zero_stage=2"),
    (8, "parallel.zero_stage=3"),
    (8, f"parallel.zero_stage=2 {TP}=2"),
    (8, f"parallel.zero_stage=1 {PP}=2"),
    (8, f"parallel.zero_stage=1 {TP}=2 {PP}=2"),
    (8, f"parallel.zero_stage=1 {TP}=2 {SP} {PP}=2"),
    (8, f"parallel.zero_stage=1 {TP}=8"),
    (8, f"parallel.zero_stage=1 {TP}=8 {SP}"),
    (512, f"train.micro_batch_size=1 parallel.zero_stage=1 {TP}=8 {SP} {PP}=4"),
]
MEMORY = ("weights", "gradients", "master weights", "Adam moments", "activations", "KV", "boundaries", "logits")
SENT = ("tensor", "pipeline", "data")


def rows(world_size: int, options: str) -> tuple[str, str]:
    """A layout's lines of both tables, of the stage with the largest total."""
    config = load_config(RECIPE, options.split())
    assert config.model.vocab_size is not None
    model = orthros_config(config, config.model.vocab_size)
    stages = plan_stages(config, model, world_size)
    memory = [{part.name: part.size_bytes for part in memory_parts(config, model, s, world_size)} for s in stages]
    sent = [{part.name: part.size_bytes for part in traffic(config, model, s, world_size)} for s in stages]
    for kinds in sent:
        kinds["pipeline"] = kinds.pop("tied embedding", 0) + kinds.get("pipeline", 0)
    bubble = bubble_share(len(stages), gradient_accumulation_steps(config, world_size))
    largest, busiest = (max(parts, key=lambda sizes: sum(sizes.values())) for parts in (memory, sent))
    return (
        line(world_size, options, *(gib(largest.get(name, 0)) for name in MEMORY), gib(sum(largest.values()))),
        line(
            world_size,
            options,
            *(gib(busiest.get(name, 0)) for name in SENT),
            gib(sum(busiest.values())),
            f"{bubble:.0%}" if len(stages) > 1 else "",
        ),
    )


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.2f}" if size_bytes else ""


def line(world_size: int, options: str, *cells: str) -> str:
    return " | ".join((f"| {world_size}", f"`{options}`", *cells)) + " |"


@pytest.mark.parametrize(("world_size", "options"), ROWS)
def test_the_page_shows_what_the_dry_run_says(world_size: int, options: str) -> None:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    for expected in rows(world_size, options):
        assert expected in page


def test_the_page_shows_nothing_else() -> None:
    shown = [text for text in PAGE.read_text(encoding="utf-8").splitlines() if text.startswith(("| 8 ", "| 512 "))]
    assert len(shown) == 2 * len(ROWS)
