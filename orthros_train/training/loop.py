"""The training loop: what `python -m orthros_train` runs on every rank.

A step: take the batch; agree on the number of labels and on stopping, in one exchange; forward, backward and update, or
skip together; record; evaluate, save and report where due. All decisions are made by all ranks from the same numbers.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from orthros_train.config import Config
from orthros_train.errors import InputError
from orthros_train.launch_protocol import BAD_INPUT, DONE, FAILED, STOPPED
from orthros_train.training.batches import BatchLoader
from orthros_train.training.engine import StepResult
from orthros_train.training.evaluation import evaluate, finish_evaluation
from orthros_train.training.failures import TrainingFailureError
from orthros_train.training.lost_ranks import lost_rank
from orthros_train.training.metrics import Record
from orthros_train.training.ranks import Ranks, start_ranks
from orthros_train.training.run import Run, prepare_run
from orthros_train.training.run_folder import FolderBusyError, RunFolder, now
from orthros_train.training.schedule import learning_rate
from orthros_train.training.step_record import StepRecorder
from orthros_train.training.stopping import StopRequests, describe
from orthros_train.training.suites import OpenSuites
from orthros_train.training.watchdog import Watchdog
from orthros_train.training.window_schedule import base_window, scheduled_window

SKIPPED = StepResult(loss=float("nan"), grad_norm=float("nan"), applied=False)


def train(config: Config, command: Sequence[str], open_suites: OpenSuites | None = None) -> int:
    """Train as `config` says, on from the newest valid checkpoint of its output_dir; every rank calls this.

    Args:
        command: the command line, for the receipt.
        open_suites: how the suites of `evaluation.suites` are scored; evaluation.during_training has it.

    Returns:
        0 when train.steps are done, 75 when stopped with a checkpoint saved, 1 when the run cannot go on.

    Raises:
        InputError: bad input, on all ranks.
    """
    stop = StopRequests(time.monotonic(), config.train.wall_clock_limit_seconds)
    with stop.handling_signals():
        if config.parallel.tensor > 1:  # what it says to CUDA is heard before CUDA starts
            import orthros_train.parallel.quiet_megatron  # noqa: F401, PLC0415
        ranks = start_ranks(config.parallel.timeout_seconds)
        folder = RunFolder(config)
        ranks.on_main(folder.inspect)
        silence = config.parallel.resolved_watchdog_seconds
        watchdog = Watchdog(silence, ranks.rank, folder.path / "stacks" / f"rank_{ranks.rank:05d}.txt")
        attempt = Attempt(ranks, folder)
        try:
            with watchdog:
                return _run_attempt(config, command, attempt, stop, watchdog, open_suites)
        except TrainingFailureError as failure:
            attempt.fail(FAILED, str(failure))
            if ranks.is_main:
                print(f"error: {failure}", file=sys.stderr)
            return FAILED
        except FolderBusyError:
            raise  # the folder belongs to the other process
        except InputError as error:
            attempt.fail(BAD_INPUT, str(error))
            raise
        except BaseException as error:
            lost = lost_rank(error, ranks.rank, attempt.moment, ranks.peers.missing)
            attempt.fail(FAILED, lost or f"{type(error).__name__}: {error}")
            if lost is None:
                raise
            print(f"error: {lost}", file=sys.stderr)  # by every rank: the first may be the one that was lost
            return FAILED
        finally:
            folder.release()


@dataclass
class Attempt:
    """How an attempt ends in status.json and receipt.json. A folder that is not the run's own is never written to."""

    ranks: Ranks
    folder: RunFolder
    run: Run | None = None

    @property
    def moment(self) -> str:
        """When something happens to it, in words."""
        return "while it started" if self.run is None else f"after step {self.run.progress.step}"

    def end(self, state: str, exit_code: int, reason: str | None = None) -> int:
        """Record the end and return the exit code."""
        if self.ranks.is_main:
            last = (self.folder.read_status() or {}).get("step", 0)
            step = last if self.run is None else self.run.progress.step
            self.folder.write_status(state, step, exit_code, reason)
            self.folder.close_receipt(end=now(), last_step=step, exit_code=exit_code)
        return exit_code

    def end_together(self, state: str, exit_code: int, reason: str | None = None) -> int:
        """`end` on all ranks: none leaves before it is recorded, since launchers kill the rest when one has left."""
        return self.ranks.share(self.end(state, exit_code, reason))

    def fail(self, exit_code: int, reason: str) -> None:
        """Record a failure where there is a folder to record it in."""
        if self.run is not None:
            self.run.close()
        if self.folder.claim():
            with contextlib.suppress(OSError, InputError):  # a full disk must not hide what failed
                self.end("failed", exit_code, reason)


