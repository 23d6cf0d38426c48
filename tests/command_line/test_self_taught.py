"""The self-taught retrofit, end to end in a tiny setting, and stage by stage."""

import copy
import dataclasses
import json
import math
import pathlib
import re
import shlex
import warnings

import numpy as np
import pytest

import dms_jax
from dms_jax.cache.accounting import Usage
from dms_jax.command_line import main, retrofit
from dms_jax.command_line.retrofit import PRESETS
from dms_jax.command_line.self_taught import page, stages
from dms_jax.command_line.self_taught import questions as reading
from dms_jax.command_line.self_taught.answering import choose
from dms_jax.command_line.self_taught.measuring import HeldOut
from dms_jax.data import Exchange
from dms_jax.evaluation.journal import Journal
from dms_jax.generation import Completion
from dms_jax.model.low_rank import LowRank

_, STORIES = PRESETS["self-taught-stories260k"]
TINY = dataclasses.replace(
    STORIES,
    questions=3,
    held_out=2,
    beginning=11,
    max_new_tokens=20,
    rank=2,
    window=8,
    ratios=(1.5, 2.0),
    tokens=4 * 2 * 32,
    sequence_length=32,
    batch_size=2,
    evaluate_every=2,
    checkpoint_every=1,
    lanes=8,
)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def stopped_and_run(tmp_path_factory):
    """A run that was killed while sampling, training and measuring, and then resumed."""
    config = dataclasses.replace(TINY, out=tmp_path_factory.mktemp("self-taught") / "run")
    patch = pytest.MonkeyPatch()
    add, train, score = Journal.add, dms_jax.retrofit, dms_jax.score

    def add_two(self, *answer):
        if len(self.answers) == 0 and answer[:2] == (1, 0):
            raise Killed
        add(self, *answer)

    def train_two_steps(*args, **options):
        def stop(record):
            if record["step"] == 2:
                raise Killed

        return train(*args, on_step=stop, **options)

    def score_one(model, *args, **options):
        if model.policy != dms_jax.Vanilla():
            raise Killed
        return score(model, *args, **options)

    for place, name, kill in (
        (Journal, "add", add_two),
        (dms_jax, "retrofit", train_two_steps),
        (dms_jax, "score", score_one),
    ):
        with patch.context() as patches:
            patches.setattr(place, name, kill)
            with pytest.raises(Killed):
                retrofit.main(config)
        assert not (config.out / "README.md").exists()
    retrofit.main(config)
    return config


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.nightly
def test_every_stage_resumes(stopped_and_run):
    out = stopped_and_run.out
    settings, *answers = lines(out / "answers" / "answers.jsonl")
    places = [(answer["problem"], answer["chain"]) for answer in answers]
    # 3 prompts at two temperatures, and one answer to each of the last two of the file.
    count = len(dms_jax.assets.stories("train"))
    expected = [(number, k) for number in range(3) for k in range(2)]
    assert sorted(places) == [*expected, (count - 2, 0), (count - 1, 0)]
    assert settings["settings"]["temperatures"] == [0.7, 1.0]
    assert [record["step"] for record in lines(out / "training" / "log.jsonl")] == [1, 2, 3, 4]
    lessons = lines(out / "lessons.jsonl")
    assert [(row["question"], row["answer"]) for row in lessons] == expected
    tokens = {place: answer["tokens"] for place, answer in zip(places, answers, strict=True)}
    assert all(row["response"] == tokens[row["question"], row["answer"]] for row in lessons)
    assert all(len(row["prompt"]) == 11 for row in lessons)
    assert tokens[0, 0] != tokens[0, 1]


@pytest.mark.nightly
def test_every_snapshot_and_ratio_is_measured(stopped_and_run):
    out = stopped_and_run.out
    measured = [
        record["evaluation"]
        for record in lines(out / "training" / "log.jsonl")
        if "evaluation" in record
    ]
    assert len(measured) == 2
    systems = json.loads((out / "results.json").read_text())["systems"]
    assert list(systems) == ["vanilla", "1.5", "2"]
    assert systems["vanilla"]["distillation"] == pytest.approx(0, abs=1e-6)
    assert systems["2"]["distillation"] == pytest.approx(measured[-1]["distillation"], rel=1e-4)
    # Passes over whole sequences and the decoding cache give the same loss.
    assert systems["2"]["decoded_loss"] == pytest.approx(systems["2"]["loss_whole"], rel=1e-3)
    assert systems["vanilla"]["peak"] >= systems["2"]["peak"] > 0


