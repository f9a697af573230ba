"""Importing this makes the scripts' modules in `predictors/` importable, as they are when a script there is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "predictors"))
