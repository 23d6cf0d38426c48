r"""Answer requests over HTTP as OpenAI's and Anthropic's APIs do, many at a time.

    dms-jax serve
    dms-jax serve --model path/to/model --policy TOVA --options budget=1024
    dms-jax serve --model nvidia/Qwen3-8B-DMS-8x --lanes 64 --memory-gb 40 \
        --host 0.0.0.0 --port 8000
    dms-jax serve --model path/to/model \
        --adapter math=runs/math --adapter code=runs/code

Any client of OpenAI's API talks to it at http://HOST:PORT/v1: chat and text completions and
responses, streamed or whole, with tools; clients of Anthropic's API at http://HOST:PORT. New
requests join the running ones. The sampling options are defaults for requests. /metrics is for
Prometheus, /health for process supervisors. Needs the extra `serve` (pip install 'dms-jax[serve]').

The `model` of a request names an adapter (--adapter NAME=DIRECTORY) or the base, which is the
default. Adapters share the base and one cache, and so one policy: the one they were trained for, or
--policy. Adapters trained for different policies need separate servers.

If others can reach the server, set a key: --api-key FILE or the variable DMS_JAX_API_KEY. The
server answers to localhost, to IP addresses and to --allowed-hosts. Web pages of other servers may
use it only if --allowed-origins lists them. There is no encryption; use a proxy for that.

Limits: a body is JSON of at most 16 MB, and a text has at most 32 characters per token of
--max-tokens. Leave slow clients and very many connections to a reverse proxy.
"""

import dataclasses
import os
import pathlib
import socket
import time
import warnings
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

import dms_jax
from dms_jax import compilation
from dms_jax.checkpoint.adapter import read_adapter
from dms_jax.checks import CountOnDevice, NotNegative, Range, Whole, check
from dms_jax.command_line.generating import Generating
from dms_jax.command_line.options import find_adapter, read_bytes, read_options, tell_if_short
from dms_jax.extras import import_extra
from dms_jax.generation.answers import template_text, with_shown_markers
from dms_jax.generation.call_formats import format_of
from dms_jax.serving import Service
from dms_jax.serving.access import Access, is_loopback, is_name, read_keys
from dms_jax.serving.rpc import ServedModel
from dms_jax.serving.server import Server, take_address

INTERRUPTED = "The server has ended."
SequenceTokens = Annotated[int, Range(2)]  # at least one of a prompt and one of its answer
Adapters = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]


@dataclasses.dataclass(frozen=True)
class Config(Generating):
    """Answer requests over HTTP as OpenAI's and Anthropic's APIs do, many at a time."""

    adapter: Adapters = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    """An adapter of the model: a directory, or one that ships; or name=directory, repeated for
    several adapters that requests choose by name. An adapter without a name is part of the
    model."""
    allow_adapter_changes: bool = False
    """Let clients load an adapter from another directory of this machine
    (POST /v1/load_lora_adapter with lora_name and lora_path)."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for all addresses of this machine."""
    port: int = 8000
    """Port to listen at; 0 takes a free one."""
    name: str | None = None
    """Name of the model in requests; by default the last part of --model."""
    tool_calls: (
        Literal["hermes", "qwen3-coder", "llama3", "mistral", "mistral-args", "harmony"] | None
    ) = None
    """Format of the model's tool calls; by default found from its chat template or its name."""
    lanes: int = 8
    """Most answers at a time."""
    max_tokens: int | None = None
    """Most tokens of a prompt and its answer; by default the model's positions."""
    max_waiting: int = 256
    """Most answers that wait for a lane; further requests get a 429 with Retry-After."""
    max_new_tokens: int = 1024
    """Longest answer of requests without a limit, if there is room."""
    chunk: int = 8
    """Decode steps between two polls, at which text is sent and requests join."""
    prefill_tokens: int = 8192
    """Most prompt tokens prefilled between two chunks of steps, which bounds the pause of an
    answer. With fewer, answers flow more evenly, and prompts wait longer while others decode."""
    prefix_cache: str | None = None
    """Host memory for prefixes of earlier prompts, in addition to free memory of the cache: bytes
    (500MB, 4GB), or off. By default 4GB, and off on several devices, which do not support it."""
    drain_seconds: float = 30.0
    """Seconds that running requests may take after a signal to stop."""
    api_key: str | None = None
    """File of API keys, one per line; the variable DMS_JAX_API_KEY may hold another. A request
    sends one of them (Authorization: Bearer KEY). Without keys, requests need none."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of the server besides localhost and IP addresses: example.org, *.example.org, or * for
    all."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages that may send requests and read the answers (CORS): https://example.org, or * for
    all."""

    @property
    def own_adapter(self) -> str | None:
        """Returns the adapter without a name."""
        own = [each for each in self.adapter if split_adapter(each)[0] is None]
        if len(own) > 1:
            raise dms_jax.ConfigError(
                f"--adapter: {' and '.join(own)} have no names, and the model has one adapter. "
                "Name the others: --adapter name=directory."
            )
        return own[0] if own else None


