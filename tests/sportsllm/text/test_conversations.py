"""Conversations: their records, and their tokens and masks against those of `transformers`."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import transformers
from tokenizers import Tokenizer

from sportsllm.errors import ArtifactError
from sportsllm.text.conversations import Conversation
from sportsllm.text.documents import Reading, read_documents
from sportsllm.text.packing import IGNORE, PackedSequences
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer
from sportsllm.text.tokens import tokenize
from tests.support.checkpoint_files import edit_json, one_line

# Each format as its publisher documents it, with marks around what the model writes.
TEMPLATES = {
    "chatml": (
        ["<|im_start|>", "<|im_end|>"],
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
    "llama-3": (
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "{{ '<|begin_of_text|>' }}{%- for m in messages %}"
        "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
        "{%- if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{%- else %}{{ m['content'] | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}",
    ),
    "gemma": (
        ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        "{{ '<bos>' }}{% for m in messages %}"
        "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<end_of_turn>' }}"
        "{% endgeneration %}{% else %}{{ m['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ),
    "phi-3": (
        ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}{% if m['role'] == 'assistant' %}"
        "{%- generation -%}{{ m['content'] + '<|end|>' }}{%- endgeneration -%}{% else %}{{ m['content'] + '<|end|>' }}"
        "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ),
    "mistral": (  # puts the system's words into the last question
        ["<s>", "</s>", "[INST]", "[/INST]"],
        "{{ '<s>' }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (system + '\n\n' if system and loop.last or loop.revindex == 2 and system else '') + m.content"
        " + '[/INST]' }}{% else %}{% generation %}{{ ' ' + m.content + '</s>' }}{% endgeneration %}{% endif %}"
        "{% endfor %}",
    ),
    "qwen3": (  # leaves the reasoning of earlier turns out, and gives the last one some
        ["<|im_start|>", "<|im_end|>"],
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{% if loop.last %}{{ '<think>\n' if '<think>' not in m.content }}{{ m.content }}{% else %}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}{{ '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
}
CHATS = [
    [("user", "Who won?"), ("assistant", "Vestnes 🏉, 82-84.")],
    [("system", "Be kind."), ("user", " Who won? "), ("assistant", "They."), ("user", "Who?"), ("assistant", "Who?")],
    [
        ("user", "Who?"),
        ("assistant", "<think>\nHm.\n</think>\n\nThey."),
        ("user", "And?"),
        ("assistant", ""),
        ("user", "So?"),
        ("assistant", "<think>\nOh.\n</think>\n\nWe."),
    ],
]


def instruct(source: Path, target: Path, special: list[str], template: str) -> Path:
    """A tokenizer with a template and its special tokens."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(target / "tokenizer.json"))
    edit_json(target / "tokenizer_config.json", chat_template=template)
    return target


def without_marks(template: str) -> str:
    return re.sub(r"\{%-? (end)?generation -?%\}", "", template)


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_transformers(name: str, tokenizer_directory: Path, tmp_path: Path) -> None:
    """With the marks, and without them, which are what most checkpoints have."""
    special, template = TEMPLATES[name]
    directory = instruct(tokenizer_directory, tmp_path, special, template)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    chats = [Conversation(tuple(turns)) for turns in CHATS]
    wanted = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = [theirs.apply_chat_template(each.records(), **wanted) for each in chats]
    assert all(any(each["assistant_masks"]) for each in expected)
    marked = load_tokenizer(directory)
    unmarked = load_tokenizer(instruct(directory, tmp_path / "unmarked", [], without_marks(template)))
    for tokenizer in (marked, unmarked):
        ours = list(tokenizer.encode_documents(chats))
        assert [list(each.ids) for each in ours] == [each["input_ids"] for each in expected]
        assert [list(map(int, each.scored or [])) for each in ours] == [each["assistant_masks"] for each in expected]
        assert [each.bytes for each in ours] == [len(chat.replies.encode()) for chat in chats]


WEIGHTED = """{"system": "Be kind.", "conversations": [{"from": "human", "value": "Who?"},
{"from": "gpt", "value": "They.", "weight": 0}, {"from": "human", "value": "And?"},
{"from": "gpt", "value": "We.", "reasoning_content": "Hm.", "weight": 1}]}""".replace("\n", " ")
THINKING = TEMPLATES["chatml"][1].replace("{{ m.content", "{{ (m.reasoning_content or '') ~ m.content")


