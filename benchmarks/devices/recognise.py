"""Whether this machine is a device: its processor, instruction set, memory, and the names that boards have."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

from benchmarks.devices.schema import Device

CPUINFO = Path("/proc/cpuinfo")

_EXTENSIONS = {
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


def is_this_machine(device: Device, processor: str = "cpu") -> bool:
    """Whether the program runs on `device` itself, so that its own measurements decide.

    Args:
        device: the device asked about.
        processor: where the measured work runs; a GPU's budget is not judged by the CPU beside it. A device that is
            always recognised is whatever runs here.
    """
    rule = device.recognise
    if rule is not None and rule.always:
        return True
    if rule is None or processor != device.processor:
        return False
    parts = [(rule.device_tree_model, _device_tree_model), (rule.android_product, _android_product)]
    whole = [(rule.processor, processor_name), (rule.instruction_set, instruction_set)]
    same = [wanted.lower() in read().lower() for wanted, read in parts if wanted is not None]
    same += [wanted == read() for wanted, read in whole if wanted is not None]
    if not same or not all(same):
        return False
    return rule.min_memory_mb <= total_memory_mb() <= rule.max_memory_mb


def instruction_set() -> str:
    """The architecture, and the extensions above that /proc/cpuinfo lists."""
    present = _cpuinfo("flags", "Features")
    if present is None:
        return f"{platform.machine()}; extensions not readable here"
    found = [name for flag, name in _EXTENSIONS.items() if flag in present.split()]
    return f"{platform.machine()} with {', '.join(found)}" if found else platform.machine()


def processor_name() -> str:
    """The processor's model, on ARM boards often the board's; the architecture where the system names none."""
    return _cpuinfo("model name", "Model") or platform.processor() or platform.machine()


def total_memory_mb() -> float:
    """Physical memory of this machine in MB (10^6 bytes)."""
    import psutil

    return float(psutil.virtual_memory().total) / 1e6


def _cpuinfo(*keys: str) -> str | None:
    """The first line of /proc/cpuinfo with one of these keys, without the key."""
    for line in _read_text(CPUINFO).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""


def _device_tree_model() -> str:
    return _read_text(Path("/proc/device-tree/model"))


def _android_product() -> str:
    command = shutil.which("getprop")  # Android's own; absent elsewhere
    if command is None:
        return ""
    try:
        done = subprocess.run([command, "ro.product.model"], capture_output=True, text=True, timeout=5, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip()
