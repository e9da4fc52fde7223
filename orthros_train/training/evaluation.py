"""What is measured after a step: the validation loss, and benchmark suites.

Neither changes model, optimizer or any random generator, so the losses of a run are the same with and without them.
What a stop cuts short is done by the next attempt, from the very weights of that step.
"""

from __future__ import annotations

from orthros_train.config import Config
from orthros_train.model import OrthrosForCausalLM
from orthros_train.training.manifest import step_folder
from orthros_train.training.metrics import Record, finite_or_none
from orthros_train.training.run import Run
from orthros_train.training.validation import validate

EVALUATION_FOLDER = "evaluation"  # of a run: a folder of records for each step after which suites were scored


def validation_due(config: Config, step: int, has_data: bool) -> bool:
    """Whether validation follows `step`: at every interval and at the end."""
    return has_data and _due(config, step, config.evaluation.interval_steps)


def suites_due(config: Config, step: int) -> bool:
    """Whether suites are scored after `step`: at every interval and at the end."""
    suites = config.evaluation.suites
    return bool(suites.names) and _due(config, step, suites.interval_steps)


def _due(config: Config, step: int, interval: int | None) -> bool:
    return step == config.train.steps or (interval is not None and step % interval == 0)


def evaluate(run: Run, done: Record | None = None) -> tuple[Record, str | None]:
    """What the step just done adds to its record, and a reason to stop before all of it was measured, if there is one.

    Collective; the figures are rank 0's.

    Args:
        done: the step's record so far; what it holds is not measured again.
    """
    late: Record = {}
    step, reason, done = run.progress.step, None, done or {}
    if "validation_loss" not in done and validation_due(run.config, step, run.validation_data is not None):
        figures, reason = _validation_loss(run)
        late |= figures
    if reason is None and "suites" not in done and suites_due(run.config, step):
        figures, reason = _suite_scores(run)
        late |= figures
    return late, reason


def finish_evaluation(run: Run) -> str | None:
    """Measure what a stop had cut short after the step resumed from; a reason to stop again, if there is one."""
    step = run.progress.step
    if step == 0:
        return None
    last = None if run.metrics is None else run.metrics.last
    done = run.ranks.share(last if last is not None and last["step"] == step else None)
    if done is None:
        return None
    late, reason = evaluate(run, done)
    if run.metrics is not None and late:
        run.report.step(run.metrics.amend(**late))
    return reason


def _validation_loss(run: Run) -> tuple[Record, str | None]:
    assert run.validation_data is not None
    moment = f"validation after step {run.progress.step}"
    loss, reason = validate(
        run.engine, run.validation_data, run.config, run.stop, beat=lambda: run.watchdog.beat(moment)
    )
    return ({} if loss is None else {"validation_loss": finite_or_none(loss)}), reason


def _suite_scores(run: Run) -> tuple[Record, str | None]:
    """Ranks score documents of their own and hear of a stop between their batches, without waiting for each other."""
    model, step = run.engine.module, run.progress.step
    assert run.suites is not None
    assert isinstance(model, OrthrosForCausalLM), "the configuration refuses other layouts"

    def give_up() -> bool:
        run.watchdog.beat(f"suites after step {step}")
        return run.stop.heard(run.ranks)

    with run.report.paused():
        scores = run.suites(model, run.folder.path / EVALUATION_FOLDER / step_folder(step), give_up)
    if scores is None:
        return {}, run.stop.agreed(run.ranks)
    return {"suites": {name: finite_or_none(value) for name, value in scores.items()}}, None
