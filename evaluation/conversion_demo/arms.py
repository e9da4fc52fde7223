"""The arms of the conversion demo: one source model, run three ways."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """One way to run the source's weights.

    Attributes:
        name: of its folders and results.
        folder: of the converted model that it starts from.
        overrides: options of its training run.
        sinks: base sinks; None: the transformer has none.
    """

    name: str
    folder: str
    overrides: tuple[str, ...]
    sinks: int | None


AS_TRANSFORMER = (
    "model.architecture=transformer",
    "model.base_window=null",
    "model.base_sinks=0",
    "adaptation.distillation={weight: 0.0}",  # it would be its own teacher
)
SOURCE = Arm("transformer", "transformer", AS_TRANSFORMER, None)
CONVERTED = (
    Arm("orthros-0-sinks", "orthros", ("model.base_sinks=0",), 0),
    Arm("orthros-1-sink", "orthros", ("model.base_sinks=1",), 1),
)
ARMS = (SOURCE, *CONVERTED)
