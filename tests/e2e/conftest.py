"""One server of the embedded model for all tests that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.serving import Served, serve


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server that starts without a setting, answering as the reference model."""
    with serve(tmp_path_factory.mktemp("embedded")) as served:
        yield served
