import json
import shutil
from pathlib import Path

import bitsandbytes
import pytest
import torch

from compress.distillation.loss import distillation_config, distillation_loss
from compress.distillation.starts import check_no_larger, resolve_teacher
from compress.distillation.teacher import load_teacher
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.models.config import Experts
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.documents import recorded_text
from sportsllm.text.packing import Batch
from sportsllm.text.tokenizer_training import train_tokenizer
from sportsllm.training.settings import Start, TrainConfig
from tests.support.bnb_models import dequantize
from tests.support.distillation import FP32, run
from tests.support.models import saved, tiny_model


def test_a_checkpoint_student_moves_towards_the_teacher(
    checkpoint: Path, student: Path, corpus_file: Path, tmp_path: Path
) -> None:
    before = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    config = TrainConfig(
        steps=20, batch_size=4, accumulation=1, sequence=32, precision="fp32", learning_rate=3e-3, warmup=2
    )
    result = run(checkpoint, str(student), tmp_path / "out", corpus_file, config=config)
    assert result.parameters == load_checkpoint(tmp_path / "out").config.parameters
    tokens = torch.randint(3, 384, (4, 40), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, tokens, (40, 80, 120, 160))
    loss = distillation_loss(FP32, load_checkpoint(checkpoint))
    with torch.no_grad():
        assert loss(load_checkpoint(tmp_path / "out"), batch) < 0.9 * loss(load_checkpoint(student), batch)
    assert before == {p.name: p.read_bytes() for p in checkpoint.iterdir()}, "inputs are untouched"
    assert run(checkpoint, str(student), tmp_path / "out", corpus_file, config=config).cached is True


def likeness(first: SportsLLM, second: SportsLLM) -> float:
    """Cosine between the logits of two models on the same tokens."""
    tokens = torch.randint(3, 384, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = [model(tokens).float().flatten() for model in (first, second)]
    return float(torch.nn.functional.cosine_similarity(*logits, dim=0))


@pytest.mark.parametrize(("precision", "least"), [("fp32", 0.999999), ("bf16", 0.999), ("int8", 0.995)])
def test_cheap_teachers_stay_near_the_full_one(precision: str, least: float, tmp_path: Path) -> None:
    """Of widths that bitsandbytes' kernels like."""
    exact = tiny_model(hidden_size=128, intermediate_size=192, num_attention_heads=4, head_dim=32)
    cheap = load_teacher(saved(tmp_path, exact), precision)
    # Relative error of a product: 2^-9 in bf16, about 1/127 of a row's largest number in int8.
    assert likeness(exact, cheap) > least
    assert not bitsandbytes.backends.cpu.ops.logger.isEnabledFor(30), "warnings of the library"
    assert not any(p.requires_grad for p in cheap.parameters())


@pytest.mark.parametrize(("hidden", "inner", "block", "dense"), [(128, 192, 64, 0), (96, 112, 32, 2)])
def test_a_nf4_teacher_is_the_model_with_nf4_matrices(
    hidden: int, inner: int, block: int, dense: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of 112 have no whole blocks: those matrices stay as they are, and it says so."""
    exact = tiny_model(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=hidden // 32, head_dim=32,
        num_key_value_heads=1,
    )  # fmt: skip
    cheap, packed = load_teacher(saved(tmp_path, exact), "nf4"), 0
    assert (f"{dense} matrices stay in" in capsys.readouterr().err) == bool(dense)
    for name, module in cheap.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            matrix = dequantize(module.weight.data, state)
            original = exact.get_submodule(name).weight
            assert state.blocksize == block
            assert torch.nn.functional.cosine_similarity(matrix.float().flatten(), original.flatten(), dim=0) > 0.99
            original.data = matrix.float()
            packed += 1
    assert packed == 14 - dense
    assert likeness(exact, cheap) > 0.999  # what is left is bfloat16


def test_a_mixture_counts_by_what_a_token_is_computed_with() -> None:
    dense, experts = tiny_model().config, Experts(count=4, active=2)
    small = dense.with_changes(mlp_kind="experts", experts=experts, intermediate_size=dense.intermediate_size // 2 - 8)
    assert small.active_parameters < dense.active_parameters < small.parameters
    check_no_larger(small, dense)
    with pytest.raises(UsageError, match=r"active parameters\) is larger than the teacher"):
        check_no_larger(dense, small)


def test_another_tokenizer_and_a_packed_student_are_refused(
    checkpoint: Path, int4: Path, texts: list[str], student: Path, corpus_file: Path, tmp_path: Path
) -> None:
    train_tokenizer(texts[:20], 384, student)
    for path, said in ((student, "tokenizer differs"), (int4, "is quantized")):
        with pytest.raises(ArtifactError, match=said):
            run(checkpoint, str(path), tmp_path / "out", corpus_file)


def test_flags_out_of_range() -> None:
    with pytest.raises(UsageError, match=r"kl_weight=1\.5: must be 0 to 1"):
        distillation_config(Start.RANDOM, Path(), {"kl_weight": 1.5})


def test_a_missing_preset_teacher_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match="train --model large"):
        resolve_teacher("large")
    with pytest.raises(ArtifactError, match="enormous: no such directory; give the teacher's checkpoint"):
        resolve_teacher("enormous")


def test_the_teacher_names_its_corpus(
    checkpoint: Path, tmp_path: Path, corpus_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="give --corpus"):
        recorded_text(checkpoint, "corpus")
    copy = tmp_path / "teacher"
    shutil.copytree(checkpoint, copy)
    manifest = {"format": 1, "files": {}, "settings": {"corpus": [str(corpus_file)], "valid": []}}
    (copy / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert recorded_text(copy, "corpus") == [corpus_file]
    assert recorded_text(copy, "valid") == []
    manifest["settings"] = {"corpus": ["gone.jsonl"], "valid": ["gone.jsonl"]}
    (copy / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert recorded_text(copy, "valid") == [] and "held out by hash instead" in capsys.readouterr().err
    with pytest.raises(ArtifactError, match="not found; give --corpus"):
        recorded_text(copy, "corpus")
