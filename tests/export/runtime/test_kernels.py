"""Exports that call kernels: run by them or by ONNX Runtime's operators, chosen, refused, and said."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sportsllm
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from export.kernels import build as build_module
from export.kernels import library as built
from export.kernels.build import BuildError, build
from export.layout import GRAPH_FILE
from export.parity import check
from export.parity.comparison import DEPLOYED
from export.runtime import session as kernels
from export.runtime.decoder import OnnxDecoder
from export.runtime.session import called_version, choose_kernels
from export.runtime.slots import SlotDecoder
from sportsllm.errors import ArtifactError, ResourceError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.inference.sampling import Sampling, generate
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.rope import RopeScaling
from sportsllm.processors import cpuinfo
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.command_line import CommandLine
from tests.support.export_models import CONTEXT, Exports


@pytest.fixture(autouse=True)
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that do not ask for a machine without kernels have them."""
    if "missing" not in request.fixturenames:
        monkeypatch.setattr(built, "HERE", request.getfixturevalue("library").parent)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(built, "HERE", tmp_path)


SETTINGS: list[dict[str, Any]] = [
    {"bits": 4, "asymmetric": True, "attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    {"bits": 8, "block": 64, "cache": "int8"},
    {"bits": 4, "cache": "int8", "head_dim": 8, "qk_norm": True},
    {"bits": 8, "cache": "fp16", "rope_scaling": RopeScaling("yarn", 4.0, original_max_position_embeddings=80)},
    {"bits": 4, "cache": "fp16", "head_dim": 8},
    {"bits": 4, "block": 128, "tie_word_embeddings": False, "num_hidden_layers": 1, "hidden_size": 72},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_both_are_within_the_limits_of_parity(settings: dict[str, Any], exports: Exports) -> None:
    report = exports(**settings).report
    assert report.failures() == []
    assert [item.name for item in report.passes] == ["exact", "deployed", "native", "native, plain variant"]
    assert report.passes[3].comparisons[0].max_abs_logit_error == 0
    native = report.passes[2]
    assert native.limits == DEPLOYED[report.precision]
    cost = report.to_dict()["input_rounding"]
    assert list(cost) == ["portable", "native"] and cost["native"]["positions"] > 300
    for item in report.passes[1:3]:
        found = cost["native" if item.name == "native" else "portable"]
        assert found["greedy_match"] == pytest.approx(item.greedy_match) and 0 < found["kl"] < item.limits.kl
    # Other numbers than the portable ones, so these were other kernels.
    assert native.comparisons[0] != report.passes[1].comparisons[0]


@pytest.mark.parametrize("cache", ["fp32", "fp16", "int8"])
def test_batches_and_reuse(cache: str, exports: Exports) -> None:
    """As one after the other. Prompts of more than 16 tokens attend in another order, so reuse is near."""
    directory = exports(8, cache=cache).directory
    decoder = OnnxDecoder(directory, 2, kernels="native")
    assert decoder.kernels.name == "native"
    prompts = [[3, 1, 4], list(range(70)), [9] * 40]
    together = [decoder.prefill(prompts, 90), decoder.step([5, 6, 7])]
    for row, prompt in enumerate(prompts):
        alone = OnnxDecoder(directory, 1, kernels="native")
        np.testing.assert_array_equal(alone.prefill([prompt], 90)[0], together[0][row])
        np.testing.assert_array_equal(alone.step([5 + row])[0], together[1][row])
    fresh = OnnxDecoder(directory, 2, kernels="native")
    expected = fresh.prefill([[*prompts[1], 5, 6]], 90)
    decoder.prefill([prompts[1]], 90)
    again = decoder.prefill([[*prompts[1], 5, 6]], 90, reuse=True)
    assert np.abs(again - expected).max() < 0.02 * expected.std()


@pytest.mark.parametrize(("cache", "window"), [("fp32", 20), ("fp16", None), ("int8", 20)])
def test_slots_decode_as_alone_up_to_the_end_of_the_cache(cache: str, window: int | None, exports: Exports) -> None:
    """Among 2 to 16 rows, as proposals and behind a restored beginning: bit for bit. A prompt is near."""
    sliding = {} if window is None else {"layer_types": ("sliding", "full"), "sliding_window": window}
    directory, rng = exports(4, cache=cache, **sliding).directory, np.random.default_rng(0)
    slots, alone = (SlotDecoder(directory, count, None, 2, "native") for count in (16, 1))
    ends = [CONTEXT, 3, *rng.integers(3, CONTEXT, 14).tolist()]
    texts = [rng.integers(0, 96, end).tolist() for end in ends]
    wanted = list[Any]()
    for row, text in enumerate(texts):
        slots.read_slot(row, rng.integers(0, 96, CONTEXT).tolist())  # nothing of it shows later
        alone.clear(0)
        alone.read_slot(0, text[:-2])
        slots.restore(row, alone.view(0), len(text) - 2)
        wanted.append(np.concatenate([alone.step_slots(0, [token]).copy() for token in text[-2:]]))
        alone.truncate(0, len(text) - 2)
        np.testing.assert_array_equal(alone.read_slot(0, text[-2:], every=True), wanted[-1])
        assert np.abs(alone.logits(text)[-2:] - wanted[-1]).max() < 0.02 * wanted[-1].std()
    for count in (16, 8, 4, 3, 2):
        for row in range(count):
            slots.truncate(row, ends[row] - 2)
        steps = [slots.step_slots(0, [text[place] for text in texts[:count]]).copy() for place in (-2, -1)]
        np.testing.assert_array_equal(np.stack(steps, axis=1), wanted[:count])
    assert len({id(step._logits.base) for step in slots._slots._steps.values()}) == 1, "memory for 16 rows, not for 33"


def test_a_variant_of_other_bits_fails_the_gate(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = exports(4).directory
    native = OnnxDecoder(directory, 1, kernels="native")
    step = native.step
    monkeypatch.setattr(check, "variant_of", lambda path: "avx2")
    monkeypatch.setattr(native, "step", lambda tokens: np.nextafter(step(tokens), np.float32(9)))
    (item,) = check._plain_pass(directory, 1, native, list(range(40)))
    assert "limit 0" in item.failures()[0]


@pytest.mark.parametrize("value", ["../x", "-1", "", "1" * 40])
def test_a_version_that_is_no_number_is_refused(value: str, exports: Exports, tmp_path: Path) -> None:
    """It becomes part of a file name."""
    graph = onnx.load(str(exports(4).directory / GRAPH_FILE), load_external_data=False)
    next(entry for entry in graph.metadata_props if entry.key == "kernels").value = value
    (tmp_path / GRAPH_FILE).write_bytes(graph.SerializeToString())
    with pytest.raises(ArtifactError, match="names kernels of version"):
        called_version(tmp_path / GRAPH_FILE)


def test_two_sessions_at_once(exports: Exports) -> None:
    """Each in a thread of its own, as many steps as one after the other."""
    directory, found = exports(4).directory, dict[int, list[Any]]()

    def run(place: int) -> None:
        decoder = OnnxDecoder(directory, 2, kernels="native")
        found[place] = [decoder.prefill([[place, 2, 3]], 40), *(decoder.step([token]) for token in range(30))]

    threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in (0, 1):
        one_by_one = found.pop(place)
        run(place)
        np.testing.assert_array_equal(np.concatenate(found[place]), np.concatenate(one_by_one))


@pytest.mark.parametrize(("bits", "cache"), [(4, "fp16"), (8, "int8")])
def test_real_text_is_continued_as_by_pytorch(bits: int, cache: str, stories: Path, tmp_path: Path) -> None:
    """40 greedy tokens. Later ones differ: a model this small often has two tokens that are nearly as likely."""
    quantize_checkpoint(stories, tmp_path / "packed", QuantizationConfig(bits=bits), "rtn")
    options: dict[str, Any] = {"threads": 1, "kv_cache": cache}
    if cache == "int8":
        (text := tmp_path / "text.txt").write_text(
            "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine. "
            "One day, she saw a big red ball."
        )
        options["calibration"] = [text]
    sportsllm.export(tmp_path / "packed", out=tmp_path / "out", **options)
    model = load_checkpoint(tmp_path / "packed")
    tokenizer = load_tokenizer(tmp_path / "packed", model.config)
    prompt = [tokenizer.begin_id, *tokenizer.encode("Once upon a time")]
    decoders = [TorchDecoder(model), *(OnnxDecoder(tmp_path / "out", 1, kernels=k) for k in ("native", "portable"))]
    found = [list(generate(decoder, prompt, 40, Sampling(temperature=0))) for decoder in decoders]
    assert len(found[0]) == 40 and found[1] == found[0] and found[2] == found[0]


def test_the_choice_is_read_from_the_graph(exports: Exports, library: Path, tmp_path: Path) -> None:
    graph = exports(4).directory / GRAPH_FILE
    assert called_version(graph) == built.VERSION
    assert choose_kernels(graph, "auto").library == library
    assert choose_kernels(graph, "portable").library is None
    dense = exports().directory / GRAPH_FILE
    assert called_version(dense) is None and "calls none" in str(choose_kernels(dense))
    with pytest.raises(UsageError, match="calls none"):
        choose_kernels(dense, "native")
    with pytest.raises(UsageError, match="choose auto, native or portable"):
        choose_kernels(graph, "fast")
    for content in (b"", b"no graph at all", graph.read_bytes()[:-5], b"\xff" * 20):
        (tmp_path / "bad").write_bytes(content)
        choose_kernels(tmp_path / "bad")


def test_a_processor_that_no_variant_is_written_for_runs_the_runtimes_operators(
    exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = exports(4).directory / GRAPH_FILE
    monkeypatch.setattr(kernels, "variant_of", lambda library: "plain")
    assert choose_kernels(graph).name == "portable" and "plain C++" in str(choose_kernels(graph))
    assert choose_kernels(graph, "native").name == "native"


def test_the_fastest_variant_that_the_processor_has_is_chosen(library: Path) -> None:
    flags = set((cpuinfo("flags", "Features") or "").split())
    needs = {
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
        "avx_vnni": {"avx_vnni", "avx2", "fma", "f16c"},
        "avx2": {"avx2", "fma", "f16c"},
        "i8mm": {"i8mm"},
        "dotprod": {"asimddp"},
        "neon": {"asimd"},
    }
    code = "import sys\nfrom export.kernels.library import variant_of\nfrom pathlib import Path\n"
    code += "print(variant_of(Path(sys.argv[1])))"
    environment = {name: value for name, value in os.environ.items() if name != built.VARIANT_VARIABLE}
    command = [sys.executable, "-c", code, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == next((name for name, need in needs.items() if need <= flags), "plain")


def test_a_compiler_that_fails_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for names, message in ((["/nowhere/g++", "false"], "false"), (["/nowhere/g++"], r"/nowhere/g\+\+: No such file")):
        monkeypatch.setattr(build_module, "compilers", lambda names=names: ([name] for name in names))
        with pytest.raises(BuildError, match=message):
            build(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(build_module, "TARGET", "")  # SPORTSLLM_WHEEL is there and empty
    monkeypatch.setattr(build_module, "compile_sources", lambda command, work, machine: sys.exit(machine))
    with pytest.raises(SystemExit, match=build_module.here()):
        build(tmp_path)
    monkeypatch.setattr(build_module, "compilers", lambda: iter([["true"]]))
    monkeypatch.setattr(build_module, "compile_sources", lambda command, work, machine: [])
    with pytest.raises(BuildError, match=f"File exists: '{__file__}'"):
        build(Path(__file__))


def test_a_child_of_fork_decodes_on(exports: Exports, library: Path) -> None:
    """In a process of its own, since Python's threads and pytest's do not survive a fork alike."""
    code = """
import os, signal, sys
from pathlib import Path
from export.kernels import library
from export.runtime.decoder import OnnxDecoder
library.HERE = Path(sys.argv[2])
for name in ("native", "portable"):
    decoder = OnnxDecoder(Path(sys.argv[1]), 2, kernels=name)
    decoder.prefill([[1, 2, 3]], 40)
    wanted = decoder.step([4])
    decoder.prefill([[1, 2, 3]], 40)
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # a child that waits for threads that it has not; a busy machine may take long
        same = (decoder.step([4]) == wanted).all()
        decoder.step([5])
        os._exit(0 if same else 7)
    assert os.waitpid(child, 0)[1] == 0 and (decoder.step([4]) == wanted).all(), name
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", code, str(exports(4).directory), str(library.parent)]
    subprocess.run(command, check=True, env=environment)


def test_a_library_of_another_version_is_refused_by_name(exports: Exports, tmp_path: Path) -> None:
    copy = exports(4).copy_to(tmp_path / "copy")
    graph = onnx.load(str(copy / GRAPH_FILE), load_external_data=False)
    for entry in graph.metadata_props:
        if entry.key == "kernels":
            entry.value = "99"
    (copy / GRAPH_FILE).write_bytes(graph.SerializeToString())
    with pytest.raises(ResourceError, match=f"calls version 99, this program has version {built.VERSION}"):
        OnnxDecoder(copy, 1, kernels="native")
    chosen = OnnxDecoder(copy, 1).kernels
    assert chosen.name == "portable" and "version 99" in chosen.reason


@pytest.mark.usefixtures("missing")
def test_without_a_library_the_same_file_runs(exports: Exports) -> None:
    directory = exports(4).directory
    decoder = OnnxDecoder(directory, 1)
    assert str(decoder.kernels).startswith("kernels: portable (the library is not built; run")
    with pytest.raises(ResourceError, match="not built"):
        OnnxDecoder(directory, 1, kernels="native")
    asked = OnnxDecoder(directory, 1, kernels="portable")
    np.testing.assert_array_equal(decoder.logits([1, 2, 3]), asked.logits([1, 2, 3]))


def test_a_broken_library_is_named(exports: Exports, library: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / library.name).write_bytes(b"not a library")
    monkeypatch.setattr(built, "HERE", tmp_path)
    decoder = OnnxDecoder(exports(4).directory, 1)
    assert decoder.kernels.name == "portable" and library.name in decoder.kernels.reason


def spoil(copy: Path, name: str) -> None:
    """Change a graph so that it no longer fits itself."""
    graph = onnx.load(str(copy / GRAPH_FILE), load_external_data=False)
    call = next(node for node in graph.graph.node if node.op_type.startswith("DecoderLayer"))
    if name == "heads":
        next(item for item in call.attribute if item.name == "kv_num_heads").i = 3
    if name == "weights":
        packed = next(item for item in graph.graph.initializer if item.name == call.input[14])
        packed.dims[0] //= 2
    if name == "cache":
        call.op_type = "DecoderLayerInt8"
    (copy / GRAPH_FILE).write_bytes(graph.SerializeToString())


@pytest.mark.parametrize("name", ["heads", "weights", "cache"])
def test_bad_graphs_end_in_one_line(name: str, exports: Exports, tmp_path: Path) -> None:
    copy = exports(4).copy_to(tmp_path / "copy")
    spoil(copy, name)
    with pytest.raises(ArtifactError, match=GRAPH_FILE) as error:
        OnnxDecoder(copy, 1, kernels="native")
    assert "\n" not in str(error.value)


def test_commands_say_what_runs(
    checkpoint: Path, int4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], cli: CommandLine
) -> None:
    (text := tmp_path / "text.txt").write_text("The home side won.")
    exported = sportsllm.export(int4, out=tmp_path / "out", threads=1)
    assert exported.kernels == built.VERSION
    assert "kernels: called for all 2 layers and the head" in capsys.readouterr().err

    def found(*arguments: object) -> dict[str, Any]:
        result, err = cli.says(*arguments)
        assert result["kernels"] is None or f"kernels: {result['kernels']} (" in err
        return result

    for wanted in ("native", "portable"):
        few = ("--prompt", "Goal", "--max-new-tokens", 2, "--kernels", wanted)
        assert found("generate", tmp_path / "out", *few)["kernels"] == wanted
        assert found("eval", tmp_path / "out", "--text", text, "--kernels", wanted)["kernels"] == wanted
    assert found("verify", tmp_path / "out")["kernels"] == "native"
    assert found("generate", checkpoint, "--prompt", "Goal", "--max-new-tokens", 1)["kernels"] is None
    cli.refuses(2, "is a checkpoint", "generate", checkpoint, "--kernels", "native")
    (tmp_path / "out" / GRAPH_FILE).write_bytes(b"cut")  # off before it says that it calls any
    cli.refuses(3, "3 bytes instead of", "bench", tmp_path / "out", "--kernels", "native")
