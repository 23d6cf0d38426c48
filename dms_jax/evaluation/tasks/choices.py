"""Multiple-choice tasks: the answer is the most likely of several continuations.

Prompts are those of lm-evaluation-harness, as the DMS paper uses it (appendix G). Each task reads
its publisher's format and llm-foundry's: {"query", "choices", "gold"}, or for WinoGrande
{"context_options", "continuation", "gold"}.
"""

import abc
import dataclasses
import re
from typing import ClassVar

from dms_jax.checks import Whole, check
from dms_jax.evaluation.records import Record
from dms_jax.evaluation.tasks.files import FromFile

SEPARATOR = "\n\n"  # between worked examples


@dataclasses.dataclass(frozen=True)
class Choices:
    """A question with its options.

    Attributes:
      contexts: one for each option; all equal except in WinoGrande.
      continuations: the text of each option, without the space before it.
      gold: index of the right option.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int

    @property
    def solved(self) -> str:
        """The question with its answer, as a worked example."""
        return f"{self.contexts[self.gold]} {self.continuations[self.gold]}"


@dataclasses.dataclass(frozen=True)
class ChoiceTask(FromFile, abc.ABC):
    """Questions from a file that are answered by likelihood.

    Attributes:
      path, few_shot, examples: see `FromFile`.
    """

    cue: ClassVar[str] = "\nAnswer:"  # follows a query in llm-foundry's format

    def choices(self, index: int) -> Choices:
        """Returns question `index`, after its worked examples.

        Raises:
          DataError: the question does not exist, or its record is malformed.
        """
        record = self.record(check(f"{self.name}: problem", index, Whole))
        posed = self._pose(record)
        shown = [self._pose(each).solved for each in self.example_records(record)]
        before = self.describe(record) + "".join(each + SEPARATOR for each in shown)
        contexts = tuple(before + context for context in posed.contexts)
        return dataclasses.replace(posed, contexts=contexts)

    def _pose(self, record: Record) -> Choices:
        if "gold" not in record.fields:
            return self.pose(record)
        if "query" in record.fields:
            options = record.texts("choices")
            prompt = record.text("query").strip() + self.cue
            return with_options(prompt, options, record.index("gold", below=len(options)))
        contexts = record.texts("context_options")
        rest = (record.text("continuation"),) * len(contexts)
        return Choices(contexts, rest, record.index("gold", below=len(contexts)))

    @abc.abstractmethod
    def pose(self, record: Record) -> Choices:
        """The question of a record in the publisher's format, without examples."""

    def describe(self, record: Record) -> str:
        """Text before the worked examples; empty unless overridden."""
        del record
        return ""


def with_options(prompt: str, options: tuple[str, ...], gold: int) -> Choices:
    """A question with one prompt for all options."""
    return Choices((prompt,) * len(options), options, gold)


@dataclasses.dataclass(frozen=True)
class MMLU(ChoiceTask):
    """Multiple choice questions of 57 subjects, answered by a letter.

    The published CSV has no header (question, A, B, C, D, letter), and its name contains the
    subject: `anatomy_test.csv`; a folder holds several subjects. Parquet and JSON lines have
    "question", "choices", "answer" and "subject". Worked examples have the question's subject.

    Attributes:
      path, few_shot, examples: see `FromFile`.
    """

    name: ClassVar[str] = "mmlu"
    columns = ("question", "A", "B", "C", "D", "answer")

    def pose(self, record: Record) -> Choices:
        if "choices" in record.fields:
            options = record.texts("choices")
            gold = record.index("answer", below=len(options))
        else:
            options = tuple(record.text(letter) for letter in "ABCD")
            answer = record.text("answer").strip()
            if answer not in tuple("ABCD"):
                raise record.error(f'"answer" must be A, B, C or D, got {answer!r}.')
            gold = "ABCD".index(answer)
        letters = tuple("ABCDEFGHIJ"[: len(options)])
        lines = [f"{letter}. {text}" for letter, text in zip(letters, options, strict=True)]
        prompt = "\n".join([record.text("question").strip(), *lines, "Answer:"])
        return with_options(prompt, letters, gold)

    def describe(self, record: Record) -> str:
        subject = subject_of(record).replace("_", " ")
        return (
            f"The following are multiple choice questions (with answers) about {subject}."
            f"{SEPARATOR}"
        )

    def examples_for(self, record, examples):
        return [each for each in examples if subject_of(each) == subject_of(record)]


