"""Commonsense tasks answered by likelihood: HellaSwag, PIQA, WinoGrande, BoolQ."""

import dataclasses
import re
from typing import ClassVar

from dms_jax.evaluation.records import Record
from dms_jax.evaluation.tasks.choices import Choices, ChoiceTask, shared_form, with_options


@dataclasses.dataclass(frozen=True)
class HellaSwag(ChoiceTask):
    """How a scene goes on: {"activity_label", "ctx_a", "ctx_b", "endings", "label"}.

    Attributes:
      path, few_shot, examples: see `FromFile`.
    """

    name: ClassVar[str] = "hellaswag"

    def pose(self, record: Record) -> Choices:
        context = record.text("ctx_a")
        if record.fields.get("ctx_b"):
            context += f" {record.text('ctx_b').capitalize()}"
        endings = tuple(_cleaned(each) for each in record.texts("endings"))
        prompt = _cleaned(f"{record.text('activity_label')}: {context}")
        return with_options(prompt, endings, record.index("label", below=len(endings)))


def _cleaned(text: str) -> str:
    """Removes the markup of WikiHow as lm-evaluation-harness does."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


@dataclasses.dataclass(frozen=True)
class PIQA(ChoiceTask):
    """Which of two ways reaches a goal: {"goal", "sol1", "sol2", "label"}.

    Attributes:
      path, few_shot, examples: see `FromFile`.
    """

    name: ClassVar[str] = "piqa"

    def pose(self, record: Record) -> Choices:
        if shared := shared_form(record):
            return shared
        prompt = f"Question: {record.text('goal')}\nAnswer:"
        options = (record.text("sol1"), record.text("sol2"))
        return with_options(prompt, options, record.index("label", below=2))


@dataclasses.dataclass(frozen=True)
class WinoGrande(ChoiceTask):
    """Which name a blank stands for: {"sentence", "option1", "option2", "answer"}.

    The sentence has "_" in place of the name. The contexts end with each option; the rest of
    the sentence is scored.

    Attributes:
      path, few_shot, examples: see `FromFile`.
    """

    name: ClassVar[str] = "winogrande"

    def pose(self, record: Record) -> Choices:
        if "context_options" in record.fields:
            contexts = record.texts("context_options")
            rest = record.text("continuation")
            gold = record.index("gold", below=len(contexts))
            return Choices(contexts, (rest,) * len(contexts), gold)
        before, blank, rest = record.text("sentence").partition("_")
        if not blank or not rest.strip():
            raise record.error('"sentence" must hold "_" with words after it.')
        contexts = tuple(before + record.text(f"option{i}") for i in (1, 2))
        return Choices(contexts, (rest.strip(),) * 2, record.index("answer", below=2, first=1))


@dataclasses.dataclass(frozen=True)
class BoolQ(ChoiceTask):
    """Yes or no about a passage: {"passage", "question", "answer": true}.

    Attributes:
      path, few_shot, examples: see `FromFile`.
    """

    name: ClassVar[str] = "boolq"

    def pose(self, record: Record) -> Choices:
        question = record.text("question").strip().removesuffix("?")
        prompt = f"{record.text('passage')}\nQuestion: {question}?\nAnswer:"
        return with_options(prompt, ("no", "yes"), record.index("answer", "label", below=2))
