"""Where a run starts: each rank reads its own part of a folder, and gets what cutting up the whole would give it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from orthros_train.config import Config
from orthros_train.errors import InputError
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.model.layer_factory import LayerFactory
from orthros_train.model_folder import tensor_folder
from orthros_train.parallel.mesh import build_mesh
from orthros_train.parallel.pipeline import PipelinedModel, canonical_name
from orthros_train.parallel.quiet_deepspeed import deepspeed, silenced
from orthros_train.parallel.tensor_parallel import TensorParallelFactory
from orthros_train.training.initial_model import InitialValues, build_model
from tests.distributed import run_distributed
from tests.model.tiny import tiny_config, tiny_model
from tests.training.small_engines import engine_config

SEED = 5
Tensors = dict[str, torch.Tensor]
LAYOUTS = {  # ranks, tensor, pipeline, sequence
    "one process": (1, 1, 1, False),
    "TP2": (2, 2, 1, False),
    "TP2-SP": (2, 2, 1, True),
    "TP4": (4, 4, 1, False),
    "PP2": (2, 1, 2, False),
    "PP2-TP2": (4, 2, 2, False),
}
OPTIONS: list[dict[str, Any]] = [
    {"vocab_size": 259},
    {"vocab_size": 259, "tie_word_embeddings": True, "qk_norm": True},
    {"attention_bias": True, "attention_output_bias": True, "query_affine": "none"},
    {"vocab_size": 5, "architecture": "transformer", "query_affine": None},  # with TP4 the last share is all padding
]


def run_config(init_from: Path | None) -> Config:
    config = engine_config(2, 1, seed=SEED)
    return config.model_copy(update={"init_from": None if init_from is None else str(init_from)})


def save_model(folder: Path, dtype: torch.dtype = torch.bfloat16, shards: bool = True, **options: Any) -> Tensors:
    """A small model's folder; returns the fp32 values that a run must start from, by name."""
    model = tiny_model(dtype, num_key_value_heads=4, **options)
    model.save_pretrained(folder, max_shard_size="8KB" if shards else "5GB")
    assert (folder / "model.safetensors").exists() != shards
    return {name: parameter.detach().float() for name, parameter in model.named_parameters()}


def count_reads(read: Counter[str]) -> None:
    """Count the bytes read of each tensor in this process, and let none be read whole."""

    class Slice:
        def __init__(self, name: str, real: Any) -> None:
            self.name, self.get_shape, self.get_dtype = name, real.get_shape, real.get_dtype
            self._real = real

        def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
            found: torch.Tensor = self._real[part]
            read[self.name] += found.nbytes
            return found

    class File:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._real = safe_open(*arguments, **options)
            self.keys = self._real.keys

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self._real.get_slice(name))

    tensor_folder.safe_open = File  # type: ignore[assignment]


def start(layout: str, options: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """What a rank starts from: its parameters, how they are split, and how many bytes of each tensor it read."""
    _, tensor, pipeline, sequence = LAYOUTS[layout]
    config, model_config = run_config(folder), tiny_config(num_key_value_heads=4, **options)
    read: Counter[str] = Counter()
    count_reads(read)
    factory: LayerFactory = LayerFactory(model_config)
    rank = 0
    if (tensor, pipeline) != (1, 1):
        with silenced():
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        mesh = build_mesh(tensor, pipeline, sequence)
        factory, rank = TensorParallelFactory(model_config, mesh), mesh.tensor_rank
    if pipeline == 1:
        module: Any = build_model(InitialValues(config, model_config, factory))
        named = dict(module.named_parameters())
    else:
        module = PipelinedModel(model_config, factory, mesh, sequence_length=16)
        InitialValues(config, model_config, factory).set_all(module, canonical_name)
        named = {canonical_name(name): parameter for name, parameter in module.named_parameters()}
    dims = {
        name: getattr(p, "partition_dim", -1) for name, p in named.items() if getattr(p, "tensor_model_parallel", 0)
    }
    return {"values": {k: p.detach() for k, p in named.items()}, "dims": dims, "rank": rank, "read": dict(read)}


def cut(whole: torch.Tensor, dim: int | None, rank: int, size: int) -> torch.Tensor:
    """Share `rank` of `size` along `dim`, the whole padded with zero rows where that does not divide."""
    if dim is None:
        return whole
    padding = -whole.shape[dim] % size
    if padding:
        assert dim == 0
        whole = torch.cat((whole, torch.zeros(padding, *whole.shape[1:])))
    return whole.chunk(size, dim)[rank]


def check_ranks(ranks: list[dict[str, Any]], expected: Tensors, size: int) -> None:
    """Every parameter is on some rank, and each rank's is its share of the whole."""
    assert {name for rank in ranks for name in rank["values"]} == expected.keys()
    for rank in ranks:
        for name, value in rank["values"].items():
            assert value.dtype == torch.float32
            assert torch.equal(value, cut(expected[name], rank["dims"].get(name), rank["rank"], size)), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_rank_reads_its_part_and_no_more(tmp_path: Path, layout: str, options: dict[str, Any]) -> None:
    expected = save_model(tmp_path, **options)
    world, size, stages, _ = LAYOUTS[layout]
    ranks = run_distributed(start, world, layout, options, tmp_path)
    check_ranks(ranks, expected, size)
    split = {name for rank in ranks for name in rank["dims"]}
    for name, whole in expected.items():
        holders = [rank for rank in ranks if name in rank["values"]]
        read = sum(rank["read"].get(name, 0) for rank in ranks)
        replicas = len(holders) // size if name in split else len(holders)  # the tied embedding is on two stages
        assert read == 2 * whole.numel() * replicas, name
    total = sum(2 * whole.numel() for whole in expected.values())
    if stages == 1 and options.get("vocab_size") == 259:
        assert max(sum(rank["read"].values()) for rank in ranks) < 1.05 * total / size


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_a_start_from_the_seed_is_the_same_in_every_layout(layout: str, options: dict[str, Any]) -> None:
    model = OrthrosForCausalLM(tiny_config(num_key_value_heads=4, **options))
    model.reset_parameters(SEED)
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    world, size, *_ = LAYOUTS[layout]
    check_ranks(run_distributed(start, world, layout, options, None), expected, size)


@pytest.mark.parametrize("layout", ["one process", "TP2"])
def test_affines_that_a_folder_lacks_are_the_identity(tmp_path: Path, layout: str) -> None:
    options: dict[str, Any] = {"vocab_size": 259}
    expected = save_model(tmp_path, shards=False, **options)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "_query" not in name}, file)
    for name, tensor in expected.items():
        if "_query" in name:
            tensor.fill_(1.0 if name.endswith("gain") else 0.0)
    world, size, *_ = LAYOUTS[layout]
    check_ranks(run_distributed(start, world, layout, options, tmp_path), expected, size)


