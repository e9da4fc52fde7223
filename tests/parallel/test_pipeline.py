"""Pipeline stages train to the losses and gradient norms of one process, whatever else is parallel."""

import pytest
import torch
from deepspeed.runtime.utils import partition_balanced

from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.parallel.mesh import build_mesh
from orthros_train.parallel.pipeline import PipelinedModel, canonical_name, layer_weights, pack_layout
from orthros_train.parallel.quiet_deepspeed import deepspeed, silenced
from orthros_train.parallel.tensor_parallel import TensorParallelFactory
from tests.distributed import run_distributed
from tests.model.tiny import assert_close, tiny_config, token_ids

LENGTH, MICRO, GLOBAL, STEPS = 16, 2, 8, 6


def micro_batch(step, index, use):
    """One of the GLOBAL / MICRO micro-batches of a step."""
    seed = 100 * step + index
    ids = token_ids(MICRO, LENGTH + 1, seed).remainder(31)
    documents = (torch.arange(LENGTH) // (5 + index)).expand(MICRO, -1) if index % 2 else None
    positions, labels = None, ids[:, 1:].clone()
    labels[:, index::5] = -100
    if use == "sft":
        positions = torch.tensor([[1, 5, 6, 15], [0, 2, -1, -1]])
        labels = torch.where(positions >= 0, labels.gather(1, positions.clamp(min=0)), -100)
    return ids[:, :LENGTH], documents, positions, labels


def label_count(step, use):
    return sum(int((micro_batch(step, index, use)[3] != -100).sum()) for index in range(GLOBAL // MICRO))


def one_process(config, use):
    model = OrthrosForCausalLM(config)
    model.reset_parameters(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for index in range(GLOBAL // MICRO):
            ids, documents, positions, labels = micro_batch(step, index, use)
            loss = model(
                ids,
                output_positions=positions,
                document_ids=documents,
                shift_labels=labels,
                num_items_in_batch=label_count(step, use),
            ).loss
            loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(losses), torch.tensor(norms)


def pipelined(config, use, tensor_size, sequence, recompute):
    with silenced():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    mesh = build_mesh(tensor_size, pipeline_size=2, sequence_parallel=sequence)
    model = PipelinedModel(config, TensorParallelFactory(config, mesh), mesh, LENGTH, recompute)
    model.reset_parameters(seed=0)
    accumulation = GLOBAL // MICRO // mesh.data_size
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01),
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "steps_per_print": 10**9,
            "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        },
    )

    def batches(step):
        for index in range(mesh.data_rank, GLOBAL // MICRO, mesh.data_size):
            ids, documents, positions, labels = micro_batch(step, index, use)
            scale = torch.tensor([accumulation * mesh.data_size / label_count(step, use)])
            yield (ids, pack_layout(documents, positions, ids.shape)), (labels, scale)

    losses, norms = [], []
    for step in range(STEPS):
        losses.append(engine.train_batch(batches(step)).item())
        norms.append(float(engine.get_global_grad_norm()))
    return torch.tensor(losses), torch.tensor(norms), [canonical_name(name) for name, _ in model.named_parameters()]


LAYOUTS = {
    "PP2": (2, 1, False),
    "PP2-DP2": (4, 1, False),
    "PP2-TP2": (4, 2, False),
    "PP2-TP2-SP": (4, 2, True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("options", "use", "recompute"),
    [
        ({}, "pretraining", False),
        ({"tie_word_embeddings": True, "qk_norm": True, "attention_bias": True, "vocab_size": 37}, "sft", True),
        ({"architecture": "transformer", "base_sinks": 1}, "sft", False),
    ],
    ids=["pretraining", "tied-sft-recompute", "transformer-sft"],
)
def test_losses_and_norms_equal_one_process(layout, options, use, recompute):
    world, tensor_size, sequence = LAYOUTS[layout]
    config = tiny_config(initializer_range=0.1, **options)
    losses, norms = one_process(config, use)
    ranks = run_distributed(pipelined, world, config, use, tensor_size, sequence, recompute)
    for rank_losses, rank_norms, _ in ranks:
        assert_close(rank_losses, losses, 1e-5)
        assert_close(rank_norms, norms, 1e-5)
    names = {name for *_, rank_names in ranks for name in rank_names}
    assert names == {name for name, _ in OrthrosForCausalLM(config).named_parameters()}


def test_more_stages_than_layers_are_refused():
    def build():
        config = tiny_config(num_hidden_layers=1)
        mesh = build_mesh(pipeline_size=2)
        with pytest.raises(InputError, match=r"parallel\.pipeline=2 is more stages than model\.num_hidden_layers=1"):
            PipelinedModel(config, TensorParallelFactory(config, mesh), mesh, LENGTH)

    run_distributed(build, 2)


def test_the_head_weighs_like_the_layers_it_costs():
    config = tiny_config(num_hidden_layers=8, vocab_size=4096)
    parts = partition_balanced(weights=layer_weights(config), num_parts=2)
    assert parts == [0, 5, 11]
