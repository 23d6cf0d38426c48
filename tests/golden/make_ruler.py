"""Writes the output of RULER's generators, from our words, essay and documents.

Run from the root of the checkout, with NVIDIA/RULER (Apache-2.0) at c3f5e3b beside it:

    PYTHONPATH=. python tests/golden/make_ruler.py path/to/RULER

Writes ruler/TASK.txt, the prompt with the answer prefix, and ruler/answers.json, the answer prefix
and the references. The generators run unchanged; their random draws are `Scripted`, and unrelated
packages that they import are replaced by empty ones. A rule replaces NLTK's sentence splitter and
agrees with it on the essay.
"""

import importlib.util
import json
import pathlib
import random
import re
import shutil
import sys
import tempfile
import types

import numpy as np

from tests.support import ruler

OUT = pathlib.Path(__file__).parent / "ruler"
SCRIPTS = {"niah": "niah", "vt": "variable_tracking", "cwe": "common_words_extraction"}
SCRIPTS |= {"fwe": "freq_words_extraction", "qa": "qa"}
LISTS = {"nounlist.txt": ruler.NOUNS, "adjectivelist.txt": ruler.ADJECTIVES, "verblist.txt": []}


class Draws:
    """Stands for the module `random` in a generator."""

    Random = random.Random

    def __init__(self):
        self.scripted = ruler.Scripted()

    def __getattr__(self, name):
        return getattr(self.scripted, name)


def stubs() -> None:
    """Replaces packages that the generators import."""
    names = ("wonderwords", "nltk", "nltk.tokenize", "tokenizer", "manifest_utils", "tqdm", "scipy")
    for name in (*names, "scipy.special"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["wonderwords"].random_word = types.SimpleNamespace(
        _get_words_from_text_file=lambda name: list(LISTS[name])
    )
    sys.modules["nltk.tokenize"].sent_tokenize = lambda text: re.split(r"(?<=[.!?]) +", text)
    sys.modules["tokenizer"].select_tokenizer = lambda *_: types.SimpleNamespace(
        text_to_tokens=str.split
    )
    sys.modules["manifest_utils"].write_manifest = None
    sys.modules["tqdm"].tqdm = iter
    sys.modules["scipy.special"].zeta = lambda alpha: {2.0: np.pi**2 / 6}[alpha]


def load(folder: pathlib.Path, task: str, length: int, options: dict[str, object]):
    """Imports a generator as if run for a task."""
    constants = sys.modules["constants"].TASKS[SCRIPTS[task]]
    given = {
        "save_dir": ".",
        "save_name": task,
        "tokenizer_path": "none",
        "max_seq_length": length,
        "tokens_to_generate": constants["tokens_to_generate"],
        "num_samples": 1,
        "random_seed": ruler.SEED,
        "template": constants["template"] + constants["answer_prefix"],
        **options,
    }
    sys.argv = [
        task,
        *(part for name, value in given.items() for part in (f"--{name}", str(value))),
    ]
    spec = importlib.util.spec_from_file_location(task, folder / f"{SCRIPTS[task]}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.random = draws = Draws()
    module.args.template = given["template"]
    return module, draws


def generate(folder: pathlib.Path, case: str, yaml: dict) -> tuple[str, list[str], str]:
    """Prompt with prefix, references, and the family's answer prefix as a template."""
    size, number, length = ruler.CASES[case]
    task = case.partition("-")[0]
    family = task.partition("_")[0]
    module, draws = load(folder, family, length, yaml[task])
    prefix = sys.modules["constants"].TASKS[SCRIPTS[family]]["answer_prefix"]
    if family == "niah":
        module.generate_random_word = lambda: (
            f"{draws.choice(ruler.ADJECTIVES)}-{draws.choice(ruler.NOUNS)}"
        )
        return *module.generate_input_output(size), prefix
    if family == "vt":
        module.np = types.SimpleNamespace(
            random=types.SimpleNamespace(randint=lambda low, high: (low + high) // 2)
        )
        places = random.Random(f"vt example {ruler.SEED}")
        draws.sample = places.sample
        shown, answers = module.generate_input_output(ruler.EXAMPLE_SIZE, 1, 4, is_icl=True)
        del draws.sample
        draws.scripted = ruler.Scripted()
        text, references = module.generate_input_output(size, 1, 4)
        shown = f"{shown} {' '.join(answers)}\n"
        return f"{module.randomize_icl(shown)}\n{text}", references, prefix
    if family == "cwe":
        module.words = ruler.WORDS
        return *module.generate_input_output(size), prefix
    if family == "fwe":
        codes = (length - 50) // 50
        text, answers, _ = module.generate_input_output(10**9, size, 6, codes, alpha=2.0)
        return text, answers, prefix
    return *module.generate_input_output(number, size), prefix


def main(root: pathlib.Path) -> None:
    """Writes the files."""
    stubs()
    yaml = read_settings(root / "scripts/synthetic.yaml")
    OUT.mkdir(exist_ok=True)
    known = {}
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "synthetic"
        shutil.copytree(root / "scripts/data/synthetic", folder)
        for name, data in (
            ("PaulGrahamEssays", {"text": ruler.ESSAY}),
            ("english_words", {"0": "none"}),
            ("squad", ruler.SQUAD),
            ("hotpotqa", ruler.HOTPOTQA),
        ):
            (folder / "json" / f"{name}.json").write_text(json.dumps(data))
        sys.path.insert(0, str(folder))
        import constants

        assert constants.TASKS
        for case in ruler.CASES:
            text, answers, prefix = generate(folder, case, yaml)
            start = text.rfind(prefix[:10])  # as RULER finds it
            (OUT / f"{case}.txt").write_bytes(text.encode())
            known[case] = {"answer_prefix": text[start:], "answers": answers}
    (OUT / "answers.json").write_text(json.dumps(known, indent=1) + "\n")


def read_settings(path: pathlib.Path) -> dict[str, dict[str, str]]:
    """The arguments of each task; the file has two levels and no quotes."""
    settings: dict[str, dict[str, str]] = {}
    for line in path.read_text().splitlines():
        if re.fullmatch(r"\w+:", line):
            settings[line[:-1]] = own = {}
        elif found := re.fullmatch(r"    (\w+): (\S+)", line):
            own[found[1]] = found[2]
    return settings


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
