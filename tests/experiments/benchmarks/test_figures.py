"""The arithmetic of benchmarks, which decides published numbers."""

import dataclasses
import functools
import gzip
import json
import pathlib
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from experiments.benchmarks import (
    agent_sessions,
    decode_steps,
    kernels,
    kernels_training,
    serving,
    shapes,
    throughput,
    timing,
    traces,
    training,
    vllm_peer,
)
from experiments.benchmarks.serving import Answer
from experiments.reproduction.pictures import PICTURES
from pallas_kernels.training.cases import TrainingCase
from tests.serving.support import serving as a_server
from tests.support.tree import ROOT

# -- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", get_args(shapes.Shape))
def test_shapes_are_valid_configs(name):
    assert shapes.config_of(name).num_layers == shapes.SHAPES[name]["num_hidden_layers"]


# -- decode steps ----------------------------------------------------------------------------------


def test_roofline_is_of_the_device_that_reads_most(monkeypatch):
    model = shapes.model_of("tiny", jnp.float32, dms_jax.make_mesh(model=2))
    sizes = dict(shapes=("tiny",), batch=2, context=192, window=16, chunk=4, dtype="float32")
    config = decode_steps.Config(**sizes, ratios=(4,), model_parallel=(2,))
    lengths = np.ones((2, 2, 2), int) * [64, 16]
    monkeypatch.setattr(decode_steps, "row_lengths", lambda *_: lengths)
    monkeypatch.setattr(decode_steps, "time_runner", lambda *_: (1e-3, 1000.0, None))
    figures = decode_steps.time_paged(config, model, 4, 1e9)
    assert figures["read_cache_bytes_a_device"] == 0.8 * 1000 * 2 * 16 * 4


def test_device_groups_have_their_own_sequences(monkeypatch):
    """Four devices in two pairs that share heads: `batch` sequences for each pair."""
    model = shapes.model_of("tiny", jnp.float32, dms_jax.make_mesh(2, 2))
    sizes = dict(shapes=("tiny",), batch=3, context=192, window=16, chunk=4, dtype="float32")
    config = decode_steps.Config(**sizes, ratios=(1,), model_parallel=(2,), data_parallel=(2,))
    rows = decode_steps.row_lengths(config, model, 1)
    assert rows.shape == (2, 6, 2)
    rows = np.arange(rows.size).reshape(rows.shape)
    quarters = [rows[:, :3, :1], rows[:, :3, 1:], rows[:, 3:, :1], rows[:, 3:, 1:]]
    assert decode_steps.by_device(rows, model).tolist() == [each.sum() for each in quarters]
    monkeypatch.setattr(decode_steps, "time_runner", lambda *_: (0.5, 1000.0, None))
    figures = decode_steps.time_paged(config, model, 1, 1e9)
    assert figures["tokens_per_second"] == 12
    assert figures["read_cache_bytes_a_device"] == 1000 / 4 * 2 * 16 * 4


def test_roofline_counts_only_the_experts_read():
    """One token reads 2 of 8 experts of 3 x 64 x 64 numbers in each of two layers."""
    model = shapes.model_of("tiny-experts", jnp.float32)
    one, many = (
        decode_steps.roofline(model, batch, 0.0, 1e9, 1.0)["weight_bytes_a_device"]
        for batch in (1, 10**6)
    )
    assert many - one == 2 * 6 * 3 * 64 * 64 * 4


def test_rows_of_sliding_layers_hold_their_window():
    model = shapes.model_of("tiny-windows", jnp.float32)
    sizes = dict(shapes=("tiny-windows",), batch=2, context=256, window=16, ratios=(4,))
    lengths = decode_steps.row_lengths(decode_steps.Config(**sizes), model, 4)
    sliding = np.array(model.config.windowed)
    assert (lengths[sliding] == 32).all()
    assert lengths[~sliding].mean() == pytest.approx(64, abs=1)


def test_ratio_that_keeps_less_than_the_window_is_refused():
    assert decode_steps.Config(context=1032, ratios=(1, 8)).context == 1032
    says = "A ratio of 8 leaves 128.875 of 1031 tokens, and a window of 128 keeps 129"
    with pytest.raises(dms_jax.ConfigError, match=says):
        decode_steps.Config(context=1031, ratios=(1, 8))
    with pytest.raises(dms_jax.ConfigError, match="A ratio of 8 leaves"):
        throughput.Config(contexts=(8192, 1031))