@pytest.mark.nightly
def test_held_out_loss_of_answers_and_of_whole_sequences():
    base = TINY.load()
    tokens = np.asarray(base.tokenizer.encode("Once upon a time there was a girl."), np.int32)
    short, long = (Exchange(tokens[:end], tokens[end:]) for end in (2, len(tokens) - 3))
    of_short, of_long = (HeldOut(TINY, base, [each])(base) for each in (short, long))
    logprobs = dms_jax.score(base, [tokens.tolist()])[0].logprobs
    assert of_long["loss"] == pytest.approx(-float(np.mean(logprobs[-3:])), rel=0.02)
    assert of_short["loss"] != pytest.approx(of_long["loss"], rel=0.02)
    assert of_short["loss_whole"] == of_long["loss_whole"]
    assert of_long["loss_whole"] == pytest.approx(-float(np.mean(logprobs)), rel=0.02)
    assert of_long["distillation"] == pytest.approx(0, abs=1e-6)


@pytest.mark.nightly
def test_the_adapter_generates_and_is_evaluated(stopped_and_run, tmp_path, capsys):
    """The commands of the documentation's first minutes, at a small size."""
    training = stopped_and_run.out / "training"
    command = page.trial(stopped_and_run)
    assert f"    {command}\n" in (stopped_and_run.out / "README.md").read_text()
    assert main([*shlex.split(command)[1:], "--max-new-tokens", "8"]) == 0
    assert "DMS: " in capsys.readouterr().out
    text = ["--model", "stories260k", "--task", "text", "--task-options", "max_tokens=40"]
    own = f"DMS,adapter={training / 'snapshots' / '2'}"
    policies = ["--policies", "Vanilla", own, "StreamingLLM,compression_ratio=2"]
    out = tmp_path / "policies.json"
    assert main(["evaluate", *text, *policies, "--out", str(out)]) == 0
    vanilla, dms, _ = json.loads(out.read_text())["systems"]
    assert (dms["name"], dms["policy"]["window"]) == ("DMS", 8)
    assert dms["peak"] < vanilla["peak"]


@pytest.mark.nightly
def test_other_settings_are_refused(stopped_and_run, monkeypatch):
    before = (stopped_and_run.out / "results.json").read_text()
    with pytest.raises(dms_jax.ConfigError, match=r"--seed 0, not 1, --window 8, not 9"):
        retrofit.main(dataclasses.replace(stopped_and_run, seed=1, window=9))
    monkeypatch.setattr(dms_jax, "retrofit", lambda *args, **more: pytest.fail("it trained again"))
    retrofit.main(stopped_and_run)  # nothing remains to do
    after = json.loads((stopped_and_run.out / "results.json").read_text())
    assert after["systems"] == json.loads(before)["systems"]


def completion(text: str, reason: str) -> Completion:
    usage = Usage(**{field.name: field.type(0) for field in dataclasses.fields(Usage)})
    return Completion(text, [5, 6], None, reason, usage)


def problems(path: pathlib.Path) -> pathlib.Path:
    rows = [{"question": f"{n} + 1?", "answer": f"Add.\n#### {n + 1}"} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("keep", "kept"), [("all", 3), ("ended", 2), ("correct", 1)])
def test_keep_filters_answers(stories, tmp_path, keep, kept):
    config = dataclasses.replace(
        TINY, prompts=problems(tmp_path / "p.jsonl"), keep=keep, questions=None, held_out=1
    )
    questions = reading.read_questions(config, stories)
    assert questions.task.name == "gsm8k"
    assert (questions.training, questions.held_out) == ((0, 1, 2), range(3, 4))
    answers = {
        (0, 0): completion(" Add. #### 1", "end"),
        (1, 0): completion(" #### 7", "end"),
        (2, 0): completion(" and so on", "length"),
        (3, 0): completion(" #### 4", "end"),
    }
    lessons = choose(config, questions, answers, tmp_path)
    assert lessons.figures | {"tokens": 0, "longest": 0} == {
        "sampled": 3,
        "ended": 2,
        "correct": 1,
        "kept": kept,
        "tokens": 0,
        "longest": 0,
        "held_out": 1,
    }
    assert len(lessons.training) == len(lines(tmp_path / "lessons.jsonl")) == kept
    again = choose(config, questions, answers, tmp_path)
    told = [[(*each.prompt, *each.response) for each in made.training] for made in (lessons, again)]
    assert told[0] == told[1]
    assert told[0][0] == (*questions.tokens[0], 5, 6)
    assert again.figures == lessons.figures


