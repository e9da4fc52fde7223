"""A saved folder: names, bitwise round trip, and life in a process that has only torch and transformers."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.dynamic_module_utils import get_imports

from orthros_train.model import OrthrosForCausalLM
from tests.model.tiny import SHAPE, tiny_config, tiny_model, token_ids


def public_keys(config):
    return {key: value for key, value in config.to_dict().items() if not key.startswith("_")}


@pytest.mark.parametrize(
    "options",
    [{}, {"architecture": "transformer"}, {"tie_word_embeddings": True}, {"qk_norm": True, "attention_bias": True}],
    ids=str,
)
def test_save_and_load_are_bitwise(tmp_path, options):
    model = tiny_model(torch.float32, **options)
    model.save_pretrained(tmp_path)
    for cls in (OrthrosForCausalLM, AutoModelForCausalLM):
        loaded = cls.from_pretrained(tmp_path).eval()
        assert type(loaded).__name__ == "OrthrosForCausalLM"
        assert public_keys(loaded.config) == public_keys(model.config)
        for (name, one), (other_name, two) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
            assert name == other_name
            assert torch.equal(one, two)


@torch.no_grad()
def test_a_folder_of_a_model_with_a_gpu_kernel_runs_on_a_cpu(tmp_path):
    """The kernel belongs to the machine; the configuration in memory keeps it."""
    model = tiny_model(torch.float32, attention_kernel="flash")
    model.save_pretrained(tmp_path / "model")
    model.config.to_json_file(tmp_path / "config.json", use_diff=False)
    assert model.config.attention_kernel == model.config.to_dict()["attention_kernel"] == "flash"
    assert '"attention_kernel": "flash"' in repr(model.config)
    with pytest.raises(ValueError, match="CUDA"):
        model(token_ids(1, 4))
    for file in (tmp_path / "model" / "config.json", tmp_path / "config.json"):
        assert json.loads(file.read_text())["attention_kernel"] == "auto"
    loaded = OrthrosForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded(token_ids(1, 4)).logits.isfinite().all()


def test_the_hub_finds_every_package_that_the_code_imports(tmp_path):
    """For a name on the hub transformers wants all imports of all files installed, those inside functions, too."""
    tiny_model(torch.float32).save_pretrained(tmp_path)
    files = sorted(tmp_path.glob("*.py"))
    assert len(files) > 5
    for file in files:
        assert {name.partition(".")[0] for name in get_imports(file)} - set(sys.stdlib_module_names) <= {
            "torch",
            "transformers",
            "huggingface_hub",  # transformers' own
        }


def test_names_and_keys_are_the_interchange_format(tmp_path):
    tiny_model(torch.float32, qk_norm=True, attention_bias=True).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    attention = "model.layers.1.self_attn."
    assert shapes.keys() >= {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp.gate_proj.weight",
        *(f"{attention}{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")),
        f"{attention}q_norm.weight", f"{attention}k_norm.weight",
    }  # fmt: skip
    for stream in ("base", "output"):
        for vector in ("gain", "shift"):
            assert shapes[f"{attention}{stream}_query.{vector}"] == (32,)
    assert not any(name.startswith("model.layers.2.self_attn.base_query") for name in shapes)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "orthros"
    assert {"architecture", "base_window", "base_sinks", "query_affine", "rope_parameters"} <= config.keys()
    assert not {"sliding_window", "layer_types", "attention_chunk_size"} & config.keys()


def test_a_llama_checkpoint_loads_with_identity_affines(tmp_path):
    """Llama's names are ours, so its weights load as they are; only the affines start fresh."""
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE, rms_norm_eps=1e-5)).eval()
    llama.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(base_window=64).to_dict()))
    model = OrthrosForCausalLM.from_pretrained(tmp_path).eval()
    ids = token_ids(1, 30)
    with torch.no_grad():
        assert (model(ids).logits - llama(ids).logits).abs().max() <= 1e-5


FOREIGN_PROCESS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
assert not any(name.startswith("orthros_train") for name in sys.modules)
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids = torch.arange(7)[None]
print("total", model(ids, use_cache=False).logits.double().sum().item())
print("tokens", model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist())
model.save_pretrained(sys.argv[2])
assert not any(name.startswith("orthros_train") for name in sys.modules)
"""


def test_the_folder_runs_where_only_transformers_is_installed(tmp_path):
    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path / "one")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", FOREIGN_PROCESS, str(tmp_path / "one"), str(tmp_path / "two")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    lines = [line.partition(" ") for line in printed.stdout.splitlines()]  # libraries print, too
    total, generated = (next(rest for first, _, rest in lines if first == name) for name in ("total", "tokens"))
    ids = torch.arange(7)[None]
    with torch.no_grad():
        assert abs(float(total) - float(model(ids, use_cache=False).logits.double().sum())) <= 1e-4
    assert generated == str(model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist())
    files_one, files_two = (sorted(path.name for path in (tmp_path / n).glob("*.py")) for n in ("one", "two"))
    assert files_one == files_two
