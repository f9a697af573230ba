"""flashllm: language models larger than memory, their FFN neurons streamed from flash as they are needed.

Importing this package imports neither torch nor transformers; `flashllm.FlashModel` loads them on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashllm.hf.model import FlashModel

__version__ = "0.1.0"
__all__ = ["FlashModel", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "FlashModel":
        from flashllm.hf.model import FlashModel

        return FlashModel
    raise AttributeError(f"module 'flashllm' has no attribute {name!r}")
