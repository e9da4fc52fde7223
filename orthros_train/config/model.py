"""The section `model`: the architecture in OrthrosConfig's own names, so a recipe reads like a config.json."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_serializer, model_validator

from .section import Section

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


def model_values(config_json: dict[str, Any]) -> dict[str, Any]:
    """The options of the section `model` that an Orthros folder's config.json gives, in this section's names."""
    rope = dict(config_json.get("rope_parameters") or {})
    known = {name for name in ModelSection.model_fields if name != "attention_kernel"}
    values = {name: value for name, value in config_json.items() if name in known}
    if "rope_theta" in rope:
        values["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        values["rope_scaling"] = rope
    return values


class ModelSection(Section):
    """Architecture, in OrthrosConfig's names."""

    architecture: Literal["orthros", "transformer"] = "orthros"
    vocab_size: int | None = Field(default=None, ge=1)  # None: the tokenizer's
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1, le=10_000)  # ten times the deepest there are; a dry run builds each stage
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
