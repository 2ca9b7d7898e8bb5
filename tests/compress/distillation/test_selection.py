"""A trained model becomes one that selects tokens, is taught, exported and read again."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sportsllm
from compress.distill import distill
from compress.distillation.selection import selecting, start_index
from compress.distillation.starts import Checkpoint
from compress.prune import prune_checkpoint
from compress.pruning.job import PruneJob
from compress.pruning.shapes import Shape
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from sportsllm.errors import UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import read_manifest
from sportsllm.inference.calibration import CalibrationText
from sportsllm.inference.decoder import open_decoder
from sportsllm.models.config import Selection
from sportsllm.models.kinds import INDEX
from sportsllm.models.language_model import SportsLLM
from tests.support import families
from tests.support.models import saved, tiny_model

SELECTION = Selection(tokens=64, heads=4, parts=2, pairs=8)


def write_text(file: Path, seed: int, words: int) -> Path:
    known = ["goal", "match", "win", "the", "a", "late", "keeper", "saves"]
    file.write_text(" ".join(np.random.default_rng(seed).choice(known, words)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 0, 2_000)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("held") / "text.txt", 1, 200)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, tokenizer_directory: Path) -> Path:
    """Attends to all tokens."""
    model = tiny_model(std=0.1, max_position_embeddings=350, hidden_size=32, intermediate_size=32)
    return saved(tmp_path_factory.mktemp("full"), model, tokenizer_directory)


@pytest.fixture(scope="module")
def made(full: Path, text: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the command."""
    out = tmp_path_factory.mktemp("made") / "out"
    result = distill(
        teacher=str(full), select_tokens=64, out=out, corpus=[text], valid=[held_out], steps=2, batch_size=2, threads=1,
        settings={"accumulation": 1},
    )  # fmt: skip
    assert (result.bits_per_byte_before or 0) > 0
    return out


def test_the_command_makes_a_checkpoint_that_selects(made: Path, full: Path) -> None:
    config = load_config(made)
    assert config == load_config(full).with_changes(attention_kind="selected", selection=SELECTION)
    settings = read_manifest(made).settings
    assert settings["selection"] == {"tokens": 64, "block": 16, "heads": 4, "parts": 2, "pairs": 8}
    assert settings["sequence"] == 256, "four times what is selected"


def test_usual_sizes_follow_the_model() -> None:
    for size, pairs in ((16, 8), (32, 16), (64, 16), (128, 32)):
        shape = tiny_model(head_dim=size).config
        start = Checkpoint(shape, [Path("teacher")])
        chosen = selecting(start, 64).shape.chosen_selection
        assert (chosen.heads, chosen.parts, chosen.pairs) == (4, 2, pairs)


def test_it_is_a_teacher_quantized_and_exported(made: Path, text: Path, held_out: Path, tmp_path: Path) -> None:
    quantize_checkpoint(made, tmp_path / "int4", QuantizationConfig(), text=CalibrationText((text,), 4))
    sportsllm.export(tmp_path / "int4", out=tmp_path / "export", threads=1)  # the gate compares
    rows = [list(range(3, 200))]
    torch_scores, onnx_scores = (open_decoder(tmp_path / name, threads=1).score(rows)[0] for name in ("int4", "export"))
    # Products round their inputs to 8 bits, and a choice may turn: the mean is within a tenth of a nat.
    assert abs(torch_scores.mean() - onnx_scores.mean()) < 0.1
    result = distill(
        teacher=str(made), student=str(made), out=tmp_path / "student", corpus=[text], valid=[held_out], steps=1,
        batch_size=1, sequence=64, threads=1, settings={"accumulation": 1},
    )  # fmt: skip
    assert load_config(tmp_path / "student").selection == SELECTION and result.steps == 1


def test_it_is_pruned_but_for_the_indexer(made: Path, text: Path, tmp_path: Path) -> None:
    config = load_config(made)
    prune_checkpoint(PruneJob(made, [text], samples=4), Shape(16, 16, 2, 1, 2, 16), tmp_path / "pruned")
    pruned = load_checkpoint(tmp_path / "pruned")
    shapes = [tuple(pruned.model.layers[0].self_attn.get_submodule(name).weight.shape) for name in INDEX]
    assert shapes == [(4 * 32, 16), (32, 16)] and pruned.config.selection == SELECTION
    for shape, flag in ((Shape(32, 32, 4, 2, 2, 8), "--head-dim"), (Shape(32, 32, 4, 1, 2, 16), "--kv-heads")):
        with pytest.raises(UsageError, match=rf"{flag}.* selected attention"):
            shape.applied_to(config)
    assert Shape.of(config).applied_to(config) == config


