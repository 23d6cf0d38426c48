r"""Let a model answer the problems of a task from a small cache, and score the answers.

    dms-jax evaluate --task reasoning --chains 16
    dms-jax evaluate --model path/to/model --task words \
        --task-options largest=99 --policy TOVA --options budget=128

    dms-jax evaluate --task gsm8k --task-options path=gsm8k/test.jsonl --chat

    dms-jax evaluate --model path/to/model --task humaneval --allow-code \
        --chat --chains 10 --task-options path=HumanEval.jsonl.gz

    dms-jax evaluate --model path/to/model --task ruler --temperature 0 \
        --problems 1100 --task-options length=4096 essays=PaulGrahamEssays.json
    dms-jax evaluate --model path/to/model --task ruler --temperature 0 --chat \
        --task-options task=qa_1 length=8192 questions=dev-v2.0.json

Several policies on the same problems, or on the same text token by token, compared with the first:

    dms-jax evaluate \
        --policies Vanilla DMS,model=reasoner-11m-dms TOVA,budget=64
    dms-jax evaluate --model stories260k \
        --task text --task-options max_tokens=4000 --policies Vanilla \
        TOVA,compression_ratio=4 Knorm,compression_ratio=4,interval=16

Problems are generated from seeds (training never uses those of the test split), or read from a file
in its publisher's format.
"""

import dataclasses
import inspect
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Literal

from rich.console import Console

import dms_jax
from dms_jax import assets
from dms_jax.checks import Count, Whole, check
from dms_jax.command_line.candidates import (
    FAILURES,
    Candidate,
    Evaluated,
    change,
    gave_up,
    read_candidates,
    show,
)
from dms_jax.command_line.options import (
    Devices,
    check_names,
    load_model,
    read_chat,
    read_files,
    read_options,
    read_policy,
    read_tasks,
)
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.spelling import options_of, spelled
from dms_jax.data import TextFiles
from dms_jax.data.tasks import Split
from dms_jax.evaluation import (
    SAMPLING,
    Chat,
    Perplexity,
    Result,
    Serving,
    evaluate,
    perplexity,
    summary_rows,
    terminal_table,
)

SERVING = Serving()
CALL = {name: each.default for name, each in inspect.signature(evaluate).parameters.items()}
TEXT = "text"
# Options that the text has no use for.
_OF_PROBLEMS = "problems chat system template chains temperature top_p max_new_tokens answers"
_TEXT_OPTIONS = ("path", "window", "max_tokens")
_TEXT_LANES = 64  # windows at a time; all of them fit into the cache

INTERRUPTED = "Stopped. The same call with --answers goes on after the answers that are there."


