"""Times the first tokens of agents that resend their growing prompt to a server at every turn.

Several sessions run at a time. At every turn each sends the whole conversation and some more tokens
(a tool's result), and gets an answer. Lengths come from a recording: 30 turns of Codex, from 8,843
to 16,595 tokens (agent_session.json). A server with a prefix cache prefills only new tokens, one
without it prefills all: time `dms-jax serve` with and without `--prefix-cache off`, or any other
server with OpenAI's API. Reports by turn the median and the longest time to a session's first
token, the cached share of prompt tokens, the peak of live tokens and marks of the answers, which
two servers' reports compare; and at the end the bytes of the prefixes, where the server tells them.

A client does not see the tokens of an answer: with --tokenizer its text is tokenized again for the
next prompt, else random tokens replace it. For an answer without text its end is timed. With --text
the tokens are those of files, as a trained adapter needs: it keeps more of random tokens than of
text.

    python -m experiments.benchmarks.agent_sessions --url http://127.0.0.1:8000 --vocabulary 151000
    python -m experiments.benchmarks.agent_sessions --url http://127.0.0.1:8000 \
        --tokenizer MODEL --text dms_jax
    python -m experiments.benchmarks.agent_sessions --url http://127.0.0.1:8000 --sessions 2 \
        --turns 3 --shorten 100     # a trial with a small model
"""

import dataclasses
import json
import pathlib
import re
import sys
import urllib.error
import urllib.request
import zlib
from typing import Any

import numpy as np

import dms_jax
from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import run
from experiments.benchmarks.serving import ask_all, model_name
from experiments.benchmarks.settings import check_numbers

RECORDING = pathlib.Path(__file__).with_name("agent_session.json")


