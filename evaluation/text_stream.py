"""Stop strings in generated text: cut it before the first one, also while it is still being made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import TextStreamer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """`text` up to the earliest stop string (which is left out), and whether there was one."""
    found = [position for position in (text.find(stop) for stop in stops) if position >= 0]
    return (text[: min(found)], True) if found else (text, False)


class StopTextStreamer(TextStreamer):
    """Prints a continuation as it grows, and holds back any tail that may turn out to begin a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print what is certain of the new piece `text`."""
        if self._stopped:
            return
        text, self._stopped = cut_at_stop(self._held + text, self._stops)
        held = 0 if stream_end or self._stopped else self._possible_start(text)
        print(text[: len(text) - held], end="", flush=True)
        self._held = text[len(text) - held :]

    def _possible_start(self, text: str) -> int:
        """Length of the longest tail of `text` that is the beginning of a stop string."""
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(lengths, default=0)