def test_spreads_of_live_tokens_have_the_same_total():
    model = shapes.model_of("tiny", jnp.float32)
    config = decode_steps.Config(shapes=("tiny",), context=2048, window=32, batch=3, ratios=(4,))
    rows = {
        spread: decode_steps.row_lengths(config, model, 4, spread)
        for spread in ("uneven", "even", "few")
    }
    assert len({int(each.sum()) for each in rows.values()}) == 1
    assert abs(np.mean(rows["even"]) - 2048 / 4) < 2
    assert np.ptp(rows["even"]) <= 1
    assert rows["few"].max() > 0.9 * 2048
    assert (rows["few"] == 33).mean() >= 0.5


def test_largest_batch_fills_the_memory(monkeypatch):
    config = throughput.Config(shape="tiny", dtype="float32", memory=1.0)
    model = shapes.model_of("tiny", jnp.float32)
    # 2 layers, 2 KV heads, 16 numbers: a page of 64 tokens is 2 * 64 * 16 * 4 = 8,192 bytes, and
    # 100 tokens take 3 pages of each of the 4 rows: 98,304 bytes.
    weights = decode_steps.device_bytes(model.transformer)
    monkeypatch.setattr(decode_steps, "device_memory", lambda: weights + 5 * 98_304 + 1)
    assert throughput.largest(config, model, 100) == 5
    assert throughput.largest(dataclasses.replace(config, most=3), model, 100) == 3


def test_drawn_eviction_leaves_the_ratio():
    assert decode_steps.policy_of(1000, 128, 1) == dms_jax.Vanilla()
    evicting = decode_steps.policy_of(8192, 128, 8)
    assert isinstance(evicting, dms_jax.RandomEviction)
    kept = evicting.window + 1 + (1 - evicting.rate) * (8192 - evicting.window - 1)
    assert kept == pytest.approx(1024)


# -- answers of a server -------------------------------------------------------------------------


def test_figures_of_answers():
    answers = [
        Answer(parts=[0.1, 0.2, 0.4], seconds=0.5, tokens=4, peak=10.0),  # 0.3 s over 3 tokens
        Answer(parts=[0.3, 0.7], seconds=0.8, tokens=3, peak=20.0),  # 0.4 s over 2
        Answer(parts=[0.2], seconds=0.2, tokens=1, peak=30.0),
        Answer(seconds=0.1, error="429: full"),
    ]
    found = serving.figures(answers, 2.0)
    assert (found["requests"], found["failed"], found["errors"]) == (4, 1, ["429: full"])
    assert (found["tokens"], found["tokens_per_second"]) == (8, 4.0)
    assert found["requests_per_second"] == 1.5
    assert found["first_part_ms"]["median"] == pytest.approx(200)
    assert found["a_token_ms"]["median"] == pytest.approx(150)
    assert found["longest_pause_ms"]["median"] == pytest.approx(300)  # of 200 and 400
    assert found["longest_pause_ms"]["most"] == pytest.approx(400)
    assert found["longest_pause_tokens"]["median"] == pytest.approx(2)  # of 100 ms; of 200
    assert found["whole_ms"]["median"] == pytest.approx(500)
    assert found["peak_tokens"] == 20.0
    line = serving.describe({"clients": 2} | found)
    assert "4 tokens/s, first text after 200.0 ms" in line
    assert line.endswith("1 not answered: 429: full")


def test_failed_answers_have_no_percentiles():
    found = serving.figures([Answer(error="gone")], 1.0)
    assert (found["first_part_ms"], found["a_token_ms"], found["peak_tokens"]) == (None,) * 3
    assert "1 not answered: gone" in serving.describe({"clients": 1} | found)


@pytest.mark.nightly
def test_loads_of_a_running_server_repeat_no_prompt(tmp_path):
    out = tmp_path / "serving.json"
    with a_server() as client:
        address = f"http://127.0.0.1:{client.port}"
        sizes = dict(clients=(1, 6), requests=6, prompts=(3, 9), answers=(2, 12))
        config = serving.Config(**sizes, url=address, out=out)
        assert serving.main(config) == 0
    report = json.loads(out.read_text())
    loads = [serving.make_requests(config, "stories", load) for load in range(3)]
    prompts = [tuple(body["prompt"]) for bodies in loads for body in bodies]
    assert len(set(prompts)) == len(prompts)
    assert [row["clients"] for row in report["loads"]] == [1, 6]
    for row, bodies in zip(report["loads"], loads[1:], strict=True):
        wanted = sum(body["max_tokens"] for body in bodies)  # the model has no end tokens
        assert (row["requests"], row["failed"], row["errors"]) == (6, 0, [])
        assert row["tokens"] == wanted
        assert row["tokens_per_second"] == pytest.approx(wanted / row["seconds"])
        assert 0 < row["first_part_ms"]["median"] <= row["whole_ms"]["median"]
        assert 3 < row["peak_tokens"] <= 24  # TOVA's budget
    assert report["device"] is None


