"""Random initialization of a model, for training from scratch."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dms_jax import compilation
from dms_jax.checks import Whole, check, show
from dms_jax.config import ModelConfig
from dms_jax.errors import ConfigError, plain
from dms_jax.model.language_model import GenerationDefaults, LanguageModel
from dms_jax.model.transformer import Transformer

# Types for training and running a model. Stored float8 needs scales, so it is not among them.
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def parameter_dtype(dtype: Any) -> jnp.dtype:
    """Returns a type of parameters.

    Raises:
      ConfigError: it is no type, or not one in which a model can run.
    """
    try:
        known = jnp.dtype(dtype)
    except Exception as error:  # numpy raises many different classes
        raise ConfigError(f"dtype {show(dtype)} is not known; give e.g. 'bfloat16'") from error
    if known.name not in _DTYPES:
        raise ConfigError(
            f"parameters cannot have dtype {plain(known.name)}; give one of {', '.join(_DTYPES)}"
        )
    return known


def initialize(
    config: ModelConfig, *, seed: int = 0, tokenizer: Any = None, dtype: Any = "float32"
) -> LanguageModel:
    """Returns a model with random parameters.

    Matrices are normal with a standard deviation of 1 / sqrt(inputs), divided by sqrt(2 L) for the
    two that write to the residual stream; the embedding's is 0.02; norms are one and biases zero.

    Args:
      config: the model's configuration.
      seed: random seed of the parameters.
      tokenizer: the model's tokenizer, whose special tokens become the generation defaults.
      dtype: floating-point type of the parameters.

    Raises:
      ConfigError: if the seed or the dtype is not valid, or the tokenizer has more tokens than
        the model.
    """
    compilation.prepare()
    check("initialize: config", config, ModelConfig)
    seed = check("initialize: seed", seed, Whole)
    dtype = parameter_dtype(dtype)
    generation = GenerationDefaults()
    if tokenizer is not None:
        if tokenizer.vocab_size > config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} tokens and the model only "
                f"{config.vocab_size}; set vocab_size in the config"
            )
        end = tokenizer.eos_token_id
        generation = GenerationDefaults(
            eos_token_ids=() if end is None else (end,),
            bos_token_id=tokenizer.bos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    make = jax.jit(lambda key: Transformer(config, dtype=dtype, rngs=nnx.Rngs(params=key)))
    transformer = make(jax.random.key(seed))
    return LanguageModel(transformer=transformer, tokenizer=tokenizer, generation=generation)
