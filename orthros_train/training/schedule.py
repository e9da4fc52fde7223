"""The learning rate as a pure function of the step.

Nothing is remembered between steps, so a resumed run cannot continue with a wrong rate. `step` is 1-based: step n is
the update that makes checkpoint step_n. With W warm-up steps and peak p:

* n <= W: p · n / W;
* cosine, linear: from p at n = W down to p · min_lr_ratio after `decay_steps` (None: at the last step), then constant;
* wsd (warm-up, stable, decay): p until the last `decay_steps` steps (None: a tenth of the run), then linear;
* constant: p.
"""

from __future__ import annotations

import math

from orthros_train.config import ScheduleSection


def learning_rate(schedule: ScheduleSection, peak: float, steps: int, step: int) -> float:
    """Learning rate of update `step` (1 <= step <= steps) in a run of `steps` updates."""
    if step <= schedule.warmup_steps:
        return peak * (step / schedule.warmup_steps)
    progress = _decay_progress(schedule, steps, step)
    if progress == 0.0:
        return peak
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.type == "cosine" else 1.0 - progress
    floor = peak * schedule.min_lr_ratio
    return floor + (peak - floor) * left


def _decay_progress(schedule: ScheduleSection, steps: int, step: int) -> float:
    """How much of the decay update `step` has behind it: 0 at the peak, 1 at the floor."""
    if schedule.type == "constant":
        return 0.0
    if schedule.type == "wsd":
        length = schedule.decay_steps if schedule.decay_steps is not None else max(1, round(steps / 10))
        start, end = max(schedule.warmup_steps, steps - length), steps
    else:
        start = schedule.warmup_steps
        end = steps if schedule.decay_steps is None else start + schedule.decay_steps
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))
