"""Which accelerator a run uses. Torch, which takes seconds and much memory to load, is asked only where one may be."""

from pathlib import Path
from typing import Literal

from flashllm.errors import UsageError, needing

Device = Literal["auto", "cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("auto", "cpu", "cuda")
_FREE_SHARE = 0.95
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # device files


def has_cuda() -> bool:
    """True where torch can use a GPU."""
    if not any(Path(path).exists() for path in _DRIVERS):
        return False
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def choose_accelerator(device: Device) -> str | None:
    """Torch's name of the accelerator that `device` means; None where the native core computes on the CPU.

    UsageError where "cuda" is asked for and cannot be had.
    """
    if device == "cpu" or (device == "auto" and not has_cuda()):
        return None
    with needing("--device cuda"):
        import torch
    if not torch.cuda.is_available():
        built = "sees no GPU" if torch.version.cuda else f"{torch.__version__} is built without CUDA"
        raise UsageError(f"--device cuda: torch {built}; install its driver and a torch with CUDA, or use --device cpu")
    return "cuda"


def free_nbytes(accelerator: str) -> int:
    """Bytes of its memory that a run may take: most of what is free, for libraries take some besides torch."""
    import torch

    return int(_FREE_SHARE * torch.cuda.mem_get_info(torch.device(accelerator, torch.cuda.current_device()))[0])
