"""The state of an interrupted run on disk; a CPU run continues from it bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.hf_config import read_json
from sportsllm.storage.artifact import STATE_DIRECTORY, replace_state
from sportsllm.storage.checkpoint import save_tensors


@dataclass
class Progress:
    """How far a run is: steps taken, losses since the last logged step, the last validation."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    valid_bits_per_byte: float | None = None


def save_state(
    directory: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    progress: Progress,
    identity: str,
    config: Any,
) -> None:
    """Write `directory`/state, replacing an older one only when the new one is whole.

    Args:
        directory: of the run.
        model, optimizers, scaler, progress: saved.
        identity: fingerprint of the run.
        config: the run's settings, a dataclass.
    """
    fresh = directory / f"{STATE_DIRECTORY}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    save_tensors(fresh / "model.safetensors", _contiguous(model.state_dict()))
    for number, optimizer in enumerate(optimizers):
        tensors = {
            f"{parameter}.{key}": torch.as_tensor(value)
            for parameter, state in optimizer.state_dict()["state"].items()
            for key, value in state.items()
        }
        save_tensors(fresh / f"optimizer{number}.safetensors", _contiguous(tensors))
    save_tensors(fresh / "rng.safetensors", {"torch": torch.get_rng_state()})
    state = {"identity": identity, "config": dataclasses.asdict(config), "scaler": scaler.state_dict()}
    (fresh / "state.json").write_text(json.dumps(state | dataclasses.asdict(progress)), encoding="utf-8")
    replace_state(directory, fresh)


def load_state(
    directory: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    progress: Progress,
    identity: str,
    config: Any,
) -> None:
    """Restore what `save_state` wrote, in place.

    Raises:
        UsageError: the state belongs to a run with other settings.
        ArtifactError: it is damaged.
    """
    source = directory / STATE_DIRECTORY
    state = read_json(source / "state.json")
    try:
        if state["config"] != dataclasses.asdict(config) or state["identity"] != identity:
            raise UsageError(
                f"{source}: was saved by a run with other settings or inputs; resume with the same ones, "
                f"or remove {directory}"
            )
        model.load_state_dict(load_file(str(source / "model.safetensors")))
        for number, optimizer in enumerate(optimizers):
            layout = optimizer.state_dict()
            layout["state"] = {}
            for name, tensor in load_file(str(source / f"optimizer{number}.safetensors")).items():
                parameter, _, key = name.partition(".")
                layout["state"].setdefault(int(parameter), {})[key] = tensor
            optimizer.load_state_dict(layout)
        torch.set_rng_state(load_file(str(source / "rng.safetensors"))["torch"])
        for key in ("step", "losses", "valid_bits_per_byte"):
            setattr(progress, key, state[key])
        if state["scaler"]:
            scaler.load_state_dict(state["scaler"])
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ArtifactError(f"{source}: damaged ({error}); remove {directory} and start again") from None


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
