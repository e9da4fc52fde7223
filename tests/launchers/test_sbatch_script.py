"""The scripts that are submitted: valid shell, what was asked for and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.sbatch_script import JobSettings, evaluation_script, export_script, training_script
from launchers.submit import build_parser, job_settings
from orthros_train.config import load_config

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
    end = re.search("^head_node=|^apptainer", script, flags=re.MULTILINE)
    assert end is not None
    beginning = script[: end.start()].replace("|| exit", "|| true")
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


def test_a_changed_output_dir_of_the_file_does_not_move_a_running_job(tmp_path: Path) -> None:
    """Each restart reads the file anew, and a person may have prepared the next experiment in it."""
    named = replace(PLAIN, overrides=("output_dir=outputs/demo", "train.seed=9"))
    for settings in (PLAIN, named, replace(PLAIN, run=f"{tmp_path}/a'b")):
        file = tmp_path / "run.yaml"
        file.write_text(re.sub("output_dir: .*", "output_dir: elsewhere", (ROOT / settings.config).read_text()))
        assert load_config(file).output_dir == "elsewhere"
        script = training_script(replace(settings, config=str(file)))
        words = run_beginning(script, {}, r'printf "%s\n" "${config[@]}"').splitlines()
        assert load_config(words[0], words[1:]).output_dir == settings.run


def test_a_container_holds_everything_but_slurms_own_commands() -> None:
    script = training_script(replace(PLAIN, container="an image.sif", gpus_per_node=2))
    inside = "apptainer exec --nv --bind \"$PWD\" 'an image.sif'"
    assert f'srun --wait="$stop_seconds" {inside} torchrun' in script
    assert f'srun --wait=45 {inside} python -c "import torch, launchers.preflight"' in script
    assert f'record() {{ {inside} python launchers/attempt.py "$@"' in script
    assert not re.search(r"^python ", script, flags=re.MULTILINE)
    assert f"{inside} python tools/export_hf.py" in export_script(
        replace(PLAIN, container="an image.sif", gpus_per_node=2)
    )


def test_an_image_without_the_package_finds_it_in_the_working_directory() -> None:
    """A script's own folder, not the working directory, is where Python looks for modules."""
    inside = replace(PLAIN, container="image.sif")
    show = 'printf "%s %s\\n" "$PYTHONPATH" "$APPTAINERENV_PYTHONPATH"'
    for script in (training_script(inside), export_script(inside), evaluation_script(inside, "recall")):
        for before, after in (("", f"{ROOT}"), ("/mine", f"{ROOT}:/mine")):
            assert run_beginning(script, {"PYTHONPATH": before}, show) == f"{after} {after}\n"
    assert run_beginning(training_script(PLAIN), {"PYTHONPATH": "/mine"}, show) == "/mine \n"


