"""The scripts that are submitted: valid shell, what was asked for and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.sbatch_script import JobSettings, evaluation_script, export_script, training_script
from launchers.submit import build_parser, job_settings

ROOT = Path(__file__).parents[2]
PLAIN = JobSettings("configs/demo.yaml", "outputs/demo", "demo", nodes=2, ranks_per_node=2)
FULL = replace(
    PLAIN,
    overrides=("train.steps=9", "data.train=[{prefix: a b}]"),
    gpus_per_node=2,
    cpus_per_task=16,
    memory="64G",
    partition="gpu",
    account="me",
    qos="high",
    time="1-00:00:00",
    venv="my env",
    seeds=(42, 43),
    sbatch_options=("--constraint=h100",),
    shell_lines=("module load cuda",),
)


def options(script: str) -> set[str]:
    return set(re.findall(r"^#SBATCH (.*)$", script, flags=re.MULTILINE))


@pytest.mark.parametrize(
    "script",
    [
        training_script(PLAIN),
        training_script(FULL),
        training_script(replace(PLAIN, container="an image.sif", preflight=False)),
        export_script(FULL),
        evaluation_script(PLAIN, "commonsense"),
    ],
)
def test_it_is_valid_shell(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert script.startswith("#!/bin/bash\n#SBATCH ")


def test_only_what_was_asked_for() -> None:
    assert options(training_script(PLAIN)) == {
        "--job-name=demo",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--signal=B:USR1@300",
        "--requeue",
        "--open-mode=append",
        "--output=outputs/demo/slurm/train-%j.log",
    }


def test_everything_that_was_asked_for() -> None:
    script = training_script(FULL)
    assert options(script) - options(training_script(PLAIN)) == {
        "--gpus-per-node=2",
        "--cpus-per-task=16",
        "--mem=64G",
        "--partition=gpu",
        "--account=me",
        "--qos=high",
        "--time=1-00:00:00",
        "--output=outputs/demo/slurm/train-%A_%a.log",
        "--array=0-1",
        "--constraint=h100",
    }
    assert script.index("module load cuda") < script.index("source 'my env'/bin/activate") < script.index("torchrun")
    assert 'SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"' in script


def run_beginning(script: str, environment: dict[str, str], show: str) -> str:
    """What the variables are when the launching begins."""
    beginning = script[: script.index("head_node=")].replace("|| exit", "|| true")
    done = subprocess.run(
        ["bash", "-c", f"{beginning}\n{show}"],
        env={**os.environ, "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_CPUS_PER_TASK": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def test_each_task_of_an_array_trains_its_seed_in_a_folder_of_its_own() -> None:
    script = training_script(FULL).replace("module load cuda\n", "")
    shown = run_beginning(script, {"SLURM_ARRAY_TASK_ID": "1"}, r'echo "$run"; printf "<%s>" "${config[@]}"')
    assert shown == (
        "outputs/demo/seed_43\n"
        "<configs/demo.yaml><train.steps=9><data.train=[{prefix: a b}]><train.seed=43><output_dir=outputs/demo/seed_43>"
    )


def test_a_container_holds_everything_but_slurms_own_commands() -> None:
    script = training_script(replace(PLAIN, container="an image.sif", gpus_per_node=2))
    inside = "apptainer exec --nv --bind \"$PWD\" 'an image.sif'"
    assert f'srun --wait="$stop_seconds" {inside} torchrun' in script
    assert script.count(f"{inside} python launchers/attempt.py") == 2
    assert not re.search(r"^python ", script, flags=re.MULTILINE)
    assert f"{inside} python tools/export_hf.py" in export_script(
        replace(PLAIN, container="an image.sif", gpus_per_node=2)
    )


def test_the_later_jobs_work_on_what_the_first_made() -> None:
    export, evaluate = export_script(PLAIN), evaluation_script(PLAIN, "recall")
    assert 'python tools/export_hf.py --checkpoint "$run" --output "$run/model"' in export
    assert 'evaluation.run --model "$run/model" --suite recall --output "$run/evaluation"/recall' in evaluate
    assert "--nodes=1" in options(export)
    assert "--gpus-per-node=1" in options(evaluation_script(FULL, "recall"))
    assert "--gpus-per-node=1" not in options(export_script(FULL))


def test_train_sbatch_is_what_submit_renders() -> None:
    size = ["--nodes", "2", "--gpus-per-node", "8", "--time", "1-00:00:00", "--venv", ".venv"]
    words = [str(ROOT / "configs" / "orthros_1.3b.yaml"), *size]
    settings = replace(job_settings(build_parser().parse_intermixed_args(words)), config="configs/orthros_1.3b.yaml")
    assert (ROOT / "launchers" / "train.sbatch").read_text() == training_script(settings)
