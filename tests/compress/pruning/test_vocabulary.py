import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from compress.prune import prune
from compress.pruning.tokenizer_files import read_vocabulary
from compress.pruning.vocabulary import kept_tokens, prune_vocabulary, saved_tokens
from sportsllm.errors import UsageError
from sportsllm.files import read_json, write_json
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.sampling import Sampling, generate
from sportsllm.inference.scoring import score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.text.tokenizer_training import train_tokenizer
from tests.sportsllm.text.test_tokenizer import HARD
from tests.support.checkpoint_files import one_line
from tests.support.models import TINY_VOCAB, saved, tiny_model

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def naive_bpe(pieces: list[str], merges: list[list[str]]) -> list[str]:
    """The merges one after the other, as the first BPE paper runs them; fits merges that only use earlier ones."""
    for first, second in merges:
        place = 0
        while place + 1 < len(pieces):
            if pieces[place : place + 2] == [first, second]:
                pieces[place : place + 2] = [first + second]
            place += 1
    return pieces


def prune_files(source: Path, directory: Path, domain: str, size: int, **changes: Any) -> dict[str, Any]:
    """`prune_vocabulary` to `size` tokens, calibrated on one text."""
    calibration = directory / "calibration.txt"
    directory.mkdir(parents=True, exist_ok=True)
    calibration.write_text(domain, encoding="utf-8")
    settings = {"vocab_size": size, "calibration": [calibration], "valid": []} | changes
    return prune_vocabulary(checkpoint=source, out=directory / "out", **settings)


def old_ids(directory: Path) -> list[int]:
    return list(read_json(directory / "vocabulary_map.json")["old_ids"])


