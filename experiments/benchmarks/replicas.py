"""Measures clients of two replicas when one is killed under load, and while an adapter is replaced.

    python -m experiments.benchmarks.replicas --out runs/replicas.json

Starts `experiments.examples.fleet` on this machine: two replicas of the shipped model with an
untrained DMS adapter. Clients stream greedy answers to a few prompts, each of which was answered
alone before. Then one replica is killed (SIGKILL); once there are two again, `serve.run` replaces
the adapter under the same load. Reports for both: the outcome of each stream, and seconds; and the
share of a prompt's streams on one replica, with free and with full lanes. A stream ends `whole`
(its text is that of the prompt alone), `told` (an error event), `refused` (an HTTP status that asks
for a retry), or it is `wrong` or `broken`. Needs ray[serve]>=2.60.
"""

import collections
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import jax
import numpy as np

import dms_jax
from dms_jax import assets
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.training.parameters import add_adapter, is_adapter, parameters, rebuilder
from experiments.benchmarks.settings import check_numbers

PROMPTS = [
    f"{name} had a little {pet}" for name in ("Lily", "Tom", "Ben") for pet in ("dog", "cat")
]
TIMEOUT = 300.0


@dataclasses.dataclass(frozen=True)
class Config:
    """See what clients of two replicas see."""

    clients: int = 8
    """Concurrent clients."""
    lanes: int = 4
    """Concurrent answers of a replica."""
    new_tokens: int = 160
    """Tokens of an answer."""
    before: int = 24
    """Answers after which a replica is killed."""
    port: int = 8765
    """Port of Ray Serve."""
    out: pathlib.Path = pathlib.Path("runs/replicas.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self)


@dataclasses.dataclass
class Stream:
    """One streamed answer: its prompt, its replica once known, and its outcome."""

    prompt: str
    replica: str | None = None
    text: str = ""
    end: str | None = None


def stream(config: Config, prompt: str, texts: Collection[str], streams: list[Stream]) -> Stream:
    """Streams an answer to its end; `texts` are the right ones; if empty, any text is right."""
    streams.append(one := Stream(prompt))
    body = dict(prompt=prompt, max_tokens=config.new_tokens, temperature=0, stream=True)
    connection = http.client.HTTPConnection("127.0.0.1", config.port, timeout=TIMEOUT)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        one.replica = response.getheader("X-Replica")
        if response.status != 200:
            one.end = "refused" if response.getheader("Retry-After") else "broken"
            return one
        for line in response:
            said = line.decode().strip().removeprefix("data: ")
            if said == "[DONE]":
                one.end = "whole" if not texts or one.text in texts else "wrong"
            elif said.startswith("{"):
                event = json.loads(said)
                if "error" in event:
                    one.end = "told" if event["error"]["code"] == "replica_ended" else "broken"
                else:
                    one.text += event["choices"][0]["text"]
        one.end = one.end or "broken"
    except (OSError, http.client.HTTPException):
        one.end = "broken"
    finally:
        connection.close()
    return one


@contextlib.contextmanager
def load(config: Config, texts: dict[str, set[str]]) -> Iterator[list[Stream]]:
    """Runs the clients until the end of the block, and waits for their answers."""
    ends, streams = threading.Event(), list[Stream]()

    def ask(client: int) -> None:
        for turn in range(10**9):
            if ends.is_set():
                return
            prompt = PROMPTS[(client + turn) % len(PROMPTS)]
            if stream(config, prompt, texts[prompt], streams).end == "refused":
                time.sleep(1)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(config.clients)]
    for thread in threads:
        thread.start()
    try:
        yield streams
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def same_replica(rounds: Iterable[list[Stream]]) -> float:
    """Returns the share of streams on the replica with most streams of their prompt."""
    chosen = collections.defaultdict(collections.Counter)
    for each in itertools.chain.from_iterable(rounds):
        if each.replica:
            chosen[each.prompt][each.replica] += 1
    return sum(max(x.values()) for x in chosen.values()) / sum(x.total() for x in chosen.values())


def make_adapter(seed: int, path: pathlib.Path) -> str:
    """Writes a nonzero adapter for the shipped model; returns its path."""
    model = dms_jax.load(assets.path("stories260k"))
    policy = dms_jax.DMS(window=16, source="adapter")
    transformer = add_adapter(model.transformer)
    arrays = parameters(transformer)
    for place, (name, x) in enumerate(sorted(arrays.items())):
        if is_adapter(name):
            noise = np.random.default_rng([seed, place]).normal(size=x.shape)
            arrays[name] = jax.numpy.asarray(x + noise, x.dtype)
    tuned = dataclasses.replace(model, transformer=rebuilder(transformer)(arrays), policy=policy)
    dms_jax.save(tuned, policy, path, adapter_only=True)
    return str(path)


