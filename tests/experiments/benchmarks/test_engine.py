"""Times of whole calls: what is served, what is counted, and the limit beside it."""

import json

import pytest

import dms_jax
from experiments.benchmarks import engine as script


@pytest.mark.nightly
def test_a_first_call_and_whole_calls_are_timed(tmp_path):
    out = tmp_path / "engine.json"
    config = script.Config(
        shape="tiny",
        policies=("live",),
        live=12,
        lanes=2,
        requests=3,
        prompts=(5, 9),
        new_tokens=4,
        memory=1e6,
        chunk=4,
        runs=1,
        profile=True,
        dtype="float32",
        out=out,
    )
    script.main(config)
    results = json.loads(out.read_text())
    (policy,) = results["policies"]
    first, (run,) = policy["first_call"], policy["runs"]
    assert policy["profile"]["kernels"] == {}  # no GPU
    assert policy["profile"]["new_tokens"] <= 3 * 2 * config.chunk
    assert first["requests"] == 3
    assert first["new_tokens"] <= 3 * config.chunk
    assert first["programs"] > 3
    assert run["requests"] == 3
    assert 15 <= run["prompt_tokens"] <= 27
    assert run["tokens_per_second"] == run["new_tokens"] / run["seconds"]
    assert run["padded_prompt_tokens"] >= run["prompt_tokens"]
    assert run["launches"] - run["prompt_programs"] == run["lane_steps"] / (4 * config.lanes)
    assert run["lane_steps"] >= run["new_tokens"] - run["requests"]
    limit = run["limit"]
    parts = ("weights_seconds", "cache_seconds", "prefill_seconds")
    assert limit["seconds"] == pytest.approx(sum(limit[part] for part in parts))
    weights = 4 * (2 * (4 * 64 * 64 - 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64 + 512 * 64)
    # The output matrix is as large as the embedding, of which a step reads only a few rows.
    steps = run["new_tokens"] / 2
    assert limit["weights_seconds"] == pytest.approx(steps * weights / 4.8e12, rel=1e-3)
    rates, measured = results["measured_rates"], run["limit_measured"]
    assert measured["weights_seconds"] == pytest.approx(
        steps * weights / rates["bandwidth"], rel=1e-3
    )
    ratio = measured["prefill_seconds"] / limit["prefill_seconds"]
    assert ratio == pytest.approx(989e12 / rates["peak"], rel=1e-2)
    assert run["share_of_limit_measured"] == measured["seconds"] / run["seconds"]


@pytest.mark.nightly
def test_clients_have_one_request_each_at_a_time(tmp_path, monkeypatch):
    out, seen = tmp_path / "engine.json", []
    incoming = script.Clients.incoming

    def noted(self, wait):
        came = incoming(self, wait)
        seen.append((len(self._asked), len(came or ())))
        return came

    monkeypatch.setattr(script.Clients, "incoming", noted)
    sizes = dict(lanes=4, requests=7, clients=3, prompts=(5, 9), new_tokens=4, chunk=2, runs=1)
    script.main(script.Config(shape="tiny", dtype="float32", out=out, **sizes))
    (policy,) = json.loads(out.read_text())["policies"]
    assert policy["runs"][0]["requests"] == 7
    assert policy["runs"][0]["new_tokens"] > 7
    assert max(asked for asked, _ in seen) == 3
    # Those of the first call, for each lane one and another one, and those of the run.
    assert sum(came for _, came in seen) == 5 + 7


def test_every_size_is_at_least_one():
    assert not script.Config().profile
    with pytest.raises(dms_jax.ConfigError, match="lanes must be positive, got 0"):
        script.Config(lanes=0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(prompts=(0, 20)), r"prompts must be positive, got \(0, 20\)"),
        (dict(prompts=(190, 20)), "the shortest comes first"),
        (dict(policies=()), "policies: give at least one"),
        (dict(device="h2000"), "device 'h2000' is unknown; known are"),
        (dict(temperature=-1.0), "temperature must be a finite number of at least 0"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_a_model_is_made(options, says):
    with pytest.raises(dms_jax.ConfigError, match=says):
        script.Config(**options)
