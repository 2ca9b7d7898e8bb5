"""A trained model becomes one that selects tokens: its indexer learns, all is taught, exported and read again."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sportsllm
from compress.distill import distill
from compress.distillation import selection
from compress.distillation.selection import (
    Selecting,
    attention_kept,
    learn_if_better,
    learn_index,
    long_sequences,
    say_what_is_kept,
    selecting,
    spread_pieces,
    with_full_attention,
    with_indexer,
)
from compress.distillation.settings import DistillationConfig
from compress.distillation.starts import Checkpoint, resolve_start
from compress.distillation.student_training import StudentText, StudentTraining
from compress.prune import prune_checkpoint
from compress.pruning.indexer import start_index
from compress.pruning.job import PruneJob
from compress.pruning.shapes import Shape
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from sportsllm.errors import UsageError
from sportsllm.formats.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import read_manifest
from sportsllm.inference.decoder import open_decoder
from sportsllm.models.attention_kinds import INDEX, Selection
from sportsllm.models.config import ModelConfig
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.calibration_text import CalibrationText
from sportsllm.training.settings import TrainConfig
from tests.support import families
from tests.support.models import tiny_model

SELECTION = Selection(tokens=16, block=4, heads=2, parts=2, pairs=4)


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
    directory = tmp_path_factory.mktemp("full")
    save_checkpoint(directory, tiny_model(std=0.1, max_position_embeddings=350), tokenizer_directory)
    return directory


@pytest.fixture(scope="module")
def made(full: Path, text: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the command."""
    out = tmp_path_factory.mktemp("made") / "out"
    result = distill(
        teacher=str(full), select_tokens=16, out=out, corpus=[text], valid=[held_out], steps=2, batch_size=2, threads=1,
        settings={
            "select_block": 4, "index_heads": 2, "index_parts": 2, "index_pairs": 4, "index_tokens": 640,
            "accumulation": 1,
        },
    )  # fmt: skip
    assert result.bits_per_byte_before is not None
    assert result.bits_per_byte_before > 0
    return out


def test_the_command_makes_a_checkpoint_that_selects(made: Path, full: Path) -> None:
    config = load_config(made)
    assert config == load_config(full).with_changes(attention_kind="selected", selection=SELECTION)
    settings = read_manifest(made).settings
    assert (
        settings["selection"] == {"tokens": 16, "block": 4, "heads": 2, "parts": 2, "pairs": 4}
        and settings["index_tokens"] == 640
    )
    assert settings["sequence"] == 64, "four times what is selected"


def test_usual_sizes_follow_the_model() -> None:
    for size, pairs in ((16, 8), (32, 16), (64, 16), (128, 32)):
        shape = tiny_model(head_dim=size).config
        start = Checkpoint(shape, (Path("teacher"),))
        chosen = selecting(start, {"tokens": 16, "block": 4}, start_index).shape.chosen_selection
        assert (chosen.heads, chosen.parts, chosen.pairs) == (4, 2, pairs)


def test_it_is_a_teacher_quantized_and_exported(made: Path, text: Path, held_out: Path, tmp_path: Path) -> None:
    quantize_checkpoint(made, tmp_path / "int4", QuantizationConfig(), text=CalibrationText((text,)))
    sportsllm.export(tmp_path / "int4", out=tmp_path / "export", threads=1)  # the gate compares
    rows = [list(range(3, 60))]
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
    prune_checkpoint(PruneJob(made, [text]), Shape(32, 64, 2, 1, 2, 16), tmp_path / "pruned")
    pruned = load_checkpoint(tmp_path / "pruned")
    shapes = [tuple(pruned.model.layers[0].self_attn.get_submodule(name).weight.shape) for name in INDEX]
    assert shapes == [(2 * 16, 32), (16, 32)] and pruned.config.selection == SELECTION
    full = Shape.of(config)
    for shape, flag in ((Shape(64, 96, 4, 2, 2, 8), "--head-dim"), (Shape(64, 96, 4, 1, 2, 16), "--kv-heads")):
        with pytest.raises(UsageError, match=rf"{flag}.* selected attention"):
            shape.applied_to(config)
    assert full.applied_to(config) == config


def index_training(full: Path, text: Path, held_out: Path) -> tuple[StudentTraining, StudentText]:
    config = TrainConfig(steps=1, batch_size=2, accumulation=1, sequence=64, precision="fp32")
    training = StudentTraining(full, config, (text,), (held_out,), DistillationConfig())
    return training, StudentText.read(training, load_tokenizer(full, load_config(full)))


def student_of(full: Path, changes: ModelConfig | None = None) -> tuple[Selecting, Any]:
    start = selecting(resolve_start(str(full), None, None, full), asdict(SELECTION), start_index, 1)
    return start, with_indexer(load_checkpoint(full), start.shape, 0)


def loss_of(model: Any, tokens: torch.Tensor) -> float:
    """Of the indexer, nats a token."""
    model.train().hidden(tokens)
    loss = model.auxiliary_loss()
    model.eval()
    return float(loss.detach())


