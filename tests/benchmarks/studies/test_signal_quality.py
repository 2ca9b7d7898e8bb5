"""The study of stored signals: its gradient against dense autograd, its figures against geometry."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.studies.signal_quality import Study, angle_degrees, full_loss, gradient, measure
from sportsllm.formats.checkpoint import save_checkpoint
from sportsllm.text.packing import IGNORE, PackedSequences
from tests.support.models import tiny_model


@pytest.mark.parametrize("radians", [1e-9, math.pi / 3, math.pi])
def test_angles_are_exact_also_where_they_are_small(radians: float) -> None:
    """The arc cosine of the product would give 0 below 1e-8."""
    first = torch.tensor([3.0, 0.0], dtype=torch.float64)
    second = torch.tensor([2 * math.cos(radians), 2 * math.sin(radians)], dtype=torch.float64)
    assert angle_degrees(first, second) == pytest.approx(math.degrees(radians), rel=1e-6)


def test_the_full_gradient_is_that_of_dense_logits(batches: PackedSequences) -> None:
    student, teacher = tiny_model(seed=1), tiny_model()
    found, mean = gradient(student, batches, 2, full_loss(teacher), "test")
    student.zero_grad(set_to_none=True)
    losses = []
    for index in range(2):
        batch = batches.batch(index)
        with torch.no_grad():
            p = (teacher.hidden(batch.tokens, batch.documents) @ teacher.head_weight.T).log_softmax(-1)
        q = (student.hidden(batch.tokens, batch.documents) @ student.head_weight.T).log_softmax(-1)
        losses.append((p.exp() * (p - q)).sum(-1)[batch.targets != IGNORE])
    expected = torch.cat(losses).mean()
    expected.backward()
    dense = torch.cat([parameter.grad.flatten() for parameter in student.parameters() if parameter.grad is not None])
    assert mean == pytest.approx(float(expected.detach()), rel=1e-5)  # float32 sums in another order
    assert float((found - dense).norm() / dense.norm()) < 1e-5


def test_a_study_from_start_to_end(
    checkpoint: Path, tokenizer_directory: Path, corpus_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "student").mkdir()
    save_checkpoint(tmp_path / "student", tiny_model(seed=1), tokenizer_directory)
    study = Study(checkpoint, tmp_path / "student", (corpus_file,), tokens=2000, sequence=32, batch_size=4, rounds=1)
    quality = measure(study, tmp_path / "signals")
    assert quality.tokens == 2_048  # whole batches
    cosine = math.cos(math.radians(quality.angle_degrees))
    # The law of cosines for the two gradients, the full KL's being of length 1.
    triangle = 1 + quality.norm_ratio**2 - 2 * quality.norm_ratio * cosine
    assert quality.relative_error**2 == pytest.approx(triangle, abs=1e-6)
    # Unbiased: of an error of 36% only the part along the full gradient counts here, one direction of 86,336.
    assert quality.norm_ratio * cosine == pytest.approx(1, abs=0.03) and 0.1 < quality.relative_error < 0.6
    assert quality.loss == pytest.approx(quality.kl, rel=0.01)
    assert quality.to_json()["step_ratio"] == quality.signal_step_s / quality.plain_step_s
