"""The Python API: `import sportsllm`."""

import copy
import inspect
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sportsllm
from sportsllm.errors import ArtifactError, UsageError

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}<assistant>"


def test_a_loaded_model_generates_scores_and_gives_logits(checkpoint: Path) -> None:
    model = sportsllm.load(str(checkpoint), threads=1)
    pieces = list(model.generate("They", max_new_tokens=5, temperature=0))
    assert pieces and "".join(pieces) == "".join(model.generate("They", max_new_tokens=5, temperature=0))
    ids = [model.tokenizer.begin_id, *model.tokenizer.encode("They")]
    logits = model.logits(ids)
    assert logits.shape == (model.config.vocab_size,)
    first = int(np.argmax(logits))
    assert "".join(model.generate("They", max_new_tokens=1, temperature=0)) == model.tokenizer.decode([first])
    score = model.score(["Goal for the home side.", "A late goal."])
    assert score.bits_per_byte > 0 and score.bytes == len("Goal for the home side.A late goal.")
    text, stop = "".join(pieces), "".join(pieces)[1:3]
    stopped = "".join(model.generate("They", max_new_tokens=5, temperature=0, stop=stop))
    assert stopped == text[: text.find(stop)]
    assert "parameters" in repr(model)
    wrong: dict[str, Any] = {
        "top_p is 3": {"top_p": 3},
        "top_p is 0": {"top_p": 0},
        "top_k is -1": {"top_k": -1},
        "temperature is -1": {"temperature": -1},
        "repetition_penalty is 0": {"repetition_penalty": 0},
        "max_new_tokens is 0": {"max_new_tokens": 0},
        "stop is empty": {"stop": ["a", ""]},
        "seed is -1": {"seed": -1},
        "the prompt is of type list": {"prompt": ["They"]},
    }
    for said, setting in wrong.items():
        with pytest.raises(UsageError, match=said):
            model.generate(**setting)
    with pytest.raises(UsageError, match="token id 384 lies outside the vocabulary of 384"):
        model.logits([0, 384])
    with pytest.raises(UsageError, match="give token ids"):
        model.logits("They")  # type: ignore[arg-type]
    for other in (["a", 5], 5, None):
        with pytest.raises(UsageError, match="give a text to score"):
            model.score(other)  # type: ignore[arg-type]
    assert pickle.dumps(model) and np.array_equal(copy.copy(model).logits(ids), logits)


def test_a_stream_says_that_the_context_is_full(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, asked = sportsllm.load(checkpoint, threads=1), 10**6
    list(model.generate("They", max_new_tokens=3))
    assert "is full" not in capsys.readouterr().err
    pieces = list(model.generate("They", max_new_tokens=asked, temperature=0))
    assert f"of {asked:,} were generated" in capsys.readouterr().err
    list(model.generate("They", max_new_tokens=asked, temperature=0, stop="".join(pieces)[1:3]))
    assert "is full" not in capsys.readouterr().err


def test_a_stream_ends_when_another_text_begins(exported: Path) -> None:
    model = sportsllm.load(exported, threads=1)
    first, second = (model.generate(text, max_new_tokens=8, temperature=0) for text in ("They won", "They lost"))
    next(first)
    assert "".join(second) == "".join(model.generate("They lost", max_new_tokens=8, temperature=0))
    with pytest.raises(UsageError, match="generating another text"):
        next(first)


def test_threads_share_a_tokenizer(checkpoint: Path) -> None:
    model = sportsllm.load(checkpoint, threads=1)
    text, ids = "<|end|> of the match, 2-1", model.tokenizer.encode("<|end|> of the match, 2-1")

    def encode(number: int) -> bool:
        if number % 2:
            return model.tokenizer.encode(text, special=True)[0] == 1
        return next(model.tokenizer.encode_documents([text] * 50)).ids == [model.tokenizer.begin_id, *ids]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(encode, range(300)))


