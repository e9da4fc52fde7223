"""The section `adaptation`: how a converted model is brought to work with its window, with few tokens."""

from __future__ import annotations

from typing import Literal, Protocol, Self

from pydantic import Field, model_validator

from .config_section import Section


class _Model(Protocol):
    """What the checks read of the section `model`."""

    architecture: Literal["orthros", "transformer"]
    query_affine: Literal["elementwise", "none"] | None
    base_window: int | None


class DistillationSection(Section):
    """Loss = (1 - weight) · cross entropy + weight · KL(teacher || model), both at the same output positions."""

    weight: float = Field(default=0.0, ge=0, le=1)  # 0: no teacher
    temperature: float = Field(default=1.0, gt=0)  # of both distributions; the KL is multiplied by its square
    teacher: str | None = None  # an Orthros folder, run as a full-attention transformer; None: init_from


class AdaptationSection(Section):
    """What trains, through which window, and towards what."""

    freeze: Literal["none", "all_but_affines"] = "none"
    # The base window is start_window at first, halved at equal intervals down to model.base_window after window_steps.
    start_window: int | None = Field(default=None, ge=1)
    window_steps: int | None = Field(default=None, ge=1)
    distillation: DistillationSection = DistillationSection()

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if (self.start_window is None) != (self.window_steps is None):
            given, missing = ("start_window", "window_steps")[:: 1 if self.window_steps is None else -1]
            raise ValueError(f"adaptation.{given} needs adaptation.{missing}: set both or neither")
        return self


def check_adaptation(adaptation: AdaptationSection, model: _Model, init_from: str | None) -> None:
    """Raise ValueError, naming the options and the remedy, if `adaptation` asks for what the model does not have."""
    if adaptation.freeze == "all_but_affines" and (model.architecture == "transformer" or model.query_affine == "none"):
        raise ValueError(
            "adaptation.freeze: all_but_affines leaves nothing to train, since the model has no query affines: set "
            "model.architecture: orthros and model.query_affine: elementwise, or adaptation.freeze: none"
        )
    if adaptation.start_window is not None:
        if model.base_window is None:
            raise ValueError(
                "adaptation.start_window shrinks to model.base_window, which is null: set model.base_window, or remove "
                "adaptation.start_window"
            )
        if adaptation.start_window <= model.base_window:
            raise ValueError(
                f"adaptation.start_window ({adaptation.start_window}) must be more than model.base_window "
                f"({model.base_window}), to which it shrinks: raise it or remove it"
            )
    distillation = adaptation.distillation
    if distillation.weight > 0 and distillation.teacher is None and init_from is None:
        raise ValueError(
            "adaptation.distillation.weight needs a teacher: set init_from (the model that training starts from), or "
            "adaptation.distillation.teacher"
        )
    if distillation.weight == 0 and distillation.teacher is not None:
        raise ValueError(
            "adaptation.distillation.teacher has no effect with adaptation.distillation.weight: 0: set the weight, or "
            "remove the teacher"
        )


def check_teacher_layout(adaptation: AdaptationSection, tensor: int, pipeline: int) -> None:
    """Raise ValueError if a teacher is wanted in a layout that has no place for one."""
    if adaptation.distillation.weight == 0:
        return
    for name, size, reason in (
        ("pipeline", pipeline, "the last stage alone has logits, and a teacher would need all layers on it"),
        ("tensor", tensor, "each rank has the logits of a part of the vocabulary, and KL needs them all"),
    ):
        if size > 1:
            raise ValueError(
                f"adaptation.distillation does not go with parallel.{name} ({size}), where {reason}: set "
                f"parallel.{name}: 1 (parallel.zero_stage 2 or 3 shares the memory), or "
                "adaptation.distillation.weight: 0"
            )
