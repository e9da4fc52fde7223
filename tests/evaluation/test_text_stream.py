"""Stop strings in finished and in growing text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from evaluation.text_stream import StopTextStreamer, cut_at_stop
from orthros_train.data.tokenizers import ByteTokenizer

Stream = Callable[[str, list[str]], list[str]]


def test_the_earliest_stop_string_wins() -> None:
    assert cut_at_stop("one two three", ["three", "two"]) == ("one ", True)
    assert cut_at_stop("one two three", ["four"]) == ("one two three", False)
    assert cut_at_stop("one two three", []) == ("one two three", False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    ByteTokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def stream(tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]) -> Stream:
    """What a user has seen after each byte of a text, and at its end."""

    def run(text: str, stops: list[str]) -> list[str]:
        streamer = StopTextStreamer(tokenizer, stops)
        streamer.put(torch.tensor([[0, 1, 2]]))  # the prompt
        seen, shown = [], ""
        for token in ByteTokenizer().encode(text):
            streamer.put(torch.tensor([token]))
            shown += capsys.readouterr().out
            seen.append(shown)
        streamer.end()
        return [*seen, shown + capsys.readouterr().out]

    return run


def test_text_before_a_stop_string_is_shown_and_nothing_after_it(stream: Stream) -> None:
    seen = stream("good day END more\n", [" END"])
    assert seen[-1] == "good day"
    assert not any("E" in text for text in seen)


def test_a_beginning_of_a_stop_string_is_held_back_and_shown_if_it_was_none(stream: Stream) -> None:
    seen = stream("a b\nc d\n\ne", ["\n\n"])
    assert seen[-1] == "a b\nc d"
    assert not any(text.endswith("\n") for text in seen)


def test_characters_of_several_bytes_are_shown_whole(stream: Stream) -> None:
    seen = stream("é ü – ok ", [])
    assert seen[-1] == "é ü – ok "
    assert not any("\ufffd" in text for text in seen)
