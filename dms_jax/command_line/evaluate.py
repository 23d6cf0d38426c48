r"""Let a model answer the problems of a task from a small cache, and score the answers.

    dms-jax evaluate --task reasoning --chains 16
    dms-jax evaluate --model path/to/model --task needle \
        --task-options size=600 --policy TOVA --options budget=128

    dms-jax evaluate --task gsm8k --task-options path=gsm8k/test.jsonl --chat
    dms-jax evaluate --task mmlu --task-options path=mmlu/test few_shot=5 \
        examples=mmlu/dev --problems 200

    dms-jax evaluate --model path/to/model --task humaneval --allow-code \
        --chat --chains 10 --task-options path=HumanEval.jsonl.gz

    dms-jax evaluate --model path/to/model --task ruler --temperature 0 \
        --problems 1100 --task-options length=4096 essays=PaulGrahamEssays.json
    dms-jax evaluate --model path/to/model --task ruler --temperature 0 --chat \
        --task-options task=qa_1 length=8192 questions=dev-v2.0.json

Problems are made from seeds (those of the test split are never trained on), or read from a file in
the form in which its publisher distributes it.
"""

import dataclasses
import datetime
import inspect
import pathlib
import sys
from importlib import metadata
from typing import Any, Literal

import jax

import dms_jax
from dms_jax.command_line.options import (
    CHOICES,
    find_adapter,
    find_model,
    read_chat,
    read_choices,
    read_policy,
    read_tasks,
)
from dms_jax.command_line.reports import make_place, write_json
from dms_jax.command_line.running import command
from dms_jax.data.tasks import Split
from dms_jax.evaluation import (
    SAMPLING,
    Chat,
    ChoiceResult,
    Result,
    Serving,
    evaluate,
    evaluate_choices,
    percent,
    summary_table,
)

SERVING = Serving()
CALL = {name: each.default for name, each in inspect.signature(evaluate).parameters.items()}


@dataclasses.dataclass(frozen=True)
class Config:
    """Let a model answer the problems of a task from a small cache, and score the answers."""

    model: str = "reasoner-11m"
    """A Hugging Face directory, a GGUF file, a hub id (owner/name), or a model that ships:
    stories260k, reasoner-11m, reasoner-11m-dms."""
    adapter: str | None = None
    """Directory of an adapter that was trained on the model, or one that ships:
    smollm2-135m-instruct-dms."""
    task: str = "reasoning"
    """linear, arithmetic, words, needle, tracking, or reasoning: the first three in turn; ruler:
    all tasks of RULER whose data is given, or the one that task= names; from a file and answered
    in words gsm8k, math500, aime, gpqa, mathematics; from a file and answered by programs
    humaneval, livecodebench; from a file and answered by likelihood mmlu, arc, hellaswag, piqa,
    winogrande, boolq."""
    task_options: tuple[str, ...] = ()
    """Difficulty and length of the task, as name=value or as one JSON object; of tasks on files
    path=, few_shot= and examples=; of ruler length=, squad=, hotpotqa=, essays= and words=."""
    allow_code: bool = False
    """Judge programs by running them, in a sandbox; humaneval and livecodebench need it."""
    chat: bool = False
    """Ask through the model's chat template."""
    system: str | None = None
    """System prompt of the chat."""
    template: tuple[str, ...] = ()
    """Variables of the chat template, as name=value (enable_thinking=false)."""
    policy: str | None = None
    """Cache policy by name, of those listed above; the one that the checkpoint declares unless
    given."""
    options: tuple[str, ...] = ()
    """Options of the policy, as name=value (window=256) or as one JSON object."""
    problems: int | None = CALL["problems"]
    """Problems to answer; all of a file, and 200 of those made from seeds, unless given."""
    chains: int = CALL["chains"]
    """Answers to each problem; more than one are also put to the vote."""
    split: Split = CALL["split"]
    """Part of a task made from seeds that the problems are of; files are taken as they are."""
    temperature: float = SAMPLING.temperature
    """0 takes the most likely token."""
    top_p: float = SAMPLING.top_p
    """Keep the most likely tokens until their probability reaches this."""
    max_new_tokens: int = SAMPLING.max_new_tokens
    """Longest answer; the model's positions may end it earlier."""
    seed: int = CALL["seed"]
    """Seed of the draws: the same answers again, or others."""
    lanes: int = SERVING.lanes
    """Sequences in the cache at a time."""
    page_size: int = SERVING.page_size
    """Tokens a page of the cache; 16 for Quest as published."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights and the cache; that of the files unless given."""
    answers: pathlib.Path | None = None
    """Folder for every answer as it ends; the same call goes on after those that are in it."""
    samples: int = 3
    """Completions to keep in the file."""
    out: pathlib.Path | None = None
    """JSON file for the figures, with device, versions, date and command."""

    def load(self) -> dms_jax.LanguageModel:
        """The model, which takes long: options are read before."""
        return dms_jax.load(
            find_model(self.model), dtype=self.dtype, adapter=find_adapter(self.adapter)
        )

    def make_serving(self) -> Serving:
        """The cache."""
        return Serving(lanes=self.lanes, page_size=self.page_size)

    def make_sampling(self) -> dms_jax.Sampling:
        """How answers are drawn."""
        return dms_jax.Sampling(
            temperature=self.temperature, top_p=self.top_p, max_new_tokens=self.max_new_tokens
        )

    def make_chat(self) -> Chat | None:
        """Returns the chat template's form of a question; None to ask in plain text."""
        return read_chat(asked=self.chat, system=self.system, template=self.template)


