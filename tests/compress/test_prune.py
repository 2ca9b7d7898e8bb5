"""`prune` from a checkpoint directory to a new one: what is written, recovered, searched, resumed, refused."""

import dataclasses
import json
import shutil
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compress.distillation import student
from compress.distillation.student import StudentTraining
from compress.prune import PruneResult, prune
from compress.pruning import job as jobs
from compress.pruning.cut import loss_per_token
from compress.pruning.scores import SCORES_FILE, load_scores
from compress.pruning.search import brief_recovery, find_finalists
from compress.pruning.shapes import Shape
from sportsllm.errors import ArtifactError, ConflictError, InterruptedRun, UsageError
from sportsllm.formats.artifact import STATE_DIRECTORY, STATE_FILE
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import read_manifest
from sportsllm.formats.safetensors import INDEX, WEIGHTS
from sportsllm.models.config import Experts
from sportsllm.training.settings import TrainConfig
from tests.support.checkpoint_files import edit_json
from tests.support.disk import full_disk
from tests.support.models import saved, tiny_config, tiny_model
from tests.support.pretend_gpu import DEVICE, pretended_gpu
from tests.support.training import interrupted_in_step

STEPS = {"batch_size": 2, "accumulation": 1, "sequence": 64, "learning_rate": 1e-3}


class Pruning:
    """The verb on the tiny checkpoint, calibrated on four samples."""

    def __init__(self, checkpoint: Path, corpus: Path) -> None:
        self.checkpoint, self.corpus = checkpoint, corpus

    def __call__(self, out: Path, settings: dict[str, Any] | None = None, **given: Any) -> PruneResult:
        given = {"corpus" if "recover" in given else "calibration": [self.corpus]} | given
        return prune(self.checkpoint, out=out, settings={"samples": 4} | (settings or {}), **given)


@pytest.fixture
def run(checkpoint: Path, corpus_file: Path) -> Pruning:
    return Pruning(checkpoint, corpus_file)


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_the_result_is_an_ordinary_checkpoint_whose_scores_give_it_again(run: Pruning, tmp_path: Path) -> None:
    result = run(tmp_path / "out", intermediate=64, layers=1)
    ours = load_checkpoint(tmp_path / "out")
    assert result.parameters == ours.config.parameters and result.out == tmp_path / "out"
    settings = read_manifest(tmp_path / "out").settings
    assert {"intermediate": 64, "samples": 4}.items() <= settings.items()
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = torch.randint(0, 384, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.allclose(ours(tokens), peer(tokens).logits, atol=5e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "measure_scores", None)  # what is known is not measured
        run(tmp_path / "again", {"scores": tmp_path / "out"}, intermediate=64, layers=1)
    assert weights(tmp_path / "out") == weights(tmp_path / "again")
    with pytest.raises(ArtifactError, match="not scores of a model of this shape"):
        load_scores(tmp_path / "out", tiny_config(intermediate_size=64))


def test_another_kind_of_feed_forward_is_pruned_in_every_way(
    gelu: str, tokenizer_directory: Path, run: Pruning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neurons, hidden channels, heads and layers; refitted, recovered (calibrated on the corpus) and written."""
    run.checkpoint = tmp_path / "full"
    saved(run.checkpoint, tiny_model(mlp_kind=gelu), tokenizer_directory)
    shape = {"hidden": 48, "intermediate": 64, "heads": 2, "kv_heads": 1, "layers": 1}
    result = run(tmp_path / "out", STEPS | {"learning_rate": 3e-3}, recover=1920, **shape)
    made = load_checkpoint(tmp_path / "out")
    mlp = made.model.layers[0].mlp
    assert (made.config.mlp_kind, mlp.up_proj.weight.shape, mlp.up_proj.bias.shape) == (gelu, (64, 48), (64,))
    assert (result.valid_bits_per_byte or 9) < (result.bits_per_byte_before_recovery or 0)
    assert "model_type is sportsllm" not in capsys.readouterr().err  # it was before
    settings = read_manifest(tmp_path / "out").settings
    assert settings["calibration"] == settings["corpus"] == [str(run.corpus)]


def test_a_shape_that_the_family_lacks_is_said(
    tokenizer_directory: Path, run: Pruning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2's heads are as wide as its hidden size together."""
    gpt2 = {"norm_kind": "layer", "mlp_kind": "gelu", "position_kind": "learned", "num_key_value_heads": 4}
    biases = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
    run.checkpoint = tmp_path / "full"
    saved(run.checkpoint, tiny_model(**gpt2, **biases), tokenizer_directory)
    assert json.loads((run.checkpoint / "config.json").read_text(encoding="utf-8"))["model_type"] == "gpt2"
    run(tmp_path / "out", heads=2, kv_heads=2)
    assert "gpt2 has no such shape, so model_type is sportsllm" in capsys.readouterr().err.replace("\n", " ")
    assert 0.5 < run(tmp_path / "share", params=0.7).share_of_block_parameters <= 0.7
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "share")).__name__ == "GPT2LMHeadModel"


