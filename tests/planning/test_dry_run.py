"""The dry run and the recipes under configs/."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from orthros_train.config import Config, load_config, orthros_config
from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.model.flops import forward_flops, palm_flops_per_token
from orthros_train.planning.dry_run import describe_arm, other_arm, print_dry_run

RECIPES = Path(__file__).parents[2] / "configs"
PARAMETERS: dict[
    str, tuple[int | None, str | None]
] = {  # exact (None: free to change), and what the recipe's head says
    "demo": (None, None),
    "orthros_130m": (134_141_184, "134M"),
    "transformer_130m": (134_105_856, "134M"),
    "orthros_340m": (341_195_776, "341M"),
    "transformer_340m": (341_099_520, "341M"),
    "orthros_1.3b": (1_298_954_240, "1.30B"),
    "transformer_1.3b": (1_298_761_728, "1.30B"),
    "llama3.1_8b_conversion": (8_030_777_344, "8.03B"),
    "sft": (134_141_184, None),
    "demo_convert": (134_582_976, None),
}
SHORT = ("train.steps=40", "schedule.warmup_steps=0")


def printed(config: Config, world_size: int = 1) -> str:
    console = Console(file=io.StringIO(), width=140)
    print_dry_run(config, world_size, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, name: str) -> list[str]:
    """The cells after `name` in its table row."""
    line = next(line for line in text.splitlines() if re.match(rf"│ {re.escape(name)} +│", line))
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_every_recipe_is_listed() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_recipe_loads_and_dry_runs(name: str) -> None:
    path = RECIPES / f"{name}.yaml"
    parameters, claim = PARAMETERS[name]
    text = printed(load_config(path), world_size=2)
    if parameters is not None:
        assert row(text, "total")[0] == f"{parameters:,}"
    assert row(text, "ranks") == ["2"]
    assert path.read_text().startswith("# "), "a recipe says at its top what it is"
    if claim is not None:
        assert f"{claim} parameters" in path.read_text()
    assert max(map(len, path.read_text().splitlines())) <= 120


@pytest.mark.parametrize("name", PARAMETERS)
def test_printed_parameters_are_the_models(name: str) -> None:
    config = load_config(RECIPES / f"{name}.yaml")
    with torch.device("meta"):
        model = OrthrosForCausalLM(orthros_config(config, config.model.vocab_size or 259))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert row(printed(config), "total")[0] == f"{parameters:,}"


@pytest.mark.parametrize("size", ["130m", "340m", "1.3b"])
def test_arms_of_a_recipe_differ_in_the_architecture_alone(size: str) -> None:
    orthros, transformer = (load_config(RECIPES / f"{arm}_{size}.yaml") for arm in ("orthros", "transformer"))
    orthros.output_dir = transformer.output_dir
    orthros.model.architecture, orthros.model.base_window = "transformer", None
    assert orthros == transformer


def test_1_3b_has_the_stated_shape() -> None:
    model = load_config(RECIPES / "orthros_1.3b.yaml").model
    shape = (model.num_hidden_layers, model.hidden_size, model.intermediate_size, model.vocab_size)
    assert shape == (24, 2048, 5632, 32000)


def test_conversion_recipe_is_llama_3_1_with_a_sink() -> None:
    model = load_config(RECIPES / "llama3.1_8b_conversion.yaml").model
    assert model.rope_scaling is not None
    assert model.rope_scaling.keys_given() == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert (model.base_sinks, model.num_key_value_heads, model.rope_theta) == (1, 8, 500000.0)


def test_figures_of_the_demo() -> None:
    config = load_config(RECIPES / "demo.yaml", ["train.global_batch_size=64", "train.micro_batch_size=8", *SHORT])
    text = printed(config, world_size=2)
    model = orthros_config(config, 259)
    other = other_arm(model)
    length = config.train.sequence_length
    assert row(text, "forwards a rank and step (gradient accumulation)") == ["4"]
    assert row(text, "tokens a step") == [f"{64 * length:,}"]
    assert row(text, "tokens of the run") == [f"{64 * 40 * length:,}"]
    here, there = forward_flops(model, [length]).total / length, forward_flops(other, [length]).total / length
    assert row(text, "forward, both streams") == [f"{here / 1e6:.4g} M", f"{there / 1e6:.4g} M", f"{here / there:.2f}"]
    assert row(text, "training (3 x forward)")[0] == f"{3 * here / 1e6:.4g} M"
    assert row(text, "training, PaLM's convention")[0] == f"{palm_flops_per_token(model, length) / 1e6:.4g} M"
    assert "output_dir: outputs/demo" in text
    assert "nothing was started or written" in text


LARGE = ("parallel.tensor=8", "parallel.pipeline=4", "parallel.zero_stage=1", "parallel.sequence=true")


def test_every_stage_of_a_large_layout_is_shown() -> None:
    text = printed(load_config(RECIPES / "orthros_1.3b.yaml", [*LARGE, "train.micro_batch_size=1"]), world_size=512)
    assert row(text, "ranks") == ["512 = 8 tensor x 16 data x 4 pipeline"]
    assert row(text, "forwards a rank and step (gradient accumulation)") == ["16"]
    assert row(text, "pipeline bubble (stages - 1) / (forwards + stages - 1)") == ["15.8%"]
    memory, sent = text[text.index("Memory a rank") :].split("Sent by a rank in one optimizer step, by stage, in MiB")
    assert "Memory a rank, 512 ranks, by stage, in MiB" in memory
    shown = [stage_row(memory, stage) for stage in range(4)]
    assert [cells[:3] for cells in shown] == [
        ["0-4", "40,330,240", "77"],
        ["5-11", "44,993,536", "86"],
        ["12-18", "44,993,536", "86"],
        ["19-23", "40,331,776", "77"],
    ]
    for cells in shown:
        sizes = [float(cell.replace(",", "")) for cell in cells[2:] if cell]
        assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=len(sizes))
    assert [len(stage_row(sent, stage)) for stage in range(4)] == [7] * 4
    assert "the residual (512, 1, 2048) in bf16, the layout (1, 2048) in int64" in text
    assert "padding" not in text


def stage_row(text: str, stage: int) -> list[str]:
    """The cells of a stage in the first table by stage."""
    line = next(line for line in text.splitlines() if re.match(rf"│ *{stage} *│ *\d+-\d+ *│", line))
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_padding_of_the_vocabulary_is_named() -> None:
    text = printed(load_config(RECIPES / "demo.yaml", ["parallel.tensor=4"]), world_size=4)
    assert "1 ids of padding make the vocabulary divide by parallel.tensor" in text
    assert row(text, "tensor")[0].endswith("iB")
    assert "Memory a rank, 4 ranks" in text


def test_what_one_rank_of_many_sends() -> None:
    recipe = RECIPES / "orthros_130m.yaml"
    assert "Sent by a rank" not in printed(load_config(recipe))
    size, assumption = row(printed(load_config(recipe, ["parallel.zero_stage=1"]), world_size=2), "data")
    assert size == f"{134_141_184 * (8 + 2) / 2 / 2**20:.2f} MiB"
    assert assumption == "fp32 gradients all-reduced once, weights gathered once"


def test_dry_run_starts_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(RECIPES / "demo.yaml")
    monkeypatch.chdir(tmp_path)
    printed(config)
    assert list(tmp_path.iterdir()) == []
    assert not torch.distributed.is_initialized()


def test_other_arm_and_its_name() -> None:
    conversion = orthros_config(load_config(RECIPES / "llama3.1_8b_conversion.yaml"), 128256)
    transformer = other_arm(conversion)
    assert describe_arm(conversion) == "orthros, w=512, 1 sink"
    assert describe_arm(transformer) == "transformer, full attention"
    assert (transformer.query_affine, transformer.rope_parameters) == ("none", conversion.rope_parameters)
    assert describe_arm(other_arm(transformer)) == "orthros, base sees everything"
    windowed = orthros_config(load_config(RECIPES / "transformer_130m.yaml", ["model.base_window=64"]), 32000)
    assert describe_arm(other_arm(windowed)) == "orthros, w=64"
    assert other_arm(windowed).query_affine == "elementwise"


def test_notes() -> None:
    assert "an answer is predicted" in printed(load_config(RECIPES / "sft.yaml"))
    assert "has no window, its costliest form" in printed(load_config(RECIPES / "transformer_130m.yaml"))
    assert "note:" not in printed(load_config(RECIPES / "demo.yaml"))
    adaptation = ["adaptation={freeze: all_but_affines, distillation: {weight: 0.5, teacher: a}}"]
    adapted = printed(load_config(RECIPES / "demo.yaml", adaptation))
    assert "trains the query affines alone" in adapted
    assert "the teacher's forward passes are in no figure of FLOPs" in adapted
    size, assumption = row(adapted, "teacher")
    assert size.endswith("MiB")
    assert assumption == "fp32, frozen and whole on every rank; as large as the model"


def test_batch_that_does_not_divide_over_the_ranks_is_refused() -> None:
    with pytest.raises(InputError, match="change one of the three"):
        printed(load_config(RECIPES / "demo.yaml"), world_size=3)
    with pytest.raises(InputError, match="3 ranks do not factor into"):
        printed(load_config(RECIPES / "demo.yaml", ["parallel.tensor=2"]), world_size=3)


def test_vocabulary_must_come_from_somewhere() -> None:
    without = load_config(RECIPES / "orthros_130m.yaml", ["model.vocab_size=null"])
    with pytest.raises(InputError, match=r"data/tokenizer\.model"):
        printed(without)
    with pytest.raises(InputError, match="less than the tokenizer's 259 ids"):
        printed(load_config(RECIPES / "demo.yaml", ["model.vocab_size=256"]))
