"""Suites by name, and the tasks that they are made of."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.suites import harness_tasks as h
from evaluation.suites.needles import needle_cards
from evaluation.suites.perplexity import WIKITEXT, text_cards
from evaluation.suites.recall import LENGTHS, recall_cards
from evaluation.suites.task_card import TaskCard
from orthros_train.errors import InputError

DEFAULT_LONG_LENGTHS = (1024, 2048, 4096)


@dataclass(frozen=True)
class Suite:
    """Tasks that are reported together.

    Attributes:
        name: as the user writes it.
        title: in reports.
        cards: the tasks.
        has_mean: whether a mean of their headline metrics means something.
        note: stated in reports.
        paper: key of the paper's row, if any.
    """

    name: str
    title: str
    cards: tuple[TaskCard, ...]
    has_mean: bool = True
    note: str = ""
    paper: str | None = None


@dataclass(frozen=True)
class SuiteOptions:
    """What the user may say about suites.

    Attributes:
        lengths: of the long suite, prompt and answer in tokens.
        texts: files for the perplexity suite; given any, WikiText is left out.
    """

    lengths: Sequence[int] = DEFAULT_LONG_LENGTHS
    texts: Sequence[Path] = ()


ASSUMED = "The paper's task list is not known to us: task list assumed."


def _commonsense(_: SuiteOptions) -> list[Suite]:
    cards = (h.LAMBADA, h.PIQA, h.HELLASWAG, h.WINOGRANDE, h.ARC_EASY, h.ARC_CHALLENGE, h.SIQA, h.BOOLQ)
    return [Suite("commonsense", "Commonsense, zero-shot", cards, note=ASSUMED, paper="commonsense")]


def _conversion(_: SuiteOptions) -> list[Suite]:
    short = (h.ARC_CHALLENGE, h.ARC_EASY, h.HELLASWAG, h.PIQA, h.WINOGRANDE, h.OPENBOOKQA)
    return [Suite("conversion", "Conversion", (*short, *h.MMLU, h.GSM8K), note=ASSUMED, paper="conversion")]


def _recall(_: SuiteOptions) -> list[Suite]:
    return [_recall_at(length) for length in LENGTHS]


def _recall_at(length: int) -> Suite:
    note = f"{ASSUMED} At which length the paper measured is not known either."
    return Suite(f"recall-{length}", f"Recall, {length} tokens", recall_cards(length), note=note, paper="recall")


def _perplexity(options: SuiteOptions) -> list[Suite]:
    cards = text_cards(options.texts) or (WIKITEXT,)
    return [Suite("perplexity", "Perplexity", cards, has_mean=False)]


def _long(options: SuiteOptions) -> list[Suite]:
    note = "Generated texts in the style of RULER; the scores are not RULER's."
    return [
        Suite(f"long-{length}", f"Long contexts, {length} tokens", needle_cards([length]), note=note)
        for length in options.lengths
    ]


HARNESS_SUITES: dict[str, Callable[[SuiteOptions], list[Suite]]] = {
    "commonsense": _commonsense,
    "conversion": _conversion,
    "recall": _recall,
    **{f"recall-{length}": lambda _, length=length: [_recall_at(length)] for length in LENGTHS},  # type: ignore[misc]
    "perplexity": _perplexity,
    "long": _long,
}
SUITE_NAMES = (*HARNESS_SUITES, "synthetic")


def find_suites(names: Iterable[str], options: SuiteOptions) -> list[Suite]:
    """The suites of these names; one name may stand for several. Raises InputError, with the nearest names."""
    suites: dict[str, Suite] = {}
    for name in names:
        if name not in HARNESS_SUITES:
            raise InputError(f"there is no suite {name!r}; {nearest(name, SUITE_NAMES)}")
        suites |= {suite.name: suite for suite in HARNESS_SUITES[name](options)}
    return list(suites.values())


def find_tasks(names: Iterable[str], options: SuiteOptions) -> list[TaskCard]:
    """The tasks of these names, each once, from any suite. Raises InputError, with the nearest names."""
    cards = {card.name: card for make in HARNESS_SUITES.values() for suite in make(options) for card in suite.cards}
    cards[WIKITEXT.name] = WIKITEXT  # its suite leaves it out where texts are given
    chosen = []
    for name in dict.fromkeys(names):
        if name not in cards:
            raise InputError(f"there is no task {name!r}; {nearest(name, list(cards))}")
        chosen.append(cards[name])
    return chosen


def nearest(name: str, known: Sequence[str]) -> str:
    """What to suggest instead of a name that is not known."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known[:20])}"
