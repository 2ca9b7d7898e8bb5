"""What a student starts from, and at which layers a pruned one is matched."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from compress.distill import distill_student
from compress.distillation.loss import DistillationConfig, HiddenMatching
from compress.distillation.selection import selecting
from compress.distillation.starts import Checkpoint, Cut, Fresh, choose_start, layers_of_teacher
from compress.distillation.student import StudentTraining
from compress.prune import prune_checkpoint
from compress.pruning.job import PruneJob
from compress.pruning.shapes import Shape
from sportsllm.errors import InterruptedRun, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import read_manifest
from sportsllm.training.settings import Start, TrainConfig
from tests.support.calibration import NARROW
from tests.support.models import saved, tiny_model
from tests.support.training import interrupted_at

CONFIG = TrainConfig(steps=3, batch_size=2, accumulation=1, sequence=128, precision="fp32", warmup=0)
PLAIN = DistillationConfig(teacher_precision="fp32")
MATCHED = dataclasses.replace(PLAIN, hidden_weight=1.0)


@pytest.fixture(scope="module")
def corpus_file(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight matches, since a student that is cut out is calibrated on all of them."""
    path = tmp_path_factory.mktemp("corpus") / "matches.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:8]), encoding="utf-8")
    return path


@pytest.fixture
def teacher(tokenizer_directory: Path, tmp_path: Path) -> Path:
    return saved(tmp_path / "teacher", tiny_model(num_hidden_layers=6, **NARROW), tokenizer_directory)


@pytest.fixture
def shape(checkpoint: Path, tmp_path: Path) -> Path:
    """A directory with a config alone: smaller than the teacher, heads of another size, a longer context."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config |= {"intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 4_096}
    return write(tmp_path / "shape", config)


def write(directory: Path, config: dict[str, object]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def cut(source: Path, layers: int, out: Path, text: Path, recovery: StudentTraining | None = None) -> list[int]:
    job = PruneJob(source, [text], samples=4, recovery=recovery)
    return prune_checkpoint(job, dataclasses.replace(Shape.of(load_config(source)), layers=layers), out).kept_layers


def test_distilling_what_prune_wrote_equals_its_recovery(teacher: Path, corpus_file: Path, tmp_path: Path) -> None:
    training = StudentTraining(teacher, CONFIG, (corpus_file,), distillation=MATCHED)
    assert MATCHED.matching_kept([0, 3, 4], 6).layer_map == ((0, 0), (1, 3), (2, 4), (3, 6))
    cut(teacher, 3, tmp_path / "cut", corpus_file)
    cut(teacher, 3, tmp_path / "recovered", corpus_file, training)
    student = str(tmp_path / "cut")
    evenly = dataclasses.replace(MATCHED, layer_map=((0, 0), (1, 2), (2, 4), (3, 6)))
    for name, objective in (("matched", MATCHED), ("spread", evenly)):
        start = choose_start(student, None, teacher)
        distill_student(student, start, dataclasses.replace(training, distillation=objective), tmp_path / name)
    assert read_manifest(tmp_path / "matched").settings["layer_map"][0] == [0, 0]
    assert Checkpoint(start.shape, [tmp_path / "recovered"]).already_trained
    names = "recovered", "matched", "spread"
    recovered, matched, spread = ((tmp_path / name / "model.safetensors").read_bytes() for name in names)
    assert matched == recovered != spread


def test_layers_are_followed_through_every_stage(teacher: Path, corpus_file: Path, tmp_path: Path) -> None:
    first = cut(teacher, 4, tmp_path / "four", corpus_file)
    second = cut(tmp_path / "four", 3, tmp_path / "three", corpus_file)
    training = StudentTraining(teacher, dataclasses.replace(CONFIG, steps=1), (corpus_file,), distillation=PLAIN)
    distill_student("three", choose_start(str(tmp_path / "three"), None, teacher), training, tmp_path / "trained")
    selected = selecting(choose_start(str(tmp_path / "trained"), None, teacher), 64)
    distill_student("trained", selected, training, tmp_path / "selected")
    for name in ("three", "trained", "selected"):
        assert layers_of_teacher(tmp_path / name, teacher) == [first[layer] for layer in second]
    assert layers_of_teacher(tmp_path / "trained", tmp_path / "four") == second
    other = shutil.copytree(teacher, tmp_path / "other")
    assert layers_of_teacher(tmp_path / "three", other) is None
    assert layers_of_teacher(teacher, other) is None and layers_of_teacher(teacher, teacher) == [*range(6)]
    paths = [tmp_path / name for name in ("three", "trained", "teacher")]  # nothing was cut from the last
    assert [Checkpoint(load_config(path), [path]).already_trained for path in paths] == [False, True, True]
    assert [choose_start(str(path), None, teacher).weights for path in paths] == [None, None, "trained weights"]
    for name in ("fresh", "cut"):  # layers of random weights, or of a cut that is not recorded, are nobody's
        distill_student(str(teacher), choose_start(str(teacher), name, teacher), training, tmp_path / name)
        cut(tmp_path / name, 3, tmp_path / f"{name}-cut", corpus_file)
        assert layers_of_teacher(tmp_path / f"{name}-cut", teacher) is None
    kinds = [choose_start(str(path), None, other).kind for path in (*paths, tmp_path / "cut", tmp_path / "fresh")]
    assert kinds == [Start.PRUNED, *[Start.TRAINED] * 3, Start.BARELY_TRAINED]  # whoever they were cut from


def test_the_student_is_cut_out_of_the_teacher(
    checkpoint: Path, shape: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = StudentTraining(checkpoint, dataclasses.replace(CONFIG, sequence=32), (corpus_file,))
    found = {}
    for name in ("cut", "fresh"):
        start, out = choose_start(str(shape), name, checkpoint), tmp_path / name
        found[name] = distill_student("shape", start, training, out)
        assert read_manifest(out).settings["start"] == name
        student = load_checkpoint(out)
        assert student.config.max_position_embeddings == 4_096 and student.config.head_dim == 8
    before = found["cut"].bits_per_byte_before
    assert before is not None and before < 8 and found["fresh"].bits_per_byte_before is None
    assert "is cut out of" in capsys.readouterr().err


def test_a_layer_that_stays_keeps_its_type(
    tokenizer_directory: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second, full one, although the student's shape has a sliding one; also in a run that is resumed."""
    matched = list[object]()  # its input is matched
    monkeypatch.setattr(HiddenMatching, "fit", lambda self, *_: matched.append(self.layer_map))
    model = tiny_model(layer_types=("sliding", "full"), sliding_window=8, **NARROW)
    for part in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
        torch.nn.init.zeros_(part.weight)
    teacher = saved(tmp_path / "teacher", model, tokenizer_directory)
    smaller = {"num_hidden_layers": 1, "layer_types": ("sliding",), "sliding_window": 8, "max_position_embeddings": 64}
    shape = saved(tmp_path / "shape", tiny_model(**smaller, **NARROW))
    training = StudentTraining(teacher, dataclasses.replace(CONFIG, sequence=64), (corpus_file,), distillation=MATCHED)
    start = choose_start(str(shape), "cut", teacher)
    with monkeypatch.context() as patch, pytest.raises(InterruptedRun):
        patch.setattr("compress.distillation.student.distillation_loss", lambda *_: interrupted_at(2))
        distill_student("shape", start, training, tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):  # while the result is written
        patch.setattr("sportsllm.formats.checkpoint.save_checkpoint", lambda *_: 1 / 0)
        distill_student("shape", start, training, tmp_path / "out", resume=True)
    assert (tmp_path / "out.partial" / "start.json").exists()
    for name in ("out", "whole"):
        distill_student("shape", start, training, tmp_path / name, resume=True)
    assert "full" in (load_config(tmp_path / "whole").layer_types or ["full"])
    assert load_config(tmp_path / "out") == load_config(tmp_path / "whole")
    assert matched == [((0, 1), (1, 2))] * 4