def _run_attempt(
    config: Config,
    command: Sequence[str],
    attempt: Attempt,
    stop: StopRequests,
    watchdog: Watchdog,
    open_suites: OpenSuites | None,
) -> int:
    _set_determinism(config)
    run = prepare_run(config, command, attempt.ranks, stop, attempt.folder, watchdog, open_suites)
    attempt.run = run
    run.report.start()
    reason = _train_steps(run)
    if reason is not None:
        reason = stop.explain(reason)  # on rank 0, which alone watches the file and says it
    run.save()
    if reason is not None and run.ranks.is_main:
        stop.consume()
    run.close()
    if reason is not None:
        run.report.say(f"stopped after step {run.progress.step}: {reason}")
        return attempt.end_together("stopped", STOPPED, reason)
    run.report.say(f"done: {run.progress.step} steps in {config.output_dir}")
    return attempt.end_together("done", DONE)


def _set_determinism(config: Config) -> None:
    """On CUDA: only kernels that repeat bitwise. The CPU's are so anyway."""
    if config.train.deterministic and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _train_steps(run: Run) -> str | None:
    """Train until train.steps are done (None) or the ranks agree to stop (the reason)."""
    config = run.config
    reason = finish_evaluation(run)
    recorder = StepRecorder(run)
    loader = BatchLoader(run.train_data, config, run.mesh, first_step=run.progress.step)
    try:
        while reason is None and run.progress.step < config.train.steps:
            reason = _one_step(run, loader, recorder)
    finally:
        loader.close()
    return reason


def _one_step(run: Run, loader: BatchLoader, recorder: StepRecorder) -> str | None:
    """One step and whatever is due after it; a reason to stop, if there is one."""
    config, ranks = run.config, run.ranks
    run.watchdog.beat(f"step {run.progress.step + 1}")
    started = time.perf_counter()
    batch, waited = loader.take(give_up=lambda: run.stop.code() != 0)
    header = ranks.gather([batch.valid_labels if batch is not None and run.mesh.speaks else 0, run.stop.code()])
    reason = describe(header[:, 1].tolist())
    if reason is not None:
        return reason
    assert batch is not None, "only a rank with a reason to stop gives up waiting"
    labels = int(header[:, 0].sum())
    step = run.progress.step + 1
    rate = learning_rate(config.schedule, config.optimizer.learning_rate, config.train.steps, step)
    window = scheduled_window(config.adaptation, config.model.base_window, step)
    with base_window(run.engine.model_config, window):
        result = run.engine.step(batch.micro_batches, labels, rate) if labels else SKIPPED
    run.progress = run.progress.after_step(config.train.global_batch_size, result.applied)
    record = recorder.record(
        batch,
        result,
        run.progress,
        labels=labels,
        learning_rate=rate,
        window=window,
        step_seconds=time.perf_counter() - started,
        data_wait_seconds=waited,
    )
    if record["step"] % config.logging.interval_steps == 0 and (slow := recorder.stragglers.describe()) is not None:
        run.report.warn(f"step {record['step']}: {slow}")
    return _after_step(run, record)


def _after_step(run: Run, record: Record) -> str | None:
    """Record, evaluate, save and report a step; a reason to stop, if there is one."""
    if run.progress.consecutive_skips:
        cause = "the whole batch has no label" if record["loss_tokens"] == 0 else "its loss or gradient is not finite"
        run.report.warn(f"step {record['step']} skipped: {cause}")
    late, reason = evaluate(run)
    record.update(late)
    if run.metrics is not None:
        run.metrics.append(record)
    run.report.step(record)
    _stop_skipping(run)
    if checkpoint_due(run.config, record["step"]):
        run.save()
    if run.ranks.is_main and record["step"] % run.config.logging.interval_steps == 0:
        run.folder.write_status("running", record["step"])
    return reason


def _stop_skipping(run: Run) -> None:
    """Raise TrainingFailureError after too many skipped steps in a row."""
    skips = run.progress.consecutive_skips
    if skips >= run.config.train.max_consecutive_skips:
        raise TrainingFailureError(
            f"{skips} steps in a row were skipped, the last is step {run.progress.step}: their losses or gradients "
            "were not finite, or their batches had no labels; look at the data, lower optimizer.learning_rate, or "
            "lengthen schedule.warmup_steps"
        )


def checkpoint_due(config: Config, step: int) -> bool:
    """Whether a checkpoint follows `step`. The last step's is saved at the end of the run."""
    interval = config.checkpoint.interval_steps
    return interval is not None and step % interval == 0
