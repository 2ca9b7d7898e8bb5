"""`bench --against`: the adapters on made-up modules, on real ones where installed, and what failures become."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure.machine import choose_cpus
from benchmarks.runtimes.compare import (
    INSTALL,
    Runtime,
    best_ratios,
    measure_against,
    parse_runtimes,
    portable_too,
    turn_depths,
)
from benchmarks.runtimes.worker import RUNTIMES, WARM_UP, time_turn
from sportsllm.errors import UsageError
from sportsllm.formats.manifest import verify_directory
from tests.support.models import BENCHED as CONFIG

COMMON = """
import json, os
def log(**what):
    with open(os.environ["PEER_LOG"], "a") as stream:
        stream.write(json.dumps(what) + "\\n")
"""
FAKES = {
    "peer_log.py": COMMON,
    "onnxruntime_genai.py": """
from peer_log import log
class Config:
    def __init__(self, path): self.path = path
    def overlay(self, text): log(overlay=text)
class Model:
    def __init__(self, config): log(directory=config.path)
class GeneratorParams:
    def __init__(self, model): pass
    def set_search_options(self, **options): self.options = options
class Generator:
    def __init__(self, model, parameters): self.room, self.read = parameters.options["max_length"], 0
    def append_tokens(self, tokens):
        self.read += len(tokens)
        log(prompt=list(tokens))
    def generate_next_token(self):
        self.read += 1
        assert self.read <= self.room
""",
    "openvino.py": """
class Tensor:
    def __init__(self, array): self.array = array
""",
    "openvino_genai.py": """
from peer_log import log
class StreamingStatus: RUNNING = "running"
class StreamerBase: pass
class GenerationConfig: pass
class LLMPipeline:
    def __init__(self, path, device, **properties): log(directory=path, device=device, **properties)
    def generate(self, tensor, config, streamer):
        assert tensor.array.dtype == "int64" and config.ignore_eos and not config.do_sample
        log(prompt=tensor.array[0].tolist())
        left = config.max_new_tokens
        while left:  # two at a time where there are two, as with speculative decoding
            now = min(2, left)
            assert streamer.write([1, 2][:now] if now > 1 else 1) == StreamingStatus.RUNNING
            left -= now
        streamer.end()
""",
    "ik_llama_cpp/_ctypes_api.py": """
def llama_batch_free(batch): batch.clear()
def llama_model_n_embd(model): return 32
""",
    "ik_llama_cpp/_internals.py": """
def make_batch_range(tokens, *, pos_start, logits_last=True): return [pos_start, *tokens]
""",
    "ik_llama_cpp/__init__.py": """
import ctypes
from peer_log import log
class Context:
    _n_ubatch = 20
    def kv_cache_clear(self): self.tokens = []
    def decode(self, batch):
        assert batch[0] == len(self.tokens)
        self.tokens += batch[1:]
        if len(batch) > 2 and len(self.tokens) in (8, 32): log(prompt=list(self.tokens))
        return 0
    def get_logits(self): return ctypes.cast((ctypes.c_float * 64)(), ctypes.POINTER(ctypes.c_float))
class Model:
    n_vocab, model = 64, None
class IkLlama:
    def __init__(self, path, **settings):
        self._model, self._context = Model(), Context()
        log(directory=path, **settings)
""",
}


class Interpreters:
    """Programs that run this Python with made-up modules in front of the installed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log.jsonl"
        self.modules = folder / "modules"
        self.modules.mkdir(parents=True)

    def write(self, **changed: str) -> str:
        for name, text in (FAKES | {f"{name}.py": text for name, text in changed.items()}).items():
            (self.modules / name).parent.mkdir(exist_ok=True)
            (self.modules / name).write_text(text, encoding="utf-8")
        program = self.folder / "python"
        lines = f'PYTHONPATH="{self.modules}" PEER_LOG="{self.log}" exec "{sys.executable}" "$@"'
        program.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
        program.chmod(0o755)
        return str(program)

    def llama_bench(self) -> str:
        """A program that takes llama-bench's flags: prompts at 100 tokens/s, generation at 50."""
        program = self.folder / "llama-bench"
        lines = (
            f"#!{sys.executable}",
            "import json, os, sys",
            f"sys.path.insert(0, {str(self.modules)!r})",
            f"os.environ['PEER_LOG'] = {str(self.log)!r}",
            "from peer_log import log",
            "log(asked=sys.argv[1:])",
            "held = b'1' * (60 << 20)",
            "rate = 100 if sys.argv[-2:] == ['-n', '0'] else 50",
            "print('loading', '[', json.dumps({'build_commit': 'abc', 'avg_ts': rate}) + ']', sep='\\n')",
        )
        program.write_text("\n".join(lines), encoding="utf-8")
        program.chmod(0o755)
        return str(program)

    def logged(self, key: str) -> list[Any]:
        lines = [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]
        return [line[key] for line in lines if key in line]


