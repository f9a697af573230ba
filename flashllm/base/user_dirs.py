"""Folders of this user's own files. Creates nothing."""

import sys
from pathlib import Path


def user_cache_dir() -> Path:
    """The folder of converted models, profiles and the chat's history, by the platform's rule."""
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "flashllm"
