"""Build the `tokenizers.Tokenizer` of a Hugging Face directory from its files.

In order of preference: `tokenizer.json`; a sentencepiece `tokenizer.model`; `vocab.json` with
`merges.txt` (byte-level byte-pair encoding with the pre-tokenizer of GPT-2 or Qwen).
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import (
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from dms_jax.checkpoint import sentencepiece
from dms_jax.checkpoint.added_tokens import class_of
from dms_jax.checkpoint.files import (
    read,
    read_json,
    read_text,
)
from dms_jax.errors import CheckpointError, DmsJaxError, plain

# The pre-tokenizer of Qwen2 and later: bytes are merged within its matches.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class Words:
    """A pre-tokenizer, which splits text into words; bytes are merged within words.

    Attributes:
        cuts: regular expressions; each splits the parts made by the previous ones. Without any, the
            words are those of GPT-2.
        whole: whether a word that is a token is used directly, without merges.
        begin: whether a text begins with the begin token by default.
        nfc: whether text is normalized to Unicode's NFC first.
    """

    cuts: tuple[str, ...]
    whole: bool = False
    begin: bool = False
    nfc: bool = False


@contextlib.contextmanager
def library_errors(kind: type[DmsJaxError], what: str) -> Iterator[None]:
    """Convert the exceptions of the tokenizers library into one of our errors.

    The library raises plain `Exception`, and, if its Rust code panics, `PanicException`, which does
    not derive from it.
    """
    try:
        yield
    except DmsJaxError:
        raise
    except Exception as error:
        raise kind(f"{what}: {plain(error, 300)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: the tokenizers library failed: {plain(error, 300)}") from error


def read_backend(directory: pathlib.Path, config: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """Read the tokenizer of a directory; None if it has none.

    Special tokens that only a sentencepiece model declares are added to `config`.

    Raises:
        CheckpointError: the files are damaged, or of an unsupported kind.
    """
    fast = read(directory, "tokenizer.json")
    if fast is not None:
        with library_errors(CheckpointError, "tokenizer.json cannot be read as a tokenizer"):
            backend = tokenizers.Tokenizer.from_buffer(fast)
            # Before encoding anything: padding to 10^18 tokens would exhaust the memory.
            backend.no_padding()
            backend.no_truncation()
            return backend
    pieces = read(directory, "tokenizer.model")
    vocabulary = read_json(directory, "vocab.json")
    merges = read_text(directory, "merges.txt")
    if pieces is not None:
        model = sentencepiece.parse(pieces)
        if config.get("add_prefix_space") is False:
            model = dataclasses.replace(model, add_dummy_prefix=False)
        with library_errors(CheckpointError, "tokenizer.model cannot be read as a tokenizer"):
            backend = sentencepiece.build(model)
        for name, index in (("bos_token", model.begin_id), ("eos_token", model.end_id)):
            if 0 <= index < len(model.pieces):
                config.setdefault(name, model.pieces[index])
        config.setdefault("unk_token", model.pieces[model.unknown_id])
        config.setdefault("add_bos_token", model.begin_id >= 0)
    elif vocabulary is not None and merges is not None:
        prefix = config.get("add_prefix_space") is True
        backend = _byte_level(vocabulary, merges, _words(directory, config), prefix)
    else:
        return None
    return backend


def byte_level(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    words: Words,
    *,
    prefix: bool = False,
) -> tokenizers.Tokenizer:
    """Build a tokenizer that merges the bytes of words by pairs.

    Args:
        vocabulary: token to id.
        merges: the pairs, those that are merged first in front.
        words: how text is split into words.
        prefix: whether a space is put before a text.
    """
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=words.whole)
    backend = tokenizers.Tokenizer(model)
    if words.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in words.cuts),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not words.cuts),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def _words(directory: pathlib.Path, config: Mapping[str, Any]) -> Words:
    """Choose how text is split into words for a vocabulary."""
    stem = class_of(directory, config)
    words = {"qwen2": Words((QWEN_WORDS,), nfc=True), "gpt2": Words(())}
    if stem not in words:
        raise CheckpointError(
            f"vocab.json and merges.txt of tokenizer_class {plain(repr(stem))} are not served "
            "(served: Qwen2Tokenizer, GPT2Tokenizer); add a tokenizer.json"
        )
    return words[stem]


def _byte_level(
    vocabulary: dict[str, Any], merges: str, words: Words, prefix: bool
) -> tokenizers.Tokenizer:
    pairs = []
    for number, line in enumerate(merges.removesuffix("\n").split("\n"), start=1):
        if line.startswith("#version"):
            continue
        pair = tuple(line.removesuffix("\r").split(" "))
        if len(pair) != 2:
            raise CheckpointError(
                f"vocab.json and merges.txt cannot be read as a tokenizer: line {number} of "
                "merges.txt is no pair"
            )
        pairs.append(pair)
    with library_errors(CheckpointError, "vocab.json and merges.txt cannot be read as a tokenizer"):
        return byte_level(vocabulary, pairs, words, prefix=prefix)
