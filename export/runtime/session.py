"""Opens an export's graph in ONNX Runtime after checking its files, with this program's kernels if the graph calls
them and their library is built. Needs neither torch nor onnx.

A graph that calls kernels is run by them or by ONNX Runtime's operators, which run everywhere, see
`export.graph.calls`. Its metadata is read before the session is made, since the library must be registered first.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from export import layout
from export.kernels.library import VERSION, library_of, variant_of
from export.layout import KERNELS_KEY, GraphFiles, find_files
from export.runtime.providers import CPU, Provider, create_session
from sportsllm.errors import ArtifactError, ResourceError, UsageError
from sportsllm.files import read_json
from sportsllm.formats.manifest import MANIFEST
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import block_state, cached_shape
from sportsllm.process_memory import cpu_limit

CHOICES = ("auto", "native", "portable")
SLOW_VARIANT = "plain"  # C++ without a processor's own instructions: ONNX Runtime's operators are faster
# An entry of ModelProto.metadata_props: tag and size, the key as field 1, and the tag and size of the value, field 2
# (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
_ENTRY = re.compile(rb"\x72[\x00-\x7f]\x0a%c%s\x12([\x00-\x7f])" % (len(KERNELS_KEY), KERNELS_KEY.encode()), re.DOTALL)

# A node's operator, field 4 of NodeProto, and the name of an output.
_CALL = re.compile(
    rb"\x22[\x0b-\x20]((?:Decoder|General)(?:Layer|Attention|FeedForward|Head)|LatentTokens|SelectedAttention)"
)
_LAYER = re.compile(rb"%s(\d{1,4})\." % re.escape(layout.PRESENT).encode())


@dataclass(frozen=True)
class Kernels:
    """What runs a graph.

    Attributes:
        name: `native` or `portable`.
        library: to be registered; None for `portable`.
        reason: why, for people.
        whole: it runs all layers, each in one call, and the head.
    """

    name: str
    library: Path | None
    reason: str
    whole: bool = False

    def __str__(self) -> str:
        return f"kernels: {self.name} ({self.reason})"


def portable(reason: str = "as asked for") -> Kernels:
    """ONNX Runtime's own operators."""
    return Kernels("portable", None, reason)


def choose_kernels(graph: Path, wanted: str = "auto", provider: Provider = CPU) -> Kernels:
    """What runs a graph.

    Args:
        graph: an ONNX file.
        wanted: one of `CHOICES`; `auto` takes `native` if the processor is one that they are written for.
        provider: what ONNX Runtime runs it on; this program's kernels are for the CPU provider.

    Raises:
        UsageError: an unknown choice, `native` for a graph that calls no kernels, or beside another provider.
        ResourceError: `native`, and the library is missing, of another version than the graph's, or cannot be loaded.
    """
    if wanted not in CHOICES:
        raise UsageError(f"--kernels {wanted!r}: choose {', '.join(CHOICES[:-1])} or {CHOICES[-1]}")
    if wanted == "portable":
        return portable()
    if not provider.is_cpu and wanted == "native":
        raise UsageError(f"--kernels native: they run on the CPU provider, not on {provider.name}; leave one flag out")
    version = called_version(graph)
    if version is None:
        if wanted == "native":
            raise UsageError(f"--kernels native: {graph} calls none; export INT4 or INT8 blocks without --set inline")
        return portable("the graph calls none")
    if not provider.is_cpu:
        return portable("this program's own run on the CPU provider alone")
    library, problem = library_of(version), problem_of(version)
    if library is None or problem:
        if wanted == "native":
            raise ResourceError(f"--kernels native: {graph}: {problem}")
        return portable(problem)
    if wanted == "auto" and variant_of(library) == SLOW_VARIANT:
        return portable("the others would run as plain C++ here, which is slower")
    parts, whole = _called_parts(graph)
    return Kernels("native", library, f"version {version}: {parts}", whole)


def kernels_of_directory(directory: Path, wanted: str = "auto", provider: Provider = CPU) -> Kernels:
    """What runs an export; see `choose_kernels`."""
    return choose_kernels(check_files(directory).graph, wanted, provider)  # what is cut off may be that it calls any


