"""How a model is laid over ranks; the only package that knows megatron-core's or DeepSpeed's parallel internals.

quiet_deepspeed.py      DeepSpeed, imported once and kept quiet
quiet_megatron.py       megatron-core, likewise
mesh.py                 the axes (tensor, data, pipeline) and their process groups
factory.py              which layers a rank is built from
tensor_parallel.py      the layer factory on megatron-core's modules
sequence_layout.py      the two streams sharded by tokens between the products
pipeline.py             the layers as stages of DeepSpeed's PipelineModule
fake_rank.py            any rank of a large world on one machine, for the dry run
nonfinite.py            a bad loss made to reach every rank
device_differences.py   what a CPU run has to supply
"""