def wait_for(true: Any) -> float:
    """Waits until a function returns true; returns the seconds."""
    start = time.monotonic()
    while not true():
        if time.monotonic() - start > 2 * TIMEOUT:
            raise dms_jax.OtherProcessError(f"{true.__name__}: not after {2 * TIMEOUT:g} s.")
        time.sleep(0.2)
    return time.monotonic() - start


def main(config: Config) -> None:
    """Kills a replica and replaces the adapter, under load."""
    make_place("--out", config.out)
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray import serve  # pyright: ignore[reportMissingImports]

        from experiments.examples.fleet import app
    except ImportError as error:
        raise dms_jax.ConfigError(
            f"This script needs Ray Serve ({error}). Install it: uv pip install 'ray[serve]>=2.60'"
        ) from error

    def deploy(adapter: str) -> float:
        start, tokens = time.monotonic(), config.new_tokens + 64
        options = f"--adapter {adapter} --max-tokens {tokens}"
        serve.run(app(dict(cpus="0", lanes=str(config.lanes), options=options)), name="fleet")
        return time.monotonic() - start

    def ask_all(before: str = "") -> list[Stream]:
        return [stream(config, before + prompt, (), []) for prompt in PROMPTS]

    def alone() -> dict[str, str]:
        return {each.prompt: each.text for each in ask_all()}

    def both_answer() -> bool:
        return len({each.replica for each in ask_all(f"{time.monotonic()}: ")} - {None}) == 2

    figures: dict[str, Any] = provenance(config) | dict(ray=ray.__version__)
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": config.port})
        with tempfile.TemporaryDirectory() as folder:
            first, second = (make_adapter(n, pathlib.Path(folder, str(n))) for n in (1, 2))
            figures["seconds_to_start"] = deploy(first)
            texts = alone()
            right = {prompt: {text} for prompt, text in texts.items()}
            figures["same_replica"] = dict(alone=same_replica(ask_all() for _ in range(4)))
            with load(config, right) as streams:
                wait_for(lambda: sum(each.end is not None for each in streams) >= config.before)
                figures["same_replica"]["all_full"] = same_replica([list(streams)])

                def held() -> collections.Counter:
                    return collections.Counter(
                        each.replica for each in list(streams) if each.replica and not each.end
                    )

                wait_for(lambda: len(held()) == 2)
                victim, number = max(held().items(), key=lambda item: item[1])
                os.kill(int(victim.rpartition(":")[2]), signal.SIGKILL)
                ended, count = time.monotonic(), len(streams)
                wait_for(lambda: sum(each.end is not None for each in streams) >= 2 * count)
                wait_for(both_answer)
                seconds = time.monotonic() - ended
            lost = [each for each in streams if each.end != "whole"]
            figures["killed"] = dict(
                streams=len(streams),
                ends=dict(collections.Counter(each.end for each in streams)),
                held_by_the_killed=number,
                lost_of_others=sum(each.replica != victim for each in lost),
                seconds_to_two_replicas=seconds,
            )
            print(json.dumps(figures["same_replica"] | figures["killed"]))
            with load(config, {prompt: set() for prompt in PROMPTS}) as streams:
                seconds = deploy(second)
                count = len(streams)  # streams that begin now use the second adapter
                wait_for(lambda: any(each.end for each in streams[count:]))
            changed = alone()
            for each in streams:
                if each.end == "whole" and each.text not in (
                    texts[each.prompt],
                    changed[each.prompt],
                ):
                    each.end = "wrong"
            figures["changed"] = dict(
                streams=len(streams),
                ends=dict(collections.Counter(each.end for each in streams)),
                of_the_first=sum(each.text == texts[each.prompt] for each in streams),
                of_the_second=sum(each.text == changed[each.prompt] for each in streams),
                same_text_under_both=sum(texts[prompt] == changed[prompt] for prompt in PROMPTS),
                seconds=seconds,
            )
            print(json.dumps(figures["changed"]))
    finally:
        serve.shutdown()
        ray.shutdown()
    write_json(config.out, figures)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
