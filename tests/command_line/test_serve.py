"""`dms-jax serve`: answers until a signal, shuts down in order, refuses wrong settings."""

import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
import time

import pytest
from rich.console import Console

import dms_jax
from dms_jax.command_line import main, serve
from dms_jax.command_line.options import read_bytes
from dms_jax.serving.server import Server, take_address

SHAPE = ["--lanes", "2", "--max-tokens", "64", "--page-size", "16", "--chunk", "4"]
POLICY = ["--policy", "TOVA", "--options", "budget=16"]


def free_port():
    with take_address("127.0.0.1", 0) as taken:
        return taken.getsockname()[1]


def ask(port, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST" if body else "GET", path, body and json.dumps(body))
    response = connection.getresponse()
    return response.status, json.loads(response.read())


@pytest.mark.usefixtures("fakes")
def test_server_answers_until_a_signal(stories, monkeypatch, capsys):
    monkeypatch.setattr(serve.Config, "load", lambda self: stories)
    port, found, begun = free_port(), {}, threading.Event()
    serve_it = Server.serve

    def told_and_not_begun(self, *given, **more):
        """A client that sees the address may connect at once; it waits and is not refused."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            found["early"] = capsys.readouterr().out
        begun.set()
        return serve_it(self, *given, **more)

    monkeypatch.setattr(Server, "serve", told_and_not_begun)

    def client():
        try:
            end = time.monotonic() + 120
            while time.monotonic() < end and found.get("health", (0,))[0] != 200:
                time.sleep(0.05)
                with contextlib.suppress(OSError):  # it does not listen yet
                    found["health"] = ask(port, "/health")
            body = {"prompt": "Once", "max_tokens": 6}
            found["answer"] = ask(port, "/v1/completions", body)
            found["default"] = ask(port, "/v1/completions", {"prompt": "Once"})
        finally:
            if begun.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=client)
    thread.start()
    drawn = ["--temperature", "0", "--max-new-tokens", "9"]
    assert main(["serve", "--port", str(port), *POLICY, *drawn, *SHAPE]) == 0
    thread.join(60)
    # Both may take a minute and are announced first.
    loads, waits, compiled = found["early"].splitlines()[:3]
    assert loads == "Loading stories260k ..."
    assert waits == "Reading or compiling the programs that requests can need ..."
    assert re.fullmatch(
        r"\d+ programs? (compiled|read)( and \d+ read)?( from the cache)? in \d+ s\.", compiled
    )
    assert found["health"] == (200, {"status": "ok"})
    assert found["answer"][1]["usage"]["completion_tokens"] == 6
    assert found["default"][1]["usage"]["completion_tokens"] == 9
    assert f"stories260k with TOVA at http://127.0.0.1:{port}/v1" in found["early"]
    assert capsys.readouterr().out == "All requests had ended.\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "256.0.0.1"], "--host 256.0.0.1 --port"),
        (["--lanes", "0"], "--lanes must be"),
        (["--max-tokens", "1"], "--max-tokens must be a whole number of at least 2"),
        (["--drain-seconds", "-1"], "--drain-seconds must be"),
        (["--temperature", "-1"], "temperature"),
        (["--adapter", "a=x", "--adapter", "a=y"], "--adapter a=y: there are two adapters 'a'."),
        (["--adapter", "stories260k=x"], "'stories260k' is the name of the model"),
        (["--adapter", "a="], "--adapter takes a directory or name=directory, got 'a='"),
        (
            ["--adapter", "a=/nowhere"],
            "directory /nowhere of an adapter; one holds dms_adapter.json",
        ),
        (
            ["--adapter", "a=smollm2-135m-instruct-dms"],
            "adapter 'a': the adapter in",  # was trained on another base
        ),
        (["--adapter", "x", "--adapter", "y"], "x and y have no names"),
        (["--template", "thinking"], "--template takes name=value"),
        (["--prefix-cache", "much"], "--prefix-cache takes bytes (500MB, 4GB) or off, got 'much'"),
        (["--data-shards", "0"], "--data-shards"),
        (["--data-shards", "2", "--prefix-cache", "1GB"], "several devices keep no prefixes"),
    ],
)
def test_wrong_settings_exit_2(options, said, stories, monkeypatch, capsys):
    monkeypatch.setattr(serve.Config, "load", lambda self: stories)
    assert main(["serve", "--port", str(free_port()), *options]) == 2
    loads, told = capsys.readouterr()
    assert said in told
    assert ("Loading" in loads) == ("the adapter in" in said)  # which must be compared with it
    errors = [line for line in told.splitlines() if not line.startswith("Warning: ")]
    assert len(errors) == 1


def test_adapter_is_named_or_merged(tmp_path, monkeypatch):
    (tmp_path / "run=3").mkdir()
    monkeypatch.chdir(tmp_path)
    for given, expected in (
        ("a=b", ("a", "b")),
        ("a=b=c", ("a", "b=c")),
        ("runs/a", (None, "runs/a")),
        ("./run=4", (None, "./run=4")),
        ("run=3", (None, "run=3")),  # it is there
        ("a=/x/run=3", ("a", "/x/run=3")),
    ):
        assert serve.split_adapter(given) == expected
    config = serve.Config(adapter=("a=x", "y", "b=z"))
    assert config.own_adapter == "y"
    assert serve.find_adapters(config) == {"a": "x", "b": "z"}
    with pytest.raises(dms_jax.ConfigError, match="y and w have no names"):
        dataclasses.replace(config, adapter=("y", "w")).own_adapter  # noqa: B018


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GB", 4e9), ("500mb", 5e8), ("1.5 G", 1.5e9), ("2000", 2000.0), ("0", 0.0), ("off", None)],
)
def test_byte_sizes_are_parsed_with_units(text, expected):
    assert read_bytes("--prefix-cache", text) == expected


def test_server_ends_if_http_died_while_compiling(stories, monkeypatch, capsys):
    servers, enter = [], Server.__enter__

    def kept(self):
        servers.append(self)
        return enter(self)

    def warm(self):
        servers[0]._process.kill()
        return 0

    monkeypatch.setattr(serve.Config, "load", lambda self: stories)
    monkeypatch.setattr(Server, "__enter__", kept)
    monkeypatch.setattr(serve.Service, "warm", warm)
    assert main(["serve", "--port", str(free_port()), *SHAPE]) == 1
    told = capsys.readouterr()
    assert "The process that answers HTTP has ended (status -9)" in told.err


def test_an_interrupt_before_serving_ends_the_engine(stories, monkeypatch):
    """Python aborts if it exits while the engine's thread computes."""
    services = []

    def interrupted(self):
        services.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(serve.Config, "load", lambda self: stories)
    monkeypatch.setattr(serve.Service, "warm", lambda self: 0)
    monkeypatch.setattr(serve.Service, "smoke_test", interrupted)
    assert main(["serve", "--port", str(free_port()), *SHAPE]) == 130
    assert not services[0].snapshot().alive


def test_missing_extra_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert main(["serve"]) == 2
    assert "pip install 'dms-jax[serve]'" in capsys.readouterr().err


def test_unusable_port_has_a_clear_error():
    with pytest.raises(dms_jax.ConfigError, match=r"--port 99999: .*0-65535\.$"):
        take_address("127.0.0.1", 99999)
    with take_address("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(dms_jax.ConfigError, match=rf"--port {port}: .*in use\. Another --port"):
            take_address("127.0.0.1", port)


@pytest.mark.nightly
def test_a_server_on_several_devices_answers():
    config = serve.Config(data_shards=2, model_shards=2, lanes=2, max_tokens=64, page_size=16)
    service = serve.make_service(config, Console())
    assert dict(service.engine.model.mesh.shape) == {"data": 2, "model": 2}
    service.warm()
    service.start()
    try:
        service.smoke_test()
    finally:
        service.drain(0.0)
