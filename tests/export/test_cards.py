"""Model cards: the hub's own reader as the oracle of their front matter, and their code lines run as they stand."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import sportsllm
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from sportsllm.errors import ArtifactError
from sportsllm.formats.artifact import Stage, run_stage
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import MANIFEST, check_whole, digest, read_manifest, verify_directory
from sportsllm.formats.model_card import write_card
from sportsllm.training.settings import TrainConfig
from sportsllm.verbs.train import train
from tests.support.training import options_of

BENCH: dict[str, Any] = {
    "runtime": "onnxruntime",
    "threads": 2,
    "ttft_ms": {"128": 4.5, "512": 2_025_000.0},
    "tpot_ms": {"32": {"p50": 0.5}, "512": {"p50": 0.75}},
    "peak_rss_bytes": 80_000_000,
    "clean": False,
    "machine": {"processor": "A Processor", "measured_at": "2026-01-02T03:04:05+00:00"},
    "bits_per_byte": 1.25,
    "teacher_bits_per_byte": 1.2,
    "text": ["/data/wiki/valid.jsonl"],
    "budget": {
        "target": "raspberry-pi-5",
        "decided_by": "prediction",
        "verdict": "fail",
        "limits": [{"name": "file_mb", "verdict": "fail"}, {"name": "ttft_ms", "verdict": "pass"}],
    },
}


def front(directory: Path) -> dict[str, Any]:
    return dict(ModelCard.load(directory / "README.md").data.to_dict())


@pytest.fixture(scope="module")
def outside(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that somebody else made, with a card."""
    source = shutil.copytree(checkpoint, tmp_path_factory.mktemp("cards") / "theirs")
    card = "---\nlicense: cc-by-sa-4.0\nlanguage:\n- en\n- 'no'\nbase_model: owner/base\nwidget: []\n---\n# Theirs\n"
    (source / "README.md").write_text(card, encoding="utf-8")
    return source


@pytest.fixture(scope="module")
def line(outside: Path, corpus_file: Path) -> dict[str, Path]:
    """Fine-tuned, quantized and exported."""
    base = outside.parent
    config = TrainConfig(steps=2, batch_size=2, accumulation=1, sequence=32, warmup=0)
    train(outside, corpus=[corpus_file], out=base / "tuned", **options_of(config))
    quantize_checkpoint(checkpoint=base / "tuned", out=base / "int4", config=QuantizationConfig(), method="rtn")
    sportsllm.export(base / "int4", out=base / "onnx", threads=2)
    sportsllm.export(base / "tuned", out=base / "gguf", format="gguf")
    train(outside, corpus=[corpus_file], out=base / "chat", chat_template="chatml", steps=0)
    sportsllm.export(base / "chat", out=base / "chat-onnx", threads=2)
    sportsllm.export(base / "chat", out=base / "chat-gguf", format="gguf")
    return {path.name: path for path in base.iterdir() if path.is_dir()}


def test_the_licence_and_the_base_model_are_carried_over(line: dict[str, Path]) -> None:
    for name, library, relation in (
        ("tuned", "transformers", "finetune"),
        ("int4", "sportsllm-compress", "quantized"),
        ("onnx", "onnx", "quantized"),
        ("gguf", "gguf", "finetune"),
    ):
        fields = front(line[name])
        assert (fields["license"], fields["language"], fields["base_model"]) == (
            "cc-by-sa-4.0", ["en", "no"], "owner/base"
        )  # fmt: skip
        assert (fields["library_name"], fields["base_model_relation"]) == (library, relation)
        assert fields["pipeline_tag"] == "text-generation" and "sportsllm-compress" in fields["tags"]
    assert {"4-bit", "onnx"} <= set(front(line["onnx"])["tags"])


def test_what_is_not_known_is_left_out(int4: Path) -> None:
    card = (int4 / "README.md").read_text(encoding="utf-8")
    assert not {"license", "base_model", "base_model_relation", "language"} & front(int4).keys()
    assert "## Quality" not in card and "## Speed" not in card and "a checkpoint that was not made here" in card
    assert str(int4.parent.parent) not in card


