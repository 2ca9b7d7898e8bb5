"""A second kind of feed-forward is exported by one builder and one line in the table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import sportsllm
from export.graph.decoder import BUILDERS, check_kinds
from export.graph.layer import SublayerBuilder
from export.layout import GRAPH_FILE
from sportsllm.errors import UsageError
from sportsllm.models.kinds import ATTENTION
from sportsllm.models.sublayer import HIDDEN
from tests.support import gelu_kind
from tests.support.export_models import TINY, Exports, save, tiny_model


class Gelu(SublayerBuilder):
    """gelu(up(x)) in a standard operator."""

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        (up,) = self.products(layer, HIDDEN, x_BTD)
        return self.graph.node(f"{self.name(layer)}/gelu", "Gelu", up), ()


@pytest.fixture
def built(gelu: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind's name, with its builder."""
    monkeypatch.setitem(BUILDERS, gelu, Gelu)
    return gelu


@pytest.mark.parametrize(
    "settings", [{}, {"half": True}, {"bits": 4, "int8_cache": True}, {"bits": 4, "operators": "standard"}], ids=str
)
def test_the_gate_finds_what_pytorch_computes(settings: dict[str, Any], built: str, exports: Exports) -> None:
    export = exports(mlp_kind=built, **settings)
    assert export.report.failures() == []
    if settings.get("operators"):
        onnx.checker.check_model(str(export.directory / GRAPH_FILE), full_check=True)
        nodes = onnx.load(str(export.directory / GRAPH_FILE), load_external_data=False).graph.node
        assert {node.domain for node in nodes} == {""} and "Gelu" in {node.op_type for node in nodes}


def test_a_kind_without_a_builder_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gelu_kind.registered() as name:
        save(tmp_path / "checkpoint", tiny_model(mlp_kind=name))
        with pytest.raises(
            UsageError, match=r"'erf_gelu' has no ONNX graph; these do: grouped_query, latent, lstm, swiglu"
        ) as caught:
            sportsllm.export(tmp_path / "checkpoint", out=tmp_path / "out", threads=1)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    monkeypatch.setitem(ATTENTION, "other", ATTENTION["grouped_query"])
    monkeypatch.setitem(BUILDERS, "other", BUILDERS["grouped_query"])
    check_kinds(TINY.with_changes(attention_kind="other"))
    for cache in ("fp16", "int8"):
        with pytest.raises(UsageError, match=f"--kv-cache {cache}: attention of kind 'other'"):
            check_kinds(TINY.with_changes(attention_kind="other"), cache)
