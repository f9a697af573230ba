"""The environment of a process whose home is new: what pip was told and keeps stays that of this one."""

import os
from pathlib import Path


def fresh_home(folder: Path) -> dict[str, str]:
    """The variables of this process, with `folder` as home."""
    home = Path.home()
    pip = {"PIP_CACHE_DIR": str(home / ".cache" / "pip")}
    if (config := home / ".config" / "pip" / "pip.conf").exists():
        pip["PIP_CONFIG_FILE"] = str(config)
    return {**os.environ, "HOME": str(folder), **pip}
