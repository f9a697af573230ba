"""flashllm: language models larger than memory, their FFN neurons streamed from flash as they are needed.

Importing this package imports neither torch nor transformers; `flashllm.FlashModel` loads them on first use, and
`flashllm.OffloadEngine`, for many prompts at once, what it needs.
"""

from typing import TYPE_CHECKING, Any

from flashllm.errors import needing

if TYPE_CHECKING:
    from flashllm.hf.model import FlashModel
    from flashllm.offload.engine import OffloadEngine

__version__ = "0.2.0"
__all__ = ["FlashModel", "OffloadEngine", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "FlashModel":
        with needing("FlashModel"):
            from flashllm.hf.model import FlashModel

        return FlashModel
    if name == "OffloadEngine":
        with needing("OffloadEngine"):
            from flashllm.offload.engine import OffloadEngine

        return OffloadEngine
    raise AttributeError(f"module 'flashllm' has no attribute {name!r}")
