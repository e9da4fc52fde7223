"""tools/generate.py continues prompts as transformers' generate does, and refuses bad input in one line."""

from __future__ import annotations

import io
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.model import OrthrosForCausalLM
from tests.model.tiny import tiny_model
from tests.tools.command import run_here

Generate = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = ByteTokenizer()
    tiny_model(torch.float32, vocab_size=tokenizer.vocab_size).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def generate(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Generate:
    def call(*arguments: str, model: Path = folder) -> tuple[int, str, str]:
        return run_here("generate", "--model", model, *arguments, monkeypatch=monkeypatch, capsys=capsys)

    return call


def expected(folder: Path, prompt: str, tokens: int) -> str:
    """Greedy continuation by repeated full forwards, without generate and without a cache."""
    model, tokenizer = OrthrosForCausalLM.from_pretrained(folder), ByteTokenizer()
    ids = tokenizer.encode(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def test_greedy_text_equals_repeated_full_forwards(folder: Path, generate: Generate) -> None:
    code, out, _ = generate("--prompt", "To be", "--max-new-tokens", "9")
    assert code == 0
    assert out == expected(folder, "To be", 9) + "\n"


def test_prompts_of_unequal_length_do_not_disturb_each_other(folder: Path, generate: Generate) -> None:
    prompts = ["A", "A longer prompt than the first"]
    _, out, _ = generate(*(part for text in prompts for part in ("--prompt", text)), "--max-new-tokens", "6")
    texts = [expected(folder, text, 6) for text in prompts]
    assert out == f"=== prompt 1 ===\n{texts[0]}\n=== prompt 2 ===\n{texts[1]}\n"


def test_streaming_prints_the_same_text(generate: Generate) -> None:
    arguments = ["--prompt", "one ", "--prompt", "two ", "--max-new-tokens", "20"]
    assert generate(*arguments, "--stream")[1] == generate(*arguments)[1]


def test_the_seed_decides_and_temperature_zero_is_greedy(generate: Generate) -> None:
    base = ["--prompt", "x", "--max-new-tokens", "12"]
    first, again, other = (generate(*base, "--temperature", "3", "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again != other
    assert generate(*base, "--temperature", "0")[1] == generate(*base)[1]


def test_top_k_1_and_a_tiny_top_p_are_greedy(generate: Generate) -> None:
    base = ["--prompt", "x", "--max-new-tokens", "12"]
    greedy = generate(*base)[1]
    assert generate(*base, "--top-k", "1")[1] == greedy
    assert generate(*base, "--temperature", "5", "--top-p", "1e-6")[1] == greedy


def test_several_sequences_are_printed_under_their_prompts(generate: Generate) -> None:
    _, out, _ = generate("--prompt", "x", "--num-return-sequences", "3", "--temperature", "3", "--max-new-tokens", "8")
    assert [line for line in out.splitlines() if line.startswith("===")] == [
        f"=== prompt 1, sample {number} ===" for number in (1, 2, 3)
    ]


def test_beams_are_those_of_transformers(folder: Path, generate: Generate) -> None:
    model, tokenizer = OrthrosForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([ByteTokenizer().encode("ab")])
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    beams = model.generate(ids, max_new_tokens=6, num_beams=4, num_return_sequences=2, do_sample=False, **special)
    texts = tokenizer.batch_decode(beams, skip_special_tokens=True)
    _, out, _ = generate("--prompt", "ab", "--max-new-tokens", "6", "--num-beams", "4", "--num-return-sequences", "2")
    assert out == "".join(f"=== prompt 1, sample {number} ===\n{text}\n" for number, text in enumerate(texts, start=1))
    assert texts[0] != texts[1]


def test_a_stop_string_that_spans_tokens_ends_the_text_before_it(folder: Path, generate: Generate) -> None:
    whole = expected(folder, "To be", 30)[len("To be") :]
    stop = whole[4:7]
    _, out, _ = generate("--prompt", "To be", "--max-new-tokens", "30", "--stop", stop)
    assert out == "To be" + whole[: whole.index(stop)] + "\n"
    assert generate("--prompt", "To be", "--max-new-tokens", "30", "--stop", stop, "--stream")[1] == out


def test_a_special_token_in_a_prompt_is_plain_text(folder: Path, generate: Generate) -> None:
    _, out, _ = generate("--prompt", "a<eos>b", "--max-new-tokens", "5")
    assert out == expected(folder, "a<eos>b", 5) + "\n"


def test_standard_input_is_a_prompt(folder: Path, generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert generate("--max-new-tokens", "5")[1] == expected(folder, "from a pipe", 5) + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert generate("--prompt", "-", "--max-new-tokens", "5")[1] == expected(folder, "from a pipe", 5) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "a prompt is empty"),
        (["--prompt", "-", "--prompt", "-"], "standard input is one prompt"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens: must be at least 1"),
        (["--prompt", "x", "--max-new-tokens", "512"], "fills the model's positions"),
        (["--prompt", "xyz" * 10, "--max-new-tokens", "500"], "a prompt of 30 tokens"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature must be 0"),
        (["--prompt", "x", "--top-k", "0"], "--top-k: must be at least 1"),
        (["--prompt", "x", "--top-p", "1.5"], "--top-p must lie in (0, 1]"),
        (["--prompt", "x", "--num-return-sequences", "2"], "greedy decoding has one continuation"),
        (["--prompt", "x", "--num-beams", "2", "--num-return-sequences", "3"], "cannot return 3 sequences"),
        (["--prompt", "x", "--num-beams", "2", "--stream"], "--stream shows one continuation"),
        (["--prompt", "x", "--stop", ""], "--stop needs a string"),
        (["--prompt", "x", "--device", "cuda"], "no CUDA device"),
        (["--prompt", "x", "--dtype", "fp8"], "invalid choice"),
        (["--prompt", os.fsdecode(b"caf\xe9")], "--prompt: not UTF-8 text (character 4 is a stray byte)"),
        (["--prompt", "x", "--stop", os.fsdecode(b"\xff")], "--stop: not UTF-8 text"),
        (["--prompt", "x", "--seed", "9" * 30], "--seed: must be at most 9223372036854775807"),
        (["--prompt", "x", "--seed", "-1"], "--seed: must be at least 0"),
        (["--prompt", "x", "--seed", "9" * 5000], "is not an integer"),
        (["--prompt", "x", "--max-new-tokens", "9" * 20], "--max-new-tokens: must be at most"),
        (["--prompt", "x", "--num-beams", "2000000000"], "--num-beams: must be at most 1024"),
        (["--prompt", "x", "--num-return-sequences", "2000000000"], "--num-return-sequences: must be at most 1024"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature must be 0"),
        (["--prompt", "x", "--temperature", "inf"], "--temperature must be 0"),
        (["--prompt", "x", "--temperature", "1e-300"], "--temperature must be 0"),
        (["--prompt", "x", "--top-p", "nan"], "--top-p must lie in (0, 1]"),
        (["--prompt", "x", "--device", "abacus"], "device 'abacus' is not known"),
        (["--prompt", "x", "--device", "meta"], "device 'meta' is not known"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = generate(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_folder_without_a_tokenizer_or_with_damaged_weights(folder: Path, generate: Generate, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if "tokenizer" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    code, _, err = generate("--prompt", "x", model=tmp_path)
    assert code == 2
    assert "holds no tokenizer" in err
    ByteTokenizer().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, _, err = generate("--prompt", "x", model=tmp_path)
    assert code == 2
    assert "cannot load the model" in err
    assert err.count("\n") == 1


def test_a_config_with_a_number_that_is_none(folder: Path, generate: Generate, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": NaN'))
    code, _, err = generate("--prompt", "x", model=tmp_path / "model")
    assert (code, err) == (2, f"error: {config} is not valid JSON: NaN is no number\n")


def test_too_little_memory_is_one_line(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(OrthrosForCausalLM, "generate", full)
    code, _, err = generate("--prompt", "x")
    assert code == 2
    assert "too little memory for this; ask for fewer prompts" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda weights: weights.update({"model.more": torch.ones(3)}), "model.more is unknown"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(7)}),
            "model.norm.weight has shape [7] instead of [32]",
        ),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_weights_that_do_not_fit_are_one_line(
    change: Callable[[dict[str, torch.Tensor]], object],
    problem: str,
    folder: Path,
    tmp_path: Path,
    generate: Generate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers' own report of the load, which goes to the stderr of its import, is not logged."""
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [listener])
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()  # as in a process of its own
    shutil.copytree(folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    code, out, err = generate("--prompt", "x", model=tmp_path / "model")
    where = f"the weights in {tmp_path / 'model'} do not fit its config.json"
    assert (code, out, err) == (2, "", f"error: {where}: {problem}\n")
    assert (said, transformers_logging.get_verbosity()) == ([], logging.WARNING)
    transformers_logging.set_verbosity(before)