def test_no_kept_answers_error_suggests_options(stories, tmp_path):
    config = dataclasses.replace(
        TINY, prompts=problems(tmp_path / "p.jsonl"), keep="correct", held_out=1
    )
    questions = reading.read_questions(config, stories)
    answers = {place: completion("no", "length") for place in ((0, 0), (3, 0))}
    with pytest.raises(dms_jax.DataError, match="None of 1 answers is kept: 0 were ended"):
        choose(config, questions, answers, tmp_path)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_prompts_of_every_form(stories, tmp_path):
    tokenizer = copy.copy(stories.tokenizer)
    tokenizer.chat_template = TEMPLATE
    model = dataclasses.replace(stories, tokenizer=tokenizer)
    user, system = ({"role": role, "content": "Tell"} for role in ("user", "system"))
    answer = {"role": "assistant", "content": "No."}
    rows = [
        ({"prompt": "Tell"}, "<user>Tell<assistant>"),
        ({"prompt": [user]}, "<user>Tell<assistant>"),
        ({"messages": [system, user, answer]}, "<system>Tell<user>Tell<assistant>"),
        ({"question": "Ask"}, "<user>Ask<assistant>"),
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row, _ in rows))
    config = dataclasses.replace(TINY, prompts=path, questions=3, held_out=1)
    read = reading.read_questions(config, model)
    for number, (_, text) in enumerate(rows):
        assert read.tokens[number] == tokenizer.encode(text, add_special_tokens=False)
    plain = reading.read_questions(dataclasses.replace(config, chat="no"), model)
    assert plain.tokens[0] == tokenizer.encode("Tell")
    told = reading.read_questions(dataclasses.replace(config, system="Be"), model)
    assert told.tokens[0] == tokenizer.encode("<system>Be<user>Tell<assistant>", False)
    long = {"text": "Once upon a time there was a dog. " * 400}  # longer than the positions
    path.write_text((json.dumps(long) + "\n") * 3 + '{"text": "Another"}\n')
    begun = reading.read_questions(config, model)
    assert begun.tokens[0] == tokenizer.encode("Once upon a time there was a dog.")[:11]
    assert begun.chat is None  # texts are continued, so the page must not ask
    path.write_text(json.dumps(long) + "\n")
    with pytest.raises(
        dms_jax.ConfigError, match=r"leaves none to train on\. Give .* --held-out fewer"
    ):
        reading.read_questions(config, model)


def test_held_out_prompts_are_not_trained_on(stories, tmp_path):
    """The same questions occur earlier in the file, and texts have common beginnings."""
    path = tmp_path / "p.jsonl"
    rows = ["One day", "Ask me", "One day", "Tell me", "So it was", "Ask me", "One day"]
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    config = dataclasses.replace(TINY, prompts=path, questions=2, held_out=2)
    with warnings.catch_warnings(action="error"):  # others take their place
        questions = reading.read_questions(config, stories)
    assert (questions.training, questions.held_out) == ((3, 4), range(5, 7))
    held_out = [questions.tokens[number] for number in questions.held_out]
    assert not [number for number in questions.training if questions.tokens[number] in held_out]
    with pytest.warns(UserWarning, match="2 of the 3 prompts asked for are left .* 3 are the same"):
        reading.read_questions(dataclasses.replace(config, questions=3), stories)
    path.write_text((json.dumps({"prompt": "One day"}) + "\n") * 3)
    with pytest.raises(dms_jax.ConfigError, match=r"leaves none to train on \(1 of the others"):
        reading.read_questions(config, stories)


