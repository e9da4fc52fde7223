"""Clusters for the tests; skipped, with the reason, where there can be none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launchers.local_cluster import LocalCluster, why_not


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two nodes."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with LocalCluster(2) as started:
        yield started
