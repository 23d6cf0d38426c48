r"""lm-evaluation-harness: its tasks, answered from the real paged cache of any policy.

    python -m dms_jax.evaluation.harness --model dms_jax \
        --model_args path=model/,policy=TOVA,budget=512 --tasks gsm8k,arc_challenge

The harness finds models in a registry, not through entry points (lm-eval 0.4.13). So this module
registers the model `dms_jax` and then runs the harness's own command line, whose options are the
same. From Python, call `register` before `lm_eval.simple_evaluate(model="dms_jax", ...)`. The
arguments are those of `HarnessModel`.
"""

import sys
from typing import Any

from dms_jax.errors import DmsJaxError
from dms_jax.extras import import_extra

NAME = "dms_jax"
_TARGET = f"{__package__}.harness_model:HarnessModel"


def register() -> None:
    """Adds `dms_jax` to the models of lm-evaluation-harness; a second call changes nothing.

    Raises:
      ConfigError: lm-eval is not installed.
    """
    _import("lm_eval.models")  # importing it registers the harness's models
    registry = _import("lm_eval.api.registry").model_registry
    if NAME not in registry:
        registry.register(NAME, target=_TARGET)


def main() -> None:
    """Runs the command line of the harness with the model `dms_jax` registered."""
    try:
        register()
        _import("lm_eval.__main__").cli_evaluate()
    except DmsJaxError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _import(module: str) -> Any:
    purpose = "Evaluation with lm-evaluation-harness"
    return import_extra(module, extra="eval", purpose=purpose, package="lm-eval")


if __name__ == "__main__":
    main()
