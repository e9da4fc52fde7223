"""The configuration of a run: one small typed model per section, units in the names.

* Every section refuses unknown keys; the loader turns a validation error into one line that names
  the option, what is wrong and the nearest right name.
* A check of several options names each of them in full and says what to change; its message is shown as it is.
* This module imports neither torch nor transformers: `--help` and a typo are answered at once.
* The sections `model`, `parallel`, `data.sft`, `adaptation` and `evaluation` have files of their own, beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ..errors import InputError
from ..model_folder.json_files import read_json_object
from .adaptation import AdaptationSection, check_adaptation, check_teacher_layout
from .evaluation import EvaluationSection, check_suites_layout
from .loading import dump_yaml, load_yaml
from .model import ModelSection, model_values
from .parallel import (
    ParallelSection,
    check_pipeline_size,
    check_sequence_shards,
    check_tensor_size,
    data_parallel_size,
)
from .section import Section
from .sft import SFTSection

if TYPE_CHECKING:
    from ..model import OrthrosConfig


class TokenizerSection(Section):
    """Which tokenizer encodes raw text."""

    type: Literal["byte", "sentencepiece", "huggingface"] = "byte"
    path: str | None = None  # a .model file (sentencepiece) or a folder with tokenizer.json (huggingface)

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if self.type == "byte" and self.path is not None:
            raise ValueError(
                "tokenizer.path has no meaning with tokenizer.type: byte: remove it, or set tokenizer.type"
            )
        if self.type != "byte" and self.path is None:
            wanted = "the .model file" if self.type == "sentencepiece" else "the folder that holds tokenizer.json"
            raise ValueError(f"tokenizer.type: {self.type} needs tokenizer.path: set it to {wanted}")
        return self


class DataSource(Section):
    """One preprocessed corpus of a blend."""

    prefix: str  # PREFIX.bin, PREFIX.idx and PREFIX.manifest.json
    weight: float = Field(default=1.0, gt=0)


class DataSection(Section):
    """What the model reads. Weights of a blend need not sum to one."""

    train: list[DataSource] = Field(default=[])
    validation: list[DataSource] | None = None  # None: the validation share of `split`
    sft: SFTSection = SFTSection()
    # train, validation, test shares of every source's documents (YAML has lists, not tuples: hence not strict)
    split: tuple[float, float, float] = Field(default=(0.98, 0.01, 0.01), strict=False)
    document_mask: bool = True  # False: a row is one segment
    output_positions_multiple: int = Field(default=128, ge=1)
    cache_dir: str | None = None  # index cache; None: PREFIX.cache beside the first source
    prefetch_steps: int = Field(default=2, ge=0)

    @field_validator("split")
    @classmethod
    def _check_split(cls, split: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(split) < 0 or split[0] == 0 or not math.isclose(sum(split), 1.0, abs_tol=1e-6):
            raise ValueError(
                f"data.split is {list(split)}: give the train, validation and test shares, none negative, "
                "train above 0, that add up to 1"
            )
        return split


class TrainSection(Section):
    """The size of the run."""

    steps: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1)  # sequences per rank and forward
    global_batch_size: int = Field(ge=1, le=2**24)  # sequences per optimizer step, over all ranks
    sequence_length: int = Field(ge=1)
    seed: int = 42
    activation_checkpointing: bool = False
    compile: bool = False  # torch.compile of the layers, attention left out: worth its start where steps are many
    deterministic: bool = False  # CUDA only: bitwise repeatable kernels
    max_consecutive_skips: int = Field(default=10, ge=1)  # non-finite steps in a row before the run stops
    wall_clock_limit_seconds: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"train.global_batch_size ({self.global_batch_size}) is not a multiple of train.micro_batch_size "
                f"({self.micro_batch_size}): change one of them"
            )
        return self


class OptimizerSection(Section):
    """AdamW and its groups."""

    learning_rate: float = Field(default=3e-4, gt=0)  # the peak
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    decay_embeddings: bool = False
    affine_lr_scale: float = Field(default=1.0, ge=0)
    clip_grad_norm: float | None = Field(default=1.0, gt=0)


class ScheduleSection(Section):
    """Learning rate as a pure function of the step."""

    type: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    # cosine, linear: None = until train.steps; wsd: the length of the final decay, None = 10%
    decay_steps: int | None = Field(default=None, ge=1)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        if self.type == "constant" and self.decay_steps is not None:
            raise ValueError("schedule.decay_steps has no meaning with schedule.type: constant: remove it")
        return self


class CheckpointSection(Section):
    """What is saved, how often, and what is kept."""

    interval_steps: int | None = Field(default=None, ge=1)  # None: only at the end and when stopped
    keep_last: int = Field(default=2, ge=1)
    resume: bool = True  # from the newest valid checkpoint of output_dir


class LoggingSection(Section):
    """What is reported while training."""

    interval_steps: int = Field(default=10, ge=1)  # of the printed line; metrics.jsonl has every step
    tensorboard: bool = True
    peak_tflops: float | None = Field(default=None, gt=0)  # per device; None: from the device's name where known


class Config(Section):
    """A whole run."""

    task: Literal["pretrain", "sft"] = "pretrain"
    output_dir: str = Field(min_length=1)
    init_from: str | None = None  # a Hugging Face folder of an Orthros model; `model` then says only what differs
    precision: Literal["fp32", "bf16"] = "bf16"
    model: ModelSection
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    evaluation: EvaluationSection = EvaluationSection()
    adaptation: AdaptationSection = AdaptationSection()

    @model_validator(mode="before")
    @classmethod
    def _start_from_the_folders_model(cls, values: Any) -> Any:
        """What the section `model` leaves out is as in the folder that the run starts from."""
        if not isinstance(values, dict) or not isinstance(values.get("init_from"), str):
            return values
        described, given = Path(values["init_from"]) / "config.json", values.get("model") or {}
        if not described.is_file() or not isinstance(given, dict):
            return values
        found = model_values(read_json_object(described))
        if given.get("architecture", found.get("architecture")) != found.get("architecture"):
            found.pop("query_affine", None)  # the other architecture has its own
        return {**values, "model": {**found, **given}}

    @field_validator("precision", mode="before")
    @classmethod
    def _check_precision(cls, precision: object) -> object:
        if isinstance(precision, str) and precision.lower() in ("fp16", "float16", "half"):
            raise ValueError(
                f"precision: {precision} is refused: its range ends at 65504, so training needs loss scaling and "
                "still skips steps; set precision: bf16 (or fp32)"
            )
        return precision

    @model_validator(mode="after")
    def _check_positions(self) -> Self:
        length, longest = self.train.sequence_length, self.model.max_position_embeddings
        scaling = self.model.rope_scaling
        if length > longest and (scaling is None or scaling.rope_type == "default"):
            raise ValueError(
                f"train.sequence_length ({length}) is beyond model.max_position_embeddings ({longest}): "
                f"raise model.max_position_embeddings to {length} or set model.rope_scaling"
            )
        return self

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        if self.task == "pretrain" and (self.data.sft.train or self.data.sft.validation):
            raise ValueError("data.sft names conversations, which task: pretrain does not read: set task: sft")
        return self

    @model_validator(mode="after")
    def _check_adaptation(self) -> Self:
        check_adaptation(self.adaptation, self.model, self.init_from)
        check_teacher_layout(self.adaptation, self.parallel.tensor, self.parallel.pipeline)
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        steps, warmup, decay = self.train.steps, self.schedule.warmup_steps, self.schedule.decay_steps
        if warmup > steps:
            raise ValueError(
                f"schedule.warmup_steps ({warmup}) is more than train.steps ({steps}): lower schedule.warmup_steps"
            )
        if self.schedule.type == "wsd" and decay is not None and warmup + decay > steps:
            raise ValueError(
                f"schedule.warmup_steps ({warmup}) and schedule.decay_steps ({decay}) together are more than "
                f"train.steps ({steps}): lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        model, parallel = self.model, self.parallel
        heads, kv_heads = model.num_attention_heads, model.num_key_value_heads or model.num_attention_heads
        check_tensor_size(parallel.tensor, heads, kv_heads, model.intermediate_size)
        check_pipeline_size(parallel.pipeline, model.num_hidden_layers)
        if parallel.sequence:
            multiple = self.data.output_positions_multiple if self.task == "sft" else None
            check_sequence_shards(parallel.tensor, self.train.sequence_length, multiple)
        check_suites_layout(self.evaluation, parallel.tensor, parallel.pipeline, parallel.zero_stage)
        return self

    @model_validator(mode="after")
    def _check_compile(self) -> Self:
        obstacles = {
            "parallel.tensor": (self.parallel.tensor > 1, "1"),
            "parallel.pipeline": (self.parallel.pipeline > 1, "1"),
            "parallel.zero_stage=3": (self.parallel.zero_stage == 3, "2"),
            "train.activation_checkpointing": (self.train.activation_checkpointing, "false"),
        }
        for name, (present, remedy) in obstacles.items():
            if self.train.compile and present:
                raise ValueError(
                    f"train.compile does not go with {name}, whose calls torch.compile does not look into: set "
                    f"{name.partition('=')[0]}: {remedy}, or train.compile: false"
                )
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file `path` with `key=value` overrides applied in order.

    Raises InputError (one line: where, what is wrong, the remedy or the nearest right name) for anything unfit.
    """
    return load_yaml(Config, path, overrides)


