"""Conversations as token ids, and which of those an assistant wrote.

* A conversation is rendered by the tokenizer's chat template, as text, and encoded once, whole: the ids are those that
  inference gets from `apply_chat_template`.
* An answer is what the template adds between the prompt to generate (`add_generation_prompt`) and the end of the
  assistant's message: what a model would have to write there, its end of turn included. It is found by rendering
  growing prefixes of the conversation and checking that each begins the next. A template for which that fails (some
  rewrite earlier turns) is refused by name: a mask guessed there would be wrong without anyone noticing.
* A greeting, an assistant's message with nothing before it, is no answer and stays untrained: there is no prompt to
  render without a message.
* White space that the template puts behind an end-of-turn token is nobody's answer. A token belongs to an answer if it
  starts inside it: one that begins in the prompt is never generated.
* The sequence begins with exactly one BOS where the template writes one or the tokenizer adds one to any text.
* Templates that read the clock see `CLOCK`: ids do not depend on the day.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as hf
from numpy.typing import NDArray

from orthros_train.config.sft import SFTSection
from orthros_train.data.conversations import ASSISTANT, Conversation
from orthros_train.data.tokenizers import Tokenizer
from orthros_train.errors import InputError

# The date that Llama 3's templates fall back on, as the function that templates call to read the clock.
CLOCK = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(
        f" | replace('{code}', '{datetime(2024, 7, 26):{code}}')"
        for code in ("%Y", "%y", "%m", "%d", "%B", "%b", "%A", "%a")
    )
    + " }}{%- endmacro -%}"
)
PROBE = Conversation([{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}], None)


@dataclass(frozen=True)
class EncodedConversation:
    """Token ids (n,) int64 and, for each, whether it is an assistant's that carries loss (n,) bool."""

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]


class ForgedTokenError(Exception):
    """A message spells out one of the tokenizer's special tokens, which would be taken for the template's own."""


