"""Small real models, and texts for them.

- `path("stories260k")`: a Hugging Face directory of a Llama with 260,032 parameters (MIT).
- `path("reasoner-11m")`: one with 10,818,880 that works problems out step by step (Apache-2.0).
- `path("reasoner-11m-dms")`: a DMS adapter for it, for a cache 6 to 7 times smaller:
  `load(path("reasoner-11m"), adapter=path("reasoner-11m-dms"))`.
- `path("smollm2-135m-instruct-dms")`: a DMS adapter for SmolLM2-135M-Instruct (Apache-2.0), which
  is not part of this: `load("smollm2.gguf", adapter=path("smollm2-135m-instruct-dms"))`.
- `stories("train")`, `stories("valid")`, `stories("more")`: disjoint parts of TinyStories
  (CDLA-Sharing-1.0).
- `books("train")`, ...: three disjoint parts of two public-domain novels.

Each has its licence and a README beside it. A checkout has all of them. The wheel has the first
model, the adapter for SmolLM2 and two parts of the stories; `fetch()` downloads the others
(`fetching.py`), as does a command of `dms-jax` that needs one.
"""

import gzip
import pathlib

from dms_jax.assets.fetching import fetch, find, missing
from dms_jax.errors import DataError

SEPARATOR = "<|endoftext|>"

NAMES = {
    "books",
    "reasoner-11m",
    "reasoner-11m-dms",
    "smollm2-135m-instruct-dms",
    "stories260k",
    "tinystories",
}
BASES = {"reasoner-11m-dms": "reasoner-11m"}  # of adapters whose base ships too
_BOOKS = ("war_and_peace", "moby_dick")
# Parts of each book by paragraphs: 14/16 for training, 1/16 each for validation and test.
_BOOK_PARTS = {"train": (0, 14), "validation": (14, 15), "test": (15, 16)}


def path(name: str) -> pathlib.Path:
    """Directory of a model or a text.

    Names are "stories260k", "reasoner-11m", "reasoner-11m-dms", "tinystories", "books" and
    "smollm2-135m-instruct-dms".

    Raises:
        DataError: the name is unknown, or the asset is not in the wheel and was not fetched.
    """
    if name not in NAMES:
        raise DataError(f"no asset is called {name!r}; there are {', '.join(sorted(NAMES))}")
    place = find(name)
    if place is None:
        raise DataError(missing(name))
    return place


def stories(split: str) -> list[str]:
    """Stories of TinyStories: "train" (1 MB), "more" to train on (5.6 MB), "valid" to evaluate.

    Raises:
        DataError: the split is unknown, or was not fetched.
    """
    if split not in ("train", "more", "valid"):
        raise DataError(f"TinyStories has three parts, train, more and valid, not {split!r}")
    if split == "more":
        place = find("tinystories", holding="more.txt.gz")
        if place is None:
            raise DataError(missing("tinystories"))
        text = _unpacked(place / "more.txt.gz")
    else:
        text = (path("tinystories") / f"{split}.txt").read_text(encoding="utf-8")
    return [story for part in text.split(SEPARATOR) if (story := part.strip())]


def books(split: str) -> list[str]:
    """A part of each novel, one paragraph per line: "train", "validation" or "test".

    Raises:
        DataError: the part is unknown, or the books were not fetched.
    """
    if split not in _BOOK_PARTS:
        raise DataError(f"the books have the parts {', '.join(_BOOK_PARTS)}, not {split!r}")
    parts = []
    for name in _BOOKS:
        paragraphs = _unpacked(path("books") / f"{name}.txt.gz").splitlines()
        start, end = (len(paragraphs) * share // 16 for share in _BOOK_PARTS[split])
        parts.append("\n".join(paragraphs[start:end]))
    return parts


def _unpacked(file: pathlib.Path) -> str:
    return gzip.decompress(file.read_bytes()).decode("utf-8")


__all__ = ["BASES", "NAMES", "books", "fetch", "path", "stories"]
