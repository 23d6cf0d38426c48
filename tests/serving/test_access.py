"""Access: hosts, web pages, content types, keys."""

import http.client
import json

import pytest

from dms_jax.command_line import main
from dms_jax.errors import ConfigError
from dms_jax.serving.access import Access, is_loopback, read_keys
from dms_jax.serving.refusals import RefusalError
from tests.serving.support import serving

NAMED = Access(hosts=("dms.example", "*.lab.example", "2001:db8::1"))


def status_of(access, path="/v1/models", **headers):
    try:
        access.check(path, {name.replace("_", "-"): value for name, value in headers.items()})
    except RefusalError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LocalHost.:8000", "a.localhost", "127.0.0.1:8000"),
        *("10.1.2.3", "[::1]:8000", "[2001:db8::2]", "dms.example", "DMS.example.:80"),
        *("gpu1.lab.example:8000", "a.b.lab.example"),
    ],
)
def test_own_hosts_are_allowed(host):
    assert status_of(NAMED, host=host) == 200
    assert status_of(NAMED, host=host, origin=f"http://{host}") == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("evillocalhost", "lab.example", "evillab.example", "xdms.example", "", ":8000"),
        *("127.0.0.1@evil.example", "evil.example:127.0.0.1", "[evil.example]", "localhost:80/"),
        *("2130706433", "0x7f.1", "evil.example localhost"),
    ],
)
def test_other_hosts_are_refused(host):
    assert status_of(NAMED, host=host) == 403
    assert status_of(Access(hosts=("*",)), host=host) == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("https://LOCALHOST:8000", 200),  # behind a proxy that has the certificate
        ("http://localhost:8001", 403),
        ("http://localhost", 403),
        ("http://evil.example", 403),
        ("http://localhost:8000.evil.example", 403),
        ("null", 403),
        ("", 403),
        ("https://chat.example", 200),
        ("https://Chat.example", 200),
        ("http://chat.example", 403),
    ],
)
def test_foreign_origins_are_refused(origin, status):
    access = Access(origins=("https://chat.example",))
    assert status_of(access, host="localhost:8000", origin=origin) == status
    assert status_of(Access(origins=("*",)), host="localhost:8000", origin=origin) == 200


def test_key_is_required_except_for_health():
    access = Access(keys=("one", "two"))
    for given, status in (
        ("Bearer one", 200),
        ("bearer  two ", 200),
        ("Bearer three", 401),
        ("Bearer on", 401),
        ("Bearer ", 401),
        ("one", 401),
        ("Basic one", 401),
        ("Bearer \xe9", 401),
    ):
        for path in ("/v1/models", "/v1/completions", "/metrics", "/healthy", "/"):
            assert status_of(access, path, authorization=given) == status, (given, path)
        assert status_of(access, "/health", authorization=given) == 200
    assert status_of(access) == 401
    assert status_of(access, "/health", host="evil.example") == 403
    for given, status in (("two", 200), ("three", 401)):  # in the header of Anthropic's clients
        assert status_of(access, x_api_key=given) == status


def test_keys_are_read_from_file_and_environment(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n two\n")
    assert read_keys(str(path), {}) == ("one", "two")
    assert read_keys(None, {"DMS_JAX_API_KEY": " three\n"}) == ("three",)
    assert read_keys(str(path), {"DMS_JAX_API_KEY": "three"}) == ("one", "two", "three")
    assert read_keys(None, {}) == ()


@pytest.mark.parametrize(
    ("content", "environment", "said"),
    [
        (None, {}, "has no place on a command line"),
        (b"", {}, "The file of --api-key is empty"),
        (b" \n\n", {}, "The file of --api-key is empty"),
        (b"\xff", {}, "it is not text"),
        (b"a b", {}, "a key with spaces"),
        ("ключ".encode(), {}, "beyond ASCII"),
        (b"a", {"DMS_JAX_API_KEY": ""}, "The variable DMS_JAX_API_KEY is empty"),
    ],
)
def test_invalid_key_file_is_refused(tmp_path, content, environment, said):
    path = tmp_path / "sk-secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        read_keys(str(path), environment)
    assert "sk-secret" not in str(error.value)  # it may be a key


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--api-key", "sk-1"], "--api-key needs a file"),
        (["--allowed-hosts", "http://a.example"], "--allowed-hosts: a host is a name"),
        (["--allowed-hosts", "a.*"], "--allowed-hosts: a host is a name"),
        (["--allowed-origins", "a.example"], "--allowed-origins: an origin is like"),
        (["--allowed-origins", "http://a.example/"], "without a path"),
    ],
)
def test_command_refuses_malformed_access_options(options, said, capsys):
    assert main(["serve", "--port", "0", *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_loopback_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "dms.example")))


