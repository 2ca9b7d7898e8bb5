"""The ONNX runtime behind the `Decoder` protocol, against PyTorch."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from export.layout import DATA_FILE, GRAPH_FILE
from export.runtime import decoder as runtime
from export.runtime.decoder import OnnxDecoder
from export.runtime.session import raise_if_out_of_memory
from sportsllm.errors import ArtifactError, ResourceError, SportsLLMError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.inference.decoder import log_softmax, open_decoder
from sportsllm.models.language_model import SportsLLM
from tests.support.checkpoint_files import one_line
from tests.support.export_models import Export, Exports, draw, logits_of, pieces_read, save, tiny_model

TOLERANCE = 2e-5


GRAPHS = {"rotary inside": {}, "rotary outside": {"head_dim": 8}, "standard operators": {"operators": "standard"}}


@pytest.fixture(scope="module", params=GRAPHS.values(), ids=GRAPHS)
def export(request: pytest.FixtureRequest, exports: Exports) -> Export:
    """With a context of 64 tokens."""
    return exports(max_position_embeddings=64, **request.param)


@pytest.fixture
def model(export: Export) -> SportsLLM:
    return export.model


@pytest.fixture
def decoder(export: Export) -> OnnxDecoder:
    return runtime.open(export.directory, threads=1)


def test_beginnings_that_were_read_are_reused(model: SportsLLM, decoder: OnnxDecoder) -> None:
    """Only what is new runs; the logits are those of a fresh start."""
    first, second = draw(20, 11)
    decoder.prefill([first, second], max_length=60)
    steps = draw(6, 6)
    for pair in zip(*steps, strict=True):
        decoder.step(pair)
    # What was read and stepped, then more; and a prompt that parts from it in the middle.
    prompts = [first + steps[0] + [7, 8, 9], [*second[:5], 1, 2, 3, 4]]
    read = pieces_read(decoder)
    found = decoder.prefill(prompts, max_length=50, reuse=True)
    assert read == [3, 4]
    for row, prompt in enumerate(prompts):
        np.testing.assert_allclose(found[row], logits_of(model, prompt)[-1], atol=TOLERANCE, rtol=0)
    following = decoder.step([3, 4])
    for row, prompt in enumerate(prompts):
        np.testing.assert_allclose(following[row], logits_of(model, [*prompt, 3 + row])[-1], atol=TOLERANCE, rtol=0)
    # What the steps have added counts too; of the same prompts the last token is read. Without leave all is.
    read.clear()
    longer = [[*prompt, 3 + row, 5] for row, prompt in enumerate(prompts)]
    found = decoder.prefill(longer, max_length=60, reuse=True)
    for row, prompt in enumerate(longer):
        np.testing.assert_allclose(found[row], logits_of(model, prompt)[-1], atol=TOLERANCE, rtol=0)
    decoder.prefill(longer, max_length=60, reuse=True)
    decoder.prefill(longer, max_length=64, reuse=True)  # more room than there was
    decoder.prefill(longer, max_length=64)
    assert read == [1, 1, 1, 1, 31, 11, 31, 11]


@pytest.mark.parametrize("lengths", [(1,), (1, 13, 30)], ids=str)
def test_prefill_and_steps_equal_pytorch(lengths: tuple[int, ...], model: SportsLLM, decoder: OnnxDecoder) -> None:
    """Prompts of unequal length are decoded together, each at its own place."""
    rows = draw(*lengths)
    following = draw(*([10] * len(rows)))
    found = [decoder.prefill(rows, max_length=45)]
    found += [decoder.step(list(tokens)) for tokens in zip(*following, strict=True)]
    for row, (prompt, rest) in enumerate(zip(rows, following, strict=True)):
        expected = logits_of(model, prompt + rest)[len(prompt) - 1 :]
        np.testing.assert_allclose([step[row] for step in found], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_prompt_read_in_pieces(chunk: int, decoder: OnnxDecoder) -> None:
    rows = draw(40, 16)
    whole = decoder.prefill(rows)
    whole_step = decoder.step([5, 6])
    decoder.prefill_chunk = chunk
    np.testing.assert_allclose(decoder.prefill(rows), whole, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(decoder.step([5, 6]), whole_step, atol=TOLERANCE, rtol=0)


def test_the_context_can_be_filled(model: SportsLLM, decoder: OnnxDecoder) -> None:
    (row,) = draw(64)
    decoder.prefill([row[:62]])
    decoder.step([row[62]])
    last = decoder.step([row[63]])
    np.testing.assert_allclose(last[0], logits_of(model, row)[-1], atol=TOLERANCE, rtol=0)
    with pytest.raises(UsageError, match="full at 64 tokens"):
        decoder.step([0])
    np.testing.assert_allclose(decoder.prefill([row])[0], last[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [5, 128])
def test_score(chunk: int, model: SportsLLM, decoder: OnnxDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "logits_at_once", lambda vocab_size: chunk)
    rows = draw(1, 2, 33, 64)
    decoder.prefill([rows[2]])
    before = decoder.score(rows)
    for row, scores in zip(rows, before, strict=True):
        expected = log_softmax(logits_of(model, row))[np.arange(len(row) - 1), row[1:]]
        np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)
    step = decoder.step([7])  # the cache of prefill is untouched
    np.testing.assert_allclose(step[0], logits_of(model, [*rows[2], 7])[-1], atol=TOLERANCE, rtol=0)


def test_packed_model_decodes_as_it_scores(exports: Exports) -> None:
    """Activations are rounded to 8 bits in blocks of one token, so one token or many give the same logits.

    ONNX Runtime's AVX2 kernels for one row and for many may round an activation that lies halfway differently.
    """
    directory = exports(4).directory
    decoder = open_decoder(directory, threads=1, kernels="portable")
    (row,) = draw(30)
    expected = runtime.open(directory, 1, "portable").logits(row)
    found = np.concatenate([decoder.prefill([row[:20]]), *(decoder.step([token]) for token in row[20:])])
    unequal = np.abs(found - expected[19:]).max(axis=1) > TOLERANCE
    assert unequal.sum() <= 1
    # What rounding activations to 8 bits costs: a few percent of logits of size 1.
    packed = load_checkpoint(directory)
    for logits in (expected, [*expected[:19], *found]):
        np.testing.assert_allclose(logits, logits_of(packed, row), atol=0.15, rtol=0)


@pytest.fixture
def small(exports: Exports) -> Export:
    return exports(max_position_embeddings=64)


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda d: d.prefill([[1, 96]]), ArtifactError, "token id 96 .* vocabulary of 96"),
        (lambda d: d.prefill([[1, -1]]), ArtifactError, "token id -1"),
        (lambda d: d.score([[3, 1000]]), ArtifactError, "token id 1000"),
        (lambda d: (d.prefill([[1]]), d.step([96])), ArtifactError, "token id 96"),
        (lambda d: d.prefill([[1] * 65]), UsageError, "65 tokens.* 1 to 64"),
        (lambda d: d.prefill([[1] * 20], max_length=10), UsageError, "20 tokens.* 1 to 10"),
        (lambda d: d.score([[1] * 65]), UsageError, "65 tokens"),
        (lambda d: d.prefill([[1], []]), UsageError, "0 tokens"),
        (lambda d: d.prefill([]), UsageError, "no prompt"),
        (lambda d: d.step([1]), UsageError, "call prefill first"),
        (lambda d: (d.prefill([[1], [2]]), d.step([1])), UsageError, "1 tokens for 2 sequences"),
        (lambda d: raise_if_out_of_memory(Exception("kernels 3: out of memory"), Path()), ResourceError, "not enough"),
    ],
)
def test_misuse_is_refused_in_one_line(
    act: Callable[[OnnxDecoder], object], error: type[SportsLLMError], words: str, small: Export
) -> None:
    with one_line(words, error):
        act(runtime.open(small.directory, threads=1))


@pytest.mark.parametrize("with_manifest", [True, False], ids=["manifest", "no manifest"])
def test_damaged_files(with_manifest: bool, small: Export, tmp_path: Path) -> None:
    """ONNX Runtime alone accepts data of any length."""
    small.copy_to(tmp_path)
    files = {name: (tmp_path / name).read_bytes() for name in (GRAPH_FILE, DATA_FILE)}
    if with_manifest:
        entries = {name: {"bytes": len(content), "sha256": ""} for name, content in files.items()}
        (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "files": entries}))
    runtime.open(tmp_path, 1)
    for name, content in files.items():
        for damaged in (content[:-100], content + bytes(100), None):
            (tmp_path / name).unlink()
            if damaged is not None:
                (tmp_path / name).write_bytes(damaged)
            with one_line(GRAPH_FILE):  # or of the data, whose name begins with it
                runtime.open(tmp_path, 1, "native" if with_manifest else "auto")
        (tmp_path / name).write_bytes(content)


def change_graph(
    directory: Path, *, location: str = "", data_bytes: str = "", norm: tuple[int, ...] = (), **versions: int
) -> None:
    """Another place or length of the data, another shape of the last norm, another IR version or opset."""
    graph = onnx.load(str(directory / GRAPH_FILE), load_external_data=False)
    for tensor in graph.graph.initializer:
        if norm and tensor.name == "model.norm.weight":
            tensor.dims[:] = norm
        for entry in tensor.external_data:
            if location and entry.key == "location":
                entry.value = location
    for entry in graph.metadata_props:
        if data_bytes and entry.key == "data_bytes":
            entry.value = data_bytes
    graph.ir_version = versions.get("ir_version", graph.ir_version)
    graph.opset_import[0].version = versions.get("opset", graph.opset_import[0].version)
    (directory / GRAPH_FILE).write_bytes(graph.SerializeToString())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda directory: change_graph(directory, ir_version=99), "newer than ONNX Runtime .*IR version: 99.*upgrade"),
        (lambda directory: change_graph(directory, opset=99), "newer than ONNX Runtime .*Opset 99.*upgrade"),
        (lambda directory: change_graph(directory, location="../outside"), "outside its directory"),
        (lambda directory: change_graph(directory, location="/etc/passwd"), "outside its directory"),
        (lambda d: (d / DATA_FILE).symlink_to((d / DATA_FILE).rename(d.parent / "outside")), "outside its directory"),
        (lambda directory: change_graph(directory, data_bytes="../../x"), "bytes of data; the export is damaged"),
        (lambda directory: change_graph(directory, norm=(2, 32)), "cannot run it .*; export it again"),
    ],
    ids=["newer IR", "newer opset", "path upwards", "absolute path", "link", "no number of bytes", "other norm"],
)
def test_damaged_graphs(change: Callable[[Path], None], message: str, small: Export, tmp_path: Path) -> None:
    directory = small.copy_to(tmp_path / "export")
    (tmp_path / "outside").write_bytes((directory / DATA_FILE).read_bytes())
    change(directory)
    with one_line(message):
        runtime.open(directory, threads=1, kernels="portable").score([[1, 2, 3]])


def test_a_graph_of_another_shape_is_refused(small: Export, tmp_path: Path) -> None:
    save(small.copy_to(tmp_path), tiny_model(num_hidden_layers=3))
    with pytest.raises(ArtifactError, match=r"past_key_values\.2\.key.*config\.json"):
        runtime.open(tmp_path, 1)


def test_a_runtime_older_than_the_graph_asks_for_is_refused(small: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones may compute another sliding window. A path may be a string."""
    runtime.open(str(small.directory))
    monkeypatch.setattr("onnxruntime.__version__", "1.30.2")
    with pytest.raises(ResourceError, match=r"needs onnxruntime 1\.31 or later; 1\.30\.2 is installed"):
        runtime.open(small.directory)