@dataclasses.dataclass(frozen=True)
class Config(Devices):
    """Let a model answer the problems of a task from a small cache, and score the answers."""

    model: str = "reasoner-11m"
    """A Hugging Face directory, a GGUF file, a hub id (owner/name), or a model that ships:
    stories260k, reasoner-11m, reasoner-11m-dms (the same with its adapter)."""
    adapter: str | None = None
    """An adapter of the model: a directory, or one that ships (smollm2-135m-instruct-dms)."""
    task: str = "reasoning"
    """Generated: linear, arithmetic, words, or reasoning (the three in turn). ruler: all tasks of
    RULER whose data is given, or the one named by task=. From a file, answered in text: gsm8k,
    math500, aime, gpqa, mathematics; by programs: humaneval. text: the loss on a text, predicted
    token by token from the cache."""
    task_options: tuple[str, ...] = ()
    """Options of the task, as name=value or as one JSON object: difficulty and length of generated
    tasks; path=, few_shot= and examples= of tasks on files; length=, squad=, hotpotqa=, essays= and
    words= of ruler; path= (default TinyStories), window= and max_tokens= of text."""
    allow_code: bool = False
    """Judge programs by running them, in a sandbox; humaneval needs it."""
    chat: bool = False
    """Ask through the model's chat template; thoughts before the answer are not judged."""
    system: str | None = None
    """System prompt of the chat."""
    template: tuple[str, ...] = ()
    """Variables of the chat template, as name=value (enable_thinking=false)."""
    policy: str | None = None
    """Name of a cache policy from the list above; by default the one that the checkpoint
    declares."""
    options: tuple[str, ...] = ()
    """Options of the policy, as name=value (window=256) or as one JSON object."""
    policies: tuple[str, ...] = ()
    """Several policies in place of one, as POLICY,option=value,...; the others are compared with
    the first. Besides the policy's options: model=, adapter= (as --model and --adapter), kv_dtype=
    (float8_e4m3) and name= (of its row)."""
    problems: int | None = CALL["problems"]
    """Problems to answer; by default all of a file, and 200 of generated ones."""
    chains: int = CALL["chains"]
    """Answers to each problem; with more than one, a vote is scored too."""
    split: Split = CALL["split"]
    """Split of a generated task; files have no splits."""
    temperature: float = SAMPLING.temperature
    """0 takes the most likely token."""
    top_p: float = SAMPLING.top_p
    """Keep the most likely tokens until their probability reaches this."""
    max_new_tokens: int = SAMPLING.max_new_tokens
    """Longest answer; the model's positions may end it earlier."""
    seed: int = CALL["seed"]
    """Seed of the sampling: the same seed gives the same answers."""
    lanes: int = SERVING.lanes
    """Sequences in the cache at a time."""
    page_size: int = SERVING.page_size
    """Tokens of a page of the cache; 16 for Quest as published."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights and the cache; by default that of the files."""
    answers: pathlib.Path | None = None
    """Folder for the answers, with a subfolder for each of --policies; the same call resumes from
    it."""
    samples: int = 3
    """Completions to keep in the file of --out."""
    out: pathlib.Path | None = None
    """JSON file for the results, with device, versions, date and command."""

    def make_sampling(self) -> dms_jax.Sampling:
        """Returns the sampling options."""
        return dms_jax.Sampling(
            temperature=self.temperature, top_p=self.top_p, max_new_tokens=self.max_new_tokens
        )

    def make_chat(self) -> Chat | None:
        """Returns the chat options; None for plain text prompts."""
        return read_chat(asked=self.chat, system=self.system, template=self.template)


Measure = Callable[[dms_jax.LanguageModel, Candidate, pathlib.Path | None], Evaluated]


def main(config: Config) -> Evaluated | dict[str, Evaluated]:
    """Evaluates, prints the table, writes the file; returns the result, or several by name."""
    if config.samples < 0:
        raise dms_jax.ConfigError(f"--samples must be at least 0, got {config.samples}.")
    if config.out is not None:
        make_place("--out", config.out)
    measure = read_task(config)
    if config.policies:
        return compare(config, measure)
    policy = read_policy(config.policy, config.options)
    options = read_options(config.options)
    one = Candidate(config.task, policy, options, config.model, config.adapter)
    model = load_model(config.model, config.adapter, config.dtype, config.make_mesh())
    result = measure(model, one, config.answers)
    describe(config, result)
    if config.out is not None:
        write_json(
            config.out, {**provenance(config), "model": config.model, **data(config, result)}
        )
    return result


def compare(config: Config, measure: Measure) -> dict[str, Evaluated]:
    """Evaluates policies one after the other, and lists failed ones at the end.

    Raises:
      ConfigError: --policy or --options is given as well.
    """
    if config.policy is not None or config.options:
        raise dms_jax.ConfigError(
            "--policies holds every policy with its options, as TOVA,budget=64; leave out --policy "
            "and --options."
        )
    candidates = read_candidates(config.policies, model=config.model, adapter=config.adapter)
    console, mesh = Console(), config.make_mesh()
    results: dict[str, Evaluated] = {}
    failed: dict[str, str] = {}
    models: dict[tuple[str, str | None], dms_jax.LanguageModel] = {}
    for each in candidates:
        try:
            if (each.model, each.adapter) not in models:
                models.clear()  # before loading the next one: both may not fit a device
                models[each.model, each.adapter] = load_model(
                    each.model, each.adapter, config.dtype, mesh
                )
            answers = None if config.answers is None else config.answers / each.name
            model = models[each.model, each.adapter]
            results[each.name] = measure(model, each, answers)
        except FAILURES as error:
            if not results or gave_up(error):
                raise
            failed[each.name] = told(error)
        done = "could not run" if each.name in failed else "done"
        print(f"{each.name}: {done}", file=sys.stderr)
        if config.out is not None:
            write_json(config.out, report(config, results, failed))
    show(console, results, config.task)
    for name, why in failed.items():
        print(f"{name} could not run: {why}")
    return results


def told(error: Exception) -> str:
    """Returns the message of an error; one of the library names options, not arguments."""
    if isinstance(error, dms_jax.DmsJaxError):
        return spelled(error, options_of(Config))
    return str(error)