@dataclasses.dataclass(frozen=True)
class Config:
    """Time the first tokens of agents whose prompts grow."""

    url: str
    """Address of the server, without /v1."""
    sessions: int = 16
    """Concurrent sessions."""
    turns: int = 30
    """Turns of a session, the first ones of the recording."""
    shorten: int = 1
    """Divisor of the recorded lengths, for a short trial."""
    vocabulary: int = 512
    """Token ids of random prompts are drawn below this."""
    text: pathlib.Path | None = None
    """Folder whose Python files are the text of the prompts, instead of random tokens."""
    tokenizer: pathlib.Path | None = None
    """Model directory whose tokenizer reads --text."""
    out: pathlib.Path = pathlib.Path("runs/agent_sessions.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self)
        if (self.text is None) != (self.tokenizer is None):
            raise dms_jax.ConfigError("--text and --tokenizer go together.")


@dataclasses.dataclass(frozen=True)
class Turn:
    """Tokens of one turn of a session: the new ones of its prompt, and those of its answer."""

    more: int
    answer: int


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of a session: its turns, and the part of the first prompt that all sessions share."""

    turns: list[Turn]
    shared: int

    @classmethod
    def read(cls, config: Config) -> "Lengths":
        """Reads the recording.

        Raises:
          ConfigError: it has fewer turns than requested.
        """
        found = json.loads(RECORDING.read_text())
        prompts, answers = found["prompts"], found["answers"]
        if len(prompts) < config.turns:
            raise dms_jax.ConfigError(f"--turns {config.turns}: {len(prompts)} are recorded.")
        before = [0, *map(sum, zip(prompts, answers, strict=True))]
        more = [now - then for now, then in zip(prompts, before[:-1], strict=True)]
        shorter = [
            Turn(max(new // config.shorten, 1), max(answer // config.shorten, 1))
            for new, answer in zip(more, answers, strict=True)
        ]
        return cls(shorter[: config.turns], found["shared"] // config.shorten)

    @property
    def total(self) -> int:
        """Tokens of a whole session."""
        return sum(each.more + each.answer for each in self.turns)


class Prompts:
    """The prompts of all sessions, of random tokens or of --text."""

    def __init__(self, config: Config, lengths: Lengths):
        self._random, self._vocabulary = np.random.default_rng(0), config.vocabulary
        self._tokenizer = None if config.tokenizer is None else read_tokenizer(config)
        self._text = None if self._tokenizer is None else read_text(config, self._tokenizer)
        shared = self.tokens(lengths.shared)
        own = lengths.turns[0].more - lengths.shared
        self.now = [shared + self.tokens(own) for _ in range(config.sessions)]

    def tokens(self, count: int) -> list[int]:
        """Returns random tokens, or the next ones of the text, which begins again at its end."""
        if self._text is None:
            return self._random.integers(0, self._vocabulary, count).tolist()
        found = self._text[:count].tolist()
        self._text = np.roll(self._text, -count)
        return found

    def answer(self, text: str, count: int) -> list[int]:
        """Returns the tokens of an answer of `count` tokens, or random ones without a tokenizer."""
        return self.tokens(count) if self._tokenizer is None else self._tokenizer.encode(text)

    def grow(self, answers: list[list[int]], more: int) -> None:
        """Adds the last answers and the tokens of the next turn."""
        for prompt, answer in zip(self.now, answers, strict=True):
            prompt += answer + self.tokens(more)


def read_tokenizer(config: Config) -> Tokenizer:
    """Returns the tokenizer of --tokenizer.

    Raises:
      ConfigError: there is none.
    """
    assert config.tokenizer is not None
    if (tokenizer := Tokenizer.from_directory(config.tokenizer)) is None:
        raise dms_jax.ConfigError(f"--tokenizer {config.tokenizer}: there is no tokenizer.")
    return tokenizer


def read_text(config: Config, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the tokens of the Python files of --text, in order of their paths.

    Raises:
      ConfigError: they are too few for a session.
    """
    assert config.text is not None
    text = "\n".join(path.read_text() for path in sorted(config.text.rglob("*.py")))
    found = np.asarray(tokenizer.encode(text))
    if len(found) < (least := Lengths.read(config).total):
        raise dms_jax.ConfigError(f"--text {config.text}: {len(found):,} tokens of {least:,}.")
    return found


def ask_server(config: Config) -> dict[str, Any]:
    """Returns the figures of all turns of sessions that ask a server.

    Raises:
      ConfigError: it names no model, or does not answer.
    """
    url, lengths = config.url, Lengths.read(config)
    name, prompts = model_name(url), Prompts(config, lengths)
    turns, answers = [], []
    for number, turn in enumerate(lengths.turns):
        if number:
            count = lengths.turns[number - 1].answer
            prompts.grow([prompts.answer(each.text, count) for each in answers], turn.more)
        shared = dict(model=name, max_tokens=turn.answer, temperature=0, stream=True)
        shared |= dict(stream_options={"include_usage": True}, ignore_eos=True)
        bodies = [shared | {"prompt": prompt} for prompt in prompts.now]
        answers = ask_all(url, bodies, config.sessions)
        if errors := {each.error for each in answers if each.error is not None}:
            raise dms_jax.ConfigError(f"--url {url}: {'; '.join(sorted(errors))}")
        if short := sum(each.tokens != turn.answer for each in answers):
            raise dms_jax.ConfigError(
                f"--url {url}: {short} of {len(answers)} answers have no usage, or not the "
                f"{turn.answer} tokens that were asked for."
            )
        # Special tokens have no text.
        begun = [each.parts[0] if each.parts else each.seconds for each in answers]
        turns.append(
            dict(
                prompt=len(prompts.now[0]),
                median_seconds=float(np.median(begun)),
                longest_seconds=max(begun),
                cached=sum(each.cached for each in answers) / sum(map(len, prompts.now)),
                # Live tokens at the end of an answer, if the server tells them.
                peak_tokens=[each.peak for each in answers if each.peak is not None],
                # To compare the answers of two servers.
                answers=[f"{zlib.crc32(each.text.encode()):08x}" for each in answers],
            )
        )
    return dict(turns=turns, prefix_bytes=prefix_bytes(url))


def prefix_bytes(url: str) -> dict[str, float]:
    """Returns the bytes of cached prefixes that a server's metrics tell, by place."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
            text = response.read().decode()
    except urllib.error.HTTPError:  # it has no metrics
        return {}
    found = re.findall(r'^dms_jax_prefix_bytes\{place="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {place: float(size) for place, size in found}


def main(config: Config) -> None:
    """Times the sessions and writes the figures."""
    make_place("--out", config.out)
    figures = ask_server(config)
    last = figures["turns"][-1]
    print(
        f"{config.url}: first text after {last['median_seconds']:.3f} s for "
        f"{last['prompt']:,} tokens at the last turn, {last['cached']:.0%} cached",
        flush=True,
    )
    # Only now: a card held by this process would be unavailable to the server.
    write_json(config.out, provenance(config) | {"device": None, "rows": [figures]})


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
