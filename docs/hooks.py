"""What the site makes at build time: commands, device targets, tables of results, and code of the packages.

A line `<!-- NAME ARGUMENTS -->` of a page is replaced by what the function NAME below returns.
"""

import ast
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
from plots import bars, read_rows  # noqa: E402


def on_page_markdown(markdown: str, **_: object) -> str:
    def replace(match: re.Match[str]) -> str:
        return MAKERS[match[1]](*shlex.split(match[2]))

    return re.sub(rf"^<!-- ({'|'.join(MAKERS)}) ?(.*) -->$", replace, markdown, flags=re.MULTILINE)


def grid(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *(map(str, row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def commands() -> str:
    """Every command with its arguments and options, from the typer application."""
    import typer

    from sportsllm.cli import build_app
    from sportsllm.commands import COMMANDS

    app, parts = typer.main.get_command(build_app()), []
    for name in COMMANDS:
        command = app
        for word in name.split():
            command = command.commands[word]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        usage = " ".join(each.metavar if each.required else f"[{each.metavar}]" for each in arguments)
        summary = " ".join((command.help or "").partition("Raises:")[0].split())
        parts.append(f"## {name}\n\n```\nsportsllm-compress {name} [OPTIONS] {usage}\n```\n\n{summary}\n")
        rows = [_option(each) for each in command.params if each.opts != ["--help"]]
        parts.append(grid(["option", "meaning", "default"], rows) + "\n")
    return "\n".join(parts)


def _option(option: object) -> list[str]:
    names = option.opts + option.secondary_opts if option.param_type_name == "option" else [option.metavar]
    value = f" {option.metavar}" if option.param_type_name == "option" and option.metavar else ""
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    none = shown is None or isinstance(shown, bool) or callable(shown)
    default = "required" if option.required else "" if none else str(shown)
    return [", ".join(f"`{name}{value}`" for name in names), option.help or "", default.replace("<", "&lt;")]


def targets() -> str:
    """The shipped targets: a table of their limits, then each with the source of its figures."""
    from benchmarks.devices.load import list_devices, load_device

    devices = [load_device(name) for name in list_devices()]
    rows = [[f"[`{d.name}`](#{d.name})", *(f"{getattr(d.limits, name):,g}" for name in LIMITS)] for d in devices]
    parts = [grid(["target", *LIMITS.values()], rows)]
    for device in devices:
        parts += [f"## {device.name}", f"{device.title}. {device.description}", f"Limits: {device.limits.reason}"]
        figures = [
            [name.replace("_", " "), _value(figure), figure.kind, f"{figure.source} ({figure.date})"]
            for name, figure in device.hardware or ()
            if figure is not None
        ]
        parts += [grid(["figure", "value", "kind", "source"], figures)] if figures else []
    return "\n\n".join(parts)


def _value(figure: object) -> str:
    return f"{figure.value:,g} {figure.unit}" if hasattr(figure, "unit") else figure.value


LIMITS = {
    "file_mb": "file, MB",
    "peak_memory_mb": "memory, MB",
    "ttft_ms": "first token of 512, ms",
    "tpot_p50_ms": "token at 512, median, ms",
    "tpot_p95_ms": "95th percentile, ms",
    "quality_loss_percent": "quality loss, %",
}


def families() -> str:
    """Every family, what it has beyond LLaMA's parts, and which verbs or forms it has not."""
    from compress.pruning.shapes import Shape
    from export.gguf.write import architecture_of
    from export.graph.decoder import CACHE_KINDS, computes_in_half
    from sportsllm.formats.huggingface import FAMILIES, config_from_hf

    rows = []
    for name in FAMILIES:
        own = next((fields for start, fields in OWN_SIZES.items() if name.startswith(start)), {})
        config = config_from_hf(SIZES | own | {"model_type": name})
        full = Shape.of(config)
        cuts = {
            "hidden size": replace(full, hidden=32),
            "FFN": replace(full, intermediate=48),
            "heads": replace(full, heads=2, kv_heads=max(1, full.kv_heads // 2)),
            "key/value heads by merging": replace(full, kv_heads=1),
            "layers": replace(full, layers=2),
            "head size": replace(full, head_dim=full.head_dim // 2),
        }
        latent = config.attention_kind == "latent"
        refused = [what for what, shape in cuts.items() if full != shape and not _works(shape.applied_to, config)]
        forms = [
            *(["`--dtype fp16`"] if not computes_in_half(config) else []),
            *(["`--format web`"] if latent else []),
            *(["`--kv-cache int8`"] if config.attention_kind not in CACHE_KINDS["int8"] else []),
            *(["`--format gguf`"] if not _works(architecture_of, config) else []),
        ]
        cells = [", ".join(each) or "" for each in (refused, forms)]
        rows.append([f"`{name}`", FAMILY_PARTS[name], *cells])
    return grid(["`model_type`", "beyond LLaMA's parts", "`prune` cannot cut", "`export` has no"], rows)


def _works(function: Callable[[object], object], config: object) -> bool:
    from sportsllm.errors import UsageError

    try:
        function(config)
    except UsageError:
        return False
    return True


SIZES = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
OWN_SIZES = {
    "deepseek": {
        "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    },
    "gemma": {"query_pre_attn_scalar": 16},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt2": {"num_key_value_heads": 4},
    "granite": {"embedding_multiplier": 12.0},
    "opt": {"num_key_value_heads": 4},
    "qwen3_moe": {"norm_topk_prob": True},
}  # fmt: skip
FAMILY_PARTS = {
    "llama": "",
    "qwen2": "biases of q, k, v",
    "qwen3": "a norm of each query and key head",
    "qwen3_moe": "Qwen3's, with experts in all layers or in all but the first",
    "mistral": "sliding attention: a token sees the last `sliding_window`",
    "smollm3": "layers without rotation",
    "olmo2": "norms of all query heads and of all key heads; norms behind sublayers instead of before",
    "stablelm": "LayerNorm, rotation of the first channels of each head; parallel sublayers are read only",
    "gpt_neox": "GPT-2's with rotation of the first channels of each head, parallel sublayers, an exact GELU",
    "granite": "scales of embedding, scores, sublayers and logits; the last two are multiplied into the weights",
    "gemma3_text": "GeGLU, norms before and after each sublayer, scaled embedding, sliding and full layers with a "
    "rotary base each, q/k norms, a score scale of its own",
    "gemma2": "Gemma 3's without q/k norms, with one rotary base; bounded scores and logits",
    "gpt2": "LayerNorm, learned positions, GELU without gate, biases everywhere",
    "opt": "GPT-2's, with ReLU",
    "mixtral": "experts instead of one feed-forward",
    "deepseek_v2": "latent attention; experts in all layers, in all but the first, or in none",
    "deepseek_v3": "DeepSeek-V2's, with a sigmoid router",
    "phi3": "LLaMA's or Mistral's parts, fused; read only, written as those",
}


def table(path: str, *columns: str) -> str:
    """Columns of a file in benchmarks/results, `name=Heading`; `name==value` keeps only the rows with that value."""
    rows = read_rows(path, dict(column.split("==", 1) for column in columns if "==" in column))
    shown = [column.partition("=")[::2] for column in columns if "==" not in column]
    cells = ([re.sub(r"^\d{5,}$", lambda n: f"{int(n[0]):,}", row[name] or "-") for name, _ in shown] for row in rows)
    return grid((title or name for name, title in shown), cells)


def source(path: str, name: str) -> str:
    """A function, class or method (`Class.method`) with the path and line it has today."""
    text = (ROOT / path).read_text(encoding="utf-8")
    nodes = [ast.parse(text)]
    for part in name.split("."):
        nodes = [child for node in nodes for child in node.body if getattr(child, "name", None) == part]
    (node,) = nodes
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    code = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return f'```python title="{path}, line {first}" linenums="{first}"\n{textwrap.dedent(code)}\n```'


def drawing(path: str) -> str:
    """An SVG file inside the page, so that it has the page's colours."""
    lines = (ROOT / "docs" / path).read_text(encoding="utf-8").splitlines()
    return f"<div>{' '.join(map(str.strip, lines))}</div>"


MAKERS = {
    "bars": bars,
    "commands": commands,
    "drawing": drawing,
    "families": families,
    "source": source,
    "table": table,
    "targets": targets,
}
