"""The Python API: `import sportsllm`."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sportsllm
from sportsllm.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


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
    with pytest.raises(UsageError, match="--top-p is 3"):
        next(model.generate("They", top_p=3))


def test_commands_are_functions_with_typed_results_that_take_strings_as_paths() -> None:
    assert set(sportsllm.__all__) <= set(dir(sportsllm))
    for name in sportsllm.__all__:
        assert callable(getattr(sportsllm, name)), name
    signature = inspect.signature(sportsllm.train)
    assert signature.parameters["tokens"].annotation == int | None
    assert "tokens: Tokens to train on" in str(sportsllm.train.__doc__)
    with pytest.raises(UsageError, match="'10x' is not a positive whole number"):
        sportsllm.train(model="tiny-300k", tokens="10x")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        sportsllm.trian  # noqa: B018


def test_importing_and_looking_up_functions_loads_no_torch() -> None:
    code = "import sys, sportsllm\nfor name in sportsllm.__all__: getattr(sportsllm, name)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
