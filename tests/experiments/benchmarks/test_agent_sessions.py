"""Sessions against a server's address: tokens are counted by the server's usage."""

import contextlib
import http.server
import json
import pathlib
import threading

import pytest

import dms_jax
from experiments.benchmarks import agent_sessions


class Stub(http.server.BaseHTTPRequestHandler):
    """Streams answers like vLLM: first a part without text, then the texts of `parts`."""

    parts: tuple[str, ...] = ()
    usage = True
    asked: list[dict]

    def do_GET(self):
        self.answer("application/json", json.dumps({"data": [{"id": "stub"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        tokens = len(body["prompt"])
        events = [
            {"choices": [{"text": text, "finish_reason": None}]} for text in ("", *self.parts)
        ]
        usage = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}
        usage |= {"prompt_tokens_details": {"cached_tokens": tokens // 2}}
        events += [{"choices": [], "usage": usage}] if self.usage else []
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.answer("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]))

    def answer(self, kind: str, text: str):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def stub(**fields):
    """The address of such a server, and the bodies that it received."""
    handler = type("Handler", (Stub,), {"asked": [], **fields})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler.asked
        finally:
            server.shutdown()
            thread.join()


def config(url: str) -> agent_sessions.Config:
    return agent_sessions.Config(url=url, sessions=2, turns=3, shorten=100)


@pytest.mark.parametrize("parts", [(), ("a", "b")], ids=["no text", "text"])
def test_answers_without_text_count_as_tokens(parts):
    """Random weights write special tokens, whose text a server hides."""
    with stub(parts=parts) as (url, asked):
        turns = agent_sessions.ask_server(config(url))["turns"]
    assert len(asked) == 6
    assert all(body["ignore_eos"] for body in asked)
    assert [turn["cached"] for turn in turns] == pytest.approx([0.5] * 3, abs=0.01)
    assert all(0 < turn["median_seconds"] <= turn["longest_seconds"] for turn in turns)
    lengths = [turn["prompt"] for turn in turns]
    assert lengths == sorted({*lengths})
    assert {len(body["prompt"]) for body in asked} == {*lengths}


def test_prompts_of_a_text(tmp_path):
    """Sessions share the first tokens, and continue with different parts of the text."""
    model = pathlib.Path(dms_jax.__file__).parent / "assets" / "stories260k"
    (tmp_path / "b.py").write_text("once upon a time " * 4)
    (tmp_path / "a.py").write_text("".join(f"there was a dog number {n}. " for n in range(400)))
    one = agent_sessions.Config(
        url="", sessions=2, turns=2, shorten=100, text=tmp_path, tokenizer=model
    )
    lengths = agent_sessions.Lengths.read(one)
    first, second = agent_sessions.Prompts(one, lengths).now
    shared = lengths.shared
    assert first[:shared] == second[:shared]
    assert first[shared:] != second[shared:]
    (tmp_path / "a.py").unlink()
    with pytest.raises(dms_jax.ConfigError, match="--text"):
        agent_sessions.Prompts(one, lengths)


def test_answer_without_usage_is_refused():
    """An answer that ended early, or was not counted, would be timed as complete."""
    with (
        stub(parts=("a",), usage=False) as (url, _),
        pytest.raises(dms_jax.ConfigError, match="tokens"),
    ):
        agent_sessions.ask_server(config(url))
