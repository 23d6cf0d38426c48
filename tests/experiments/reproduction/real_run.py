"""A run of real models as its files are, from figures made by hand."""

import pathlib

import numpy as np

from experiments.reproduction.files import read_json, write_json
from experiments.reproduction.real import systems
from experiments.reproduction.real.measures import NEEDLES, TASKS_OF_CHOICES
from experiments.reproduction.real.plan import Job, Paths, free
from experiments.reproduction.real.results import Results
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import PLANNED

PROBLEMS = 400
SMALL = (systems.CHOICES, "needle")  # what the mean of SmolLM2's tasks is of
MAIN = Job("asking", "qwen", PLANNED, "3.3", "gsm8k")
ADAPTER = ("asking", "smollm2", "smollm2-adapter-w16", "4")
SIZES = {"batch": 7, "context": 99}
MAIN_FRONTIER = ("asking", "qwen", PLANNED, "3.3", "frontier")
CONTROL = Job("asking", "qwen", "control", "3.3", "gsm8k")
VERSIONS = {"versions": {"jax": "0"}, "date": "2026-01-01", "device": "a card"}


def figures(right: int, peak: float, **more) -> dict:
    """A record of so many right answers, the first ones."""
    scores = (np.arange(PROBLEMS) < right).astype(float)
    share = right / PROBLEMS
    return {
        "score": [share, (share * (1 - share) / (PROBLEMS - 1)) ** 0.5],
        "peak": peak,
        "mean_live": 0.7 * peak,
        "reads": 200 * peak,
        "cache_bytes": 1e4 * peak,
        "ended": 1.0,
        "new_tokens": 200.0,
        "per_problem": {"scores": scores.tolist()},
        **VERSIONS,
        **more,
    }


def run_of_two_models(tmp_path: pathlib.Path) -> Config:
    """A run with a retrofit, its control, and what needs no training."""
    config = Config(out=tmp_path, qwen="q.gguf", smollm2="s.gguf", data=pathlib.Path("data"))
    paths = Paths(config)
    for job, right, peak in (
        (free("qwen", "vanilla"), 120, 360.0),
        (MAIN, 116, 118.0),
        (CONTROL, 118, 362.0),
        (free("qwen", "tova"), 40, 118.0),
        (free("qwen", "expected"), 60, 119.0),
        (free("qwen", "streaming"), 90, 200.0),  # is not at that peak
        (free("qwen", "quest"), 119, 360.0),  # holds everything
    ):
        write_json(paths.result(job), figures(right, peak))
    for measure in SMALL:
        adapter = Job("asking", "smollm2", "smollm2-adapter-w16", "4", measure)
        small = (free("smollm2", "vanilla", measure), figures(200, 80.0))
        for job, own in (small, (adapter, figures(180, 40.0))):
            tasks = dict.fromkeys(TASKS_OF_CHOICES, own)
            if measure == "needle":  # of one score, with figures of each needle beside it
                tasks = {name: {"accuracy": own["score"]} for name in NEEDLES}
            write_json(paths.result(job), own | {"tasks": tasks})
    chains = {
        "scores": [[1, 0], [0, 0]],
        "answer_scores": [[1, 0], [0, 0]],
        "answers": [[0, 1], [-1, -1]],
        "reads": [[10, 20], [30, 40]],
        "peak": [[1, 2], [3, 4]],
        "new_tokens": [[5, 6], [7, 8]],
        "ended": [[True, True], [True, True]],
    }
    job = free("qwen", "vanilla", "frontier")
    more = {"sampling": {"max_new_tokens": 400}, "policy": {}, "chains_of_problems": chains}
    write_json(paths.result(job), figures(1, 2.0, **more))
    return config


def write_page_of(config: Config, folder: pathlib.Path) -> pathlib.Path:
    """The results.json of a page of a run, whose records say what they are of, as a run's do."""
    for path in config.out.glob("results/*/*/*.json"):
        (system, _, setting), model = path.parent.name.partition("-at"), path.parts[-3]
        names = {"model": model, "system": system, "setting": setting, "measure": path.stem}
        write_json(path, {"policy": {}} | read_json(path) | names)
    write_json(folder / "results.json", Results.read(config).to_dict())
    return folder / "results.json"