def problem_of(version: str) -> str:
    """Why kernels of a version cannot run here; empty if they can."""
    library = library_of(version)
    if library is None and version != VERSION:
        return f"the graph calls version {version}, this program has version {VERSION}; export it again"
    if library is None:
        return f"the library is not built; run `python -m export.kernels.build` for version {version}"
    try:
        ort.SessionOptions().register_custom_ops_library(str(library))
        variant_of(library)
    except AttributeError:
        return f"{library.name} is of an older program; run `python -m export.kernels.build`"
    except Exception as error:  # the runtime's errors have no common class
        return f"{library.name} cannot be used here: {' '.join(str(error).split())[:200]}"
    return ""


def called_version(graph: Path) -> str | None:
    """The version of the kernels that a graph calls; None if it calls none, or is no graph.

    Looks for the entry of the metadata as protobuf writes it, since onnx is not installed on a device.

    Raises:
        ArtifactError: it is not a number.
    """
    if not graph.is_file() or graph.stat().st_size == 0:
        return None
    with graph.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        entry = _ENTRY.search(data)
        value = entry and data[entry.end() : entry.end() + entry[1][0]]
    if value is None:
        return None
    if not re.fullmatch(rb"\d{1,9}", value):  # it becomes part of a file name
        raise ArtifactError(f"{graph}: names kernels of version {value[:20]!r}; the export is damaged, make it again")
    return value.decode()


def _called_parts(graph: Path) -> tuple[str, bool]:
    """The parts of a graph that the kernels run, in words, and whether those are whole layers, all, and the head."""
    data = graph.read_bytes()
    calls: list[bytes] = _CALL.findall(data)
    attention, feed_forward = (
        sum(call.endswith(kinds) for call in calls)
        for kinds in ((b"Layer", b"Attention", b"Tokens"), (b"Layer", b"FeedForward"))
    )
    layers = 1 + max(map(int, _LAYER.findall(data)), default=0)
    head = any(call.endswith(b"Head") for call in calls)
    whole = head and sum(call.endswith(b"Layer") for call in calls) == layers
    return parts_in_words(layers, attention, feed_forward, head), whole


def parts_in_words(layers: int, attention: int, feed_forward: int, head: bool) -> str:
    """For example `attention of 3 of 12 layers and the head`."""
    parts = {"": attention}
    if attention != feed_forward:
        parts = {"attention of ": attention, "the feed-forward of ": feed_forward}
    called = [
        f"{name}all {count} layers" if count == layers else f"{name}{count} of {layers} layers"
        for name, count in parts.items()
        if count
    ]
    called += ["the head"] if head else []
    return " and ".join(filter(None, [", ".join(called[:-1]), *called[-1:]]))


_LOAD_ERRORS = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


def session_options(threads: int | None, exact: bool = False, library: Path | None = None) -> ort.SessionOptions:
    """How sessions run; `exact` for `export.parity.check.exact_graph`, with products in float32.

    `library` has kernels for the functions that the graph calls, see `choose_kernels`.
    The figures are tokens/s of a 97M INT4 model on 2 threads, ONNX Runtime 1.31.1 (docs/results). The arena stays
    on: without it the peak was 10 to 40 MB higher, since freed pieces went unused.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or cpu_limit() or 0
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised; logged as well, they would come twice
    # Threads wait 1 ms for more work before they sleep. That is longer than any pause within a step, so decoding is
    # nearly as fast as by default, and no core stays busy long after the last step. On 2 AVX2 cores, where waking is
    # slow, 20 us give 141, 1 ms 197, the default 204; beside a busy program 100, 71 and 92, with much noise. Versions
    # that do not know the setting keep their default.
    options.add_session_config_entry("session.intra_op.spin_duration_us", "1000")
    if exact:  # else MatMulNBits, made at load of DequantizeLinear and MatMul, rounds activations
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    if library is not None:
        options.register_custom_ops_library(str(library))
    return options


def open_session(
    directory: Path,
    config: ModelConfig,
    threads: int | None,
    graph: bytes | None = None,
    library: Path | None = None,
    provider: Provider = CPU,
) -> ort.InferenceSession:
    """Load an export's graph after checking its files, and check that it fits the config.

    Args:
        directory, config: the export and its config.json.
        threads: CPU threads; all cores if not given.
        graph: `export.parity.check.exact_graph` to run on the directory's data instead of the file.
        library: see `session_options`.
        provider: what runs the graph.

    Raises:
        ArtifactError: a file is missing, truncated or too long, or the graph is not a decoder.
        ResourceError: there is not enough memory, ONNX Runtime is too old, or the provider cannot run the graph.
    """
    files = check_files(directory)
    path = files.graph
    options = session_options(threads, graph is not None, library)
    if graph is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(files.data.parent))
    try:
        session = create_session(graph or str(path), options, provider)
        facts = session.get_modelmeta().custom_metadata_map
    except _LOAD_ERRORS as error:
        raise_if_out_of_memory(error, directory)
        raise ArtifactError(f"{path}: {_reason(error)}") from None
    except UnicodeDecodeError:
        raise ArtifactError(f"{path}: has names that are not text; the export is damaged, make it again") from None
    _check_version(path, facts.get(layout.RUNTIME_KEY))
    expected = facts.get(layout.DATA_BYTES_KEY)
    if expected is not None:
        if not re.fullmatch(r"\d{1,18}", expected):
            raise ArtifactError(f"{path}: names {expected[:20]!r} bytes of data; the export is damaged, make it again")
        _check_size(files.data, int(expected))
    _check_interface(session, config, path)
    return session


def _check_version(path: Path, oldest: str | None) -> None:
    """Refuse an ONNX Runtime older than a graph asks for: it may compute something else, for example another window."""
    here, wanted = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (ort.__version__, oldest or "0"))
    if here < wanted:
        raise ResourceError(f"{path}: needs onnxruntime {oldest} or later; {ort.__version__} is installed: upgrade it")


def _reason(error: Exception) -> str:
    """One line from ONNX Runtime's error, which names its own source files."""
    text = " ".join(str(error).split())
    newer = re.search(r"Unsupported model IR version: \d+|Opset \d+ is under development", text)
    if newer:
        return f"is newer than ONNX Runtime {ort.__version__} ({newer[0]}); upgrade onnxruntime, or export it again"
    if "External data path" in text:
        return "names data outside its directory, or by a link that leads there; copy the directory with its files"
    return f"ONNX Runtime cannot load it ({text.partition(': FAIL : ')[2][:300] or text[:300]}); export it again"