def test_the_card_tells_the_whole_line(line: dict[str, Path], corpus_file: Path) -> None:
    card = (line["onnx"] / "README.md").read_text(encoding="utf-8")
    order = [card.index(f"| `{name}` |") for name in ("theirs", "tuned", "int4", "onnx")]
    assert "An ONNX graph with a cache, INT4." in card  # of keys and values, latent vectors or an LSTM's states
    assert order == sorted(order)
    results = read_manifest(line["tuned"]).results
    assert f"| `tuned` | {results['valid_bits_per_byte']:.4f} | a part of `{corpus_file.parent.name}/" in card
    assert f"{load_config(line['onnx']).parameters:,} parameters" in card and "INT4" in card
    assert f"{read_manifest(line['onnx']).results['parity']['kl']:.2g} nats" in card
    assert "reads at most 128 tokens" in card and "weights are quantized" in card


@pytest.mark.parametrize(
    ("worse", "end"), [("yes", "."), ("uncertain", ", but there is too little text to be certain."), (None, "")]
)
def test_the_card_says_that_a_training_made_a_model_worse(
    line: dict[str, Path], tmp_path: Path, worse: str | None, end: str
) -> None:
    tuned = shutil.copytree(line["tuned"], tmp_path / "tuned")
    manifest = read_manifest(tuned)
    dataclasses.replace(manifest, results=manifest.results | {"worse_than_start": worse}).write(tuned)
    write_card(tuned)
    card = (tuned / "README.md").read_text(encoding="utf-8")
    assert ("before its training" in card) == (worse is not None)
    assert worse is None or f"- On held-out text `tuned` is worse than before its training{end}\n" in card


def test_measurements_are_added_and_the_directory_stays_the_same_input(line: dict[str, Path], tmp_path: Path) -> None:
    onnx = shutil.copytree(line["onnx"], line["onnx"].parent / "measured")
    before = digest(onnx)
    bench, scored = tmp_path / "bench.json", tmp_path / "eval.json"
    score = {"metric": "acc", "error": 0.01, "metrics": {"acc": [0.25, 0.01]}, "documents": 99, "shots": 0}
    tasks = {"tasks": {"quiz": score | {"value": 0.25}}, "teacher_tasks": {"quiz": score | {"value": 0.5}}}
    bench.write_text(json.dumps({**BENCH, "directory": str(onnx), "teacher": "runs/large"} | tasks), encoding="utf-8")
    figures = {"bits_per_byte": 1.5, "text": ["wiki/valid.jsonl"]}
    scored.write_text(json.dumps({"directory": str(line["tuned"]), **figures}), encoding="utf-8")
    write_card(onnx, [bench, scored])
    card = (onnx / "README.md").read_text(encoding="utf-8")
    assert "| A Processor | 4.5 | 2,020,000 | 0.5 | 0.75 | 80 |" in card and "other programs disturbed it" in card
    assert "| `measured` | 1.2500 | `wiki/valid.jsonl` |" in card
    assert "| `large` | 1.2000 | `wiki/valid.jsonl` |" in card
    assert "| `tuned` | 1.5000 | `wiki/valid.jsonl` |" in card
    assert "| `large` | quiz | acc | 0.5000 ± 0.0100 |" in card
    assert "| `measured` | quiz | acc | 0.2500 ± 0.0100 |" in card
    assert "a part of" not in card, "a training's figure, on less text, makes way for a measurement"
    assert "Budget of raspberry-pi-5: fail, by prediction; it misses file_mb." in card
    assert front(onnx)["license"] == "cc-by-sa-4.0"
    assert verify_directory(onnx)[1] == [] and digest(onnx) == before
    (onnx / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n", encoding="utf-8")
    check_whole(onnx, "an edited card is no damage")
    write_card(onnx)
    assert (front(onnx)["license"], front(onnx)["language"]) == ("mit", "en"), "what somebody wrote there stays"
    assert "## Speed" not in (onnx / "README.md").read_text(encoding="utf-8")
    bench.write_text(json.dumps({**BENCH, "directory": str(onnx), "budget": None}), encoding="utf-8")
    made = {"target": "host", "chosen": "", "candidates": [], "limits": {}, "bench": json.loads(bench.read_text())}
    (tmp_path / "fit.json").write_text(json.dumps(made), encoding="utf-8")
    for place, given in enumerate(([onnx, line["int4"], bench], [bench], [tmp_path])):
        write_card(onnx)
        result = sportsllm.report(given, tmp_path / f"{place}.md", cards=True)
        assert result.cards == [onnx / "README.md"]
        assert "| A Processor | 4.5 | 2,020,000 | 0.5 | 0.75 | 80 |" in (onnx / "README.md").read_text(encoding="utf-8")
    assert verify_directory(onnx)[1] == [] and digest(onnx) == before


def test_results_of_other_models_are_ignored_and_damaged_ones_refused(line: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**BENCH, "directory": str(tmp_path)}), encoding="utf-8")
    write_card(line["int4"], [path])
    assert "## Speed" not in (line["int4"] / "README.md").read_text(encoding="utf-8")
    path.write_text(json.dumps({**BENCH, "tpot_ms": ["fast"]}), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"result\.json: tpot_ms: "):
        write_card(line["int4"], [path])
    with pytest.raises(ArtifactError, match=f"{MANIFEST}: not found"):
        write_card(line["theirs"])


