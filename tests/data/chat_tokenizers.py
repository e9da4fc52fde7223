"""Small tokenizer folders with chat templates like those of well-known models: a character is a token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from orthros_train.config import TokenizerSection
from orthros_train.config_sft import SFTSection
from orthros_train.data.chat_template import ChatTemplate, EncodedConversation
from orthros_train.data.conversations import Conversation
from orthros_train.data.tokenizers import load_tokenizer

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same with transformers' own marks of what an assistant writes.
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama 2: BOS and EOS around each exchange, no prompt to generate.
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Qwen 2.5's tool calls: tool results in a row share one turn.
TOOLS = (
    "{% for t in tools or [] %}{{ 'tool ' + t['name'] + '\n' }}{% endfor %}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{% if messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}"
    "{{ '[' + m['content'] + ']' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ '(' + c['function']['name'] + (c['function']['arguments'] | tojson) + ')' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen 3: the reasoning before an answer is shown in the last turn only.
REWRITES = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '(thinks)' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(
    folder: Path, template: str | None = CHATML, *, adds_bos: bool = False, trims: bool = False, **names: str
) -> Path:
    """A folder with tokenizer.json and a chat template; `adds_bos`: to any text, as Llama's does."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: id_ for id_, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    if adds_bos:
        bos = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    elif trims:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def chat_template(folder: Path, **section: Any) -> ChatTemplate:
    """The template of a tokenizer folder."""
    tokenizer = load_tokenizer(TokenizerSection(type="huggingface", path=str(folder)))
    return ChatTemplate(tokenizer, SFTSection(**section))


def talk(*turns: str, tools: list[Any] | None = None) -> Conversation:
    """A conversation of "role: content" lines."""
    pairs = [turn.split(": ", 1) for turn in turns]
    return Conversation([{"role": role, "content": content} for role, content in pairs], tools)


def spell(folder: Path, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens spelled out."""
    return load_tokenizer(TokenizerSection(type="huggingface", path=str(folder))).decode(list(ids))


def masked(folder: Path, encoded: EncodedConversation) -> str:
    """The tokens that carry loss, spelled out, and `_` for each run of those that do not."""
    pairs = zip(encoded.ids.tolist(), encoded.trained.tolist(), strict=True)
    runs = groupby(pairs, key=lambda pair: pair[1])
    return "".join(spell(folder, [id_ for id_, _ in run]) if trained else "_" for trained, run in runs)
