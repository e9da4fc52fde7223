"""OrthrosConfig: Llama's keys and the few that two token streams need.

* Unknown to Llama: `architecture`, `base_window`, `base_sinks`, `query_affine`, `qk_norm`, `attention_output_bias`,
  `attention_kernel`. None is called `sliding_window` or `layer_types`: transformers' caches drop history for those.
* Both spellings of RoPE are read: `rope_parameters`, or `rope_theta` with `rope_scaling`. The first is written.
"""

import copy
import os
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

ARCHITECTURES = ("orthros", "transformer")
QUERY_AFFINES = ("elementwise", "none")
ATTENTION_KERNELS = ("auto", "eager", "sdpa", "flex", "flash")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")

POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)
MAX_LAYERS = 10_000  # ten times the deepest there are: a number from a damaged file would be built for hours


@strict
class OrthrosConfig(PreTrainedConfig):
    """Configuration of an Orthros model or of the transformer arm it is compared with.

    Args:
        architecture: "orthros" (base and output stream) or "transformer" (the base stream alone gives the logits).
        base_window: w, the number of keys a base token sees, itself included. None: the whole history, which only
            the transformer arm's full attention and a conversion check want.
        base_sinks: s, how many first tokens of its segment a base token sees besides its window.
        query_affine: "elementwise" (each stream scales and shifts its queries) or "none". None picks elementwise for
            orthros and none for transformer.
        attention_bias: biases of the q, k and v projections.
        attention_output_bias: bias of the o projection; None means as `attention_bias` (Llama), False is Qwen2.
        qk_norm: RMSNorm over the head size of queries and keys (Qwen3).
        attention_kernel: "auto", "eager" (dense mask, the reference), "sdpa", "flex" or "flash". Never
            saved: files say "auto".
    """

    model_type = "orthros"
    keys_to_ignore_at_inference = ("cache", "past_key_values")

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    qk_norm: bool = False
    architecture: str = "orthros"
    base_window: int | None = None
    base_sinks: int = 0
    query_affine: str | None = None
    attention_kernel: str = "auto"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.attention_output_bias is None:
            self.attention_output_bias = self.attention_bias
        if self.query_affine is None:
            self.query_affine = "elementwise" if self.architecture == "orthros" else "none"
        super().__post_init__(**kwargs)

    @property
    def head_shape(self) -> tuple[int, int, int]:
        """(H, G, d): query heads, KV heads and head size, with the defaults filled in."""
        assert self.num_key_value_heads is not None
        assert self.head_dim is not None
        return self.num_attention_heads, self.num_key_value_heads, self.head_dim

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write config.json: `attention_kernel` "auto", so that a folder loads on a machine without this one's."""
        portable = copy.copy(self)
        portable.attention_kernel = "auto"
        super(OrthrosConfig, portable).to_json_file(json_file_path, use_diff)

    def validate_architecture(self) -> None:
        """Refuse what the model cannot be; run by transformers at construction and at load."""
        for name, value, allowed in (
            ("architecture", self.architecture, ARCHITECTURES),
            ("query_affine", self.query_affine, QUERY_AFFINES),
            ("attention_kernel", self.attention_kernel, ATTENTION_KERNELS),
            ("hidden_act", self.hidden_act, ("silu",)),
            ("rope_type", (self.rope_parameters or {}).get("rope_type", "default"), ROPE_TYPES),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(allowed)}")
        for name in POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.num_hidden_layers > MAX_LAYERS:
            raise ValueError(f"num_hidden_layers={self.num_hidden_layers} must be at most {MAX_LAYERS}")
        query_heads, kv_heads, head_dim = self.head_shape
        if query_heads % kv_heads:
            raise ValueError(
                f"num_attention_heads={query_heads} is not a multiple of num_key_value_heads={kv_heads}; "
                "set num_key_value_heads to one of its divisors"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd; RoPE rotates pairs of channels, set an even head_dim")
        if self.base_window is not None and self.base_window < 1:
            raise ValueError(f"base_window={self.base_window} must be at least 1 (it counts the token itself) or null")
        if self.base_sinks < 0 or (self.base_sinks and self.base_window is None):
            raise ValueError(f"base_sinks={self.base_sinks} needs a base_window and must not be negative")
        if self.architecture == "transformer" and self.query_affine != "none":
            raise ValueError("architecture=transformer has no query affine; set query_affine: none")