def report(config: Config, results: dict[str, Evaluated], failed: dict[str, str]) -> dict[str, Any]:
    """Returns the JSON data of several policies for --out."""
    first = next(iter(results.values()))
    rows = [
        {"name": name, **data(config, each), "change": change(each, first).to_list()}
        for name, each in results.items()
    ]
    rows += [{"name": name, "failed": why} for name, why in failed.items()]
    return {**provenance(config), "model": config.model, "systems": rows}


def read_task(config: Config) -> Measure:
    """Returns a function that evaluates a model on the task.

    Raises:
      ConfigError: the task is unknown, or an option does not apply to it.
      DataError: the task's file cannot be read.
    """
    check("--problems", config.problems, Count | None)
    check("--chains", config.chains, Count)
    check("--seed", config.seed, Whole)
    serving = Serving(lanes=config.lanes, page_size=config.page_size)
    return (predicted if config.task == TEXT else answered)(config, serving)


def predicted(config: Config, serving: Serving) -> Measure:
    """Returns a function that measures the loss of a model on a text."""
    defaults = Config()
    for name in _OF_PROBLEMS.split():
        if getattr(config, name) != getattr(defaults, name):
            raise dms_jax.ConfigError(
                f"--{name.replace('_', '-')} is for tasks that have problems; {TEXT} is predicted "
                "token by token."
            )
    fields = read_options(config.task_options, "--task-options")
    check_names("--task-options", fields, _TEXT_OPTIONS)
    path = fields.pop("path", assets.path("tinystories") / "valid.txt")
    TextFiles(path)  # fail before a long load
    for name, value in fields.items():
        check(f"--task-options {name}", value, Count | None)
    serving = dataclasses.replace(serving, lanes=min(serving.lanes, _TEXT_LANES))

    def measure(
        model: dms_jax.LanguageModel, candidate: Candidate, answers: pathlib.Path | None
    ) -> Evaluated:
        return perplexity(
            model,
            path,
            policy=candidate.policy_for(model),
            serving=dataclasses.replace(serving, kv_dtype=candidate.kv_dtype),
            progress=True,
            **fields,
        )

    return measure


def answered(config: Config, serving: Serving) -> Measure:
    """Returns a function that scores answers in text or programs."""
    chat, sampling = config.make_chat(), config.make_sampling()
    tasks = read_tasks(
        config.task,
        config.task_options,
        allow_code=config.allow_code,
        others=(TEXT,),
    )
    read_files(tasks, config.problems)

    def measure(
        model: dms_jax.LanguageModel, candidate: Candidate, answers: pathlib.Path | None
    ) -> Evaluated:
        return evaluate(
            model,
            tasks,
            policy=candidate.policy_for(model),
            problems=config.problems,
            split=config.split,
            chains=config.chains,
            sampling=sampling,
            chat=chat,
            seed=config.seed,
            out=answers,
            progress=True,
            serving=dataclasses.replace(serving, kv_dtype=candidate.kv_dtype),
        )

    return measure


def data(config: Config, result: Evaluated) -> dict[str, Any]:
    """Returns the JSON data of a result for --out."""
    if isinstance(result, Perplexity):
        return result.to_dict()
    return result.to_dict(problems=bool(config.policies), samples=config.samples)


def describe(config: Config, result: Evaluated) -> None:
    """Prints a single result."""
    found = result.to_dict()
    name = found["policy"]["name"]
    match result:
        case Perplexity():
            print(
                f"{found['tokens']:,} tokens of {found['path']}:\n{result.loss} nats a token, "
                f"perplexity {found['perplexity']:.3f}, peak {found['peak']:,.1f} tokens\n"
                f"{name}: {found['reads']:,.1f} entries read a token, averages over layers and "
                "heads.\n± one standard error over windows."
            )
        case Result():
            rows = [{"label": config.task, **found}]
            if len(result.tasks) > 1:
                rows += [{"label": each, **result.of_task(each).to_dict()} for each in result.tasks]
            title = f"{name}: {result.seconds:.1f} s with compilation"
            Console().print(terminal_table(summary_rows(rows), title=title, numbers=True))
            print(
                "In percent, ± one standard error clustered by problem. peak, reads: tokens of"
                "\nall chains of a problem, averages over layers and heads. ratio: tokens seen"
                "\nover live ones."
            )