def test_the_start_follows_from_what_is_given(
    checkpoint: Path, shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (shape, None), (checkpoint, "cut"), (checkpoint, None)  # the first is a shape alone
    assert [type(choose_start(str(path), start, checkpoint)) for path, start in given] == [Cut, Cut, Checkpoint]
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    wide = write(tmp_path / "wide", config | {"intermediate_size": 4_096, "num_hidden_layers": 1})
    assert not capsys.readouterr().err
    assert {type(choose_start(str(wide), start, checkpoint)) for start in ("fresh", None)} == {Fresh}
    assert "intermediate_size is 4096" in capsys.readouterr().err.replace("\n", " ")
    learned = saved(tmp_path / "learned", tiny_model(position_kind="learned"))
    longer = saved(tmp_path / "longer", tiny_model(position_kind="learned", max_position_embeddings=256))
    with pytest.raises(UsageError, match="max_position_embeddings is 256, more than"):
        choose_start(str(longer), "cut", learned)
    with pytest.raises(UsageError, match=r"--start cut: intermediate_size is 4096.*choose another --student"):
        choose_start(str(wide), "cut", checkpoint)
    with pytest.raises(UsageError, match="--start 'clone' is not known"):
        choose_start(str(wide), "clone", checkpoint)


def test_a_preset_takes_the_teachers_vocabulary_and_special_tokens(tmp_path: Path) -> None:
    teacher = saved(tmp_path / "teacher", tiny_model(bos_token_id=5, eos_token_id=(7, 9), pad_token_id=11))
    shape = choose_start("tiny-300k", "fresh", teacher).shape
    assert (shape.vocab_size, shape.bos_token_id, shape.eos_token_id, shape.pad_token_id) == (384, 5, (7, 9), 11)
