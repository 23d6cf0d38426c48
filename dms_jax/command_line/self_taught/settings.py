"""The options of `dms-jax retrofit self-taught`."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import dms_jax
from dms_jax import assets
from dms_jax.checks import Count, NotNegative, Range, check
from dms_jax.command_line.options import find_model, read_chat
from dms_jax.evaluation import Chat
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import DMS
from dms_jax.training import Recipe, recipes
from dms_jax.training.parameters import Trained

EVICTING, UPDATES = DMS(), LowRank()
RECIPE = recipes.dms_self_taught()
STAGE = RECIPE.stages[0]
STEPS = RECIPE.total_steps(EVICTING)


@dataclasses.dataclass(frozen=True)
class SelfTaught:
    """Retrofit a model with DMS on its own answers: sample, filter, train, measure, report."""

    model: str
    """Hugging Face directory, GGUF file or hub id ("owner/name"), or a model that ships."""
    prompts: pathlib.Path | None
    """JSON lines with "question" and "answer" (as GSM8K), "prompt", "messages" or "text", or texts
    with <|endoftext|> in between. Texts are continued from their beginning."""
    out: pathlib.Path
    """Directory of the run. The same command resumes it."""

    questions: int | None = None
    """Number of prompts to train on; by default all that are not held out."""
    held_out: int = 64
    """Number of last prompts to hold out from training and to measure with."""
    judge: Literal["auto", "none", "gsm8k", "mathematics", "math500"] = "auto"
    """Task that asks and judges the prompts; "auto" is gsm8k if answers end in "#### ", else
    none."""
    style: Literal["auto", "instruct", "boxed", "plain"] = "auto"
    """Prompt of a judged problem: with instructions, for an answer in \\boxed{} like Qwen's model
    cards, or plain; "auto" is "instruct" in a chat and "plain" without."""
    chat: Literal["auto", "yes", "no"] = "auto"
    """Whether to ask through the chat template; "auto": yes if the model has one."""
    system: str | None = None
    """System prompt of the chat."""
    template: tuple[str, ...] = ()
    """Variables of the chat template, as name=value (enable_thinking=false)."""
    beginning: int = 16
    """Tokens of each text to continue, if the prompts are texts."""

    temperatures: tuple[float, ...] = (0.7, 1.0)
    """Sampling temperatures; each prompt is answered at all of them."""
    answers: int = 1
    """Answers to each prompt at each temperature."""
    max_new_tokens: int = 400
    """Most new tokens of an answer; a longer one is cut off and counts as not ended (--keep)."""
    keep: Literal["all", "ended", "correct"] = "ended"
    """Answers to train on: all, only finished ones, or only those judged correct."""

    trainable: Trained = "low_rank"
    """Train only the adapter, low-rank updates of attention too, or all weights."""
    rank: int = UPDATES.rank
    """Rank of the low-rank updates of attention; unused unless trainable is low_rank."""
    alpha: float = UPDATES.alpha
    """Scale of the low-rank updates of attention, which are multiplied by alpha / rank."""
    window: int = 16
    """Number of recent tokens that always stay in the cache."""
    shift: int = EVICTING.shift
    """Number of tokens between a token and the decision about it."""
    ratios: tuple[float, ...] = (2.0, 3.5)
    """Compression ratios at which the model is exported and measured; training goes to the last."""
    tokens: int = STEPS * RECIPE.batch_size * RECIPE.sequence_length
    """Tokens to train on, padding included; answers are repeated as needed."""
    learning_rate: float | None = None
    """Learning rate of everything but the adapter; by default the recipe's."""
    adapter_learning_rate: float = float(STAGE.adapter_learning_rate or 0)
    """Learning rate of the adapter that decides on evictions."""
    settle: float = 0.5
    """Share of the steps, at the end, that stay at the last ratio while the rates fall to zero."""
    warmup: float = 0.1
    """Share of the steps before --settle in which the rates rise from zero."""
    from_attention: float = 0.0
    """Share of the steps, at the start, in which only the adapter learns, from attention, which
    tokens later queries need; 0.2 in recipes.dms_warm_up."""
    answers_only: bool = False
    """Exclude the prompts from the loss."""
    sequence_length: int = RECIPE.sequence_length
    """Tokens of a training sequence."""
    batch_size: int = RECIPE.batch_size
    """Sequences of an optimizer step."""
    micro_batch_size: int | None = None
    """Sequences that a device processes at a time; by default the recipe's."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the passes of training."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights and the cache; by default that of the files."""

    lanes: int = 256
    """Sequences in the cache at a time, when sampling and measuring."""
    page_size: int = 16
    """Tokens per page of the cache."""
    evaluate_every: int = 50
    """Steps between measurements of the held-out answers while training."""
    checkpoint_every: int = 25
    """Steps between checkpoints to resume from."""
    seed: int = 0
    """Seed of sampling, of the order of the data and of the noise of training."""

    def __post_init__(self):
        above_one = Annotated[float, Range(1, above=True)]
        counts = ("answers", "held_out", "beginning", "max_new_tokens", "lanes", "page_size")
        counts = (*counts, "questions", "evaluate_every", "checkpoint_every")
        kinds: dict[str, Any] = dict.fromkeys(counts, Count)
        kinds |= dict(ratios=Sequence[above_one], temperatures=Sequence[NotNegative])
        for name, kind in kinds.items():
            option, value = "--" + name.replace("_", "-"), getattr(self, name)
            if value == ():
                raise dms_jax.ConfigError(f"{option} needs a number.")
            if value is not None:
                check(option, value, kind)

    @property
    def adapter_only(self) -> bool:
        """Whether the result is an adapter, not a whole model."""
        return self.trainable != "all"

    def load(self, adapter: pathlib.Path | None = None) -> dms_jax.LanguageModel:
        """Loads the base, alone or with an adapter."""
        path = find_model(self.model)
        return dms_jax.load(path, dtype=self.dtype, adapter=adapter)

    def make_policy(self) -> DMS:
        """Returns the policy to retrofit for."""
        return DMS(window=self.window, shift=self.shift, source="adapter")

    def make_recipe(self) -> Recipe:
        """Returns the recipe with the changes of the options."""
        recipe = recipes.dms_self_taught(
            max(self.ratios),
            trainable=self.trainable,
            tokens=self.tokens,
            learning_rate=self.learning_rate,
            adapter_learning_rate=self.adapter_learning_rate,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            settle=self.settle,
        ).warmed(self.warmup)
        if self.from_attention:
            recipe = recipes.attention_first(recipe, self.from_attention)
        changes: dict[str, Any] = dict(
            snapshots=tuple(sorted(self.ratios)),
            low_rank=LowRank(self.rank, self.alpha),
            answers_only=self.answers_only,
            compute_dtype=self.compute_dtype,
        )
        if self.micro_batch_size is not None:
            changes["micro_batch_size"] = self.micro_batch_size
        return dataclasses.replace(recipe, **changes)

    def make_chat(self, model: dms_jax.LanguageModel) -> Chat | None:
        """Returns the chat options; None for plain text prompts.

        Raises:
          ConfigError: --system or --template is given without a chat.
        """
        has_template = getattr(model.tokenizer, "chat_template", None) is not None
        asked = self.chat == "yes" or (self.chat == "auto" and has_template)
        return read_chat(asked=asked, system=self.system, template=self.template, by="--chat yes")

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings that must not change between calls, as JSON data.

        Others may change: after running out of memory a run can resume with fewer lanes.
        """
        free = ("out", "lanes", "checkpoint_every")
        fields = {name: value for name, value in vars(self).items() if name not in free}
        return json.loads(json.dumps(fields, default=str))


PRESETS = {
    "self-taught": (
        "DMS for a small chat model on its own answers: give --model and --prompts. The defaults "
        "measured best with 0.5B parameters on one GPU, and produce a file of a few "
        "megabytes beside the model.",
        SelfTaught(model="", prompts=None, out=pathlib.Path("runs/self-taught")),
    ),
    "self-taught-stories260k": (
        "The same with the model and the text that ship, in a few minutes on a laptop.",
        SelfTaught(
            model="stories260k",
            prompts=assets.path("tinystories") / "train.txt",
            out=pathlib.Path("runs/self-taught-stories260k"),
            questions=256,
            held_out=32,
            max_new_tokens=320,
            keep="all",
            window=64,
            ratios=(2.0, 4.0, 8.0),
            tokens=140 * 4 * 512,
            learning_rate=1e-3,
            adapter_learning_rate=1e-3,
            settle=0.0,
            warmup=0.0,
            sequence_length=512,
            batch_size=4,
            compute_dtype="float32",
        ),
    ),
}
