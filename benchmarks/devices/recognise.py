"""What a processor is called, and which of its instructions matter to the runtime's products."""

from __future__ import annotations

import platform
from pathlib import Path

# Names in /proc/cpuinfo, and what they are called.
_KNOWN = {
    "avx2": "AVX2",
    "fma": "FMA",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx_int8": "AMX-INT8",
    "asimd": "NEON",
    "asimdhp": "FP16",
    "asimddp": "int8 dot product",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "sve": "SVE",
    "sve2": "SVE2",
}


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The architecture, and what `cpuinfo` lists of the extensions above."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            present = set(value.split())
            found = [name for flag, name in _KNOWN.items() if flag in present]
            return f"{platform.machine()} with {', '.join(found)}" if found else platform.machine()
    return f"{platform.machine()}; extensions not readable here"


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model, on ARM boards often the board's; the architecture where nothing is said."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()