def test_chat_replies_as_the_terminal_does(checkpoint: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint, tmp_path / "chat")
    with pytest.raises(ArtifactError, match="has no chat template"):
        sportsllm.load(directory).chat("Who won?")
    (directory / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    model = sportsllm.load(directory, threads=1)
    generated = sportsllm.generate(directory, prompt="Who won?", chat=True, max_new_tokens=8, seed=4)
    for messages in ("Who won?", [{"role": "user", "content": "Who won?"}]):
        reply = "".join(model.chat(messages, max_new_tokens=8, seed=4))
        assert (generated.prompt, generated.text) == ("Who won?", reply)
    for call in (model.chat, model.generate, model.score):
        with pytest.raises(UsageError, match="is not valid UTF-8; correct it"):
            call("a\udcff")
    for wrong in ([], [{"role": "user"}], ["Who won?"]):
        with pytest.raises(UsageError, match="messages: give a string, or dictionaries"):
            model.chat(wrong)  # type: ignore[arg-type]


def test_commands_are_functions_with_typed_results_that_take_strings_as_paths() -> None:
    assert set(sportsllm.__all__) <= set(dir(sportsllm))
    for name in sportsllm.__all__:
        assert "--" not in getattr(sportsllm, name).__doc__, name
    assert inspect.signature(sportsllm.train).parameters["tokens"].annotation == int | None
    assert "tokens: Tokens to train on" in str(sportsllm.train.__doc__)
    for tokens in ("10x", -5, 1.5, "2,5M"):
        with pytest.raises(UsageError, match=f"tokens: '{tokens}' is not a whole number of 1 or more"):
            sportsllm.train(model="tiny-300k", tokens=tokens)
    with pytest.raises(UsageError, match="corpus: must be a list"):
        sportsllm.train(model="tiny-300k", corpus={"path": "text.txt"})
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        sportsllm.trian  # noqa: B018


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: must be at least 1, not 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: must be a whole number, not 1.5"),
        ({"threads": -1}, "threads: must be at least 1, not -1"),
        ({"top_p": "much"}, "top_p: must be a number"),
        ({"prompt": None}, "prompt: must be a string, not None"),
        ({"prompt_file": 5}, "prompt_file: must be a path, not 5"),
    ],
)
def test_a_value_of_another_type_or_beyond_its_bounds(checkpoint: Path, setting: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sportsllm.generate(checkpoint, **setting)


def test_values_are_converted_as_on_the_command_line(checkpoint: Path) -> None:
    text = sportsllm.generate(checkpoint, prompt="They", max_new_tokens="8", temperature=0).text
    stopped = sportsllm.generate(str(checkpoint), prompt="They", max_new_tokens=8, temperature=0, stop=text[2]).text
    assert stopped == text[: text.find(text[2])]
    for empty in ("", [str(checkpoint / "README.md"), ""]):
        with pytest.raises(UsageError, match="text: the path is empty"):
            sportsllm.eval(checkpoint, text=empty)
    with pytest.raises(UsageError, match="`settings` 5=1: there is no '5'"):
        sportsllm.eval(checkpoint, text=checkpoint / "tokenizer.json", settings={5: 1})
    with pytest.raises(UsageError, match="port: must be at most 65535, not 99999"):
        sportsllm.serve(checkpoint, port=99_999)
    with pytest.raises(TypeError, match=r"^prune\(\) got an unexpected .* 'parms'; did you mean params\?"):
        sportsllm.prune(checkpoint, out="pruned", parms=0.7)
    with pytest.raises(UsageError, match=r"^`settings` batch_size: use the option `batch_size` instead"):
        sportsllm.distill(teacher=checkpoint, settings={"batch_size": 2})
    with pytest.raises(UsageError, match=r"^`teacher` needs `text` or `tasks`: quality"):
        sportsllm.bench(checkpoint, teacher=checkpoint)
    with pytest.raises(ArtifactError, match=r"^models--text: no such directory"):  # a path's name stays as it is
        sportsllm.bench("models--text")
