"""How the stages are cut. That they train as one process does is tested in tests/training/test_layouts.py."""

import pytest

from orthros_train.errors import InputError
from orthros_train.model.layer_factory import LayerFactory
from orthros_train.parallel.mesh import build_mesh
from orthros_train.parallel.pipeline import PipelinedModel, layer_weights
from orthros_train.parallel.quiet_deepspeed import join_process_group, partition_balanced
from tests.distributed import run_distributed
from tests.model.tiny import tiny_config


def test_more_stages_than_layers_are_refused():
    def build():
        config = tiny_config(num_hidden_layers=1)
        join_process_group()
        mesh = build_mesh(pipeline_size=2)
        with pytest.raises(InputError, match=r"parallel\.pipeline=2 is more stages than model\.num_hidden_layers=1"):
            PipelinedModel(config, LayerFactory(config), mesh, 16)

    run_distributed(build, 2)


def test_the_head_weighs_like_the_layers_it_costs():
    config = tiny_config(num_hidden_layers=8, vocab_size=4096)
    parts = partition_balanced(weights=layer_weights(config), num_parts=2)
    assert parts == [0, 5, 11]
