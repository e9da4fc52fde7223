"""The demo's steps: each leaves one JSON file with what it found, and is not done again once that file is there.

* The file also says on what the step was measured: machine, commit, load. A report may be written days later, at
  another commit, from steps of several.
* A folder belongs to one setting of the demo (configuration and text) from its first finished step on. Seeds are not
  part of it: more of them can be added to a finished demo.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from evaluation.files import write_output
from orthros_train.errors import InputError

DEFAULT_FOLDER = Path("outputs/demo")  # what `make clean` removes


class StepError(Exception):
    """A step could not be finished; the message says where to look and how to go on."""


class Steps:
    """Runs steps in order and keeps their results in `folder`/results.

    `measured` tells of every step that was run or read so far: `title`, `machine`, `started`, `load_average` (before
    and after) and `seconds`.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Raises InputError when `folder` holds a demo with other settings."""
        self.folder = folder
        self.settings = settings
        self.measured: dict[str, dict[str, Any]] = {}
        self.console = Console(highlight=False)
        before = _read(self._settings_file) if self._settings_file.is_file() else settings
        changed = sorted(name for name in {*before, *settings} if before.get(name) != settings.get(name))
        if changed:
            raise InputError(
                f"{folder} holds a demo with other settings ({', '.join(changed)}); give this one a folder of its own "
                f"with --output OTHER, or remove the old one with {_removal(folder)}"
            )

    @property
    def _settings_file(self) -> Path:
        return self.folder / "settings.json"

    def run(self, name: str, title: str, work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """The result of step `name`: read if it was finished before, else `work(*arguments)`, which is then kept.

        Raises InputError for a result that is damaged or does not say on what it was measured.
        """
        path = self.folder / "results" / f"{name}.json"
        if path.is_file():
            self.console.print(f"[dim]✓ {title} (done before)[/dim]")
            content = _read(path)
            if not {"measured", "result"} <= content.keys():
                raise InputError(
                    f"{path} does not say on what it was measured: it is of an older version of the demo; "
                    f"remove {self.folder} with {_removal(self.folder)} and run again"
                )
        else:
            self.console.print(f"[bold]▶ {title}[/bold]")
            content = _measure(work, *arguments)
            if not self._settings_file.is_file():
                write_output(self._settings_file, json.dumps(self.settings, indent=1) + "\n")
            write_output(path, json.dumps(content, indent=1) + "\n")
            self.console.print(f"  {content['measured']['seconds']:.1f} s")
        self.measured[name] = {**content["measured"], "title": title}
        return dict(content["result"])


def conclude(
    steps: Steps,
    run: Callable[[], dict[str, Any]],
    report: Callable[[dict[str, Any]], tuple[Sequence[str], Path, Path]],
) -> int:
    """Run a demo to its end and show what it found.

    Args:
        steps: the demo's.
        run: does them; its results have a `cache_check`.
        report: writes the report of those results; gives findings (Markdown), report.md and report.html.

    Returns:
        the exit code: 1 if a step or the cache check failed, 130 if the user interrupted.
    """
    try:
        results = run()
    except StepError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it was", file=sys.stderr)
        return 130
    findings, markdown, page = report(results)
    steps.console.print("\n[bold]What this run shows[/bold]")
    steps.console.print("\n".join(f"· {line.replace('**', '')}" for line in findings), markup=False)
    print(f"\nReport: {markdown} and {page}")
    return 0 if results["cache_check"]["passed"] else 1


def _measure(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """`work(*arguments)` with the machine, the commit and the load that it had, and the seconds that it took."""
    from evaluation.machine import describe_machine, load_average  # noqa: PLC0415

    machine, before = describe_machine(), load_average()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    start = time.perf_counter()
    result = work(*arguments)
    measured = {
        "machine": machine,
        "started": started,
        "seconds": round(time.perf_counter() - start, 2),
        "load_average": [before, load_average()],
    }
    return {"measured": measured, "result": result}


def _removal(folder: Path) -> str:
    """The command that removes a demo's folder."""
    return "`make clean`" if folder == DEFAULT_FOLDER else shlex.join(["rm", "-r", str(folder)])


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); remove it and run again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} does not hold a result; remove it and run again")
    return content
