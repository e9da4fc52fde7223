"""Two and four ranks of the tensor axis compute what one process computes: losses and every gradient."""

from dataclasses import replace

import pytest
import torch

from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.parallel.mesh import build_mesh
from orthros_train.parallel.tensor_parallel import TensorParallelFactory
from tests.distributed import run_distributed
from tests.model.tiny import assert_close, tiny_config, token_ids

BATCH, LENGTH = 3, 16


def perturb(model, factory=None):
    """Weights away from their starting values, the same in every layout."""
    model.reset_parameters(seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                shape = parameter.shape if factory is None else factory.full_shape(parameter)
                whole = 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.add_(whole if factory is None else factory.shard(parameter, whole))
    return model


def batch(use):
    ids = token_ids(BATCH, LENGTH).remainder(31)
    documents = (torch.arange(LENGTH) // 7).expand(BATCH, -1)
    positions, labels = None, ids
    if use == "sft":
        positions = torch.tensor([[1, 5, 6, 15], [0, 2, -1, -1], [9, 10, 11, 12]])
    return {"input_ids": ids, "document_ids": documents, "output_positions": positions, "labels": labels}


def loss_and_gradients(model, use, **options):
    model.zero_grad()
    loss = model(**batch(use), num_items_in_batch=7, **options).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def parallel_run(config, use, tensor_size, sequence):
    factory = TensorParallelFactory(config, build_mesh(tensor_size, sequence_parallel=sequence))
    model = perturb(OrthrosForCausalLM(config, factory), factory)
    dims = {name: factory.split_dim(parameter) for name, parameter in model.named_parameters()}
    runs = [loss_and_gradients(model, use, return_logits=return_logits) for return_logits in (True, False)]
    return [(*run, dims) for run in runs]


OPTIONS = [
    {},
    {"tie_word_embeddings": True, "vocab_size": 37},
    {"qk_norm": True, "attention_bias": True, "base_sinks": 1},
    {"architecture": "transformer", "attention_bias": True, "vocab_size": 33},
    {"vocab_size": 47, "intermediate_size": 48},  # the padded vocabulary is as wide as the FFN
]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tensor_size", [2, 4])
@pytest.mark.parametrize("use", ["pretraining", "sft"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_losses_and_gradients_equal_one_process(options, use, tensor_size, sequence, monkeypatch):
    """From logits, and in chunks of 5 tokens and pieces of a few without them."""
    monkeypatch.setattr("orthros_train.model.chunked_loss.CHUNK_TOKENS", 5)
    monkeypatch.setattr("orthros_train.model.chunked_loss.CPU_PIECE_LOGITS", 50)
    config = tiny_config(num_key_value_heads=4, initializer_range=0.1, **{"vocab_size": 61, **options})
    loss, gradients = loss_and_gradients(perturb(OrthrosForCausalLM(config)), use)
    for ranks in zip(*run_distributed(parallel_run, tensor_size, config, use, tensor_size, sequence), strict=True):
        check_ranks(ranks, loss, gradients)


def check_ranks(ranks, loss, gradients):
    """Each rank's loss is the loss, and the ranks' gradients together are the gradients."""
    dims = ranks[0][2]
    for rank_loss, rank_gradients, _ in ranks:
        assert_close(rank_loss, loss, 1e-5)
        assert rank_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        parts = [rank_gradients[name] for _, rank_gradients, _ in ranks]
        if dims[name] is None:
            for part in parts:
                assert_close(part, gradient, 1e-5)
        else:
            whole = torch.cat(parts, dim=dims[name])
            assert_close(whole[: gradient.shape[0]], gradient, 1e-5)
            assert not whole[gradient.shape[0] :].any()


def test_heads_that_do_not_divide_are_refused():
    config = tiny_config(num_key_value_heads=1)

    def build():
        with pytest.raises(InputError, match=r"num_key_value_heads=1 does not divide by parallel.tensor=2"):
            TensorParallelFactory(config, build_mesh(2))

    run_distributed(build, 2)


def test_a_world_that_does_not_factor_is_refused():
    def build():
        with pytest.raises(InputError, match=r"2 ranks do not factor into parallel\.tensor=3"):
            build_mesh(3)

    run_distributed(build, 2)


@torch.no_grad()
def prefill_and_decode(model):
    """Logits of a ragged prefill in chunks and of two steps, (3, B, vocabulary)."""
    ids = batch("pretraining")["input_ids"]
    logits, cache = model.eval().prefill(ids, torch.tensor([LENGTH, 3, 9]), chunk_size=5)
    return torch.stack([logits, *(model.decode(ids[:, step], cache) for step in range(2))])


def parallel_prefill_and_decode(config, tensor_size):
    mesh = build_mesh(tensor_size)
    factory = TensorParallelFactory(config, mesh)
    model = perturb(OrthrosForCausalLM(config, factory), factory)
    logits = prefill_and_decode(model)
    sharded = TensorParallelFactory(config, replace(mesh, sequence_parallel=True))
    trained = OrthrosForCausalLM(config, sharded)
    for prompt in (LENGTH, LENGTH - 1):  # an output token does not divide, nor does the prompt
        with pytest.raises(ValueError, match=r"prefill and decoding, .*, with parallel.sequence: false"):
            trained.prefill(token_ids(2, prompt))
    trained.load_state_dict(model.state_dict(), strict=True)  # and back: the weights are the same
    return logits


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, {"architecture": "transformer"}], ids=str)
def test_prefill_and_decoding_equal_one_process(options):
    """Each rank has its heads' part of the cache; all give the whole vocabulary, which does not divide by them."""
    config = tiny_config(num_key_value_heads=4, initializer_range=0.1, **options)
    expected = prefill_and_decode(perturb(OrthrosForCausalLM(config)))
    assert config.vocab_size % 2
    for logits in run_distributed(parallel_prefill_and_decode, 2, config, 2):
        assert_close(logits, expected, 1e-5)