def test_what_the_choice_keeps_is_said(
    full: Path, text: Path, held_out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, words = index_training(full, text, held_out)
    _, student = student_of(full)
    sequences = long_sequences(words, 16, 64)
    assert [tuple(one.shape) for one in sequences] == [(1, 64)], "one held-out document, cut"
    kept = attention_kept(student, sequences)
    assert kept is not None and 0 < kept[0] <= kept[2] < 1 and kept[1] <= kept[2]
    say_what_is_kept(student, words, 64)
    line = capsys.readouterr().err
    assert f"the indexer keeps {100 * kept[0] / kept[2]:.1f}%" in line
    assert ("give more --index-tokens" in line) == (kept[0] <= kept[1])
    say_what_is_kept(student, words, 16)
    assert capsys.readouterr().err == "", "all tokens are selected"


def test_an_indexer_of_the_models_own_queries_and_keys_keeps_more(full: Path, text: Path, held_out: Path) -> None:
    _, words = index_training(full, text, held_out)
    start, random = student_of(full)
    begun = with_indexer(load_checkpoint(full), start.shape, 0)
    start_index(begun, with_full_attention(begun, 64), spread_pieces(words, 64))
    sequences = long_sequences(words, 16, 300)
    kept, before = attention_kept(begun, sequences), attention_kept(random, sequences)
    assert kept is not None and before is not None and kept[0] > max(before[0], kept[1])
    assert {n for n, t in begun.state_dict().items() if not torch.equal(t, random.state_dict()[n])} == {
        n for n in begun.state_dict() if n.split(".")[-2] in INDEX
    }


def index_scores(shape: dict[str, Any], parts: int, pairs: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a fresh model's closed form, and attention's own by the slowest pairs; (layers, B, T, H, S) each."""
    model = tiny_model(std=0.1, head_dim=16, **shape)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.named_parameters():
        if name.endswith(("proj.bias", "q_norm.weight", "k_norm.weight")):
            tensor.data = tensor.data + torch.randn(tensor.shape, generator=generator) / 2
    selection = Selection(16, 4, shape["num_attention_heads"], parts, pairs)
    student = with_indexer(model, model.config.with_changes(attention_kind="selected", selection=selection), 0)
    tokens = torch.randint(3, 384, (4, 1, 64), generator=generator)
    start_index(student, with_full_attention(student, 64), list(tokens))
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


def test_the_indexer_alone_learns_what_full_attention_looks_at(
    full: Path, text: Path, held_out: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(selection, "_INDEX_RATIO", 10 / 3)  # from random weights
    training, words = index_training(full, text, held_out)
    _, student = student_of(full)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    tokens = torch.from_numpy(words.documents.ids[:256].astype(np.int64)).view(2, 128)
    everything = student.config.with_changes(selection=Selection(128, 4, 2, 2, 4))
    untrained = with_indexer(student, everything, 0)
    start = loss_of(untrained, tokens)
    learn_index(student, training, words, 100 * 128)
    changed = {n for n, tensor in student.state_dict().items() if not torch.equal(tensor, before[n])}
    assert changed == {n for n in before if n.split(".")[-2] in INDEX}
    untrained.load_state_dict(student.state_dict())
    assert loss_of(untrained, tokens) < 0.8 * start
    assert student.config.selection == SELECTION


@pytest.mark.parametrize("harm", [True, False])
def test_an_indexer_that_training_makes_worse_stays_as_it_was(
    harm: bool, full: Path, text: Path, held_out: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    training, words = index_training(full, text, held_out)
    start, student = student_of(full)
    better = with_indexer(load_checkpoint(full), start.shape, 0)
    start_index(better, with_full_attention(better, 64), spread_pieces(words, 64))
    first, second = (better, student) if harm else (student, better)
    first_state, second_state = first.state_dict(), second.state_dict()
    trained = with_indexer(load_checkpoint(full), start.shape, 0)
    trained.load_state_dict(first_state)
    monkeypatch.setattr(selection, "learn_index", lambda model, *_: model.load_state_dict(second_state))
    learn_if_better(trained, training, words, 0)
    assert same(trained.state_dict(), first_state), "no tokens"
    learn_if_better(trained, training, words, 64)
    assert same(trained.state_dict(), first_state if harm else second_state)
    assert ("it stays as it started" in capsys.readouterr().err) == harm


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"select_tokens": None, "index_heads": 2, "student": "tiny-300k"}, "options of --select-tokens: index_heads"),
        ({"select_tokens": None}, "give --student"),
        ({"student": "tiny-300k", "start": "fresh"}, "--select-tokens starts from trained weights"),
        ({"select_tokens": 400}, "--select-tokens is 400, the context 350"),
        ({"select_tokens": 30}, "config: selection: 30 tokens in blocks of 4"),
        ({"index_pairs": 9}, "--index-pairs is 9; a head has 8"),
        ({"index_parts": 3}, "--index-parts is 3; the model has 2 key heads"),
        ({"sequence": 16}, "--select-tokens 16: --sequence is 16, all of which are selected"),
    ],
)
def test_what_does_not_go_together_is_refused(
    flags: dict[str, Any], said: str, full: Path, text: Path, held_out: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"select_tokens": 16, "select_block": 4, "corpus": [text], "valid": [held_out], "steps": 0}
    if "select_tokens" in flags and flags["select_tokens"] is None:
        del given["select_block"]
    given |= flags
    rare = {name: given.pop(name) for name in list(given) if name.startswith("index_") or name == "select_block"}
    with pytest.raises(UsageError, match=said) as caught:
        distill(teacher=str(full), out=tmp_path / "out", threads=1, settings=rare, **given)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "kind"), [("deepseek-v3", "latent attention"), ("phi3-sliding", "layer_types is")])
def test_attention_that_has_no_selection(
    name: str, kind: str, text: Path, held_out: Path, tmp_path: Path, tokenizer_directory: Path
) -> None:
    families.save(name, tmp_path / "other")
    shutil.copy(tokenizer_directory / "tokenizer.json", tmp_path / "other")
    with pytest.raises(UsageError, match=rf"--select-tokens.*{kind}"):
        distill(
            teacher=str(tmp_path / "other"), select_tokens=16, corpus=[text], valid=[held_out], steps=0,
            out=tmp_path / "out", settings={"select_block": 4},
        )  # fmt: skip
