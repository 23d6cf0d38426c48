"""`Access`: who may use a server, by API key, by requested host, and by web page.

A web page can make its visitor's browser send requests to any server that the browser reaches, also
on this machine. Three checks keep foreign pages out:

    Host            must be a name of the server. A page whose own name is rebound to this machine
                    ("DNS rebinding") sends that name.
    Origin          must be the server's own, or an allowed one. Browsers send it with every POST
                    from a page.
    Content-Type    must be JSON, which pages may not send to other servers without a preflight.

IP addresses are always allowed as hosts: nobody can rebind one.
"""

import dataclasses
import hmac
import ipaddress
import pathlib
import re
from collections.abc import Iterable, Mapping

from dms_jax.errors import ConfigError, plain
from dms_jax.serving.refusals import RefusalError

KEY_VARIABLE = "DMS_JAX_API_KEY"
OPEN = "/health"  # needs no key: process supervisors have none
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@\s]+)(?::\d*)?", re.IGNORECASE)
_PATTERN = re.compile(r"\*|(\*\.)?[^\[\]:/@*\s]+|\[?[0-9a-f:.]+\]?", re.IGNORECASE)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/*\s]+", re.IGNORECASE)
_KEY = re.compile(r"[!-~]+")


@dataclasses.dataclass(frozen=True)
class Access:
    """Who may use a server.

    Attributes:
      keys: API keys; a request must send one of them. Without keys, none is needed.
      hosts: names of the server besides localhost and IP addresses: example.org, *.example.org,
        or * for all.
      origins: web pages that may send requests and read the answers: https://example.org, or * for
        all.

    Raises:
      ConfigError: a host or an origin is malformed.
    """

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self):
        for host in self.hosts:
            if not _PATTERN.fullmatch(host):
                raise ConfigError(
                    f"--allowed-hosts: a host is a name like example.org, *.example.org, or *, "
                    f"got {plain(repr(host))}."
                )
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "--allowed-origins: an origin is like https://example.org, without a path, or "
                    f"*, got {plain(repr(origin))}."
                )

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises RefusalError if a request is not allowed.

        Args:
          path: its path.
          headers: its headers, by names in any case.
        """
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_own_host(host):
            raise RefusalError(
                f"This server does not answer under the name {plain(repr(host))}. To allow it, "
                "start the server with --allowed-hosts NAME.",
                status=403,
                code="host_not_allowed",
            )
        if origin is not None and not self._is_allowed_origin(origin, host):
            raise RefusalError(
                f"Web pages of {plain(repr(origin))} may not send requests to this server. To "
                "allow them, start it with --allowed-origins ORIGIN.",
                status=403,
                code="origin_not_allowed",
            )
        given = headers.get("authorization", "")
        given = f"Bearer {headers['x-api-key']}" if "x-api-key" in headers else given
        if self.keys and path != OPEN and not self._has_key(given):
            raise RefusalError(
                "This server needs an API key: send the header Authorization: Bearer KEY, or "
                "x-api-key: KEY.",
                status=401,
                code="invalid_api_key",
            )

    def _is_own_host(self, host: str) -> bool:
        if "*" in self.hosts:
            return True
        match = _HOST.fullmatch(host.strip())
        if match is None:
            return False
        name = _plain_name(match[1])
        return (
            _is_address(name)
            or name == "localhost"
            or name.endswith(".localhost")
            or any(_matches(name, _plain_name(each)) for each in self.hosts)
        )

    def _is_allowed_origin(self, origin: str, host: str | None) -> bool:
        origin = origin.strip().lower()
        if {origin, "*"} & {each.lower() for each in self.origins}:
            return True
        return host is not None and origin.partition("://")[2] == host.strip().lower()

    def _has_key(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        # Compares all keys, each in constant time, so the time reveals nothing about them.
        found = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self.keys]
        return scheme.lower() == "bearer" and any(found)


def read_keys(path: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the keys of a file, one per line, and that of the environment.

    Raises:
      ConfigError: the file cannot be read, or the file or the variable holds no valid key.
    """
    keys: list[str] = []
    if path is not None:
        try:
            text = pathlib.Path(path).expanduser().read_text("utf-8-sig")
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(
                f"--api-key needs a file with one key per line; this one cannot be read: {what}. "
                "A key itself has no place on a command line, where every user of the machine can "
                f"read it; the variable {KEY_VARIABLE} takes one."
            ) from error
        keys += _keys(text.splitlines(), "The file of --api-key")
    if KEY_VARIABLE in environment:
        keys += _keys([environment[KEY_VARIABLE]], f"The variable {KEY_VARIABLE}")
    return tuple(keys)


def _keys(lines: Iterable[str], where: str) -> list[str]:
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{where} is empty. Put a key into it, or leave it out.")
    if not all(_KEY.fullmatch(key) for key in keys):
        raise ConfigError(f"{where} holds a key with spaces, or with characters beyond ASCII.")
    return keys


def is_name(host: str) -> bool:
    """Whether a host is a name that `Access` takes, and no IP address."""
    return bool(_PATTERN.fullmatch(host)) and not _is_address(_plain_name(host))


def is_loopback(host: str) -> bool:
    """Whether a listening address can be reached from this machine only."""
    name = _plain_name(host)
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _plain_name(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _matches(name: str, pattern: str) -> bool:
    return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern
