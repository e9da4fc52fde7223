"""SmolLM2's own tokenizer and chat template, against masks written by hand and ids from transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from orthros_train.conversion.smollm2 import smollm2_folder
from orthros_train.data.conversations import Conversation
from tests.data.chat_tokenizers import chat_template, masked, spell, talk

CACHE = Path(__file__).resolve().parents[2] / ".cache"


@pytest.mark.evidence
def test_real_template() -> None:
    folder = smollm2_folder(CACHE)
    template = chat_template(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    default = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    cases: list[tuple[Conversation, str, str]] = [
        (
            talk("user: What is 2+2?", "assistant: 4", "user: And 3+3?", "assistant: It is 6."),
            f"<|im_start|>{default}<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n4"
            "<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\nIt is 6.<|im_end|>\n",
            "_4<|im_end|>_It is 6.<|im_end|>_",
        ),
        (
            talk("system: Be brief.", "user: Hi", "assistant: \n\nHello  there\n"),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            "\n\nHello  there\n<|im_end|>\n",
            # the prompt's line break and the answer's first are one token, which begins in the prompt
            "_\nHello  there\n<|im_end|>_",
        ),
    ]
    for conversation, text, mask in cases:
        encoded = template.encode(conversation, "row 1")
        assert spell(folder, encoded.ids.tolist()) == text
        assert masked(folder, encoded) == mask
        assert encoded.ids.tolist() == theirs.apply_chat_template(conversation.messages)["input_ids"]
    assert template.end_of_turn_id == theirs.eos_token_id == theirs.convert_tokens_to_ids("<|im_end|>")
    assert template.bos_id == theirs.bos_token_id == encoded.ids[0]
