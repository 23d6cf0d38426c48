"""What single heads keep: the verdicts on cases made by hand, and the whole script in small."""

import dataclasses
import json

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax.analysis import NEVER, OverTraining, Retention
from experiments.reproduction import heads
from experiments.reproduction import heads_verdicts as verdicts

N = NEVER


def found_of(gone, policy=None) -> Retention:
    gone = np.asarray(gone)
    batch = gone.shape[1]
    return Retention(
        policy=policy or dms_jax.RandomEviction(window=1),
        tokens=np.zeros((batch, gone.shape[-1]), int),
        prompt_lengths=np.zeros(batch, int),
        gone=gone,
        reads=None,
        num_query_heads=1,
    )


def holding(live: list[list[int]], length: int = 128) -> Retention:
    """Returns heads that hold the newest and the first tokens of two texts, `live` in all."""
    counts = np.array(live)[:, None, :, None] - 1
    positions = np.broadcast_to(np.arange(length), (len(live), 2, len(live[0]), length))
    return found_of(np.where(positions < counts, NEVER, np.maximum(positions + 1, counts)))


def test_depth_is_compared_by_rank():
    falling = holding([[100], [90], [50], [10]])
    chex.assert_trees_all_close(
        verdicts.layer_ratios(falling), np.array([[128 / n for n in (100, 90, 50, 10)]] * 2)
    )
    assert verdicts.depth_correlation(falling) == pytest.approx((1, 0))
    assert verdicts.deeper({"a": falling}).verdict == "holds"
    rising = holding([[10], [50], [90], [100]])
    assert verdicts.deeper({"a": falling, "b": rising}).verdict == "holds in part"
    assert verdicts.deeper({"b": rising}).verdict == "does not hold"


def test_the_last_layer_and_early_heads():
    found = holding([[100, 100], [2, 90], [20, 20], [10, 10], [40, 40]])
    assert verdicts.last_layer({"a": found}).numbers.endswith("a 0.25 times")
    assert verdicts.last_layer({"a": found}).verdict == "holds"
    assert "a 64.0 (of all heads 100% are no higher)" in verdicts.early_heads({"a": found}).numbers
    plain = holding([[100, 100], [90, 90], [20, 20], [10, 10]])
    assert verdicts.early_heads({"a": plain}).verdict == "does not hold"


def test_training_that_begins_with_the_deeper_layers():
    logs = np.log(np.array([[[1.0], [2.0]], [[2.0], [3.0]]]))
    course = OverTraining(np.array([1.5, 2.5]), np.array([1.4, 2.4]), np.exp(logs))
    found = verdicts.over_time({"a": course})
    assert found.verdict == "holds"
    assert "a 2.00 and 1.00 at 1.40, 3.00 and 2.00 at 2.40" in found.numbers


def test_growth_with_the_logarithm_of_the_length():
    line = np.linspace(1, 3, 100)
    assert verdicts.explained(line, 2 * line + 1) == pytest.approx(1)
    assert verdicts.explained(np.log(line), line) < 0.99
    fixed = holding([[32]], 512)  # a budget: the ratio is a line in the length
    assert verdicts.growth({"a": fixed}).verdict == "does not hold"


def test_decisions_by_position():
    everywhere = found_of(np.full((1, 2, 1, 200), NEVER))
    assert verdicts.position({"a": everywhere}).verdict == "holds"
    early = np.where(np.arange(200) < 60, np.arange(200) + 1, NEVER)
    found = verdicts.position({"a": found_of(np.broadcast_to(early, (1, 2, 1, 200)))})
    assert found.verdict == "does not hold"
    assert "a -88.2 ± 0.0 points" in found.numbers  # 60 of the first 68 tokens


def test_merged_parts_of_words():
    gone = np.array([[[[1, 2, N, N, 5, N], [N] * 6]] * 2])
    kinds = [["word", "word part", "word part", "word", "word", "word part"]] * 2
    found = verdicts.linguistic(found_of(gone, dms_jax.DMC()), kinds)
    assert found.verdict == "holds"
    assert "Layer 0 head 0 merges 100%" in found.numbers
    assert "and 0% of those that begin one" in found.numbers


@pytest.mark.nightly
@pytest.mark.usefixtures("optimized")
def test_the_script_writes_pictures_pages_and_verdicts(tmp_path, monkeypatch):
    """Checks everything but the training, for which two policies without any stand in."""

    def untrained(config, base):
        def models(policies):
            return [(x, dataclasses.replace(base, policy=policy)) for x, policy in policies]

        pooling = [(float(every), dms_jax.FixedPooling(every=every)) for every in (2, 3)]
        random = [(2.0, dms_jax.RandomEviction(window=16, rate=rate)) for rate in (0.5, 0.8)]
        return {"DMS": models(random), "DMC": models(pooling)}

    # Texts of one length, so that those of a model and a policy share their programs.
    length, held_out, novels = 98, heads.held_out, heads.novels
    monkeypatch.setattr(heads, "held_out", lambda *given: held_out(*given)[:, :length])
    monkeypatch.setattr(heads, "novels", lambda *given: novels(*given[:2], length))
    monkeypatch.setattr(heads, "retrofits", untrained)
    runs = tmp_path / "runs"
    out = tmp_path / "out"
    config = heads.Config(out=out, runs=runs, problems=2, length=length, needles=2, stories=2)
    results = heads.main(config)
    written = {path.name for path in out.iterdir()}
    pictures = {"ratios", "training", "length", "distance", "position", "kinds", "agreement"}
    assert {f"{name}.png" for name in pictures} < written
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    live = results["live_tokens"]
    for name in ("TOVA", "H2O", "StreamingLLM", "AdaKV"):
        assert live[name] == pytest.approx(live["DMS"], abs=8.5)  # SnapKV's kin cut every 16
    readme = (out / "README.md").read_text()
    assert all(f"]({name})" in readme for name in written if name.endswith((".png", ".html")))
    assert all(each["verdict"] in readme for each in results["verdicts"])
    for name in ("page.html", "stories.html"):
        assert "const data = {" in (out / name).read_text()

    recorded = []
    record = heads.retention

    def counted(model, tokens, **options):
        recorded.append(tokens.shape)
        return record(model, tokens, **options)

    monkeypatch.setattr(heads, "retention", counted)
    for what in ("draw", "write_page"):  # as they were a moment ago
        monkeypatch.setattr(heads, what, lambda *_: None)
    assert heads.main(config)["ratios"] == results["ratios"]
    assert recorded == [(2, length)] * 2  # only of the models that a run makes itself
