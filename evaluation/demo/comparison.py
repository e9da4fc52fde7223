"""What makes the comparison of arms fair: equal weights at the start, equal samples, equal training FLOPs."""

from __future__ import annotations

from typing import Any

from evaluation.demo.steps import StepError
from orthros_train.config import Config, orthros_config
from orthros_train.data import PretrainingData, Tokenizer, batch_indices, collate
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.model.flops import training_flops
from orthros_train.model.parameter_count import parameter_count
from orthros_train.training.batches import segment_lengths


def shared_start(transformer: Config, orthros: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """Build both models as training does, and compare the weights that both have.

    Returns their number and each arm's parameter count. Raises StepError when one weight differs in one bit, or the
    transformer has a weight that Orthros lacks.
    """
    models = {}
    for name, config in (("transformer", transformer), ("orthros", orthros)):
        model = OrthrosForCausalLM(orthros_config(config, tokenizer.vocab_size))
        model.reset_parameters(config.train.seed)
        models[name] = model
    ours = models["orthros"].state_dict()
    theirs = models["transformer"].state_dict()
    for name, weight in theirs.items():
        if name not in ours or not weight.equal(ours[name]):
            raise StepError(f"the arms do not start from the same weights: {name} differs")
    counts = {name: parameter_count(model.config).total for name, model in models.items()}
    return {"weights": len(theirs), "parameters": counts}


def shared_samples(transformer: Config, orthros: Config, tokenizer: Tokenizer) -> int:
    """Number of samples that both arms train on, in the same order. Raises StepError when one differs."""
    first, second = (PretrainingData(config, tokenizer, "train") for config in (transformer, orthros))
    count = transformer.train.steps * transformer.train.global_batch_size
    if first.fingerprint != second.fingerprint or orthros.train.steps != transformer.train.steps:
        raise StepError("the arms do not train on the same data")
    for index in range(count):
        if first.sample_id(index) != second.sample_id(index):
            raise StepError(f"the arms' samples differ from number {index} on")
    return count


def training_flops_per_step(config: Config, tokenizer: Tokenizer, steps: int) -> list[int]:
    """Exact training FLOPs of steps 0 to `steps` - 1, from the segments of their very samples."""
    data = PretrainingData(config, tokenizer, "train")
    model = orthros_config(config, tokenizer.vocab_size)
    return [_step_flops(config, model, data, step) for step in range(steps)]


def steps_for_flops(config: Config, tokenizer: Tokenizer, flops: int) -> list[int]:
    """Training FLOPs of each step of the shortest run of `config` that costs at least `flops` altogether."""
    data = PretrainingData(config, tokenizer, "train")
    model = orthros_config(config, tokenizer.vocab_size)
    spent: list[int] = []
    total = 0
    while total < flops:
        spent.append(_step_flops(config, model, data, len(spent)))
        total += spent[-1]
    return spent


def _step_flops(config: Config, model: OrthrosConfig, data: PretrainingData, step: int) -> int:
    samples = [data.sample(index) for index in batch_indices(step, config.train.global_batch_size)]
    return training_flops(model, segment_lengths(collate(samples))).total
