"""Paths of an export's graphs and their data, plain or as transformers.js expects them in a browser."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sportsllm.errors import ArtifactError
from sportsllm.inference.decoder import web_graphs

GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"

# By precision: transformers.js's name of it, and its suffix of the file name. Source: DEFAULT_DTYPE_SUFFIX_MAPPING in
# src/utils/dtypes.js of @huggingface/transformers 4.3.1.
WEB_NAMES = {
    "fp32": ("fp32", ""),
    "fp16": ("fp16", "_fp16"),
    "int8": ("q8", "_quantized"),
    "int4": ("q4", "_q4"),
    "int4 fp16": ("q4f16", "_q4f16"),  # 4-bit matrices, computed in float16
}


@dataclass(frozen=True)
class GraphFiles:
    """A graph and the data file that it names."""

    graph: Path
    data: Path


def plain_files(directory: Path) -> GraphFiles:
    """Paths that `export` writes."""
    return GraphFiles(directory / GRAPH_FILE, directory / DATA_FILE)


def web_precision(precision: str, in_half: bool) -> str:
    """The key of `WEB_NAMES` for a graph's matrices, and whether it computes in float16."""
    return f"{precision} fp16" if in_half and precision != "fp16" else precision


def web_files(directory: Path, precision: str) -> GraphFiles:
    """Paths that `export --web` writes."""
    graph = directory / "onnx" / f"model{WEB_NAMES[precision][1]}.onnx"
    return GraphFiles(graph, graph.with_name(f"{graph.name}_data"))


def find_files(directory: Path) -> GraphFiles:
    """The paths of the graph in a directory, or of `plain_files` where it has none.

    Raises:
        ArtifactError: there are graphs of several precisions.
    """
    plain, graphs = plain_files(directory), web_graphs(directory)
    if plain.graph.exists() or not graphs:
        return plain
    if len(graphs) > 1:
        names = ", ".join(graph.name for graph in graphs)
        raise ArtifactError(f"{directory}: holds several graphs ({names}); give a directory with one of them")
    return GraphFiles(graphs[0], graphs[0].with_name(f"{graphs[0].name}_data"))
