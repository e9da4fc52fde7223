"""How a model is laid over ranks; the only package that knows megatron-core's or DeepSpeed's parallel internals."""
