"""Fine-tuning through the real loop: it learns, counts, validates, resumes and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from orthros_train.config import Config
from orthros_train.conversion.from_checkpoint import export_hf
from orthros_train.data import collate
from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.model.flops import training_flops
from orthros_train.parallel.mesh import Mesh
from orthros_train.training.batches import BatchLoader, output_columns, segment_lengths
from tests.data.chat_tokenizers import CHATML, write_tokenizer
from tests.data.chats import MODEL, sft_config, sft_data, write_chats
from tests.training.small_runs import assert_same_state, losses, metrics, run, untimed


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 60)


def test_learns_to_answer_and_to_stop(tmp_path: Path, tokenizer: Path) -> None:
    """Three questions by heart: the exported model gives each its answer, ends its turn, and stops by itself."""
    pairs = {"one": "alpha", "two": "beta", "three": "gamma"}
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"prompt": k, "response": v}) + "\n" for k, v in pairs.items()))
    config = sft_config(
        tmp_path / "run",
        tokenizer,
        [file],
        data__split=[1.0, 0.0, 0.0],
        sft__packing=False,
        model={**MODEL, "hidden_size": 64, "intermediate_size": 128},
        train={"steps": 120, "micro_batch_size": 3, "global_batch_size": 3, "sequence_length": 48},
    )
    assert run(config) == 0
    assert losses(config)[0] > 4
    assert losses(config)[-1] < 0.05
    folder = export_hf(config.output_dir, tmp_path / "exported")
    loaded = AutoTokenizer.from_pretrained(folder)
    model = OrthrosForCausalLM.from_pretrained(folder)
    for question, answer in pairs.items():
        prompt = loaded.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        made = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
        assert loaded.decode(made) == f"{answer}<|im_end|>"


@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 1), (2, 3)])
def test_loss_of_the_first_step(tmp_path: Path, tokenizer: Path, chats: Path, ranks: int, zero_stage: int) -> None:
    """Exactly the mean over the answer tokens of the global batch, as the full-copy model with masked labels has it."""
    config = sft_config(tmp_path / "run", tokenizer, [chats], train__steps=1, parallel__zero_stage=zero_stage)
    assert run(config, ranks) == 0
    data = sft_data(config)
    model = initial_model(config)
    batch = collate([data.sample(index) for index in range(8)])
    with torch.no_grad():
        expected = model(**batch).loss.item()
    (record,) = metrics(config)
    assert record["loss"] == pytest.approx(expected, abs=1e-5)
    assert record["loss_tokens"] == (batch["shift_labels"] != -100).sum()
    most = max(data.output_count(index) for index in range(8))
    assert record["output_tokens"] == 8 * -(-most // 8) * 8
    assert record["tokens_seen"] == 8 * 128


def initial_model(config: Config) -> OrthrosForCausalLM:
    from orthros_train.config import orthros_config  # noqa: PLC0415
    from orthros_train.training.initial_model import InitialValues, build_model  # noqa: PLC0415

    return build_model(InitialValues(config, orthros_config(config, 260)))


def test_resumes_bitwise(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    """Ten steps over several epochs equal five, a save, new processes on the same cache, and five."""
    options = {"schedule__decay_steps": 8, "checkpoint__interval_steps": 5, "evaluation__interval_steps": 5}
    whole = sft_config(tmp_path / "whole", tokenizer, [chats], train__steps=10, **options)
    half = sft_config(tmp_path / "halves", tokenizer, [chats], train__steps=5, **options)
    rest = sft_config(tmp_path / "halves", tokenizer, [chats], train__steps=10, **options)
    for config in (whole, half, rest):
        assert run(config, 2) == 0
    assert untimed(rest) == untimed(whole)
    assert [r["step"] for r in metrics(rest) if r.get("validation_loss") is not None] == [5, 10]
    last = "checkpoints/step_00000010"
    assert_same_state(Path(rest.output_dir) / last, Path(whole.output_dir) / last)


def test_other_layouts_see_the_same(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    one = sft_config(tmp_path / "one", tokenizer, [chats], train__micro_batch_size=8)
    two = sft_config(tmp_path / "two", tokenizer, [chats], train__micro_batch_size=1, parallel__zero_stage=2)
    assert run(one, 1) == run(two, 2) == 0
    assert losses(one) == pytest.approx(losses(two), abs=1e-5)
    for key in ("loss_tokens", "output_tokens"):
        assert [record[key] for record in metrics(one)] == [record[key] for record in metrics(two)]
    assert metrics(one)[-1]["validation_loss"] == pytest.approx(metrics(two)[-1]["validation_loss"], abs=1e-5)


@pytest.mark.parametrize(
    "layout",
    [{"parallel__pipeline": 2}, {"parallel__tensor": 2}, {"parallel__tensor": 2, "parallel__sequence": True}],
    ids=["pipeline", "tensor", "sequence"],
)
def test_split_models_see_the_same(tmp_path: Path, tokenizer: Path, chats: Path, layout: dict[str, Any]) -> None:
    one = sft_config(tmp_path / "one", tokenizer, [chats])
    two = sft_config(tmp_path / "two", tokenizer, [chats], **layout)
    assert run(one, 1) == run(two, 2) == 0
    assert_same_metrics(one, two)


@pytest.mark.evidence
@pytest.mark.parametrize("freeze", ["none", "all_but_affines"])
def test_a_stage_in_the_middle_follows_the_shapes(tmp_path: Path, tokenizer: Path, chats: Path, freeze: str) -> None:
    """It reads no data, yet M changes from step to step, and the window with it."""
    options: dict[str, Any] = {
        "model": {**MODEL, "num_hidden_layers": 6},
        "adaptation": {"start_window": 64, "window_steps": 3, "freeze": freeze},
        "evaluation__interval_steps": 2,
    }
    one = sft_config(tmp_path / "one", tokenizer, [chats], **options)
    three = sft_config(tmp_path / "three", tokenizer, [chats], **options, parallel__pipeline=3)
    assert run(one, 1) == run(three, 3) == 0
    assert_same_metrics(one, three)
    assert len({record["output_tokens"] for record in metrics(three)}) > 1


def assert_same_metrics(one: Config, two: Config) -> None:
    for key in ("loss", "grad_norm", "validation_loss", "output_tokens", "loss_tokens"):
        values = [[record[key] for record in metrics(config) if key in record] for config in (one, two)]
        assert values[0] == pytest.approx(values[1], abs=1e-5, rel=1e-5), key


def test_another_data_set_is_another_run(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    assert run(sft_config(tmp_path / "run", tokenizer, [chats], train__steps=2)) == 0
    other = write_chats(tmp_path / "other.jsonl", 60, seed=5)
    with pytest.raises(AssertionError, match=r"InputError: .*was trained with another data"):
        run(sft_config(tmp_path / "run", tokenizer, [other], train__steps=3))
    with pytest.raises(AssertionError, match=r"InputError: .*its data.sft.train_on is 'all', this config's is 'last'"):
        run(sft_config(tmp_path / "run", tokenizer, [chats], train__steps=3, sft__train_on="last"))


@pytest.mark.parametrize("document_mask", [True, False])
def test_mixed_with_text(tmp_path: Path, chats: Path, corpus: Path, document_mask: bool) -> None:
    """Half text, half conversations, on one and two ranks: the same losses, from micro-batches of either kind."""
    shared: dict[str, Any] = {
        "data__train": [{"prefix": str(corpus)}],
        "data__document_mask": document_mask,
        "sft__chat_template": template_file(tmp_path),
    }
    one = sft_config(tmp_path / "one", None, [chats], train__micro_batch_size=2, **shared)
    two = sft_config(tmp_path / "two", None, [chats], train__micro_batch_size=4, **shared)
    assert run(one, 1) == run(two, 2) == 0
    assert losses(one) == pytest.approx(losses(two), abs=1e-5)
    for record in metrics(one):  # four rows of text, four of conversations in two micro-batches
        assert record["output_tokens"] < 8 * 128
        assert record["output_tokens"] >= 4 * 128
    assert [r["output_tokens"] for r in metrics(two)] == [8 * 128] * 6  # one micro-batch holds both kinds
    assert [r["loss_tokens"] for r in metrics(one)] == [r["loss_tokens"] for r in metrics(two)]


@pytest.mark.parametrize("document_mask", [True, False])
def test_mixed_with_text_in_a_pipeline(tmp_path: Path, chats: Path, corpus: Path, document_mask: bool) -> None:
    """Shapes cannot change inside a step there: a step with any text has an output token everywhere, and a tenth of
    the steps has none."""
    shared: dict[str, Any] = {
        "data__train": [{"prefix": str(corpus), "weight": 0.1}],
        "data__document_mask": document_mask,
        "sft__chat_template": template_file(tmp_path),
        "train__global_batch_size": 4,
    }
    one = sft_config(tmp_path / "one", None, [chats], **shared)
    two = sft_config(tmp_path / "two", None, [chats], **shared, parallel__pipeline=2)
    assert run(one, 1) == run(two, 2) == 0
    assert losses(one) == pytest.approx(losses(two), abs=1e-5)
    outputs = [record["output_tokens"] for record in metrics(two)]
    assert max(outputs) == 4 * 128 > min(outputs)


def template_file(folder: Path) -> str:
    file = folder / "template.jinja"
    file.write_text(CHATML.replace("<|im_end|>", "<eos>"))
    return str(file)


def test_says_what_it_reads_and_keeps_the_template(tmp_path: Path, tokenizer: Path, chats: Path, capfd: Any) -> None:
    other = write_tokenizer(tmp_path / "other", None, eos_token="</s>")
    file = tmp_path / "chatml.jinja"
    file.write_text(CHATML)
    config = sft_config(tmp_path / "run", other, [chats], train__steps=1, sft__chat_template=str(file))
    assert run(config) == 0
    said = capfd.readouterr().out
    assert "of 60 conversations;" in said
    assert "dropped: longer than 128 tokens; train: " in said
    assert "warning: answers end with '<|im_end|>', but the tokenizer's EOS is '</s>': name the former" in said
    exported = export_hf(config.output_dir, tmp_path / "exported")
    assert (exported / "chat_template.jinja").read_text() == CHATML


def test_bad_input_is_one_line_on_every_rank(tmp_path: Path, tokenizer: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(AssertionError, match=r"InputError: .*broken.jsonl, line 2: no column messages"):
        run(sft_config(tmp_path / "run", tokenizer, [broken]), 2)
    assert not (tmp_path / "run").exists()


def test_flops_count_the_computed_slots(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    """An unused slot is a token at its row's first column."""
    config = sft_config(tmp_path, tokenizer, [chats], data__prefetch_steps=0)
    loader = BatchLoader(sft_data(config), config, Mesh(), first_step=0)
    batch, _ = loader.take(lambda: False)
    assert batch is not None
    assert batch.output_columns is not None
    model = initial_model(config).config
    expected = 0
    for micro in batch.micro_batches:
        for row in range(2):
            one = {key: value[row : row + 1] for key, value in micro.items()}
            columns = one["output_positions"][0].clamp(min=0).tolist()
            expected += training_flops(model, segment_lengths(one), columns).total
    assert training_flops(model, batch.segment_lengths, batch.output_columns).total == expected
    assert output_columns([{"input_ids": torch.zeros(2, 4)}]) is None
    part = {"input_ids": torch.zeros(1, 3), "output_positions": torch.tensor([[1, -1]])}
    assert output_columns([{"input_ids": torch.zeros(1, 2)}, part, part]) == [0, 1, 3, 2, 6, 5]


def test_no_conversations_named(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(InputError, match=r"data.sft.train names no source"):
        sft_data(sft_config(tmp_path, tokenizer, []))
