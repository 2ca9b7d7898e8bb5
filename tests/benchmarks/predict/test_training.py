"""`plan --training`: memory against a card's, the changes that make a step fit, time and price."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.devices.load import DEVICES, load_device
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.description import block_matrices
from sportsllm.models.presets import PLANNED, PRESETS
from sportsllm.models.training_memory import TrainingStep, training_memory
from tests.support.plans import plan

CONFIG = PRESETS["base-162m"]
DOCS = Path(__file__).resolve().parents[3] / "docs"
STEP = {"training": True, "batch": 32, "length": 2_048, "precision": "fp16"}


def _plan(device: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = plan(shape="base-162m", device=device, **{**STEP, **changes})["training"]
    return found


@pytest.mark.parametrize(
    ("device", "fits", "plain", "checkpointed"),
    [("rtx-3060", True, 8, 49), ("rtx-3070", False, 4, 26), ("rtx-3080", True, 6, 38), ("rtx-3090", True, 20, 118)],
)
def test_the_cards(device: str, fits: bool, plain: int, checkpointed: int) -> None:
    """Batch 32 x 2,048 needs checkpointing on every card, and on the one of 8 GB a smaller batch too."""
    found = _plan(device)
    usable = 1e6 * load_device(device).hardware.memory_usable.value  # type: ignore[union-attr]
    assert found["usable_bytes"] == usable
    assert (found["plain"]["fits"], found["checkpointed"]["fits"]) == (False, fits)
    assert (found["plain"]["largest_batch"], found["checkpointed"]["largest_batch"]) == (plain, checkpointed)
    assert found["changes"]
    for change in found["changes"]:
        flags = shlex.split(change["flags"])
        batch = int(flags[flags.index("--batch-size") + 1]) if "--batch-size" in flags else 32
        rare = dict(flag.split("=") for flag in flags if "=" in flag)
        accumulation, bits = int(rare.get("accumulation", 1)), int(rare.get("optimizer_bits", 32))
        checkpoint = "checkpoint_activations=true" in flags
        step = TrainingStep(batch, 2_048, "fp16", optimizer_bits=bits, processor="gpu", checkpointed=checkpoint)
        assert batch * accumulation == 32
        assert change["total_bytes"] == training_memory(CONFIG, step).total <= usable


def test_the_screen_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(shape="base-162m", device="rtx-3070", tokens=10**9, price_per_hour=0.5, **STEP)
    assert "predicted" not in result
    json.dumps(result)
    parts = {name: size for name, size in result["training"]["plain"].items() if name.endswith("_bytes")}
    total = parts.pop("total_bytes")
    assert sum(parts.values()) == total == result["training_memory_bytes"]
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 40
    words = " ".join(printed.split())
    for part in (
        "master weights, float32 650 650",
        "usable on rtx-3070 7,590 7,590",
        "fits no no",
        "largest batch that fits 4 26",
        "--batch-size 16 --set accumulation=2 --set checkpoint_activations=true 5,598",
        "30% (--set utilization) of the device's 40.6 TFLOP/s of 16-bit products",
    ):
        assert part in words, part


def test_time_energy_and_price_by_hand() -> None:
    """6 FLOPs a weight that is multiplied and token, 12 L D for each of (T + 1) / 2 positions; a third more blocks."""
    found = _plan("rtx-3070", tokens=10**9, price_per_hour=0.5, utilization=0.25)
    weights = 12 * (4 * 768**2 + 3 * 768 * 3_072)
    head = 32_000 * 768
    attention = 2 * 12 * 768 * 2_049  # forward
    per_token = 3 * (2 * (weights + head) + attention)
    assert (found["flops_per_token"], found["flops"]) == (per_token, per_token * 10**9)
    rates = {"plain": per_token, "checkpointed": per_token + 2 * weights + attention}
    for name, work in rates.items():
        hours = 10**9 * work / (0.25 * 40.6e12) / 3_600
        assert found[name]["hours"] == pytest.approx(hours)
        assert found[name]["energy_kwh"] == pytest.approx(0.220 * hours)
        assert found[name]["price"] == pytest.approx(0.5 * hours)
        assert found[name]["step_ms"] * found[name]["tokens_per_s"] == pytest.approx(1e3 * 32 * 2_048)
    assert _plan("rtx-3070", precision="fp32")["peak_from"] == "fp32_matmul_rate"
    assert _plan("jetson")["peak_from"] == "fp32_matmul_rate"  # its file has no other


def test_a_small_step_needs_no_change_and_float32_is_offered_bfloat16() -> None:
    assert _plan("rtx-3090", batch=4)["changes"] == []
    flags = [change["flags"] for change in _plan("rtx-3090", batch=16, precision="fp32")["changes"]]
    assert flags[0] == "--set precision=bf16" and not any("optimizer_bits=32" in each for each in flags)
    assert all("optimizer_bits=8" not in change["flags"] for change in _plan("rtx-3060", optimizer="muon")["changes"])


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(shape="8b", device="rtx-3090", training=True)["training"]
    assert found["changes"] == [] and found["checkpointed"]["largest_batch"] == 0
    assert "Nothing makes it fit; use a shorter --sequence or a smaller model." in capsys.readouterr().out


def test_without_a_device_there_are_parts_and_flops(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(shape="tiny-1m", training=True, tokens=1_000, optimizer_bits=8)["training"]
    assert "fits" not in found["plain"] and found["flops"] == 1_000 * found["flops_per_token"]
    words = " ".join(capsys.readouterr().out.split())
    assert "adamw with 8-bit states" in words and "FLOPs for 1,000 tokens." in words


def test_the_tables_in_the_docs_are_what_is_computed() -> None:
    use = (DOCS / "how-to" / "plan.md").read_text(encoding="utf-8")
    pages = "reference/presets.md", "how-it-works/prediction.md"
    model = "".join((DOCS / page).read_text(encoding="utf-8") for page in pages)
    for name in ("rtx-3060", "rtx-3070", "rtx-3080", "rtx-3090"):
        found = _plan(name)
        (row,) = [line for line in use.splitlines() if line.startswith(f"| {name.upper().replace('-', ' ')}")]
        batches = f"{found['plain']['largest_batch']} / {found['checkpointed']['largest_batch']}"
        assert f"| {found['usable_bytes'] / 1e6:,.0f} |" in row and row.endswith(f"| {batches} |")
    totals = [found[column]["total_bytes"] for column in ("plain", "checkpointed")]
    assert f"plain, {totals[0] / 1e6:,.0f} MB | checkpointed, {totals[1] / 1e6:,.0f} MB" in use
    assert f"{totals[0] / 1e9:.1f} GB; checkpointed {totals[1] / 1e9:.2f} GB" in model
    for name in ("small", "small-32k", "medium", "large", "70b", "200b"):
        assert f"{plan(shape=name)['parameters']:,}" in model, name
    shapes = plan(shape="base-162m", shapes=True, batch=32, length=2_048, precision="fp16")["shapes"]
    sizes = {shape["name"]: shape["bytes"] for shape in shapes}
    assert f"{sizes['hidden']:,} bytes" in model and f"{sizes['attention scores']:,} bytes" in model


def test_several_gpus_share_weights_gradients_and_states(capsys: pytest.CaptureFixture[str]) -> None:
    """What lies outside of the blocks is gathered twice with its gradients, the largest sublayer five times."""
    step = {"length": 4_096, "batch": 1, "training": True, "tokens": 20 * 10**9, "price_per_hour": 2.5}
    one, many = (plan(shape="8b", device="h100", gpus=gpus, **step)["training"] for gpus in (1, 64))
    sharded, parameters = many["sharded"], PLANNED["8b"].parameters
    assert not one["plain"]["fits"] and sharded["fits"]
    assert many["changes"][0]["flags"] == "--batch-size 1 --set accumulation=64 --set shard=true"
    for part, held in (("master_weights", 4), ("gradients", 4), ("optimizer_states", 8)):
        assert many["plain"][f"{part}_bytes"] == one["plain"][f"{part}_bytes"] == held * parameters
        assert sharded[f"{part}_bytes"] == pytest.approx(held * parameters / 64, rel=1e-6)
    wide = plan(shape="8b", device="h100", gpus=64, **step | {"batch": 4})["training"]["changes"]
    assert wide[0]["flags"] == "--batch-size 2 --set accumulation=128 --set shard=true"  # 256 sequences, as before
    config = PLANNED["8b"]
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    outside = parameters - config.num_hidden_layers * sum(part.numel for part in block_matrices(config))
    assert sharded["gathered_bytes"] == 4 * (2 * outside + 5 * feed_forward)
    for name in ("plain", "checkpointed"):
        for key, factor in {"tokens_per_s": 64, "hours": 1 / 64, "price": 1, "energy_kwh": 1}.items():
            assert many[name][key] == pytest.approx(factor * one[name][key])
    row = next(row for row in (DOCS / "how-to" / "plan.md").read_text().splitlines() if row.startswith("| memory, MB"))
    totals = [many[name]["total_bytes"] for name in ("plain", "checkpointed", "sharded", "sharded_checkpointed")]
    assert row == f"| memory, MB | {' | '.join(f'{total / 1e6:,.0f}' for total in totals)} |"
    assert "on each of 64 GPUs" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UsageError, match="gpus=2: give --target NAME too, a GPU"):
        plan(shape="8b", training=True, gpus=2)
    with pytest.raises(UsageError, match="optimizer_bits=8: sharded states have 32"):
        plan(shape="8b", training=True, gpus=2, device="h100", optimizer_bits=8)


def test_refusals(tmp_path: Path) -> None:
    text = (DEVICES / "rtx-3070.toml").read_text(encoding="utf-8")
    begin, end = text.index("[hardware.memory_usable]"), text.index("[hardware.cores]")
    (tmp_path / "card.toml").write_text(text[:begin] + text[end:], encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"card\.toml: hardware.memory_usable: is missing"):
        _plan(str(tmp_path / "card.toml"))
    with pytest.raises(UsageError, match="--tokens, --set utilization: only with --training"):
        plan(shape="small", tokens=5, utilization=0.5)
    with pytest.raises(UsageError, match="price_per_hour needs --tokens"):
        _plan("rtx-3070", price_per_hour=1.0)
    with pytest.raises(UsageError, match="price_per_hour needs --target"):
        plan(shape="small", training=True, tokens=5, price_per_hour=1.0)
    with pytest.raises(UsageError, match=r"utilization=1.5: must be 0 to 1"):
        _plan("rtx-3070", utilization=1.5)
    with pytest.raises(UsageError, match=r"utilization=0.0 must be above 0"):
        _plan("rtx-3070", utilization=0.0)
    with pytest.raises(UsageError, match="--set optimizer_bits=8: is for adamw"):
        _plan("rtx-3070", optimizer="muon", optimizer_bits=8)
