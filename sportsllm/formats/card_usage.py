"""How to load a model, for each runtime that this program's tests open such a directory with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sportsllm.formats.huggingface.config import OWN_MODEL_TYPE
from sportsllm.formats.json_files import read_json
from sportsllm.models.config import ModelConfig

LIBRARY = {"*.gguf": "gguf", "*.onnx": "onnx", "onnx/*.onnx": "transformers.js", "*.safetensors": "transformers"}
"""The hub's name of the library that loads a directory, by the first kind of file that is in it."""
OURS = "sportsllm-compress"
_PROMPT = "Full-time"


@dataclass(frozen=True)
class Loadable:
    """A directory with a model: its name, config, config.json, and its manifest's settings and results."""

    directory: Path
    name: str
    config: ModelConfig
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    results: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The pattern of `LIBRARY` that the directory's files match."""
        return next(kind for kind in LIBRARY if any(self.directory.glob(kind)))

    @property
    def packed(self) -> bool:
        """Whether a checkpoint's matrices are packed, which this program alone reads."""
        return self.kind == "*.safetensors" and "quantization_config" in self.data

    @property
    def library(self) -> str:
        """The value of `library_name`."""
        own = self.kind == "*.safetensors" and (self.packed or self.data.get("model_type") == OWN_MODEL_TYPE)
        return OURS if own else LIBRARY[self.kind]

    @property
    def bits(self) -> int | None:
        """Bits of the packed matrices in a layer; None where they are dense or of several sizes."""
        bits = self.data.get("quantization_config", {}).get("bits")
        return bits if isinstance(bits, int) else None

    @property
    def form(self) -> str:
        """How it is stored, in a sentence."""
        names = {"*.gguf": "A GGUF file", "*.onnx": "An ONNX graph with key/value cache"}
        names |= {"onnx/*.onnx": "ONNX graphs for the browser", "*.safetensors": "A checkpoint (safetensors)"}
        stored = f"INT{self.bits}" if self.bits else self.results.get("precision") or self.settings.get("dtype")
        return f"{names[self.kind]}{f', {stored}' if stored else ''}."

    @property
    def tags(self) -> list[str]:
        """Model family, file format and bits."""
        formats = {"*.gguf": "gguf", "*.safetensors": "safetensors"}
        tags = [str(self.data.get("model_type", "llama")), formats.get(self.kind, "onnx")]
        return [*tags, *([f"{self.bits}-bit"] if self.bits else []), *(["conversational"] if self.chats else [])]

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        path = self.directory / "tokenizer_config.json"
        settings = read_json(path) if path.is_file() else {}
        return (self.directory / "chat_template.jinja").is_file() or bool(settings.get("chat_template"))


def usage(model: Loadable) -> Iterator[str]:
    """A heading and the lines to type for each runtime; DIR stands for the directory."""
    if model.kind == "*.gguf":
        yield from _gguf(model)
        return
    if model.library == "transformers":
        yield from _code("transformers", "python", _TRANSFORMERS)
    if model.kind == "onnx/*.onnx":
        yield from _code("transformers.js", "js", _BROWSER)
    if model.kind == "*.onnx":
        yield from _onnx(model)
    yield from _code(OURS, "sh", f'{OURS} generate DIR --prompt "{_PROMPT}"')


def _code(title: str, language: str, text: str) -> tuple[str, str]:
    return f"With {title}:", f"```{language}\n{text.strip()}\n```"


def _gguf(model: Loadable) -> Iterator[str]:
    file = next(model.directory.glob("*.gguf")).name
    yield from _code("llama.cpp", "sh", f'llama-cli -m DIR/{file} -p "{_PROMPT}" -n 100')
    if (model.directory / "Modelfile").is_file():
        name = model.name.lower()
        yield from _code("Ollama", "sh", f"cd DIR && ollama create {name} -f Modelfile && ollama run {name}")
    yield from _code(f"{OURS}, as a checkpoint", "sh", f"{OURS} import DIR/{file} --out checkpoint")


def _onnx(model: Loadable) -> Iterator[str]:
    config = model.config
    # optimum takes the width over the heads for a head's size in Llama models, and cannot pass an INT8 cache.
    plain_heads = config.head_dim * config.num_attention_heads == config.hidden_size
    if model.settings.get("kv_cache", "fp32") == "fp32" and plain_heads and model.data.get("model_type") == "llama":
        yield from _code("optimum (`optimum-onnx`)", "python", _OPTIMUM)
    if (model.directory / "genai_config.json").is_file():
        yield from _code("onnxruntime-genai", "python", _genai(config.bos_token_id))


_TRANSFORMERS = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = AutoModelForCausalLM.from_pretrained("DIR")
inputs = tokenizer("{_PROMPT}", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0], skip_special_tokens=True))
"""
_OPTIMUM = _TRANSFORMERS.replace("AutoModelForCausalLM, AutoTokenizer", "AutoTokenizer").replace(
    "AutoModelForCausalLM", "ORTModelForCausalLM"
)
_OPTIMUM = f"\nfrom optimum.onnxruntime import ORTModelForCausalLM{_OPTIMUM}"


def _genai(begin: int | None) -> str:
    """The lines for onnxruntime-genai, which leaves out the begin token of byte-level BPE."""
    told = "tokens" if begin is None else f"tokens if tokens[0] == {begin} else [{begin}, *tokens]"
    return _GENAI.replace("TOKENS", told)


_GENAI = f"""
import onnxruntime_genai as genai

model = genai.Model("DIR")
tokenizer = genai.Tokenizer(model)
parameters = genai.GeneratorParams(model)
parameters.set_search_options(max_length=200)
generator = genai.Generator(model, parameters)
tokens = tokenizer.encode("{_PROMPT}").tolist()
generator.append_tokens(TOKENS)
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))
"""
_BROWSER = f"""
import {{ env, pipeline }} from '@huggingface/transformers';
env.allowLocalModels = true;        // the folder above DIR is env.localModelPath
const generate = await pipeline('text-generation', 'DIR', {{ device: 'wasm' }});
const [answer] = await generate('{_PROMPT}', {{ max_new_tokens: 100 }});
"""
