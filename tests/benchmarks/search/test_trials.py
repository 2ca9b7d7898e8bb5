"""Texts of a search: those held out, and how many of them score a candidate."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.devices.load import load_device
from benchmarks.search.recipe import Source, held_out_text
from benchmarks.search.trials import Trials
from compress.pruning.shapes import Shape
from sportsllm.models.config import Experts
from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer_training import train_tokenizer
from tests.support.models import saved, tiny_model


def test_held_out_conversations_are_read_again(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Who won?"}, {"role": "assistant", "content": "They did.", "weight": 0}]
    said += [said[0], {"role": "assistant", "content": "We did.", "reasoning_content": "2-1"}]
    (valid := tmp_path / "valid.jsonl").write_text(json.dumps({"messages": said}) + '\n{"text": "A goal"}\n')
    made = held_out_text(Source(checkpoint, (corpus_file,), (), (valid,)), tmp_path)
    assert {*read_documents([made.selection_split, made.report_split])} == {*read_documents([valid])}


def test_mixed_cuts_may_have_fewer_experts(texts: list[str], tokenizer_directory: Path, tmp_path: Path) -> None:
    model = tiny_model(mlp_kind="experts", experts=Experts(3, 1))
    teacher, whole = saved(tmp_path / "teacher", model, tokenizer_directory), Shape.of(model.config)
    (text := tmp_path / "text.txt").write_text(texts[0], encoding="utf-8")
    trials = Trials(Source(teacher, (), (text,)), load_device("host"), tmp_path, text, 1)
    shapes = [replace(whole, layers=1, experts=count) for count in (2, 3)]
    assert {*trials.best_right_after_the_cut(shapes, 2, 60.0)} == {*shapes}


def test_a_model_with_fewer_tokens_is_scored_on_the_documents_of_its_teacher(
    checkpoint: Path, corpus_file: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer makes more tokens of each, so that it reaches the number to score after fewer documents."""
    train_tokenizer(texts, 320, tmp_path)
    fewer = saved(tmp_path / "fewer", tiny_model(vocab_size=320), tmp_path)
    monkeypatch.setattr("benchmarks.search.trials._SCORED_TOKENS", 2_000)
    trials = Trials(Source(checkpoint, (), ()), load_device("host"), tmp_path / "trials", corpus_file, 1)
    scored = [len(trials._scores_of(directory)["nats"]) for directory in (fewer, checkpoint)]
    assert scored == [trials.documents()] * 2 and 1 < scored[0] < len(texts)
