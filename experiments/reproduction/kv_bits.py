"""Measures the loss from keys and values in fewer bits.

    python -m experiments.reproduction.kv_bits
    python -m experiments.reproduction.kv_bits --model MODEL.gguf --text TEXT --length 1024

The paged cache reads a text in chunks; every token attends to stored keys and values, its own
included, as in decode steps. It compares caches in the model's dtype, bfloat16, float8, and 4-bit
integers with a scale for every 32 numbers or for a head's whole vector, with and without rotation.
`kv_dtype="int4"` is "int4"; only this script has the other forms.

Measured in nats a token: the loss above that of the model's own type, and the divergence
KL(own || stored) of the next token. Errors are standard errors over sequences.
"""

import dataclasses
import functools
import math
import pathlib
import sys
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import dms_jax
from dms_jax import assets
from dms_jax.cache import Cache
from dms_jax.cache.format import Format
from dms_jax.cache.int4 import Int4
from dms_jax.cache.quantization import KV_DTYPES
from dms_jax.command_line.options import SHIPPED
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.model.caching import entry_bytes, init_cache
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Vanilla

PAGE = 64
POLICY = Vanilla()
OWN = "own"


@dataclasses.dataclass(frozen=True)
class Bfloat16(Format):
    """A bfloat16 cache for a model of another dtype, readable by prompt chunks but not by steps."""

    def quantize(self, x: Float[Array, "*slots D"]) -> tuple[Array, Array]:
        """Returns the numbers, and no scales."""
        return x.astype(jnp.bfloat16), jnp.zeros((*x.shape[:-1], 0), jnp.bfloat16)

    def dequantize(self, values: Array, scales: Array, dtype: Any) -> Float[Array, "*slots D"]:
        """Returns the numbers in another type."""
        del scales
        return values.astype(dtype)


