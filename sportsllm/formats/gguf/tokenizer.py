"""The tokenizer in a GGUF file as tokenizer.json and tokenizer_config.json.

`gpt2` is byte-level BPE: tokens and merges are in the file, the rule that splits text into words only by name. `llama`
is SentencePiece's BPE with byte fallback: it has no merges, only a score of each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sportsllm.files import write_json
from sportsllm.formats.gguf.config import GGUFFile
from sportsllm.text.tokenizer import to_json
from sportsllm.text.tokenizer_training import LOADED_AS
from sportsllm.text.tokenizer_training import PRE_TOKENIZERS as BY_DIGITS

PREFIX = "tokenizer.ggml."
SPACE = "▁"


def _llama3(digits: str) -> pre_tokenizers.PreTokenizer:
    """The published expression of Llama 3; Qwen 2 has it with another number of `digits` in a token."""
    words = f"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{{L}}\\p{{N}}]?\\p{{L}}+|{digits}"
    other = " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
    split = pre_tokenizers.Split(Regex(f"{words}|{other}"), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": BY_DIGITS["grouped"],
    "smollm": BY_DIGITS["single"],
    "starcoder": BY_DIGITS["single"],
    "refact": BY_DIGITS["single"],
    "llama-bpe": _llama3("\\p{N}{1,3}"),
    "qwen2": _llama3("\\p{N}"),
    "deepseek-r1-qwen": _llama3("\\p{N}"),
}
"""The rules that split a text into words, by the names that llama.cpp gives them."""


def write_tokenizer(file: GGUFFile, directory: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the names of special tokens and the chat template.

    Raises:
        ArtifactError: a kind of tokenizer or a pre-tokenizer that is not known, or lists that disagree.
    """
    kind = file.value(f"{PREFIX}model", str)
    if kind not in ("gpt2", "llama"):
        raise file.error(f"tokenizer {kind!r} is not supported; use gpt2 (byte-level BPE) or llama (SentencePiece BPE)")
    tokens = file.value(f"{PREFIX}tokens", list)
    types = file.value_or(None, f"{PREFIX}token_type", list) or [TokenType.NORMAL] * len(tokens)
    if set(map(type, tokens)) != {str} or len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise file.error(f"{PREFIX}tokens: a token is not a string, is there twice, or has no type; convert it again")
    # A converter fills up rows that no token belongs to.
    vocabulary = {t: i for i, t in enumerate(tokens) if not (types[i] == TokenType.UNUSED and t == f"[PAD{i}]")}
    tokenizer = _byte_level(file, vocabulary) if kind == "gpt2" else _sentencepiece(file, vocabulary, types)
    for special, kinds in ((True, (TokenType.UNKNOWN, TokenType.CONTROL)), (False, (TokenType.USER_DEFINED,))):
        added = [t for t, i in vocabulary.items() if types[i] in kinds]
        tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in added])
    named = _named_tokens(file, tokens)
    adds_begin = file.value_or(kind == "llama" or _name(file) == "llama-bpe", f"{PREFIX}add_bos_token", bool)
    if adds_begin and "bos_token" in named:
        begin = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], pair=[begin, "$A", begin, "$B:1"], special_tokens=[(begin, vocabulary[begin])]
        )
    (directory / "tokenizer.json").write_text(to_json(tokenizer, pretty=True) + "\n", encoding="utf-8")
    template = file.value_or(None, "tokenizer.chat_template", str)
    write_json(
        directory / "tokenizer_config.json", LOADED_AS | named | ({"chat_template": template} if template else {})
    )


def _name(file: GGUFFile) -> str | None:
    return file.value_or(None, f"{PREFIX}pre", str)


def _named_tokens(file: GGUFFile, tokens: Sequence[str]) -> dict[str, str]:
    ids = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    named = {}
    for name, key in ids.items():
        if (number := file.value_or(None, f"{PREFIX}{key}_token_id", int)) is not None:
            if not 0 <= number < len(tokens):
                raise file.error(f"{PREFIX}{key}_token_id is {number}, but there are {len(tokens)} tokens")
            named[name] = tokens[number]
    return named


def _byte_level(file: GGUFFile, vocabulary: Mapping[str, int]) -> Tokenizer:
    name = _name(file)
    if name is None or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise file.error(f"pre-tokenizer {name!r} ({PREFIX}pre) is not known; known are {known}")
    merges = [tuple(str(merge).split(" ")) for merge in file.value(f"{PREFIX}merges", list)]
    wrong = next((m for m in merges if len(m) != 2 or not {*m, "".join(m)} <= vocabulary.keys()), None)
    if wrong is not None:
        raise file.error(f"{PREFIX}merges: {' '.join(wrong)!r} is no merge of two tokens into one; convert again")
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=merges, ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, vocabulary: Mapping[str, int], types: Sequence[int]) -> Tokenizer:
    """BPE whose merges are all pairs of tokens that join to a token, that of the highest score first.

    SentencePiece joins, again and again, the two neighbours whose union has the highest score
    (https://arxiv.org/abs/1808.06226); the order of the merges says the same.
    """
    scores = file.value(f"{PREFIX}scores", list)
    lacking = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    unknown = file.value_or(0, f"{PREFIX}unknown_token_id", int)
    if lacking or set(map(type, scores)) != {float} or len(scores) != len(types) or unknown not in vocabulary.values():
        raise file.error("tokenizer 'llama' lacks byte tokens, scores or an unknown token; convert the model again")
    plain = {token for token, number in vocabulary.items() if types[number] == TokenType.NORMAL}
    pairs = [
        (-scores[vocabulary[token]], vocabulary[token], token[:cut], token[cut:])
        for token in plain
        for cut in range(1, len(token))
        if {token[:cut], token[cut:]} <= plain
    ]
    merges = [(left, right) for _, _, left, right in sorted(pairs)]
    names = {number: token for token, number in vocabulary.items()}
    tokenizer = Tokenizer(
        models.BPE(vocab=dict(vocabulary), merges=merges, unk_token=names[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = file.value_or(True, f"{PREFIX}add_space_prefix", bool)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer
