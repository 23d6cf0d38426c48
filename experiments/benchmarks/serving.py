r"""Times a server with OpenAI's API as many concurrent clients see it.

Each client sends a streamed completion, and the next one when it has ended, until all requests of
the load are answered. Prompts are random token ids, new for every load, so that no prefix cache
helps; lengths of prompts and answers are uniform in ranges. With --questions the requests are chats
with the questions of a file; with --regex answers match a grammar. The server is `dms-jax serve` in
a separate process, with the given options; or, with --url, any other server.

    python -m experiments.benchmarks.serving
    python -m experiments.benchmarks.serving --clients 16 64 256 --requests 512 \
        --prompts 64 512 --answers 64 512 --vocabulary 151643 \
        --server="--model model.gguf --dtype bfloat16 --lanes 256 --max-tokens 1024"
    python -m experiments.benchmarks.serving --clients 256 --requests 4096 --processes 4 \
        --answers 200 200 --vocabulary 151000 --regex "(.|\n)*" --free-first \
        --server="--model model --dtype bfloat16 --lanes 256 --max-tokens 1024"
    python -m experiments.benchmarks.serving --clients 256 --requests 1024 --processes 4 \
        --questions gsm8k/train.jsonl --answers 400 400 \
        --server="--model model.gguf --dtype bfloat16 --lanes 256 --max-tokens 1024"
"""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import dms_jax
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import FAILED, run
from experiments.benchmarks.settings import check_numbers

ADDRESS = re.compile(r" at (http://\S+)/v1$")
LONGEST = 600  # a client's timeout for the next part of an answer, seconds


@dataclasses.dataclass(frozen=True)
class Config:
    """Time what many clients of a server see."""

    server: str = "--lanes 32 --max-tokens 512"
    """Options of `dms-jax serve`, after an equals sign: --server="--lanes 8"."""
    url: str | None = None
    """Address of a running server, without /v1; then no server is started."""
    clients: tuple[int, ...] = (1, 8, 32)
    """Loads: numbers of concurrent clients."""
    processes: int = 1
    """Processes for the clients; a single one limits the rate of very many answers."""
    requests: int = 96
    """Requests of each load."""
    questions: pathlib.Path | None = None
    """JSON Lines file whose "question" fields are sent as chats, repeatedly."""
    prompts: tuple[int, int] = (16, 128)
    """Fewest and most tokens of a prompt."""
    answers: tuple[int, int] = (32, 256)
    """Fewest and most tokens of an answer, unless the model ends it earlier."""
    vocabulary: int = 512
    """Token ids of prompts are drawn below this."""
    temperature: float = 0.7
    """Temperature of all requests; top-p is 0.95."""
    regex: str | None = None
    """Regular expression that answers must match, such as "(.|\\n)*": to time grammars."""
    free_first: bool = False
    """Run each load twice, first without the regular expression."""
    out: pathlib.Path = pathlib.Path("runs/serving.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self, may_be_zero=("temperature",))
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise dms_jax.ConfigError(f"--url {self.url}: it begins with http:// or https://")
        for name in ("prompts", "answers"):
            least, most = getattr(self, name)
            if least > most:
                raise dms_jax.ConfigError(f"--{name} {least} {most}: the fewest come first")


@dataclasses.dataclass
class Answer:
    """One request as its client saw it, in seconds since it was sent.

    Attributes:
      parts: arrival times of the parts of its text; empty if there was none.
      seconds: time of its end.
      tokens: tokens of the answer, counted by the server.
      cached: cached tokens of its prompt; 0 if the server does not report them.
      peak: peak live tokens of its cache; None if the server does not report them.
      text: its text.
      error: the error, or None if there is an answer.
    """

    parts: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    cached: int = 0
    peak: float | None = None
    text: str = ""
    error: str | None = None


def make_requests(config: Config, model: str, load: int) -> list[dict[str, Any]]:
    """Returns the request bodies of a load, by its number."""
    random = np.random.default_rng((0, load))

    def between(bounds: tuple[int, int]) -> int:
        return int(random.integers(bounds[0], bounds[1] + 1))

    def asked(index: int) -> dict[str, Any]:
        if config.questions is None:
            length = between(config.prompts)
            return {"prompt": random.integers(0, config.vocabulary, length).tolist()}
        return {"messages": [{"role": "user", "content": questions[index % len(questions)]}]}

    matched = {} if config.regex is None else {"guided_regex": config.regex}
    questions = [] if config.questions is None else read_questions(config.questions)
    return [
        {
            "model": model,
            **asked(index),
            "max_tokens": between(config.answers),
            "temperature": config.temperature,
            "top_p": 0.95,
            "seed": index,
            "stream": True,
            "stream_options": {"include_usage": True},
            **matched,
        }
        for index in range(config.requests)
    ]


def read_questions(path: pathlib.Path) -> list[str]:
    """Returns the questions of a file.

    Raises:
      ConfigError: it cannot be read, or a line has none.
    """
    try:
        lines = path.read_text().splitlines()
        questions = [json.loads(line)["question"] for line in lines if line.strip()]
    except OSError as error:
        raise dms_jax.ConfigError(f"--questions {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise dms_jax.ConfigError(
            f'--questions {path}: every line is to be a JSON object with a "question"'
        ) from error
    if not questions:
        raise dms_jax.ConfigError(f"--questions {path} holds none")
    return questions


def connect(address: str) -> tuple[http.client.HTTPConnection, str]:
    """Returns an unopened connection to a server, and the path of its address."""
    place = urllib.parse.urlsplit(address)
    secure = place.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    return kind(place.netloc, timeout=LONGEST), place.path.rstrip("/")


def ask(address: str, body: dict[str, Any]) -> Answer:
    """Sends a request and reads the streamed answer."""
    answer, start = Answer(), time.perf_counter()
    connection, path = connect(address)
    try:
        headers = {"Content-Type": "application/json"}
        kind = "chat/completions" if "messages" in body else "completions"
        connection.request("POST", f"{path}/v1/{kind}", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"{response.status}: {response.read().decode(errors='replace')[:200]}"
            return answer
        for line in response:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if event.get("error"):
                answer.error = str(event["error"])[:200]
            if part := "".join(text_of(each) or "" for each in event.get("choices", [])):
                answer.parts.append(time.perf_counter() - start)
                answer.text += part
            if usage := event.get("usage"):
                answer.tokens = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                answer.cached = details.get("cached_tokens") or 0
                answer.peak = usage.get("kv_cache", {}).get("peak_tokens")
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.seconds = time.perf_counter() - start
        connection.close()
    return answer


def text_of(choice: dict[str, Any]) -> str | None:
    """Returns the text of a chunk's choice."""
    return choice.get("text") or choice.get("delta", {}).get("content")


def ask_all(address: str, bodies: Sequence[dict[str, Any]], clients: int) -> list[Answer]:
    """Sends requests as that many clients, each with one at a time."""
    with concurrent.futures.ThreadPoolExecutor(clients) as threads:
        return list(threads.map(ask, itertools.repeat(address), bodies))


class Crowd:
    """Clients in separate processes, kept between loads.

    Args:
      processes: the most processes; with one the clients run in this process.
    """

    def __init__(self, processes: int):
        self._size = processes
        spawn = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks
        self._pool = concurrent.futures.ProcessPoolExecutor(processes, mp_context=spawn)

    def __enter__(self) -> "Crowd":
        if self._size > 1:  # all run before timing begins
            list(self._pool.map(time.sleep, [1.0] * self._size))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def load(self, address: str, bodies: Sequence[dict[str, Any]], clients: int) -> dict[str, Any]:
        """Returns the figures of one load: that many clients, each with one request at a time."""
        shares = min(self._size, clients)
        start = time.perf_counter()
        if shares == 1:
            answers = ask_all(address, bodies, clients)
        else:
            own = [bodies[first::shares] for first in range(shares)]
            sizes = [len(range(first, clients, shares)) for first in range(shares)]
            answers = list(
                itertools.chain(*self._pool.map(ask_all, itertools.repeat(address), own, sizes))
            )
        return {"clients": clients} | figures(answers, time.perf_counter() - start)


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Returns rates, and percentiles of the clients' waiting times.

    The longest pause of an answer is between two parts of its text; in tokens, it is divided by the
    mean time per token of this answer.

    Args:
      answers: the answer to each request.
      seconds: from the first request to the last answer.
    """
    whole = [answer for answer in answers if answer.error is None]
    begun = [answer for answer in whole if answer.parts]
    # Text comes in parts of several tokens: the time from the first to the last part, per token.
    longer = [answer for answer in begun if answer.tokens > 1]
    between = [(each.parts[-1] - each.parts[0]) / (each.tokens - 1) for each in longer]
    paused = [each for each in longer if len(each.parts) > 1]
    pauses = [float(np.diff(each.parts).max()) for each in paused]
    pace = [(each.tokens - 1) / (each.parts[-1] - each.parts[0]) for each in paused]
    peaks = [answer.peak for answer in whole if answer.peak is not None]
    return {
        "requests": len(answers),
        "errors": sorted({answer.error for answer in answers if answer.error is not None}),
        "failed": len(answers) - len(whole),
        "seconds": seconds,
        "tokens": sum(answer.tokens for answer in whole),
        "tokens_per_second": sum(answer.tokens for answer in whole) / seconds,
        "requests_per_second": len(whole) / seconds,
        "first_part_ms": percentiles([1e3 * answer.parts[0] for answer in begun]),
        "a_token_ms": percentiles([1e3 * each for each in between]),
        "longest_pause_ms": percentiles([1e3 * each for each in pauses]),
        "longest_pause_tokens": percentiles([a * b for a, b in zip(pauses, pace, strict=True)]),
        "whole_ms": percentiles([1e3 * answer.seconds for answer in whole]),
        "peak_tokens": float(np.mean(peaks)) if peaks else None,
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Returns median, 95th and 99th percentile and maximum; None for no values."""
    if not values:
        return None
    found = np.percentile(values, (50, 95, 99, 100))
    return dict(zip(("median", "p95", "p99", "most"), map(float, found), strict=True))


@contextlib.contextmanager
def started(options: str, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A context with the address of `dms-jax serve` with these options.

    Raises:
      ConfigError: it ended before it answered; its output is above.
    """
    call = [sys.executable, "-m", "dms_jax.command_line", "serve", "--port", "0"]
    given = {**environment, "COLUMNS": "10000"}  # the address stays on one line
    with subprocess.Popen(
        [*call, *shlex.split(options)], stdout=subprocess.PIPE, text=True, env=given
    ) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                print(line.rstrip(), flush=True)
                if found := ADDRESS.search(line.rstrip()):
                    break
            else:
                raise dms_jax.ConfigError(f"dms-jax serve {options} has ended before it answered.")
            # Its further output must not fill the pipe.
            threading.Thread(target=server.stdout.read, daemon=True).start()
            yield found[1]
        finally:
            server.terminate()


def model_name(address: str) -> str:
    """Returns the first model that a server names."""
    connection, path = connect(address)
    try:
        connection.request("GET", f"{path}/v1/models")
        return json.loads(connection.getresponse().read())["data"][0]["id"]
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise dms_jax.ConfigError(f"--url {address}: no model is named there ({error}).") from error
    finally:
        connection.close()


def main(config: Config) -> int:
    """Puts every load on the server and writes the figures; 1 if a request was not answered."""
    make_place("--out", config.out)
    if config.questions is not None:
        read_questions(config.questions)  # before a server has compiled for a minute
    place = contextlib.nullcontext(config.url) if config.url else started(config.server)
    rows = []
    with place as address, Crowd(config.processes) as crowd:
        name, most = model_name(address), max(config.clients)
        crowd.load(address, make_requests(config, name, 0)[:most], most)  # compiles
        kinds = [dataclasses.replace(config, regex=None)] if config.free_first else []
        loads = [(each, clients) for clients in config.clients for each in (*kinds, config)]
        for load, (own, clients) in enumerate(loads, 1):
            row = crowd.load(address, make_requests(own, name, load), clients)
            row |= {"regex": own.regex} if config.free_first else {}
            rows.append(row)
            print(describe(row), flush=True)
    # Only now: a card held by this process would be unavailable to the server.
    about = provenance(config)
    if config.url:
        about["device"] = None  # nothing is known of an external server
    write_json(config.out, about | {"loads": rows})
    return FAILED if any(row["failed"] for row in rows) else 0


def describe(row: dict[str, Any]) -> str:
    """Formats a load as a line."""
    kind = {None: " free", "": ""}.get(row.get("regex", ""), " under the grammar")
    words = [f"{row['clients']:4} clients{kind}: {row['tokens_per_second']:8,.0f} tokens/s"]
    named = (
        ("first_part_ms", "first text after"),
        ("a_token_ms", "a token"),
        ("longest_pause_ms", "longest pause"),
        ("whole_ms", "whole"),
    )
    for name, what in named:
        if found := row[name]:
            words.append(f"{what} {found['median']:,.1f} ms (95%: {found['p95']:,.1f})")
    if found := row["longest_pause_tokens"]:
        words.append(f"as long as {found['median']:.1f} tokens (at most {found['most']:.1f})")
    if row["failed"]:
        words.append(f"{row['failed']} not answered: {'; '.join(row['errors'])}")
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
