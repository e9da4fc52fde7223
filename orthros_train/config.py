"""The configuration of a run: one small typed model per section, units in the names.

* Every section refuses unknown keys; the loader turns a validation error into one line that names
  the option, what is wrong and the nearest right name.
* A check of several options names each of them in full and says what to change; its message is shown as it is.
* This module imports neither torch nor transformers: `--help` and a typo are answered at once.
* `ModelSection` uses OrthrosConfig's own names, so a recipe reads like a config.json.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_serializer, model_validator
from pydantic_core import PydanticKnownError

from .config_adaptation import AdaptationSection, check_adaptation, check_teacher_layout
from .config_loading import dump_yaml, load_yaml
from .config_sft import SFTSection
from .errors import InputError

if TYPE_CHECKING:
    from .model import OrthrosConfig

# rope_scaling.rope_type -> (needed keys, optional keys); the types and keys that the model computes.
ROPE_SCALING_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}


LARGEST_INTEGER = 2**53  # exact in every format that a run writes


class Section(BaseModel):
    """Base of every section: unknown keys, silent type coercions, infinities, NaN and absurd integers are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_assignment=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _check_size(cls, value: object) -> object:
        if isinstance(value, int) and value > LARGEST_INTEGER:
            raise PydanticKnownError("less_than_equal", {"le": LARGEST_INTEGER})
        if isinstance(value, int) and value < -LARGEST_INTEGER:
            raise PydanticKnownError("greater_than_equal", {"ge": -LARGEST_INTEGER})
        return value


class RopeScalingSection(Section):
    """How RoPE reaches beyond the positions it was trained on, in transformers' names."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"]
    factor: float | None = Field(default=None, ge=1)
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    low_freq_factor: float | None = Field(default=None, gt=0)
    high_freq_factor: float | None = Field(default=None, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    beta_fast: float | None = Field(default=None, gt=0)
    beta_slow: float | None = Field(default=None, gt=0)
    mscale: float | None = Field(default=None, gt=0)
    mscale_all_dim: float | None = Field(default=None, gt=0)
    truncate: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_old_name(cls, values: Any) -> Any:
        """Older config.json files call `rope_type` `type`."""
        if isinstance(values, dict) and "type" in values and "rope_type" not in values:
            return {"rope_type" if name == "type" else name: value for name, value in values.items()}
        return values

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        needed, optional = ROPE_SCALING_KEYS[self.rope_type]
        given = self.keys_given()
        for name in needed:
            if name not in given:
                raise ValueError(f"model.rope_scaling.{name} is required by rope_type: {self.rope_type} but missing")
        for name in given:
            if name not in ("rope_type", *needed, *optional):
                raise ValueError(
                    f"model.rope_scaling.{name} has no meaning with rope_type: {self.rope_type}: remove it"
                )
        if self.low_freq_factor and self.high_freq_factor and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"model.rope_scaling.low_freq_factor ({self.low_freq_factor}) must be less than "
                f"model.rope_scaling.high_freq_factor ({self.high_freq_factor})"
            )
        return self

    def keys_given(self) -> dict[str, Any]:
        """The keys that are set, as transformers' `rope_parameters` wants them."""
        return {name: value for name, value in self if value is not None}

    @model_serializer
    def _serialize(self) -> dict[str, Any]:
        return self.keys_given()