def test_quantized_input_and_empty_calibration_are_refused(
    run: Pruning, tokenizer_directory: Path, tmp_path: Path
) -> None:
    """So is a model whose states overflow."""
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match="no calibration text"):
        run(tmp_path / "out", layers=1, calibration=[tmp_path / "empty.txt"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ArtifactError, match="all of it is held out"):
        patch.setattr("compress.prune._cut", None)  # refused before it
        run(tmp_path / "out", STEPS, layers=1, recover=512, valid=[run.corpus])
    run.checkpoint = shutil.copytree(run.checkpoint, tmp_path / "quantized")
    edit_json(run.checkpoint / "config.json", quantization_config={"quant_method": "sportsllm-nbits"})
    for size in {"layers": 1}, {"vocab_size": 1024}:
        with pytest.raises(ArtifactError, match="is quantized; prune the unquantized"):
            prune(run.checkpoint, out=tmp_path / "out", **size)
    model = tiny_model()
    model.model.layers[1].post_attention_layernorm.weight.data.mul_(1e30)
    run.checkpoint = saved(tmp_path / "huge", model, tokenizer_directory)
    with pytest.raises(ArtifactError, match="its loss on the calibration text is nan"):
        run(tmp_path / "out", intermediate=64)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": 2}, r"nothing is cut, the model has that shape \(hidden 64, "),
        ({"params": 0.5, "search": "1k"}, "--search needs"),
        ({"layers": 1, "search": 0}, "--search needs"),
    ],
)
def test_options_that_do_not_go_together(run: Pruning, tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("large", [False, True])
def test_widths_are_cut_alike_without_a_search(
    large: bool, run: Pruning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If none is wanted, or the model is very large and not recovered."""
    if large:
        monkeypatch.setattr("compress.pruning.search._MOST_SEARCHED", 0)
    result = run(tmp_path / "out", params=0.6, search=None if large else 0)
    assert result.search == [] and result.shape["layers"] == load_config(run.checkpoint).num_hidden_layers
    assert 0.4 < result.share_of_block_parameters <= 0.6
    assert ("all widths are cut alike" in capsys.readouterr().err) == large


def test_a_file_size_is_met(
    run: Pruning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = load_config(run.checkpoint)
    assert full.has_large_vocabulary
    megabytes = (full.parameters - 0.3 * full.block_parameters) * 4 / 1e6
    result = run(tmp_path / "out", size_mb=megabytes)
    size = len(weights(tmp_path / "out")) - 8_000  # names and offsets
    assert 0.6 * megabytes * 1e6 < size < megabytes * 1e6
    said = capsys.readouterr().err
    share = 1 - full.block_parameters / full.parameters
    assert f"embedding and head are {share:.0%} of the parameters and stay whole" in said
    kept = result.share_of_block_parameters
    assert kept <= 0.7 and (kept > 0.686 or f"keeping {kept:.1%} of the non-embedding parameters, not 70.0%" in said)
    monkeypatch.setattr("compress.pruning.search.find_finalists", None)  # what is finished is not sought again
    assert run(tmp_path / "out", size_mb=megabytes) == dataclasses.replace(result, cached=True)


def test_a_search_leaves_finished_stages_behind(
    run: Pruning, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, given = STEPS | {"finalists": 2}, {"params": 0.51, "search": 128, "recover": 512}
    for name, value in {"_FAR": (1.0, 1.0), "_CLOSE": 9.0, "_LONGEST": 0.5}.items():  # two are recovered, twice
        monkeypatch.setattr(f"compress.pruning.search.{name}", value)
    cut, cuts = jobs.prune_model, list[tuple[Shape, bool]]()
    monkeypatch.setattr(jobs, "prune_model", lambda *of: cuts.append((Shape.of(of[2]), of[4])) or cut(*of))
    tried = (result := run(tmp_path / "out", settings, **given)).search
    assert len(cuts) == len(set(cuts)) > 2 + 2  # the finalists have the weights that they were ranked with
    assert len(tried) == 2 and capsys.readouterr().err.count("calibration on 4 samples") == 1
    assert tried[0]["bits_per_byte"] <= tried[1]["bits_per_byte"] and tried[0]["shape"] == result.shape
    assert tried[0]["shape"] != tried[1]["shape"] and (tmp_path / "out" / SCORES_FILE).exists()
    brief = [read_manifest(path.parent).results for path in (tmp_path / "out.search").rglob(WEIGHTS)]
    assert sorted(one["tokens"] for one in brief) == [128, 128, 256, 256] and tried[1]["tokens"] == 256
    assert all(one["valid_bits_per_byte"] is None for one in brief)
    assert result.valid_bits_per_byte and result.bits_per_byte_before_recovery
    assert (result.steps, result.tokens) == (4, 512)  # those of the search are not counted
    (tmp_path / "out").rename(tmp_path / "first")
    monkeypatch.setattr("compress.pruning.search.find_finalists", None)  # what was found is not sought again
    again = run(tmp_path / "out", settings, **given)
    assert again.search == tried
    assert "using the shape found there earlier" in capsys.readouterr().err
    assert weights(tmp_path / "first") == weights(tmp_path / "out")
    (tmp_path / "out.search").rename(tmp_path / "other.search")
    assert run(tmp_path / "out", settings, **given).cached
    for other in {"settings": settings | {"samples": 3}}, {"params": 0.8}, {"search": 256}:
        with pytest.raises(ConflictError, match="with other settings or inputs"):
            run(tmp_path / "out", **{"settings": settings, **given, **other})
    with pytest.raises(ConflictError, match=r"other\.search/h.* \(samples"):  # before it cuts anything
        run(tmp_path / "other", settings | {"samples": 3}, **given)
    finalist = next((tmp_path / "other.search").glob("h*")).name
    for unfinished in f"third.search/{finalist}.partial", "third.partial":
        (state := tmp_path / unfinished / STATE_DIRECTORY).mkdir(parents=True)
        (state / STATE_FILE).write_text('{"identity": "another run"}', encoding="utf-8")
        with pytest.raises((ConflictError, UsageError), match=f"{unfinished}.* with other settings"):
            run(tmp_path / "third", settings, **given)


def test_signals_are_made_for_the_whole_recovery_before_a_search(
    run: Pruning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.pruning.search._FAR", (9.0, 9.0))
    settings = STEPS | {"finalists": 2, "signals": tmp_path / "signals"}
    tried = run(tmp_path / "out", settings, params=0.51, recover=512).search
    assert [one["tokens"] for one in tried] == [128, 128]  # 5%, in whole steps
    assert json.loads((tmp_path / "signals" / "signals.json").read_text(encoding="utf-8"))["rows"] == 512 // 64


@pytest.mark.parametrize("kind", [{}, {"mlp_kind": "experts", "experts": Experts(4, 2), "tie_word_embeddings": False}])
def test_a_large_model_is_cut_layer_by_layer_to_the_same_bytes(
    kind: dict[str, Any], tokenizer_directory: Path, run: Pruning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(num_hidden_layers=3, intermediate_size=24, **kind)
    run.checkpoint = saved(tmp_path / "full", model, tokenizer_directory)
    tensors = load_file(str(run.checkpoint / WEIGHTS))
    shards = {f"{number}.safetensors": sorted(tensors)[number::2] for number in range(2)}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, str(run.checkpoint / file))
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (run.checkpoint / INDEX).write_text(json.dumps(index), encoding="utf-8")
    wanted: list[dict[str, Any]] = [{"hidden": 32, "kv_heads": 1, "layers": 2}]
    wanted += [{"experts": 3, "intermediate": 16}] * bool(kind)
    for place, given in enumerate(wanted):
        run(tmp_path / f"whole{place}", **given)
    monkeypatch.setattr(jobs, "_IN_MEMORY", 0)
    monkeypatch.setattr(jobs, "load_checkpoint", None)
    for place, given in enumerate(wanted):
        run(tmp_path / f"streamed{place}", **given)
        for name in (WEIGHTS, SCORES_FILE, "config.json"):
            whole, streamed = ((tmp_path / f"{way}{place}" / name).read_bytes() for way in ("whole", "streamed"))
            assert whole == streamed, (given, name)
    layer, before = next(name for name in tensors if ".2." in name), {path.name for path in tmp_path.iterdir()}
    save_file({layer: tensors[layer] * torch.nan}, str(run.checkpoint / "nan.safetensors"))
    index["weight_map"][layer] = "nan.safetensors"
    (run.checkpoint / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"nan\.safetensors: .* holds NaN"):
        run(tmp_path / "damaged", hidden=32)
    (run.checkpoint / "1.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"1\.safetensors is missing"):
        run(tmp_path / "damaged", hidden=32)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_everything_is_computed_on_one_processor(
    run: Pruning, tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory and layer by layer; a GPU's operators round in another order."""
    run.checkpoint = saved(tmp_path / "full", tiny_model(intermediate_size=24), tokenizer_directory)
    for place, limit in enumerate((1e9, 0)):
        monkeypatch.setattr(jobs, "_IN_MEMORY", limit)
        for name, device in (("cpu", torch.device("cpu")), ("gpu", DEVICE)):
            monkeypatch.setattr(jobs, "training_device", lambda quiet, device=device: device)
            with pretended_gpu():
                run(tmp_path / f"{name}{place}", {"samples": 2}, hidden=32, kv_heads=1, layers=1)
        # Directions may change sign, and a refit amplifies rounding (1e-7) by the ridge at most, a thousandfold.
        ours, theirs = (load_checkpoint(tmp_path / f"{name}{place}")(torch.arange(40)[None]) for name in ("gpu", "cpu"))
        assert (ours - theirs).norm() < 1e-3 * theirs.norm()


def test_a_full_disk_leaves_nothing(run: Pruning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_IN_MEMORY", 0)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        run(tmp_path / "out", hidden=32)
    assert not list(tmp_path.iterdir())


def test_a_nearly_full_disk_keeps_no_states(run: Pruning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_IN_MEMORY", 0)
    monkeypatch.setattr("compress.pruning.cut._RUN_SAMPLES", 2)
    cuts, usage = [], shutil.disk_usage(tmp_path)
    for free, kept in ((usage.free, 3), (4 * 2**17, 1), (0, 0)):  # a quarter, for 4 * 128 tokens of 64 channels
        monkeypatch.setattr("shutil.disk_usage", lambda _path, free=free: usage._replace(free=free))
        work = jobs.Calibration(jobs.PruneJob(run.checkpoint, [run.corpus], samples=4), tmp_path)
        cuts.append(work.cut(tiny_config(num_hidden_layers=1), work.samples, True).model.model.layers[0].read())
        assert len(work._known._ends) == kept
    assert all(map(torch.equal, *(cut.state_dict().values() for cut in cuts[::2])))


def test_shapes_are_refitted_only_to_choose_among_them(run: Pruning, monkeypatch: pytest.MonkeyPatch) -> None:
    work = jobs.Calibration(jobs.PruneJob(run.checkpoint, [run.corpus], samples=4))
    shapes = [Shape.of(tiny_config(intermediate_size=32)), Shape.of(tiny_config(num_hidden_layers=1))]
    every = find_finalists(work, shapes, [], 2)
    assert {one.shape for one in every} == {*shapes} and not any(one.loss_after_refit for one in every)
    assert every[0].loss_after_cut <= every[1].loss_after_cut
    (best,) = find_finalists(dataclasses.replace(work, job=dataclasses.replace(work.job, samples=1)), shapes, [], 1)
    assert best.loss_after_refit is not None
    # Time that ends among the refits leaves none out that must be there.
    clock, even = chain([0.0] * 3, repeat(9.0)), Shape.of(tiny_config(intermediate_size=64))
    monkeypatch.setattr("compress.pruning.search.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = find_finalists(work, shapes, [even], 2, seconds=1.0)
    assert even in [one.shape for one in found] and all(one.loss_after_refit for one in found)
    fitted = work.cut(found[0].shape.applied_to(tiny_config()), work.samples[1:], refit=True).model
    assert found[0].loss == loss_per_token(fitted, work.samples[:1])
    for far, loss in ((9.0, 0.0), found[0].loss), ((0.0, 9.0), min(one.loss_after_cut for one in (*every, *found))):
        monkeypatch.setattr("compress.pruning.search._FAR", far)
        assert [one.loss for one in find_finalists(work, shapes, [even], 2)] == [loss]
    three = [*shapes, Shape.of(tiny_config(hidden_size=32))]
    monkeypatch.setattr("compress.pruning.search._FAR", (9.0, 9.0))
    assert len(find_finalists(work, three, [], 3)) == 3
    for one in three:  # the worst too
        assert one in [each.shape for each in find_finalists(work, three, [one], 2)]


def test_a_brief_recovery_takes_small_steps_in_another_order() -> None:
    whole = StudentTraining(Path(), TrainConfig(100, 8, sequence=256, try_rates=True, validate_every=9), ())
    brief = brief_recovery(whole, 40_000).config
    assert (brief.steps, brief.batch_size, brief.accumulation, brief.warmup, brief.seed) == (40, 4, 1, 2, 1)
    assert not (brief.try_rates or brief.validate_every)


def test_a_resumed_recovery_repeats_nothing_and_ends_alike(
    run: Pruning, tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after two of four steps: calibration, scores, cut and the score before training are not redone.

    The layer that stays is the second, so that its type is not that of the first.
    """
    model = tiny_model(layer_types=("sliding", "full"), sliding_window=8)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    torch.nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    run.checkpoint = saved(tmp_path / "full", model, tokenizer_directory)
    given: dict[str, Any] = {"intermediate": 64, "layers": 1, "recover": 512, "resume": True}  # none yet: it starts
    whole = run(tmp_path / "whole", STEPS, **given)
    load, recover, full = jobs.load_checkpoint, student.recover, WeakSet[Any]()
    with monkeypatch.context() as patch, interrupted_in_step(2), pytest.raises(InterruptedRun):
        patch.setattr(jobs, "load_checkpoint", lambda path: full.add(model := load(path)) or model)
        patch.setattr(student, "recover", lambda *of: pytest.fail("the full model stays") if full else recover(*of))
        run(tmp_path / "out", STEPS, **given)
    monkeypatch.setattr(jobs.Calibration, "samples", property(lambda self: pytest.fail("calibrated again")))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):  # while the result is written
        patch.setattr("sportsllm.formats.checkpoint.save_checkpoint", lambda *_: 1 / 0)
        run(tmp_path / "out", STEPS, **given)
    result = run(tmp_path / "out", STEPS, **given)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert load_config(tmp_path / "out") == load_config(tmp_path / "whole")
    assert result.kept_layers == whole.kept_layers == [1] and result.layers_tried == whole.layers_tried
    assert result.bits_per_byte_before_recovery == whole.bits_per_byte_before_recovery
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("out", "whole")]
    assert names[0] == names[1] and "cut.json" not in names[0]
