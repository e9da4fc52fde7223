"""Rows of the known forms, and one line for every other."""

from __future__ import annotations

from typing import Any

import pytest

from orthros_train.data.conversations import conversation_of
from orthros_train.errors import InputError

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]


@pytest.mark.parametrize(
    ("row", "columns", "messages"),
    [
        ({"messages": HELLO, "id": 3}, {}, HELLO),
        ({"chat": HELLO}, {"messages": "chat"}, HELLO),
        ({"prompt": "Hi", "response": "Yo"}, {}, HELLO),
        ({"question": "Hi", "answer": "Yo"}, {"prompt": "question", "response": "answer"}, HELLO),
        ({"instruction": "Hi", "output": "Yo"}, {}, HELLO),
        ({"instruction": "Hi", "input": " ", "output": "Yo"}, {}, HELLO),
        (
            {"instruction": "Add", "input": "1, 2", "output": "3"},
            {},
            [{"role": "user", "content": "Add\n\n1, 2"}, {"role": "assistant", "content": "3"}],
        ),
        ({"prompt": "Hi", "response": "Yo", "system": "S"}, {}, [{"role": "system", "content": "S"}, *HELLO]),
        ({"messages": None, "prompt": "Hi", "response": "Yo", "system": None}, {}, HELLO),
        ({"messages": [{**HELLO[0], "name": None}, HELLO[1]]}, {}, HELLO),
    ],
)
def test_forms(row: dict[str, Any], columns: dict[str, str], messages: list[dict[str, str]]) -> None:
    conversation = conversation_of(row, columns, "row 1")
    assert (conversation.messages, conversation.tools) == (messages, None)


def test_tools_and_calls() -> None:
    """Both may come as JSON text; templates get objects."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows = [HELLO[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    conversation = conversation_of({"messages": rows, "tools": '[{"name": "add"}]'}, {}, "row 1")
    assert conversation.tools == [{"name": "add"}]
    assert conversation.messages[1]["content"] == ""
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    for empty in ("", " ", [], None, "[]"):
        assert conversation_of({"messages": HELLO, "tools": empty}, {}, "row 1").tools is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "Hi"}, r"row 1: no column messages, .* \(there are: text\); say which is which with columns"),
        ({"prompt": "Hi"}, "no column messages"),
        ({"messages": []}, "column 'messages' is an empty list, not a list of messages"),
        ({"messages": "Hi"}, "column 'messages' is str, not a list of messages"),
        ({"messages": ["Hi"]}, "row 1, message 1: is str, not an object"),
        ({"messages": [{"from": "human", "value": "Hi"}]}, r'message 1: has no "role" \(there are: from, value\)'),
        ({"messages": [HELLO[0], {"role": "assistant"}]}, 'row 1, message 2: "content" is missing, not text'),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, '"content" is list, not text'),
        ({"messages": [{**HELLO[0], "tool_calls": "add"}]}, '"tool_calls" is str, not a list'),
        ({"prompt": "Hi", "response": 3}, "column 'response' is int, not text"),
        ({"prompt": ["Hi"], "response": "Yo"}, "column 'prompt' is list, not text"),
        ({"messages": HELLO, "tools": "[{"}, "column 'tools' is str, not a list of tools or the JSON of one"),
        ({"messages": HELLO, "tools": {"name": "add"}}, "column 'tools' is dict"),
    ],
)
def test_other_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        conversation_of(row, {}, "row 1")
