"""Every script: options, exit status, output files, and its smallest run."""

import dataclasses
import importlib
import json
import pathlib
import re
import runpy
import sys

import jax

# Its first import adds a jax setting, after which everything is traced again.
import jax.experimental.pallas.tpu
import pytest

import dms_jax
from dms_jax.command_line import retrofit, running
from dms_jax.model import low_rank
from experiments.benchmarks import shapes, vllm_peer
from experiments.benchmarks.settings import check_numbers

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "experiments").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]
# The smallest settings of scripts that run on a CPU without replacing any part.
RUNS: dict[str, dict] = {
    "benchmarks.decode_steps": dict(
        shapes=("tiny",),
        batch=2,
        context=192,
        window=16,
        chunk=4,
        repeats=1,
        dtype="float32",
        ratios=(1, 4),
        heads=("uneven", "even", "few"),
        model_parallel=(1, 2),
        data_parallel=(2,),
    ),
    "benchmarks.policies": dict(
        shape="tiny", context=640, batch=1, ratios=(2,), only=("SnapKV", "KVzap", "KCache")
    ),
    "benchmarks.policies, prompts": dict(
        what="prompts", shape="tiny", context=600, batch=2, ratios=(2,), only=("H2O",)
    ),
    "benchmarks.throughput": dict(
        shape="tiny",
        contexts=(256,),
        ratios=(1, 4),
        most=2,
        window=16,
        kcache_context=64,
        kcache_tops=(8,),
        kcache_tokens=96,
        repeats=1,
        dtype="float32",
    ),
    "benchmarks.training": dict(cases=("tiny+products", "tiny-fsdp2+model2"), steps=1),
    "benchmarks.vllm_peer": dict(  # vLLM's rows say that it is missing
        shape="tiny",
        parts=("plain",),
        chats=(2,),
        prompts=((2, 600),),
        backends=("FLASH_ATTN",),
        runs=1,
    ),
}


def ended(name, monkeypatch, *arguments) -> int:
    """Runs a script as `python -m` does; its exit status."""
    monkeypatch.delitem(sys.modules, name, raising=False)  # as if the script were not imported yet
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__")
    return end.value.code


