"""RULER's question answering among documents: `qa_1` (SQuAD 2.0), `qa_2` (HotpotQA).

The files are those of their publishers, for the development set:

    qa_1   dev-v2.0.json                      rajpurkar.github.io/SQuAD-explorer
    qa_2   hotpot_dev_distractor_v1.json      hotpotqa.github.io
"""

import contextlib
import dataclasses
import pathlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dms_jax.checks import show
from dms_jax.data.files import read_json, read_text
from dms_jax.errors import DataError
from dms_jax.evaluation.tasks.ruler.formats import DOCUMENT, QUESTIONS, Family, Filled, occurrences


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with its documents.

    Attributes:
      text: the question.
      answers: the reference answers; each is right.
      documents: indices of the documents that answer it.
      more: indices of other documents on its subject, which fill a context first.
    """

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    more: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Questions(Family):
    """Questions of a data set; the size is the number of documents.

    Attributes:
      questions: in the order of the file.
      documents: all different documents of the data set, sorted.
      seed: seed of the order of the documents, one for all problems as in RULER.
    """

    format = QUESTIONS

    questions: Sequence[Question]
    documents: Sequence[str]
    seed: int

    @property
    def least(self) -> int:
        return max(len(question.documents) for question in self.questions)

    def fill(self, rng: random.Random, size: int, number: int) -> Filled:
        if not number < len(self.questions):
            raise DataError(
                f"RULER: the file holds {len(self.questions)} questions, and number {number} was "
                "requested (the first is 0)."
            )
        question = self.questions[number]
        if size < len(self.documents):
            used = [self.documents[index] for index in self._context_documents(rng, question, size)]
        else:
            repeats = -(-size // len(self.documents))
            used = (list(self.documents) * repeats)[:size]
        random.Random(self.seed).shuffle(used)
        context = "\n\n".join(DOCUMENT.format(i=i, document=text) for i, text in enumerate(used, 1))
        return Filled(
            self.format.template.format(context=context, query=question.text),
            self.format.answer_prefix,
            f" {question.answers[0]}",
            question.answers,
        )

    def _context_documents(self, rng: random.Random, question: Question, size: int) -> list[int]:
        """The question's documents, those on its subject, then any others."""
        own, more = list(question.documents), list(question.more)
        if size - len(own) <= len(more):
            return own + rng.sample(more, size - len(own))
        known = {*own, *more}
        others = [index for index in range(len(self.documents)) if index not in known]
        return own + more + rng.sample(others, min(len(others), size - len(own) - len(more)))

    def found(self, completion: str) -> list[str]:
        first = next(iter(completion.strip().splitlines()), "").strip(" .")
        return [first.lower()] if first else []

    def score(self, completion: str, answers: tuple[str, ...]) -> float:
        """RULER's `string_match_part`: whether any reference occurs, ignoring case."""
        return float(any(occurrences(completion, answers)))


def read_squad(path: pathlib.Path, seed: int) -> Questions:
    """The questions of SQuAD 2.0 that have answers, among the paragraphs of all articles.

    Raises:
      DataError: the file has another format.
    """
    with _named(path, "SQuAD"):
        articles = [
            [(_text(paragraph["context"]), paragraph["qas"]) for paragraph in article["paragraphs"]]
            for article in read_json(read_text(path), f"{path}")["data"]
        ]
        documents, place = _placed(text for article in articles for text, _ in article)
        questions = []
        for article in articles:
            inside = [place[text] for text, _ in article]
            for text, asked in article:
                own = place[text]
                questions += [
                    Question(
                        _text(each["question"]),
                        tuple(_text(answer["text"]) for answer in each["answers"]),
                        (own,),
                        tuple(index for index in inside if index != own),
                    )
                    for each in asked
                    if not each.get("is_impossible", False)
                ]
        return _checked(path, Questions(questions, documents, seed))


def read_hotpotqa(path: pathlib.Path, seed: int) -> Questions:
    """The questions of HotpotQA, each with its ten documents, two of which answer it.

    Raises:
      DataError: the file has another format.
    """
    with _named(path, "HotpotQA"):
        records = [
            (
                _text(each["question"]),
                _text(each["answer"]),
                [f"{title}\n{''.join(lines)}" for title, lines in each["context"]],
            )
            for each in read_json(read_text(path), f"{path}")
        ]
        documents, place = _placed(text for *_, texts in records for text in texts)
        questions = [
            Question(question, (answer,), tuple(place[text] for text in texts))
            for question, answer, texts in records
        ]
        return _checked(path, Questions(questions, documents, seed))


@contextlib.contextmanager
def _named(path: pathlib.Path, name: str) -> Iterator[None]:
    """Turns errors in a malformed record into a DataError that names the file."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is not of the form in which {name} is published: "
            f"{type(error).__name__}: {show(str(error))}."
        ) from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{show(value)} is not a text")
    return value


def _placed(texts: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    documents = sorted(set(texts))
    return documents, {text: index for index, text in enumerate(documents)}


def _checked(path: pathlib.Path, questions: Questions) -> Questions:
    asked = questions.questions
    answered = all(each.answers and all(each.answers) for each in asked)
    if not (asked and answered and questions.documents):
        raise DataError(f"{path} holds no questions, or questions without an answer or a document.")
    return questions
