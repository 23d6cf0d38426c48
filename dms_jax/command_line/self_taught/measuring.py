"""Measures the base and each export: loss, live tokens, and accuracy if there is a judge."""

import json
import pathlib
from typing import Any

import numpy as np

import dms_jax
from dms_jax.command_line.reports import read_file, write_json
from dms_jax.command_line.self_taught.answering import Lessons
from dms_jax.command_line.self_taught.questions import Questions
from dms_jax.command_line.self_taught.settings import SelfTaught
from dms_jax.data import Exchange
from dms_jax.evaluation import Serving, evaluate
from dms_jax.evaluation.progress import progress_bar
from dms_jax.generation import Sampling, Score
from dms_jax.model.language_model import LanguageModel
from dms_jax.training import held_out_loss

BASE = "vanilla"  # the original model


class HeldOut:
    """Measures models on the held-out answers, over whole sequences.

    Args:
      config: the settings.
      base: the original model.
      exchanges: prompts with the base's own answers, as token ids.
    """

    def __init__(self, config: SelfTaught, base: LanguageModel, exchanges: list[Exchange]):
        self._base, self._compute_dtype = base, config.compute_dtype
        length = config.sequence_length
        rows = [whole(each)[:length] for each in exchanges]
        starts = [len(each.prompt) for each in exchanges]
        size = min(config.batch_size, len(rows))
        # Pad to whole batches with empty rows, so that no sequence is skipped.
        rows += [np.zeros(0, np.int32)] * (-len(rows) % size)
        self._batches, self._answers = [], []
        for first in range(0, len(rows), size):
            tokens = np.zeros((size, length), np.int32)
            segments = np.zeros((size, length), np.int32)
            answers = np.zeros((size, length), bool)
            for place, row in enumerate(rows[first : first + size]):
                tokens[place, : len(row)], segments[place, : len(row)] = row, 1
            for place, start in enumerate(starts[first : first + size]):
                answers[place, start:] = True
            batch = {"tokens": tokens, "segment_ids": segments}
            self._batches.append(batch)
            self._answers.append(batch | {"loss_mask": answers})

    def __call__(self, model: LanguageModel) -> dict[str, float]:
        """Returns divergence from the base and loss, in nats per token.

        Over the tokens of answers, and, as "..._whole", over prompts and answers.
        """
        options: Any = dict(compute_dtype=self._compute_dtype)
        parts = {"": self._answers, "_whole": self._batches}
        far = held_out_loss(model, parts, teacher=self._base, **options)
        loss = held_out_loss(model, parts, **options)
        return {
            **{f"distillation{part}": value for part, value in far.items()},
            **{f"loss{part}": value for part, value in loss.items()},
        }


def whole(exchange: Exchange) -> np.ndarray:
    """Returns the tokens of a prompt and its answer."""
    return np.concatenate([exchange.prompt, exchange.response]).astype(np.int32)


def measure(
    config: SelfTaught,
    model: LanguageModel,
    questions: Questions,
    lessons: Lessons,
    held_out: HeldOut,
    folder: pathlib.Path,
    name: str,
) -> dict[str, Any]:
    """Measures a model with its declared policy, unless the folder has its figures."""
    file = folder / f"{name}.json"
    if file.exists():
        return json.loads(read_file("--out", file))
    sequences = [whole(each).tolist() for each in lessons.held_out]
    sequences = [sequence for sequence in sequences if len(sequence) > 1]
    system = name if name == BASE else f"ratio {name}"
    print(
        f"measuring {system}: compiles and computes losses, which can take minutes, then reads "
        f"{len(sequences)} sequences through the cache",
        flush=True,
    )
    scores: list[Score] = []
    with progress_bar(len(sequences) + 1, title="sequences", shown=True) as tick:
        far = held_out(model)
        tick()
        options: Any = dict(num_lanes=config.lanes, page_size=config.page_size)
        for first in range(0, len(sequences), config.lanes):
            scores += dms_jax.score(model, sequences[first : first + config.lanes], **options)
            for _ in scores[first:]:
                tick()
    usages = [score.usage for score in scores]
    figures: dict[str, Any] = {
        "policy": model.policy.to_dict(),
        **far,
        "decoded_loss": float(-np.concatenate([score.logprobs for score in scores]).mean()),
        "tokens": float(np.mean([len(sequence) for sequence in sequences])),
        "peak": float(np.mean([usage.peak_tokens for usage in usages])),
        "live": float(np.mean([usage.live_tokens for usage in usages])),
        "reads": float(np.mean([usage.kv_reads for usage in usages])),
    }
    if questions.task is not None:
        result = evaluate(
            model,
            questions.task,
            start=questions.held_out.start,
            problems=len(questions.held_out),
            sampling=Sampling(temperature=0, max_new_tokens=config.max_new_tokens),
            chat=questions.chat,
            serving=Serving(lanes=config.lanes, page_size=config.page_size),
            out=folder / f"{name}-answers",
            progress=True,
        )
        figures["answers"] = result.to_dict(problems=True)
    write_json(file, figures)
    return figures