@pytest.fixture(scope="module")
def guarded():
    """A client of a server with a key and an allowed web page."""
    with serving(access=Access(("secret",), origins=("https://chat.example",))) as made:
        yield made


def ask(client, method="POST", path="/v1/completions", body: bytes | None = b"{}", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response, response.read().decode()


ASKED = json.dumps({"prompt": "Once", "max_tokens": 2, "temperature": 0}).encode()
KEY = {"Authorization": "Bearer secret"}


@pytest.mark.usefixtures("fakes")
def test_requests_with_key_are_answered(guarded):
    kind = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert ask(guarded, body=ASKED, **KEY, **kind)[0].status == 200
    assert ask(guarded, body=ASKED, **KEY)[0].status == 200  # no type is named
    assert ask(guarded, "GET", "/health", None)[0].status == 200
    for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/nowhere")):
        response, text = ask(guarded, method, path)
        assert response.status == 401
        assert response.getheader("WWW-Authenticate") == "Bearer"
        error = json.loads(text)["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")


@pytest.mark.parametrize(
    "kind",
    [
        *("text/plain", "TEXT/PLAIN; charset=utf-8", "application/x-www-form-urlencoded"),
        *("multipart/form-data; boundary=a", "text/plain;application/json", "", "application/xml"),
    ],
)
def test_content_types_other_than_json_are_refused(client, kind):
    for path in ("/v1/completions", "/v1/chat/completions"):
        response, text = ask(client, path=path, body=ASKED, Content_Type=kind)
        assert response.status == 415
        assert "Content-Type: application/json" in json.loads(text)["error"]["message"]


def test_dns_rebinding_is_refused(client):
    for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/health")):
        response, text = ask(client, method, path, body=ASKED, Host="evil.example:8000")
        assert response.status == 403
        error = json.loads(text)["error"]
        assert error["code"] == "host_not_allowed"
        assert "'evil.example:8000'" in error["message"]
        assert "--allowed-hosts" in error["message"]
    response, text = ask(client, body=ASKED, Origin="http://evil.example")
    assert (response.status, json.loads(text)["error"]["code"]) == (403, "origin_not_allowed")
    response, _ = ask(client, "OPTIONS", body=None, Origin=f"http://127.0.0.1:{client.port}")
    assert response.status == 405
    assert response.getheader("Access-Control-Allow-Origin") is None


def test_allowed_origin_reads_answer(guarded):
    page = {"Origin": "https://chat.example"}
    response, _ = ask(guarded, "GET", "/v1/models", None, **page, **KEY)
    assert response.getheader("Access-Control-Allow-Origin") == "https://chat.example"
    wanted = {
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization, content-type",
    }
    response, _ = ask(guarded, "OPTIONS", body=None, **page, **wanted)
    assert response.status == 200
    assert response.getheader("Access-Control-Allow-Origin") == "https://chat.example"
    other = {"Origin": "https://evil.example"}
    response, _ = ask(guarded, "OPTIONS", body=None, **other, **wanted)
    assert (response.status, response.getheader("Access-Control-Allow-Origin")) == (400, None)
    response, _ = ask(guarded, "GET", "/v1/models", None, **other, **KEY)
    assert (response.status, response.getheader("Access-Control-Allow-Origin")) == (403, None)
