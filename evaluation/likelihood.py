"""Negative log-likelihood under a model: of the validation set as training defines it, and position by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from orthros_train.data import PretrainingData
    from orthros_train.model import OrthrosForCausalLM


def mean_nll(model: OrthrosForCausalLM, data: PretrainingData, samples: int, batch_size: int = 16) -> tuple[float, int]:
    """NLL in nats per label over the first `samples` samples of `data`, and the number of labels.

    Labels in another segment than their token do not count, exactly as in training.
    """
    import torch  # noqa: PLC0415

    from orthros_train.data import collate  # noqa: PLC0415

    total, labels = 0.0, 0
    with torch.inference_mode():
        for start in range(0, samples, batch_size):
            batch = collate([data.sample(index) for index in range(start, min(start + batch_size, samples))])
            batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
            count = int((batch["shift_labels"] != -100).sum())
            if count:
                output = model(**batch, num_items_in_batch=1, use_cache=False, return_logits=False)
                total += float(output.loss)
                labels += count
    return total / labels, labels


def nll_by_position(model: OrthrosForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """NLL in nats of each token given those before it in its row.

    Args:
        model: on any device.
        rows: (n, T + 1) int64 token ids, each row the beginning of a text.

    Returns:
        (n, T) float32 on the CPU; column p is of the token after p + 1 tokens.
    """
    import torch  # noqa: PLC0415

    found = []
    with torch.inference_mode():
        for row in rows.to(model.device):  # one at a time: the logits of a long row are large already
            logits = model(row[None, :-1], use_cache=False).logits  # (1, T, vocab)
            found.append(torch.nn.functional.cross_entropy(logits[0].float(), row[1:], reduction="none").cpu())
    return torch.stack(found)
