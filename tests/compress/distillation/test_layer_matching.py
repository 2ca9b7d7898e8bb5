"""A pruned student is matched at the layers of its teacher that it kept."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from compress.distill import distill_student
from compress.distillation.layer_matching import is_untrained_cut, layers_of_teacher, map_kept_layers
from compress.distillation.recovery import Recovery
from compress.distillation.settings import DistillationConfig
from compress.distillation.starts import resolve_start
from compress.distillation.student_training import StudentTraining
from compress.prune import prune_checkpoint
from compress.pruning.cut import PruneConfig
from compress.pruning.job import PruneJob
from compress.pruning.shapes import Shape
from compress.pruning.student_start import choose_start
from sportsllm.formats.checkpoint import save_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import read_manifest
from sportsllm.training.settings import TrainConfig
from tests.support.models import tiny_model

CONFIG = TrainConfig(steps=3, batch_size=2, accumulation=1, sequence=128, precision="fp32", warmup=0)
PLAIN = DistillationConfig(teacher_precision="fp32")
MATCHED = dataclasses.replace(PLAIN, hidden_weight=1.0)


@pytest.fixture
def teacher(tokenizer_directory: Path, tmp_path: Path) -> Path:
    (tmp_path / "teacher").mkdir()
    save_checkpoint(tmp_path / "teacher", tiny_model(num_hidden_layers=6), tokenizer_directory)
    return tmp_path / "teacher"


def cut(source: Path, layers: int, out: Path, text: Path, recovery: Recovery | None = None) -> list[int]:
    job = PruneJob(source, [text], PruneConfig(samples=4), recovery=recovery)
    shape = dataclasses.replace(Shape.of(load_config(source)), layers=layers)
    return prune_checkpoint(job, shape, out).kept_layers


def test_what_each_kept_layer_reads_is_matched() -> None:
    assert map_kept_layers(MATCHED, [0, 3, 4], 5).layer_map == "0:0,1:3,2:4,3:5"
    own = dataclasses.replace(MATCHED, layer_map="3:5")
    assert map_kept_layers(own, [0, 3, 4], 5) is own
    assert map_kept_layers(PLAIN, [0, 3, 4], 5) is PLAIN  # nothing is matched


def test_distilling_what_prune_wrote_equals_its_recovery(teacher: Path, corpus_file: Path, tmp_path: Path) -> None:
    cut(teacher, 3, tmp_path / "cut", corpus_file)
    cut(teacher, 3, tmp_path / "recovered", corpus_file, Recovery(CONFIG, (corpus_file,), objective=MATCHED))
    student = str(tmp_path / "cut")
    for name, objective in (
        ("matched", MATCHED),
        ("spread", dataclasses.replace(MATCHED, layer_map="0:0,1:2,2:4,3:6")),
    ):
        training = StudentTraining(teacher, CONFIG, (corpus_file,), distillation=objective)
        distill_student(student, resolve_start(student, None, None, teacher), training, tmp_path / name)
    assert read_manifest(tmp_path / "matched").settings["layer_map"].startswith("0:0,")
    recovered, matched, spread = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("recovered", "matched", "spread")
    )
    assert matched == recovered != spread


def test_layers_are_followed_through_every_stage(teacher: Path, corpus_file: Path, tmp_path: Path) -> None:
    first = cut(teacher, 4, tmp_path / "four", corpus_file)
    second = cut(tmp_path / "four", 3, tmp_path / "three", corpus_file)
    student = str(tmp_path / "three")
    training = StudentTraining(teacher, CONFIG, (corpus_file,), distillation=PLAIN)
    distill_student(student, resolve_start(student, None, None, teacher), training, tmp_path / "trained")
    for name in ("three", "trained"):
        assert layers_of_teacher(tmp_path / name, teacher) == [first[layer] for layer in second]
    assert layers_of_teacher(tmp_path / "trained", tmp_path / "four") == second
    shutil.copytree(teacher, tmp_path / "other")
    assert layers_of_teacher(tmp_path / "three", tmp_path / "other") is None
    assert layers_of_teacher(teacher, tmp_path / "other") is None
    untrained = [is_untrained_cut(path) for path in (tmp_path / "three", tmp_path / "trained", teacher)]
    assert untrained == [True, False, False]


def test_layers_of_another_start_are_nobodys(teacher: Path, corpus_file: Path, tmp_path: Path) -> None:
    training = StudentTraining(teacher, CONFIG, (corpus_file,), distillation=PLAIN)
    for start in ("fresh", "cut"):
        chosen = choose_start(str(teacher), None, start, teacher)
        distill_student(str(teacher), chosen, training, tmp_path / start)
        cut(tmp_path / start, 3, tmp_path / f"{start}-cut", corpus_file)
        assert layers_of_teacher(tmp_path / f"{start}-cut", teacher) is None
