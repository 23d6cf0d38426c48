"""Build the `tokenizers.Tokenizer` of a vocabulary in the two kinds that GGUF files hold.

Byte-level byte-pair encoding splits text into words and merges the bytes within each word.

Sentencepiece's byte-pair encoding merges the adjacent pair whose concatenation is the piece of
highest score, so each way to split a piece in two becomes a merge, ranked by the piece's score. A
space becomes U+2581, one is prepended if the model asks for it, and text that no piece covers falls
back to bytes.
"""

import dataclasses
import enum
from collections.abc import Sequence

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_SPACE = "\u2581"


class PieceType(enum.IntEnum):
    """The type of a token, numbered as in sentencepiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True)
class Words:
    """A pre-tokenizer, which splits text into words; bytes are merged within words.

    Attributes:
        cuts: regular expressions; each splits the parts made by the previous ones.
        whole: whether a word that is a token is used directly, without merges.
        begin: whether a text begins with the begin token by default.
        nfc: whether text is normalized to Unicode's NFC first.
    """

    cuts: tuple[str, ...]
    whole: bool = False
    begin: bool = False
    nfc: bool = False


def byte_level(
    pieces: Sequence[str],
    types: Sequence[PieceType],
    merges: list[tuple[str, str]],
    words: Words,
) -> tokenizers.Tokenizer:
    """Build a tokenizer that merges the bytes of words by pairs.

    Args:
        pieces: the text of each token.
        types: the type of each token.
        merges: the pairs, those that are merged first in front.
        words: how text is split into words.
    """
    model = models.BPE(vocab=_ids(pieces), merges=merges, ignore_merges=words.whole)
    backend = tokenizers.Tokenizer(model)
    if words.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in words.cuts),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    _add_whole_pieces(backend, pieces, types)
    return backend


def sentencepiece(
    pieces: Sequence[str],
    types: Sequence[PieceType],
    scores: Sequence[float],
    *,
    unknown: int,
    prefix: bool,
    strip: bool,
) -> tokenizers.Tokenizer:
    """Build a tokenizer that merges pieces by score.

    Args:
        pieces: the text of each token.
        types: the type of each token.
        scores: the score of each token.
        unknown: id of the token for unknown text.
        prefix: whether a space is put before a text.
        strip: whether spaces around a text, and repeated ones, are removed.
    """
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=_ids(pieces),
            merges=_merges(pieces, types, scores),
            unk_token=pieces[unknown],
            fuse_unk=True,
            byte_fallback=PieceType.BYTE in types,
        )
    )
    steps: list[normalizers.Normalizer] = []
    if strip:
        # Only spaces: line breaks and tabs are ordinary characters here.
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if prefix:
        steps.append(normalizers.Prepend(_SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(decoding)
    # Runs of spaces (Gemma) are searched for in escaped text, longest first. A prepended space
    # would come before each of them, too.
    _add_whole_pieces(backend, pieces, types, escaped=not prefix)
    return backend


def _add_whole_pieces(
    backend: tokenizers.Tokenizer,
    pieces: Sequence[str],
    types: Sequence[PieceType],
    *,
    escaped: bool = False,
) -> None:
    """Add the pieces that are never split: control tokens, and those of users.

    Args:
        backend: the tokenizer.
        pieces: all pieces.
        types: the type of each.
        escaped: whether the pieces of users are searched for after normalization.
    """
    special = (PieceType.CONTROL, PieceType.UNKNOWN)
    added = [
        AddedToken(
            piece,
            special=kind in special,
            normalized=escaped and kind == PieceType.USER_DEFINED,
        )
        for piece, kind in zip(pieces, types, strict=True)
        if kind in special or kind == PieceType.USER_DEFINED
    ]
    backend.add_tokens(added)  # in one call: each call rebuilds the search structure


def _ids(pieces: Sequence[str]) -> dict[str, int]:
    return {piece: index for index, piece in enumerate(pieces)}


def _merges(
    pieces: Sequence[str], types: Sequence[PieceType], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All ways to split a piece into two pieces, best score first."""
    usable = (PieceType.NORMAL, PieceType.USER_DEFINED)
    ids = {piece: index for piece, index in _ids(pieces).items() if types[index] in usable}
    ranked = []
    for piece, index in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append(((-scores[index], index, ids[left], ids[right]), (left, right)))
    return [pair for _, pair in sorted(ranked)]
