"""What the wheel carries to work on at once: a real tiny model, and text for it.

- `path("stories260k")`: a Hugging Face directory of a Llama with 260,032 parameters (MIT).
- `stories("train")`, `stories("valid")`: two disjoint parts of TinyStories (CDLA-Sharing-1.0).

Each lies beside its licence and a README.
"""

import pathlib

from dms_jax.errors import DataError

SEPARATOR = "<|endoftext|>"


def path(name: str) -> pathlib.Path:
    """Directory of a shipped asset: "stories260k" or "tinystories".

    Raises:
        DataError: there is no asset of that name.
    """
    root = pathlib.Path(__file__).parent
    shipped = sorted(entry.name for entry in root.iterdir() if (entry / "README.md").is_file())
    if name not in shipped:
        raise DataError(f"no asset is called {name!r}; shipped: {', '.join(shipped)}")
    return root / name


def stories(split: str) -> list[str]:
    """Stories of TinyStories for training ("train") or for evaluation ("valid").

    Raises:
        DataError: there is no such split.
    """
    if split not in ("train", "valid"):
        raise DataError(f"TinyStories is shipped in two splits, train and valid, not {split!r}")
    text = (path("tinystories") / f"{split}.txt").read_text(encoding="utf-8")
    return [story for part in text.split(SEPARATOR) if (story := part.strip())]
