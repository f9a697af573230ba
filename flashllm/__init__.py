"""flashllm: language models larger than memory, their FFN neurons streamed from flash as they are needed.

Importing this package imports neither torch nor transformers; `flashllm.FlashModel` loads them on first use.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashllm.hf.model import FlashModel

# torch's threads sleep between products instead of spinning: beside the reader's threads a prompt takes half the time
# (bench/LOG.md). libgomp reads this once, when torch is loaded, and has no call for it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
__all__ = ["FlashModel", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "FlashModel":
        from flashllm.hf.model import FlashModel

        return FlashModel
    raise AttributeError(f"module 'flashllm' has no attribute {name!r}")
