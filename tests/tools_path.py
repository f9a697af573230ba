"""Importing this makes the scripts in `tools/` importable, as they are for one another when one is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
