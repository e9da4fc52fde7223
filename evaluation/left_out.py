"""Why tasks were left out of an evaluation, for reports and the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST_REASONS = 12  # that are told one by one


def listed(names: Sequence[str]) -> str:
    """The first names of a list that may be long."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """Each reason once, behind the tasks that it holds for.

    Args:
        left_out: reasons by task, as `orthros.left_out` of results.json holds them.
    """
    tasks: dict[str, list[str]] = {}
    for task, reason in left_out.items():
        tasks.setdefault(reason, []).append(task)
    lines = [f"Not scored: {listed(names)}: {reason.rstrip('.')}." for reason, names in tasks.items()]
    if len(lines) > MOST_REASONS:
        others = [task for names in list(tasks.values())[MOST_REASONS:] for task in names]
        lines[MOST_REASONS:] = [f"Not scored for like reasons, which results.json holds: {listed(others)}."]
    return lines
