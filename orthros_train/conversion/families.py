"""The four architectures that an Orthros model can be made of, and how they differ from one another.

All are pre-norm decoders with RoPE, grouped-query attention, RMSNorm and SwiGLU, under the same tensor names.
"""

from __future__ import annotations

from dataclasses import dataclass

from orthros_train.errors import InputError

_WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})


@dataclass(frozen=True)
class Family:
    """One architecture, as transformers implements it.

    Attributes:
        model_type: its name in config.json.
        causal_lm: transformers' class with a language-model head, as `architectures` names it.
        own_keys: keys of config.json that this class reads and the other families' may not.
        qkv_bias: biases of q, k and v; None: as `attention_bias` of config.json says.
        output_bias: bias of o; None: as `attention_bias` says.
        qk_norm: RMSNorm over the head size of queries and keys.
    """

    model_type: str
    causal_lm: str
    own_keys: frozenset[str]
    qkv_bias: bool | None
    output_bias: bool | None
    qk_norm: bool = False


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", frozenset({"attention_bias"}), None, None),
        Family("mistral", "MistralForCausalLM", frozenset({"sliding_window"}), False, False),
        Family("qwen2", "Qwen2ForCausalLM", _WINDOW_KEYS, True, False),
        Family("qwen3", "Qwen3ForCausalLM", _WINDOW_KEYS | {"attention_bias"}, None, None, qk_norm=True),
    )
}


def family_with(*, qkv_bias: bool, output_bias: bool, qk_norm: bool) -> Family:
    """The family whose layers have exactly these biases and norms.

    Raises:
        InputError: none has.
    """
    if qk_norm and qkv_bias == output_bias:
        return FAMILIES["qwen3"]
    if not qk_norm and qkv_bias == output_bias:
        return FAMILIES["llama"]
    if not qk_norm and qkv_bias:
        return FAMILIES["qwen2"]
    raise InputError(
        f"no architecture of the Llama family has attention_bias {qkv_bias}, attention_output_bias {output_bias} and "
        f"qk_norm {qk_norm} together; this model has no form but Orthros"
    )