def main(config: Config) -> Result | ChoiceResult:
    """Evaluates, prints the table, writes the file."""
    if config.samples < 0:
        raise dms_jax.ConfigError(f"--samples must be at least 0, got {config.samples}.")
    if config.out is not None:
        make_place("--out", config.out)
    policy, chat = read_policy(config.policy, config.options), config.make_chat()
    if config.task in CHOICES:
        return choose(config, policy)
    tasks = read_tasks(config.task, config.task_options, allow_code=config.allow_code)
    sampling, serving = config.make_sampling(), config.make_serving()
    result = evaluate(
        config.load(),
        tasks,
        policy=policy,
        problems=config.problems,
        split=config.split,
        chains=config.chains,
        sampling=sampling,
        chat=chat,
        seed=config.seed,
        out=config.answers,
        progress=sys.stderr.isatty(),
        serving=serving,
    )
    data = result.to_dict(samples=config.samples)
    rows = [{"label": config.task, **data}]
    if len(result.tasks) > 1:
        rows += [{"label": name, **result.of_task(name).to_dict()} for name in result.tasks]
    print(summary_table(rows))
    rate = float(result.new_tokens.sum()) / result.seconds
    print(
        f"\n{data['policy']['name']}: {result.seconds:.1f} s with compilation, {rate:,.0f} tokens/s"
        "\nIn percent, ± one standard error clustered by problem. peak, reads: tokens of all chains"
        "\nof a problem, averages over layers and heads. ratio: tokens seen over live ones."
    )
    if config.out is not None:
        write_json(config.out, {**provenance(), "model": config.model, **data})
    return result


def choose(config: Config, policy: dms_jax.policies.Policy | None) -> ChoiceResult:
    """Evaluates a task that is answered by likelihood, which has no answers in words."""
    defaults = Config()
    for name in ("chat", "chains", "temperature", "top_p", "max_new_tokens", "answers"):
        if getattr(config, name) != getattr(defaults, name):
            option = name.replace("_", "-")
            raise dms_jax.ConfigError(
                f"--{option} is for tasks that are answered in words; {config.task} is answered by "
                "likelihood."
            )
    task, serving = read_choices(config.task, config.task_options), config.make_serving()
    result = evaluate_choices(
        config.load(),
        task,
        policy=policy,
        problems=config.problems,
        serving=serving,
    )
    data = result.to_dict(questions=True)
    print(
        f"{config.task}, {data['questions']} questions: acc {percent(data['acc'])}, acc_norm "
        f"{percent(data['acc_norm'])}, peak {data['peak']:,.1f} tokens\n"
        f"{data['policy']['name']}: {result.seconds:.1f} s with compilation. In percent, "
        "± one standard error."
    )
    if config.out is not None:
        write_json(config.out, {**provenance(), "model": config.model, **data})
    return result


def provenance() -> dict[str, Any]:
    """Where, when and how figures were taken."""
    return {
        "device": jax.devices()[0].device_kind,
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": command(),
    }
