"""An export on one of ONNX Runtime's execution providers beside the same files on the CPU provider. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from export.parity.comparison import Limits, Pass
from export.parity.limits import DEPLOYED
from export.parity.readings import make_sequences, run_pass
from export.runtime.decoder import OnnxDecoder
from export.runtime.providers import Placement, find_provider
from sportsllm.formats.json_files import read_json
from sportsllm.text.tokenizer import load_tokenizer

PARITY_FILE = "parity.json"


def check_provider(directory: Path, provider: str, threads: int | None = None) -> tuple[Placement | None, Pass]:
    """Read the gate's sequences on a provider and on the CPU's, and compare the logits.

    Args:
        directory: an export.
        provider: see `export.runtime.providers.find_provider`.
        threads: CPU threads of both; all cores where not given.

    Returns:
        Where the nodes run, None on the CPU provider; and the comparison, within the limits of the export's own gate.

    Raises:
        ArtifactError: the export is damaged.
        UsageError, ResourceError: the provider is not there, or cannot run the graph.
    """
    decoder = OnnxDecoder(directory, threads, kernels="portable", provider=find_provider(provider))
    reference = OnnxDecoder(directory, threads, kernels="portable")
    tokenizer = load_tokenizer(directory, decoder.config) if (directory / "tokenizer.json").exists() else None
    sequences = make_sequences(decoder.config, tokenizer)
    expected = [reference.logits(row) for row in sequences]
    return decoder.placement, run_pass(f"provider {provider}", decoder, sequences, expected, _limits(directory))


def _limits(directory: Path) -> Limits:
    """Those of the deployed pass, which bound what fewer bits of activations cost; float32's where there is none."""
    passes = read_json(directory / PARITY_FILE)["passes"] if (directory / PARITY_FILE).exists() else []
    deployed = [item["limits"] for item in passes if item["name"] == "deployed"]
    if deployed:
        return Limits(**deployed[0])
    return DEPLOYED["fp16" if passes else "int4"]