@pytest.fixture
def interpreters(tmp_path: Path) -> Interpreters:
    return Interpreters(tmp_path)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (path := tmp_path / "model.gguf").touch()
    return path


def measure(export: Path, runtimes: list[Runtime], timeout_s: float = 900.0) -> dict[str, Any]:
    settings = {"threads": 1, "cpus": choose_cpus(1)}
    return measure_against(export, CONFIG, runtimes, settings, [1], timeout_s)


def test_a_turn_counts_first_token_and_rate_from_the_runtimes_times() -> None:
    prompts: list[tuple[int, ...]] = []

    def generate(prompt: list[int], count: int) -> list[float]:
        prompts.append(tuple(prompt))
        assert all(0 <= token < 7 for token in prompt)
        # half a second to read, a slow warm-up, then 10 ms a token, handed over in pairs
        slow = [0.5 + 0.3 * index for index in range(min(count, WARM_UP + 1))]
        return slow + [slow[-1] + 0.01 * 2 * (1 + index // 2) for index in range(count - len(slow))]

    figures = time_turn(generate, [32, 64], vocab_size=7)
    assert figures["ttft_ms"] == {"32": pytest.approx(500.0), "64": pytest.approx(500.0)}
    assert figures["generated_tokens_per_s"]["64"] == pytest.approx(100.0)
    # A runtime that remembers prompts would answer a known one without reading it.
    assert len(set(prompts)) == len(prompts) == 14
    with pytest.raises(RuntimeError, match="gave 1 tokens"):
        time_turn(lambda prompt, count: [0.1], [32], 7)


def test_every_adapter_drives_its_runtime(export: Path, interpreters: Interpreters, gguf: Path) -> None:
    """One of them twice, with options of its own."""
    python, group_size = interpreters.write(), "DYNAMIC_QUANTIZATION_GROUP_SIZE"
    asked = [f"openvino={export},python={python}", f"openvino+grouped={export},python={python},{group_size}=128"]
    openvino = parse_runtimes([*asked, f"other+same={export}"], export)
    assert [(one.kind, one.options) for one in openvino][1] == ("openvino", {group_size: 128})
    built = {"bench": interpreters.llama_bench(), "fa": 1}
    runtimes = [
        Runtime("genai", python, export),
        *openvino,
        Runtime("ik_llama.cpp", python, gguf),
        *(Runtime(f"{name}+built", python, gguf, built) for name in ("llama.cpp", "ik_llama.cpp")),
    ]
    result = measure(export, runtimes)
    against = result["against"]
    assert {name: one["status"] for name, one in against.items()} == dict.fromkeys(
        ["ours", *(runtime.name for runtime in runtimes)], "measured"
    )
    for name in ("llama.cpp+built", "ik_llama.cpp+built"):
        assert against[name]["version"] == "abc" and against[name]["peak_rss_bytes"] > 5e7
        assert against[name]["generated_tokens_per_s"]["32"] == pytest.approx(50)
        assert against[name]["ttft_ms"]["32"] == pytest.approx(320)
    flags = f"-m {gguf} -t 1 -r 1 -o json -fa 1"
    asked = [" ".join(line) for line in interpreters.logged("asked")]
    assert {f"{flags} -p 0 -n 40 -d 8", f"{flags} -p 0 -n 0 -gp 8,40", f"{flags} -p 32 -n 0"} <= set(asked)
    for one in against.values():
        assert one["generated_tokens_per_s"]["32"] > 0 and one["ttft_ms"]["32"] > 0
        assert one["peak_rss_bytes"] > 5e6 and one["rounds"] == 1 and one["steady"] is False
        assert one["cpus"] == choose_cpus(1)
    assert interpreters.logged("n_threads") == [1] and interpreters.logged("INFERENCE_NUM_THREADS") == [1, 1]
    assert interpreters.logged(group_size) == [128]
    assert against["openvino"]["options"] == {} != against["openvino+grouped"]["options"]
    overlay = json.loads(interpreters.logged("overlay")[0])
    assert overlay["model"]["decoder"]["session_options"]["intra_op_num_threads"] == 1
    assert interpreters.logged("directory") == [str(export), str(export), str(export), str(gguf)]
    prompts = interpreters.logged("prompt")
    assert len(prompts) == 28 and {len(prompt) for prompt in prompts} == {8, 32}
    assert prompts[:7] == prompts[7:14] == prompts[14:21] == prompts[21:]  # the same for all
    assert verify_directory(export)[1] == []  # no runtime changed what it read
    ratios = result["against_ratios"]
    assert ratios["generated_tokens_per_s.32"]["better"] == "higher"
    # A second export of ours counts only if there is no other runtime.
    assert not {one["peer"] for one in ratios.values()} & {"ours", "other+same"}
    assert json.loads(json.dumps(result)) == result


def test_failures_are_told_apart_and_stop_nobody(export: Path, interpreters: Interpreters, gguf: Path) -> None:
    broken = interpreters.write(
        **{"ik_llama_cpp/__init__": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"},
        onnxruntime_genai="raise RuntimeError('bad graph\\nmore')",
        openvino_genai="x = bytearray(1 << 60)",
    )
    another = Interpreters(gguf.parent / "another")
    python = another.write(
        **{"ik_llama_cpp/_ctypes_api": FAKES["ik_llama_cpp/_ctypes_api.py"].replace("return 32", "return 48")},
        onnxruntime_genai="import sys; raise RuntimeError(' '.join(sys.path))",
    )
    (another.modules / "openvino_genai.py").unlink()
    runtimes = [
        Runtime("ik_llama.cpp", broken, gguf),
        Runtime("ik_llama.cpp+wider", python, gguf),
        Runtime("genai", broken, export),
        Runtime("genai+path", python, export),
        Runtime("openvino", broken, export),
        Runtime("openvino+absent", python, export),
        Runtime("llama.cpp", broken, gguf, {"bench": "true"}),
        Runtime("other", sys.executable, gguf.parent),  # no export there
    ]
    result = measure(export, runtimes)
    against = result["against"]
    status = {name: one["status"] for name, one in against.items()}
    assert status["ours"] == "measured"
    assert status["ik_llama.cpp"].startswith("failed: ") and "crashed with SIGSEGV" in status["ik_llama.cpp"]
    assert "hidden_size 48, ours has 32" in status["ik_llama.cpp+wider"]
    assert status["genai"] == "failed: RuntimeError: bad graph"
    root, shown = Path(__file__).parents[3], status["genai+path"].split()  # nothing of this environment
    assert str(another.modules) in status["genai+path"]
    assert str(root) not in shown and str(root / "benchmarks") not in shown
    assert "stopped for memory" in status["openvino"]
    if importlib.util.find_spec("openvino_genai") is None:
        assert status["openvino+absent"] == "not installed"
        assert against["openvino+absent"]["install"].startswith("pip install openvino-genai")
    assert status["llama.cpp"] == "failed: RuntimeError: true: printed no results; is it llama-bench?"
    assert status["other"].startswith("failed: ArtifactError")
    assert not any({*one} - {"status", "install"} for name, one in against.items() if name != "ours")
    assert result["against_ratios"] == {} and list(result["against_raw"]) == ["ours"]


def test_a_hang_ends_after_the_time_that_is_given(export: Path, interpreters: Interpreters) -> None:
    """So soon that ours is stopped too: no ratios."""
    python = interpreters.write(onnxruntime_genai="import time; time.sleep(600)")
    result = measure(export, [Runtime("genai", python, export)], timeout_s=0.1)
    assert [*result["against"]] == ["ours", "genai"] and result["against_ratios"] == {}
    for one in result["against"].values():
        assert "no result within 0.1 s" in one["status"] and "timeout=SECONDS" in one["status"]


def test_real_runtimes_read_the_export(export: Path) -> None:
    for module in ("onnxruntime_genai", "optimum.onnxruntime"):
        pytest.importorskip(module)
    against = measure(export, [Runtime(name, sys.executable, export) for name in ("genai", "optimum")])["against"]
    for name in ("genai", "optimum"):
        assert against[name]["status"] == "measured", against[name]
        assert against[name]["version"] and against[name]["generated_tokens_per_s"]["32"] > 0
    assert verify_directory(export)[1] == []


def test_our_kernels_are_measured_in_turns_with_portable_ones(export: Path) -> None:
    # This export calls none, so asking for native ones fails: what was asked for has reached the runtime.
    native = Runtime("ours+native", sys.executable, export, {"kernels": "native"})
    result = measure(export, [portable_too(export), native])
    status = {name: one["status"] for name, one in result["against"].items()}
    assert (status["ours"], status["ours+portable"]) == ("measured", "measured")
    assert "calls none" in status["ours+native"]
    assert {ratio["peer"] for ratio in result["against_ratios"].values()} == {"ours+portable"}


def turn(rate: float, first: float, peak: float) -> dict[str, Any]:
    return {"generated_tokens_per_s": {"32": rate}, "ttft_ms": {"32": first}, "peak_rss_bytes": peak}


def test_ratios_are_to_the_best_runtime_round_by_round() -> None:
    raw = {
        "ours": [turn(200, 8, 100), turn(240, 8, 100), turn(220, 8, 100)],
        "one": [turn(100, 4, 300), turn(120, 4, 300), turn(100, 4, 300)],
        "two": [turn(50, 2, 200), turn(60, 16, 200), turn(50, 16, 200)],
    }
    ratios = best_ratios(raw, ["one", "two"])
    rate = ratios["generated_tokens_per_s.32"]
    assert (rate["peer"], rate["ratio"]) == ("one", 2.0) and rate["low"] < 2.0 < rate["high"]
    assert (rate["ours"], rate["best"], rate["better"]) == (220, 100, "higher")
    assert (ratios["ttft_ms.32"]["peer"], ratios["ttft_ms.32"]["ratio"]) == ("one", 2.0)
    assert (ratios["peak_rss_bytes"]["peer"], ratios["peak_rss_bytes"]["better"]) == ("two", "lower")
    assert best_ratios({name: rounds[:1] for name, rounds in raw.items()}, ["one"])["ttft_ms.32"]["low"] is None
    assert best_ratios({"ours": raw["ours"]}, []) == {}
    assert best_ratios(raw | {"three": [turn(400, 1, 1)] * 3}, ["one", "two"]) == ratios


def test_flags_are_checked_before_anything_is_measured(export: Path) -> None:
    found = parse_runtimes([f"genai,python={sys.executable}", f"llama.cpp={export}"], export)
    assert [(one.name, one.directory) for one in found] == [("genai", export), ("llama.cpp", export)]
    with pytest.raises(UsageError, match=r"genai is named twice.* genai\+LABEL"):
        parse_runtimes([f"genai,python={sys.executable}", "genai"], export)
    assert parse_runtimes(None, export) == []
    for wrong in (
        "vllm",
        "other",
        "llama.cpp",
        f"genai={os.sep}not{os.sep}there",
        "genai,python=/no/such/python",
        f"llama.cpp={export},bench=/no/such/program",
        "genai,x=1",
        f"llama.cpp={export},fa=1",
        "openvino,a",
        "openvino,=1",
    ):
        with pytest.raises(UsageError, match="--against"):
            parse_runtimes([wrong], export)
    assert set(INSTALL) | {"ours"} == set(RUNTIMES)
    assert (turn_depths(145), turn_depths(2048)) == ([32], [32, 512])
    with pytest.raises(UsageError, match="context of 145 tokens, not 144"):
        turn_depths(144)
