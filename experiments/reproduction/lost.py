r"""Where do a retrofit's answers leave the model's? The divergence at every token, teacher-forced.

    python -m experiments.reproduction.lost --model coder-1.5b.gguf \
        --problems data/gsm8k/train.jsonl --adapters runs/campaign/trainings/dms-3.3-0/model

The model answers the last problems of the file greedily. Each adapter reads these answers twice:
with a whole cache, so that only its changed weights count, and with its own evictions. Reports
KL(adapter || model) of prompts and of answers, its mean over numbers and by position, the share in
the worst tokens, how often the likeliest token differs, and the worst tokens with their context.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import dms_jax
from dms_jax.command_line.options import find_model
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.generation import Sampling
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy, Vanilla

AT_ONCE = 8  # sequences whose logits are in memory
POSITIONS = 50  # answer tokens of a mean by position
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare the next-token distributions of retrofits with the model's, token by token."""

    model: str
    """Hugging Face directory, GGUF file or hub id of a model with a chat template."""
    problems: pathlib.Path
    """JSON lines with "question"."""
    adapters: tuple[str, ...]
    """Directories of adapters."""
    count: int = 64
    """Number of problems, the last ones of the file."""
    new_tokens: int = 400
    """Longest answer."""
    worst: int = 20
    """Number of worst tokens to report."""
    dtype: str = "bfloat16"
    """Type of weights and cache."""
    out: pathlib.Path = pathlib.Path("runs/lost.json")
    """File of the report."""


@jax.jit
def compared(
    own: Float[Array, "B T V"], base: Float[Array, "B T V"], tokens: Int[Array, "B T"]
) -> tuple[Array, ...]:
    """KL(own || base), the likeliest tokens of both, and their probabilities of the next token."""
    own, base = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (own, base))
    following = jnp.roll(tokens, -1, axis=1)[..., None]
    chances = (jnp.exp(jnp.take_along_axis(x, following, -1)[..., 0]) for x in (own, base))
    divergence = jnp.sum(jnp.exp(own) * (own - base), -1)
    return divergence, own.argmax(-1), base.argmax(-1), *chances


class Answers:
    """The model's greedy answers behind their prompts, and its logits there."""

    def __init__(self, config: Config):
        lines = config.problems.read_text(encoding="utf-8").splitlines()[-config.count :]
        asked = [json.loads(line)["question"] + INSTRUCTION for line in lines]
        chats = [[{"role": "user", "content": each}] for each in asked]
        model = dms_jax.load(find_model(config.model), dtype=config.dtype)
        assert model.tokenizer is not None
        self.tokenizer = model.tokenizer
        greedy = Sampling(temperature=0, max_new_tokens=config.new_tokens)
        made = dms_jax.generate(model, chats, sampling=greedy)
        prompts = [
            self.tokenizer.encode(self.tokenizer.apply_chat_template(chat), False) for chat in chats
        ]
        rows = [[*one, *map(int, two)] for one, two in zip(prompts, made.tokens, strict=True)]
        width = -(-max(map(len, rows)) // 64) * 64
        self.tokens = np.zeros((len(rows), width), np.int32)
        self.of_prompt = np.zeros(self.tokens.shape, bool)  # positions that predict the prompt
        self.of_answer = np.zeros(self.tokens.shape, bool)
        for row, (prompt, whole) in enumerate(zip(prompts, rows, strict=True)):
            self.tokens[row, : len(whole)] = whole
            self.of_prompt[row, : len(prompt) - 1] = True
            self.of_answer[row, len(prompt) - 1 : len(whole) - 1] = True
        self.logits = [model.logits(part, policy=Vanilla()) for part in self.parts()]

    def parts(self) -> list[Int[np.ndarray, "B T"]]:
        """The sequences, a few at a time."""
        return [self.tokens[i : i + AT_ONCE] for i in range(0, len(self.tokens), AT_ONCE)]

    def text(self, tokens: Any) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def report(
    answers: Answers, model: LanguageModel, policy: Policy | None, worst: int
) -> dict[str, Any]:
    """The differences of one adapter under one policy; None for its own."""
    found = [
        jax.device_get(compared(model.logits(part, policy=policy), base, part))
        for part, base in zip(answers.parts(), answers.logits, strict=True)
    ]
    divergence, own, base, own_chance, base_chance = map(np.concatenate, zip(*found, strict=True))
    answer, prompt = answers.of_answer, answers.of_prompt
    position = np.cumsum(answer, axis=1) - 1
    following = np.roll(answers.tokens, -1, axis=1)
    digits = {int(x) for x in np.unique(following) if answers.text([int(x)]).strip().isdigit()}
    number = answer & np.isin(following, list(digits))
    falling = np.sort(divergence[answer])[::-1]
    total = falling.sum()
    places = np.argsort(np.where(answer, -divergence, np.inf), axis=None)[:worst]
    rows, columns = np.unravel_index(places, answer.shape)
    by_position = [
        answer & (position >= start) & (position < start + POSITIONS)
        for start in range(0, int(position.max()) + 1, POSITIONS)
    ]
    return dict(
        prompt=float(divergence[prompt].mean()),
        answer=float(divergence[answer].mean()),
        numbers=float(divergence[number].mean()) if number.any() else None,
        by_position=[float(divergence[each].mean()) for each in by_position if each.any()],
        share_of_worst_percent=float(falling[: -(-len(falling) // 100)].sum() / total)
        if total
        else 0,
        likeliest_differs=float((own != base)[answer].mean()),
        worst=[
            dict(
                divergence=round(float(divergence[i, j]), 2),
                model=round(float(base_chance[i, j]), 2),
                adapter=round(float(own_chance[i, j]), 2),
                context=answers.text(answers.tokens[i, max(0, j - 14) : j + 1]),
                token=answers.text([int(following[i, j])]),
                likeliest=answers.text([int(own[i, j])]),
            )
            for i, j in zip(rows, columns, strict=True)
        ],
    )


def main(config: Config) -> int:
    """Writes the report and prints its means."""
    make_place("--out", config.out)
    answers = Answers(config)
    found = {}
    for adapter in config.adapters:
        model = dms_jax.load(find_model(config.model), dtype=config.dtype, adapter=adapter)
        found[adapter] = {
            "whole cache": report(answers, model, Vanilla(), config.worst),
            "evicting": report(answers, model, None, config.worst),
        }
        for name, each in found[adapter].items():
            print(f"{adapter}, {name}: {each['answer']:.4f} nats a token of the answers")
    write_json(config.out, provenance(config) | {"adapters": found})
    return 0


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
