"""A row of a data set as a conversation: messages with roles, and the tools that the assistant may call.

Three forms are known by their columns, whose names `data.sft.*.columns` may change:

    messages                       a list of {"role": …, "content": …}, as in the OpenAI and Hugging Face formats
    prompt, response               one question, one answer
    instruction, [input], output   Alpaca's; an input follows the instruction after a blank line

`system` (text before the rest) and `tools` (a list of JSON schemas, or its JSON) may stand beside any of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orthros_train.errors import InputError

ASSISTANT = "assistant"
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """What a chat template gets."""

    messages: list[Message]
    tools: list[Any] | None


def conversation_of(row: Mapping[str, Any], columns: Mapping[str, str], label: str) -> Conversation:
    """The conversation in a row.

    Args:
        row: column -> value.
        columns: our name of a column -> the data's, where they differ.
        label: names the row in messages.

    Raises:
        InputError: no known form, or a value of the wrong type; names the row, the column and the remedy.
    """
    reader = _Row(row, columns, label)
    if reader.has("messages"):
        messages = [_message(message, f"{label}, message {n}") for n, message in enumerate(reader.messages(), start=1)]
    elif reader.has("prompt") and reader.has("response"):
        messages = _exchange(reader.text("prompt"), reader.text("response"))
    elif reader.has("instruction") and reader.has("output"):
        details = reader.text("input") if reader.has("input") else ""
        question = reader.text("instruction") + (f"\n\n{details}" if details.strip() else "")
        messages = _exchange(question, reader.text("output"))
    else:
        raise InputError(
            f"{label}: no column messages, prompt and response, or instruction and output (there are: "
            f"{', '.join(row) or 'none'}); say which is which with columns, e.g. columns: {{prompt: question, "
            "response: answer}"
        )
    if reader.has("system") and reader.text("system").strip():
        messages = [{"role": "system", "content": reader.text("system")}, *messages]
    return Conversation(messages, reader.tools())


class _Row:
    """A row, read under our names."""

    def __init__(self, row: Mapping[str, Any], columns: Mapping[str, str], label: str) -> None:
        self._row, self._columns, self._label = row, columns, label

    def has(self, name: str) -> bool:
        """Whether the column is there and not null."""
        return self._row.get(self._columns.get(name, name)) is not None

    def value(self, name: str) -> Any:
        """The column's value, None where it is missing."""
        return self._row.get(self._columns.get(name, name))

    def text(self, name: str) -> str:
        """The column's value, which must be text."""
        value = self.value(name)
        if not isinstance(value, str):
            raise self._error(name, value, "text")
        return value

    def messages(self) -> Sequence[Any]:
        """The column's value, which must be a list with something in it."""
        value = self.value("messages")
        if not isinstance(value, list) or not value:
            raise self._error("messages", value, "a list of messages")
        return value

    def tools(self) -> list[Any] | None:
        """The tools, given as a list or as its JSON; None where there are none."""
        value = given = self.value("tools")
        if isinstance(given, str):
            value = _json_or_none(given) if given.strip() else []
        if given is not None and not isinstance(value, list):
            raise self._error("tools", given, "a list of tools or the JSON of one")
        return value or None

    def _error(self, name: str, value: Any, wanted: str) -> InputError:
        column = self._columns.get(name, name)
        found = "an empty list" if value == [] else type(value).__name__
        return InputError(f"{self._label}: column '{column}' is {found}, not {wanted}; correct the data")


def _exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]


def _message(value: Any, label: str) -> Message:
    """A message as templates want it: no null fields, tool-call arguments as an object."""
    if not isinstance(value, dict):
        raise InputError(f'{label}: is {type(value).__name__}, not an object with "role" and "content"')
    message = {key: item for key, item in value.items() if item is not None}
    if not isinstance(message.get("role"), str):
        raise InputError(f'{label}: has no "role" (there are: {", ".join(value) or "none"}); correct the data')
    content = message.get("content")
    if content is None and "tool_calls" in message:
        message["content"] = content = ""
    if not isinstance(content, str):
        found = "missing" if content is None else type(content).__name__
        raise InputError(f'{label}: "content" is {found}, not text; correct the data')
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list):
            raise InputError(f'{label}: "tool_calls" is {type(message["tool_calls"]).__name__}, not a list')
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _tool_call(call: Any) -> Any:
    """OpenAI's format has a call's arguments as JSON text; templates write the JSON themselves."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    arguments = _json_or_none(function["arguments"]) if isinstance(function.get("arguments"), str) else None
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