@pytest.mark.parametrize("marked", [True, False])
def test_system_reasoning_and_weights_of_a_record_are_read(
    marked: bool, tokenizer_directory: Path, tmp_path: Path
) -> None:
    """Tokens and mask are those of `transformers`, but for the turn of weight 0, which is that of a user there."""
    template = THINKING if marked else without_marks(THINKING)
    directory = instruct(tokenizer_directory, tmp_path, TEMPLATES["chatml"][0], template)
    (tmp_path / "a.jsonl").write_text(WEIGHTED, encoding="utf-8")
    (chat,) = read_documents([tmp_path / "a.jsonl"])
    messages = [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "They."}, {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "We.", "reasoning_content": "Hm."},
    ]  # fmt: skip
    (ours,) = load_tokenizer(directory).encode_documents([chat])
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    wanted = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": THINKING}
    expected = theirs.apply_chat_template(messages, **wanted)
    earlier = len(theirs.apply_chat_template(messages[:4], return_dict=True, chat_template=THINKING)["input_ids"])
    assert ours.ids == expected["input_ids"] and sum(expected["assistant_masks"][:earlier]) > 0
    assert list(map(int, ours.scored or [])) == [0] * earlier + expected["assistant_masks"][earlier:]
    assert ours.bytes == len("Hm.We.")
    (everything,) = load_tokenizer(directory, reading=Reading(loss_on="all")).encode_documents([chat])
    learned = [int(not (mask and place < earlier)) for place, mask in enumerate(expected["assistant_masks"])]
    assert list(map(int, everything.scored or [])) == learned


MESSAGES = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "They."}]
SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "They."}]
PARTS = [
    MESSAGES[0],
    {"role": "assistant", "content": [{"type": "text", "text": "Th"}, {"type": "text", "text": "ey."}]},
]


def written(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_every_form_of_a_record_is_one_conversation(tmp_path: Path) -> None:
    records = [
        {"messages": MESSAGES, "id": 1},
        {"messages": PARTS},
        {"conversations": SHAREGPT},
        {"prompt": "Who?", "completion": "They."},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    ]
    read = [*read_documents([written(tmp_path / "a.jsonl", *records)])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records[:1] * 2), tmp_path / "b.parquet")
    read += read_documents([tmp_path / "b.parquet"])
    assert {*read} == {Conversation((("user", "Who?"), ("assistant", "They.")))} and len(read) == 7
    assert isinstance(read[6], Conversation) and read[6].where == f"{tmp_path / 'b.parquet'}: row 2"


PAIR = {"prompt": "Who?", "completion": "They."}


@pytest.mark.parametrize(
    ("records", "named", "types"),
    [
        ([{"text": "plain", "messages": MESSAGES}, {"messages": MESSAGES}], "messages", [str, Conversation]),
        ([{"text": "plain"} | PAIR, PAIR], "prompt", [str, Conversation]),
        ([{"text": "plain"}, {"text": "plain"} | PAIR], "prompt", [str, str]),
        ([{"text": "plain"}, PAIR], None, [str, Conversation]),
    ],
)
def test_of_text_and_a_conversation_the_text_is_read_and_a_line_says_so(
    records: list[dict[str, object]],
    named: str | None,
    types: list[type],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nothing = dict.fromkeys(name for record in records for name in record)
    table = pyarrow.Table.from_pylist([nothing | record for record in records])
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    for path in (written(tmp_path / "a.jsonl", *records), tmp_path / "b.parquet"):
        for _ in range(2):
            assert [type(each) for each in read_documents([path])] == types
        said = f"{path}: reading 'text'; to read the conversations, give --text-field {named}\n"
        assert capsys.readouterr().err == (said if named else "")
        if named and named in records[0]:
            assert [type(each) for each in read_documents([path], named)] == [Conversation, Conversation]
            assert capsys.readouterr().err == ""


def reply(content: object = "They.", **more: object) -> dict[str, object]:
    return {"messages": [{"role": "assistant", "content": content} | more]}


PICTURE = [{"type": "text", "text": "Who?"}, {"type": "image_url", "image_url": {"url": "x"}}]
SYSTEM = {"role": "system", "content": "Be."}


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"messages": None}, " has no 'text' string"),
        ({"prompt": "Who?"}, " has no 'text' string"),
        ({"messages": []}, ": 'messages' holds no list of messages"),
        ({"messages": ["hello"]}, ": 'messages' holds no list of messages"),
        (
            {"conversations": [*SHAREGPT, {"from": 3, "value": "x"}]},
            ": message 3 of 'conversations' has the role 3; use",
        ),
        (reply(PICTURE), ": message 1 of 'messages' has content of the kind 'image_url'"),
        (reply(None), ": message 1 of 'messages' has content of the kind None"),
        (reply("", tool_calls=[{}]), ": message 1 of 'messages' has 'tool_calls'; only messages of text"),
        (reply(weight=0.5), ": message 1 of 'messages' has the weight 0.5; use 0 or 1"),
        (reply(reasoning_content=[1]), ": message 1 of 'messages' has reasoning_content that is not a string"),
        ({"messages": MESSAGES, "tools": ["x"]}, " has 'tools'; only messages of text"),
        ({"messages": [SYSTEM], "system": "Be kind."}, " has two system messages"),
    ],
)
def test_bad_records_are_named(record: dict[str, object], problem: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"text": "fine"}, record)
    with one_line(re.escape(f"{path}: line 2{problem}")):
        list(read_documents([path]))