def test_a_tied_folder_may_repeat_its_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orthros_train.model_folder.model_parameters.ROWS", 100)
    options: dict[str, Any] = {"vocab_size": 259, "tie_word_embeddings": True}
    expected = save_model(tmp_path, shards=False, **options)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file)
    model_config = tiny_config(num_key_value_heads=4, **options)
    model = build_model(InitialValues(run_config(tmp_path), model_config))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, expected["model.embed_tokens.weight"])
    head[258, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, file)
    with pytest.raises(InputError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        build_model(InitialValues(run_config(tmp_path), model_config))


def test_the_source_of_a_conversion_goes_along(tmp_path: Path) -> None:
    save_model(tmp_path)
    change_json(tmp_path / "config.json", source_config={"model_type": "llama"})
    model_config = tiny_config(num_key_value_heads=4)
    build_model(InitialValues(run_config(tmp_path), model_config))
    assert model_config.source_config == {"model_type": "llama"}


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def cut_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def only_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


NORM = "model.norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (change_tensors(lambda tensors: tensors.pop(NORM)), f"lacks the tensor {NORM} that"),
    "unknown": (change_tensors(lambda tensors: tensors.update(odd=torch.ones(2))), "holds the tensor odd, which"),
    "misshapen": (change_tensors(lambda tensors: tensors.update({NORM: torch.ones(3)})), r"has shape \[3\], but"),
    "not a number": (change_tensors(lambda tensors: tensors[NORM].fill_(torch.nan)), "holds NaN or infinite"),
    "integers": (change_tensors(lambda tensors: tensors.update({NORM: torch.ones(32).int()})), "is of dtype I32"),
    "cut off": (cut_file, "model.safetensors is not a safetensors file"),
    "pickle": (only_pickle, "get a safetensors version$"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "init_from .* cannot be read"),
    "impossible config": (lambda folder: change_json(folder / "config.json", hidden_size="x"), "cannot be read"),
    "another model": (lambda folder: change_json(folder / "config.json", rms_norm_eps=1.0), "make them agree"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_unfit_folder_is_one_line(tmp_path: Path, damage: str) -> None:
    spoil, message = DAMAGE[damage]
    save_model(tmp_path, shards=False)
    spoil(tmp_path)
    with pytest.raises(InputError, match=message) as error:
        build_model(InitialValues(run_config(tmp_path), tiny_config(num_key_value_heads=4)))
    assert "\n" not in str(error.value)


def test_affines_are_never_dropped_silently(tmp_path: Path) -> None:
    save_model(tmp_path)
    with pytest.raises(InputError, match=r"has query affines, which model\.query_affine none leaves out"):
        build_model(InitialValues(run_config(tmp_path), tiny_config(num_key_value_heads=4, query_affine="none")))


def test_affines_may_be_added(tmp_path: Path) -> None:
    save_model(tmp_path, query_affine="none")
    wanted: OrthrosConfig = tiny_config(num_key_value_heads=4)
    model = build_model(InitialValues(run_config(tmp_path), wanted))
    assert torch.equal(model.model.layers[0].self_attn.base_query.gain, torch.ones(32))
