"""README.md of an Orthros folder: what the Hub reads in its front matter, and what a person should know."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData

if TYPE_CHECKING:
    from orthros_train.model import OrthrosConfig

PAPER = "[arXiv:2610.13735](https://arxiv.org/abs/2610.13735)"
INHERITED = ("license", "license_name", "license_link", "language")  # of the source's own card

_BODY = """\
# {title}

{origin}

An Orthros model carries two token streams through the same layers. The **base stream** has a token at every position,
{base},
and is the only writer of the KV cache, which keeps every position. The **output stream** has a token only where a next
token is predicted; it reads the whole cache. The streams share all weights but a per-channel gain and shift of their
queries. {state}

| | |
| --- | --- |
| parameters | {parameters:,} |
| layers, width, query heads, KV heads, head size | {shape} |
| vocabulary | {vocab_size:,} |
| positions | {positions:,} |
| base window, sinks | {window}, {sinks} |

## Use

The folder brings its own model code, so it needs no more than torch and transformers (made with {version}):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
prompt = tokenizer("The sky is", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20)[0]))
```

`generate` runs prefill and decoding over one cache. By hand, with room for 100 tokens to come, so that no step copies
the cache:

```python
ids = prompt["input_ids"]
logits, cache = model.prefill(ids, capacity=ids.shape[1] + 100)
logits = model.decode(logits.argmax(-1), cache)
```

## Reference

The method is that of "Orthros: phase-heterogeneous attention", {paper}.
This model was not made by the paper's authors, and none of their results is claimed for it.

```bibtex
@misc{{orthros,
  title  = {{Orthros: phase-heterogeneous attention}},
  eprint = {{2610.13735}},
  archivePrefix = {{arXiv}}
}}
```
"""


def write_model_card(
    folder: Path,
    config: OrthrosConfig,
    *,
    name: str,
    origin: str,
    state: str,
    parameters: int,
    base_model: str | None = None,
    source: Path | None = None,
) -> None:
    """Write README.md.

    Args:
        folder: the model's folder.
        config: of the model.
        name: how the card calls the model.
        origin: sentences that say where the weights come from.
        state: sentences that say how far the model has been trained as an Orthros.
        parameters: their number.
        base_model: the source's name on the Hub, where it has one.
        source: a folder whose own card gives license and language.
    """
    inherited = inherited_metadata(source) if source is not None else {}
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["orthros"],
        base_model=base_model,
        **inherited,
    )
    window = config.base_window
    sees = "attends to the whole history" if window is None else f"attends to the last {window:,} tokens"
    if config.base_sinks:
        sees += " and to the first one" if config.base_sinks == 1 else f" and to the first {config.base_sinks:,}"
    body = _BODY.format(
        title=name,
        name=name,
        origin=origin,
        state=state,
        base=sees,
        parameters=parameters,
        shape=", ".join(map(str, (config.num_hidden_layers, config.hidden_size, *config.head_shape))),
        vocab_size=config.vocab_size,
        positions=config.max_position_embeddings,
        window="the whole history" if window is None else f"{window:,}",
        sinks=config.base_sinks,
        version=transformers.__version__,
        paper=PAPER,
    )
    (folder / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n\n{body}", encoding="utf-8")


def inherited_metadata(source: Path) -> dict[str, Any]:
    """License and language as the card of the folder `source` states them; empty if it has none that can be read."""
    card = source / "README.md"
    if not card.is_file():
        return {}
    try:
        data = ModelCard(card.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.to_dict()
    except (ValueError, yaml.YAMLError):  # a card that the Hub, too, would not understand
        return {}
    return {key: data[key] for key in INHERITED if key in data}


def hub_name(raw_name: object) -> str | None:
    """A name such as `organization/model`, or None for a path or nothing."""
    return raw_name if isinstance(raw_name, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", raw_name) else None
