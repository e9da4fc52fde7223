"""A converted folder among strangers: a process that has torch and transformers, and nothing of this repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from orthros_train.conversion.from_llama import OrthrosForm, to_orthros
from tests.conversion.sources import save_source, save_tokenizer

FOREIGN_PROCESS = '''
import importlib.util, json, sys

ABSENT = ("orthros_train", "evaluation", "deepspeed", "accelerate", "megatron", "pydantic", "omegaconf")

class Absent:
    """Makes a module look as if it were not installed."""
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

found = importlib.util.find_spec  # which libraries ask before they import
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] in ABSENT else found(name, *more)
sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

torch.set_num_threads(1)
folder, again = sys.argv[1:]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
seen = []
projection = model.model.layers[0].self_attn.k_proj
projection.register_forward_hook(lambda module, args, output: seen.append(output.shape[:2].numel()))

def continued(prompts, **options):
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    ids = model.generate(**batch, max_new_tokens=8, do_sample=False, eos_token_id=None, **options)
    return [row[batch.input_ids.shape[1]:].tolist() for row in ids]

prompts = ["a", "hello", "fox & hen"]
result = {"model_type": config.model_type, "window": [config.base_window, config.base_sinks]}
for name, options in (("greedy", {}), ("beams", {"num_beams": 3})):
    result[name] = {"batch": continued(prompts, **options), "single": [continued([p], **options)[0] for p in prompts]}
seen.clear()
continued(["hello", "words"], num_beams=3)
result["base_tokens"] = sum(seen)
card = open(f"{folder}/README.md", encoding="utf-8").read()
by_hand = {"model": model, "prompt": tokenizer(["hello"], return_tensors="pt")}
exec(card.split("```python")[2].split("```")[0], by_hand)  # prefill and a decoding step
cache = by_hand["cache"]
result["prefill"] = [int(by_hand["logits"].argmax()), cache.lengths.tolist(), cache.layers[0].keys.shape[2]]
torch.manual_seed(0)
sampled = model.generate(**tokenizer(["hello"], return_tensors="pt"), max_new_tokens=8, do_sample=True, top_k=5)
result["sampled"] = sampled[0].tolist()
generate = pipeline("text-generation", model=folder, trust_remote_code=True)
options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
result["pipeline"] = generate("hello", return_full_text=False, **options)[0]["generated_text"]
result["chat"] = generate([{"role": "user", "content": "hi"}], **options)[0]["generated_text"][-1]["role"]
model.save_pretrained(again)
tokenizer.save_pretrained(again)
print(json.dumps(result))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    source = save_source(root / "source", vocab_size=259, max_shard_size="40kB")
    save_tokenizer(source)
    to_orthros(source, root / "orthros", OrthrosForm(base_window=4), max_shard_size="40kB")
    return root / "orthros"


@pytest.fixture(scope="module")
def foreign(folder: Path) -> dict[str, Any]:
    """What the other process found out."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(folder.parent / "modules")
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN_PROCESS, str(folder), str(folder.parent / "again")],
        cwd=folder.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def greedy(folder: Path, prompt: str, count: int) -> list[int]:
    """Token by token, without a cache, in this process."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return ids[0, -count:].tolist()


def test_it_is_the_same_model_there(foreign: dict[str, Any], folder: Path) -> None:
    assert foreign["model_type"] == "orthros"
    assert foreign["window"] == [4, 1]
    expected = greedy(folder, "hello", 8)
    assert foreign["greedy"]["single"][1] == expected
    assert foreign["prefill"] == [expected[1], [5 + 1], 128]  # room for 105 in multiples of 64


@pytest.mark.parametrize("search", ["greedy", "beams"])
def test_left_padded_prompts_equal_single_runs(search: str, foreign: dict[str, Any]) -> None:
    assert foreign[search]["batch"] == foreign[search]["single"]
    assert foreign["greedy"]["batch"] != foreign["beams"]["batch"]


def test_a_row_costs_its_prompt_and_what_is_generated(foreign: dict[str, Any]) -> None:
    assert foreign["base_tokens"] == 2 * 3 * (5 + 8 - 1)  # the last generated token is never read


def test_sampling_and_the_pipeline(foreign: dict[str, Any], folder: Path) -> None:
    assert len(foreign["sampled"]) <= 5 + 8
    assert foreign["pipeline"] == AutoTokenizer.from_pretrained(folder).decode(greedy(folder, "hello", 8))
    assert foreign["chat"] == "assistant"


def test_it_can_be_saved_and_handed_on(foreign: dict[str, Any], folder: Path) -> None:
    """What push_to_hub uploads is this: complete, and with the same code."""
    again = folder.parent / "again"
    code = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    assert code == {path.name: path.read_bytes() for path in again.glob("*.py")}
    before, after = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (folder, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
