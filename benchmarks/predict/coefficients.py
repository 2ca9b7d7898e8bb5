"""The coefficients that predictions for a device are made with: its own, or shares of its hardware's figures."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from benchmarks.devices.schema import Band, Coefficients, Device
from benchmarks.measure.hardware import this_machine

BYTES_PER_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "int8": 1 + 4 / 128, "int4": 0.5 + 4 / 128, "int8_rows": 1.0}
STANDARD_LAYERS = 5.0  # `layer_us` more for a layer of standard operators, 59 beside 10 of ONNX Runtime's own
_STUDY = "`benchmarks.studies.prediction_error`"
CALIBRATED_BAND = Band(tpot=1.5, ttft=1.5, memory=1.2, source=_STUDY, measured=True)

# Fields are those of `Coefficients`, rates as shares of the hardware's figures. Weights are read at `reading` of the
# bandwidth and then multiplied by one row at `multiply` of the peak rate.
# Between two machines, ONNX Runtime 1.31.1, 2 threads, 2026-11. A quiet Zen 5 with AVX512-VNNI; peaks 2,060 GOP/s and
# 510 GFLOP/s, bandwidth 50 to 81 GB/s. `small` decoded 52 MB (int4, block 128) in 1.7 ms, 100 MB (int8) in 3.05 ms and
# 389 MB (fp32) in 10.6 ms; from depth 32 to 512 it took 0.92 ms more with a float32 cache (35 MB) and 0.49 ms more
# with an int8 one. Memory is that of `export.runtime.decoder`: 69 MB before the weights, with prepacked copies.
# A noisy Zen 4 (peaks 947 and 237): shares fitted to whole models differ from these by up to a half for one row.
# Blocks are of this program's kernels. Against ONNX Runtime's operators they read int4 1.2 (Zen 4) and 1.4 times as
# fast (Zen 3 with AVX2; bandwidth 20 GB/s, peaks 267 and 133), int8 1.1 and 1.4 times, prompts at int4 1.1 and 1.5
# times, and hold 0.86 of the weights' memory. The Zen 3 decodes 1.3 to 1.5 times as fast as these shares say: kernels
# there are bound by bandwidth, and its int8 peak is that of saturating products.
CPU: dict[str, Any] = {
    "source": "ONNX Runtime 1.31.1 on a Zen 5 and a Zen 4 server: shares of their figures, chosen between both",
    "date": date(2026, 11, 23),
    "reading": 1.0,
    "multiply": {"fp32": 0.3, "int8": 0.25, "int4": 0.4, "int8_rows": 0.072},
    "cache_gb_per_s": {"fp32": 0.7, "int8": 0.45},
    "attention_gmac_per_s": 0.25,
    "pass_us": 10.0,
    "layer_us": 18.0,
    "kernel_layer_us": 0.7,  # as a share of the above
    "prefill_gmac_per_s": {"fp32": 0.8, "int8": 0.35, "int4": 0.42, "int8_rows": 0.7},
    "prefill_attention_gmac_per_s": 0.4,
    "elementwise_gb_per_s": 0.25,
    "runtime_mb": 69.0,
    "weight_copies": {"fp32": 1.15, "int8": 1.28, "int4": 1.3, "int8_rows": 1.45},
    "band": Band(tpot=2.0, ttft=2.0, memory=1.2, source=_STUDY, measured=True),
}
# An 8B model at Q4 (4.9 GB, 32 layers) decodes 42, 74 and 87 tokens/s on RTX 3060, 3080 and 3090, a 3B one
# (2.0 GB, 28 layers) 123 on RTX 3060: 0.7 of the bandwidth and 50 us a layer meet all four within 22%. The others are
# guesses: weights of 4 and 8 bits are widened and multiplied in fp16, at half the int8 peak.
_GPU_PRODUCTS = {"fp32": 0.5, "fp16": 0.2, "int8": 0.2, "int4": 0.2, "int8_rows": 0.2}
GPU: dict[str, Any] = {
    "source": "Published decoding rates of RTX 3060, 3080 and 3090; first token and memory are guesses",
    "date": date(2026, 11, 21),
    "reading": 0.7,
    "multiply": _GPU_PRODUCTS,
    "cache_gb_per_s": {"fp32": 0.7, "int8": 0.7},
    "attention_gmac_per_s": 0.5,
    "pass_us": 0.0,
    "layer_us": 50.0,
    "kernel_layer_us": 1.0,
    "prefill_gmac_per_s": _GPU_PRODUCTS,
    "prefill_attention_gmac_per_s": 0.2,
    "elementwise_gb_per_s": 0.25,
    "runtime_mb": 400.0,
    "weight_copies": dict.fromkeys(_GPU_PRODUCTS, 1.0),
    "band": Band(tpot=1.5, ttft=3.0, memory=1.5, source="guesses; published rates are within them", measured=False),
}


def resolve(device: Device) -> Coefficients:
    """The device file's own coefficients, else the shipped shares of its hardware's figures.

    A device without hardware figures, which stands for any machine, gets those of this one, measured once.
    """
    if device.coefficients is not None:
        return device.coefficients
    hardware, fields = device.hardware or this_machine(), dict({"cpu": CPU, "gpu": GPU}[device.processor])
    bandwidth, real = hardware.memory_bandwidth.value, hardware.fp32_matmul_rate.value
    peak = dict.fromkeys(BYTES_PER_WEIGHT, hardware.int8_matmul_rate.value) | {"fp32": real}  # multiply, add: two
    reading, multiply = fields.pop("reading"), fields.pop("multiply")
    if hardware.bandwidth_share is not None:
        reading = hardware.bandwidth_share.value
    if hardware.layer_overhead is not None:
        fields["layer_us"] = hardware.layer_overhead.value
    fields["kernel_layer_us"] *= fields["layer_us"]
    fields |= {
        "kind": "estimated",
        "standard_layer_us": STANDARD_LAYERS * fields["layer_us"],
        "weights_gb_per_s": {
            name: 1 / (1 / (reading * bandwidth) + 2 / BYTES_PER_WEIGHT[name] / (share * peak[name]))
            for name, share in multiply.items()
        },
        "cache_gb_per_s": {name: share * bandwidth for name, share in fields["cache_gb_per_s"].items()},
        "attention_gmac_per_s": fields["attention_gmac_per_s"] * real / 2,
        "prefill_gmac_per_s": {name: share * peak[name] / 2 for name, share in fields["prefill_gmac_per_s"].items()},
        "prefill_attention_gmac_per_s": fields["prefill_attention_gmac_per_s"] * real / 2,
        "elementwise_gb_per_s": fields["elementwise_gb_per_s"] * bandwidth,
    }
    return Coefficients.model_validate(fields)


def costs(coefficients: Coefficients) -> dict[str, float]:
    """What one unit of each term costs, by the coefficient's name and, where there are several, its format.

    Milliseconds for a byte, a MAC, a pass or a layer; bytes of memory for the process and for a byte of weights.
    Where the coefficients have no fp16, as on a CPU, it is widened to float32 when it is loaded.
    """
    found = dict[str, float]()
    for name, value in coefficients:
        if isinstance(value, dict):
            found |= {f"{name}.{each}": _converted(name, number) for each, number in value.items()}
        elif isinstance(value, float):
            found[name] = _converted(name, value)
    for name, bytes_in_memory in (("weights_gb_per_s", 2), ("prefill_gmac_per_s", 1), ("weight_copies", 2)):
        found.setdefault(f"{name}.fp16", bytes_in_memory * found[f"{name}.fp32"])
    found.setdefault("cache_gb_per_s.fp16", found["cache_gb_per_s.fp32"])
    return found


def with_costs(coefficients: Coefficients, changed: Mapping[str, float]) -> Coefficients:
    """The coefficients with those replaced whose costs are given: the way back from `costs`."""
    fields = coefficients.model_dump()
    for term, cost in changed.items():
        name, _, weight_format = term.partition(".")
        value = _converted(name, cost) if name.endswith("_per_s") else cost / _converted(name, 1.0)
        table, key = (fields[name], weight_format) if weight_format else (fields, name)
        table[key] = float(f"{value:.4g}")
    return Coefficients.model_validate(fields)


def _converted(name: str, value: float) -> float:
    """A coefficient's cost by the unit in its name. 1 GB/s is 10^6 bytes a ms; for rates its own inverse."""
    if name.endswith("_per_s"):
        return 1e-6 / value
    return value * {"_us": 1e-3, "_mb": 1e6}.get(name[-3:], 1.0)


def reliability(device: Device) -> dict[str, Any]:
    """`source`, `date`, `kind` and `band` of the coefficients, and `own`, whether they are the device file's."""
    fields = resolve(device).model_dump(mode="json", include={"source", "date", "kind", "band"})
    return {**fields, "own": device.coefficients is not None}
