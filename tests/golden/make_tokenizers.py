"""Vocabularies reduced to a few texts, with reference ids of those texts.

    python tests/golden/make_tokenizers.py --qwen DIR --gpt2 DIR --mistral FILE --stories FILE \
        --vectors DIR

Needs sentencepiece (and protobuf). Reads the vocabularies as published (vocab.json and merges.txt
of Qwen2.5; encoder.json and vocab.bpe of GPT-2; the sentencepiece models of Mistral v1 and of
stories260K) and llama.cpp's test vectors (ggml-vocab-*.gguf.inp and .out).

A merge or piece that is no substring of any text cannot take part in encoding it, so leaving it out
changes nothing. Byte-level vocabularies keep their ids, and the expected ids are llama.cpp's;
sentencepiece models are numbered by position, so the expected ids are sentencepiece's own for the
smaller model, after a check that its pieces are those of the whole one. `tokenizer.json` has the
vocabulary in the form of the tokenizers library, `pieces.json` the pieces, scores and types of a
sentencepiece model.
"""

import argparse
import io
import json
import pathlib
import sys
import tempfile
import unicodedata

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import numpy as np
import sentencepiece
from gguf import GGMLQuantizationType
from sentencepiece import sentencepiece_model_pb2

from dms_jax.checkpoint.gguf import GgufFiles, read_tokenizer
from tests.checkpoint import gguf_files

HERE = pathlib.Path(__file__).parent / "tokenizers"
EXTRA = [
    *(" " * count + "x" for count in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17)),
    *("x" + " " * count + "y" for count in (2, 3, 9, 31)),
    *("a" * count for count in range(1, 8)),
    "\n",
    " \n a\t b \n",
    "Once upon a time, there was a little girl named Lily. She loved to play outside.",
    "naïve café — “quotes” … 漢字 😀 \x00\x7f",
]


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: itself where printable, else the next one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, spare = {}, 256
    for byte in range(256):
        letters[byte] = chr(byte if byte in printable else spare)
        spare += byte not in printable
    return letters


def vectors(folder: pathlib.Path, name: str) -> list[tuple[str, list[int]]]:
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text().split("\n")
    ids = [[int(number) for number in line.split()] for line in lines[: len(texts)]]
    return list(zip(texts, ids, strict=True))


def cut_byte_level(
    out: str, vocabulary: pathlib.Path, merges: pathlib.Path, pre: str, expected: list
) -> None:
    letters = byte_letters()
    forms = [form for text, _ in expected for form in (text, unicodedata.normalize("NFC", text))]
    corpus = ["".join(letters[byte] for byte in text.encode()) for text in forms]
    lines = [line for line in merges.read_text().split("\n") if line and line[0:8] != "#version"]
    kept = [line for line in lines if any("".join(line.split(" ")) in text for text in corpus)]
    used = {*letters.values()}
    for line in kept:
        used |= {*line.split(" "), "".join(line.split(" "))}
    whole = json.loads(vocabulary.read_text())
    small = {index: token for token, index in whole.items() if token in used}
    tokens = [small.get(index, f"[PAD{index}]") for index in range(max(small) + 1)]
    types = [1 if index in small else 5 for index in range(len(tokens))]
    entries = dict(model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=kept)
    write_tokenizer(out, entries, expected)


def write_tokenizer(out: str, entries: dict, expected: list) -> None:
    """Writes what the library makes of a vocabulary, and the ids of the reference."""
    folder = HERE / out
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        path = pathlib.Path(place, "vocab.gguf")
        metadata = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
        tensor = (np.ones(2, np.float32), GGMLQuantizationType.F32)
        gguf_files.write(path, "llama", metadata, {"a": tensor})
        tokenizer, _ = read_tokenizer(GgufFiles(path), 10**6)
    tokenizer.save(folder)
    rows = [json.dumps([text, ids]) for text, ids in expected]
    (folder / "expected.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")


