"""On what the demo's steps were measured: a report may hold steps of several commits and machines."""

from __future__ import annotations

from typing import Any

SHOWN = ("train-", "times-")  # steps whose figures depend on what else the machine does


def mixture(results: dict[str, Any]) -> str:
    """A warning (Markdown) when not all steps were measured at one commit and on one machine; else an empty text."""
    different = [
        what
        for what, groups in (("commits", steps_by_commit(results)), ("machines", steps_by_machine(results)))
        if len(groups) > 1
    ]
    if not different:
        return ""
    return (
        f"**The steps of this report come from different {' and different '.join(different)}**; "
        "“How it was measured” says which from where."
    )


def steps_by_commit(results: dict[str, Any]) -> dict[str, list[str]]:
    """Names of the steps that ran at each commit; a training that was continued at another one is under both."""
    trained = {
        f"train-{arm}-{seed}": run["commits"] for seed, arms in results["runs"].items() for arm, run in arms.items()
    }
    groups: dict[str, list[str]] = {}
    for name, measured in results["steps"].items():
        for commit in dict.fromkeys(trained.get(name, [measured["machine"]["commit"]])):
            groups.setdefault(commit or "unknown (not a git checkout)", []).append(name)
    return groups


def steps_by_machine(results: dict[str, Any]) -> dict[str, list[str]]:
    """Names of the steps that ran on each machine, versions included."""
    groups: dict[str, list[str]] = {}
    for name, measured in results["steps"].items():
        machine = measured["machine"]
        versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
        described = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB; {versions}"
        groups.setdefault(described, []).append(name)
    return groups


def busy(results: dict[str, Any]) -> str:
    """A sentence (Markdown) when more processes wanted to run than there are cores as the times ended; else empty."""
    times = next(measured for name, measured in results["steps"].items() if name.startswith("times-"))
    load, cores = times["load_average"][1], times["machine"]["cores"]
    if load is None or load <= cores:
        return ""
    return f"**Busy machine:** the times were taken at a load of {load:.1f} on {cores} cores; a quiet one gives others."


def origin(results: dict[str, Any]) -> str:
    """Machine and commit as Markdown list items: one each, or one for every group of steps."""
    lines = []
    for what, groups in (("Machine", steps_by_machine(results)), ("Commit", steps_by_commit(results))):
        for described, steps in groups.items():
            of = "all steps" if len(groups) == 1 else ", ".join(steps)
            lines.append(f"- {what} ({of}): {described}.")
    return "\n".join(lines)


def time_and_load(results: dict[str, Any]) -> str:
    """The time of all steps together, and time and load of those that a busy machine disturbs (Markdown)."""
    steps = results["steps"]
    total = sum(measured["seconds"] for measured in steps.values())
    rows = ["| step | started | time | load before | load after |", "| --- | --- | ---: | ---: | ---: |"]
    for name, measured in steps.items():
        if name.startswith(SHOWN):
            before, after = map(_load, measured["load_average"])
            started = measured["started"].replace("T", " ").replace("+00:00", " UTC")
            rows.append(f"| {measured['title']} | {started} | {measured['seconds']:.1f} s | {before} | {after} |")
    first = next(iter(steps.values()))
    return (
        f"All {len(steps)} steps together took {total / 60:.1f} minutes; a step that was interrupted counts from its "
        f"last start. The load is the machine's 1-minute average, this demo included ({results['ranks']} processes in "
        f"training, {results['timing_threads']} thread in the times); before the first step it was "
        f"{_load(first['load_average'][0])}.\n\n" + "\n".join(rows)
    )


def _load(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"