def with_indexer(model: SportsLLM, selection: Selection) -> SportsLLM:
    """The model with a fresh indexer."""
    student = SportsLLM(model.config.with_changes(attention_kind="selected", selection=selection))
    student.initialize(0)
    student.load_state_dict(model.state_dict(), strict=False)
    return student.eval()


def index_scores(shape: dict[str, Any], parts: int, pairs: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a fresh model's closed form, and attention's own by the slowest pairs; (layers, B, T, H, S) each."""
    model = tiny_model(std=0.1, head_dim=16, **shape)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.named_parameters():
        if name.endswith(("proj.bias", "q_norm.weight", "k_norm.weight")):
            tensor.data = tensor.data + torch.randn(tensor.shape, generator=generator) / 2
    selection = Selection(16, 4, shape["num_attention_heads"], parts, pairs)
    student = with_indexer(model, selection)
    tokens = torch.randint(3, 384, (4, 1, 64), generator=generator)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    start_index(student, model, list(tokens))
    changed = {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.split(".")[-2] in INDEX}
    found, wanted = [], []
    shared = shape["num_attention_heads"] // shape["num_key_value_heads"]

    def look(half: Any, args: Any) -> None:
        q, k, _, index_q, index_k = half.parts(args[0], args[1])
        found.append(torch.einsum("bthi,bsi->bths", index_q, index_k))
        q, k = (x.unflatten(3, (2, 8))[..., -(pairs or 8) :].flatten(3) for x in (q, k))
        wanted.append(torch.einsum("bthe,bshe->bths", q, k.repeat_interleave(shared, dim=2)))

    for block in student.model.layers:
        block.self_attn.register_forward_pre_hook(look)
    with torch.inference_mode():
        student.hidden(torch.randint(3, 384, (1, 32), generator=generator))
    return torch.stack(found), torch.stack(wanted)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "keys", "pairs"), [(1, 1, 4), (4, 2, 4), (4, 2, None)])
def test_index_scores_are_those_of_attentions_slowest_pairs_where_the_key_has_room(
    heads: int, keys: int, pairs: int | None, bias: bool
) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": keys, "attention_bias": bias}
    ours, wanted = index_scores(shape, keys, pairs)
    torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


def test_index_scores_of_normalised_heads_are_near() -> None:
    ours, wanted = index_scores({"num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": True}, 2, None)
    # The best linear functions of x miss the norms alone, which vary by some tenths over tokens.
    assert torch.corrcoef(torch.stack([ours.flatten(), wanted.flatten()]))[0, 1] > 0.9


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"select_tokens": None}, "give --student"),
        ({"student": "tiny-300k", "start": "fresh"}, "--select-tokens starts from trained weights"),
        ({"select_tokens": 400}, "--select-tokens is 400, the context 350"),
        ({"select_tokens": 72}, "--select-tokens 72: config: .* in blocks of 16; choose a multiple of 16, at least 64"),
        ({"sequence": 64, "steps": 1}, "--select-tokens 64: --sequence is 64, all of which are selected"),
    ],
)
def test_what_does_not_go_together_is_refused(
    flags: dict[str, Any], said: str, full: Path, text: Path, held_out: Path, tmp_path: Path, capsys: Any
) -> None:
    given: dict[str, Any] = {"select_tokens": 64, "corpus": [text], "valid": [held_out], "steps": 0} | flags
    with pytest.raises(UsageError, match=said) as caught:
        distill(teacher=str(full), out=tmp_path / "out", threads=1, **given)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    assert ("from trained weights with a new indexer" in capsys.readouterr().err) == ("steps" in flags)


@pytest.mark.parametrize(("name", "kind"), [("deepseek-v3", "latent attention"), ("phi3-sliding", "layer_types is")])
def test_attention_that_has_no_selection(
    name: str, kind: str, text: Path, held_out: Path, tmp_path: Path, tokenizer_directory: Path
) -> None:
    families.save(name, tmp_path / "other")
    shutil.copy(tokenizer_directory / "tokenizer.json", tmp_path / "other")
    with pytest.raises(UsageError, match=rf"--select-tokens.*{kind}"):
        distill(
            teacher=str(tmp_path / "other"), select_tokens=64, corpus=[text], valid=[held_out], steps=0,
            out=tmp_path / "out",
        )  # fmt: skip