def main(config: Config) -> None:
    """Serves until a signal ends it."""
    # Imported here, so that --help does not need the extra.
    for module in ("prometheus_client", "starlette", "uvicorn"):
        import_extra(module, extra="serve", purpose="dms-jax serve")
    console = Console(highlight=False)
    seconds = check("--drain-seconds", config.drain_seconds, NotNegative)
    sampling = config.make_sampling()
    access = make_access(config)
    with take_address(config.host, config.port) as taken, Server(taken) as server:
        service = make_service(config, console)
        console.print("Reading or compiling the programs that requests can need ...")
        start = time.monotonic()
        with compilation.watched() as made:
            service.warm()
        console.print(f"{made} in {time.monotonic() - start:.0f} s.")
        service.start()
        try:
            service.smoke_test()
            served = ServedModel.of(
                service,
                name_of(config),
                sampling,
                config.seed,
                access=access,
                call_format=call_format_of(config, service.engine.model),
                changes_adapters=config.allow_adapter_changes,
            )
            host, port = taken.getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
            names = ", ".join(served.models)
            console.print(f"{names} with {served.policy} at {address}", soft_wrap=True)
            drained = server.serve(service, served, drain_seconds=seconds)
        finally:
            service.drain(0.0)  # its thread ends after at most one chunk
    console.print("All requests had ended." if drained else "Requests were cut off.")


def make_access(config: Config) -> Access:
    """Returns the access rules: keys, hosts and origins.

    Raises:
      ConfigError: a key cannot be read, or a name is malformed.
    """
    keys = read_keys(config.api_key, os.environ)
    # Allow the names of this machine and of the address.
    names = {name for name in (socket.gethostname(), config.host) if is_name(name)}
    if not keys and not is_loopback(config.host):
        warnings.warn(
            f"Anyone who reaches {config.host} can use this server: it has no API key. "
            "Set one: --api-key FILE.",
            stacklevel=2,
        )
    return Access(keys, (*config.allowed_hosts, *sorted(names)), config.allowed_origins)


def make_service(config: Config, console: Console) -> Service:
    """Returns a service of the model, not yet started; says so when it begins to load."""
    config.make_policy()  # first, so that its errors come before a long load
    read_options(config.template, "--template")
    find_adapter(config.own_adapter)
    adapters = find_adapters(config)
    policies = [read_adapter(place).policy for place in adapters.values()]
    mesh = config.make_mesh()
    prefixes = config.prefix_cache or ("4GB" if mesh is None else "off")
    if mesh is not None and read_bytes("--prefix-cache", prefixes) is not None:
        raise dms_jax.ConfigError("--prefix-cache: several devices keep no prefixes. Leave it out.")
    limits: dict[str, Any] = dict(
        num_lanes=check("--lanes", config.lanes, CountOnDevice),
        max_tokens=check("--max-tokens", config.max_tokens, SequenceTokens | None),
        max_waiting=check("--max-waiting", config.max_waiting, Whole),
        prefill_tokens=check("--prefill-tokens", config.prefill_tokens, CountOnDevice),
        prefix_cache=read_bytes("--prefix-cache", prefixes),
    )
    limits |= config.cache()
    for place in adapters.values():
        tell_if_short(place)
    console.print(f"Loading {config.model} ...", soft_wrap=True)
    model = config.load()
    model = with_shown_markers(model, call_format_of(config, model))
    declared = model
    if policies and model.policy == dms_jax.Vanilla():
        declared = dataclasses.replace(model, policy=policies[0])
    return Service(model, config.make_policy(declared), adapters=adapters, **limits)


def find_adapters(config: Config) -> dict[str, str | pathlib.Path]:
    """Returns the named adapters.

    Raises:
      ConfigError: a name is malformed, a duplicate, or the model's.
    """
    found: dict[str, str | pathlib.Path] = {}
    for given in config.adapter:
        name, place = split_adapter(given)
        if name is None:
            continue
        if name == name_of(config):
            raise dms_jax.ConfigError(
                f"--adapter {given}: {name!r} is the name of the model. Give the adapter another "
                "one, or the model (--name)."
            )
        if name in found:
            raise dms_jax.ConfigError(f"--adapter {given}: there are two adapters {name!r}.")
        beside = find_adapter(place)
        assert beside is not None
        found[name] = beside
    return found


def split_adapter(given: str) -> tuple[str | None, str]:
    """Returns the name and the directory of an adapter; the directory's name may contain "=".

    Raises:
      ConfigError: the name or the directory is empty.
    """
    name, separator, place = given.partition("=")
    if not separator or set(name) & set("/\\") or pathlib.Path(given).expanduser().is_dir():
        return None, given
    if not name or not place:
        raise dms_jax.ConfigError(f"--adapter takes a directory or name=directory, got {given!r}.")
    return name, place


def name_of(config: Config) -> str:
    """Returns the name of the model in requests."""
    return config.name or pathlib.PurePath(config.model).name


def call_format_of(config: Config, model: dms_jax.LanguageModel) -> str | None:
    """Returns the name of the model's format of tool calls; None if it is unknown."""
    if config.tool_calls is not None or model.tokenizer is None:
        return config.tool_calls
    return format_of(template_text(model.tokenizer.chat_template), name_of(config))
