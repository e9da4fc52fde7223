"""What an Orthros folder holds after a conversion, and what makes a conversion stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from orthros_train.conversion.from_llama import OrthrosForm, to_orthros
from orthros_train.errors import InputError
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from tests.conversion.sources import edit_json, save_source, save_tokenizer

MODEL_FOLDER = Path(__file__).parents[2] / "orthros_train" / "model"
FORM = OrthrosForm(base_window=8)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_source(tmp_path / "source", max_shard_size="20kB", vocab_size=259)


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a folder, which then has one file."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in folder.glob("model*"):
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_affines_are_the_identity_in_the_dtype_of_their_queries(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", dtype=torch.bfloat16)
    to_orthros(source, tmp_path / "orthros", FORM)
    tensors = load_file(tmp_path / "orthros" / "model.safetensors")
    affines = {name: tensor for name, tensor in tensors.items() if "_query." in name}
    assert len(affines) == 2 * (2 * 3 - 1)  # gain and shift of two streams in three layers, but the last base stream
    for name, tensor in affines.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, torch.full((32,), float(name.endswith(".gain")), dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (OrthrosForm(8), ("orthros", 8, 1, "elementwise")),
        (OrthrosForm(8, base_sinks=0), ("orthros", 8, 0, "elementwise")),
        (OrthrosForm(8, base_sinks=4), ("orthros", 8, 4, "elementwise")),
        (OrthrosForm(None, architecture="transformer"), ("transformer", None, 0, "none")),
        (OrthrosForm(8, architecture="transformer"), ("transformer", 8, 1, "none")),
    ],
)
def test_the_form_goes_into_the_config(form: OrthrosForm, expected: tuple[Any, ...], source: Path) -> None:
    to_orthros(source, source.parent / "orthros", form)
    config = OrthrosConfig.from_pretrained(source.parent / "orthros")
    assert (config.architecture, config.base_window, config.base_sinks, config.query_affine) == expected
    raw = json.loads((source.parent / "orthros" / "config.json").read_text())
    assert raw["architectures"] == ["OrthrosForCausalLM"]
    assert raw["source_config"] == json.loads((source / "config.json").read_text())
    assert (
        not {"sliding_window", "layer_types", "attention_chunk_size"} & raw.keys()
    )  # transformers' caches act on them


def test_the_folder_is_what_save_pretrained_would_write(source: Path) -> None:
    """Same code, byte for byte that of orthros_train/model; same config.json but for nothing."""
    ours, theirs = source.parent / "ours", source.parent / "theirs"
    to_orthros(source, ours, FORM)
    OrthrosForCausalLM.from_pretrained(ours).save_pretrained(theirs)
    code = {path.name: path.read_bytes() for path in ours.glob("*.py")}
    assert code == {path.name: path.read_bytes() for path in theirs.glob("*.py")}
    assert code == {name: (MODEL_FOLDER / name).read_bytes() for name in code}
    assert (ours / "config.json").read_text() == (theirs / "config.json").read_text()
    names = {file.name for file in theirs.iterdir()} - {"model.safetensors"}
    assert names < {file.name for file in ours.iterdir()}


def test_companions_come_along_byte_for_byte(source: Path) -> None:
    tokenizer = save_tokenizer(source)
    for name in ("LICENSE", "USE_POLICY.md", "tokenizer.model", "merges.txt", "added_tokens.json"):
        (source / name).write_bytes(b"{}\r\n")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    for name in ("training_args.bin", "optimizer.pt", ".gitattributes"):
        (source / name).touch()
    output = source.parent / "orthros"
    to_orthros(source, output, FORM)
    copied = [
        "LICENSE", "USE_POLICY.md", "tokenizer.model", "merges.txt", "added_tokens.json", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
        "additional_chat_templates/tools.jinja",
    ]  # fmt: skip
    for name in copied:
        assert (output / name).read_bytes() == (source / name).read_bytes()
    assert not {"training_args.bin", "optimizer.pt", ".gitattributes"} & {path.name for path in output.iterdir()}
    (output / "tokenizer.model").unlink()  # no real one
    loaded = AutoTokenizer.from_pretrained(output)
    messages = [{"role": "user", "content": "Hé"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "user: Hé"
    assert loaded("Hé\n").input_ids == tokenizer("Hé\n").input_ids


def test_the_card_says_what_the_hub_and_a_reader_need(source: Path) -> None:
    (source / "README.md").write_text("---\nlicense: apache-2.0\nlanguage:\n- en\ntags:\n- theirs\n---\n# Source\n")
    edit_json(source / "config.json", _name_or_path="maker/source-7b")
    to_orthros(source, source.parent / "orthros", OrthrosForm(base_window=8, base_sinks=2))
    card = ModelCard.load(source.parent / "orthros" / "README.md")
    assert card.data.to_dict() == {
        "license": "apache-2.0", "language": ["en"], "library_name": "transformers", "base_model": "maker/source-7b",
        "pipeline_tag": "text-generation", "tags": ["orthros"],
    }  # fmt: skip
    for sentence in (
        "https://arxiv.org/abs/2610.13735", "Converted from maker/source-7b (LlamaForCausalLM)", "trust_remote_code",
        "attends to the last 8 tokens and to the first 2", "nothing has been trained since the conversion",
    ):  # fmt: skip
        assert sentence in card.text


@pytest.mark.parametrize("card", [None, "no front matter", "---\nlicense: [\n---\n", "---\n- a list\n---\n"])
def test_a_source_without_a_readable_card(card: str | None, source: Path) -> None:
    if card is not None:
        (source / "README.md").write_text(card)
    to_orthros(source, source.parent / "orthros", FORM)
    written = ModelCard.load(source.parent / "orthros" / "README.md")
    assert written.data.to_dict().keys() == {"library_name", "pipeline_tag", "tags"}
    assert "Converted from source (LlamaForCausalLM)" in written.text


def test_a_tied_model_may_repeat_its_embedding_as_the_head(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", tie_word_embeddings=True)
    edit_tensors(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    to_orthros(source, tmp_path / "orthros", FORM)
    assert "lm_head.weight" not in load_file(tmp_path / "orthros" / "model.safetensors")


def test_old_checkpoints_carry_rope_frequencies(source: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(source, lambda t: t.update({name: torch.ones(4)}))
    to_orthros(source, source.parent / "orthros", FORM)
    assert name not in load_file(source.parent / "orthros" / "model.safetensors")


def test_pickle_files_are_read_on_request(source: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    edit_tensors(source, expected.update)
    torch.save(expected, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    with pytest.raises(InputError, match="--allow-pickle"):
        to_orthros(source, source.parent / "orthros", FORM)
    to_orthros(source, source.parent / "orthros", FORM, allow_pickle=True)
    written = load_file(source.parent / "orthros" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
BAD_TENSORS: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda t: t.pop(Q_PROJ), f"lacks the tensor {Q_PROJ} that its config.json calls for"),
    (lambda t: t.pop("lm_head.weight"), "lm_head.weight that its config.json calls for; does config.json lack tie_"),
    (lambda t: t.update({Q_PROJ: torch.zeros(32, 16)}), "has shape [32, 16], but its config.json calls for [32, 32]"),
    (lambda t: t.update({f"{Q_PROJ[:-6]}bias": torch.zeros(32)}), "q_proj.bias, which its config.json does not call"),
    (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(1)}), "layers.3.mlp.up_proj.weight, which"),
    (lambda t: t[Q_PROJ].view(-1)[7].fill_(float("nan")), f"tensor {Q_PROJ} in"),
    (
        lambda t: t.update({Q_PROJ: torch.zeros(32, 32).to(torch.float8_e4m3fn)}),
        "is of dtype F8_E4M3; fp32, bf16 and fp16 can be read",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS)
def test_weights_that_do_not_fit(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, source: Path
) -> None:
    edit_tensors(source, change)
    with pytest.raises(InputError) as error:
        to_orthros(source, source.parent / "orthros", FORM)
    assert message in str(error.value)
    assert [path.name for path in source.parent.iterdir()] == ["source"]


def test_a_tied_model_whose_head_differs(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", tie_word_embeddings=True)
    edit_tensors(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(InputError, match=r"lm_head.weight and model.embed_tokens.weight differ"):
        to_orthros(source, tmp_path / "orthros", FORM)


def test_an_orthros_model_needs_a_window(source: Path) -> None:
    with pytest.raises(InputError, match="pass --base-window W"):
        to_orthros(source, source.parent / "orthros", OrthrosForm(base_window=None))


def test_sinks_need_a_window(source: Path) -> None:
    form = OrthrosForm(base_window=None, base_sinks=2, architecture="transformer")
    with pytest.raises(InputError, match="base_sinks=2 needs a base_window"):
        to_orthros(source, source.parent / "orthros", form)


def test_an_active_window_needs_leave(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "mistral", sliding_window=24)
    with pytest.raises(InputError, match=r"sliding window of 24 tokens, fewer than its 64 positions.*--widen-output"):
        to_orthros(source, tmp_path / "orthros", FORM)
    to_orthros(source, tmp_path / "orthros", OrthrosForm(8, widen_output_window=True))
    assert "window of 24 tokens; this model does not" in (tmp_path / "orthros" / "README.md").read_text()


def test_a_full_output_folder_stops_before_any_work(source: Path) -> None:
    (source.parent / "orthros").mkdir()
    (source.parent / "orthros" / "file").touch()
    (source / "config.json").unlink()
    with pytest.raises(InputError, match="exists and is not empty"):
        to_orthros(source, source.parent / "orthros", FORM)
