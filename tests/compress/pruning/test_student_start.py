"""`distill` starts from what it can cut out of the teacher."""

import json
from pathlib import Path

import pytest

from compress.distill import distill_student
from compress.distillation.settings import DistillationConfig
from compress.distillation.starts import Checkpoint, Fresh
from compress.distillation.student_training import StudentTraining
from compress.pruning.student_start import Cut, choose_start
from sportsllm.errors import UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.training.settings import TrainConfig

CONFIG = TrainConfig(steps=3, batch_size=2, accumulation=1, sequence=32, precision="fp32", warmup=0)


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


def test_the_student_is_cut_out_of_the_teacher(
    checkpoint: Path, shape: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = StudentTraining(checkpoint, CONFIG, (corpus_file,), distillation=DistillationConfig())
    found = {}
    for name in ("cut", "fresh"):
        start = choose_start(str(shape), None, name, checkpoint)
        out = tmp_path / name
        found[name] = distill_student("shape", start, training, out)
        assert json.loads((out / "manifest.json").read_text(encoding="utf-8"))["settings"]["start"] == name
        student = load_checkpoint(out)
        assert student.config.max_position_embeddings == 4_096 and student.config.head_dim == 8
    assert isinstance(choose_start(str(shape), None, "cut", checkpoint), Cut)
    assert found["cut"].bits_per_byte_before < 8 and found["fresh"].bits_per_byte_before is None
    assert found["cut"].parameters == found["fresh"].parameters
    assert "is cut out of" in capsys.readouterr().err


def test_without_flags_a_shape_is_cut(checkpoint: Path, shape: Path) -> None:
    """A directory without weights has only a shape to give."""
    assert isinstance(choose_start(str(shape), None, None, checkpoint), Cut)
    assert isinstance(choose_start(str(checkpoint), None, None, checkpoint), Checkpoint)


def test_where_that_cannot_be_it_says_why(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    wide = write(tmp_path / "wide", config | {"intermediate_size": 4_096, "num_hidden_layers": 1})
    assert isinstance(choose_start(str(wide), None, "fresh", checkpoint), Fresh)
    assert not capsys.readouterr().err
    assert isinstance(choose_start(str(wide), None, None, checkpoint), Fresh)
    assert "intermediate_size is 4096" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(UsageError, match=r"--start cut: intermediate_size is 4096.*choose another --student"):
        choose_start(str(wide), None, "cut", checkpoint)
    with pytest.raises(UsageError, match="--start 'clone' is not known"):
        choose_start(str(wide), None, "clone", checkpoint)
    with pytest.raises(UsageError, match="--start cut makes the student's weights"):
        choose_start("tiny-300k", checkpoint, "cut", checkpoint)
