"""Which tokens are read once: rows, stems and what is not worth sharing."""

from __future__ import annotations

import random

import pytest

from evaluation.scoring_plan import plan_families

CONTEXT = list(range(100, 140))


def cost(families: list) -> int:
    return sum(family.stem + family.branches for family in families)


def test_choices_of_a_question_share_all_of_its_context_but_the_last_token() -> None:
    (family,) = plan_families([(CONTEXT, [1, 2]), (CONTEXT, [3, 4, 5])])
    assert family.stem == 39  # the context's last token predicts the first of the choice
    assert sorted(len(row.tokens) for row in family.rows) == [41, 42]
    assert cost([family]) == 39 + 2 + 3


def test_one_token_choices_are_one_row() -> None:
    (family,) = plan_families([(CONTEXT, [1]), (CONTEXT, [2]), (CONTEXT, [3])])
    assert family.stem == 0
    assert [index for index, _ in family.rows[0].continuations] == [0, 1, 2]
    assert cost([family]) == 40


def test_a_continuation_that_ends_another_ones_row_is_scored_on_it() -> None:
    (family,) = plan_families([(CONTEXT, [1, 2, 3]), ([*CONTEXT, 1], [2, 9])])
    assert len(family.rows) == 1
    assert family.rows[0].scored == 3


def test_questions_about_one_document_share_the_document() -> None:
    document = list(range(1000, 1200))
    requests = [([*document, 10 * q + 1, 10 * q + 2], [c, c + 1]) for q in range(3) for c in (500, 600)]
    (family,) = plan_families(requests)
    assert family.stem == 200
    assert len(family.rows) == 6


def test_a_short_common_beginning_is_not_shared() -> None:
    families = plan_families([([1, 2, 3, *range(50, 80)], [4]), ([1, 2, 3, *range(150, 180)], [4])])
    assert [family.stem for family in families] == [0, 0]


def test_two_questions_with_many_choices_keep_their_own_stems() -> None:
    """Joining them would read each question once more for every choice."""
    shared = list(range(10))
    first, second = [*shared, *range(100, 140)], [*shared, *range(200, 240)]
    families = plan_families([(c, [k, k]) for c in (first, second) for k in range(4)])
    assert [family.stem for family in families] == [49, 49]


def test_sharing_never_reads_more_than_going_alone() -> None:
    rng = random.Random(0)
    for _ in range(50):
        pool = [[rng.randrange(3) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
        requests = [
            ([*rng.choice(pool), *rng.choice(pool)], [rng.randrange(3) for _ in range(rng.randrange(1, 5))])
            for _ in range(12)
        ]
        assert cost(plan_families(requests)) <= cost(plan_families(requests, share=False))
        indices = sorted(i for f in plan_families(requests) for r in f.rows for i, _ in r.continuations)
        assert indices == list(range(12))


def test_stems_never_reach_into_scored_positions() -> None:
    (family,) = plan_families([(CONTEXT, [7, 7, 7, 1]), (CONTEXT, [7, 7, 7, 2, 5])])
    assert family.stem == 39  # although the first three tokens of the choices agree


@pytest.mark.parametrize(("request_", "part"), [(([], [1]), "context"), (([1], []), "continuation")])
def test_empty_parts_are_refused(request_: tuple[list[int], list[int]], part: str) -> None:
    with pytest.raises(ValueError, match=f"empty {part}"):
        plan_families([request_])
