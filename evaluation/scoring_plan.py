"""Which tokens scoring computes once: continuations of one context share the cache of what they have in common.

* A request is (context, continuation), both token ids. The model reads context + continuation[:-1]; its last
  len(continuation) positions predict the continuation.
* Requests that read the same tokens are one row: one-token choices of a question cost one forward together.
* Rows with a common beginning form a family: its stem is computed once. Choices of a question share its context, and
  questions about one document share the document.
* Pure Python: no tensor, no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

Request = tuple[Sequence[int], Sequence[int]]  # context, continuation
LEAST_SAVING = 8  # tokens; a second forward for the stem costs about that much


@dataclass
class Row:
    """Tokens that the model reads once, and the continuations that its last positions score."""

    tokens: tuple[int, ...]
    continuations: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # request's index, its tokens

    @property
    def scored(self) -> int:
        """Positions at the row's end whose logits are needed."""
        return max(len(continuation) for _, continuation in self.continuations)

    @property
    def context(self) -> int:
        """Leading tokens whose logits nobody needs."""
        return len(self.tokens) - self.scored


@dataclass
class Family:
    """Rows whose first `stem` tokens are equal and unscored; a stem of 0 means that nothing is shared."""

    stem: int
    rows: list[Row]

    @property
    def longest(self) -> int:
        """Tokens of the longest row, stem included."""
        return max(len(row.tokens) for row in self.rows)

    @property
    def branches(self) -> int:
        """Tokens behind the stem, of all rows together."""
        return sum(len(row.tokens) - self.stem for row in self.rows)


def plan_families(requests: Sequence[Request], share: bool = True) -> list[Family]:
    """Group requests so that what they have in common is computed once.

    Args:
        requests: contexts and continuations of at least one token each.
        share: False gives every row a family of its own, as a plain harness would.

    Returns:
        Families, the longest rows first, so that a batch of neighbors needs little padding and the most expensive
        batch comes first.
    """
    rows: dict[tuple[int, ...], Row] = {}
    for index, (context, continuation) in enumerate(requests):
        if not context or not continuation:
            raise ValueError(f"request {index} has an empty {'continuation' if context else 'context'}")
        tokens = (*context, *continuation[:-1])
        rows.setdefault(tokens, Row(tokens)).continuations.append((index, tuple(continuation)))
    ordered = [rows[tokens] for tokens in sorted(rows)]
    families = list(_merge(ordered)) if share else [Family(0, [row]) for row in ordered]
    for family in families:
        family.rows.sort(key=lambda row: -len(row.tokens))
    return sorted(families, key=lambda family: (-family.longest, family.rows[0].tokens))


def _merge(rows: Iterable[Row]) -> Iterator[Family]:
    """Walk the rows in lexicographic order; a row joins the family before it where that saves tokens."""
    current: Family | None = None
    for row in rows:
        if current is None:
            current = Family(row.context, [row])
            continue
        shared = min(current.stem, row.context, _common_prefix(current.rows[-1].tokens, row.tokens))
        # joined: the stem shrinks for every row there already, and the newcomer saves it
        saving = shared - (len(current.rows) - 1) * (current.stem - shared)
        if saving >= LEAST_SAVING:
            current.stem = shared
            current.rows.append(row)
        else:
            yield _settled(current)
            current = Family(row.context, [row])
    if current is not None:
        yield _settled(current)


def _settled(family: Family) -> Family:
    """A family of one row shares nothing."""
    return family if len(family.rows) > 1 else Family(0, family.rows)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