# -- agent sessions --------------------------------------------------------------------------------


def test_session_prompts_have_the_recorded_lengths():
    config = agent_sessions.Config(url="", sessions=2)
    recorded = json.loads(agent_sessions.RECORDING.read_text())
    lengths = agent_sessions.Lengths.read(config)
    prompts, found = agent_sessions.Prompts(config, lengths), []
    for number, turn in enumerate(lengths.turns):
        if number:
            prompts.grow([[0] * lengths.turns[number - 1].answer] * 2, turn.more)
        found.append(len(prompts.now[0]))
    assert found == recorded["prompts"]
    assert (len(found), found[-1]) == (30, 16_595)
    assert lengths.total == found[-1] + recorded["answers"][-1]
    one, other = prompts.now
    assert one[: lengths.shared] == other[: lengths.shared]
    assert one[lengths.shared : lengths.shared + 99] != other[lengths.shared : lengths.shared + 99]


# -- traces of a profiler, and kernels -------------------------------------------------------------


def event(name, ts, dur, module="jit_decode", pid=1):
    return dict(ph="X", pid=pid, name=name, ts=ts, dur=dur, args={"hlo_module": module})


def test_trace_counts_launches_and_busy_time(tmp_path):
    """Two steps of two layers: two kernels a layer, one of them overlapping, and one a step."""
    events = [event("loop_add_fusion", 0, 50, module="jit_clear")]
    for step in range(2):
        for layer in range(2):
            start = 100 + 100 * step + 30 * layer
            events.append(event(f"loop_add_fusion_{layer}", start, 10))
            events.append(event("nvjet_tst_64x40_64x16_2x4_h", start + 5, 15))
        events.append(event("argmax", 190 + 100 * step, 10))
    events.append(event("python", 0, 1000, pid=2))
    processes = {1: "/device:GPU:0", 2: "/host:CPU"}
    names = [
        dict(ph="M", pid=pid, name="process_name", args={"name": name})
        for pid, name in processes.items()
    ]
    with gzip.open(tmp_path / "vm.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events[::-1] + names}, file)
    trace = traces.Trace(traces.read(tmp_path))
    assert len(trace.kernels) == 11
    kernels = trace.of("decode")
    figures = traces.summarise(kernels, runs=2)
    assert figures["launches"] == 5
    assert figures["busy_ms"] == 0.05  # 20 a layer and 10 at the end, of 100
    assert figures["busy_share"] == 0.5
    assert figures["families"] == [
        dict(name="argmax", launches=1, us=10, wait_us=40),
        dict(name="loop_add_fusion", launches=2, us=20, wait_us=10),
        dict(name="nvjet_tst_h", launches=2, us=30, wait_us=0),
    ]
    assert figures["in_order"][0] == ("loop_add_fusion_0", 10, 0)
    assert list(trace.programs()) == ["decode", "clear"]


def test_kernels_are_grouped_by_family(monkeypatch):
    events = [
        (0.0, 900.0, "ncclDevKernel_AllGather_RING_LL"),
        (1.0, 2000.0, "nvjet_tst_128x256"),
        (2.0, 500.0, "retrofit_forward"),
        (3.0, 3000.0, "nvjet_tst_128x256"),
    ]
    monkeypatch.setattr(training, "events_by_device", lambda run: [events, events])
    found = training.kernels_of(None)
    assert found["families"]["products"] == {"ms": 5.0, "launches": 2}
    assert found["families"]["attention"] == {"ms": 0.5, "launches": 1}
    assert next(iter(found["longest_ms"])) == "nvjet_tst_128x256"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["prefill", "training"])
def test_implementation_is_checked_against_the_reference(monkeypatch, name):
    """XLA's implementation stands for a kernel, and differs only by bfloat16 rounding."""
    if name == "prefill":
        monkeypatch.setattr(kernels_training, "HEADS", 2)
        monkeypatch.setattr(kernels_training, "KV_HEADS", 1)
        check = functools.partial(kernels_training.check_chunk, np.random.default_rng(3), 4)
        errors = {"output": check("xla")}
    else:
        case = TrainingCase("small", 1, 96, 2, 1, 64, 20)
        check = functools.partial(kernels_training.check, case, jax.random.key(3))
        errors = check("xla")
        assert errors.pop("same_bits_twice")
    assert all(1e-5 < error < 1e-2 for error in errors.values()), errors
    with pytest.raises(NotImplementedError, match=r"only mosaic_mma \(cuda\) may serve"):
        check("mosaic_mma")