class ModelSection(Section):
    """Architecture, in OrthrosConfig's names."""

    architecture: Literal["orthros", "transformer"] = "orthros"
    vocab_size: int | None = Field(default=None, ge=1)  # None: the tokenizer's
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)  # None: as many as query heads
    head_dim: int | None = Field(default=None, ge=2)  # None: hidden_size / num_attention_heads
    max_position_embeddings: int = Field(default=2048, ge=1)
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScalingSection | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # biases of q, k and v
    attention_output_bias: bool | None = None  # bias of o; None: as attention_bias
    qk_norm: bool = False
    initializer_range: float = Field(default=0.02, gt=0)
    base_window: int | None = Field(
        default=None, ge=1, description="the window counts the token itself; null means the whole history"
    )
    base_sinks: int = Field(default=0, ge=0)
    query_affine: Literal["elementwise", "none"] | None = None  # None: elementwise for orthros, none for transformer
    attention_kernel: Literal["auto", "eager", "sdpa", "flex", "flash"] = "auto"

    @property
    def resolved_head_dim(self) -> int:
        """d, the size of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if groups is not None and heads % groups:
            raise ValueError(
                f"model.num_attention_heads ({heads}) is not a multiple of model.num_key_value_heads ({groups}): "
                f"set model.num_key_value_heads to a divisor of {heads}"
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"model.hidden_size ({self.hidden_size}) is not a multiple of model.num_attention_heads ({heads}): "
                "change one of them or set model.head_dim"
            )
        if self.resolved_head_dim % 2:
            origin = "" if self.head_dim else " (model.hidden_size / model.num_attention_heads)"
            raise ValueError(
                f"model.head_dim{origin} is {self.resolved_head_dim}, but RoPE rotates pairs of channels: "
                "set model.head_dim to an even number"
            )
        return self

    @model_validator(mode="after")
    def _check_streams(self) -> Self:
        if self.architecture == "transformer" and self.query_affine == "elementwise":
            raise ValueError(
                "model.query_affine: elementwise is for model.architecture: orthros; "
                "set model.query_affine: none or remove it"
            )
        if self.base_sinks and self.base_window is None:
            raise ValueError(
                f"model.base_sinks is {self.base_sinks} but without model.base_window every key is visible anyway: "
                "set model.base_window, or model.base_sinks: 0"
            )
        return self


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

    train: list[DataSource] = []
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


class ParallelSection(Section):
    """How the model and its state are laid over ranks."""

    tensor: int = Field(default=1, ge=1)
    sequence: bool = False
    pipeline: int = Field(default=1, ge=1)
    zero_stage: Literal[1, 2, 3] = 1
    timeout_seconds: float = Field(default=1800.0, gt=0, le=1e9)  # of a collective

    @field_validator("zero_stage", mode="before")
    @classmethod
    def _check_zero_stage(cls, stage: object) -> object:
        if isinstance(stage, bool | float):  # both equal 1 to Python
            raise ValueError(f"parallel.zero_stage must be 1, 2 or 3, but is {str(stage).lower()}")
        return stage

    @model_validator(mode="after")
    def _check_available(self) -> Self:
        for name, size in (("tensor", self.tensor), ("pipeline", self.pipeline)):
            if size > 1:
                raise ValueError(
                    f"parallel.{name} is {size}, but {name} parallelism is not available yet: set parallel.{name}: 1 "
                    "and let parallel.zero_stage 2 or 3 share the memory"
                )
        if self.sequence:
            raise ValueError("parallel.sequence is not available yet: set parallel.sequence: false")
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


class EvaluationSection(Section):
    """Validation during training."""

    interval_steps: int | None = Field(default=None, ge=1)  # None: only at the end, where validation data exists
    samples: int = Field(default=64, ge=1)  # sequences of the validation set, the same ones each time


class Config(Section):
    """A whole run."""

    task: Literal["pretrain", "sft"] = "pretrain"
    output_dir: str = Field(min_length=1)
    init_from: str | None = None  # a Hugging Face folder of an Orthros model
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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file `path` with `key=value` overrides applied in order.

    Raises InputError (one line: where, what is wrong, the remedy or the nearest right name) for anything unfit.
    """
    return load_yaml(Config, path, overrides)


def config_to_yaml(config: Config) -> str:
    """Every option of `config`, defaults included, as YAML that `load_config` reads back to an equal object."""
    return dump_yaml(config)


def gradient_accumulation_steps(config: Config, world_size: int) -> int:
    """Forward passes per rank and optimizer step: global_batch_size / (micro_batch_size · world_size).

    Raises InputError if the global batch cannot be divided so.
    """
    together = config.train.micro_batch_size * world_size
    if config.train.global_batch_size % together:
        raise InputError(
            f"train.global_batch_size ({config.train.global_batch_size}) is not a multiple of train.micro_batch_size "
            f"({config.train.micro_batch_size}) times {world_size} ranks = {together}: change one of the three"
        )
    return config.train.global_batch_size // together


def orthros_config(config: Config, vocab_size: int) -> OrthrosConfig:
    """The model's own configuration. `vocab_size` is the tokenizer's; `model.vocab_size` may be larger.

    Imports transformers. Raises InputError if `model.vocab_size` is too small for the tokenizer's ids.
    """
    from .model import OrthrosConfig  # noqa: PLC0415  slow to import, and not needed to refuse a bad file

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
