"""launchers/submit.py before SLURM is asked: what it prints, what it refuses. test_on_cluster.py has the rest."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from launchers import slurm_client, submit
from launchers.run_records import Job, add_job, read_jobs
from orthros_train.errors import InputError

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "configs" / "demo.yaml")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in submit.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Slurm:
    """Stands in for sbatch: ids from 70 on, and what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.submitted: list[tuple[str, list[str]]] = []
        monkeypatch.setattr(slurm_client, "check", lambda script: None)
        monkeypatch.setattr(slurm_client, "submit", self.submit)
        monkeypatch.setattr(slurm_client, "job_states", lambda jobs: dict.fromkeys(jobs, "RUNNING"))

    def submit(self, script: str, options: list[str]) -> int:
        self.submitted.append((Path(script).name, options))
        return 69 + len(self.submitted)


def test_print_shows_the_scripts_and_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = f"output_dir={tmp_path}/run"
    assert submit.main([DEMO, run, "--nodes", "2", "--evaluate", "recall", "--print", "--venv", "my_env"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("#!/bin/bash") == 3
    assert "source my_env/bin/activate" in shown
    assert f'config=({DEMO} {run} "output_dir=$run")' in shown
    assert not (tmp_path / "run").exists()


def test_help_shows_options_of_sbatch_as_they_are_understood() -> None:
    parser = submit.build_parser()
    (shown,) = re.findall(r"e\.g\.\s+(--sbatch-option\S+);", parser.format_help())
    assert parser.parse_intermixed_args([DEMO, shown]).sbatch_option == ["--constraint=h100"]


def test_the_active_environment_is_the_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit.main([DEMO, f"output_dir={tmp_path}/run", "--print"])
    places = {sys.prefix, os.path.relpath(sys.prefix)}  # one below the working directory is named from there
    script = capsys.readouterr().out
    activated = any(f"source {place}/bin/activate" in script for place in places)
    assert activated == (sys.prefix != sys.base_prefix)
    submit.main([DEMO, f"output_dir={tmp_path}/run", "--print", "--container", "image.sif"])
    assert "activate" not in capsys.readouterr().out


def test_a_chain_of_three_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = Slurm(monkeypatch)
    submit.main([DEMO, f"output_dir={tmp_path}/run", "--evaluate", "recall"])
    after = ["--dependency=afterok:70", "--kill-on-invalid-dep=yes"]
    assert slurm.submitted[:2] == [("train.sbatch", []), ("export.sbatch", after)]
    assert slurm.submitted[2] == ("evaluate.sbatch", ["--dependency=afterok:71", "--kill-on-invalid-dep=yes"])
    assert [(job.job_id, job.kind) for job in read_jobs(tmp_path / "run")] == [
        (70, "train"),
        (71, "export"),
        (72, "evaluate"),
    ]
    shown = capsys.readouterr().out
    assert f"job 70: train, 1 x 1 ranks\n  log {tmp_path}/run/slurm/train-70.log\n" in shown
    assert "job 72: evaluate, after job 71" in shown


def test_each_seed_is_exported_after_its_own_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = Slurm(monkeypatch)
    submit.main([DEMO, f"output_dir={tmp_path}/run", "--seeds", "1,2", "--export"])
    assert slurm.submitted[1] == ("export.sbatch", ["--dependency=aftercorr:70", "--kill-on-invalid-dep=yes"])
    assert f"train, 1 x 1 ranks, seeds 1,2\n  log {tmp_path}/run/slurm/train-70_*.log" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "1,1"], "a seed is there twice"),
        (["--seeds", "1,x"], "--seeds"),
        (["--seeds", "1,2", "train.seed=3"], "--seeds and train.seed=3 contradict each other"),
        (["--gpus-per-node", "2", "--ranks-per-node", "4"], "--ranks-per-node 4 is more than --gpus-per-node 2"),
        (["--nodes", "3"], "not a multiple of train.micro_batch_size"),
        (["--venv", "a", "--container", "b"], "--venv and --container exclude each other"),
        (["output_dir=a b"], "holds a space or %"),
        (["output_dir='2024'"], "output_dir '2024' is a number or the like on a command line: choose another"),
        (["train.stepz=1"], "did you mean train.steps?"),
        (["--time", "6", "--stop-seconds", "300"], "--time 6 leaves no time to train: the job is stopped 300 s before"),
        (["--time", "5h"], "--time 5h: write minutes"),
        (["--evaluate", "recal"], "did you mean recall"),
        (["--evaluate", "recall --limitt 3"], "--limitt"),
        (["--nodes", "0"], "--nodes: must be at least 1"),
    ],
)
def test_bad_arguments_are_refused_before_slurm_is_asked(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Slurm(monkeypatch)
    with pytest.raises(InputError) as error:
        submit.main([DEMO, *arguments])
    assert message in str(error.value)
    assert slurm.submitted == []


def test_a_rank_does_not_submit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm = Slurm(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="WORLD_SIZE are set, and the job would inherit them"):
        submit.main([DEMO, f"output_dir={tmp_path}/run"])
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="submit from the root of the repository"):
        submit.main([DEMO, f"output_dir={tmp_path}/run"])
    assert slurm.submitted == []