def test_only_a_model_has_a_card(line: dict[str, Path], tmp_path: Path) -> None:
    run_stage(tmp_path / "corpus", Stage("data simulate", {"megabytes": 1}), lambda _: {})
    alone = shutil.copytree(line["gguf"], tmp_path / "alone")
    manifest = json.loads((alone / MANIFEST).read_text(encoding="utf-8"))
    manifest["parents"][0]["path"] = str(tmp_path / "gone")
    (alone / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for directory in (tmp_path / "corpus", alone):
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        with pytest.raises(ArtifactError, match="holds no model that a card could describe"):
            write_card(directory)
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == files
    assert not (tmp_path / "corpus" / "README.md").exists()


def code_of(directory: Path, heading: str) -> str:
    """The lines under a heading, for this directory."""
    card = (directory / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"With {re.escape(heading)}[^\n]*:\n\n```\w+\n(.*?)```", card, re.DOTALL)
    assert found, card
    return found.group(1).replace("DIR", str(directory))


@pytest.mark.parametrize(
    ("name", "heading", "module"),
    [
        ("tuned", "transformers", "transformers"),
        ("onnx", "optimum", "optimum.onnxruntime"),
        ("onnx", "onnxruntime-genai", "onnxruntime_genai"),
        ("chat", "transformers", "transformers"),
        ("chat-onnx", "optimum", "optimum.onnxruntime"),
        ("chat-onnx", "onnxruntime-genai", "onnxruntime_genai"),
    ],
)
def test_the_lines_to_load_it_run(
    name: str, heading: str, module: str, line: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(module)
    code = code_of(line[name], heading).replace("max_new_tokens=100", "max_new_tokens=4")
    exec(compile(code.replace("max_length=200", "max_length=36"), heading, "exec"), {})
    assert ("user\nWho won?" if "chat" in name else "Full-time") in capsys.readouterr().out


def test_each_form_names_the_programs_that_load_it(line: dict[str, Path]) -> None:
    cards = {name: (line[name] / "README.md").read_text(encoding="utf-8") for name in ("tuned", "int4", "onnx", "gguf")}
    assert "With transformers" not in cards["int4"] and "With sportsllm-compress" in cards["int4"]
    assert "llama-cli -m DIR/model.gguf" in cards["gguf"] and "ollama create gguf -f Modelfile" in cards["gguf"]
    assert "With optimum" not in cards["tuned"] and "With llama.cpp" not in cards["onnx"]
    card = (line["chat-gguf"] / "README.md").read_text(encoding="utf-8")
    assert '-p "Who won?"' in card and 'generate DIR --chat --prompt "Who won?"' in card
    assert "has no chat template" not in card and "has no chat template" in cards["gguf"]
    assert "conversational" in front(line["chat-gguf"])["tags"]


def test_an_int8_cache_is_not_for_optimum(line: dict[str, Path], corpus_file: Path) -> None:
    out = line["onnx"].parent / "kv8"
    sportsllm.export(line["int4"], out=out, threads=2, kv_cache="int8", calibration=[corpus_file])
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "With optimum" not in card and "With onnxruntime-genai" in card
