"""lm-evaluation-harness over HTTP: its `local-completions` scores questions as `eval --tasks` does."""

from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("lm_eval", reason="needs the extra tasks")
pytest.importorskip("tenacity", reason="needs lm-eval[api]")
pytest.importorskip("aiohttp", reason="needs lm-eval[api]")

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from sportsllm.inference.decoder import open_decoder
from sportsllm.inference.harness import run_tasks
from sportsllm.text.tokenizer import load_tokenizer
from tests.sportsllm.inference.test_harness import task  # noqa: F401
from tests.sportsllm.serving.test_server import served_by, start


def test_questions_are_scored_as_by_eval(exported_int4: Path, task: Path) -> None:  # noqa: F811
    decoder = open_decoder(exported_int4, threads=1)
    ((name, (score, values)),) = run_tasks(decoder, load_tokenizer(exported_int4, decoder.config), [str(task)]).items()
    model = start(exported_int4)
    with served_by(model) as client:
        harness = LocalCompletionsAPI(
            base_url=f"{client.base_url}/v1/completions", model=model.name, tokenizer_backend="huggingface",
            tokenizer=str(exported_int4), add_bos_token=True, num_concurrent=4,
        )  # fmt: skip
        manager = TaskManager(include_defaults=False)
        tasks = list(manager.load([str(task)])["tasks"].values())
        found = lm_eval.simple_evaluate(harness, tasks=tasks, bootstrap_iters=0, task_manager=manager)
    model.stop()
    assert found["results"][name]["acc_bytes,none"] == score.value
    assert [each["acc_bytes"] for each in found["samples"][name]] == values
