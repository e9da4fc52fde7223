"""How a run ends that cannot go on although its input is right."""

from __future__ import annotations


class TrainingFailureError(Exception):
    """The message says in one line what happened and what to do; the command exits with 1."""
