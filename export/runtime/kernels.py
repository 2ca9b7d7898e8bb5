"""Which kernels run a graph: this program's own, where its library is built, or ONNX Runtime's, which run everywhere.

A graph that calls kernels is run by either, see `export.graph.calls`. Reads the graph's metadata before the session
is made, since the library must be registered first.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from export.kernels.library import VERSION, library_of, variant_of
from export.metadata import KERNELS_KEY
from export.paths import find_files
from export.runtime.providers import CPU, Provider
from sportsllm.errors import ArtifactError, ResourceError, UsageError

CHOICES = ("auto", "native", "portable")
SLOW_VARIANT = "plain"  # C++ without a processor's own instructions: ONNX Runtime's operators are faster
# An entry of ModelProto.metadata_props: tag and size, the key as field 1, and the tag and size of the value, field 2
# (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
_ENTRY = re.compile(rb"\x72[\x00-\x7f]\x0a%c%s\x12([\x00-\x7f])" % (len(KERNELS_KEY), KERNELS_KEY.encode()), re.DOTALL)


@dataclass(frozen=True)
class Kernels:
    """What runs a graph.

    Attributes:
        name: `native` or `portable`.
        library: to be registered; None for `portable`.
        reason: why, for people.
    """

    name: str
    library: Path | None
    reason: str

    def __str__(self) -> str:
        return f"kernels: {self.name} ({self.reason})"


def portable(reason: str = "as asked for") -> Kernels:
    """ONNX Runtime's own operators."""
    return Kernels("portable", None, reason)


def choose_kernels(graph: Path, wanted: str = "auto", provider: Provider = CPU) -> Kernels:
    """What runs a graph.

    Args:
        graph: an ONNX file.
        wanted: one of `CHOICES`; `auto` takes `native` where the processor is one that they are written for.
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
    if version is not None and not provider.is_cpu:
        return portable("this program's own run on the CPU provider alone")
    if version is None:
        if wanted == "native":
            raise UsageError(f"--kernels native: {graph} calls none; export INT4 or INT8 blocks without --inline")
        return portable("the graph calls none")
    library, problem = library_of(version), problem_of(version)
    if library is None or problem:
        if wanted == "native":
            raise ResourceError(f"--kernels native: {graph}: {problem}")
        return portable(problem)
    if wanted == "auto" and variant_of(library) == SLOW_VARIANT:
        return portable("the others would run as plain C++ here, which is slower")
    return Kernels("native", library, f"version {version}")


def kernels_of_directory(directory: Path, wanted: str = "auto", provider: Provider = CPU) -> Kernels:
    """What runs an export; see `choose_kernels`."""
    return choose_kernels(find_files(directory).graph, wanted, provider)


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
    """The version of the kernels that a graph calls; None where it calls none, or is no graph.

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
