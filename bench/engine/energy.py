"""Energy of the processor package from RAPL, where the system lets us read it (paper A, appendix A.5.3)."""

from pathlib import Path

_ROOT = Path("/sys/class/powercap")


def joules() -> float | None:
    """A counter that rises with the energy used by all packages; None where there is none to read."""
    total = 0.0
    found = False
    for domain in sorted(_ROOT.glob("*-rapl:?")):
        try:
            total += int((domain / "energy_uj").read_text()) / 1e6
            found = True
        except (OSError, ValueError):
            continue
    return total if found else None
