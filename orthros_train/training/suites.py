"""The seam to the benchmark suites: a run knows when to score its model, the package `evaluation` knows how.

`evaluation` builds on this package, so nothing here imports it; whoever starts a run hands `train` what opens suites.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from orthros_train.config import Config
from orthros_train.config.evaluation import SuitesSection
from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.training.ranks import Ranks


class SuiteScorer(Protocol):
    """Scores a model in training on the suites of a run."""

    def __call__(self, model: OrthrosForCausalLM, folder: Path, give_up: Callable[[], bool]) -> dict[str, float] | None:
        """Score `model` as it is; every rank calls this with all weights, and the documents are shared out.

        Args:
            model: left as it was, mode included.
            folder: keeps the records of finished tasks, which are not scored again.
            give_up: asked between batches; once it is true on a rank, the rest is left undone.

        Returns:
            On rank 0 `SUITE/TASK/METRIC` and `SUITE/mean` to their values, {} on the others; None on all of them if
            they gave up.

        Raises:
            InputError: on one rank or on all.
        """
        ...


class OpenSuites(Protocol):
    """Makes a SuiteScorer, so that whatever is missing is found before training."""

    def __call__(self, section: SuitesSection, save_tokenizer: Callable[[Path], None]) -> SuiteScorer:
        """Find the suites, load their data and the tokenizer.

        Args:
            section: what to score.
            save_tokenizer: writes the run's tokenizer and config.json into a folder, as its checkpoints hold them.

        Raises:
            InputError: an unknown suite, data that cannot be had, or a tokenizer that transformers cannot load.
        """
        ...


def open_on_all(
    config: Config, ranks: Ranks, open_suites: OpenSuites | None, save_tokenizer: Callable[[Path], None]
) -> SuiteScorer | None:
    """The scorer of `config`'s suites, None where it names none; rank 0 first, whose downloads serve the others.

    Raises:
        InputError: as OpenSuites, on all ranks; or nobody gave a way to open suites.
    """
    section = config.evaluation.suites
    if not section.names:
        return None
    if open_suites is None:
        raise InputError(
            "evaluation.suites.names is set, but whoever called `train` gave no way to score suites: pass "
            "open_suites=evaluation.during_training.open_suites, as `python -m orthros_train` does, or remove it"
        )
    opened: list[SuiteScorer] = []

    def open_here() -> None:
        opened.append(open_suites(section, save_tokenizer))

    ranks.on_main(open_here)
    ranks.together(lambda: None if ranks.is_main else open_here())
    return opened[0]
