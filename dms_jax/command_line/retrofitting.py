"""The options of `dms-jax retrofit`; `dms-jax plan` shares the training options."""

import dataclasses
import inspect
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import Mesh

import dms_jax
from dms_jax.command_line.options import check_devices, on_checkpoint, read_options
from dms_jax.data import Fields, as_source
from dms_jax.model.low_rank import LowRank
from dms_jax.model.rematerialisation import Remat
from dms_jax.policies import DMC, DMS, Policy
from dms_jax.training import Recipe, recipes
from dms_jax.training.parameters import Trained

UPDATES = LowRank()
# The library's defaults.
CALL = {name: each.default for name, each in inspect.signature(dms_jax.retrofit).parameters.items()}
RecipeName = Literal["published", "paper", "quickstart", "dmc_paper", "dmc_quickstart"]
# The policy that each recipe was made for. Policies of another kind have the library's defaults.
MADE_FOR: dict[str, Policy] = {
    "published": DMS(source="adapter"),
    "paper": DMS(window=16),
    "quickstart": DMS(window=64, source="adapter"),
    "dmc_paper": DMC(neuron="first"),
    "dmc_quickstart": DMC(neuron="first", offset=2.0, temperature=0.3),
}


@dataclasses.dataclass(frozen=True)
class Training:
    """Policy, recipe, and placement on devices."""

    policy: Literal["DMS", "DMC", "FixedPooling"] | None = None
    """What to learn: evicting tokens (DMS), merging them (DMC), or averaging a fixed number of them
    (FixedPooling). By default the recipe's. Policies such as TOVA need no training."""
    options: tuple[str, ...] = ()
    """Options of the policy, as name=value (window=256) or as one JSON object; by default the
    recipe's. dms-jax policies DMS DMC FixedPooling explains them."""
    recipe: RecipeName = "published"
    """DMS: NVIDIA's released recipe (only the adapter), the paper's, or the demo's (all weights).
    DMC: the paper's, or the demo's."""
    paper_model: str | None = None
    """A paper's recipe: a row of its tables ("qwen-r1-7b", ...; "llama-2-7b-dms-paper" is DMC as
    the DMS paper trained it), or "text" for 100 steps per unit of ratio. By default the
    recipe's."""
    compression_ratio: float | None = None
    """1 / the share of tokens kept beyond the window; the whole cache, with its window, shrinks
    less. By default the recipe's."""
    snapshots: tuple[float, ...] = ()
    """Compression ratios at which to write the model to out/snapshots during training."""
    trainable: Trained | None = None
    """What to train: only the adapter, low-rank updates of attention (LoRA) too, or everything. By
    default the recipe's."""
    rank: int = UPDATES.rank
    """Rank of the low-rank updates of attention; unused unless trainable is low_rank."""
    alpha: float = UPDATES.alpha
    """Scale of the low-rank updates of attention, which are multiplied by alpha / rank."""
    steps: int | None = None
    """Optimizer steps of the whole run; every stage of the recipe is scaled in proportion."""
    tokens: int | None = None
    """Tokens of the whole run, in place of steps."""
    sequence_length: int | None = None
    """Tokens of a training sequence; by default the recipe's, at most the model's positions."""
    batch_size: int | None = None
    """Sequences of an optimizer step; by default the recipe's."""
    micro_batch_size: int | None = None
    """Sequences that a device processes at a time; by default the recipe's."""
    remat: Remat | Literal["auto"] | None = None
    """What the backward pass recomputes, from the most memory to the least; "auto" chooses by the
    device's memory. By default the recipe's."""
    learning_rate: float | None = None
    """Constant learning rate of all trained weights, in every stage; by default the recipe's."""
    distillation_temperature: float | None = None
    """Divides the logits of student and teacher before they are compared; above 1, unlikely tokens
    count more. By default the recipe's, 1."""
    answers_only: bool = False
    """Train only on answers. By default recipes learn from whole conversations, including the
    user's turns."""
    compute_dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the passes; by default the recipe's. Parameters and optimizer state are always in
    float32."""
    model_shards: int = 1
    """Devices over which heads and feed-forward are split."""
    expert_shards: int = 1
    """Devices over which heads and whole experts are split, for mixtures of experts; with
    model_shards each expert is split too."""
    sequence_shards: int = 1
    """Devices over which the tokens of each sequence, and every parameter, are split: for batches
    with fewer sequences than devices."""

    def make_policy(self) -> Policy:
        """Returns the cache policy to retrofit for."""
        own, options = MADE_FOR[self.recipe], read_options(self.options)
        named = dms_jax.policies.from_dict({**options, "name": self.policy or own.name})
        policy = on_checkpoint(named, options, own)
        assert policy is not None
        return policy

    def make_recipe(self, positions: int | None = None) -> Recipe:
        """Returns the recipe with the changes of the options.

        Args:
          positions: the model's positions, if known; the recipe's sequences are cut to them unless
            a length is given.
        """
        told = dict(compression_ratio=self.compression_ratio, model=self.paper_model)
        given: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
        if self.paper_model is not None and self.recipe not in ("paper", "dmc_paper"):
            raise dms_jax.ConfigError("--paper-model belongs to a paper's recipe: --recipe.")
        make: dict[str, Callable[..., Recipe]] = {
            "published": recipes.dms_published,
            "paper": recipes.dms_paper,
            "quickstart": recipes.dms_quickstart,
            "dmc_paper": recipes.dmc_paper,
            "dmc_quickstart": recipes.dmc_quickstart,
        }
        recipe = make[self.recipe](**given)
        names = ("sequence_length", "batch_size", "micro_batch_size", "remat", "trainable")
        names = (*names, "compute_dtype", "distillation_temperature")
        changes: dict[str, Any] = {
            name: getattr(self, name) for name in names if getattr(self, name) is not None
        }
        if positions is not None and self.sequence_length is None:
            changes["sequence_length"] = min(recipe.sequence_length, positions)
        changes["low_rank"] = LowRank(self.rank, self.alpha)
        changes["answers_only"] = self.answers_only
        stages = recipe.stages
        if self.learning_rate is not None:
            rates = dict(
                learning_rate=self.learning_rate,
                adapter_learning_rate=None,
                final_learning_rate=None,
            )
            stages = tuple(dataclasses.replace(stage, **rates) for stage in stages)
        if self.batch_size is not None:
            stages = tuple(dataclasses.replace(stage, batch_size=None) for stage in stages)
        recipe = dataclasses.replace(recipe, stages=stages, snapshots=self.snapshots, **changes)
        if self.steps is None and self.tokens is None:
            return recipe
        return recipe.scaled(self.make_policy(), steps=self.steps, tokens=self.tokens)


@dataclasses.dataclass(frozen=True)
class Files:
    """Inputs, and the directory of the run."""

    model: str
    """Hugging Face directory, a GGUF file, a hub id ("owner/name"), or a model that ships."""
    data: tuple[pathlib.Path, ...]
    """JSON lines, Parquet files or folders of saved Hugging Face datasets, with "messages",
    "prompt" and "response", OpenR1's columns, "problem" and "solution", or "text"; or texts with
    <|endoftext|> in between. Files may be compressed (.gz)."""
    out: pathlib.Path
    """Directory of the run: checkpoints, log.jsonl, model. An existing run is resumed."""
    adapter: str | None = None
    """An adapter of the model to train further: a directory, or one that ships."""


@dataclasses.dataclass(frozen=True)
class Config(Training, Files):  # --help lists the fields of the last base first
    """Train a checkpoint to run with a small cache."""

    data_shards: int | Literal["all"] = 1
    """Devices over which sequences, and every parameter, are split; "all" for all remaining
    devices, on all hosts."""
    malformed: float = 0.0
    """Share of records that may be malformed; these are skipped and counted."""
    field: str | None = None
    """Name of the field with the text or the messages, if not a standard one."""
    prompt: str | None = None
    """Template of prompts, with fields in braces: "Solve: {problem}". Requires --response."""
    response: str | None = None
    """Template of responses, with fields in braces: "{solution}". Requires --prompt."""
    template: tuple[str, ...] = ()
    """Variables of the chat template, as name=value (enable_thinking=false)."""
    longest: int | None = None
    """Skip longer documents (in characters)."""
    adapter_only: bool = CALL["adapter_only"]
    """Write only the trained parameters, as an adapter to load with the model. Needs frozen weights
    or low-rank updates."""
    coordinator: str | None = None
    """host:port of process 0, if the environment does not describe the processes."""
    processes: int | None = None
    """Number of processes, if the environment does not describe them."""
    process: int | None = None
    """Number of this process, from 0, if the environment does not describe them."""
    tensorboard: bool = False
    """Also write every record for TensorBoard, to out/tensorboard."""
    checkpoint_every: int = CALL["checkpoint_every"]
    """Steps between checkpoints to resume from. Ctrl-C and SIGTERM also write one."""
    checkpoint_minutes: float | None = CALL["checkpoint_minutes"]
    """Most minutes between checkpoints."""
    keep_checkpoints: int = CALL["keep_checkpoints"]
    """Number of newest checkpoints to keep."""
    restart_from: int | None = None
    """Step of a checkpoint from which to continue with another recipe, such as lower rates after a
    divergence; later checkpoints are removed. 0 starts again."""
    seed: int = CALL["seed"]
    """Seed of the order of the data and of the noise of training."""

    def make_data(self) -> Any:
        """Returns the documents of --data."""
        fields = Fields(self.field, self.prompt, self.response, self.malformed, self.longest)
        return as_source(list(self.data), fields)

    def make_mesh(self) -> Mesh | None:
        """Returns the mesh of the shards; None for one device."""
        shards = self.data_shards
        others = self.model_shards * self.expert_shards * self.sequence_shards
        if shards == "all":
            shards = max(1, jax.device_count() // others)
        check_devices(
            data_shards=shards,
            model_shards=self.model_shards,
            expert_shards=self.expert_shards,
            sequence_shards=self.sequence_shards,
        )
        if shards * others == 1:
            return None
        return dms_jax.make_mesh(
            shards, self.model_shards, sequence=self.sequence_shards, experts=self.expert_shards
        )


def check_window(policy: Policy, recipe: Recipe) -> None:
    """Refuses a window that no token ever leaves in training.

    Raises:
      ConfigError: the window is as long as the recipe's sequences.
    """
    if isinstance(policy, DMS) and policy.window + 1 >= recipe.sequence_length:
        raise dms_jax.ConfigError(
            f"No token leaves a window of {policy.window} in sequences of "
            f"{recipe.sequence_length} tokens, so nothing would be learned: give a "
            "shorter window, or a longer --sequence-length."
        )
