"""Byte-level BPE, trained on a text."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from sportsllm.console import log
from sportsllm.errors import UsageError
from sportsllm.files import JsonObject, write_json
from sportsllm.text.tokenizer import PAD, TextTokenizer

BEGIN, END = "<|begin|>", "<|end|>"
# By transformers. Without input names its tokenizers add token types, which its models refuse.
LOADED_AS: JsonObject = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_input_names": ["input_ids", "attention_mask"],
    "clean_up_tokenization_spaces": False,
}
MIN_VOCAB_SIZE = 256 + 3  # every byte is a token, so any text can be written

_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "grouped": _WORDS,
    "single": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _WORDS]),
}
"""How a text is split before merges, by its digits: GPT-2's words, in which a number may be one token, or each digit a
token of its own."""


def check_vocabulary(vocab_size: int) -> None:
    """Refuse a size that is too small for a byte-level tokenizer."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(f"vocab_size is {vocab_size}; 256 bytes and 3 special tokens need {MIN_VOCAB_SIZE}")


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path, digits: str = "grouped") -> TextTokenizer:
    """Train byte-level BPE on `texts` and save it in `directory` as tokenizer.json and tokenizer_config.json.

    All UTF-8 text survives encode and decode, since all 256 bytes are tokens. If a small corpus gives fewer than
    `vocab_size` entries, reserved tokens that no text encodes to fill the rest, so that a preset keeps its shape.
    `digits` is a key of `PRE_TOKENIZERS`.

    Raises:
        UsageError: vocab_size is too small.
    """
    check_vocabulary(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[digits]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    if missing:
        log(f"the corpus yields {vocab_size - missing:,} tokens; {missing:,} reserved tokens fill the vocabulary")
        tokenizer.add_special_tokens([f"<|reserved_{number}|>" for number in range(missing)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    names = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    write_json(directory / "tokenizer_config.json", LOADED_AS | names)
    return TextTokenizer(tokenizer, begin_id=0, end_id=1, directory=directory)
