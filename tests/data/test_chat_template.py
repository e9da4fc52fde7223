"""Which tokens of a conversation carry loss, against masks written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from orthros_train.data.chat_template import ForgedTokenError
from orthros_train.data.conversations import Conversation
from orthros_train.errors import InputError
from tests.data.chat_tokenizers import (
    CHATML,
    CHATML_MARKED,
    LLAMA2,
    REWRITES,
    TOOLS,
    chat_template,
    masked,
    spell,
    talk,
    write_tokenizer,
)

TWO_TURNS = talk("user: Hi", "assistant: Hello!", "user: Bye", "assistant: See you")


def test_two_turns(tmp_path: Path) -> None:
    """Every answer and every end of turn; not the newline behind it, nor the prompts."""
    folder = write_tokenizer(tmp_path)
    encoded = chat_template(folder).encode(TWO_TURNS, "row 1")
    assert spell(folder, encoded.ids) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nSee you<|im_end|>\n"
    )
    assert masked(folder, encoded) == "_Hello!<|im_end|>_See you<|im_end|>_"


def test_labels_written_out(tmp_path: Path) -> None:
    """The ids themselves, once, without any help from a decoder."""
    folder = write_tokenizer(tmp_path)
    encoded = chat_template(folder).encode(talk("user: a", "assistant: b"), "row 1")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # a token's id is its place here
    a, b, e, i, n, r, s, t, u, newline = map(alphabet.index, "abeinrstu\u010a")  # the last is how GPT-2 writes \n
    start, end = 258, 259
    prompt = [start, u, s, e, r, newline, a, end, newline, start, a, s, s, i, s, t, a, n, t, newline]
    assert encoded.ids.tolist() == [*prompt, b, end, newline]
    assert encoded.trained.tolist() == [False] * len(prompt) + [True, True, False]


def test_system_prompt(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    conversation = talk("system: Be brief.", "user: Hi", "assistant: Yo")
    assert masked(folder, chat_template(folder).encode(conversation, "row 1")) == "_Yo<|im_end|>_"


def test_train_on_last(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    assert masked(folder, chat_template(folder, train_on="last").encode(TWO_TURNS, "row 1")) == "_See you<|im_end|>_"


def test_what_follows_the_last_answer_is_left_out(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    encoded = chat_template(folder).encode(talk("user: Hi", "assistant: Yo", "user: and now?"), "row 1")
    assert "now" not in spell(folder, encoded.ids)
    assert masked(folder, encoded) == "_Yo<|im_end|>_"
    assert not chat_template(folder).encode(talk("user: Hi"), "row 1").trained.any()


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_a_greeting_is_no_answer(tmp_path: Path, train_on: str) -> None:
    """A conversation that the assistant opens is kept, its answers are trained; a greeting alone trains nothing."""
    folder = write_tokenizer(tmp_path)
    template = chat_template(folder, train_on=train_on)
    encoded = template.encode(talk("assistant: Welcome!", "user: Hi", "assistant: Yo"), "row 1")
    assert spell(folder, encoded.ids).startswith("<|im_start|>assistant\nWelcome!<|im_end|>\n<|im_start|>user\nHi")
    assert masked(folder, encoded) == "_Yo<|im_end|>_"
    for greeting in (talk("assistant: Welcome!"), talk("assistant: Welcome!", "user: Hi")):
        assert not template.encode(greeting, "row 1").trained.any()
    after_system = template.encode(talk("system: S", "assistant: Welcome!"), "row 1")
    assert masked(folder, after_system) == "_Welcome!<|im_end|>_"


def test_tool_turns(tmp_path: Path) -> None:
    """The call is the assistant's, the two results are not, though the template writes them into one turn."""
    folder = write_tokenizer(tmp_path, TOOLS)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "It is 2."},
    ]
    encoded = chat_template(folder).encode(Conversation(messages, [{"name": "add"}]), "row 1")
    assert spell(folder, encoded.ids).startswith("tool add\n<|im_start|>user\n1+1?<|im_end|>\n")
    assert "<|im_start|>user[2][two]<|im_end|>" in spell(folder, encoded.ids)
    assert masked(folder, encoded) == '_(add{"a": 1})<|im_end|>_It is 2.<|im_end|>_'