@pytest.fixture
def chatml(tokenizer_directory: Path, tmp_path: Path) -> TextTokenizer:
    return load_tokenizer(instruct(tokenizer_directory, tmp_path / "chatml", *TEMPLATES["chatml"]))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('no system') }}", "no system"),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content | upper }}{% endfor %}",
            "reply 1 does not stand unchanged",
        ),
    ],
)
def test_a_template_that_fails_names_the_row(
    template: str, problem: str, tokenizer_directory: Path, tmp_path: Path
) -> None:
    fine = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = "{% if messages[0].content != 'Who?' %}" + fine + "{% else %}" + template + "{% endif %}"
    tokenizer = load_tokenizer(instruct(tokenizer_directory, tmp_path, [], template))
    file = written(tmp_path / "a.jsonl", *[{"prompt": "?", "completion": "They."}] * 3, {"messages": MESSAGES})
    with pytest.raises(ArtifactError, match=f"a.jsonl: line 4: .*{problem}") as caught:
        list(tokenizer.encode_documents(read_documents([file])))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_turn_of_a_million_characters_and_none_of_the_assistant(chatml: TextTokenizer) -> None:
    (encoded,) = chatml.encode_documents([Conversation((("user", "Who?"), ("assistant", "goals " * 200_000)))])
    assert encoded.scored is not None and encoded.bytes == 1_200_000 and sum(encoded.scored) > 200_000
    with pytest.raises(ArtifactError, match="row 7: no assistant turn"):
        list(chatml.encode_documents([Conversation((("user", "Who?"),), "row 7")]))


def test_rows_hold_whole_conversations_and_learn_replies(chatml: TextTokenizer, tmp_path: Path) -> None:
    documents = [Conversation((("user", "Who won? " * (1 + n % 5)), ("assistant", f"Team {n}."))) for n in range(40)]
    tokenized = tokenize([*documents, "A plain text. " * 30], chatml, tmp_path)
    assert tokenized.scored is not None
    rows = PackedSequences(tokenized, 64, 1, seed=0)
    batches = [rows.batch(index) for index in range(rows.rows_per_epoch)]
    learned = sorted(token for batch in batches for token in batch.targets[batch.targets != IGNORE].tolist())
    # Every scored token is a target, but for the first of the plain text, which none comes before.
    first = int(np.flatnonzero(tokenized.ids == chatml.begin_id)[-1])
    expected = np.delete(tokenized.ids, first)[np.delete(tokenized.scored, first)]
    assert learned == sorted(expected.tolist())
    for encoded in chatml.encode_documents(documents):
        ids, text = str(encoded.ids)[1:-1], [str(row)[1:-1] for batch in batches for row in batch.tokens.tolist()]
        assert any(ids.rpartition(",")[0] in row for row in text)  # the last token is a target only
    chatml.reading = Reading(loss_on="all")
    assert (everything := tokenize(documents, chatml, tmp_path)).scored is not None and everything.scored.all()
    assert everything.text_bytes > tokenized.text_bytes


def test_text_that_spells_special_tokens_is_counted(
    chatml: TextTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spelled = Conversation((("user", "<|im_end|>"), ("assistant", "no <|im_end|>")))
    text = "<|im_start|>user\nWho?<|im_end|>\n"
    end = chatml.encode("<|im_end|>", special=True)[0]
    assert end not in tokenize([text, text], chatml, tmp_path).ids
    said = " ".join(capsys.readouterr().err.split())
    assert "the text spells special tokens 4 times" in said and "parse_special=true" in said
    chatml.reading = Reading(parse_special=True)
    assert (tokenize([text, text], chatml, tmp_path).ids == end).sum() == 2
    assert not capsys.readouterr().err
    tokenize([spelled], chatml, tmp_path)
    assert "messages spell special tokens 2 times" in " ".join(capsys.readouterr().err.split())


def test_the_token_that_ends_a_turn_is_not_that_of_the_text(tokenizer_directory: Path, tmp_path: Path) -> None:
    special, template = TEMPLATES["chatml"]
    template += "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    directory = instruct(tokenizer_directory, tmp_path, special, template)
    for reading in (Reading(), Reading(loss_on="all")):
        tokenizer = load_tokenizer(directory, reading=reading)
        assert tokenizer.turn_ends == tokenizer.encode("<|im_end|>", special=True) != [tokenizer.end_id]
