"""Which layers a rank is built from."""

from __future__ import annotations

from orthros_train.model import OrthrosConfig
from orthros_train.model.layer_factory import LayerFactory
from orthros_train.parallel.mesh import Mesh


def factory_for(model: OrthrosConfig, mesh: Mesh) -> LayerFactory:
    """Plain PyTorch's, or megatron-core's where the tensor axis has several ranks."""
    if mesh.tensor_size == 1:
        return LayerFactory(model)
    from orthros_train.parallel.tensor_parallel import TensorParallelFactory  # noqa: PLC0415 - 4 s of import

    return TensorParallelFactory(model, mesh)