class ChatTemplate:
    """A tokenizer with its chat template.

    Args:
        tokenizer: the run's.
        section: chat_template, template_variables and train_on are read.

    Attributes:
        name: of the template, for messages.
        fingerprint: SHA-256 of all that decides which ids and mask a conversation gets.
        bos_id: the id that begins every sequence, or None.
        end_of_turn_id: the last id of an answer to a probe.

    Raises:
        InputError: there is no template, or it cannot be read.
    """

    def __init__(self, tokenizer: Tokenizer, section: SFTSection) -> None:
        self._tokenizer = _hugging_face_tokenizer(tokenizer)
        self._variables = section.template_variables
        self._last_only = section.train_on == "last"
        self.name = section.chat_template or "the tokenizer's chat template"
        self._template = _template_text(self._tokenizer, section.chat_template)
        self._backend: hf.Tokenizer = self._tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._added_ids = np.array(sorted(added), dtype=np.int64)
        special = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self.bos_id, self._adds_bos = self._find_bos()
        self._backend.post_processor = None  # it adds BOS, and trims the white space off offsets
        identity = [tokenizer.fingerprint, self._template, self._tokenizer.special_tokens_map, self._adds_bos]
        identity += [section.template_variables, self._last_only]
        self.fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        probed = self.encode(PROBE, "a conversation of one question and one answer")
        if not probed.trained.any():
            raise InputError(f"{self.name} writes no answer of an assistant; name another with data.sft.chat_template")
        self.end_of_turn_id = int(probed.ids[probed.trained][-1])

    def encode(self, conversation: Conversation, label: str) -> EncodedConversation:
        """Ids and mask of a conversation up to the end of its last answer, what follows predicting nothing.

        Args:
            conversation: its messages and tools.
            label: names it in messages.

        Raises:
            ForgedTokenError: a message spells out a special token.
            InputError: the template refuses the conversation or rewrites what it has rendered before.
        """
        forged = next(filter(None, map(self._special_text.search, _strings(conversation))), None)
        if forged:
            raise ForgedTokenError(forged.group())
        text, answers = self._answers(conversation, label)
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError(f"{label}: half of a surrogate pair, no Unicode text; correct the conversation") from error
        ids = np.array(encoding.ids, dtype=np.int64)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        trained = np.zeros(len(ids), dtype=np.bool_)
        for start, stop in answers:
            first, last = np.searchsorted(starts, (start, stop))
            trained[first : self._end_of_turn(ids, starts, first, last, text[start:stop], start)] = True
        if self.bos_id is not None:
            begun = int((ids[:2] == self.bos_id).cumprod().sum())  # BOS tokens at the beginning
            if begun == 2:
                raise InputError(f"{label}: {self.name} begins with two BOS tokens; correct it: data.sft.chat_template")
            if begun == 0 and self._adds_bos:
                ids, trained = np.insert(ids, 0, self.bos_id), np.insert(trained, 0, False)
        return EncodedConversation(ids, trained)

    def save(self, folder: Path) -> None:
        """Write the template where a Hugging Face tokenizer folder has it."""
        (folder / "chat_template.jinja").write_text(self._template, encoding="utf-8")

    def _answers(self, conversation: Conversation, label: str) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text, and where in it the answers stand that carry loss."""
        messages = conversation.messages
        turns = [index for index, message in enumerate(messages) if index > 0 and message["role"] == ASSISTANT]
        answers: list[tuple[int, int]] = []
        text = ""
        for turn in turns[-1:] if self._last_only else turns:
            prompt = self._render(conversation, turn, label, generate=True)
            self._check_prefix(text, prompt, turn, label)
            text = self._render(conversation, turn + 1, label, generate=False)
            self._check_prefix(prompt, text, turn, label)
            answers.append((len(prompt), len(text)))
        return text, answers

    def _render(self, conversation: Conversation, count: int, label: str, generate: bool) -> str:
        """The first `count` messages, and the prompt for an answer if `generate`."""
        try:
            return self._tokenizer.apply_chat_template(
                conversation.messages[:count],
                tools=conversation.tools,
                chat_template=CLOCK + self._template,
                add_generation_prompt=generate,
                tokenize=False,
                **self._variables,
            )
        except Exception as error:  # a template is a program of the user's: it may raise anything
            reason = " ".join(str(error).split())
            raise InputError(
                f"{label}: {self.name} cannot render it ({reason}); correct the conversation, or name another template "
                "with data.sft.chat_template"
            ) from error

    def _check_prefix(self, before: str, after: str, turn: int, label: str) -> None:
        if not after.startswith(before):
            remedy = "" if self._last_only else "set data.sft.train_on: last, or "
            raise InputError(
                f"{label}: {self.name} renders the messages before and after message {turn + 1} differently (neither "
                f"begins the other), so answers cannot be told from it; {remedy}name another template with "
                "data.sft.chat_template"
            )

    def _end_of_turn(
        self, ids: NDArray[np.int64], starts: NDArray[np.int64], first: int, last: int, answer: str, offset: int
    ) -> int:
        """Where the tokens first..last of an answer end without the white space behind its end-of-turn token."""
        marks = np.flatnonzero(np.isin(ids[first:last], self._added_ids))
        if len(marks) == 0:
            return last
        end = first + int(marks[-1]) + 1
        return last if end < last and answer[starts[end] - offset :].strip() else end

    def _find_bos(self) -> tuple[int | None, bool]:
        """The BOS that a sequence begins with, and whether the tokenizer (not the template) is what adds it."""
        bos: int | None = self._tokenizer.bos_token_id
        if bos is None:
            return None, False
        return bos, bos in self._backend.encode("", add_special_tokens=True).ids[:1]


def _hugging_face_tokenizer(tokenizer: Tokenizer) -> Any:
    """The tokenizer as an export carries it."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 (takes a second)

    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return PreTrainedTokenizerFast.from_pretrained(folder)


def _template_text(tokenizer: Any, path: str | None) -> str:
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"data.sft.chat_template {path} cannot be read ({error}); name a Jinja file") from error
    else:
        try:
            text = tokenizer.get_chat_template()
        except ValueError as error:
            raise InputError(
                "the tokenizer has no chat template of its own; name a Jinja file with data.sft.chat_template"
            ) from error
    return text


def _strings(value: Any) -> list[str]:
    """Every string in a conversation's messages and tools, names of fields aside."""
    if isinstance(value, Conversation):
        return _strings(value.messages) + _strings(value.tools)
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []
