"""A base model becomes a chat model, and every verb keeps it one."""

import json
import math
import shutil
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
import transformers

import sportsllm
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.text.chat import find_template
from sportsllm.text.conversations import Conversation
from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.command_line import CommandLine

SHORT = ["--sequence", 64, "--steps", 2, "--threads", 1]
SETTINGS = ["--set", "batch_size=2", "--set", "sequence=64", "--set", "accumulation=1", "--threads", 1]


@pytest.fixture(scope="module")
def chats(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    turns = [[("user", text[:40]), ("assistant", text[40:90])] for text in texts]
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
    shutil.copytree(checkpoint, image := tmp_path / "image")  # with a token that the embedding has no row for
    data = json.loads((image / "tokenizer.json").read_text(encoding="utf-8"))
    data["added_tokens"].append({**data["added_tokens"][0], "id": size, "content": "<|image|>"})
    (image / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    cli.result("train", image, *flags, "--out", tmp_path / "same")
    assert (tmp_path / "same" / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    for problem, *arguments in (
        ("has a chat template", out, "--chat-template", "chatml"),
        ("use one of chatml", checkpoint, "--chat-template", "llama"),
        ("leave --lora-rank out", checkpoint, "--chat-template", "chatml", "--lora-rank", 2),
        ("give a CHECKPOINT", "--model", "tiny-300k", "--chat-template", "chatml"),
        ("use one of assistant, all", out, "--set", "loss_on=users"),
    ):
        cli.refuses(2, problem, "train", *arguments, "--corpus", chats, "--out", tmp_path / "x")
    cli.refuses(3, "has no chat template", "train", checkpoint, "--corpus", chats, *SHORT, "--out", tmp_path / "x")


def test_every_verb_keeps_template_and_special_tokens(
    cli: CommandLine, assistant: Path, chats: Path, tmp_path: Path
) -> None:
    calibration = ["--calibration", chats, "--threads", 1]
    made = {
        "tuned": ["train", assistant, "--corpus", chats, *SHORT, "--batch-size", 2, "--lora-rank", 2],
        "student": ["distill", "--teacher", assistant, "--student", assistant, *SHORT, "--batch-size", 2],
        "pruned": ["prune", assistant, "--params", 0.9, "--recover", 256, *calibration[:2], *SETTINGS],
        "int4": ["quantize", assistant, "--bits", 4, "--qad", 256, *calibration[:2], *SETTINGS],
        "onnx": ["export", assistant, "--threads", 1],
    }
    for name, arguments in made.items():
        cli.result(*arguments, "--out", tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (tmp_path / name / file).read_bytes() == (assistant / file).read_bytes(), (name, file)
    cli.result("prune", assistant, "--vocab-size", 352, *calibration, "--out", tmp_path / "fewer")
    assert find_template(tmp_path / "fewer") == find_template(assistant)
    fewer, config = load_tokenizer(tmp_path / "fewer"), load_config(tmp_path / "fewer")
    assert fewer.turn_ends == list(config.stop_token_ids[:1])


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
    assert found["tokens"] == tokens and found["conversations"] == 40
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)  # logits in float32
    compared = cli.result("eval", assistant, "--text", chats, "--against", assistant, "--threads", 1)
    assert compared["perplexity"] == pytest.approx(found["perplexity"], rel=1e-5)
    assert compared["divergence"]["kl"] == 0 and compared["tokens"] == tokens
    everything = cli.result("eval", assistant, "--text", chats, "--set", "loss_on=all", "--threads", 1)
    assert everything["tokens"] > 1.5 * tokens


def test_a_conversation_in_the_terminal(
    cli: CommandLine, assistant: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert "the conversation begins anew" in err and "/help is no command; /reset begins anew, Ctrl-C" in err
    assert err.count("the reply was cut off at --max-new-tokens 3") == 3
    first, system = asked[0], ("system", "Be kind.")
    assert first == [system, ("user", "Who?")]
    assert asked[1] == [system, ("user", "Who?"), ("assistant", out.split("> ")[1].strip("\n")), ("user", "When?")]
    assert asked[4] == [system, ("user", "Where?")]
    cli.refuses(2, "give --chat too", "generate", assistant, "--system", "Be kind.")


def test_a_conversation_needs_a_template_before_anything_is_typed(
    cli: CommandLine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO())
    cli.refuses(3, "has no chat template", "generate", checkpoint, "--chat")


def test_ctrl_c_at_the_prompt_ends_a_conversation_the_second_time(
    cli: CommandLine, assistant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter([KeyboardInterrupt, "Who?", KeyboardInterrupt, KeyboardInterrupt, "never read"])

    def typed_line(_: str) -> str:
        if (line := next(typed)) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return str(line)

    monkeypatch.setattr("sportsllm.console.typed_line", typed_line)
    monkeypatch.setattr("sys.stdin", StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    code, _, err = cli("generate", assistant, "--chat", "--max-new-tokens", 5, "--temperature", 0, "--threads", 1)
    assert code == 0 and err.count("press Ctrl-C again") == 2 and err.count("5 tokens, ") == 1, err
    assert next(typed) == "never read"


def test_ctrl_c_stops_a_reply_and_not_the_conversation(
    cli: CommandLine, assistant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sportsllm.inference.torch_decoder import TorchDecoder

    steps = iter([0, 1])
    step = TorchDecoder.step

    def interrupted(self: TorchDecoder, tokens: list[int]) -> object:
        if next(steps, 0):
            raise KeyboardInterrupt
        return step(self, tokens)

    monkeypatch.setattr(TorchDecoder, "step", interrupted)
    monkeypatch.setattr(sys, "stdin", StringIO("Who?\nWhen?\n"))
    code, _, err = cli("generate", assistant, "--chat", "--max-new-tokens", 5, "--temperature", 0, "--threads", 1)
    assert code == 0 and "2 tokens, " in err and "5 tokens, " in err, err


def test_a_model_writes_conversations(cli: CommandLine, assistant: Path, tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text("Who won?\n\nWhen?\n", encoding="utf-8")
    flags = ["--tokens", 200, "--sequence", 64, "--batch-size", 32, "--threads", 1, "--chat"]
    cli.result("data", "sample", assistant, *flags, "--prompts", tmp_path / "questions.txt", "--out", tmp_path / "a")
    answers = list(read_documents([tmp_path / "a" / "corpus.jsonl"]))
    assert answers and {each.messages[0] for each in answers if isinstance(each, Conversation)} == {
        ("user", "Who won?"),
        ("user", "When?"),
    }
    asked = []
    for seed in (0, 1):
        cli.result("data", "sample", assistant, *flags, "--seed", seed, "--out", tmp_path / f"own{seed}")
        corpus = read_documents([tmp_path / f"own{seed}" / "corpus.jsonl"])
        own = [each for each in corpus if isinstance(each, Conversation)]
        assert own and all([role for role, _ in each.messages] == ["user", "assistant"] for each in own)
        asked.append({each.messages[0] for each in own})
    assert len(asked[0]) > 1 and not asked[0] & asked[1]