def test_kernel_times_are_those_of_all_launches():
    rounds = [[("a", 1.0), ("b", 2.0), ("a", 3.0)], [("a", 5.0), ("b", 4.0), ("a", 7.0)]]
    assert timing.kernel_medians(rounds) == {"a": 4.0, "b": 3.0}
    assert [kernels_training.total(each) for each in rounds] == [6.0, 16.0]


@pytest.mark.nightly
def test_published_pictures_show_their_records(tmp_path):
    """What is drawn today is what is published; text may be smoothed differently elsewhere."""
    from matplotlib import image

    results = ROOT / "experiments" / "results"
    kernels.main(kernels.Config(picture=results / "kernels", out=tmp_path))
    decode_steps.main(
        decode_steps.Config(picture=results / "speed", out=tmp_path / "decode_steps.json")
    )
    for name, draw in PICTURES.items():
        draw(tmp_path / pathlib.Path(name).name)
    published = [*results.glob("kernels/*.png"), results / "speed" / "decode_steps.png"]
    for path in [*published, *(results / name for name in PICTURES)]:
        shown, drawn = image.imread(path), image.imread(tmp_path / path.name)
        assert shown.shape == drawn.shape, path
        assert np.abs(shown - drawn).mean() < 0.01, path


def test_pictures_need_records(tmp_path):
    with pytest.raises(dms_jax.ConfigError, match=r"there is no decode\.json"):
        kernels.main(kernels.Config(picture=tmp_path, out=tmp_path))


# -- beside vLLM -----------------------------------------------------------------------------------


def peer_config(tmp_path, **options):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 3001}')
    return vllm_peer.Config(model=tmp_path, shape="tiny", out=tmp_path / "peer.json", **options)


def test_peer_cache_holds_chats_and_prompts(tmp_path):
    config = peer_config(tmp_path, chats=(1, 8), prompts=((2, 600), (1, 3000)))
    found = vllm_peer.room(config)
    bytes_a_token = 2 * 4 * 2 * 16  # keys and values of 4 heads in 2 layers' bfloat16
    assert found == dict(cache=8 * (405 + 64) * bytes_a_token, longest=3001)
    longer = vllm_peer.room(dataclasses.replace(config, prompts=((2, 2000),)))
    assert longer == dict(cache=2 * (2000 + 64) * bytes_a_token, longest=2001 + 64)
    with pytest.raises(dms_jax.ConfigError, match="3,001 and its token exceed 3,001 positions"):
        vllm_peer.room(dataclasses.replace(config, prompts=((1, 3001),)))


def test_drawn_dms_evicts_to_the_ratio(tmp_path):
    policy = vllm_peer.drawn_dms(4.0, 2176)
    evicted = 1 / (1 + np.exp(policy.alpha_offset))  # of an adapter that says 0
    kept = (vllm_peer.WINDOW + 1) + (1 - evicted) * (2176 - vllm_peer.WINDOW - 1)
    assert kept == pytest.approx(2176 / 4)
    assert (policy.source, policy.decisions, policy.alpha_scale) == ("adapter", "bernoulli", 1.0)
    with pytest.raises(dms_jax.ConfigError, match="DMS keeps its window of 128 tokens"):
        peer_config(tmp_path, binding=(2, 100, 400))


def test_best_backend_has_the_least_time_over_all_loads(tmp_path):
    report = vllm_peer.Report(peer_config(tmp_path))
    assert report.best() == ()
    times = {"FLASH_ATTN": (1.0, 4.0), "FLASHINFER": (2.0, 1.5), "TRITON_ATTN": (0.1,)}
    for backend, each in times.items():
        for load, median in zip(("a", "b"), each, strict=False):
            report.add("plain", load, backend, backend=backend, median=median)
    report.add("plain", "b", "TRITON_ATTN", backend="TRITON_ATTN", error="it failed")
    report.add("binding", "a", "FLASH_ATTN", backend="FLASH_ATTN", median=0.01)
    assert report.best() == ("FLASHINFER",)
    assert len(json.loads((tmp_path / "peer.json").read_text())["rows"]) == 7