def cut_sentencepiece(out: str, source: pathlib.Path, texts: list[str]) -> None:
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(source.read_bytes())
    corpus = ["\u2581" + text.replace(" ", "\u2581") for text in texts]
    kept = [
        piece for piece in model.pieces if piece.type != 1 or any(piece.piece in t for t in corpus)
    ]
    del model.pieces[:]
    model.pieces.extend(kept)
    model.trainer_spec.vocab_size = len(kept)
    data = model.SerializeToString()
    small = sentencepiece.SentencePieceProcessor(model_proto=data)
    whole = sentencepiece.SentencePieceProcessor(model_file=str(source))
    for text in texts:
        if small.encode(text, out_type=str) != whole.encode(text, out_type=str):
            raise SystemExit(f"{out}: {text!r} is cut differently by the smaller model")
    write_pieces(out, model, [(text, small.encode(text)) for text in texts])


def write_pieces(
    out: str, model: sentencepiece_model_pb2.ModelProto, expected: list[tuple[str, list[int]]]
) -> None:
    normalizer = model.normalizer_spec
    settings = dict(
        add_space_prefix=normalizer.add_dummy_prefix,
        remove_extra_whitespaces=normalizer.remove_extra_whitespaces,
    )
    pieces = [[each.piece, each.score, each.type] for each in model.pieces]
    tokens, scores, types = zip(*pieces, strict=True)
    entries = dict(model="llama", tokens=[*tokens], scores=[*scores], token_type=[*types])
    entries |= settings | dict(bos_token_id=1, eos_token_id=2, add_bos_token=True)
    write_tokenizer(out, entries, expected)
    (HERE / out / "pieces.json").write_text(json.dumps(settings | {"pieces": pieces}) + "\n")


# A byte-pair model like Gemma's: unchanged text, and runs of spaces, line breaks and tabs that are
# pieces at any score.
GEMMA = dict(
    vocab_size=600,
    model_type="bpe",
    normalization_rule_name="identity",
    add_dummy_prefix=False,
    remove_extra_whitespaces=False,
    allow_whitespace_only_pieces=True,
    split_digits=True,
    user_defined_symbols=[
        *("<start_of_turn>", "<end_of_turn>", "<table>", "</h1>"),
        *("\n" * count for count in range(1, 5)),
        *("\u2581" * count for count in range(2, 9)),
        *("\t" * count for count in range(1, 4)),
    ],
)


def train(out: str, corpus: pathlib.Path, texts: list[str], options: dict) -> None:
    """A model of our own, with byte fallback."""
    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus.read_text().split("\n")[:3000]),
        model_writer=data,
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=data.getvalue())
    pieces = sentencepiece_model_pb2.ModelProto()
    pieces.ParseFromString(data.getvalue())
    write_pieces(out, pieces, [(text, model.encode(text)) for text in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("qwen", "gpt2", "mistral", "stories", "vectors"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    paths = parser.parse_args()
    qwen = vectors(paths.vectors, "qwen2")
    cut_byte_level(
        "qwen2",
        paths.qwen / "vocab.json",
        paths.qwen / "merges.txt",
        "qwen2",
        qwen,
    )
    cut_byte_level(
        "gpt2",
        paths.gpt2 / "encoder.json",
        paths.gpt2 / "vocab.bpe",
        "gpt-2",
        vectors(paths.vectors, "gpt-2"),
    )
    texts = [text for text, _ in qwen] + EXTRA
    cut_sentencepiece("mistral", paths.mistral, texts)
    cut_sentencepiece("stories260k", paths.stories, texts)
    corpus = HERE.parents[2] / "dms_jax" / "assets" / "tinystories" / "valid.txt"
    turns = [
        "<start_of_turn>user\nHi  there<end_of_turn>\n",
        "<table>\t\t\t\tx</h1>",
        "\u2581\u2581 x",
    ]
    train("gemma", corpus, texts + turns, GEMMA)


if __name__ == "__main__":
    main()
