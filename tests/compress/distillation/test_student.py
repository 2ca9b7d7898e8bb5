"""What a student is taught: the loss against naive float64 code, and the whole training of it."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.distill import distill as command
from compress.distillation.loss import (
    DistillationConfig,
    HiddenMatching,
    attached,
    default_hidden_weight,
    default_kl_weight,
    default_layer_map,
    distillation_config,
    distillation_loss,
)
from compress.distillation.starts import plan_training
from compress.distillation.student import StudentTraining
from compress.prune import prune_checkpoint
from compress.pruning.job import PruneJob
from compress.pruning.shapes import Shape
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.manifest import read_manifest
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.documents import USUAL
from sportsllm.text.packing import IGNORE, Batch
from sportsllm.training.settings import Run, Start
from tests.support.distillation import CONFIG, FP32, run
from tests.support.models import saved, tiny_config, tiny_model

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def naive(teacher: SportsLLM, student: SportsLLM, of: Batch, weight: float) -> float:
    """weight * KL from the teacher, the rest cross-entropy; all logits, in float64."""
    with torch.no_grad():
        log_s, log_p = (m(of.tokens, documents=of.documents).double().log_softmax(-1) for m in (student, teacher))
    entropy = -log_s.gather(-1, of.targets.clamp(min=0)[..., None])[..., 0]
    losses = weight * (log_p.exp() * (log_p - log_s)).sum(-1) + (1 - weight) * entropy
    return float((losses * (of.targets != IGNORE)).sum())


@pytest.mark.parametrize("weight", [0.0, 0.2, 1.0])
def test_the_kl_weight_counts(weight: float) -> None:
    teacher, student = tiny_model(0, logit_softcap=3.0), tiny_model(3, **SMALL, logit_softcap=2.0)
    config = DistillationConfig(kl_weight=weight)
    assert config.asks_the_teacher == (weight > 0)
    loss = distillation_loss(config, teacher if config.asks_the_teacher else None)
    # Logits in float32: about 1e-6 of the largest, and of their exponentials.
    assert float(loss(student, batch()).detach()) == pytest.approx(naive(teacher, student, batch(), weight), rel=1e-5)


def test_matching_adds_its_share() -> None:
    teacher, student = tiny_model(0), tiny_model(3, **SMALL)
    plain = distillation_loss(FP32, teacher)(student, batch())
    matched = dataclasses.replace(FP32, hidden_weight=0.5)
    module = HiddenMatching(student.config, teacher.config, default_layer_map(2, 2))
    states: tuple[list[Tensor], list[Tensor]] = ([], [])
    with torch.no_grad():
        for model, found in zip((student, teacher), states, strict=True):
            model.hidden(batch().tokens, batch().documents, states=found)
        hidden = float(module(*states, batch().targets))
    with attached(student, module):
        total = distillation_loss(matched, teacher)(student, batch())
    assert float(total.detach()) == pytest.approx(float(plain.detach()) + 0.5 * hidden, rel=1e-5)


def batch() -> Batch:
    tokens = torch.randint(3, 384, (2, 24), generator=torch.Generator().manual_seed(0))
    targets = torch.randint(3, 384, (2, 24), generator=torch.Generator().manual_seed(1))
    targets[0, 9] = IGNORE
    return Batch(tokens, targets, (10, 24, 48), 0)


def test_signals_are_made_once_and_serve_pruning_too(
    checkpoint: Path, student: Path, corpus_file: Path, tmp_path: Path
) -> None:
    objective = dataclasses.replace(FP32, signals=tmp_path / "signals")
    run(checkpoint, str(student), tmp_path / "one", corpus_file, distillation=objective)
    made = (tmp_path / "signals" / "signals.json").stat().st_mtime_ns
    recovery = StudentTraining(checkpoint, CONFIG, (corpus_file,), distillation=objective)
    shape = Shape(hidden=64, intermediate=64, heads=4, kv_heads=2, layers=1, head_dim=16)
    job = PruneJob(checkpoint, [corpus_file], samples=2, recovery=recovery)
    result = prune_checkpoint(job, shape, tmp_path / "two")
    assert result.steps == CONFIG.steps
    assert (tmp_path / "signals" / "signals.json").stat().st_mtime_ns == made
    for path in (checkpoint, corpus_file):
        with pytest.raises(ArtifactError, match="exists and holds no teacher signals; give --signals a new directory"):
            dataclasses.replace(recovery, distillation=dataclasses.replace(FP32, signals=path)).prepare(tiny_config())


def test_a_teacher_whose_logits_overflow_is_refused(
    checkpoint: Path, student: Path, corpus_file: Path, tmp_path: Path
) -> None:
    model = load_checkpoint(checkpoint)
    model.model.norm.weight.data *= 1e38
    teacher = saved(tmp_path / "teacher", model, checkpoint)
    for whose, objective in (("teacher", FP32), ("model", dataclasses.replace(FP32, signals=tmp_path / "signals"))):
        with pytest.raises(ArtifactError, match=f"the {whose}'s logits are not finite"):
            run(teacher, str(student), tmp_path / "out", corpus_file, distillation=objective)


def test_hidden_states_are_matched_by_default_where_cut_weights_have_a_teacher() -> None:
    assert all(default_hidden_weight(Start.PRUNED, 1.0, None, tokens) == 3.0 for tokens in (None, 7.6, 2.6))
    assert default_hidden_weight(Start.PRUNED, 1.0, None, 0.6) == 0.0  # a teacher that is barely trained
    assert default_hidden_weight(Start.PRUNED, 0.0, None, None) == 0.0
    assert default_hidden_weight(Start.PRUNED, 1.0, Path("cache"), None) == 0.0
    assert all(default_hidden_weight(start, 1.0, None, None) == 0.0 for start in (Start.RANDOM, Start.QUANTIZED))
    runs = (Run(Start.PRUNED, tiny_config(vocab_size=size)) for size in (300, 3_000_000))  # the last one is very short
    plans = [plan_training(run, Path(), 100_000, {}, [Path()], [], 0, USUAL) for run in runs]
    assert [plan.distillation.hidden_weight for plan in plans] == [3.0, 0.0]


def test_the_default_kl_weight_depends_on_the_start() -> None:
    weights = {start: default_kl_weight(start) for start in Start}
    assert weights == dict.fromkeys(Start, 0.5) | {Start.RANDOM: 0.9, Start.BARELY_TRAINED: 0.9, Start.QUANTIZED: 1.0}
    assert [start for start in Start if distillation_config(start, Path(), {}).exact_logits] == [Start.QUANTIZED]


def test_the_command_takes_all_of_it(
    checkpoint: Path, student: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(student)
    result = command(
        teacher=str(checkpoint), student=".", corpus=[corpus_file],
        kl_weight=0.5, steps=1, batch_size=1, sequence=32,
        settings={"teacher_precision": "fp32", "hidden_weight": 0.1, "accumulation": 1},
    )  # fmt: skip
    settings = read_manifest(result.out).settings
    assert result.steps == 1 and result.out == Path("runs") / student.name
    assert (settings["kl_weight"], settings["hidden_weight"]) == (0.5, 0.1)
