"""Read a sentencepiece `.model` and rebuild it in the `tokenizers` library.

A `.model` is a protobuf message (sentencepiece_model.proto). Only the fields that affect splitting
are read, directly from the wire format, so sentencepiece itself is not needed.

Byte-pair models: sentencepiece merges the adjacent pair whose concatenation is the piece of highest
score, so each way to split a piece in two becomes a merge, ranked by the piece's score. Unigram
models keep their scores. Text is escaped as in sentencepiece: a space becomes U+2581, one is
prepended if the model asks for it, and text that no piece covers falls back to bytes.
"""

import dataclasses
import enum
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from dms_jax.errors import CheckpointError

SPACE = "\u2581"


class PieceType(enum.IntEnum):
    """The type of a piece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True)
class SentencePieceModel:
    """The fields of a sentencepiece model that affect how text is split."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[PieceType, ...]
    algorithm: str  # "unigram" or "bpe"
    byte_fallback: bool
    unknown_id: int
    begin_id: int  # -1 if the model has none
    end_id: int
    character_map: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def parse(data: bytes) -> SentencePieceModel:
    """Decode the contents of a `.model` file.

    Raises:
        CheckpointError: the bytes are not a sentencepiece model, or its algorithm is unsupported.
    """
    try:
        return _parse(data)
    except (IndexError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(
            "the tokenizer's .model file is not a sentencepiece model (cut short or damaged?): "
            "download it again"
        ) from error


def build(model: SentencePieceModel) -> tokenizers.Tokenizer:
    """Build a tokenizer that splits text like the sentencepiece model."""
    unknown = model.pieces[model.unknown_id]
    if model.algorithm == "bpe":
        vocabulary = {piece: index for index, piece in enumerate(model.pieces)}
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=_merges(model),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=model.byte_fallback,
            )
        )
    else:
        backend = tokenizers.Tokenizer(
            models.Unigram(
                vocab=list(zip(model.pieces, model.scores, strict=True)),
                unk_id=model.unknown_id,
                byte_fallback=model.byte_fallback,
            )
        )
    backend.normalizer = _normalizer(model)
    if model.algorithm == "unigram":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    # Runs of spaces (Gemma) are searched for in escaped text, longest first. A prepended space
    # would come before each of them, too.
    add_whole_pieces(backend, model.pieces, model.types, escaped=not model.add_dummy_prefix)
    return backend


def add_whole_pieces(
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


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each field on the wire; varints as int, the rest as bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        wire_type = tag & 7
        if wire_type == 0:
            value, position = _varint(message, position)
            yield tag >> 3, value
            continue
        if wire_type == 2:
            size, position = _varint(message, position)
        else:
            size = {1: 8, 5: 4}[wire_type]
        value = message[position : position + size]
        if len(value) != size:
            raise ValueError("a field runs past the end of the message")
        position += size
        yield tag >> 3, value


def _varint(message: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = message[position]
        position += 1
        result |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return result, position
        if shift > 63:
            raise ValueError("a varint of more than ten bytes")


def _parse(data: bytes) -> SentencePieceModel:
    pieces, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append(piece[1].decode("utf-8"))
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            types.append(PieceType(piece.get(3, PieceType.NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("no pieces")
    algorithm = {1: "unigram", 2: "bpe"}.get(trainer.get(3, 1))
    if algorithm is None:
        raise CheckpointError(
            "the sentencepiece model splits by words or characters, which is not served; served: "
            "byte-pair and unigram models"
        )
    if trainer.get(24, 0) or not normalizer.get(5, 1):
        raise CheckpointError(
            "the sentencepiece model treats white space in an unusual way (as a suffix, or not "
            "escaped), which is not served; convert it to tokenizer.json"
        )

    def identifier(field: int, default: int) -> int:
        value = trainer.get(field, default)
        return -1 if value >= 2**63 else value  # negative numbers are sent as two's complement

    return SentencePieceModel(
        pieces=tuple(pieces),
        scores=tuple(scores),
        types=tuple(types),
        algorithm=algorithm,
        byte_fallback=bool(trainer.get(35, 0)),
        unknown_id=types.index(PieceType.UNKNOWN),
        begin_id=identifier(41, 1),
        end_id=identifier(42, 2),
        character_map=normalizer.get(2, b""),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """All ways to split a piece into two pieces, best score first."""
    usable = (PieceType.NORMAL, PieceType.USER_DEFINED)
    identifiers = {
        piece: index
        for index, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True))
        if kind in usable
    }
    ranked = []
    for piece, index in identifiers.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in identifiers and right in identifiers:
                order = (-model.scores[index], index, identifiers[left], identifiers[right])
                ranked.append((order, (left, right)))
    return [pair for _, pair in sorted(ranked)]


def _normalizer(model: SentencePieceModel) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.character_map:
        steps.append(normalizers.Precompiled(model.character_map))
    if model.remove_extra_whitespaces:
        # Only spaces: line breaks and tabs are ordinary characters here.
        steps.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)
