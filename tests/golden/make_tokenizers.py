"""Vocabularies reduced to a few texts, with reference ids of those texts.

    python tests/golden/make_tokenizers.py --qwen DIR --gpt2 DIR --mistral FILE --stories FILE \
        --vectors DIR

Needs sentencepiece (and protobuf). Reads the vocabularies as published (vocab.json and merges.txt
of Qwen2.5; encoder.json and vocab.bpe of GPT-2; the sentencepiece models of Mistral v1 and of
stories260K) and llama.cpp's test vectors (ggml-vocab-*.gguf.inp and .out).

A merge or piece that is no substring of any text cannot take part in encoding it, so leaving it out
changes nothing. Byte-level vocabularies keep their ids, and the expected ids are llama.cpp's;
sentencepiece models are numbered by position, so the expected ids are sentencepiece's own for the
smaller model, after a check that its pieces are those of the whole one.
"""

import argparse
import io
import json
import pathlib
import unicodedata

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

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
    out: str, vocabulary: pathlib.Path, merges: pathlib.Path, config: dict, expected: list
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
    folder = HERE / out
    folder.mkdir(parents=True, exist_ok=True)
    small = {token: index for token, index in whole.items() if token in used}
    (folder / "vocab.json").write_text(json.dumps(small, ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *kept]) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    write_expected(folder, expected)


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
    folder = HERE / out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(data)
    write_expected(folder, [(text, small.encode(text)) for text in texts])


# A unigram model with a character map (NFKC), and a byte-pair model like Gemma's: unchanged text,
# and runs of spaces, line breaks and tabs that are pieces at any score.
UNIGRAM = dict(vocab_size=500, model_type="unigram")
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
    folder = HERE / out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(data.getvalue())
    write_expected(folder, [(text, model.encode(text)) for text in texts])


def write_expected(folder: pathlib.Path, expected: list) -> None:
    rows = [json.dumps([text, ids]) for text, ids in expected]
    (folder / "expected.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")


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
        {"tokenizer_class": "Qwen2Tokenizer"},
        qwen,
    )
    cut_byte_level(
        "gpt2",
        paths.gpt2 / "encoder.json",
        paths.gpt2 / "vocab.bpe",
        {"tokenizer_class": "GPT2Tokenizer"},
        vectors(paths.vectors, "gpt-2"),
    )
    texts = [text for text, _ in qwen] + EXTRA
    cut_sentencepiece("mistral", paths.mistral, texts)
    cut_sentencepiece("stories260k", paths.stories, texts)
    corpus = HERE.parents[2] / "dms_jax" / "assets" / "tinystories" / "valid.txt"
    train("unigram", corpus, texts, UNIGRAM)
    turns = [
        "<start_of_turn>user\nHi  there<end_of_turn>\n",
        "<table>\t\t\t\tx</h1>",
        "\u2581\u2581 x",
    ]
    train("gemma", corpus, texts + turns, GEMMA)


if __name__ == "__main__":
    main()
