"""A manifest that is wrong though its hash is right, as another program or an attacker would write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orthros_train.errors import InputError
from orthros_train.training import manifest
from orthros_train.training.manifest import (
    FileRecord,
    InvalidCheckpointError,
    Layout,
    Manifest,
    ParameterRecord,
    Progress,
    read_manifest,
    verify_files,
)

WHOLE = Manifest(
    progress=Progress(step=3, sample_position=24, updates=3),
    layout=Layout(world_size=2, zero_stage=1, tensor=1, pipeline=1, precision="bf16"),
    config={"task": "pretrain"},
    fingerprints={"data": "ab", "tokenizer": "cd"},
    versions={"torch": "2"},
    saved_at="2026-01-01",
    parameters={"norm.weight": ParameterRecord((8,), None), "embed.weight": ParameterRecord((64, 8), 0)},
    files=(FileRecord("rank_0.safetensors", 12, "ef"),),
)
NAMES = ("progress", "layout", "config", "fingerprints", "versions", "saved_at", "parameters", "files", "step", "bytes")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=3),
    max_leaves=5,
)


def body_of(folder: Path) -> dict[str, Any]:
    WHOLE.write(folder)
    body = json.loads((folder / "manifest.json").read_text())
    del body["manifest_sha256"]
    return body


def write(folder: Path, body: dict[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps({**body, "manifest_sha256": manifest._digest(body)}))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to everything inside `value`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inside for found in ((*path, key), *places(item, (*path, key)))]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    WHOLE.write(tmp_path)
    assert read_manifest(tmp_path) == WHOLE


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_anything_anywhere_is_understood_or_damaged(tmp_path: Path, data: st.DataObject) -> None:
    body = body_of(tmp_path)
    *outer, key = data.draw(st.sampled_from(places(body)))
    target: Any = body
    for step in outer:
        target = target[step]
    if data.draw(st.booleans()):
        target[key] = data.draw(JSON)
    else:
        del target[key]
    write(tmp_path, body)
    try:
        found = read_manifest(tmp_path)
    except (InvalidCheckpointError, InputError):
        return
    verify_files(tmp_path, found.files)
    found.write(tmp_path)
    assert read_manifest(tmp_path) == found


@pytest.mark.parametrize("text", ["", "null", "[]", "{", "[" * 200_000, "\ud800".encode("utf-8", "surrogatepass")])
def test_what_is_no_manifest_is_damaged(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InvalidCheckpointError, match="unreadable"):
        read_manifest(tmp_path)


def test_another_format_is_not_damage(tmp_path: Path) -> None:
    """Set aside as damaged, a newer version's checkpoint would make the run go on from an older one."""
    write(tmp_path, {**body_of(tmp_path), "format": 2})
    with pytest.raises(InputError, match="has format 2, this version reads 1; use the one that wrote it"):
        read_manifest(tmp_path)
