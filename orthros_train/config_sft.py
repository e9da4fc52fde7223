"""The section `data.sft`: which conversations a fine-tuning run reads, and what of them carries loss."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from .config_section import Section

COLUMNS = ("messages", "prompt", "response", "instruction", "input", "output", "system", "tools")


class SFTSource(Section):
    """Conversations: files on disk, or one split of a data set of the `datasets` library."""

    path: str | None = None  # a .jsonl, .json, .parquet or .arrow file, or a folder of them
    dataset: str | None = None  # a name on the hub or a local data set's folder, instead of a path
    configuration: str | None = None  # of the data set
    split: str = "train"  # of the data set
    columns: dict[str, str] = Field(default={})  # our name of a column -> its name in the data, where they differ
    weight: float = Field(default=1.0, gt=0)  # share of the rows, beside the other sources of data.sft and data.train

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: dict[str, str]) -> dict[str, str]:
        for name in columns:
            if name not in COLUMNS:
                raise ValueError(f"columns of a data.sft source names '{name}'; it maps any of {', '.join(COLUMNS)}")
        return columns

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("a data.sft source needs either path (files) or dataset (a name): set one of them")
        if self.dataset is None and (self.configuration is not None or self.split != "train"):
            raise ValueError("configuration and split of a data.sft source belong to dataset: remove them from a path")
        return self

    @property
    def label(self) -> str:
        """The source in messages."""
        if self.path is not None:
            return self.path
        return f"{self.dataset}{f'/{self.configuration}' if self.configuration else ''}[{self.split}]"


class SFTSection(Section):
    """What `task: sft` reads. `data.train` may name corpora besides, which are then blended in by weight."""

    train: list[SFTSource] = Field(default=[])
    validation: list[SFTSource] | None = None  # None: the validation share of `data.split`
    chat_template: str | None = None  # a Jinja file; None: the tokenizer's own
    # handed to the template, e.g. {enable_thinking: false}
    template_variables: dict[str, bool | int | float | str] = Field(default={})
    train_on: Literal["all", "last"] = "all"  # which assistant messages of a conversation carry loss
    # a conversation longer than train.sequence_length is dropped, or loses its start or its end
    too_long: Literal["drop", "cut_start", "cut_end"] = "drop"
    packing: bool = True  # several conversations in a row, apart from each other; False: one a row, padded