def life(script: str, folder: Path, *, end: int, srun: str = "exit 0", scontrol: str = "exit 0") -> tuple[int, str]:
    """A script's exit code and what it called, one line each, with stand-ins for all that it calls."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    programs = {
        "python": f'echo "record ${{*:2}}" >> calls; [ "$2" != end ] || exit {end}',
        "srun": f'echo "$* limit ${{SLURM_TIMELIMIT:-none}}" >> calls; {srun}',
        "scontrol": f'[ "$1" != show ] || exit 0; echo "scontrol $*" >> calls; {scontrol}',
        "sleep": "true",
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    task = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_CPUS_PER_TASK": "1"}
    done = subprocess.run(
        ["bash", "-c", script.replace("module load cuda\n", "").replace("my env", ".venv")],
        env={**os.environ, **task, "SLURM_SUBMIT_DIR": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )
    called = (folder / "calls").read_text()
    options = r" --(ranks-per-node|restart-limit) \d+| torchrun .*--shutdown-timeout=\d+"
    return done.returncode, re.sub(rf"{options}| configs/demo.yaml .*?(?= limit|$)", "", called, flags=re.MULTILINE)


TORCH = "--wait=45 python -c import torch, launchers.preflight limit 2\n"
PREFLIGHT = "--wait=15 --rdzv-conf=join_timeout=45,read_timeout=30 launchers/preflight.py limit 2\n"
BEGUN = f"record begin\n{TORCH}{PREFLIGHT}"
TRAINED = "--wait=300 launchers/torchrun_rank.py limit none\n"


def test_a_job_that_is_done(tmp_path: Path) -> None:
    assert life(training_script(FULL), tmp_path, end=0) == (0, f"{BEGUN}{TRAINED}record end\n")


def test_a_job_goes_back_into_the_queue_by_the_id_of_its_task(tmp_path: Path) -> None:
    ended = f"{BEGUN}{TRAINED}record end\n"
    assert life(training_script(FULL), tmp_path, end=75) == (75, f"{ended}scontrol requeue 7_1\n")


def test_a_controller_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    once = '[ "$(grep --count scontrol calls)" -gt 2 ]'
    code, called = life(training_script(FULL), tmp_path, end=75, scontrol=once)
    assert (code, called.count("scontrol requeue 7_1"), "not-requeued" in called) == (75, 3, False)


def test_a_job_that_slurm_does_not_take_back_says_so(tmp_path: Path) -> None:
    code, called = life(training_script(FULL), tmp_path, end=75, scontrol="exit 1")
    assert (code, called.count("scontrol requeue")) == (0, 5)  # the code of the stand-in for attempt.py
    assert called.endswith("scontrol requeue 7_1\nrecord not-requeued\n")


def test_a_failed_preflight_is_recorded_and_nothing_trained(tmp_path: Path) -> None:
    failed = "[ $1 = --wait=45 ] || exit 1"
    code, called = life(training_script(FULL), tmp_path, end=1, srun=failed)
    assert (code, called) == (1, f"{BEGUN}record end --preflight-failed\n")


def test_nodes_without_torch_do_not_meet(tmp_path: Path) -> None:
    code, called = life(training_script(FULL), tmp_path, end=1, srun="exit 1")
    assert (code, called) == (1, f"record begin\n{TORCH}record end --preflight-failed\n")


def test_a_signal_is_heard_while_the_preflight_runs(tmp_path: Path) -> None:
    to_the_script = "kill -USR1 $(cut --delimiter=' ' --fields=4 /proc/$PPID/stat); /bin/sleep 0.2"
    code, called = life(training_script(FULL), tmp_path, end=75, srun=to_the_script)
    assert code == 75
    assert called.startswith(f"{BEGUN}record end --signalled\n")


def test_a_signal_between_the_preflight_and_the_training_asks_the_ranks_to_stop(tmp_path: Path) -> None:
    start = "    attend launch training"
    script = training_script(FULL).replace(start, f"    kill -USR1 $$\n{start}")
    file = tmp_path / "outputs/demo/seed_43/stop_requested"
    file.parent.mkdir(parents=True)
    until_asked = f"[ $1 = --wait=300 ] && until [ -e {file} ]; do /bin/sleep 0.1; done; exit 0"
    code, called = life(script, tmp_path, end=75, srun=until_asked)  # ends, so nobody asks any more
    assert (code, called) == (75, f"{BEGUN}{TRAINED}record end --signalled\nscontrol requeue 7_1\n")


ATTEND = ("    child=\n", '    "$@" &\n', "    child=$!\n")  # its statements


@pytest.mark.parametrize("after", ATTEND)
def test_a_signal_at_any_moment_of_starting_the_training_asks_the_ranks_to_stop(tmp_path: Path, after: str) -> None:
    script = training_script(replace(FULL, preflight=False))
    assert script.count(after) == 1
    file = tmp_path / "outputs/demo/seed_43/stop_requested"
    file.parent.mkdir(parents=True)
    until_asked = f"until [ -e {file} ]; do /bin/sleep 0.1; done"
    signalled = script.replace(after, f"{after}    kill -USR1 $$\n")
    code, called = life(signalled, tmp_path, end=75, srun=until_asked)
    assert (code, called) == (75, f"record begin\n{TRAINED}record end --signalled\nscontrol requeue 7_1\n")


@pytest.mark.parametrize("after", ATTEND)
def test_a_signal_at_any_moment_of_starting_the_preflight_is_heard(tmp_path: Path, after: str) -> None:
    signalled = training_script(FULL).replace(after, f"{after}    kill -USR1 $$\n")
    code, called = life(signalled, tmp_path, end=75)
    assert (code, called) == (75, f"{BEGUN}record end --signalled\nscontrol requeue 7_1\n")


def test_a_signal_before_anything_is_started_starts_nothing(tmp_path: Path) -> None:
    signalled = training_script(replace(FULL, preflight=False)).replace(
        "record begin", "kill -USR1 $$\nrecord begin", 1
    )
    code, called = life(signalled, tmp_path, end=75)
    assert (code, called) == (75, "record begin\nrecord end --signalled\nscontrol requeue 7_1\n")
    assert not (tmp_path / "outputs/demo/seed_43/stop_requested").exists()


def test_bad_input_that_only_ranks_find_ends_the_job_with_2(tmp_path: Path) -> None:
    """The real programs, except those of SLURM."""
    for name, body in {"srun": 'exec "${@:2}"', "scontrol": "echo localhost"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    run = tmp_path / "run"
    words = ("data.train=[{prefix: nowhere}]", "tokenizer={type: byte}")
    settings = replace(PLAIN, run=str(run), nodes=1, ranks_per_node=1, preflight=False, overrides=words)
    programs = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "1",
        "SLURM_JOB_NODELIST": "localhost",
    }
    done = subprocess.run(
        ["bash", "-c", training_script(settings)],
        env={**os.environ, **job, "SLURM_SUBMIT_DIR": str(ROOT), "PATH": programs, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "error: there is no corpus nowhere" in done.stderr
    assert done.stdout.endswith(" refused before the training had started: see the log above\n")
    assert done.returncode == 2
    assert {file.name for file in (run / "slurm").iterdir()} == {"attempts.jsonl", ".records.lock"}


def test_the_later_jobs_work_on_what_the_first_made() -> None:
    export, evaluate = export_script(PLAIN), evaluation_script(PLAIN, "recall")
    assert 'python tools/export_hf.py --checkpoint "$run" --output "$run/model"' in export
    assert 'evaluation.run --model "$run/model" --output "$run/evaluation"/recall --suite recall\n' in evaluate
    on_gpu = evaluation_script(FULL, "recall", ["--data-dir", "my mirror"])
    assert "--suite recall --device cuda --data-dir 'my mirror'\n" in on_gpu
    assert "--nodes=1" in options(export)
    assert "--gpus-per-node=1" in options(evaluation_script(FULL, "recall"))
    assert "--gpus-per-node=1" not in options(export_script(FULL))


def test_train_sbatch_is_what_submit_renders() -> None:
    size = ["--nodes", "2", "--gpus-per-node", "8", "--time", "1-00:00:00", "--venv", ".venv"]
    words = [str(ROOT / "configs" / "orthros_1.3b.yaml"), *size]
    settings = replace(job_settings(build_parser().parse_intermixed_args(words)), config="configs/orthros_1.3b.yaml")
    assert (ROOT / "launchers" / "train.sbatch").read_text() == training_script(settings)
