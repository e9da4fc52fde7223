"""Conversations packed into rows: best fit, longest first (Johnson et al. 1974: at most 11/9 of the fewest rows).

Equal lengths are taken in an order drawn by a key, so what shares a row is a pure function of lengths and key.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orthros_train.data.permutation import shuffled


@dataclass(frozen=True)
class Packing:
    """Rows of conversations: row r holds members[ends[r-1]:ends[r]]."""

    members: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def row(self, number: int) -> NDArray[np.int64]:
        """The conversations of a row, in order."""
        start = self.ends[number - 1] if number else 0
        return self.members[start : self.ends[number]]

    def sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each row, the sum of its conversations' values, given one a conversation."""
        totals = np.concatenate(([0], np.cumsum(values[self.members])))[self.ends]
        return np.diff(totals, prepend=0)


def pack(conversations: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int, key: str) -> Packing:
    """Pack the named conversations into rows of at most `capacity` tokens.

    Args:
        conversations: indices into `lengths`.
        lengths: tokens of every conversation, at least 1 and at most `capacity` each.
        key: draws the order among equal lengths.
    """
    drawn = conversations[shuffled(len(conversations), key)]
    longest_first = drawn[np.argsort(-lengths[drawn], kind="stable")]
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens left -> rows that have so many
    rooms: list[int] = []  # the keys of with_room, in increasing order
    for index, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        rows[row].append(index)
        left = room - length
        if left:
            if left not in with_room:
                bisect.insort(rooms, left)
            with_room.setdefault(left, []).append(row)
    members = np.array([index for row in rows for index in row], dtype=np.int64)
    return Packing(members, np.cumsum([len(row) for row in rows], dtype=np.int64))


def one_each(conversations: NDArray[np.int64]) -> Packing:
    """Every conversation in a row of its own."""
    return Packing(conversations, np.arange(1, len(conversations) + 1, dtype=np.int64))
