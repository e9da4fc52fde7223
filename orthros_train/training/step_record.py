"""The record of one step, gathered from all ranks."""

from __future__ import annotations

import statistics

from orthros_train.model.flops import palm_flops_per_token, training_flops
from orthros_train.training.batches import StepBatch
from orthros_train.training.device_peaks import peak_flops
from orthros_train.training.engine import StepResult
from orthros_train.training.manifest import Progress
from orthros_train.training.metrics import Record, finite_or_none, memory_peak_gib
from orthros_train.training.run import Run
from orthros_train.training.stragglers import ForwardClock, Stragglers, timed_modules
from orthros_train.training.window_schedule import base_window


class StepRecorder:
    """Turns what each rank measured into a line of metrics.jsonl.

    MFU is model FLOPs over what the devices could have done in the step's time. `mfu_exact` counts what was executed
    (both streams, the pairs that segments and window leave visible, no recomputation); `mfu_palm` is 6·N + 12·L·H·d·T
    a base token. Both are null where the device's peak is unknown. Of the ranks' own forward passes (`stragglers.py`)
    the record has the range and who was slowest.
    """

    def __init__(self, run: Run) -> None:
        train = run.config.train
        self._ranks, self._speaks = run.ranks, run.mesh.speaks
        self._attempt = run.folder.attempt
        modules = timed_modules(run.engine.module, gathers_weights=run.config.parallel.zero_stage == 3)
        self._forward = ForwardClock(modules, run.ranks.device)
        stages = run.ranks.gather([run.mesh.pipeline_rank])[:, 0].tolist()
        self.stragglers = Stragglers(run.ranks.peers.hosts, stages)
        self._model_config = run.model_config
        self._scheduled = run.config.adaptation.start_window is not None
        self._tokens = train.global_batch_size * train.sequence_length
        self._peak = peak_flops(run.config, run.ranks.device)
        self._palm_flops = self._tokens * palm_flops_per_token(run.model_config, train.sequence_length)

    def record(
        self,
        batch: StepBatch,
        result: StepResult,
        progress: Progress,
        *,
        labels: int,
        learning_rate: float,
        window: int | None,
        step_seconds: float,
        data_wait_seconds: float,
    ) -> Record:
        """The record of the step that led to `progress`; collective, the same on all ranks."""
        flops = self._executed_flops(batch, window) if labels else 0
        memory = memory_peak_gib(self._ranks.device)
        outputs = sum(batch.segment_lengths) if batch.output_columns is None else len(batch.output_columns)
        shares = [result.loss, flops, outputs] if self._speaks else [0, 0, 0]
        rows = self._ranks.gather([*shares, self._forward.take(), memory, data_wait_seconds, step_seconds])
        forward = rows[:, -4].tolist()
        self.stragglers.add(forward)
        slowest = self.stragglers.slowest(forward)
        loss, flops, outputs, *_ = rows.sum(dim=0).tolist()
        *_, memory, wait, seconds = rows.max(dim=0).values.tolist()
        return {
            "step": progress.step,
            "loss": finite_or_none(loss),
            "learning_rate": learning_rate,
            "grad_norm": finite_or_none(result.grad_norm),
            "tokens_seen": progress.step * self._tokens,
            "loss_tokens": labels,
            "output_tokens": int(outputs),  # computed ones: slots that fill up a row's M are among them
            "tokens_per_second": self._tokens / seconds,
            "step_seconds": seconds,
            "data_wait_seconds": wait,
            "forward_seconds_min": min(forward),
            "forward_seconds_median": statistics.median(forward),
            "forward_seconds_max": max(forward),
            "slowest_rank": slowest,
            "slowest_host": self._ranks.peers.hosts[slowest],
            "memory_peak_gib": memory,
            "mfu_exact": self._utilization(flops, seconds),
            "mfu_palm": self._utilization(self._palm_flops if labels else 0, seconds),
            "skipped_steps": progress.skipped_steps,
            "attempt": self._attempt,
            **({"base_window": window} if self._scheduled else {}),
        }

    def _executed_flops(self, batch: StepBatch, window: int | None) -> int:
        if self._peak is None:
            return 0
        with base_window(self._model_config, window):
            return training_flops(self._model_config, batch.segment_lengths, batch.output_columns).total

    def _utilization(self, flops: float, seconds: float) -> float | None:
        return None if self._peak is None else flops / (self._peak * self._ranks.world_size * seconds)
