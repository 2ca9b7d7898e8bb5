"""Pipeline stages: each process holds some neighbouring layers, the first the embedding, the last norm and head.

The batches of a step are the microbatches of `torch.distributed.pipelining`. A stage is a `SportsLLM` whose other
layers have no memory and pass on what they are given, so names, states and checkpoints are those of the whole model.
An embedding that is the head too is in the first and in the last process, which add up its gradients.
Shape suffixes: B sequences, T tokens, D hidden_size.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch import Tensor, nn

from sportsllm import processes
from sportsllm.errors import UsageError
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import Batch
from sportsllm.training.loss import cross_entropy


class Stage(SportsLLM):
    """A model of which this process holds a part; `hidden` computes that part, the others' is `received`."""

    received: Tensor

    def embedded(self, tokens_BT: Tensor, places: slice | Tensor | None = None) -> Tensor:
        """What this process's first layer reads, (B, T, D)."""
        return super().embedded(tokens_BT, places) if processes.rank() == 0 else self.received

    @property
    def copied_head(self) -> nn.Parameter | None:
        """In the last process the head, if the first one has it as its embedding."""
        last = processes.rank() == processes.stages() - 1
        return self.model.embed_tokens.get_parameter("weight") if self.lm_head is None and last else None

    @property
    def device(self) -> torch.device:
        """Where its own part is."""
        return next(parameter.device for parameter in self.parameters() if not parameter.is_meta)


def place_stage(model: SportsLLM, device: torch.device, stages: int) -> None:
    """Keep this process's part of a model, the same in all processes, on a device.

    Raises:
        UsageError: the model or the number of processes does not allow it.
    """
    layers, number, flag = model.model.layers, processes.rank(), f"--set pipeline={stages}"
    if processes.count() != stages:
        raise UsageError(f"{flag}: torchrun started {processes.count()} processes; start {stages}")
    if len(layers) < stages:
        raise UsageError(f"{flag}: the model has {len(layers)} layers; use fewer processes")
    processes.share_sequences(stages, in_stages=True)
    own = np.array_split(np.arange(len(layers)), stages)[number]
    elsewhere = [layer for place, layer in enumerate(layers) if place not in own]
    tables = {name: each for name, each in model.model.named_children() if name.startswith("embed")}
    if number < stages - 1:
        elsewhere += [model.model.norm, *([] if model.lm_head is None else [model.lm_head])]
    elif model.lm_head is None:
        del tables["embed_tokens"]  # this process's head
    for module in (*elsewhere, *(tables.values() if number > 0 else ())):
        setattr(module.to("meta"), "forward", lambda x_BTD, *_: x_BTD)  # noqa: B010  # of this module alone
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    model.__class__ = Stage


class Pipeline(nn.Module):
    """Gradients of a step, by the schedule 1F1B (https://arxiv.org/abs/2104.04473), or GPipe if batches are few."""

    def __init__(self, stage: Stage, microbatches: list[Batch], autocast: Callable[[], torch.autocast]) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        super().__init__()
        self.stage, self.autocast, stages = stage, autocast, processes.count()
        shared = stage.lm_head is None and stage.head_weight.requires_grad
        self.ends = torch.distributed.new_group([0, stages - 1]) if shared else None
        self.ahead, self.scored = iter(list[Batch]()), 1
        tokens_BT = microbatches[0].tokens
        stream_BTD = torch.empty(*tokens_BT.shape, stage.config.hidden_size, device="meta")
        read = tokens_BT.to("meta") if processes.rank() == 0 else stream_BTD.requires_grad_()
        written = stream_BTD.detach().requires_grad_()
        part = PipelineStage(self, processes.rank(), stages, stage.device, input_args=read, output_args=written)
        schedule = ScheduleGPipe if len(microbatches) < stages else Schedule1F1B
        self.schedule = schedule(part, len(microbatches), self._loss, scale_grads=False)

    def add_gradients(self, microbatches: list[Batch], scored: int) -> float:
        """Add the gradient of the mean loss of `scored` tokens; the last process returns the loss, the others 0."""
        self.ahead, self.scored, losses = iter(microbatches), scored, list[Tensor]()
        read = [torch.cat([batch.tokens for batch in microbatches])] * (processes.rank() == 0)
        targets = torch.cat([batch.targets for batch in microbatches])
        try:
            self.schedule.step(*read, target=targets, losses=losses, return_outputs=False)
        except RuntimeError as error:  # without its tensors, and out of memory as such
            raise (error.__cause__ or error) from None
        if self.ends is not None and processes.rank() in (0, processes.count() - 1):
            torch.distributed.all_reduce(self.stage.head_weight.grad, group=self.ends)
        return sum(float(loss.detach()) for loss in losses)

    def forward(self, read: Tensor) -> Tensor:
        """The next microbatch: tokens (B, T), in later stages the stream (B, T, D), to this stage's (B, T, D)."""
        batch, self.stage.received = next(self.ahead), read
        with self.autocast():
            return self.stage.hidden(batch.tokens, batch.documents)

    def _loss(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        with self.autocast():
            head, cap = self.stage.head_weight, self.stage.config.logit_softcap
            return cross_entropy(hidden_BTD, head, targets_BT, softcap=cap) / self.scored


class StageDecoder(TorchDecoder):
    """Scores text in all processes together: each computes its layers, the last one tells the others the scores."""

    def _next_token_scores(self, tokens_BT: Tensor) -> npt.NDArray[np.float32]:
        stage, last, number = self.model, processes.count() - 1, processes.rank()
        assert isinstance(stage, Stage), "place_stage was called"
        scores_BT = torch.empty(len(tokens_BT), tokens_BT.shape[1] - 1, device=stage.device)
        if number > 0:
            stage.received = torch.empty(*scores_BT.shape, stage.config.hidden_size, device=stage.device)
            torch.distributed.recv(stage.received, number - 1)
        if number < last:
            torch.distributed.send(stage.hidden(tokens_BT[:, :-1]), number + 1)
        else:
            scores_BT = torch.from_numpy(super()._next_token_scores(tokens_BT)).to(stage.device)
        torch.distributed.broadcast(scores_BT, last)
        return np.asarray(scores_BT.cpu())
