"""What transformers reads from the layouts of `tests/checkpoint/tokenizer_layouts.py`.

    python tests/golden/make_layouts.py NAME.json

Needs transformers, without PyTorch. Versions 4 and 5 differ in places, so the file is made with
each: `layouts_4.json` (4.57) and `layouts_5.json` (5.24).
"""

import contextlib
import io
import json
import logging
import pathlib
import sys
import tempfile
import warnings
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import transformers

from tests.checkpoint import tokenizer_layouts as layouts

HERE = pathlib.Path(__file__).parent / "tokenizers"


def read(directory: pathlib.Path, texts: list[str]) -> dict[str, Any]:
    """What transformers makes of a directory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    plain = tokenizer("Hello world", add_special_tokens=False)["input_ids"]
    whole = tokenizer("Hello world")["input_ids"]
    prompt = next(
        whole[:place] for place in range(len(whole)) if whole[place : place + len(plain)] == plain
    )
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return {
        "named": {
            name: getattr(tokenizer, f"{name}_id")
            for name in ("bos_token", "eos_token", "pad_token")
            if getattr(tokenizer, name) is not None
        },
        "begins": prompt,
        "ids": ids,
        "decoded": tokenizer.decode(ids[-1], skip_special_tokens=True),
        "chat": None
        if template is None
        else tokenizer.apply_chat_template(
            layouts.MESSAGES, tokenize=False, add_generation_prompt=True
        ),
    }


def record(written: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a layout, or that it refuses it."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory = pathlib.Path(place) / "model"
        layouts.write(directory, written)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                return read(directory, layouts.texts(written))
        except Exception as error:  # the golden file keeps it
            return {"error": f"{type(error).__name__}: {error}"[:60]}


def main() -> None:
    """Record the table."""
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.ERROR)
    found = {
        "transformers": transformers.__version__,
        "table": {name: record(layout) for name, layout in layouts.TABLE.items()},
    }
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    (HERE / sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
