"""Many clients of a server: what they measure, against answers made by hand and a real server."""

import json

import pytest

import dms_jax
from experiments.benchmarks import serving as script
from tests.serving.support import LANES, serving

Answer = script.Answer


def test_figures_of_answers_made_by_hand():
    answers = [
        Answer(parts=[0.1, 0.2, 0.4], seconds=0.5, tokens=4, peak=10.0),  # 0.3 s over 3 tokens
        Answer(parts=[0.3, 0.7], seconds=0.8, tokens=3, peak=20.0),  # 0.4 s over 2
        Answer(parts=[0.2], seconds=0.2, tokens=1, peak=30.0),
        Answer(seconds=0.1, error="429: full"),
    ]
    found = script.figures(answers, 2.0)
    assert (found["requests"], found["failed"], found["errors"]) == (4, 1, ["429: full"])
    assert (found["tokens"], found["tokens_per_second"]) == (8, 4.0)
    assert found["requests_per_second"] == 1.5
    assert found["first_part_ms"]["median"] == pytest.approx(200)
    assert found["a_token_ms"]["median"] == pytest.approx(150)
    assert found["longest_pause_ms"]["median"] == pytest.approx(300)  # of 200 and 400
    assert found["whole_ms"]["median"] == pytest.approx(500)
    assert found["peak_tokens"] == 20.0
    line = script.describe({"clients": 2} | found)
    assert "4 tokens/s, first text after 200.0 ms" in line
    assert line.endswith("1 not answered: 429: full")


def test_without_an_answer_there_are_no_percentiles():
    found = script.figures([Answer(error="gone")], 1.0)
    assert (found["first_part_ms"], found["a_token_ms"], found["peak_tokens"]) == (None,) * 3
    assert "1 not answered: gone" in script.describe({"clients": 1} | found)


def small(out, **changes):
    sizes = dict(clients=(1, 6), requests=6, prompts=(3, 9), answers=(2, 12), out=out)
    return script.Config(**sizes | changes)


def test_every_eighth_prompt_is_long():
    sizes = dict(requests=17, prompts=(3, 9), answers=(2, 12))
    even, uneven = (
        [len(body["prompt"]) for body in script.make_requests(config, "stories")]
        for config in (script.Config(**sizes), script.Config(long=100, **sizes))
    )
    assert max(even) <= 9
    assert [place for place, length in enumerate(uneven) if length == 100] == [7, 15]
    assert max(length for length in uneven if length != 100) <= 9


def address_of(client):
    return f"http://127.0.0.1:{client.port}"


@pytest.mark.nightly
def test_every_load_asks_the_same_of_a_server_that_runs(tmp_path, capsys):
    out = tmp_path / "serving.json"
    with serving() as client:
        config = small(out, url=address_of(client))
        assert script.main(config) == 0
    report = json.loads(out.read_text())
    bodies = script.make_requests(config, "stories")
    wanted = sum(body["max_tokens"] for body in bodies)  # the model has no end tokens
    assert [row["clients"] for row in report["loads"]] == [1, 6]
    for row in report["loads"]:
        assert (row["requests"], row["failed"], row["errors"]) == (6, 0, [])
        assert row["tokens"] == wanted
        assert row["tokens_per_second"] == pytest.approx(wanted / row["seconds"])
        assert 0 < row["first_part_ms"]["median"] <= row["whole_ms"]["median"]
        assert 3 < row["peak_tokens"] <= 24  # TOVA's budget
    assert report["device"] is None
    assert capsys.readouterr().out.count("clients:") == 2


@pytest.mark.nightly
def test_questions_are_asked_as_chats_by_clients_in_processes(tmp_path):
    """As many questions as there are, and then the first again."""
    out, questions = tmp_path / "serving.json", tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": f"What is {number}?"}) for number in range(4)]
    questions.write_text("\n".join(lines) + "\n\n")
    with serving() as client:
        config = small(out, url=address_of(client), questions=questions, processes=2)
        assert script.main(config) == 0
    bodies = script.make_requests(config, "stories")
    asked = [body["messages"] for body in bodies]
    assert asked[0] == [{"role": "user", "content": "What is 0?"}]
    assert asked[4:] == asked[:2]
    wanted = sum(body["max_tokens"] for body in bodies)
    for row in json.loads(out.read_text())["loads"]:
        assert (row["requests"], row["failed"], row["tokens"]) == (6, 0, wanted)
        assert row["first_part_ms"]["median"] > 0


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", "no JSON\n"])
def test_questions_that_are_none_are_told_before_a_server_is_started(tmp_path, text):
    path = tmp_path / "questions.jsonl"
    path.write_text(text)
    with pytest.raises(dms_jax.ConfigError, match=r"--questions .*questions\.jsonl"):
        script.main(small(tmp_path / "x.json", server="--model nowhere", questions=path))


@pytest.mark.nightly
def test_what_is_refused_is_counted_and_ends_with_a_failure(tmp_path):
    out = tmp_path / "serving.json"
    with serving(max_waiting=0) as client:
        many = dict(clients=(3 * LANES,), requests=3 * LANES, answers=(60, 60))
        assert script.main(small(out, url=address_of(client), **many)) == 1
    (row,) = json.loads(out.read_text())["loads"]
    assert row["failed"] > 0
    assert all(error.startswith("429: ") for error in row["errors"])


@pytest.mark.nightly
def test_the_library_s_own_server_is_started_and_ended(tmp_path):
    out = tmp_path / "serving.json"
    # Of the programs of tests/command_line/test_serve.py, which are compiled once.
    shape = "--lanes 2 --max-tokens 64 --page-size 16 --chunk 4"
    options = f"{shape} --policy TOVA --options budget=16"
    config = small(out, server=options, clients=(2,), requests=3)
    assert script.main(config) == 0
    report = json.loads(out.read_text())
    assert report["config"]["server"] == options
    (row,) = report["loads"]
    assert row["failed"] == 0
    assert row["peak_tokens"] <= 16


@pytest.mark.nightly
def test_a_server_that_does_not_start_is_told(tmp_path):
    with pytest.raises(dms_jax.ConfigError, match="--model nowhere has ended before it answered"):
        script.main(small(tmp_path / "x.json", server="--model nowhere"))


def test_nobody_at_the_address_is_told(tmp_path):
    with pytest.raises(dms_jax.ConfigError, match=r"--url http://127\.0\.0\.1:9: no model"):
        script.main(small(tmp_path / "x.json", url="http://127.0.0.1:9"))


def test_an_address_may_have_a_path_and_be_a_secure_one():
    connection, path = script.connect("https://example.org/models/")
    assert (type(connection).__name__, connection.host) == ("HTTPSConnection", "example.org")
    assert path == "/models"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(clients=(0,)), "--clients must be positive"),
        (dict(requests=0), "--requests must be positive, got 0"),
        (dict(url="localhost:8000"), "--url localhost:8000: it begins with http://"),
        (dict(long=-1), "--long must not be negative, got -1"),
        (dict(prompts=(9, 3)), "--prompts 9 3: the fewest come first"),
    ],
)
def test_wrong_sizes_are_refused(options, message):
    with pytest.raises(dms_jax.ConfigError, match=message):
        script.Config(**options)
