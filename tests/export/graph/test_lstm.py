"""An LSTM's graph and its runtime: the states are inputs and outputs, and nothing grows with tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from export.graph.decoder import write_graph
from export.layout import GRAPH_FILE
from export.parity.check import check_parity
from export.runtime.decoder import OnnxDecoder
from tests.support.export_models import Export, Exports, draw, logits_of, pack_model, pieces_read, save, tiny_model
from tests.support.lstm_models import LSTM

TOLERANCE = 2e-5  # float32 in another order of additions, of logits near 1


@pytest.fixture(params=[False, True], ids=["own operators", "standard"])
def dense(request: pytest.FixtureRequest, exports: Exports) -> Export:
    return exports(operators="standard" if request.param else "onnx", **LSTM)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "fp16-weights"},
        {"bits": 8},
        {"bits": 4, "asymmetric": True, "tie_word_embeddings": False},
        {"operators": "standard"},
        {"mlp_kind": "gelu", "norm_kind": "layer"},
    ],
    ids=str,
)
def test_the_gate_finds_what_pytorch_computes(settings: dict[str, Any], exports: Exports) -> None:
    export = exports(**LSTM, **settings)
    assert export.report.failures() == []
    if settings.get("operators"):
        onnx.checker.check_model(str(export.directory / GRAPH_FILE), full_check=True)


def test_gates_in_unlike_formats_are_joined(tmp_path: Path) -> None:
    model = tiny_model(**LSTM, max_position_embeddings=320)
    record = pack_model(model, 4, bits_of=lambda name: 8 if name.endswith(("hf_proj", "i_proj")) else None)
    save(tmp_path, model, record)
    write_graph(tmp_path, tmp_path)
    assert check_parity(tmp_path, tmp_path, threads=1).failures() == []


def test_inputs_and_outputs_have_no_axis_of_tokens(dense: Export) -> None:
    session = onnxruntime.InferenceSession(str(dense.directory / GRAPH_FILE))
    pasts = {item.name: item.shape for item in session.get_inputs() if item.name.startswith("past")}
    names = [f"past_key_values.{layer}.{state}" for layer in range(2) for state in ("hidden", "cell")]
    assert pasts == {name: ["batch_size", 48] for name in names}
    presents = {item.name for item in session.get_outputs()} - {"logits"}
    assert presents == {name.replace("past_key_values", "present") for name in names}


def test_padding_leaves_the_states_alone(dense: Export) -> None:
    """A batch of unequal prompts in one run; in standard operators padded on the left too."""
    session = onnxruntime.InferenceSession(str(dense.directory / GRAPH_FILE))
    rows = draw(9, 4, 1)
    zeros = {item.name: np.zeros((3, 48), np.float32) for item in session.get_inputs() if item.name.startswith("past")}
    grows = session.get_modelmeta().custom_metadata_map["cache"] == "growing"
    for left in (False, True) if grows else (False,):
        ids, mask = np.full((3, 9), 5, np.int64), np.zeros((3, 9), np.int64)
        for row, tokens in enumerate(rows):
            place = slice(9 - len(tokens), 9) if left else slice(0, len(tokens))
            ids[row, place], mask[row, place] = tokens, 1
        names = [item.name for item in session.get_outputs() if item.name.startswith("present")]
        found = session.run(names, {"input_ids": ids, "attention_mask": mask, **zeros})
        for row, tokens in enumerate(rows):
            one = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
            alone = session.run(names, one | {name: array[:1] for name, array in zeros.items()})
            for together, state in zip(found, alone, strict=True):
                np.testing.assert_allclose(together[row], state[0], atol=TOLERANCE, rtol=0)


def test_a_state_goes_on_but_never_back(dense: Export) -> None:
    """Reuse skips what was read where a prompt goes on from all of it; any other starts from zeros."""
    decoder = OnnxDecoder(dense.directory, threads=1)
    first, second = draw(20, 11)
    decoder.prefill([first, second], max_length=60)
    decoder.step([1, 2])
    read = pieces_read(decoder)
    for _ in range(2):
        prompts = [[*first, 1, 7, 8], [*second[:5], 3, 4]]
        found = decoder.prefill(prompts, max_length=60, reuse=True)
        for row, prompt in enumerate(prompts):
            np.testing.assert_allclose(found[row], logits_of(dense.model, prompt)[-1], atol=TOLERANCE, rtol=0)
        first, second = [*prompts[0]][:-2], prompts[1]
    assert read == [2, 7, 24, 7]  # the second time both prompts part from what was read
