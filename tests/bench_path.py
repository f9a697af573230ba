"""Importing this makes the scripts in `bench/` importable, as they are for one another when one is run."""

import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench"
sys.path[:0] = [str(BENCH / room) for room in ("", "engine", "cache", "faults", "io", "offload", "peer", "quality")]
