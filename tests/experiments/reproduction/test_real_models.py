"""The measurement of real models: its plan, its budgets, its lessons; and one job of each kind."""

import dataclasses
import json
import pathlib
import types

import pytest

import dms_jax
from experiments.reproduction import real_models
from experiments.reproduction.files import write_json
from experiments.reproduction.processes import own_place, place_of
from experiments.reproduction.queue import OutOfTimeError
from experiments.reproduction.real import jobs as real_jobs
from experiments.reproduction.real import lessons, plan, systems
from experiments.reproduction.real import speed as real_speed
from experiments.reproduction.real.budgets import calibrated
from experiments.reproduction.real.jobs import Worker, check_settings
from experiments.reproduction.real.plan import Job, Paths, free
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.sweep import CENTRE, SWEEPS
from experiments.reproduction.real.systems import CONTROL, FREE, PLANNED, RIVAL, TRAININGS
from experiments.reproduction.runs import read_plan, write_plan

GIVEN = Config(qwen="reasoner-11m", smollm2="reasoner-11m", data=pathlib.Path("data"))


# -- the plan -------------------------------------------------------------------------------------


def test_every_training_has_a_recipe_of_the_plans_tokens_that_settles():
    for training in TRAININGS.values():
        recipe = training.recipe(GIVEN)
        steps = recipe.total_steps(training.policy or dms_jax.Vanilla())
        whole = GIVEN.tokens if training.model == systems.QWEN else GIVEN.small_tokens
        whole = GIVEN.sweep_tokens if training.of_sweep else whole
        tokens = training.share * whole
        assert steps * recipe.batch_size * recipe.sequence_length == pytest.approx(tokens, rel=0.01)
        last = recipe.progress(steps, training.policy or dms_jax.Vanilla())
        assert last.compression_ratio == (training.ratio if training.evicts_as_trained else 1)
        assert recipe.stages[-1].final_learning_rate in (0, 1e-5)


def test_what_is_planned_is_the_librarys_recipe_at_its_ratio():
    recipe = TRAININGS[PLANNED].recipe(GIVEN)
    same = dataclasses.replace(recipe, name="dms_self_taught", snapshots=())
    assert same == dms_jax.recipes.dms_self_taught(TRAININGS[PLANNED].ratio)
    control = TRAININGS[CONTROL].recipe(GIVEN)
    assert control.total_tokens(dms_jax.Vanilla()) == recipe.total_tokens(dms_jax.DMS())
    assert control.trainable == recipe.trainable == "low_rank"


def test_texts_without_answers_are_learned_whole():
    for training in TRAININGS.values():
        if training.model == systems.SMOLLM2 or training.lessons in ("texts", "mixed"):
            assert not training.recipe(GIVEN).answers_only
    assert TRAININGS["dmc"].recipe(GIVEN).answers_only


def test_every_method_is_asked_every_task():
    """And for every ratio, where it has a budget."""
    names = {job.name for job in plan.jobs(GIVEN)}
    free = ("vanilla", "tova", "snapkv", "expected", "streaming", "h2o", "quest", "kcache")
    free += ("vanilla-float8",)
    qwen = ("control-at3.3", "dmc-at4", "adapter-to-4-at4", "low-rank-to-4-at4", "all-to-4-at4")
    small = ("control-at4", "dmc-at4", "adapter-w16-at4", "low-rank-w16-at4", "all-to-4-at4")
    tasks = ("gsm8k", *systems.OTHERS[systems.QWEN])
    wanted = {f"asking-qwen-{each}-{task}" for each in (*free, *qwen) for task in tasks}
    tasks = (*systems.MEASURES[systems.SMOLLM2], *systems.OTHERS[systems.SMOLLM2])
    asked = (*free, *(f"smollm2-{each}" for each in small))
    wanted |= {f"asking-smollm2-{each}-{task}" for each in asked for task in tasks}
    wanted |= {f"asking-qwen-{each}-at{ratio}-gsm8k" for each in free[1:-1] for ratio in (2, 4, 8)}
    assert wanted <= names