def test_a_second_job_for_a_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm = Slurm(monkeypatch)
    add_job(tmp_path / "run", Job(9, "train", "log", "now"))
    with pytest.raises(
        InputError, match=r"job 9 \(RUNNING\) is there for .*: it goes on by itself; end it with `scancel 9`"
    ):
        submit.main([DEMO, f"output_dir={tmp_path}/run"])
    monkeypatch.setattr(slurm_client, "job_states", lambda jobs: dict.fromkeys(jobs, "COMPLETED"))
    submit.main([DEMO, f"output_dir={tmp_path}/run"])
    assert len(slurm.submitted) == 1


def test_a_later_job_that_would_find_its_output_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slurm = Slurm(monkeypatch)
    model = tmp_path / "run" / "seed_2" / "model"
    model.mkdir(parents=True)
    command = [DEMO, f"output_dir={tmp_path}/run", "--seeds", "1,2"]
    assert submit.main([*command, "--export", "--print"]) == 0  # shows what an empty folder does not hinder
    (model / "config.json").touch()
    with pytest.raises(InputError, match="seed_2/model is there already, from an earlier export: move it away"):
        submit.main([*command, "--export"])
    assert slurm.submitted == []
    submit.main(command)
    assert len(slurm.submitted) == 1


def test_submitting_again_takes_a_stop_file_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Slurm(monkeypatch)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop_requested").touch()
    submit.main([DEMO, f"output_dir={tmp_path}/run"])
    assert not (tmp_path / "run" / "stop_requested").exists()


def test_a_container_sees_what_the_run_reads_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, far = tmp_path / "repository", tmp_path / "far"
    for folder in (here, far / "corpora", far / "text"):
        folder.mkdir(parents=True)
    (here / "data").symlink_to(far / "corpora")
    (here / "run.yaml").write_text(Path(DEMO).read_text())
    monkeypatch.chdir(here)
    data = f"data.train=[{{prefix: data/corpus}}, {{prefix: {far}/text/corpus}}, {{prefix: here/corpus}}]"
    submit.main(["run.yaml", data, f"output_dir={tmp_path}/scratch/run", "--container", "image.sif", "--print"])
    binds = f"--bind {tmp_path}/scratch/run --bind {far}/corpora --bind {far}/text image.sif"
    assert f'apptainer exec --bind "$PWD" {binds} torchrun' in capsys.readouterr().out


def test_a_container_sees_where_links_lead_the_caches_and_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, far = tmp_path / "repository", tmp_path / "far"
    for folder in (here / "data", here / "model", far / "configs", far / "disk", far / "blobs", far / "mirror"):
        folder.mkdir(parents=True)
    for link, target in (("data/corpus.bin", "disk/a.bin"), ("model/config.json", "blobs/9f")):
        (far / target).write_text("{}")
        (here / link).symlink_to(far / target)
    (far / "configs" / "run.yaml").write_text(Path(DEMO).read_text())
    monkeypatch.chdir(here)
    suites = f"{{names: [perplexity], texts: [{far}/texts/a.txt], data_dir: {far}/mirror, cache_dir: {far}/new/cache}}"
    options = [
        "output_dir=run",
        "data.train=[{prefix: data/corpus}]",
        f"data.cache_dir={far}/disk/cache",
        f"evaluation.suites={suites}",
        "tokenizer={type: huggingface, path: model}",
    ]

    def bound() -> list[str]:
        submit.main([f"{far}/configs/run.yaml", *options, "--container", "image.sif", "--print"])
        script = capsys.readouterr().out
        words = script[script.index("apptainer exec") : script.index(" image.sif")].split()
        return [str(Path(folder).relative_to(far)) for folder in words[5::2]]

    assert bound() == ["."]  # where the cache of the suites can be made
    (far / "new" / "cache").mkdir(parents=True)
    assert sorted(bound()) == ["blobs", "configs", "disk", "mirror", "new/cache", "texts"]
