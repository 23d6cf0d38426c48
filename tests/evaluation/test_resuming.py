"""One queue, answers on disk as they finish, and resumed evaluations."""

import dataclasses
import errno
import json
import os

import pytest

import dms_jax
from dms_jax import terminal
from dms_jax.errors import DataError
from dms_jax.evaluation import Serving, evaluate
from dms_jax.evaluation import journal as module
from dms_jax.generation import Engine
from dms_jax.model.language_model import GenerationDefaults
from tests.evaluation.test_evaluating import Continue
from tests.generation.support import model_for, stories
from tests.support.fake_programs import faked

pytestmark = pytest.mark.usefixtures("fakes")

SAMPLING = dms_jax.Sampling(temperature=0.7, max_new_tokens=16)
SERVING = Serving(lanes=2, page_size=16, chunk=8)


def run(out=None, **changes):
    options = dict(problems=4, chains=2, sampling=SAMPLING, serving=SERVING)
    return evaluate(stories(), Continue(), out=out, **(options | changes))


@pytest.fixture(scope="module")
def whole():
    with faked():
        return run()


def same(left, right):
    """Equal except for the duration."""
    for field in dataclasses.fields(left):
        if field.name not in ("seconds", "cache_bytes"):
            one, other = getattr(left, field.name), getattr(right, field.name)
            assert str(one) == str(other), field.name


def test_all_problems_share_one_queue(queues, whole):
    same(run(), whole)
    assert queues == [8]


def test_token_by_token_prompts_start_together(queues):
    policy = dms_jax.TOVA(budget=20, prefill="evict_past_budget")
    run(policy=policy, sampling=dataclasses.replace(SAMPLING, max_new_tokens=1))
    assert queues == [2, 2, 2, 2]


def test_files_of_an_evaluation(tmp_path, whole):
    result = run(tmp_path / "run")
    same(result, whole)
    lines = [json.loads(line) for line in (tmp_path / "run/answers.jsonl").open()]
    assert lines[0]["settings"]["sampling"]["max_new_tokens"] == 16
    places = {(line["problem"], line["chain"]): line["text"] for line in lines[1:]}
    assert places == {(i, c): result.completions[i][c] for i in range(4) for c in range(2)}
    data = json.loads((tmp_path / "run/results.json").read_text())
    assert data["accuracy"] == result.to_dict()["accuracy"]
    assert "| continue |" in (tmp_path / "run/table.md").read_text()


class Enough(Exception):
    pass


def test_interrupted_evaluation_resumes(tmp_path, monkeypatch, queues, whole):
    add, added = module.Journal.add, []

    def third(self, *arguments):
        add(self, *arguments)
        added.append(arguments)
        if len(added) == 3:
            raise Enough

    with monkeypatch.context() as patch:
        patch.setattr(module.Journal, "add", third)
        with pytest.raises(Enough) as caught:
            run(tmp_path)
    assert len(caught.value.finished) >= 3
    path = tmp_path / "answers.jsonl"
    assert len(path.read_text().splitlines()) == 4
    with path.open("a") as file:
        file.write('{"problem": 3, "cha')  # cut short in the middle of a line
    queues.clear()
    same(run(tmp_path), whole)
    assert queues == [5]
    same(run(tmp_path), whole)
    assert queues == [5]  # nothing was left to do
    more = run(tmp_path, problems=5, chains=3)
    assert queues == [5, 15 - 8]
    same(more, run(problems=5, chains=3))


def test_other_settings_are_refused(tmp_path):
    short = dataclasses.replace(SAMPLING, max_new_tokens=2)
    run(tmp_path, problems=1, sampling=short)
    for changes, name in (
        ({"sampling": SAMPLING}, r"sampling \(`max_new_tokens` 2, not 16\)\."),
        ({"sampling": short, "policy": dms_jax.TOVA(budget=20)}, r"policy \(`budget`"),
        ({"sampling": short, "seed": 1}, r"`seed` \d+, not 1\."),
        (
            {"sampling": short, "serving": dataclasses.replace(SERVING, page_size=8)},
            r"`page_size` \d+, not 8\.",
        ),
    ):
        with pytest.raises(DataError, match=rf"answers\.jsonl holds .* settings: {name}"):
            run(tmp_path, problems=1, **changes)
    other = dataclasses.replace(
        stories(), transformer=model_for("dms").transformer, generation=GenerationDefaults()
    )
    changed = dataclasses.replace(other, transformer=scaled(other.transformer))
    with pytest.raises(DataError, match=r"settings: another model\."):
        evaluate(changed, Continue(), problems=1, sampling=short, serving=SERVING, out=tmp_path)
    path = tmp_path / "answers.jsonl"
    path.write_text(path.read_text() + "no\n")
    with pytest.raises(DataError, match=r"answers\.jsonl, line 4: not an answer"):
        run(tmp_path, problems=1, chains=1, sampling=short)


def scaled(transformer):
    import jax

    return jax.tree.map(lambda leaf: leaf * 1.01, transformer)


def test_unwritable_files_are_named(tmp_path, monkeypatch, whole):
    """A full disk, and a folder in place of a file: the error carries the answers."""
    (tmp_path / "table.md").mkdir()
    with pytest.raises(DataError, match=r"table\.md cannot be written: Is a directory") as caught:
        run(out=tmp_path)
    texts = [text for own in whole.completions for text in own]
    assert [caught.value.finished[index].text for index in range(8)] == texts
    with monkeypatch.context() as patch:
        patch.setattr(module.Journal, "add", full_disk)
        with pytest.raises(
            DataError, match=r"answers\.jsonl cannot be written: No space left"
        ) as full:
            run(out=tmp_path / "full")
    assert full.value.finished[0].text == texts[0]
    (tmp_path / "answers.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"answers\.jsonl, line 1: not an answer"):
        run(out=tmp_path)


class FullDisk:
    """A file with a buffer, which is also written when the file is closed."""

    def write(self, data):
        pass

    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    close = flush


def full_disk(journal, *answer, add=module.Journal.add):
    journal.close()
    journal._file = FullDisk()
    add(journal, *answer)


def test_progress_shows_the_running_score(capsys, whole, monkeypatch):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    same(run(progress=True), whole)
    shown = capsys.readouterr().err
    assert f"8 of 8, score {100 * whole.accuracy.value:.1f}%" in shown


def test_folder_is_locked(tmp_path, monkeypatch):
    small = dict(problems=1, chains=1, out=tmp_path)
    serve, second = Engine.serve, []

    def meanwhile(self, source):
        monkeypatch.setattr(Engine, "serve", serve)
        with pytest.raises(DataError, match=r"Another run is writing .*answers\.jsonl"):
            second.append(run(**small))
        return serve(self, source)

    monkeypatch.setattr(Engine, "serve", meanwhile)
    first = run(**small)
    assert second == []
    same(run(**small), first)