def test_what_the_verdicts_need_comes_first():
    names = [job.name for job in plan.jobs(GIVEN)]
    assert len(set(names)) == len(names)
    order = [
        "lessons-qwen-0",
        "asking-qwen-vanilla-gsm8k",
        "speed-qwen-speed",
        f"training-qwen-{PLANNED}",
        f"training-qwen-{RIVAL}",
        f"asking-qwen-{PLANNED}-at3.3-unseen",
        f"asking-qwen-{RIVAL}-at3.3-gsm8k",
        "training-qwen-control",
        "asking-qwen-h2o-gsm8k",
        "asking-qwen-control-at3.3-gsm8k",
        f"asking-qwen-{PLANNED}-at3.3-frontier",
        "asking-qwen-quest-gsm8k",
        "asking-qwen-dms-float8-gsm8k",
        "training-qwen-low-rank-to-4",
        "training-qwen-dmc",
        "asking-qwen-dmc-at4-gsm8k",
        "asking-qwen-low-rank-to-4-at2-gsm8k",
        "lessons-smollm2-0",
        "asking-smollm2-smollm2-adapter-w16-at4-needle",
        "training-smollm2-smollm2-low-rank-w16",
        "training-smollm2-smollm2-control",
        "asking-smollm2-tova-choices",
        "training-smollm2-smollm2-dmc",
        "asking-qwen-control-at3.3-frontier",
        "asking-qwen-vanilla-math500",
        f"asking-qwen-{PLANNED}-at3.3-math500",
        "asking-qwen-tova-half-more-gsm8k",
        "asking-qwen-tova-math500",
    ]
    places = [names.index(name) for name in order]
    assert places == sorted(places)
    assert "training-smollm2-smollm2-adapter-w16" not in names  # it ships
    scorers = [name for name in names if name.split("-")[2] in ("kvzap", "kvpop")]
    asked = [name.split("-")[2] for name in scorers if name.endswith("at3.3-gsm8k")]
    assert asked == ["kvzap", "kvpop"]


