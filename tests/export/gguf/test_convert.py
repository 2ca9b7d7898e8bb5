"""llama.cpp's converter with our tokenizers: a made-up one that asks for the pre-tokenizer as the real one does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from export.gguf import convert as llama_cpp
from sportsllm.inference.decoder import open_decoder
from sportsllm.text.tokenizer import load_tokenizer, train_tokenizer
from tests.support.models import TINY_VOCAB

PLAIN = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
SCRIPT = Path(llama_cpp.__file__)
# Both layouts there have been: all in one file, or classes in a package beside it.
ONE_FILE = """
import json, sys
class Model:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
def main():
    answer = Model().get_vocab_base_pre(None)
    json.dump([answer, *sys.argv[1:]], open(sys.argv[-1], "w"))
if __name__ == "__main__":
    main()
"""


@pytest.fixture(params=["one file", "package"])
def converter(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    path = folder / "convert_hf_to_gguf.py"
    if request.param == "one file":
        path.write_text(ONE_FILE, encoding="utf-8")
        return path
    (folder / "conversion").mkdir()
    (folder / "conversion" / "__init__.py").touch()
    (folder / "conversion" / "base.py").write_text(ONE_FILE.partition("def main")[0], encoding="utf-8")
    whole = "from conversion.base import Model\n" + ONE_FILE.replace(
        ONE_FILE.partition("def main")[0], "import json, sys\n"
    )
    path.write_text(whole, encoding="utf-8")
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """As a user does, without this project on the path."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=clean, check=False)


def test_our_tokenizer_is_told_to_be_gpt2s(converter: Path, checkpoint: Path, tmp_path: Path) -> None:
    ran = run(converter, checkpoint, "--outfile", tmp_path / "out.json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "out.json").read_text()) == [
        "gpt-2", str(checkpoint), "--outfile", str(tmp_path / "out.json")
    ]  # fmt: skip


def test_a_tokenizer_of_single_digits_is_told_to_be_smollms(
    converter: Path, checkpoint: Path, texts: list[str], tmp_path: Path
) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "other")
    train_tokenizer(texts, TINY_VOCAB, other, "single")
    ran = run(converter, other, "--outfile", tmp_path / "out.json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "out.json").read_text())[0] == "smollm"


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": False}, PLAIN],
            }
        },
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [PLAIN]}},
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": None},
        {"model": {"type": "Unigram"}},
    ],
)
def test_another_tokenizer_is_left_to_the_converter(
    change: dict[str, object], converter: Path, checkpoint: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "other")
    path = other / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    ran = run(converter, other, "--outfile", tmp_path / "out.json")
    assert ran.returncode != 0 and "not recognized" in ran.stderr and "does not use GPT-2's" in ran.stderr


def test_what_is_not_there_is_said(converter: Path, checkpoint: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((), "usage"),
        ((tmp_path / "none.py", checkpoint), "give a converter"),
        ((converter, tmp_path), "a checkpoint's config"),
    ):
        ran = run(*arguments)
        assert ran.returncode == 2 and message in ran.stderr
    silent = converter.parent / "other.py"
    silent.write_text("def main(): pass\n", encoding="utf-8")
    ran = run(silent, checkpoint)
    assert ran.returncode == 2 and "another release" in ran.stderr


GENERATE = """
import json, sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=64, verbose=False)
found = []
for text in json.loads(sys.argv[2]):
    ids, new = model.tokenize(text.encode(), add_bos=True, special=False), []
    model.reset()
    for token in model.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0):
        new.append(token)
        if len(new) == 12:
            break
    found.append([ids, new])
print(json.dumps(found))
"""


@pytest.mark.skipif(
    "LLAMA_CPP_CONVERTER" not in os.environ, reason="LLAMA_CPP_CONVERTER names no convert_hf_to_gguf.py"
)
def test_llama_cpp_reads_the_same_ids_and_chooses_the_same_tokens(checkpoint: Path, tmp_path: Path) -> None:
    """With LLAMA_CPP_PYTHON, an interpreter with llama-cpp-python and what the converter needs."""
    python, gguf = os.environ["LLAMA_CPP_PYTHON"], tmp_path / "model.gguf"
    texts = ["The home side won 3-1.", " two  spaces,\na\ttab and “quotes”", "Zoë ran 57½ metres! ⚽"]
    convert = [python, str(SCRIPT), os.environ["LLAMA_CPP_CONVERTER"], str(checkpoint), "--outfile", str(gguf)]
    subprocess.run([*convert, "--outtype", "f32"], check=True)
    ran = subprocess.run([python, "-c", GENERATE, str(gguf), json.dumps(texts)], check=True, capture_output=True)
    decoder, tokenizer = open_decoder(checkpoint, 1), load_tokenizer(checkpoint)
    for text, (ids, chosen) in zip(texts, json.loads(ran.stdout), strict=True):
        assert ids == [tokenizer.begin_id, *tokenizer.encode(text)]
        token = int(np.argmax(decoder.prefill([ids])[0]))
        for expected in chosen:
            assert token == expected
            token = int(np.argmax(decoder.step([token])[0]))