@pytest.fixture(scope="module")
def llama(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a LLaMA-2 kind of tokenizer: characters, bytes to fall back to, spaces as a character.

    Every pair whose ends are tokens is a merge, so a token has several merges that could make it, as in converted
    SentencePiece files.
    """
    words = " ".join(texts[:5])
    starts = Counter("▁" + word[:3] for word in words.split() if len(word) > 2)
    chars = sorted({*words.replace(" ", "▁"), "é", "東", "▁"})
    grams = {word[:end] for word, _ in starts.most_common(30) for end in (2, 3, 4)}
    grams |= {word[start:] for word in grams for start in (1, 2) if len(word) - start > 1}
    learnt = sorted(grams, key=lambda gram: (len(gram), gram))
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *learnt, *chars]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token in learnt
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(tokens[:3])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "$A $B:1", [("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    directory = tmp_path_factory.mktemp("llama")
    model = tiny_model(vocab_size=len(vocab), bos_token_id=1, eos_token_id=2, pad_token_id=None)
    tokenizer.save(str(directory / "tokenizer.json"))
    return saved(directory, model)


@pytest.fixture(scope="module")
def llama3(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as Llama 3 and Qwen lay it out: special tokens behind the vocabulary, ids in every file, a head of
    its own, and rows without a token at the end."""
    directory = tmp_path_factory.mktemp("llama3")
    train_tokenizer(texts, 370, directory)
    data = read_json(directory / "tokenizer.json")
    names = ["<|text|>", "<|stop|>", "<|turn|>"]
    moved = {token: number - 3 for token, number in data["model"]["vocab"].items() if number >= 3}
    entries = {name: dict(data["added_tokens"][0], content=name, id=367 + place) for place, name in enumerate(names)}
    data["model"] |= {"vocab": moved, "ignore_merges": True}
    data["added_tokens"] = list(entries.values())
    data["post_processor"] = {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|text|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|text|>": {"id": "<|text|>", "ids": [367], "tokens": ["<|text|>"]}},
        },
    ]}  # fmt: skip
    write_json(directory / "tokenizer.json", data)
    decoder = {str(entry["id"]): {"content": name, "special": True} for name, entry in entries.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|text|>", "eos_token": "<|stop|>"}
    settings |= {"added_tokens_decoder": decoder, "additional_special_tokens": ["<|turn|>"]}
    write_json(directory / "tokenizer_config.json", settings | {"clean_up_tokenization_spaces": False})
    write_json(directory / "generation_config.json", {"bos_token_id": 367, "eos_token_id": [368, 369], "top_p": 0.5})
    special = {"bos_token_id": 367, "eos_token_id": (368, 369), "pad_token_id": None}
    return saved(directory, tiny_model(tie_word_embeddings=False, **special))


@pytest.fixture(scope="module", params=["checkpoint", "llama", "llama3"])
def source(request: pytest.FixtureRequest) -> Path:
    """A checkpoint of each kind of tokenizer."""
    return Path(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def made(source: Path, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It with 320 tokens, so few beside the bytes that nearly all unusual text falls back to bytes."""
    directory = tmp_path_factory.mktemp("made")
    prune_files(source, directory, texts[0], 320)
    return directory / "out"


def test_no_closed_choice_saves_more() -> None:
    """All closed choices of so many tokens, each tried on the text, by brute force."""
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "d"), ("i", "n"), ("in", "g"), ("o", "f"), ("the", "m")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate([*alphabet, *whole])}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    vocabulary = read_vocabulary(json.loads(tokenizer.to_str()), "hand")
    words = ["the"] * 5 + ["them"] * 3 + ["then"] + ["and"] * 4 + ["an"] * 2 + ["ing"] * 6 + ["of"] * 7
    counts = np.bincount(tokenizer.encode(" ".join(words)).ids, minlength=264)
    saved = saved_tokens(vocabulary, counts)

    def length(kept: set[str]) -> int:
        rules = [list(pair) for pair in merges if "".join(pair) in kept]
        return sum(len(naive_bpe(list(word), rules)) for word in words)

    for count in range(9):
        ours = {
            whole[number - 256]
            for number in kept_tokens(vocabulary, saved, 256 + count, vocabulary.fixed)
            if number > 255
        }
        closed = [
            set(choice)
            for choice in itertools.combinations(whole, count)
            if all(half in choice or len(half) == 1 for pair in merges if "".join(pair) in choice for half in pair)
        ]
        assert ours in closed
        assert length(ours) == min(length(choice) for choice in closed)


def test_logits_of_kept_tokens_are_the_old_ones(source: Path, made: Path) -> None:
    kept = old_ids(made)
    new = torch.randint(0, len(kept), (2, 30), generator=torch.Generator().manual_seed(0))
    old, pruned = load_checkpoint(source), load_checkpoint(made)
    with torch.inference_mode():
        assert torch.equal(pruned.hidden(new), old.hidden(torch.tensor(kept)[new]))
        assert torch.equal(pruned.head_weight, old.head_weight[kept])
        expected, found = old(torch.tensor(kept)[new])[..., kept], pruned(new)
    assert len(kept) == 320 < old.config.vocab_size
    # The same products; a kernel may add up the 64 of them in another order where the matrix has fewer rows.
    assert torch.allclose(found, expected, rtol=0, atol=64 * 2**-23 * float(expected.abs().max()))


def test_any_text_round_trips(source: Path, made: Path, texts: list[str]) -> None:
    old, tokenizer = (load_tokenizer(path, load_config(path)) for path in (source, made))
    random.seed(0)
    noise = [random.randbytes(50).decode("utf-8", errors="replace") for _ in range(50)]
    rare = ["ᚠᛇᚻ 𓀀 🇪🇸 é e\u0301 東京", "".join(map(chr, range(1, 300))), "\u2581 \u0120", texts[7], "‏עברית"]
    for text in [*HARD, *noise, *rare]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == old.decode(old.encode(text))
        assert all(number < 320 for number in ids)
        assert not set(load_config(made).stop_token_ids) & set(ids)
        if source.name.startswith("llama") and not source.name.startswith("llama3"):
            text = text.replace("\u2581", " ")  # that tokenizer cannot tell them apart
        assert tokenizer.decode(ids) == text


def test_what_stays_is_closed_and_reads_as_naive_bpe(source: Path, made: Path, texts: list[str]) -> None:
    data, old = (read_json(path / "tokenizer.json") for path in (made, source))
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    assert all(first + second in vocab and {first, second} <= vocab.keys() for first, second in merges)
    places = [old["model"]["merges"].index(pair) for pair in merges]
    assert places == sorted(places)
    assert len(merges) < len(old["model"]["merges"])
    special = {entry["content"] for entry in data["added_tokens"]}
    for token in vocab.keys() - special - set(BYTES):
        assert naive_bpe(list(token), merges) == [token], "what stays can still be made"
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in [texts[0], texts[9], "zzz Unseen, words: 12345"]:
        words = [text]
        if tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        if tokenizer.normalizer is not None:
            words = [tokenizer.normalizer.normalize_str(text)]
        pieces = [piece for word in words for piece in naive_bpe(list(word), merges)]
        expected = [[piece] if piece in vocab else [f"<0x{byte:02X}>" for byte in piece.encode()] for piece in pieces]
        found = tokenizer.encode(text, add_special_tokens=False).ids
        assert found == [vocab[token] for part in expected for token in part]


def test_keeping_everything_changes_nothing(source: Path, texts: list[str], tmp_path: Path) -> None:
    config = load_config(source)
    result = prune_files(source, tmp_path, texts[0], config.vocab_size)
    before, after = (load_file(str(path / "model.safetensors")) for path in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        assert read_json(source / name) == read_json(tmp_path / "out" / name)
    assert result["tokens_per_byte_before"] == result["tokens_per_byte_after"]
    assert load_config(tmp_path / "out") == config


def test_special_ids_are_rewritten_everywhere(llama3: Path, texts: list[str], tmp_path: Path) -> None:
    prune_files(llama3, tmp_path, texts[0], 320)
    out = tmp_path / "out"
    begin, stop, turn = ids = [old_ids(out).index(number) for number in (367, 368, 369)]
    assert ids == [317, 318, 319]
    config, data = load_config(out), read_json(out / "tokenizer.json")
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (320, begin, (stop, turn))
    assert [entry["id"] for entry in data["added_tokens"]] == ids
    assert data["post_processor"]["processors"][1]["special_tokens"]["<|text|>"]["ids"] == [begin]
    named = {"bos_token_id": begin, "eos_token_id": [stop, turn], "top_p": 0.5}
    assert read_json(out / "generation_config.json") == named
    decoder = read_json(out / "tokenizer_config.json")["added_tokens_decoder"]
    wanted = {str(begin): "<|text|>", str(stop): "<|stop|>", str(turn): "<|turn|>"}
    assert {number: entry["content"] for number, entry in decoder.items()} == wanted


def test_an_added_token_without_a_row_goes(llama3: Path, texts: list[str], tmp_path: Path) -> None:
    def add(data: dict[str, Any]) -> None:
        data["added_tokens"].append({**data["added_tokens"][0], "id": 384, "content": "<|image|>"})

    prune_files(broken(llama3, tmp_path / "source", "tokenizer.json", add), tmp_path, texts[0], 320)
    names = [entry["content"] for entry in read_json(tmp_path / "out" / "tokenizer.json")["added_tokens"]]
    assert names == ["<|text|>", "<|stop|>", "<|turn|>"]


def test_transformers_reads_the_same(made: Path) -> None:
    ours, model = load_tokenizer(made, load_config(made)), load_checkpoint(made)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(made))
    text = "Final score: Obura 82-84 Vestnes, 東京 🏉"
    ids = theirs(text)["input_ids"]
    assert ids == [ours.begin_id, *ours.encode(text)]
    assert len(theirs) <= model.config.vocab_size
    peer = AutoModelForCausalLM.from_pretrained(str(made)).eval()
    with torch.inference_mode():
        expected, found = peer(torch.tensor([ids])).logits, model(torch.tensor([ids]))
    # Two orders of adding up 64 float32 products of size 1; logits are below 100.
    assert torch.allclose(found, expected, atol=1e-4)


def test_bits_per_byte_before_and_after(
    checkpoint: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(texts[30], encoding="utf-8")
    result = prune_files(checkpoint, tmp_path, texts[0], 300, valid=[held_out])
    assert "keeping 320 tokens, not 300: kernels need a multiple of 32" in capsys.readouterr().err
    out = tmp_path / "out"
    for side, key in ((checkpoint, "before"), (out, "after")):
        model, words = load_checkpoint(side), load_tokenizer(side)
        score = score_documents(TorchDecoder(model), words, [texts[30]])
        assert result[f"bits_per_byte_{key}"] == score.bits_per_byte
        assert result[f"tokens_per_byte_{key}"] == len(words.encode(texts[30])) / len(texts[30].encode())
    assert (result["vocab_size"], result["vocab_size_before"]) == (320, TINY_VOCAB)
    assert result["parameters"] == load_config(checkpoint).parameters - (TINY_VOCAB - 320) * 64
    again = prune_files(checkpoint, tmp_path, texts[0], 300, valid=[held_out])
    assert again["cached"] and not result["cached"]


def test_reserved_tokens_go_first(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", tiny_model())
    train_tokenizer(["a small corpus"], TINY_VOCAB, source)
    prune_files(source, tmp_path, "a small corpus", 288)
    kept, before = set(old_ids(tmp_path / "out")), read_json(source / "tokenizer.json")
    learnt = set(before["model"]["vocab"].values())
    assert len(learnt) < 288 and learnt <= kept
    assert len(read_json(tmp_path / "out" / "tokenizer.json")["added_tokens"]) == 3 + 288 - len(learnt)


def test_bytes_that_the_tokenizer_never_had(checkpoint: Path, texts: list[str], tmp_path: Path) -> None:
    """As SmolLM2's, which lacks 21 of them: such a character is lost with either vocabulary, all else is kept."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())

    def lose_bytes(data: dict[str, Any]) -> None:
        vocab = data["model"]["vocab"]
        for name in ("þ", "ÿ", "Ŀ"):  # 0xFE and 0xFF, which no text has, and one of the bytes of "東"
            assert name in alphabet
            vocab[f"{name}{name}"] = vocab.pop(name)

    source = broken(checkpoint, tmp_path / "source", "tokenizer.json", lose_bytes)
    prune_files(source, tmp_path, "\n\n".join(texts), 320)
    old, new = load_tokenizer(source), load_tokenizer(tmp_path / "out")
    for text in (*texts[:3], "a 東 b", "Zoë 57½"):
        assert new.decode(new.encode(text)) == old.decode(old.encode(text))
    assert new.decode(new.encode(texts[0])) == texts[0]


def test_a_character_may_fall_back_to_bytes_but_the_space_may_not(llama: Path, tmp_path: Path) -> None:
    prune_files(llama, tmp_path, "nospacehere", 288)
    vocab = read_json(tmp_path / "out" / "tokenizer.json")["model"]["vocab"]
    assert "▁" in vocab and "東" not in vocab
    vocabulary = read_vocabulary(read_json(llama / "tokenizer.json"), "llama")
    saved = saved_tokens(vocabulary, np.ones(load_config(llama).vocab_size, dtype=np.int64))
    assert saved[vocabulary.ids["東"]] == 2, "three bytes instead of one token"


def test_somebody_elses_checkpoint(stories: Path, tmp_path: Path) -> None:
    text = "Once upon a time, there was a little girl named Lily. She had a dog."
    result = prune_files(stories, tmp_path, text, 352)
    out = tmp_path / "out"
    model, words = load_checkpoint(out), load_tokenizer(out)
    begun = [words.begin_id, *words.encode("Once upon a time")]
    ids = list(generate(TorchDecoder(model), begun, 8, Sampling(temperature=0)))
    assert words.decode(ids) == ", there was a little girl"
    assert result["tokens_per_byte_before"] == result["tokens_per_byte_after"]


def broken(source: Path, target: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(source, target)
    data = read_json(target / name) if (target / name).exists() else {}
    change(data)
    write_json(target / name, data)
    return target


def unigram(data: dict[str, Any]) -> None:
    vocab = [[token, -1.0] for token in data["model"]["vocab"]]
    data["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocab}


REFUSED: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("tokenizer.json", unigram, "its model is Unigram"),
    ("tokenizer.json", lambda d: d["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    ("tokenizer.json", lambda d: d.update(pre_tokenizer={"type": "Whitespace"}), "without tokens for all bytes"),
    ("tokenizer.json", lambda d: (d["model"].update(byte_fallback=True), d.pop("pre_tokenizer")), "without tokens"),
    ("tokenizer.json", lambda d: d["added_tokens"][0].update(id=200), "id 200, but is read as 0"),
    ("tokenizer.json", lambda d: d["model"]["vocab"].update(zzz=5), "two tokens have one id"),
    ("tokenizer.json", lambda d: d["post_processor"]["special_tokens"]["<|begin|>"].update(ids=[999]), "put around"),
    ("config.json", lambda d: d.update(pad_token_id=-1), "pad_token_id is -1"),
    ("tokenizer_config.json", lambda d: d.update(added_tokens_decoder=[1]), "added_tokens_decoder: holds a list"),
    ("generation_config.json", lambda d: d.update(eos_token_id=[1, 999]), "eos_token_id is 999"),
    ("generation_config.json", lambda d: d.update(bad_words_ids=[[5]]), "bad_words_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=[f"{n}-{m}" for n, _, m in REFUSED])
def test_files_that_disagree_are_one_line(
    checkpoint: Path, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    with one_line(message):
        prune_files(broken(checkpoint, tmp_path / "source", name, change), tmp_path, "some text", 320)
    assert not (tmp_path / "out").exists()


def test_the_command_cuts_the_vocabulary_alone(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text("a late goal", encoding="utf-8")
    given = {"calibration": [corpus_file], "valid": [tmp_path / "held_out.txt"], "vocab_size": 320}
    result = prune(checkpoint, out=tmp_path / "out", **given)
    assert load_config(tmp_path / "out").vocab_size == result.vocab_size == 320 * result.share_of_block_parameters
    assert result.bits_per_byte_after and prune(checkpoint, out=tmp_path / "out", **given).cached
    for settings, message in (
        *(({"vocab_size": size}, "259 of them always stay .* choose 259 to 384") for size in (258, 385)),
        ({"vocab_size": 320, "params": 0.5}, "cut alone"),
        ({"recover": 100, "vocab_size": 320}, "cut alone"),
        ({"vocab_size": 320, "settings": {"samples": 4}}, "samples: .* all of the calibration text; leave it out"),
        ({"vocab_size": 320, "seed": 1, "settings": {"kl_weight": 1}}, "options of --recover: --set kl_weight"),
        ({"params": 0.5, "corpus": [corpus_file], "resume": True}, "--recover: --corpus, --resume; .* --calibration"),
        ({"params": 0.5, "valid": [corpus_file]}, "--valid scores"),
    ):
        with pytest.raises(UsageError, match=message):
            prune(checkpoint, out=tmp_path / "x", calibration=[corpus_file], **settings)
    assert not (tmp_path / "x").exists()
