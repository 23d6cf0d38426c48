"""Every command of `dms-jax`: options, exit status, errors, and where it writes."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest

import dms_jax
from dms_jax.assets import fetching
from dms_jax.command_line import COMMANDS, main, options, policy_options, reports, running
from dms_jax.errors import EngineFailedError
from dms_jax.policies import POLICIES
from tests.support.tree import ROOT

# The preset that a command needs before its options.
FIRST = {"retrofit": ["stories260k"]}


def module_of(name):
    return importlib.import_module(f"dms_jax.command_line.{name}")


def typed(name, *options):
    """Returns the arguments of a command with these options."""
    return [name, *FIRST.get(name, ()), *options]


def settings_of(name):
    """Returns the settings of a command's presets, or their dataclass."""
    module = module_of(name)
    presets = getattr(module, "PRESETS", {})
    return [config for _, config in presets.values()] or [module.Config]


def test_the_list_of_commands(capsys):
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(
            re.search(f"^  {name} .*{what}$", shown, re.M) for name, what in COMMANDS.items()
        )
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{dms_jax.__version__}\n"
    assert main(["generat"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "ConfigError: 'generat' is not a command (did you mean generate?); there"
    )


def test_python_m_runs_the_command():
    """The only test here that starts a process."""
    done = subprocess.run(
        [sys.executable, "-m", "dms_jax.command_line", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.strip()) == (0, dms_jax.__version__), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (dms_jax.ConfigError, 2),
        (dms_jax.DataError, 2),
        (dms_jax.CheckpointError, 2),
        (dms_jax.CapacityError, 2),
        (dms_jax.OutOfMemoryError, 1),
        (dms_jax.TrainingDivergedError, 1),
        (EngineFailedError, 1),
        (dms_jax.OtherProcessError, 1),
    ],
)
def test_wrong_call_exits_2_and_failed_run_1(error, status, capsys):
    def fail():
        raise error("Why it ended.")

    assert running.status_of(fail) == status
    assert capsys.readouterr().err == f"{error.__name__}: Why it ended.\n"


def test_other_exit_statuses(capsys):
    def interrupt():
        raise KeyboardInterrupt("stopped after step 2")

    assert running.status_of(interrupt, "Come again.") == 130
    assert capsys.readouterr().err == "Stopped after step 2. Come again.\n"
    for result, status in ((None, 0), (0, 0), (3, 3), (["rows"], 0)):
        assert running.status_of(lambda result=result: result) == status
    with pytest.raises(ZeroDivisionError):  # a bug is not a wrong call
        running.status_of(lambda: 1 / 0)


def test_closed_output_is_no_error(monkeypatch, capsys):
    """Like `dms-jax policies | head`; any other broken pipe is an error."""

    def fail():
        raise BrokenPipeError("of a worker")

    with pytest.raises(BrokenPipeError, match="of a worker"):
        running.status_of(fail)
    prints = [lambda text=text: print(text) for text in ("x", "x" * 100_000)]  # for some buffers
    calls = [lambda each=each: running.status_of(each) for each in prints]
    for call in (*calls, lambda: main(["--help"]), lambda: main(["--version"])):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as nobody:
            monkeypatch.setattr(sys, "stdout", nobody)
            assert call() == running.FAILED
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_options_and_unknown_ones_exit_2(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        main(typed(name, "--help"))
    assert end.value.code == 0
    shown = capsys.readouterr().out
    said, _, listed = shown.partition("usage: ")
    assert said.strip()
    assert listed.startswith(f"dms-jax {name} ")
    fields = {field.name: field for field in dataclasses.fields(module_of(name).Config)}
    for field in fields.values():
        nested = dataclasses.is_dataclass(field.default_factory)
        if not nested and "Positional" not in str(field.type):
            assert f"-{field.name.replace('_', '-')}" in shown
    if name in ("generate", "chat", "serve", "evaluate", "hyperscale"):
        for policy, kind in POLICIES.items():
            assert f"  {policy}: " in shown
            assert all(f"{field.name}=" in shown for field in dataclasses.fields(kind))
    for config in settings_of(name):
        kind = config if isinstance(config, type) else type(config)
        explained = set()
        for each in kind.__mro__[:-1]:
            (tree,) = ast.parse(inspect.getsource(each)).body
            for field, text in itertools.pairwise(tree.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=known)), ast.Expr(ast.Constant(str())):
                        explained.add(known)
        assert {field.name for field in dataclasses.fields(kind)} == explained
    with pytest.raises(SystemExit) as end:
        main(typed(name, "--no-such-option", "1"))
    assert end.value.code == 2
    said = capsys.readouterr()
    assert "no-such-option" in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_output_goes_to_runs_and_unwritable_output_exits_2(name, capsys, tmp_path):
    """The parent of the output folder is a file."""
    for config in settings_of(name):
        for place in ("out", "save", "answers"):
            path = getattr(config, place, None)
            assert not isinstance(path, pathlib.Path) or path.parts[0] == "runs"
    if "out" not in {field.name for field in dataclasses.fields(module_of(name).Config)}:
        return
    (tmp_path / "file").touch()
    assert main(typed(name, "--out", str(tmp_path / "file" / "out"))) == 2
    assert capsys.readouterr().err.startswith("ConfigError: --out")


