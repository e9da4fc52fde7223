"""The recall task's rows by hand, what each arm can see, and the whole demonstration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evaluation import run
from evaluation.associative_recall import (
    ARMS,
    RecallSetting,
    build_arm,
    make_rows,
    run_recall,
    run_synthetic,
    score_arm,
    train_arm,
    write_recall_report,
)
from orthros_train.errors import InputError

SMALL = RecallSetting(steps=3, batch_size=4, width=32, test_rows=20, seeds=(1, 2))


def test_rows_are_pairs_then_queries_with_their_answers() -> None:
    rows = make_rows(RecallSetting(), 50, torch.Generator().manual_seed(0))
    assert rows.ids.shape == (50, 64)
    for ids, queries, answers, distances in zip(rows.ids, rows.queries, rows.answers, rows.distances, strict=True):
        pairs = {int(ids[i]): (int(ids[i + 1]), i + 1) for i in range(0, 16, 2)}
        assert len(pairs) == 8
        assert all(1 <= key <= 16 and 17 <= value <= 24 for key, (value, _) in pairs.items())
        assert queries.tolist() == sorted(set(queries.tolist()))
        asked = [int(ids[position]) for position in queries.tolist()]
        assert len(asked) == 40
        assert set(asked) <= set(pairs)
        assert answers.tolist() == [pairs[key][0] for key in asked]
        assert distances.tolist() == [int(p) - pairs[key][1] for p, key in zip(queries, asked, strict=True)]
        filler = set(range(16, 64)) - set(queries.tolist())
        assert all(int(ids[position]) == 0 for position in filler)


def test_the_windows_reach_is_exact() -> None:
    """Behind L·(w-1) tokens a change of the value cannot matter to the sliding-window arm; at that distance it can."""
    setting = RecallSetting()
    assert setting.reach == 14
    changes = {}
    for arm in ARMS:
        model = build_arm(arm, setting, 0).double()
        ids = torch.randint(25, (1, 30), generator=torch.Generator().manual_seed(1))
        other = ids.clone()
        other[0, 10] = (ids[0, 10] + 1) % 25
        with torch.no_grad():
            change = (model(ids, use_cache=False).logits - model(other, use_cache=False).logits)[0].abs().amax(dim=-1)
        changes[arm] = (float(change[24]), float(change[25]))
    assert changes["sliding-window"][0] > 0
    assert changes["sliding-window"][1] == 0
    assert min(changes["transformer"]) > 0
    assert min(changes["orthros"]) > 0


def test_arms_start_from_the_same_weights() -> None:
    arms = {arm: dict(build_arm(arm, SMALL, 5).named_parameters()) for arm in ARMS}
    for name, parameter in arms["transformer"].items():
        assert torch.equal(parameter, arms["orthros"][name])
        assert torch.equal(parameter, arms["sliding-window"][name])


def test_accuracy_is_split_at_the_reach() -> None:
    found = score_arm(build_arm("transformer", SMALL, 0), SMALL)
    rows = make_rows(SMALL, 20, torch.Generator().manual_seed(10**6))
    far = rows.distances > 14
    assert found["far_queries"] == int(far.sum())
    near, all_ = int((~far).sum()), far.numel()
    assert found["all"] == pytest.approx((found["near"] * near + found["far"] * (all_ - near)) / all_)
    assert [low for low, _, _ in found["by_distance"]] == list(range(1, 64, 7))


def test_a_solved_arm_stops() -> None:
    easy = RecallSetting(steps=30, batch_size=4, width=32, solved_loss=100.0)
    assert train_arm(build_arm("orthros", easy, 0), easy, 0) == 10
    assert train_arm(build_arm("orthros", SMALL, 0), SMALL, 0) == 3


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_synthetic(tmp_path, SMALL)
    assert set(results["runs"]) == set(ARMS)
    text = capsys.readouterr().out
    assert "| sliding window only | 3, 3 |" in text
    assert "L·(w−1) = 14" in text
    assert (tmp_path / "plots" / "recall.png").is_file()
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert write_recall_report(results, tmp_path / "again") in text


def test_the_suite_needs_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr("evaluation.associative_recall.run_synthetic", lambda folder, device: called.append(folder))
    assert run.main(["--suite", "synthetic", "--output", str(tmp_path)]) == 0
    assert called == [tmp_path / "synthetic"]
    with pytest.raises(InputError, match="torch sees no CUDA device"):
        run_recall(SMALL, device="cuda")


@pytest.mark.evidence
def test_the_output_stream_recalls_what_windows_cannot(tmp_path: Path) -> None:
    results = run_synthetic(tmp_path)
    print((tmp_path / "report.md").read_text())
    chance = results["setting"]["chance"]
    for arm, seeds in results["runs"].items():
        for seed, found in seeds.items():
            if arm == "sliding-window":
                assert abs(found["far"] - chance) <= 0.10, (arm, seed)
            else:
                assert found["far"] > 0.95, (arm, seed)
    assert results["cpu_seconds"] < 600