def test_agrees_with_a_template_that_marks_what_is_generated(tmp_path: Path) -> None:
    """transformers' own mask of `{% generation %}` is an independent statement of the same."""
    folder = write_tokenizer(tmp_path, CHATML_MARKED)
    template = chat_template(folder)
    for conversation in (
        TWO_TURNS,
        talk("system: S", "user: \n\n", "assistant: \n x \n", "user: é", "assistant: 日本"),
    ):
        theirs = template._tokenizer.apply_chat_template(
            conversation.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        encoded = template.encode(conversation, "row 1")
        assert encoded.ids.tolist() == theirs["input_ids"]
        assert encoded.trained.tolist() == [bool(mark) for mark in theirs["assistant_masks"]]


def test_white_space_at_the_borders_of_an_answer(tmp_path: Path) -> None:
    """Tokenizers like GPT-2's report offsets without white space; the prompt's own line break stays untrained."""
    folder = write_tokenizer(tmp_path, trims=True)
    encoded = chat_template(folder).encode(talk("user: Hi", "assistant: \n Yo \n"), "row 1")
    assert masked(folder, encoded) == "_\n Yo \n<|im_end|>_"


class TestOneBOS:
    def test_written_by_the_template(self, tmp_path: Path) -> None:
        """Llama 2: one BOS begins the sequence, and each exchange's own is kept; EOS ends an answer."""
        folder = write_tokenizer(tmp_path, LLAMA2, adds_bos=True, bos_token="<s>", eos_token="</s>")
        encoded = chat_template(folder).encode(TWO_TURNS, "row 1")
        text = "<s>[INST] Hi [/INST] Hello! </s><s>[INST] Bye [/INST] See you </s>"
        assert spell(folder, encoded.ids) == text
        assert masked(folder, encoded) == "_ Hello! </s>_ See you </s>"

    def test_added_where_the_tokenizer_adds_one_to_any_text(self, tmp_path: Path) -> None:
        folder = write_tokenizer(tmp_path, CHATML, adds_bos=True, bos_token="<s>")
        encoded = chat_template(folder).encode(talk("user: Hi", "assistant: Yo"), "row 1")
        assert spell(folder, encoded.ids).startswith("<s><|im_start|>user")
        assert spell(folder, encoded.ids).count("<s>") == 1
        assert masked(folder, encoded) == "_Yo<|im_end|>_"

    def test_none_where_neither_does(self, tmp_path: Path) -> None:
        folder = write_tokenizer(tmp_path, CHATML, bos_token="<s>")
        encoded = chat_template(folder).encode(talk("user: Hi", "assistant: Yo"), "row 1")
        assert "<s>" not in spell(folder, encoded.ids)

    def test_two_are_refused(self, tmp_path: Path) -> None:
        folder = write_tokenizer(tmp_path, "{{ bos_token + bos_token }}" + CHATML, bos_token="<s>")
        with pytest.raises(InputError, match="begins with two BOS tokens"):
            chat_template(folder)


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", None)
    file = tmp_path / "qwen3.jinja"
    file.write_text(REWRITES)
    template = chat_template(folder, chat_template=str(file))
    assert masked(folder, template.encode(talk("user: a", "assistant: b"), "row 1")) == "_(thinks)b<|im_end|>_"
    with pytest.raises(InputError, match=r"^row 7: .*qwen3.jinja renders .* message 4 .* data.sft.train_on: last, or"):
        template.encode(TWO_TURNS, "row 7")
    last = chat_template(folder, chat_template=str(file), train_on="last")
    assert masked(folder, last.encode(TWO_TURNS, "row 7")) == "_(thinks)See you<|im_end|>_"


def test_a_message_that_spells_out_a_special_token(tmp_path: Path) -> None:
    """It would be taken for the end of a turn. An answer could smuggle in a user's words so."""
    folder = write_tokenizer(tmp_path)
    template = chat_template(folder)
    for conversation in (
        talk("user: Hi", "assistant: Yo<|im_end|>"),
        talk("user: <s>", "assistant: Yo"),
        talk("user: Hi", "assistant: Yo", tools=[{"name": "<|im_start|>"}]),
    ):
        with pytest.raises(ForgedTokenError):
            template.encode(conversation, "row 1")
    template.encode(talk("user: <|im_", "assistant: start|>"), "row 1")


def test_text_that_is_no_unicode(tmp_path: Path) -> None:
    template = chat_template(write_tokenizer(tmp_path))
    with pytest.raises(InputError, match="row 1: half of a surrogate pair"):
        template.encode(talk("user: \ud800", "assistant: Yo"), "row 1")


def test_the_clock_stands_still(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "{{ strftime_now('%d %b %Y') }}" + CHATML)
    encoded = chat_template(folder).encode(talk("user: Hi", "assistant: Yo"), "row 1")
    assert spell(folder, encoded.ids).startswith("26 Jul 2024<|im_start|>")


def test_variables_reach_the_template(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "{{ 'think' if enable_thinking else 'no' }}" + CHATML)
    plain, thinking = chat_template(folder), chat_template(folder, template_variables={"enable_thinking": True})
    assert spell(folder, plain.encode(TWO_TURNS, "").ids).startswith("no<")
    assert spell(folder, thinking.encode(TWO_TURNS, "").ids).startswith("think<")
    assert plain.fingerprint != thinking.fingerprint


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the tokenizer has no chat template of its own; name a Jinja file with data.sft.chat_template"),
        ("{% for %}", "cannot render it"),
        ("{{ raise_exception('only system') }}", r"cannot render it \(only system\)"),
        ("{% if not add_generation_prompt %}{{ 'x' }}{% else %}{{ 'y' }}{% endif %}", "neither begins the other"),
        ("always the same", "writes no answer of an assistant"),
    ],
)
def test_templates_that_cannot_be_used(tmp_path: Path, template: str | None, message: str) -> None:
    folder = write_tokenizer(tmp_path, template)
    with pytest.raises(InputError, match=message):
        chat_template(folder)


def test_a_template_file_that_is_missing(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    with pytest.raises(InputError, match=r"data.sft.chat_template .*nowhere.jinja cannot be read"):
        chat_template(folder, chat_template=str(tmp_path / "nowhere.jinja"))


def test_end_of_turn(tmp_path: Path) -> None:
    assert chat_template(write_tokenizer(tmp_path)).end_of_turn_id == 259


def test_the_recipe_s_template(tmp_path: Path) -> None:
    """configs/chat_template.jinja needs nothing of the tokenizer but an EOS."""
    folder = write_tokenizer(tmp_path, None, eos_token="</s>")
    file = Path(__file__).resolve().parents[2] / "configs" / "chat_template.jinja"
    template = chat_template(folder, chat_template=str(file))
    encoded = template.encode(
        talk("system: S", "user: Hi", "assistant: Yo", "user: Bye", "assistant: See you"), "row 1"
    )
    assert spell(folder, encoded.ids) == "System: S\nUser: Hi\nAssistant: Yo</s>\nUser: Bye\nAssistant: See you</s>\n"
    assert masked(folder, encoded) == "_ Yo</s>_ See you</s>_"
    assert spell(folder, [template.end_of_turn_id]) == "</s>"
