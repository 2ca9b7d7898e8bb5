"""`inspect`: drawings and attention maps."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.inspection.attention import MOST_TOKENS, attention_chart, measure_attention
from sportsllm.errors import UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.inference.inspection import attention_weights
from sportsllm.models.config import FULL, SLIDING, Experts
from sportsllm.models.presets import PRESETS
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.command_line import CommandLine
from tests.support.models import saved, tiny_model

ROOT = Path(__file__).resolve().parents[3]
TEXT = "The home <b>side</b> won 3-1."


@pytest.fixture(scope="module")
def mixture(tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of three experts, the last of which layer 1 never chooses; layers of two types."""
    model = tiny_model(
        mlp_kind="experts",
        experts=Experts(3, 2, choice_bias=True, router="sigmoid"),
        layer_types=(SLIDING, FULL),
        sliding_window=4,
    )
    half: Any = model.model.layers[1].mlp
    with torch.no_grad():
        half.gate.bias.copy_(torch.tensor([0.0, 0.0, -5.0]))
    directory = tmp_path_factory.mktemp("pictures") / "mixture"
    return saved(directory, model, tokenizer_directory)


def figures(page: str) -> dict[str, dict[str, Any]]:
    """The charts of a page by their name."""
    found = re.search(r"const figures = (\[.*\]);\n", page)
    assert found
    return {figure["id"]: figure for figure in json.loads(found[1])}


def test_a_shape_is_drawn_as_a_page(cli: CommandLine, tmp_path: Path) -> None:
    result = cli.result("inspect", "small", "--out", tmp_path / "small.html")
    assert result["out"] == str(tmp_path / "small.html") and result["parameters"] == PRESETS["small"].parameters
    assert [block["layers"] for block in result["blocks"]] == [list(range(12))]
    page = (tmp_path / "small.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and not re.search(r"(?:src|href)=|url\(|@import", page)
    assert cli.result("inspect", "small")["out"] is None


def test_a_device_draws_without_torch_or_templates(tmp_path: Path) -> None:
    code = "import sys\n"
    code += "for name in ('torch', 'onnx', 'safetensors', 'jinja2', 'plotly', 'markupsafe'): sys.modules[name] = None\n"
    code += "from sportsllm.cli import main\n"
    code += f"main(['inspect', 'latent-moe', '--out', {str(tmp_path / 'out.html')!r}])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kv_a_proj_with_mqa" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_maps_hold_the_weights_of_every_head(mixture: Path, cli: CommandLine, tmp_path: Path) -> None:
    out = tmp_path / "maps.html"
    found = cli.result("inspect", mixture, "--text", TEXT, "--out", out)["attention"]
    model = load_checkpoint(mixture)
    tokenizer = load_tokenizer(mixture, model.config)
    ids = [tokenizer.begin_id, *tokenizer.encode(TEXT)]
    assert "".join(found["tokens"]) == f"<|begin|>{TEXT}"
    weights = [one.double().numpy() for one in attention_weights(model, ids) if one is not None]
    assert [layer["window"] for layer in found["layers"]] == [4, None]
    page = out.read_text(encoding="utf-8")
    layout = figures(page)["attention"]["layout"]
    buttons = {one["label"]: one["args"][0]["z"][0] for one in layout["updatemenus"][0]["buttons"]}
    assert len(buttons) == sum(map(len, weights))
    for layer, heads in enumerate(weights):
        for head, one in enumerate(heads):
            said = found["layers"][layer]["heads"][head]
            assert said["first_token"] == pytest.approx(one[:, 0].mean(), abs=1e-6)
            assert said["itself"] == pytest.approx(np.diagonal(one).mean(), abs=1e-6)
            best = int(one.mean(0).argmax())
            top = said["top_tokens"][0]
            assert (top["position"], top["token"]) == (best, found["tokens"][best])
            cells = np.array(buttons[f"layer {layer}, head {head}"], dtype=float)
            assert np.isnan(cells).tolist() == (one == 0).tolist()  # out of the window of four, or later tokens
            np.testing.assert_allclose(np.nan_to_num(cells), one, atol=5.1e-4)  # 3 digits
    assert figures(page)["attention"]["data"][0]["z"] == buttons["layer 0, head 0"]
    assert layout["yaxis"]["ticktext"][0] == "&lt;|begin|&gt;"  # plotly reads tags
    assert "<b>" not in json.dumps(figures(page)["attention"])


class _NoAttention(torch.nn.Module):
    """A layer that attends to nothing."""

    def forward(self, x_BTD: torch.Tensor, *_: Any) -> torch.Tensor:
        return x_BTD


def test_a_layer_without_attention_is_named(checkpoint: Path) -> None:
    model = load_checkpoint(checkpoint)
    block: Any = model.model.layers[1]
    block.self_attn = _NoAttention()
    found, weights = measure_attention(model, checkpoint, TEXT)
    assert [layer["layer"] for layer in found["layers"]] == [0] and weights[1] is None
    figure = attention_chart(found, weights).figure
    assert {one["label"][:7] for one in figure["layout"]["updatemenus"][0]["buttons"]} == {"layer 0"}
    assert found["layers_without_attention"] == [1]


def test_what_cannot_be_shown_is_refused_in_a_line(
    checkpoint: Path, exported: Path, cli: CommandLine, tmp_path: Path
) -> None:
    def refused(code: int, said: str, *arguments: object) -> None:
        cli.refuses(code, said, "inspect", *arguments)

    refused(2, "end it in .html", "small", "--out", tmp_path / "x.svg")
    refused(2, "small is a preset; give a checkpoint", "small", "--text", TEXT)
    refused(2, f"a map shows 1 to {MOST_TOKENS - 1}", checkpoint, "--text", "goal " * 80)
    refused(2, "--text has 0 tokens", checkpoint, "--text", "")
    refused(2, "--text is not valid UTF-8", checkpoint, "--text", "\udcff")
    with pytest.raises(UsageError, match=r"5,120 heads of 64 tokens are too much for a page"):
        attention_chart({"tokens": ["a"] * 64}, [torch.zeros(64, 64, 64)] * 80)
    refused(2, "is an export; give a checkpoint", exported, "--text", TEXT)
    assert not list(tmp_path.glob("x.*"))
    assert cli.result("inspect", exported)["blocks"] == cli.result("inspect", checkpoint)["blocks"]
