"""Our figures and llama-benchy's, of a server whose speed is exact: what differs is definition, not noise."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench_stand_in import Script, scripted
from tests.conftest import harness
from tests.e2e.serving import Served
from tests.e2e.test_bench_server import llama_benchy, ours


@pytest.mark.peers
@pytest.mark.parametrize("bundle", [1, 4])
def test_llama_benchy_and_ours_differ_by_definition_only(tmp_path: Path, bundle: int) -> None:
    program = harness("llama-benchy")
    assert program is not None
    with scripted(Script(tokens_per_s=100, bundles=(bundle,), prefill_s=0.2)) as url:
        server = Served.__new__(Served)
        server.port = int(url.split(":")[2].split("/")[0])
        our, their = ours(server, tmp_path), llama_benchy(server, tmp_path, program)
    assert our["e2e_ttft"] == pytest.approx(their["e2e_ttft"], rel=0.1)
    # Told nothing of bundles, llama-benchy spreads 32 tokens over the 28 that come after the first four.
    assert our["tg"] == pytest.approx(their["tg"] * (1.0 if bundle == 1 else 28 / 31), rel=0.03)
    assert our["peak"] < their["peak"]
