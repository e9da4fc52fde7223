"""A run, assembled: everything that an attempt holds while it trains.

Order matters. Whatever can be wrong with the input is found before anything is written; the folder is opened only then;
the expensive parts (model, engine, state) come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from orthros_train.config import Config, gradient_accumulation_steps, orthros_config
from orthros_train.data import Tokenizer, load_tokenizer
from orthros_train.data.samples import Samples
from orthros_train.data.tokenizers import special_token_ids
from orthros_train.errors import InputError
from orthros_train.model import OrthrosConfig
from orthros_train.model.attention_kernels import choose_kernel
from orthros_train.model.parameter_count import parameter_count
from orthros_train.model_folder.json_files import write_json
from orthros_train.parallel.factory import factory_for
from orthros_train.parallel.mesh import Mesh, mesh_of
from orthros_train.training.checkpoint_folders import checkpoint_folders
from orthros_train.training.checkpoints import (
    Choice,
    choose_checkpoint,
    clean_up,
    save_checkpoint,
)
from orthros_train.training.disk_space import check_disk_space
from orthros_train.training.distillation import load_teacher
from orthros_train.training.engine import TrainingEngine
from orthros_train.training.engines import build_engine, build_module
from orthros_train.training.freezing import freeze
from orthros_train.training.generation_settings import GENERATION_FILE, generation_settings
from orthros_train.training.initial_model import InitialValues
from orthros_train.training.lost_ranks import limit_waiting
from orthros_train.training.manifest import Layout, Manifest, Progress
from orthros_train.training.metrics import MetricsLog
from orthros_train.training.progress_report import ProgressReport
from orthros_train.training.ranks import Ranks
from orthros_train.training.run_data import conversations_of, data_notes, training_data, validation_data
from orthros_train.training.run_folder import (
    RunFolder,
    build_receipt,
    installed_versions,
    now,
    refuse_other_run,
)
from orthros_train.training.schedule import learning_rate
from orthros_train.training.state_files import load_state
from orthros_train.training.state_pieces import start_from_fp32
from orthros_train.training.stopping import StopRequests
from orthros_train.training.suites import OpenSuites, SuiteScorer, open_on_all
from orthros_train.training.watchdog import Watchdog


@dataclass
class Run:
    """One attempt at a run. `metrics` exists on rank 0 only; `progress` moves on with every step."""

    config: Config
    ranks: Ranks
    mesh: Mesh
    stop: StopRequests
    watchdog: Watchdog
    folder: RunFolder
    tokenizer: Tokenizer
    model_config: OrthrosConfig
    generation: dict[str, Any] | None  # content of generation_config.json; None: what transformers makes of the model
    train_data: Samples
    validation_data: Samples | None
    suites: SuiteScorer | None
    engine: TrainingEngine
    report: ProgressReport
    metrics: MetricsLog | None
    progress: Progress
    saved_step: int | None  # of the newest checkpoint that holds `progress`

    def save(self) -> None:
        """Save a checkpoint of the current step, unless there is one; collective."""
        if self.saved_step == self.progress.step:
            return
        self.watchdog.beat(f"saving step {self.progress.step}")
        manifest = Manifest(
            progress=self.progress,
            layout=layout_of(self.config, self.ranks),
            config=self.config.model_dump(mode="json"),
            fingerprints=fingerprints(self.tokenizer, self.train_data),
            versions=installed_versions(),
            saved_at=now(),
        )

        def write_hf_files(folder: Path) -> None:
            _save_hf_files(folder, self.model_config, self.generation, self.tokenizer, self.train_data)

        if self.metrics is not None:
            self.metrics.sync()
        path, leftover = save_checkpoint(
            self.engine, self.folder.checkpoints, manifest, write_hf_files, self.config.checkpoint.keep_last
        )
        self.saved_step = self.progress.step
        self.report.say(f"saved {path}")
        if leftover is not None:
            self.report.warn(f"{leftover}; the next save tries again")

    def close(self) -> None:
        """Close the logs and the progress line."""
        if self.metrics is not None:
            self.metrics.close()
        self.report.close()


def layout_of(config: Config, ranks: Ranks) -> Layout:
    """How this process group lays the state over ranks."""
    parallel = config.parallel
    return Layout(ranks.world_size, parallel.zero_stage, parallel.tensor, parallel.pipeline, config.precision)


def fingerprints(tokenizer: Tokenizer, data: Samples) -> dict[str, str]:
    """What identifies the tokens that a run sees."""
    return {"tokenizer": tokenizer.fingerprint, "data": data.fingerprint}


def _save_hf_files(
    folder: Path,
    model_config: OrthrosConfig,
    generation: dict[str, Any] | None,
    tokenizer: Tokenizer,
    data: Samples,
) -> None:
    """What a Hugging Face folder of the model holds besides weights."""
    model_config.to_json_file(folder / "config.json")
    if generation is not None:
        write_json(folder / GENERATION_FILE, generation)
    tokenizer.save_pretrained(folder)
    conversations = conversations_of(data)
    if conversations is not None:
        conversations.template.save(folder)


def prepare_run(
    config: Config,
    command: Sequence[str],
    ranks: Ranks,
    stop: StopRequests,
    folder: RunFolder,
    watchdog: Watchdog,
    open_suites: OpenSuites | None = None,
) -> Run:
    """Check the input, open the folder, build the model and load the newest valid checkpoint; collective.

    Raises:
        InputError: on all ranks, before anything is written.
    """
    accumulation = ranks.together(lambda: gradient_accumulation_steps(config, ranks.world_size))
    mesh = mesh_of(config.parallel)
    watchdog.beat("reading the data")
    tokenizer = ranks.together(lambda: load_tokenizer(config.tokenizer))
    train_data = ranks.together(lambda: training_data(config, tokenizer))
    held_out = ranks.together(lambda: validation_data(config, tokenizer))
    model_config = ranks.together(lambda: orthros_config(config, tokenizer.vocab_size))
    init_from = None if config.init_from is None else Path(config.init_from)
    special, generation = ranks.together(lambda: generation_settings(init_from, special_token_ids(tokenizer)))
    model_config.update(special)
    ranks.together(lambda: _check_kernel(config, model_config, ranks))
    watchdog.beat("opening the suites")
    suites = open_on_all(
        config,
        ranks,
        open_suites,
        lambda folder: _save_hf_files(folder, model_config, generation, tokenizer, train_data),
    )
    identity = fingerprints(tokenizer, train_data)
    watchdog.beat("verifying the checkpoint")
    choice = choose_checkpoint(folder.checkpoints, ranks)
    progress = Progress() if choice is None else choice.manifest.progress
    if choice is not None:
        ranks.together(lambda: _check_same_run(choice, config, identity))
    ranks.on_main(lambda: _check_disk(folder, config, model_config, progress))
    watchdog.beat("building the model")
    values = ranks.together(lambda: InitialValues(config, model_config, factory_for(model_config, mesh)))
    module = ranks.together(lambda: build_module(config, mesh, values))
    ranks.together(lambda: freeze(module, config.adaptation))
    teacher = ranks.together(lambda: load_teacher(config, model_config, ranks.device))

    report = ProgressReport(config.train.steps, progress.step, config.logging.interval_steps, shown=ranks.is_main)
    folder.attempt = ranks.on_main(lambda: _open_folder(folder, stop, choice, report))
    for note in data_notes(train_data, tokenizer):
        report.say(note)
    metrics = None
    if ranks.is_main:
        receipt = build_receipt(config, command, ranks, folder.attempt, progress.step, identity)
        metrics = _start_records(folder, receipt, config)
    report.say(_describe(config, model_config, ranks, progress))
    watchdog.beat("building the engine")
    engine = build_engine(module, config, ranks, mesh, accumulation, teacher)
    limit_waiting(ranks, config.parallel.timeout_seconds)
    if choice is not None:
        _say_changes(choice, config, layout_of(config, ranks), report)
        load_state(engine, choice.path, choice.manifest)
    elif config.precision == "bf16":
        start_from_fp32(engine, values)
    return Run(
        config=config,
        ranks=ranks,
        mesh=mesh,
        stop=stop,
        watchdog=watchdog,
        folder=folder,
        tokenizer=tokenizer,
        model_config=model_config,
        generation=generation,
        train_data=train_data,
        validation_data=held_out,
        suites=suites,
        engine=engine,
        report=report,
        metrics=metrics,
        progress=progress,
        saved_step=None if choice is None else progress.step,
    )


def _check_kernel(config: Config, model_config: OrthrosConfig, ranks: Ranks) -> None:
    try:
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        choose_kernel(model_config.attention_kernel, ranks.device, dtype, True, model_config.head_shape[2])
    except ValueError as error:
        raise InputError(f"model.{error}") from error


def _check_same_run(choice: Choice, config: Config, identity: dict[str, str]) -> None:
    try:
        recorded = Config.model_validate(choice.manifest.config)
    except ValidationError as error:
        raise InputError(f"{choice.path} was saved with options that this version does not know: {error}") from error
    refuse_other_run(recorded, config, choice.path)
    for name, value in identity.items():
        if choice.manifest.fingerprints.get(name) != value:
            raise InputError(
                f"{choice.path} was trained with another {name} (its fingerprint differs); "
                f"restore the {name} or choose another output_dir"
            )
    if choice.manifest.progress.step > config.train.steps:
        raise InputError(
            f"{choice.path} is past train.steps ({config.train.steps}); raise train.steps or choose another output_dir"
        )


def _check_disk(folder: RunFolder, config: Config, model_config: OrthrosConfig, progress: Progress) -> None:
    parameters = parameter_count(model_config).total
    existing = len(checkpoint_folders(folder.checkpoints))
    check_disk_space(folder.path, config, parameters, progress.step, existing)


def _open_folder(folder: RunFolder, stop: StopRequests, choice: Choice | None, report: ProgressReport) -> int:
    """Take the folder over, tidied up; the number of this attempt."""
    folder.open()
    if not folder.is_locked:
        report.warn(
            f"the file system of {folder.path} offers no locks, so a second training here would not be noticed and "
            "both would be damaged: make sure there is none, or mount it with locks (Lustre: -o flock)"
        )
    stop.watch_folder(folder.path)
    damaged = () if choice is None else choice.damaged
    for path, problem in damaged:
        report.warn(f"checkpoint {path.name} is damaged ({problem}): set aside as {path.name}.invalid")
    clean_up(folder.checkpoints, damaged)
    if choice is not None:
        report.say(f"resuming from {choice.path}")
    elif folder.attempt > 1:
        report.say(f"attempt {folder.attempt}: {folder.path} holds no checkpoint yet, starting from step 0")
    return folder.attempt


def _start_records(folder: RunFolder, receipt: dict[str, Any], config: Config) -> MetricsLog:
    """Write what this attempt is, and open its logs."""
    folder.write_receipt(receipt)
    folder.write_status("running", receipt["first_step"])
    return MetricsLog(folder.metrics_file, receipt["first_step"], config.logging.tensorboard)


def _describe(config: Config, model: OrthrosConfig, ranks: Ranks, progress: Progress) -> str:
    """What runs, where, how much of it, and where to look; the first line of a run, before the slow parts."""
    window = "full attention" if model.base_window is None else f"base window {model.base_window}"
    tokens = config.train.global_batch_size * config.train.sequence_length
    return (
        f"{model.architecture}, {window}, {parameter_count(model).total:,} parameters; {layout_of(config, ranks)} on "
        f"{ranks.device.type}; step {progress.step} to {config.train.steps}, {tokens:,} tokens a step; "
        f"logs in {config.output_dir}"
    )


def _say_changes(choice: Choice, config: Config, layout: Layout, report: ProgressReport) -> None:
    """Say what is not as it was when the checkpoint was saved and does not make it another run."""
    if choice.manifest.layout != layout:
        report.say(f"the layout was {choice.manifest.layout} and is {layout}")
    # The schedule is a function of the step and of train.steps.
    old, new, step = choice.manifest.config["train"]["steps"], config.train.steps, choice.manifest.progress.step
    peak = config.optimizer.learning_rate
    before, after = (learning_rate(config.schedule, peak, steps, step) for steps in (old, new))
    if before != after:
        report.say(
            f"train.steps was {old} and is {new}: the learning rate goes on at {after:.3g} where it was {before:.3g}; "
            "schedule.decay_steps fixes its course"
        )
