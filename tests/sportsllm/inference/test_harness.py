"""Tasks of lm-evaluation-harness against brute force and against `eval --questions`; needs the extra `tasks`."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

pytest.importorskip("lm_eval", reason="needs the extra tasks, which make setup installs")

from lm_eval.tasks import TaskManager

from benchmarks.quality import Model, task_quality
from sportsllm.inference import harness
from sportsllm.inference.decoder import open_decoder
from sportsllm.inference.harness import HarnessModel, run_tasks
from sportsllm.inference.sampling import Sampling, generate
from sportsllm.inference.scoring import question_accuracy, read_questions, score_documents
from sportsllm.text.documents import USUAL
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.command_line import CommandLine
from tests.support.models import DATA, tiny_model
from tests.support.pages import FENCE, ROOT

PAGE = ROOT / "docs" / "how-to" / "evaluate.md"
TASK = next(text for _, title, text in FENCE.findall(PAGE.read_text(encoding="utf-8")) if title == "my-task.yaml")


def request(*arguments: object, task: str = "greedy") -> SimpleNamespace:
    return SimpleNamespace(args=arguments, task_name=task)


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A YAML file beside its questions: those of ../shared/data if it is there."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    shared, questions = DATA / "opentriviaqa_sports" / "valid.jsonl", tmp_path / "questions.jsonl"
    if shared.exists():
        lines = shared.read_text(encoding="utf-8").splitlines()[:24]
    else:
        choices = ["rugby", "tennis", "a long-distance run", "judo"]
        lines = [json.dumps({"question": f"Game {n} is", "choices": choices, "answer": n % 4}) for n in range(24)]
    # As simulated questions have.
    lines[::2] = [re.sub(r'"choices": \["', '"choices": [" ', line) for line in lines[::2]]
    questions.write_text("\n".join(lines), encoding="utf-8")
    task = TASK.replace("corpus/questions.jsonl", str(questions)).replace("acc_bytes}", "acc_bytes}, {metric: acc}")
    (tmp_path / "task.yaml").write_text(task, encoding="utf-8")
    return tmp_path / "task.yaml"


def accuracy_of(directory: Path, task: Path) -> float:
    """That of `eval --questions`."""
    decoder = open_decoder(directory, threads=1)
    questions = read_questions(task.with_name("questions.jsonl"))
    return question_accuracy(decoder, load_tokenizer(directory, decoder.config), questions)


def test_accuracy_is_that_of_eval_questions(
    checkpoint: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, accuracy = open_decoder(checkpoint, threads=1), accuracy_of(checkpoint, task)
    tokenizer, own = load_tokenizer(checkpoint, decoder.config), yaml.safe_load(task.read_text(encoding="utf-8"))
    both = [own | {"task": name} for name in "ab"]
    group = {"group": "all", "task": both, "aggregate_metric_list": [{"metric": "acc_bytes"}]}
    (tmp_path / "group.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    monkeypatch.setattr(harness, "TaskManager", lambda **_: TaskManager(include_path=tmp_path, include_defaults=False))
    found = run_tasks(decoder, tokenizer, [str(task), "all"])
    assert list(found) == ["my_questions", "all::a", "all::b", "all"]
    score, values = found["my_questions"]
    assert (score.metric, score.documents, score.shots) == ("acc_bytes", 24, 0)
    assert score.value == accuracy == sum(values) / 24 == found["all"][0].value
    assert set(score.metrics) == {"acc_bytes", "acc"} and (found["all"][0].documents, found["all"][1]) == (48, [])
    # The standard error of a mean of zeros and ones, with n - 1.
    assert score.error == pytest.approx((accuracy * (1 - accuracy) / 23) ** 0.5)


def test_log_likelihoods_equal_a_brute_force_sum(checkpoint: Path, texts: list[str]) -> None:
    decoder, model = open_decoder(checkpoint), tiny_model()
    tokenizer = load_tokenizer(checkpoint, decoder.config)
    harness = HarnessModel(decoder, tokenizer, {"greedy"}, False)
    context, continuation = texts[0][:60].rstrip() + " ", texts[1][:20].rstrip()
    long = texts[0][:900]
    found = harness.loglikelihood([request(context, continuation), request("", continuation), request(long, " win")])
    for (text, after), (value, likeliest) in zip(
        [(context, continuation), ("", continuation), (long, " win")], found, strict=True
    ):
        ids, first = [0, *tokenizer.encode(text + after)], 1 + len(tokenizer.encode(text.rstrip()))
        count, ids = len(ids) - first, [0, *ids[1:][-127:]]
        with torch.inference_mode():
            logits_TV = model(torch.tensor([ids]))[0].double()
        wanted = sum(
            float(torch.log_softmax(logits_TV[place - 1], -1)[ids[place]])
            for place in range(len(ids) - count, len(ids))
        )
        assert value == pytest.approx(wanted, rel=1e-5) and not likeliest
    assert harness.loglikelihood_rolling([request(texts[0][:900]), request("ok")]) == pytest.approx(
        [-each for each in score_documents(decoder, tokenizer, [texts[0][:900], "ok"]).documents]
    )


def test_the_likeliest_continuation_is_known_as_such(checkpoint: Path, texts: list[str]) -> None:
    """The greedy token after some beginnings, as far as its text is that token again; and the second-best one."""
    decoder = open_decoder(checkpoint)
    tokenizer = load_tokenizer(checkpoint, decoder.config)
    harness, found = HarnessModel(decoder, tokenizer, {"greedy"}, False), list[tuple[int, str, str]]()
    for length in range(8, 80):
        context = texts[0][:length].rstrip()
        ids = tokenizer.encode(context)
        for rank, token in enumerate(decoder.prefill([[0, *ids]])[0].argsort()[:-3:-1].tolist()):
            text = tokenizer.decode([token])
            if text and tokenizer.encode(context + text) == [*ids, token]:
                found.append((rank, context, text))
    assert {rank for rank, *_ in found} == {0, 1}
    scores = harness.loglikelihood([request(context, text) for _, context, text in found])
    assert [likeliest for _, likeliest in scores] == [rank == 0 for rank, *_ in found]
    assert not any(likeliest for _, likeliest in harness.loglikelihood([request(*found[0][1:], task="choices")]))


def test_generated_text_ends_at_a_stop(checkpoint: Path) -> None:
    decoder = open_decoder(checkpoint)
    tokenizer = load_tokenizer(checkpoint, decoder.config)
    harness = HarnessModel(decoder, tokenizer, (), False)
    begin = [tokenizer.begin_id, *tokenizer.encode("The match")]
    text = tokenizer.decode(list(generate(decoder, begin, 6, Sampling(temperature=0), decoder.config.stop_token_ids)))
    given = [{"max_gen_toks": 6}, {"max_gen_toks": 6, "until": [text[2:4]]}]
    found = harness.generate_until([request("The match", each) for each in given])
    assert found == [text, text[: text.find(text[2:4])]]
    drawn = {"max_gen_toks": 6, "do_sample": True, "temperature": 5.0}
    assert len(set(harness.generate_until([request("The match", drawn)] * 3))) == 3  # as repeats of a task


def test_requests_in_the_chat_template_begin_once(checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "chat"
    shutil.copytree(checkpoint, directory)
    template = "<|begin|>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    decoder = open_decoder(directory)
    tokenizer = load_tokenizer(directory, decoder.config)
    harness, rows = HarnessModel(decoder, tokenizer, (), True), list[list[int]]()
    decoder.score = lambda given: rows.extend(given) or [torch.zeros(len(row) - 1).numpy() for row in given]  # type: ignore[method-assign]
    context = harness.apply_chat_template([{"role": "user", "content": "Who won?"}])
    harness.loglikelihood([request(context, " Vestnes")])
    assert rows[0][0] == 0 and rows[0].count(0) == 1


def test_eval_prints_tasks_and_refuses_unknown_ones(
    checkpoint: Path, task: Path, cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "git").write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n", encoding="utf-8")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    result, err = cli.says("eval", checkpoint, "--tasks", task, "--set", "task_documents=5")
    assert result["tasks"]["my_questions"]["documents"] == 5 and "it/s" not in err, err
    assert not (tmp_path / "called").exists(), "git complains outside a repository"
    task.with_name("questions.jsonl").write_text("", encoding="utf-8")
    assert re.search(r"error: --tasks .*task\.yaml: cannot be loaded \(\w", cli("eval", checkpoint, "--tasks", task)[2])
    task.write_text("group: all\ntask:\n- a\n- b\n", encoding="utf-8")
    cli.refuses(2, "task.yaml: is a group, which the harness loads by name; give", "eval", checkpoint, "--tasks", task)
    cli.refuses(2, "--tasks no-such.yaml: cannot be loaded", "eval", checkpoint, "--tasks", "no-such.yaml")


def test_bench_compares_with_the_teacher(exported_int4: Path, checkpoint: Path, task: Path) -> None:
    found = task_quality(Model(exported_int4, USUAL, 1), Model(checkpoint, USUAL, 1), [str(task)], {})
    own, teacher = (found[key]["my_questions"]["value"] for key in ("tasks", "teacher_tasks"))
    assert (own, teacher) == (accuracy_of(exported_int4, task), accuracy_of(checkpoint, task))
    assert found["accuracy_loss_points"] == pytest.approx(100 * (teacher - own))
    low, high = found["accuracy_interval_points"]
    assert low <= found["accuracy_loss_points"] <= high and json.loads(json.dumps(found)) == found
