"""Multiple-choice tasks: the answer is the most likely of several continuations.

Prompts are those of lm-evaluation-harness, as the DMS paper uses it (appendix G). Each task reads
its publisher's form, and one that several collections share: {"query", "choices", "gold"}, or
{"context_options", "continuation", "gold"} for WinoGrande.
"""

import abc
import dataclasses
from typing import ClassVar

from dms_jax.checks import Whole, check
from dms_jax.evaluation.records import Record
from dms_jax.evaluation.tasks.files import FromFile

SEPARATOR = "\n\n"  # between worked examples


@dataclasses.dataclass(frozen=True)
class Choices:
    """A question with its options.

    Attributes:
      contexts: one for each option; they are all the same except in WinoGrande.
      continuations: the text of each option, without the space before it.
      gold: index of the right option.
      group: the subject that the question belongs to, if any.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int
    group: str = ""

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

    def choices(self, index: int) -> Choices:
        """Returns question `index`, after its worked examples.

        Raises:
          DataError: there is none, or its record is malformed.
        """
        record = self.record(check(f"{self.name}: problem", index, Whole))
        posed = self.pose(record)
        shown = [self.pose(each).solved for each in self.example_records(record)]
        before = self.describe(record) + "".join(each + SEPARATOR for each in shown)
        contexts = tuple(before + context for context in posed.contexts)
        return dataclasses.replace(posed, contexts=contexts)

    @abc.abstractmethod
    def pose(self, record: Record) -> Choices:
        """The question of a record, without examples."""

    def describe(self, record: Record) -> str:
        """Text before the worked examples; empty unless overridden."""
        del record
        return ""


def with_options(prompt: str, options: tuple[str, ...], gold: int, group: str = "") -> Choices:
    """A question with one prompt for all options."""
    return Choices((prompt,) * len(options), options, gold, group)


def shared_form(record: Record) -> Choices | None:
    """Reads a record of the form {"query", "choices", "gold"}; None for records of other forms."""
    if not {"query", "choices", "gold"} <= record.fields.keys():
        return None
    options = record.texts("choices")
    prompt = f"{record.text('query').strip()}\nAnswer:"
    return with_options(prompt, options, record.index("gold", below=len(options)))


@dataclasses.dataclass(frozen=True)
class MMLU(ChoiceTask):
    """Multiple choice questions of 57 subjects, answered by a letter.

    The published CSV has no header (question, A, B, C, D, letter), and its name says the subject:
    `anatomy_test.csv`; a folder of them is all its subjects. Parquet and JSON lines have
    "question", "choices", "answer" and "subject". Worked examples are of the question's subject.

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
        return with_options(prompt, letters, gold, subject_of(record))

    def describe(self, record: Record) -> str:
        subject = subject_of(record).replace("_", " ")
        return (
            f"The following are multiple choice questions (with answers) about {subject}."
            f"{SEPARATOR}"
        )

    def examples_for(self, record, examples):
        return [each for each in examples if subject_of(each) == subject_of(record)]


def subject_of(record: Record) -> str:
    """The subject of a record: its field, or the name of its file without the split."""
    if record.fields.get("subject"):
        return record.text("subject")
    for split in ("_test", "_val", "_dev"):
        if record.file.endswith(split):
            return record.file.removesuffix(split)
    return record.file


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
        if shared := shared_form(record):
            return shared
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