def config_to_yaml(config: Config) -> str:
    """Every option of `config`, defaults included, as YAML that `load_config` reads back to an equal object."""
    return dump_yaml(config)


def gradient_accumulation_steps(config: Config, world_size: int) -> int:
    """Forward passes of a replica per optimizer step: global_batch_size / (micro_batch_size · replicas).

    A replica is parallel.tensor x parallel.pipeline of the ranks. Raises InputError if the world does not factor so or
    the global batch cannot be divided.
    """
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    replicas = data_parallel_size(world_size, tensor, pipeline)
    together = config.train.micro_batch_size * replicas
    if config.train.global_batch_size % together:
        shared = tensor * pipeline > 1
        ranks = f"{replicas} replicas ({world_size} ranks / {tensor * pipeline})" if shared else f"{world_size} ranks"
        raise InputError(
            f"train.global_batch_size ({config.train.global_batch_size}) is not a multiple of train.micro_batch_size "
            f"({config.train.micro_batch_size}) times {ranks} = {together}: change one of the three"
        )
    return config.train.global_batch_size // together


def orthros_config(config: Config, vocab_size: int) -> OrthrosConfig:
    """The model's own configuration. `vocab_size` is the tokenizer's; `model.vocab_size` may be larger.

    Imports transformers. Raises InputError if `model.vocab_size` is too small for the tokenizer's ids.
    """
    from ..model import OrthrosConfig  # noqa: PLC0415  slow to import, and not needed to refuse a bad file

    section = config.model
    if section.vocab_size is not None and section.vocab_size < vocab_size:
        raise InputError(
            f"model.vocab_size ({section.vocab_size}) is less than the tokenizer's {vocab_size} ids: "
            "raise model.vocab_size, or remove it to take the tokenizer's"
        )
    values = section.model_dump(exclude={"vocab_size", "rope_theta", "rope_scaling"})
    scaling = section.rope_scaling.keys_given() if section.rope_scaling else {"rope_type": "default"}
    rope = {**scaling, "rope_theta": section.rope_theta}
    return OrthrosConfig(vocab_size=section.vocab_size or vocab_size, rope_parameters=rope, **values)
