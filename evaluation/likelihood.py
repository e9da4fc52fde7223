"""Negative log-likelihood of the validation set under a model, as training defines it: sum over labels / labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
