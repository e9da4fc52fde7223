"""Small random models for the tests of this folder."""

from typing import Any

import torch

from orthros_train.model import OrthrosConfig, OrthrosForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tiny_config(**changes: Any) -> OrthrosConfig:
    """A configuration with three layers, two query heads a KV head and a window of 5."""
    return OrthrosConfig(**{**SHAPE, "initializer_range": 0.3, "base_window": 5, **changes})


def tiny_model(dtype: torch.dtype = torch.float64, **changes: Any) -> OrthrosForCausalLM:
    """An eval-mode model whose affines, norms and biases are away from their starting values."""
    model = OrthrosForCausalLM(tiny_config(**changes)).eval()
    model.reset_parameters(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def token_ids(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random token ids (rows, columns)."""
    return torch.randint(0, SHAPE["vocab_size"], (rows, columns), generator=torch.Generator().manual_seed(seed))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, bound: float = 1e-9) -> None:
    """max|Δ| <= bound · max(1, max|expected|), and equal shapes."""
    assert actual.shape == expected.shape
    if expected.numel() == 0:
        return
    actual, expected = actual.detach(), expected.detach()
    difference = float((actual - expected).abs().max())
    allowed = bound * max(1.0, float(expected.abs().max()))
    assert difference <= allowed, f"max difference {difference:.3e} > {allowed:.3e}"
