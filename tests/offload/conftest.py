"""Lets tests import the helpers in their folders, and the scripts of bench/, by name."""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "offload"
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("jobs", "pipeline")]


@pytest.fixture
def bench_path(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(BENCH))
    return BENCH


@pytest.fixture(autouse=True)
def _forget_bench_modules():
    yield
    for name in [name for name in sys.modules if name.startswith("offload_")]:
        del sys.modules[name]
