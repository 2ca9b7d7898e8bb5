"""The state of an interrupted run on disk; a CPU run continues from it bit for bit."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.artifact import STATE_DIRECTORY, replace_state
from sportsllm.formats.checkpoint import save_tensors
from sportsllm.formats.json_files import read_json

_PROGRESS = ("step", "losses", "best_step", "best_bits_per_byte", "last_bits_per_byte", "bits_per_byte_before")
_BEST = "best.safetensors"


@dataclass
class RunState:
    """Everything that a run changes, and the `identity` and `config` that a saved state must agree with.

    Attributes:
        directory: of the run; the state is saved in its `state/`.
        step: steps taken.
        losses: of the last few steps.
        best_step, best_bits_per_byte, best: the step with the best score on held-out text, and its trained weights.
        last_bits_per_byte: of the step that was scored last.
        bits_per_byte_before: of the start, on the text that is reported.
    """

    directory: Path
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    identity: str
    config: Any
    step: int = 0
    losses: list[float] = field(default_factory=list)
    best_step: int | None = None
    best_bits_per_byte: float | None = None
    last_bits_per_byte: float | None = None
    bits_per_byte_before: float | None = None
    best: dict[str, Tensor] | None = None

    @property
    def mean_loss(self) -> float | None:
        """Mean of `losses`, in nats per token."""
        return sum(self.losses) / len(self.losses) if self.losses else None

    @property
    def is_saved(self) -> bool:
        """Whether there is a state to load."""
        return (self.directory / STATE_DIRECTORY).exists()

    def save(self) -> None:
        """Write `state/`, replacing an older one only when the new one is whole."""
        fresh = self.directory / f"{STATE_DIRECTORY}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        save_tensors(fresh / "model.safetensors", _contiguous(self.model.state_dict()))
        if self.best is not None:
            save_tensors(fresh / _BEST, _contiguous(self.best))
        for number, optimizer in enumerate(self.optimizers):
            tensors = {
                f"{parameter}.{key}": torch.as_tensor(value)
                for parameter, state in enumerate(_states(optimizer))
                for key, value in state.items()
            }
            save_tensors(fresh / f"optimizer{number}.safetensors", _contiguous(tensors))
        save_tensors(fresh / "rng.safetensors", {"torch": torch.get_rng_state()})
        state = {"identity": self.identity, "config": asdict(self.config), "scaler": self.scaler.state_dict()}
        state |= {name: getattr(self, name) for name in _PROGRESS}
        (fresh / "state.json").write_text(json.dumps(state), encoding="utf-8")
        replace_state(self.directory, fresh)

    def load(self) -> None:
        """Restore what `save` wrote, in place.

        Raises:
            UsageError: the state belongs to a run with other settings.
            ArtifactError: it is damaged.
        """
        source = self.directory / STATE_DIRECTORY
        state = read_json(source / "state.json")
        try:
            if state["config"] != json.loads(json.dumps(asdict(self.config))) or state["identity"] != self.identity:
                raise UsageError(
                    f"{source}: was saved by a run with other settings or inputs; resume with the same ones, "
                    f"or remove {self.directory}"
                )
            self.model.load_state_dict(load_file(str(source / "model.safetensors")))
            for number, optimizer in enumerate(self.optimizers):
                _restore(optimizer, load_file(str(source / f"optimizer{number}.safetensors")))
            torch.set_rng_state(load_file(str(source / "rng.safetensors"))["torch"])
            for name in _PROGRESS:
                setattr(self, name, state[name])
            if self.best_step is not None:
                self.best = load_file(str(source / _BEST))
            if state["scaler"]:
                self.scaler.load_state_dict(state["scaler"])
        except (SafetensorError, OSError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise ArtifactError(f"{source}: damaged ({error}); remove {self.directory} and start again") from None


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Each parameter's state, in the groups' order. `state_dict` would change them: types, and bitsandbytes' names."""
    return [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _restore(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put saved states back with their dtypes; scalars stay on the CPU, bitsandbytes' steps are plain integers."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        parameter = parameters[int(number)]
        if tensor.ndim:
            value: Any = tensor.to(parameter.device)
        else:
            value = tensor if tensor.is_floating_point() else int(tensor)
        optimizer.state[parameter][key] = value


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
