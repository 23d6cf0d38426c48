"""A loaded model: parameters, tokenizer, and the cache policy that its checkpoint declares."""

import contextlib
import copy
import dataclasses
import functools
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dms_jax import compilation, sharding
from dms_jax.cache import Cache
from dms_jax.cache.pages import few_sizes
from dms_jax.checks import show
from dms_jax.config import ModelConfig
from dms_jax.devices import fits_device
from dms_jax.errors import ConfigError, DataError, TooLongError
from dms_jax.model.cached_attention import in_one_pass
from dms_jax.model.caching import init_cache
from dms_jax.model.layer_loop import check_layers
from dms_jax.model.parameters import arrays_of, parameters_of, place_of, with_arrays
from dms_jax.model.template_variables import check_template_variables
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy, Vanilla, as_policy
from dms_jax.policies.base import LEARN_FIRST, check_adapter

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"  # warnings point to the caller outside of it


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """The defaults from generation_config.json."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """The contents of a checkpoint directory.

    Attributes:
      transformer: parameters and pure calls; a pytree.
      tokenizer: the tokenizer; None if the directory has none (prompts must then be token lists).
      policy: the policy that the checkpoint was made for, `Vanilla()` if it declares none.
      generation: generation defaults such as the end tokens.
      mesh: mesh over which the parameters are sharded; None for the default device.
      source: path of the checkpoint whose weights the model has, beside an adapter and low-rank
        updates; None for a new model, and after training or merging has changed them.
      untrained: whether to allow policies that the model was not trained for, which evict by
        meaningless neurons; for tests and benchmarks. `load` and training set it to False.
    """

    transformer: Transformer
    tokenizer: Any = None
    policy: Policy = dataclasses.field(default_factory=Vanilla)
    generation: GenerationDefaults = dataclasses.field(default_factory=GenerationDefaults)
    mesh: jax.sharding.Mesh | None = None
    source: str | None = None
    untrained: bool = True

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model: shape and switches."""
        return self.transformer.config

    @property
    def dtype(self) -> jnp.dtype:
        """Floating-point type of the parameters and of the cache."""
        return self.transformer.embedding[...].dtype

    def with_template(self, /, **variables: Any) -> "LanguageModel":
        """Returns the model with variables of its chat template, applied to all messages.

        Prompts, conversations and training data go through the same template:
        `model.with_template(enable_thinking=False)` for Qwen3.

        Raises:
          ConfigError: the model has no chat template, or a variable is one that every conversation
            sets.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigError(
                f"This model has no chat template, so {show(sorted(variables))} cannot be "
                "variables of it. Leave them out, or add a chat_template to tokenizer_config.json."
            )
        check_template_variables("with_template", variables)
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.template_variables = tokenizer.template_variables | variables
        return dataclasses.replace(self, tokenizer=tokenizer)

    def place(self) -> "LanguageModel":
        """Returns the model with its parameters placed for decoding.

        After training on a mesh they are split over `data`, and every use would gather them.
        """
        mesh = self.mesh
        if mesh is None:
            return self

        placed = {
            path: jax.device_put(param.get_value(), place_of(param, mesh))
            for path, param in parameters_of(self.transformer).items()
        }
        return dataclasses.replace(self, transformer=with_arrays(self.transformer, placed))

    def with_parameters(self, parameters: "Transformer | nnx.State") -> "LanguageModel":
        """Returns the model with new values of some or all parameters.

        Programs compiled for the model work for this one. Arrays placed like the ones they replace
        are shared, not copied; a caller that donates them later must pass copies.

        Args:
          parameters: a transformer, or the state of parts of one.

        Raises:
          ConfigError: `parameters` is neither, or names an unknown parameter, or one of another
            shape or type; the message names the first.
        """
        if not isinstance(parameters, nnx.Module | nnx.State):
            raise ConfigError(
                "Parameters are those of a transformer (model.transformer), or a state of it "
                f"(flax.nnx.state), got {show(parameters)}."
            )
        held = arrays_of(self.transformer)
        given = parameters if isinstance(parameters, nnx.State) else nnx.state(parameters)
        for path, param in nnx.to_flat_state(given):
            name, new = ".".join(map(str, path)), param.get_value()
            if path not in held:
                raise ConfigError(f"{name} is not a parameter of this model.")
            old = held[path]
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise ConfigError(
                    f"{name} is {new.dtype}{list(new.shape)}, and {old.dtype}{list(old.shape)} in "
                    "this model, whose programs are compiled for that. Convert it, or make a new "
                    "engine."
                )
            held[path] = jax.device_put(new, old.sharding)
        return dataclasses.replace(self, transformer=with_arrays(self.transformer, held))

    def resolve_policy(self, policy: Policy | str | None) -> Policy:
        """Returns the policy to run or to save: the given one (or its name), or the checkpoint's.

        Raises:
          ConfigError: the model cannot run the policy, was not trained for it, or was trained for
            an incompatible one.
        """
        policy = self.policy if policy is None else as_policy(policy)
        check_layers(self.config, policy)
        check_adapter(policy, self.transformer.adapter_shape)
        trained, asked = self.policy.retrofit.decisions, policy.retrofit.decisions
        if trained is not None and asked is not None and trained != asked:
            raise ConfigError(
                f"This checkpoint was trained for {self.policy}: its decisions mean {trained}, and "
                f"for {policy} they would be read as {asked}. Give its own policy."
            )
        self._check_borrowed_neurons(policy)
        return policy

    def _check_borrowed_neurons(self, policy: Policy) -> None:
        """Raises ConfigError unless the policy clears exactly the neurons that the model lends."""
        declared = self.policy.retrofit.borrowed_neurons
        asked = policy.retrofit.borrowed_neurons
        if declared == asked:
            return
        if declared is not None:
            raise ConfigError(
                f"This checkpoint was made for {self.policy}, whose decision neurons "
                f"must take no part in attention; {policy} would use them. Give its own policy "
                "(a window beyond the sequence's length evicts nothing)."
            )
        if not self.untrained:
            raise ConfigError(
                f"{policy.name} learns what to evict, and this model was never trained for it: it "
                f"would evict at random. {LEARN_FIRST}"
            )

    def logits(
        self,
        tokens: Int[Array | np.ndarray, "B T"],
        *,
        policy: Policy | str | None = None,
        prompt_lengths: Int[Array | np.ndarray, " B"] | None = None,
        segment_ids: Int[Array | np.ndarray, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Returns the logits of whole sequences under the policy's hard decisions.

        Args:
          tokens: token ids; padding on the right can be any token.
          policy: the cache policy; the checkpoint's if None.
          prompt_lengths: length of each prompt, for policies that treat it differently (Quest and
            KCache give it full attention, others cut rows at its end); 0 if None. No effect on
            policies that treat prompts like answers. Quest selects among pages of 16 tokens here,
            as published, like `generate(..., page_size=16)`. A budget given as a
            `compression_ratio` is a fraction of the given tokens.
          segment_ids: ids of the documents packed into each sequence: positions restart and no
            document attends to another. Left padding counts as a document. Only for policies that
            decide without attention.

        Returns:
          Logits in at least float32.

        Raises:
          ConfigError: if the policy does not fit the model or the packing.
          DataError: if a token is not in the vocabulary, or a sequence exceeds the model's
            positions.
          OutOfMemoryError: the device reports at once that it has too little memory.
        """
        compilation.prepare()
        policy = self.resolve_policy(policy)
        tokens = whole_numbers("token ids", tokens)
        if tokens.ndim != 2:
            raise DataError(
                f"logits needs token ids of shape [B, T], one row a sequence, got "
                f"{list(tokens.shape)}."
            )
        if not tokens.size:
            raise DataError(f"There are no tokens in an array of shape {list(tokens.shape)}.")
        check_tokens(tokens, self.config)
        batch, num_tokens = tokens.shape
        prompts = np.zeros(batch, np.int32) if prompt_lengths is None else prompt_lengths
        prompts = whole_numbers("prompt_lengths", prompts)
        if prompts.shape != (batch,) or (prompts < 0).any() or (prompts > num_tokens).any():
            raise DataError(
                f"prompt_lengths must be {batch} numbers between 0 and {num_tokens}, got "
                f"{prompts.tolist()}."
            )
        prompts = prompts.astype(np.int32)
        if segment_ids is not None:
            segment_ids = whole_numbers("segment_ids", segment_ids)
            if segment_ids.shape != tokens.shape:
                raise DataError(
                    f"segment_ids must have the shape of the tokens, {list(tokens.shape)}, got "
                    f"{list(segment_ids.shape)}."
                )
        alone = policy.parallel == "always"
        if segment_ids is not None and not alone:
            raise ConfigError(
                f"{policy.name} learns from attention as it goes and cannot run on packed "
                "documents; pass them as separate sequences."
            )
        room = fits_device(
            f"The device ran out of memory for the logits of {batch} sequences of {num_tokens} "
            "tokens. Give fewer at a time, or score them token by token (dms_jax.score)."
        )
        with use_mesh(self.mesh), room:
            if alone:
                return _logits(self.transformer, tokens, segment_ids, policy)
            limit = policy.footprint(num_tokens, page_size=1).at_most
            slots = num_tokens if limit is None or policy.shrinks else min(num_tokens, limit)
            slots = max(slots, min(num_tokens, self.config.window or 0))
            # Slightly different budgets share one program.
            pages, most = (-(-count // QUEST_PAGE_SIZE) for count in (slots, num_tokens))
            width = min(few_sizes(pages), most)
            return _logits_through_cache(self.transformer, tokens, prompts, policy, width=width)


# Quest's published page size; it has no effect on other policies. `generate` takes it as an option.
QUEST_PAGE_SIZE = 16


def use_mesh(mesh: jax.sharding.Mesh | None) -> Any:
    """Returns a context that sets the mesh, or does nothing without one."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def whole_numbers(name: str, values: Any) -> np.ndarray:
    """Returns an array of integers.

    Raises:
      DataError: if the values are not integers.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise DataError(f"{name} must be an array of integers, with rows of one length.") from error
    if array.dtype.kind not in "iu":
        raise DataError(f"{name} must be integers, got an array of {array.dtype}.")
    return array


def check_model(model: Any) -> None:
    """Raises ConfigError unless `model` is a model (and not, say, a path)."""
    if not isinstance(model, LanguageModel):
        raise ConfigError(
            "The model must come from dms_jax.load, dms_jax.initialize or dms_jax.retrofit, got "
            f"{show(model)}."
        )


def check_tokens(tokens: Int[np.ndarray, "*shape"], config: ModelConfig) -> None:
    """Raises TooLongError for too many positions, and DataError for ids outside the vocabulary."""
    if tokens.shape[-1] > config.max_position_embeddings:
        raise TooLongError(
            f"{tokens.shape[-1]} tokens do not fit the model's "
            f"{config.max_position_embeddings} positions; shorten them."
        )
    if tokens.size and (tokens.min() < 0 or tokens.max() >= config.vocab_size):
        raise DataError(
            f"Token ids must lie in 0 ... {config.vocab_size - 1}, got "
            f"{int(tokens.min())} ... {int(tokens.max())}. Is this the model's tokenizer?"
        )


@jax.jit
def _logits(
    transformer: Transformer, tokens: Array, segment_ids: Array | None, policy: Policy
) -> Array:
    return transformer.unembed(transformer(tokens, policy, segment_ids=segment_ids).hidden)


@functools.partial(jax.jit, static_argnames="width")
def _logits_through_cache(
    transformer: Transformer, tokens: Array, prompts: Array, policy: Policy, *, width: int
) -> Array:
    """Computes the logits for policies that need attention weights, through a temporary cache.

    Prompts run in one pass, the rest token by token. Each layer runs all tokens before the next one
    starts; rows share no pages.

    Args:
      transformer, tokens, prompts, policy: see `LanguageModel.logits`.
      width: pages of each row.
    """
    batch, num_tokens = tokens.shape
    cache = temporary_cache(transformer, policy, batch, num_tokens, width=width)
    in_prompt, behind = (in_one_pass(policy, num_tokens, prompt=each) for each in (True, False))
    first = transformer.cached(
        tokens, prompts, cache, policy, one_pass=in_prompt, ends_prompt=prompts > 0
    )
    index = jnp.arange(num_tokens)
    rest = jnp.take_along_axis(tokens, (prompts[:, None] + index) % num_tokens, axis=1)
    second = transformer.cached(rest, num_tokens - prompts, first.cache, policy, one_pass=behind)
    back = (index - prompts[:, None]) % num_tokens
    moved = jnp.take_along_axis(second.hidden, back[..., None], axis=1)
    hidden = jnp.where((index < prompts[:, None])[..., None], first.hidden, moved)
    return transformer.unembed(hidden)


def temporary_cache(
    transformer: Transformer, policy: Policy, batch: int, num_tokens: int, *, width: int
) -> Cache:
    """Returns an empty cache for sequences of one length, with `width` fixed pages per row.

    For programs that create their own cache; engines share pages.
    """
    config = transformer.config
    page_size = QUEST_PAGE_SIZE
    num_pages = config.num_layers * batch * config.num_kv_heads * width
    dtype = transformer.embedding[...].dtype
    cache = init_cache(
        config,
        policy,
        num_sequences=batch,
        num_pages=num_pages,
        page_size=page_size,
        table_width=width,
        dtype=dtype,
    )
    # Page numbers are local to a shard of the mesh, which counts its rows' pages from 0.
    axes = sharding.row_axes(batch, config.num_kv_heads)
    data_shards, head_shards = map(sharding.axis_size, axes)
    rows = (config.num_layers, batch // data_shards, config.num_kv_heads // head_shards, width)
    pages = jnp.arange(math.prod(rows), dtype=jnp.int32).reshape(rows)
    return dataclasses.replace(
        cache,
        page_table=jnp.tile(pages, (1, data_shards, head_shards, 1)),
        max_lengths=jnp.full(batch, num_tokens, jnp.int32),
    )
