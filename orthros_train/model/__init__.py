"""The definition of the Orthros model; an exported folder carries copies of these very files."""

from transformers import AutoConfig, AutoModelForCausalLM

from .configuration_orthros import OrthrosConfig
from .kv_cache import KVCache
from .layer_factory import LayerFactory
from .modeling_orthros import OrthrosForCausalLM, OrthrosModel

AutoConfig.register("orthros", OrthrosConfig, exist_ok=True)
AutoModelForCausalLM.register(OrthrosConfig, OrthrosForCausalLM, exist_ok=True)
OrthrosConfig.register_for_auto_class()
OrthrosForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["KVCache", "LayerFactory", "OrthrosConfig", "OrthrosForCausalLM", "OrthrosModel"]