def test_wrong_settings_are_refused(stories, tmp_path, capsys):
    _, custom = PRESETS["self-taught"]
    with pytest.raises(dms_jax.ConfigError, match="give --model and --prompts"):
        retrofit.main(custom)
    config = dataclasses.replace(TINY, keep="correct", judge="none", out=tmp_path)
    with pytest.raises(dms_jax.ConfigError, match="--keep correct needs a judge"):
        reading.read_questions(config, stories)
    for changes, told in (
        (dict(style="boxed"), "--style boxed is of problems that a judge knows"),
        (dict(chat="yes"), r"--chat yes is for questions, and .*train\.txt.* is a text"),
        (dict(system="Be brief."), "--system is for questions"),
        (dict(template=("a=1",), chat="no"), "--template is for questions"),
    ):
        with pytest.raises(dms_jax.ConfigError, match=told):
            reading.read_prompts(dataclasses.replace(TINY, **changes))
    asked = dataclasses.replace(TINY, prompts=problems(tmp_path / "p.jsonl"), held_out=1)
    with pytest.raises(dms_jax.ConfigError, match="--system is for a chat: give --chat yes too"):
        reading.read_questions(dataclasses.replace(asked, system="Be brief."), stories)
    for option, value in (
        ("ratios", (1.0,)),
        ("temperatures", (0.7, -1.0)),
        ("temperatures", (math.nan,)),
        ("questions", 0),
        ("max_new_tokens", 0),
        ("lanes", 0),
        ("page_size", 0),
        ("evaluate_every", 0),
        ("checkpoint_every", 0),
    ):
        got = re.escape(str(value))
        told = rf"--{option.replace('_', '-')} must be .* (above|at least) \d, got {got}"
        with pytest.raises(dms_jax.ConfigError, match=told):
            dataclasses.replace(TINY, **{option: value})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (dict(sequence_length=2048), "--sequence-length 2048 is beyond the 512 positions"),
        (dict(window=31), "No token leaves a window of 31 in sequences of 32 tokens"),
    ],
)
def test_impossible_training_is_refused_before_sampling(tmp_path, monkeypatch, changes, told):
    monkeypatch.setattr(stages, "sample", lambda *_: pytest.fail("it sampled"))
    with pytest.raises(dms_jax.ConfigError, match=told):
        retrofit.main(dataclasses.replace(TINY, out=tmp_path / "run", **changes))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": "Tell"}, "must be a list of messages"),
        ({"messages": ["Tell"]}, "must be a list of messages"),
        ({"prompt": [1]}, "must be a list of messages"),
        ({"messages": [{"role": "user", "content": "Tell"}]}, "no chat template"),
    ],
    ids=["text", "texts", "numbers", "no template"],
)
def test_a_malformed_conversation_is_named_by_its_line(stories, tmp_path, row, told):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "Tell"}}\n{json.dumps(row)}\n')
    config = dataclasses.replace(TINY, prompts=path, questions=1, held_out=1)
    with pytest.raises(dms_jax.DataError, match=rf"p.jsonl, line 2: .*{told}"):
        reading.read_questions(config, stories)


@pytest.mark.nightly
def test_wrong_first_call_does_not_claim_the_directory(stories, tmp_path, monkeypatch):
    right = dataclasses.replace(TINY, out=tmp_path / "run")
    wrong = dataclasses.replace(right, prompts=tmp_path / "missing.jsonl")
    with pytest.raises(dms_jax.DataError, match=r"missing.jsonl cannot be read: No such file"):
        retrofit.main(wrong)
    with pytest.raises(dms_jax.CheckpointError):
        retrofit.main(dataclasses.replace(right, model=str(tmp_path / "no-model")))

    def sample(*args):
        raise Killed

    monkeypatch.setattr(stages, "sample", sample)
    with pytest.raises(Killed):
        retrofit.main(right)
    with pytest.raises(Killed):  # settings that change no figure may change
        retrofit.main(dataclasses.replace(right, lanes=4, checkpoint_every=5))
    with pytest.raises(dms_jax.ConfigError, match="--window 8, not 9"):
        retrofit.main(dataclasses.replace(right, window=9))


def test_defaults_equal_the_recipe():
    _, custom = PRESETS["self-taught"]
    recipe = dataclasses.replace(dms_jax.recipes.dms_self_taught(), snapshots=(2.0, 3.5))
    assert custom.make_recipe() == recipe
    assert custom.make_policy() == dms_jax.DMS(window=16, source="adapter")
    assert custom.adapter_only
    assert not custom.answers_only
    assert dataclasses.replace(custom, answers_only=True).make_recipe().answers_only
    other = dataclasses.replace(custom, settle=0.0, warmup=0.2).make_recipe()
    assert [(stage.kind, stage.warmup_steps) for stage in other.stages] == [("ramp", 122)]
    first = dataclasses.replace(dms_jax.recipes.dms_warm_up(), snapshots=(2.0, 3.5))
    assert dataclasses.replace(custom, from_attention=0.2).make_recipe() == first
    low = dataclasses.replace(custom, rank=4, alpha=2.0).make_recipe()
    assert low.low_rank == LowRank(4, 2.0)
