"""The demo's steps: each leaves one JSON file with what it found, and is not done again once that file is there.

A folder belongs to one setting of the demo (configuration and text). Seeds are not part of it: more of them can be
added to a finished demo.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from evaluation.files import write_output
from orthros_train.errors import InputError


class StepError(Exception):
    """A step could not be finished; the message says where to look and how to go on."""


class Steps:
    """Runs steps in order and keeps their results in `folder`/results."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Raises InputError when `folder` holds a demo with other settings."""
        self.folder = folder
        self.console = Console(highlight=False)
        path = folder / "settings.json"
        if path.is_file():
            before = _read(path)
            changed = sorted(name for name in {*before, *settings} if before.get(name) != settings.get(name))
            if changed:
                raise InputError(
                    f"{folder} holds a demo with other settings ({', '.join(changed)}); "
                    "choose another --output, or remove that folder"
                )
        else:
            write_output(path, json.dumps(settings, indent=1) + "\n")

    def run(self, name: str, title: str, work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """The result of step `name`: read if it was finished before, else `work(*arguments)`, with its seconds."""
        path = self.folder / "results" / f"{name}.json"
        if path.is_file():
            self.console.print(f"[dim]✓ {title} (done before)[/dim]")
            return _read(path)
        self.console.print(f"[bold]▶ {title}[/bold]")
        start = time.perf_counter()
        result = {**work(*arguments), "step_seconds_total": round(time.perf_counter() - start, 2)}
        write_output(path, json.dumps(result, indent=1) + "\n")
        self.console.print(f"  {result['step_seconds_total']:.1f} s")
        return result


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); remove it and run again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} does not hold a result; remove it and run again")
    return content
