"""Execution providers by name, where nodes run, and the cache that stays with the provider."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export.layout import GRAPH_FILE
from export.parity import comparison
from export.parity.comparison import Limits, check_provider
from export.runtime import providers
from export.runtime.decoder import OnnxDecoder
from export.runtime.kv_cache import DeviceCache, cached_tensors
from export.runtime.providers import CPU, Placement, Provider, create_session, find_provider, placement
from export.runtime.session import choose_kernels, session_options
from sportsllm.errors import ResourceError, UsageError
from sportsllm.inference.decoder import open_decoder
from sportsllm.inference.sampling import Sampling, generate
from tests.support.command_line import CommandLine, complains
from tests.support.export_models import Exports

AZURE = Provider("azure", "AzureExecutionProvider", "cpu")  # built into every package, and takes nothing of ours


@pytest.mark.parametrize("name", ["cpu", "CPU", "CPUExecutionProvider"])
def test_the_cpu_is_always_there(name: str) -> None:
    assert find_provider(name) is CPU and CPU.is_cpu
    assert providers.installed()[0] == "cpu" and "azure" not in providers.installed()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("cuda", ResourceError, "cuda: not installed; installed: cpu.* install onnxruntime-gpu"),
        ("TensorRT-RTX", ResourceError, "onnxruntime-ep-nv-tensorrt-rtx"),
        ("quantum", UsageError, "quantum: no provider has this name; installed: cpu.*webgpu: onnx"),
        ("cpu:1", UsageError, "cpu:1: cpu has no devices"),
        ("azure:gpu", UsageError, "azure:gpu: give the number of a device, such as azure:0"),
    ],
)
def test_a_provider_that_is_not_here_says_what_to_do(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_provider(name)


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An installed plugin whose library is no library."""
    package = tmp_path / "onnxruntime_ep_broken"
    package.mkdir()
    (package / "library.so").write_text("no library")
    (package / "__init__.py").write_text(
        f"def get_library_path(): return {str(package / 'library.so')!r}\n"
        "def get_ep_names(): return ['BrokenExecutionProvider']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, package.name, raising=False)
    providers._plugins.cache_clear()
    yield "broken"
    providers._plugins.cache_clear()


def test_plugins_are_found_by_their_packages(broken_plugin: str) -> None:
    assert broken_plugin in providers.installed()
    with pytest.raises(ResourceError, match="--provider broken: onnxruntime-ep-broken cannot be loaded"):
        find_provider(broken_plugin)


def test_a_plugin_that_cannot_be_imported_is_named(broken_plugin: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "onnxruntime_ep_broken" / "__init__.py").write_text("import no_such_module_at_all\n")
    assert broken_plugin not in providers.installed()
    assert "onnxruntime-ep-broken is installed and cannot be imported: No module" in capsys.readouterr().err


def test_every_node_is_counted(exports: Exports) -> None:
    """Without optimizations the session has the graph's own nodes; those of functions are inlined."""
    directory = exports(inline=True).directory
    options = session_options(1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = create_session(str(directory / GRAPH_FILE), options, CPU)
    found = placement(session, AZURE)
    nodes = [node.op_type for node in onnx.load(str(directory / GRAPH_FILE), load_external_data=False).graph.node]
    assert found.taken == {} and dict(found.elsewhere) == {op: nodes.count(op) for op in set(nodes)}
    assert found.to_dict()["nodes_on_cpu"] == dict(found.elsewhere) and found.to_dict()["nodes"] == 0


def test_what_fell_to_the_cpu_is_said() -> None:
    gpu = Provider("cuda", "CUDAExecutionProvider", "gpu")
    line = str(Placement(gpu, {"MatMul": 5, "Add": 1}, {"Shape": 1, "Reshape": 3}))
    assert line == (
        "provider: cuda (CUDAExecutionProvider, on the GPU) runs 6 of 10 nodes; 4 fell to the CPU provider: "
        "3 Reshape, 1 Shape"
    )
    assert str(Placement(gpu, {"MatMul": 5}, {})).endswith("runs all 5 nodes")


def test_a_device_cache_holds_what_the_hosts_holds(exports: Exports) -> None:
    """One sequence at a time, with a mask that ends with its token, differs in the order of additions alone: below 1e-5
    for logits of about 1. Here the buffers lie in the host's memory."""
    equal = partial(np.testing.assert_allclose, atol=1e-5, rtol=0)
    directory = exports().directory
    plain, device = (OnnxDecoder(directory, 1, kernels="portable") for _ in range(2))
    tensors = cached_tensors(device._session, directory, device.config)
    device._make_cache = partial(DeviceCache, device._session, 96, tensors, places={}, provider=CPU)
    prompts = [[1, 5, 9, 2, 7], [3, 4], [8]]
    for decoder in (plain, device):
        decoder.prefill(prompts, max_length=40)
    equal(device.step([4, 5, 6]), plain.step([4, 5, 6]))
    longer = [[*prompt, token, 11] for prompt, token in zip(prompts, [4, 5, 6], strict=True)]
    found, expected = (decoder.prefill(longer, max_length=40, reuse=True) for decoder in (device, plain))
    equal(found, expected)
    equal(device.step([1, 2, 3]), plain.step([1, 2, 3]))
    equal(device.logits(list(range(50))), plain.logits(list(range(50))))


def test_a_provider_that_computes_all_positions_gives_the_last(exports: Exports) -> None:
    decoder, tokens = OnnxDecoder(exports().directory, 1), list(range(9))
    expected = decoder.prefill([tokens])
    assert decoder._computes_kept_positions()
    decoder._keeps_last = False
    np.testing.assert_allclose(decoder.prefill([tokens]), expected, atol=1e-5, rtol=0)  # the order of additions


def test_kernels_are_for_the_cpu_provider(exports: Exports) -> None:
    graph = exports(4).directory / GRAPH_FILE
    chosen = choose_kernels(graph, "auto", AZURE)
    assert chosen.name == "portable" and "CPU provider alone" in str(chosen)
    with pytest.raises(UsageError, match="--kernels native: they run on the CPU provider, not on azure"):
        choose_kernels(graph, "native", AZURE)


def test_a_provider_is_held_to_the_logits_of_the_cpu(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = exports().directory
    where, found = check_provider(directory, "cpu", 1)
    assert where is None and not found.failures()
    assert {each.kind for each in found.comparisons} == {"prefill", "decode", "ragged batch"}
    monkeypatch.setitem(comparison.DEPLOYED, "int4", Limits(-1.0, -1.0, 1.0))
    assert check_provider(directory, "cpu", 1)[1].failures()


@pytest.mark.parametrize("command", ["generate", "eval", "verify", "bench"])
def test_commands_refuse_what_cannot_be(
    command: str, exports: Exports, checkpoint: Path, corpus_file: Path, cli: CommandLine
) -> None:
    text = ["--text", corpus_file] if command == "eval" else []
    for provider, code in (("quantum", 2), ("cuda", 5)):
        if command != "verify":  # there the manifest comes first
            cli.refuses(code, provider, command, exports().directory, *text, "--provider", provider)
    if command == "verify":
        complains(cli(command, checkpoint, "--provider", "cuda"), 2, "is a checkpoint, which PyTorch runs")
    elif command != "bench":
        refused = cli(command, checkpoint, *text, "--provider", "cuda")
        complains(refused, 2, f"{checkpoint}: --provider cuda: this PyTorch finds no CUDA GPU; use cpu")
        complains(cli(command, checkpoint, *text, "--provider", "tpu"), 2, "use auto, cpu, cuda or cuda:N")


def test_a_search_names_the_missing_provider_at_once(
    checkpoint: Path, corpus_file: Path, tmp_path: Path, cli: CommandLine
) -> None:
    given = ["--teacher", checkpoint, "--corpus", corpus_file, "--out", tmp_path / "fit", "--dry-run"]
    refused = cli("fit", *given, "--target", "rtx-3060", "--provider", "cuda")
    complains(refused, 5, "--provider cuda: not installed")


def test_results_name_the_provider(checkpoint: Path, exported: Path, tmp_path: Path, cli: CommandLine) -> None:
    result = cli.result("generate", exported, "--max-new-tokens", 2)
    assert (result["provider"], result["placement"]) == ("cpu", None)
    cli.refuses(5, "takes none of the graph's nodes", "verify", exported, "--provider", "azure")
    assert cli("export", checkpoint, "--out", tmp_path / "other", "--provider", "azure")[0] == 5
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif("openvino" not in providers.installed(), reason="needs onnxruntime-openvino")
@pytest.mark.parametrize("settings", [{}, {"dtype": "fp16"}, {"bits": 4}], ids=["fp32", "fp16", "int4"])
def test_openvino_chooses_the_same_tokens(settings: dict[str, int], exports: Exports) -> None:
    directory = exports(**settings).directory
    try:
        there = open_decoder(directory, 1, provider="openvino")
    except ResourceError as error:
        pytest.skip(str(error))
    here = open_decoder(directory, 1, "portable")
    if not settings:  # of an untrained model the best tokens are close: rounding chooses among them
        found, expected = (list(generate(each, [1, 5, 9], 20, Sampling(temperature=0))) for each in (there, here))
        assert found == expected
    where, compared = check_provider(directory, "openvino", 1)
    assert where is not None and sum(where.taken.values()) > 20 and not compared.failures()
