"""Where this user's own files are kept. Creates nothing."""

import sys
from pathlib import Path


def user_cache_dir() -> Path:
    """Where converted models, profiles and the chat's history are kept, by the platform's rule."""
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "flashllm"