def test_answers_and_the_planned_retrofit_may_come_from_the_command(tmp_path, monkeypatch):
    """They are awaited, copied, and neither sampled nor trained again."""
    config = dataclasses.replace(
        GIVEN, out=tmp_path / "out", self_taught=tmp_path / "taught", smollm2="", shards=1
    )
    worker, paths = Worker(config, 1e18), Paths(config)
    taught = (Job("lessons", "qwen", "0"), Job("training", "qwen", PLANNED))
    assert [paths.ready(job) for job in taught] == [False, False]
    assert worker._busy()
    (config.self_taught / "answers").mkdir(parents=True)
    (config.self_taught / "answers" / "journal").write_text("answers")
    (config.self_taught / "lessons.json").write_text("{}")
    assert [paths.ready(job) for job in taught] == [True, False]
    steps = [{"step": n, "tokens": 8, "seconds": 1.0} for n in (1, 2)]
    steps[-1]["evaluation"] = {"distillation": 0.5}
    model = config.self_taught / "training" / "model"
    model.mkdir(parents=True)
    (model / "adapter.safetensors").write_bytes(b"1234")
    (model.parent / "log.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (model.parent / "checkpoints").mkdir()
    assert not worker._busy()
    monkeypatch.setattr(Worker, "base", lambda *_: None)
    monkeypatch.setattr(real_jobs, "write_lessons", lambda *_: None)
    monkeypatch.setattr(real_jobs, "training_documents", lambda *_: [1, 2, 3])
    for job in taught:
        assert worker._take(job)
        worker._do(job)
    assert (paths.root / "lessons" / "qwen" / "0" / "journal").read_text() == "answers"
    assert (paths.model(PLANNED, "3.3") / "adapter.safetensors").exists()
    assert not (paths.training(PLANNED) / "checkpoints").exists()
    summary = json.loads(paths.summary(PLANNED).read_text())
    figures = [summary[name] for name in ("documents", "tokens", "seconds", "bytes", "held_out")]
    assert figures == [3, 16, 2.0, 4, {"distillation": 0.5}]
    assert paths.taught(Job("training", "qwen", RIVAL)) is None


def test_trainings_that_are_in_no_verdict_begin_in_the_order_of_the_settings():
    chosen = ("smollm2-control", "kvpop", "dmc", PLANNED)
    found = plan.jobs(dataclasses.replace(GIVEN, trainings=chosen))
    trained = [job.system for job in found if job.kind == "training"]
    assert trained == [PLANNED, "kvpop", "dmc", "smollm2-control"]
    asked = [job.system for job in found if job.kind == "asking" and job.setting]
    assert asked[:4] == 4 * [PLANNED]
    assert asked[4:6] == ["kvpop", "dmc"]  # at the end
    assert asked[6:10] == ["kvpop", "kvpop", "kvpop", "dmc"]  # other budgets, and on the way


def test_a_training_that_was_decided_before_the_run_stands_for_election_alone(tmp_path):
    config = dataclasses.replace(GIVEN, judged=RIVAL, smollm2="", out=tmp_path)
    names = [job.name for job in plan.jobs(config)]
    order = [
        f"training-qwen-{RIVAL}",
        f"asking-qwen-{RIVAL}-at3.3-gsm8k",
        "training-qwen-control",
        "asking-qwen-h2o-gsm8k",
        f"asking-qwen-{RIVAL}-at3.3-frontier",
        f"training-qwen-{PLANNED}",
    ]
    places = [names.index(name) for name in order]
    assert places == sorted(places)
    paths = Paths(config)
    tova = free("qwen", "tova")
    write_json(paths.result(free("qwen", "vanilla")), {"peak": 384.0})
    write_json(paths.result(Job("asking", "qwen", PLANNED, "3.3", "gsm8k")), {"peak": 90.0})
    assert not paths.ready(tova)  # what others hold as much as is another one
    write_json(paths.result(Job("asking", "qwen", RIVAL, "3.3", "gsm8k")), {"peak": 120.0})
    assert paths.ready(tova)
    assert calibrated(paths, tova, FREE["tova"]).budget == 120
    with pytest.raises(dms_jax.ConfigError, match="no training 'warm'; there are low-rank-w16, "):
        plan.jobs(dataclasses.replace(config, judged="warm"))


def test_what_ships_is_there():
    paths = Paths(GIVEN)
    shipped = [each for each in TRAININGS.values() if each.ships]
    assert {each.model for each in shipped} == {systems.QWEN, systems.SMOLLM2}
    for each in shipped:
        adapter = paths.model(each.name, f"{each.ratio:g}") / "dms_adapter.json"
        policy = dms_jax.policies.from_dict(json.loads(adapter.read_text())["policy"])
        assert policy == each.policy


def test_only_the_models_that_are_given_are_measured(tmp_path):
    for config in (dataclasses.replace(GIVEN, qwen=""), dataclasses.replace(GIVEN, smollm2="")):
        assert {job.model for job in plan.jobs(config)} == set(config.models)
    for config in (Config(), Config(qwen="m.gguf"), Config(data=tmp_path)):
        with pytest.raises(dms_jax.ConfigError, match="give --data, and --qwen or --smollm2"):
            real_models.main(dataclasses.replace(config, out=tmp_path))
    with pytest.raises(dms_jax.ConfigError, match="no training 'al'; there are low-rank-w16, "):
        plan.jobs(dataclasses.replace(GIVEN, trainings=("al",)))
    with pytest.raises(dms_jax.ConfigError, match="lanes must be positive, got 0"):
        Config(lanes=0)


def test_a_method_waits_for_what_its_budget_comes_from(tmp_path):
    paths = Paths(dataclasses.replace(GIVEN, out=tmp_path))
    tova = free("qwen", "tova")
    assert paths.ready(free("qwen", "vanilla"))
    assert not paths.ready(tova)
    write_json(paths.result(free("qwen", "vanilla")), {})
    assert not paths.ready(tova)
    write_json(paths.result(Job("asking", "qwen", PLANNED, "3.3", "gsm8k")), {})
    assert paths.ready(tova)
    training = Job("training", "qwen", PLANNED)
    assert not paths.ready(training)
    for shard in plan.shards(paths.config, "qwen"):
        write_json(paths.lessons("qwen", shard), {})
    assert paths.ready(training)
    end = Job("asking", "qwen", "dmc", "4", "gsm8k")
    on_the_way = dataclasses.replace(end, setting="2")
    (paths.training("dmc") / "snapshots" / "2").mkdir(parents=True)
    assert [paths.ready(each) for each in (on_the_way, end)] == [True, False]
    float8 = free("qwen", "dms-float8")
    assert not paths.ready(float8)
    (paths.model(PLANNED, "3.3")).mkdir(parents=True)
    assert paths.ready(float8)
    judged = Paths(dataclasses.replace(paths.config, judged=RIVAL))
    assert not judged.ready(float8)  # it is the retrofit of the verdict that is asked
    assert paths.ready(Job("asking", "smollm2", systems.SHIPPED, "4", "piqa"))


def test_a_scorer_waits_for_its_training_and_for_what_it_is_to_hold(tmp_path):
    paths = Paths(dataclasses.replace(GIVEN, out=tmp_path))
    scorer = Job("asking", "qwen", "kvpop", "3.5", "gsm8k")
    reference = paths.result(Job("asking", "qwen", PLANNED, "3.3", "gsm8k"))
    for place in (paths.model("kvpop", "3.5") / "x", reference):
        assert not paths.ready(scorer)
        write_json(place, {})
    assert not paths.ready(scorer)
    write_json(paths.result(free("qwen", "vanilla")), {})
    assert paths.ready(scorer)


def test_where_workers_share_a_gpu_one_trains_and_only_who_is_alone_times_steps(monkeypatch):
    gpus = ["0", "1", "2", "3"]
    places = [place_of(index, 7, gpus) for index in range(7)]
    assert [each["GPU_PLACE"] for each in places] == ["0/2"] * 3 + ["0/1"] + ["1/2"] * 3
    assert place_of(1, 2, []) == {}
    monkeypatch.delenv("GPU_PLACE", raising=False)
    assert own_place() == (0, 1)
    kinds = {}
    for place in ("0/2", "1/2", "0/1"):
        monkeypatch.setenv("GPU_PLACE", place)
        kinds[place] = {job.kind for job in Worker(GIVEN, 0).wanted()}
    assert kinds["0/1"] == {"lessons", "training", "asking", "speed"}
    assert kinds["0/2"] == {"lessons", "training", "asking"}
    assert kinds["1/2"] == {"lessons", "asking"}
    speed = Worker(dataclasses.replace(GIVEN, only="speed"), 0)
    assert [job.kind for job in speed.wanted()] == ["speed"]


def test_steps_that_were_timed_before_the_time_was_over_are_not_timed_again(tmp_path, monkeypatch):
    timed = []

    def time_steps(model, racer, **_):
        timed.append(racer.label)
        return {"ms": 1.0}

    def check_time():
        if len(timed) == 3:
            raise OutOfTimeError

    monkeypatch.setattr(real_speed, "time_steps", time_steps)
    monkeypatch.setattr(real_speed, "read_rate", lambda: 1.0)
    kept = tmp_path / "speed.jsonl"
    with pytest.raises(OutOfTimeError):
        real_speed.time_methods(GIVEN, None, check_time, kept)
    rows = real_speed.time_methods(GIVEN, None, lambda: None, kept)
    assert timed == [row["method"] for row in rows] == list(real_speed.METHODS)


def test_other_settings_than_those_of_the_run_are_refused(tmp_path):
    config = dataclasses.replace(GIVEN, out=tmp_path, temperatures=(1.0,))
    write_plan(config)
    assert read_plan(Config, tmp_path) == config
    check_settings(dataclasses.replace(config, processes=3, lanes=8, trainings=("control",)))
    with pytest.raises(dms_jax.ConfigError, match="shards=2, not 3"):
        check_settings(dataclasses.replace(config, shards=3))


# -- lessons --------------------------------------------------------------------------------------


def test_shares_are_all_questions_and_none_twice():
    shares = [lessons._share(range(10), shard, 4) for shard in range(4)]
    assert [list(share) for share in shares] == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def test_trainings_read_what_the_model_ended(tmp_path):
    config = dataclasses.replace(GIVEN, out=tmp_path, shards=1)
    row = {"question": 0, "answer": 0, "held_out": False, "prompt": [1], "response": [2, 3]}
    kept = row | {"ended": True}
    rows = [
        kept,
        kept | {"response": [4]},
        kept | {"ended": False},
        kept | {"held_out": True, "response": [5]},
    ]
    place = Paths(config).lessons("qwen", 0)
    place.parent.mkdir(parents=True)
    place.write_text("".join(json.dumps(each) + "\n" for each in rows))

    def responses(config):
        read = lessons.training_documents(config, "qwen", None)
        return [each.response.tolist() for each in read]

    assert responses(config) == [[2, 3], [4]]
    assert responses(dataclasses.replace(config, unended=True)) == [[2, 3], [4], [2, 3]]
    (held_out,) = lessons.held_out_exchanges(config, "qwen")
    assert (held_out.prompt.tolist(), held_out.response.tolist()) == ([1], [5])
    place.write_text(json.dumps(kept | {"ended": False}) + "\n")
    with pytest.raises(dms_jax.DataError, match="None of 1 answers of qwen is ended"):
        lessons.training_documents(config, "qwen", None)


def test_the_end_of_each_text_is_in_no_lesson(tmp_path):
    """RULER's essays are of the last sixteenth of the novels."""
    (tmp_path / "text").mkdir()
    for name in lessons.TEXTS:
        (tmp_path / "text" / name).write_text("learned " * 140 + "kept out" * 20)
    tokenizer = types.SimpleNamespace(encode=lambda text, **_: list(text.encode()))
    config = dataclasses.replace(GIVEN, data=tmp_path, sequence_length=8)
    windows = lessons._texts(config, types.SimpleNamespace(tokenizer=tokenizer))
    assert {bytes(each.tolist()) for each in windows} == {b"learned "}


def test_a_sweep_changes_one_thing_of_its_middle():
    fields = {field.name for field in dataclasses.fields(CENTRE)} - {"name", "words"}
    for each in SWEEPS:
        changed = [name for name in fields if getattr(each, name) != getattr(CENTRE, name)]
        assert len(changed) == 1, each.name
    recipe = CENTRE.recipe(GIVEN)
    wanted = dms_jax.recipes.dms_self_taught(4.0, tokens=GIVEN.sweep_tokens)
    assert dataclasses.replace(recipe, name="dms_self_taught") == wanted


def test_a_sweep_chooses_among_the_answers(tmp_path, monkeypatch):
    config = dataclasses.replace(GIVEN, out=tmp_path, shards=1, temperatures=(1.0, 0.7, 0.0))
    row = {"question": 3, "held_out": False, "prompt": [1], "ended": True}
    rows = [row | {"answer": place, "response": [token]} for place, token in enumerate((7, 5, 0))]
    place = Paths(config).lessons("qwen", 0)
    place.parent.mkdir(parents=True)
    place.write_text("".join(json.dumps(each) + "\n" for each in rows))
    judged = []

    class Questions:
        def score(self, number, text):
            judged.append((number, text))
            return float(text == "seven")

    class Model:
        class tokenizer:
            decode = staticmethod(lambda tokens: "seven" if 7 in tokens else "0")

    monkeypatch.setattr(lessons, "read_questions", lambda *_: Questions())

    def responses(which):
        read = lessons.training_documents(config, "qwen", Model(), which)
        return [each.response.tolist() for each in read]

    assert responses("all") == [[7], [5], [0]]
    assert responses("sampled") == [[7], [5]]
    assert responses("cooler") == [[5]]
    assert responses("warmer") == [[7]]
    assert responses("greedy") == [[0]]
    assert responses("correct") == [[7]]
    assert judged == [(3, "seven"), (3, "0"), (3, "0")]
    assert responses("correct") == [[7]]
    assert len(judged) == 3  # a file says what was right
    assert lessons.read_rows(config, "qwen") == rows  # and is no share of the answers
    monkeypatch.setattr(lessons, "_texts", lambda *_: ["a text"])
    monkeypatch.setattr(lessons, "_needles", lambda *_: ["a problem of retrieval"])
    *answers, text, problem = lessons.training_documents(config, "qwen", Model(), "mixed")
    assert [each.response.tolist() for each in answers] == responses("all")
    assert [text, problem] == ["a text", "a problem of retrieval"]


# -- a training that does not fit -----------------------------------------------------------------


@pytest.mark.nightly
def test_layers_are_recomputed_where_their_activations_do_not_fit(tmp_path, monkeypatch):
    config = dataclasses.replace(GIVEN, out=tmp_path)
    worker, tried = Worker(config, 1e18), []

    def train(base, *, recipe, **options):
        tried.append(recipe.remat)
        if recipe.remat != "everything":
            raise dms_jax.OutOfMemoryError  # as `train` does
        raise ZeroDivisionError  # as far as this test goes

    monkeypatch.setattr(real_jobs, "train", train)
    monkeypatch.setattr(real_jobs, "training_documents", lambda *_: [])
    monkeypatch.setattr(real_jobs, "held_out_exchanges", lambda *_: [])
    monkeypatch.setattr(real_jobs, "HeldOut", lambda *_: None)
    monkeypatch.setattr(Worker, "base", lambda *_: None)
    (tmp_path / "trainings" / PLANNED).mkdir(parents=True)
    for _ in range(2):  # the next training knows
        with pytest.raises(ZeroDivisionError):
            worker._training(Job("training", "qwen", PLANNED))
    assert tried == ["auto", "everything", "everything"]
