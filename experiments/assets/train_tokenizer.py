"""Train the tokenizer of the shipped reasoning model: 2048 pieces, byte-level.

    python -m experiments.assets.train_tokenizer

Byte-pair encoding over bytes, so that any text can be written: the 256 bytes, `<s>`, `</s>`, and
merges learned from the texts that the model is trained on (worked problems, the wording of the
retrieval tasks, stories, novels). Digits are never merged, so that a number is its digits. The
random names and numbers of the retrieval tasks are left out of the training text.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import run
from dms_jax.data.tasks import Arithmetic, LinearEquation, Needle, VariableTracking, WordChain


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings."""

    out: pathlib.Path = pathlib.Path("runs/tokenizer")
    """Directory to write tokenizer.json and tokenizer_config.json to."""
    vocab_size: int = 2048
    """Pieces, special ones and bytes included."""
    problems: int = 2000
    """Problems of each kind in the training text."""
    prose: int = 1_500_000
    """Characters of stories and of novels, each."""


def texts(config: Config) -> Iterator[str]:
    """Yields the training text."""
    for task in (LinearEquation(), Arithmetic(), WordChain(steps=(3, 16))):
        for problem in task.problems("train", config.problems):
            yield problem.prompt + problem.solution
    for problem in Needle(size=1).problems("train", config.problems // 4):
        yield problem.prompt
    for problem in VariableTracking(size=2, hops=0).problems("train", config.problems // 10):
        yield "".join(line for line in problem.prompt.splitlines(True) if "VAR " not in line)
    yield "\n".join(assets.stories("train"))[: config.prose]
    for book in assets.books("train"):
        yield book[: config.prose // 2]


def train(config: Config) -> Tokenizer:
    """Trains the tokenizer."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        texts(config),
        trainers.BpeTrainer(
            vocab_size=config.vocab_size,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        extra={"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},
    )


def main(config: Config) -> None:
    """Trains, writes, and shows what a text costs."""
    make_folder("--out", config.out)
    tokenizer = train(config)
    tokenizer.save(config.out)
    print(f"{tokenizer.vocab_size} pieces in {config.out}")
    for task in (LinearEquation(), Arithmetic(), WordChain(), Needle(), VariableTracking()):
        problems = task.problems("validation", 50)
        prompt = sum(len(tokenizer.encode(problem.prompt)) for problem in problems) / 50
        solution = sum(len(tokenizer.encode(problem.solution)) for problem in problems) / 50
        print(f"{task.name:12s} prompt {prompt:6.0f} tokens, solution {solution:6.0f}")


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