def raise_if_out_of_memory(error: Exception, directory: Path) -> None:
    """Raise ResourceError if that is what an error of ONNX Runtime means; it has no exception of its own for it."""
    if re.search("bad_alloc|allocate memory|out of memory", str(error)):
        raise ResourceError(
            f"{directory}: not enough memory to run the model; free some, or use a shorter text or a smaller model"
        ) from None


def check_files(directory: Path) -> GraphFiles:
    """The graph and its data, of the sizes in the manifest, if there is one.

    Read by hand: `validate` would load pydantic, whose 16 MB would count in the memory that `bench` reports of a model.

    Raises:
        ArtifactError: the manifest is damaged, or a file is missing, truncated or too long.
    """
    found, path = find_files(directory), directory / MANIFEST
    files = read_json(path).get("files") if path.exists() else {}
    try:
        listed = {name: int(entry["bytes"]) for name, entry in files.items()}  # type: ignore[union-attr]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ArtifactError(f"{path}: its list of files is damaged; make the directory again") from None
    for file in (found.graph, found.data):  # ONNX Runtime loads data that is too short or too long without a word
        _check_size(file, listed.get(file.relative_to(directory).as_posix()))
    return found


def _check_size(path: Path, expected: int | None) -> None:
    if not path.is_file():
        raise ArtifactError(f"{path}: not found; export or copy the directory again")
    if expected is not None and (found := path.stat().st_size) != expected:
        raise ArtifactError(
            f"{path}: {found} bytes instead of {expected}; the export is damaged, copy or make it again"
        )


def _check_interface(session: ort.InferenceSession, config: ModelConfig, path: Path) -> None:
    """Refuse a graph whose inputs and outputs, or their shapes, are not those of config.json's model."""
    wanted: dict[str, list[int | None]] = {layout.INPUT_IDS: [None, None], layout.ATTENTION_MASK: [None, None]}
    for layer in range(config.num_hidden_layers):
        for state in block_state(config):
            shape = [None, *cached_shape(state, None)]
            wanted |= {layout.past_name(layer, state.name): shape, layout.present_name(layer, state.name): shape}
    wanted |= {layout.KEEP_LOGITS: [1], layout.LOGITS: [None, None, config.vocab_size]}
    arguments = (*session.get_inputs(), *session.get_overridable_initializers(), *session.get_outputs())
    found = {a.name: [size if isinstance(size, int) else None for size in a.shape] for a in arguments}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ArtifactError(
                f"{path}: {name!r} has shape {found.get(name)}, config.json asks for "
                f"{wanted.get(name)}; use a directory that this program's export wrote"
            )
