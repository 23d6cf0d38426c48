"""Makes the calls and reports."""

import json
import pathlib
import sys
import tempfile
import traceback
import warnings

import dms_jax
from dms_jax import assets
from tests.wrong_calls.case import Case
from tests.wrong_calls.files import file_cases, retrofit_cases
from tests.wrong_calls.options import estimate_cases, policy_cases, sampling_cases, task_cases
from tests.wrong_calls.running import (
    engine_cases,
    generate_cases,
    hyperscale_cases,
    logits_cases,
)


def all_cases(scratch: pathlib.Path) -> dict[str, Case]:
    model = dms_jax.load(assets.path("stories260k"))
    return {
        **sampling_cases(),
        **policy_cases(),
        **task_cases(),
        **generate_cases(model),
        **engine_cases(model),
        **logits_cases(model),
        **hyperscale_cases(model),
        **file_cases(model, scratch),
        **estimate_cases(model.config),
        **retrofit_cases(model, scratch),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    wanted = sys.argv[1:]
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        cases = all_cases(scratch)
        before = sorted(str(path) for path in scratch.rglob("*"))
        for name, case in cases.items():
            if wanted and not any(text in name for text in wanted):
                continue
            raised, message, where = "nothing", "", ""
            try:
                case.call()
            except BaseException as error:
                raised, message = type(error).__name__, str(error)
                if not isinstance(error, dms_jax.DmsJaxError):
                    where = "".join(traceback.format_exception(error)[-4:])
            left = sorted(
                set(map(str, scratch.rglob("*"))) - set(before) - {str(scratch / "damaged")}
            )
            before += left
            report[name] = {
                "expected": case.error,
                "raised": raised,
                "message": message,
                "missing": [text for text in case.says if text not in message],
                "left": [path for path in left if "damaged" not in path],
                "where": where,
            }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
