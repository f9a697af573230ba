"""Where this user's own files are kept. Creates nothing."""

import os
import sys
from pathlib import Path


def user_cache_dir() -> Path:
    """Where converted models, calibrations and the chat's history are kept. Not created here.

    In $XDG_CACHE_HOME where that is set, else by the platform's rule.
    """
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    own = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return (asked if asked.is_absolute() else own) / "flashllm"