def test_retrofit_presets_are_listed(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    presets = module_of("retrofit").PRESETS
    assert {"custom", "stories260k", "self-taught"} < presets.keys()
    with pytest.raises(SystemExit) as end:
        main(["retrofit", "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in presets)
    known = f"there are {', '.join(presets)} (dms-jax retrofit --help)."
    assert main(["retrofit"]) == main(["retrofit", "stories", "--out", "x"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"ConfigError: dms-jax retrofit needs a preset or options; {known}",
        f"ConfigError: 'stories' is not a preset of dms-jax retrofit; {known}",
    ]
    with pytest.raises(SystemExit):
        main(["retrofit", "self-taught", "--help"])
    assert "\nusage: dms-jax retrofit self-taught [-h]" in capsys.readouterr().out
    assert main(["retrofit", "self-taught"]) == main(["retrofit", "custom"]) == 2
    said = capsys.readouterr().err.splitlines()
    for line, named, point in (
        (said[0], "--model and --prompts", "self-taught-stories260k"),
        (said[1], "--model and --data", "stories260k"),
    ):
        assert line.startswith(f"ConfigError: give {named}, or a preset ")
        assert line.endswith(f": dms-jax retrofit {point}.")
        assert point in presets


def test_options_without_preset_are_of_custom(monkeypatch, capsys):
    """As typed by a user who does not know the presets."""
    retrofit = module_of("retrofit")
    begun = []
    monkeypatch.setattr(retrofit, "main", begun.append)
    assert main(["retrofit", "--model", "m", "--data", "a.jsonl", "--out", "x"]) == 0
    assert main(["retrofit", "custom", "--model", "m", "--data", "a.jsonl", "--out", "x"]) == 0
    first, second = begun
    assert first == second
    assert (first.model, first.out) == ("m", pathlib.Path("x"))
    with pytest.raises(SystemExit) as end:
        main(["retrofit", "--model", "m", "--prompts", "q.jsonl"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "--prompts" in said
    last = said.splitlines()[-1]
    assert last.startswith("The default preset is custom; there are custom, stories260k")
    assert "self-taught" in last
    with pytest.raises(SystemExit):  # with a preset the help shows only its options
        main(["retrofit", "custom", "--mode", "m"])
    said = capsys.readouterr().err
    assert "default preset" not in said
    assert "dms-jax retrofit custom --help" in said


def test_every_option_of_every_policy_is_explained():
    policies = list(policy_options.described())
    assert [policy.name for policy in policies] == list(POLICIES)
    for policy in policies:
        for option in policy.options:
            assert option.meaning, f"{policy.name}.{option.name} has no line below Attributes:"
            assert option.kind
    controls = {policy.name for policy in policies if not policy.paper}
    assert controls == {"Vanilla", "RandomEviction", "RandomSelection"}
    papers = {policy.name: policy.paper for policy in policies if policy.paper}
    assert len(set(papers.values())) == len(papers) - 1
    assert papers["FixedPooling"] == papers["DMC"]  # its baseline


def test_policies_are_a_table(capsys):
    assert main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    first = {line.split()[0]: line.split()[1:] for line in lines if line[:1].strip()}
    assert POLICIES.keys() <= first.keys()
    assert first["DMS"][:3] == ["memory", "trained", "Learned"]
    assert first["TOVA"][:2] == ["memory", "Evicts"]
    assert first["Quest"][:2] == ["reads", "Reads"]
    assert first["Vanilla"][:2] == ["Keeps", "and"]


def test_a_policy_is_explained(capsys):
    assert main(["policies", "TOVA", "SnapKV"]) == 0
    shown = capsys.readouterr().out
    assert "    paper: https://arxiv.org/abs/2404.14469\n" in shown
    assert "    window=64  (integer)\n        number of recent queries that vote" in shown
    assert "interval=512  (integer or null)\n        number of generated tokens" in shown
    assert "    prompts: full attention in one pass, then a cut; with\n        prefill=" in shown
    assert "DMS" not in shown
    assert main(["policies", "snapkv"]) == 2
    assert "policies snapkv (did you mean SnapKV?): there are " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "prompts"),
    [
        (dms_jax.DMS(), "in one pass, exactly as token by token"),
        (dms_jax.SnapKV(), "full attention in one pass, then a cut"),
        (dms_jax.Quest(), "full attention in one pass, then nothing is cut"),
        (
            dms_jax.TOVA(prefill="evict_past_budget"),
            "in one pass up to the budget, then token by token",
        ),
    ],
)
def test_policies_state_their_prefill(policy, prompts):
    assert policy_options.prompts(policy) == prompts


def test_models_outside_the_wheel_are_fetched_on_use(capsys, tmp_path, monkeypatch):
    fetching.listed()  # is read before the files are removed
    monkeypatch.setattr(fetching, "OWN", tmp_path / "wheel")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "address", lambda: str(ROOT / "dms_jax" / "assets"))
    found = options.find_model("reasoner-11m")
    assert found == fetching.cache() / "reasoner-11m"
    assert (found / "config.json").is_file()
    assert "Fetching reasoner-11m/config.json" in capsys.readouterr().err
    assert options.find_model("reasoner-11m") == found
    assert capsys.readouterr().err == ""


def test_report_has_command_without_paths(monkeypatch):
    arguments = ["--out", "/home/me/runs", "--only", "TOVA", "DMS (drawn)", "--save=/home/me/x"]
    monkeypatch.setattr(sys, "argv", ["/home/me/bin/dms-jax", "hyperscale", *arguments])
    told = running.command(without=("--out", "--save"))
    assert told == "dms-jax hyperscale --only TOVA 'DMS (drawn)'"


SLIPS = {
    "generate Hi --policy tova": "Unknown cache policy 'tova' (did you mean TOVA?)",
    "generate Hi --template thinking": "--template takes name=value",
    "generate Hi --policy TOVA --options budget": "--options takes name=value",
    "generate Hi --policy TOVA --options {budget:8}": "is not a JSON object",
    "generate Hi --max-new-tokens 0": "ConfigError: --max-new-tokens must be a whole number",
    "generate Hi --seed -1": "at least 0 and at most 4,294,967,295, got -1.",
    "generate Hi --policy TOVA --options budget=abc": "got 'abc'; Vanilla keeps everything.",
    "generate Hi --data-shards 99": "--data-shards 99 needs 99 devices; there are 8.",
    "generate Hi --file absent.txt": "absent.txt cannot be read",
    "generate Hi --options budget=8": "name it with --policy",
    "generate Hi --memory-gb 0": "--memory-gb must be a finite number above 0, got 0.0.",
    "generate": "There is no prompt",
    "generate --policy TOVA --options budget=8 Hi": "It comes before --options",
    "generate Hi --plain --template a=1": "--plain leaves out what --chat",
    "serve --policy TOVA --options bugdet=4": "(did you mean budget?)",
    "serve --lanes 0": "--lanes must be",
    f"evaluate --task {'a' * 300}": "aaa' is none of",
    "evaluate --task gsm9k": "--task 'gsm9k' (did you mean gsm8k?) is none of",
    "evaluate --task gsm8k": "--task gsm8k reads a file: --task-options path=FILE.",
    "evaluate --samples -1": "--samples must be at least 0, got -1.",
    "evaluate --policies TOVA --policy H2O": "leave out --policy",
    "evaluate --task text --chains 2": "--chains is for tasks that have problems",
    "evaluate --task text --task-options size=4": "--task-options size: there are path, window",
    "evaluate --task text --problems 5": "text is predicted token by token",
    "hyperscale --systems TOVA,ratio=abc": "--systems: ratio must be a finite number of at lea",
    "evaluate --task gsm8k --task-options path=no.jsonl": "no.jsonl cannot be read: No such file",
    "evaluate --task needle --task-options size": "--task-options takes name=value",
    "evaluate --task needle --lanes 0": "lanes",
    "evaluate --problems 0": "--problems must be",
    "evaluate --seed -1": "--seed must be",
    "hyperscale --systems TOVA,budget": "--systems takes name=value",
    "hyperscale --temperatures -1": "temperature",
    "hyperscale --lengths 0": "--lengths must be",
    "hyperscale --task liner": "--task 'liner' (did you mean linear?) is none of",
    "hyperscale --chains 3 0": "--chains must be",
    "hyperscale --systems Vanilla TOVa": "Unknown cache policy 'TOVa'",
    "retrofit self-taught-stories260k --held-out 9999999": "leaves none to train on. Give more",
    "evaluate --task txt": "--task 'txt' (did you mean text?) is none of",
    "evaluate --task .": "A task reads a file: --task mathematics --task-options path=.",
    "hyperscale --task text": "humaneval, ruler.\n",
    "generate Hi": "there is no directory or file /",
}


@pytest.mark.parametrize("typed", SLIPS)
def test_options_are_checked_before_loading_the_model(typed, capsys, tmp_path, monkeypatch):
    """Loading a real model takes minutes. ./nowhere is a path, so no hub is asked."""
    monkeypatch.chdir(tmp_path)
    assert main([*typed.split(), "--model", "./nowhere"]) == 2
    assert SLIPS[typed] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("retrofit stories260k --policy TOVA", "invalid choice 'TOVA' for argument '--policy'"),
        ("generate Hi --kv-dtype int8", "invalid choice 'int8' for argument '--kv-dtype'"),
    ],
)
def test_wrong_choice_lists_the_valid_ones(typed, told, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as end:
        main(typed.split())
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"{told}. Expected one of (" in said
    assert "'DMS'" in said or "'float8_e4m3'" in said


def test_report_is_no_folder(tmp_path):
    with pytest.raises(dms_jax.ConfigError, match="a folder has this name"):
        reports.make_place("--out", tmp_path)
    reports.make_place("--out", tmp_path / "new" / "figures.json")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.skipif(not pathlib.Path("/proc/self").exists(), reason="no /proc")
@pytest.mark.parametrize("typed", ["evaluate --out /proc/x.json", "hyperscale --out /proc"])
def test_unwritable_folder_is_refused_first(typed, capsys):
    assert main([*typed.split(), "--task", "none"]) == 2  # which would be the next error
    assert re.match(r"ConfigError: --out /proc: .+\.\n", capsys.readouterr().err)


def test_unwritable_report_is_a_one_line_error(tmp_path):
    (tmp_path / "figures.json").mkdir()
    with pytest.raises(dms_jax.ConfigError, match=r"figures\.json cannot be written: Is a dir"):
        reports.write_json(tmp_path / "figures.json", {})
    assert [each.name for each in tmp_path.iterdir()] == ["figures.json"]
    with pytest.raises(dms_jax.ConfigError, match="cannot be written: No such file"):
        reports.write_text(tmp_path / "absent" / "table.md", "")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--model stories260", "--model stories260 (did you mean stories260k?)"),
        ("--model Reasoner", "--model Reasoner (did you mean reasoner-11m?)"),
        ("--adapter smollm2", "--adapter smollm2 (did you mean smollm2-135m-instruct-dms?)"),
        ("--adapter reasoner-11m", "--adapter reasoner-11m: that is a model; give --model reas"),
        (
            "--model smollm2-135m-instruct-dms",
            "--model smollm2-135m-instruct-dms: that is an adapter; give --adapter smol",
        ),
    ],
)
def test_misspelt_asset_names_are_corrected(typed, meant, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "Hi", *typed.split()]) == 2
    assert f"ConfigError: {meant}" in capsys.readouterr().err
    name = typed.split()[1]
    (tmp_path / name).mkdir()  # then it is meant
    assert main(["generate", "Hi", *typed.split()]) == 2
    assert f"CheckpointError: {name}/" in capsys.readouterr().err