@pytest.mark.parametrize("name", SCRIPTS)
def test_options_are_read_and_bad_ones_refused(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(running, "running_program", lambda: f"python -m {name}")
    fields = {field.name: field for field in dataclasses.fields(config_of(name))}
    assert ended(name, monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert f"usage: python -m {name}" in shown
    for field in fields.values():
        if "Positional" not in str(field.type):
            assert f"-{field.name.replace('_', '-')}" in shown
    assert ended(name, monkeypatch, "--no-such-option", "1") == 2
    said = capsys.readouterr()
    assert "no-such-option" in said.err
    assert said.out == ""
    # Committed results are overwritten only on request.
    for place in fields.keys() & {"out", "pages", "save", "pack"}:
        default = fields[place].default
        assert not isinstance(default, pathlib.Path) or default.parts[0] == "runs"
    if "out" not in fields:
        return
    # The parent of the output folder is a file; kernels are timed only on a GPU.
    (tmp_path / "file").touch()
    missing = dataclasses.MISSING
    required = [x.name for x in fields.values() if x.default is x.default_factory is missing]
    given = [word for each in required for word in (f"--{each}", str(tmp_path / "file"))]
    monkeypatch.setattr(dms_jax, "retrofit", lambda *args, **more: pytest.fail("it went on"))
    assert ended(name, monkeypatch, *given, "--out", str(tmp_path / "file" / "out")) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "--out" in said or "sees no GPU" in said


def config_of(name: str) -> type:
    return importlib.import_module(name).Config


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_smallest_run_writes_figures(name, tmp_path, monkeypatch):
    """Figures are written, and none is NaN."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    module = importlib.import_module(f"experiments.{name.partition(',')[0]}")
    default = module.Config().out
    folder = default is not None and not default.suffix
    out = tmp_path / (default.name if default is not None else "report.json")
    module.main(module.Config(out=out, **RUNS[name]))
    written = list(out.iterdir()) if folder else [out]
    assert written
    for path in written:
        assert path.is_dir() or path.stat().st_size > 0
        if path.suffix == ".json":
            assert json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.mark.nightly
def test_adapter_is_timed_without_and_with_evictions(tmp_path):
    original = shapes.model_of("tiny", "float32")
    dms_jax.save(original, dms_jax.Vanilla(), tmp_path / "base")
    model = dms_jax.load(tmp_path / "base")
    policy = dms_jax.DMS(window=16, source="adapter", alpha_offset=-5.0)  # evicts, untrained
    model = shapes.with_scorer(model, policy)
    size = low_rank.LowRank(rank=2)
    factors = low_rank.initial_factors(model.transformer, size, jax.random.key(0))
    added = low_rank.add_factors(model.transformer, size, factors)
    model = dataclasses.replace(model, transformer=added)
    dms_jax.save(model, policy, tmp_path / "adapter", adapter_only=True)
    vllm_peer.main(
        vllm_peer.Config(
            model=tmp_path / "base",
            adapter=tmp_path / "adapter",
            shape="tiny",
            parts=("adapter",),
            chats=(2,),
            runs=1,
            out=tmp_path / "adapter.json",
        )
    )
    rows = json.loads((tmp_path / "adapter.json").read_text())["rows"]
    ratios = {row["system"]: row["compression_ratio"] for row in rows}
    assert len(rows) == len(ratios) == 5
    evicting = {name: ratio for name, ratio in ratios.items() if ratio > 1}
    assert set(evicting) == {f"dms_jax, DMS, updates {where}" for where in ("merged", "beside")}


def test_bad_number_names_its_option():
    @dataclasses.dataclass(frozen=True)
    class Config:
        rounds: int = 2
        ratios: tuple[float, ...] = (1.0, 4.0)
        window: int = 8

        def __post_init__(self):
            check_numbers(self, may_be_zero=("window",))

    assert Config(window=0).window == 0
    for wrong, said in (
        (dict(rounds=0), "--rounds must be positive, got 0"),
        (dict(rounds=float("nan")), "--rounds must be finite, got nan"),
        (dict(ratios=(4.0, 0.0)), r"--ratios must be positive, got \(4.0, 0.0\)"),
        (dict(ratios=()), "--ratios: give at least one"),
        (dict(window=-1), "--window must not be negative, got -1"),
    ):
        with pytest.raises(dms_jax.ConfigError, match=said):
            Config(**wrong)


def test_every_published_file_has_one_row_with_a_known_command():
    """The table of experiments/README.md; a bare name lies in the folder of the one before."""
    text = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    table = text.partition("## Figures and tables")[2].partition("\n## ")[0]
    named = []
    for row in re.findall(r"^\| .*\S \|$", table, re.MULTILINE):
        _, _, commands, _, files, _ = row.split("|")
        folder = pathlib.PurePath()
        for name in re.findall(r"`([^`]+\.(?:json|png))`", files):
            folder = folder if "/" not in name else pathlib.PurePath(name).parent
            named.append(str(folder / pathlib.PurePath(name).name))
        for command in re.findall(r"`((?:benchmarks|reproduction|examples)\.[^`]+)`", commands):
            module, *options = command.split()
            known = {field.name for field in dataclasses.fields(config_of(f"experiments.{module}"))}
            used = {option[2:].replace("-", "_") for option in options if option[:2] == "--"}
            assert used <= known, command
    results = ROOT / "experiments" / "results"
    there = [path for path in results.rglob("*") if path.suffix in (".json", ".png")]
    assert sorted(named) == sorted(path.relative_to(results).as_posix() for path in there)


@pytest.mark.parametrize("name", ["README.md", "slurm.sh", "gke.yaml", "tpu_slice.sh"])
def test_launch_files_use_options_of_retrofit(name):
    text = (ROOT / "experiments" / "launch" / name).read_text(encoding="utf-8")
    assert re.search(r"dms-jax,? retrofit", text)
    known = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(retrofit.Config)}
    own = {"--data", "--out", "--data-shards", "--batch-size", "--model-shards", "--coordinator"}
    used = set(re.findall(r"--[a-z-]+", text)) & (own | {"--processes", "--process"})
    assert {"--out", "--data-shards"} <= used <= known