FORMS: dict[str, Format] = {
    "bfloat16": Bfloat16(),
    "int4, whole head": Int4(group=None),
    "int4, not rotated": Int4(rotated=False),
    "int4, not rotated, whole head": Int4(group=None, rotated=False),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure the loss from keys and values in fewer bits."""

    model: str = "stories260k"
    """A shipped model's name, a Hugging Face directory or hub id, or a GGUF file."""
    text: pathlib.Path | None = None
    """A text file; the shipped stories unless given."""
    sequences: int = 8
    """Sequences, cut from the text end to end."""
    length: int = 512
    """Tokens of a sequence."""
    chunk: int = 256
    """Tokens of a chunk, at least two."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the model."""
    out: pathlib.Path = pathlib.Path("runs/kv_bits")
    """Folder for NAME.json, where NAME is that of the model's file or folder."""


def caches_of(head_dim: int) -> list[str]:
    """The caches to compare; a small head's vector is always a single group."""
    forms = ["bfloat16", "float8_e4m3", "int4", *list(FORMS)[1:]]
    whole = Int4().group
    assert whole is not None
    return [OWN, *(x for x in forms if head_dim > whole or not x.endswith("whole head"))]


@functools.partial(jax.jit, donate_argnums=3)
def advance(
    model: Transformer, tokens: Int[Array, "1 T"], counts: Int[Array, " 1"], cache: Cache
) -> tuple[Cache, Float[Array, "T V"]]:
    """Runs a chunk; returns the cache and the log-probabilities of the next tokens."""
    passed = model.cached(tokens, counts, cache, POLICY, one_pass=True)
    logits = model.unembed(passed.hidden)[0].astype(jnp.float32)
    return passed.cache, jax.nn.log_softmax(logits)


@jax.jit
def against(
    own: Float[Array, "T V"], stored: Float[Array, "T V"], targets: Int[Array, " T"]
) -> Float[Array, "3 T"]:
    """Loss and divergence of each token, and whether its likeliest token differs."""
    loss = -jnp.take_along_axis(stored, targets[:, None], axis=-1)[:, 0]
    divergence = (jnp.exp(own) * (own - stored)).sum(-1)
    return jnp.stack([loss, divergence, own.argmax(-1) != stored.argmax(-1)])


def empty(model: dms_jax.LanguageModel, cache: str, tokens: int) -> Cache:
    """Returns the cache of one sequence with all its pages reserved."""
    config, width = model.config, -(-tokens // PAGE)
    rows = (config.num_layers, 1, config.num_kv_heads)
    pages = int(np.prod(rows)) * width
    made = init_cache(
        config,
        POLICY,
        num_sequences=1,
        num_pages=pages,
        page_size=PAGE,
        dtype=model.dtype,
        kv_dtype=None if cache == OWN else cache,
    )
    table = jnp.arange(pages, dtype=jnp.int32).reshape(*rows, width)
    return dataclasses.replace(made, page_table=table)


def figures(
    model: dms_jax.LanguageModel, sequences: list[list[int]], *, chunk: int
) -> dict[str, list[Float[np.ndarray, "3 n"]]]:
    """For each cache and sequence, the rows of `against` for all tokens but the first."""
    longest = -(-len(sequences[0]) // chunk) * chunk
    names = caches_of(model.config.head_dim)
    found: dict[str, list[np.ndarray]] = {cache: [] for cache in names}
    for sequence in sequences:
        caches = {cache: empty(model, cache, longest) for cache in names}
        parts: dict[str, list[np.ndarray]] = {cache: [] for cache in names}
        for first in range(0, len(sequence) - 1, chunk):
            given = np.zeros(chunk + 1, np.int32)
            here = sequence[first : first + chunk + 1]
            given[: len(here)] = here
            count = len(here) - 1
            own = None
            for cache in names:
                caches[cache], stored = advance(
                    model.transformer, given[None, :-1], np.array([count], np.int32), caches[cache]
                )
                own = stored if own is None else own
                parts[cache].append(np.asarray(against(own, stored, given[1:]))[:, :count])
        for cache in names:
            found[cache].append(np.concatenate(parts[cache], axis=1).astype(np.float64))
    return found


def mean(values: list[np.ndarray]) -> dict[str, float]:
    """The mean over sequences of one length, and its standard error: NaN for a single one."""
    means = np.array([x.mean() for x in values])
    spread = means.std(ddof=1) if len(means) > 1 else math.nan
    return {"mean": float(means.mean()), "error": float(spread / len(means) ** 0.5)}


def summary(
    model: dms_jax.LanguageModel, found: dict[str, list[Float[np.ndarray, "3 n"]]]
) -> list[dict[str, Any]]:
    """A row for each cache: its bytes, its loss, and its distance from the model's own."""
    config = model.config
    rows = []
    for cache, sequences in found.items():
        loss = mean([x[0] for x in sequences])
        entry = entry_bytes(config, model.dtype, None if cache == OWN else cache)
        more = [x[0] - own[0] for x, own in zip(sequences, found[OWN], strict=True)]
        rows.append(
            {
                "cache": f"{model.dtype}, the model's own" if cache == OWN else cache,
                "bits": 4 * entry / config.head_dim,
                "bytes_a_token": entry * config.num_layers * config.num_kv_heads,
                "perplexity": float(np.exp(loss["mean"])),
                "loss": loss,
                "more": mean(more),
                "divergence": mean([x[1] for x in sequences]),
                "other_likeliest": mean([x[2] for x in sequences]),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as a Markdown table."""
    print(
        "| cache | bits a number | bytes a token | perplexity | loss above its own, nats "
        "| KL, nats | other likeliest token |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        more, far = row["more"], row["divergence"]
        print(
            f"| {row['cache']} | {row['bits']:.3g} | {row['bytes_a_token']:,} "
            f"| {row['perplexity']:.4g} | {more['mean']:+.4f} ± {more['error']:.4f} "
            f"| {far['mean']:.5f} ± {far['error']:.5f} "
            f"| {row['other_likeliest']['mean']:.1%} |"
        )


def read(config: Config, model: dms_jax.LanguageModel) -> list[list[int]]:
    """Returns the text as tokens, cut into sequences of one length.

    Raises:
      DataError: it is too short.
    """
    texts = (
        assets.stories("valid")
        if config.text is None
        else [config.text.read_text(encoding="utf-8")]
    )
    tokens = [token for text in texts for token in model.tokenizer.encode(text)]
    wanted = config.sequences * config.length
    if len(tokens) < wanted:
        raise dms_jax.DataError(f"the text has {len(tokens):,} tokens; {wanted:,} were asked for")
    return [tokens[start : start + config.length] for start in range(0, wanted, config.length)]


def main(config: Config) -> dict[str, Any]:
    """Measures every cache on the same tokens, writes the figures, prints the table."""
    make_folder("--out", config.out)
    if config.chunk < 2:
        raise dms_jax.ConfigError(f"--chunk {config.chunk}: a chunk has at least two tokens.")
    KV_DTYPES.update(FORMS)
    path = str(assets.path(config.model)) if config.model in SHIPPED else config.model
    model = dms_jax.load(path, dtype=config.dtype)
    sequences = read(config, model)
    began = time.perf_counter()
    rows = summary(model, figures(model, sequences, chunk=config.chunk))
    name = pathlib.Path(config.model).stem
    sizes = ("num_layers", "num_kv_heads", "head_dim")
    data = {
        **provenance(config),
        "name": name,
        "model": {size: getattr(model.config, size) for size in sizes},
        "seconds": round(time.perf_counter() - began, 1),
        "rows": rows,
    }
    write_json(config.out / f"{name}.json", data)
    show(rows)
    return data


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