def subject_of(record: Record) -> str:
    """The subject of a record: its field, or its file's name without the split."""
    if record.fields.get("subject"):
        return record.text("subject")
    return re.sub("_(test|val|dev)$", "", record.file)


@dataclasses.dataclass(frozen=True)
class ARC(ChoiceTask):
    """Science questions, easy or challenge.

    {"question": {"stem", "choices": [{"text", "label"}]}, "answerKey"}, or as parquet {"question",
    "choices": {"text", "label"}, "answerKey"}.

    Attributes:
      path, few_shot, examples: see `FromFile`.
    """

    name: ClassVar[str] = "arc"

    def pose(self, record: Record) -> Choices:
        question, given = record.value("question"), record.fields.get("choices")
        try:
            if isinstance(question, dict):
                question, given = question["stem"], question["choices"]
            if isinstance(given, dict):
                labels, options = list(given["label"]), list(given["text"])
            else:
                labels = [each["label"] for each in given or ()]
                options = [each["text"] for each in given or ()]
        except (KeyError, TypeError) as error:
            raise record.error(f"the question's choices lack {error}.") from error
        inner = Record({"question": question, "choices": options}, record.where, record.file)
        key = record.text("answerKey")
        if key not in labels:
            raise record.error(f'"answerKey" must be one of {", ".join(labels)}, got {key!r}.')
        prompt = f"Question: {inner.text('question')}\nAnswer:"
        return with_options(prompt, inner.texts("choices"), labels.index(key))


@dataclasses.dataclass(frozen=True)
class HellaSwag(ChoiceTask):
    """How a scene continues: {"activity_label", "ctx_a", "ctx_b", "endings", "label"}.

    Attributes:
      path, few_shot, examples: see `FromFile`.
    """

    name: ClassVar[str] = "hellaswag"
    cue: ClassVar[str] = ""  # an ending continues the sentence

    def pose(self, record: Record) -> Choices:
        context = record.text("ctx_a")
        if record.fields.get("ctx_b"):
            context += f" {record.text('ctx_b').capitalize()}"
        endings = tuple(_cleaned(each) for each in record.texts("endings"))
        prompt = _cleaned(f"{record.text('activity_label')}: {context}")
        return with_options(prompt, endings, record.index("label", below=len(endings)))


def _cleaned(text: str) -> str:
    """Removes WikiHow's markup like lm-evaluation-harness."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


@dataclasses.dataclass(frozen=True)
class PIQA(ChoiceTask):
    """Which of two solutions reaches a goal: {"goal", "sol1", "sol2", "label"}.

    Attributes:
      path, few_shot, examples: see `FromFile`.
    """

    name: ClassVar[str] = "piqa"

    def pose(self, record: Record) -> Choices:
        prompt = f"Question: {record.text('goal')}\nAnswer:"
        options = (record.text("sol1"), record.text("sol2"))
        return with_options(prompt, options, record.index("label", below=2))


@dataclasses.dataclass(frozen=True)
class WinoGrande(ChoiceTask):
    """Which name a blank stands for: {"sentence", "option1", "option2", "answer"}.

    "_" marks the blank. Each context ends with one option; the rest of the sentence is scored.

    Attributes:
      path, few_shot, examples: see `FromFile`.
    """

    name: ClassVar[str] = "winogrande"

    def pose(self, record: Record) -> Choices:
        before, blank, rest = record.text("sentence").partition("_")
        if not blank or not rest.strip():
            raise record.error('"sentence" must hold "_" with words after it.')
        contexts = tuple(before + record.text(f"option{i}") for i in (1, 2))
        return Choices(contexts, (rest.strip(),) * 2, record.index("answer", below=2, first=1))


@dataclasses.dataclass(frozen=True)
class BoolQ(ChoiceTask):
    """Yes/no questions about a passage: {"passage", "question", "answer": true}.

    Attributes:
      path, few_shot, examples: see `FromFile`.
    """

    name: ClassVar[str] = "boolq"

    def pose(self, record: Record) -> Choices:
        question = record.text("question").strip().removesuffix("?")
        prompt = f"{record.text('passage')}\nQuestion: {question}?\nAnswer:"
        return with_options(prompt, ("no", "yes"), record.index("answer", "label", below=2))
