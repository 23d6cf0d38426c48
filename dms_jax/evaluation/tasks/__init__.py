"""Tasks on local files of published data sets, and RULER."""

from dms_jax.evaluation.tasks.code import HumanEval
from dms_jax.evaluation.tasks.files import FileTask
from dms_jax.evaluation.tasks.gpqa import GPQA
from dms_jax.evaluation.tasks.maths import AIME, GSM8K, MATH500, Mathematics
from dms_jax.evaluation.tasks.ruler import RULER, ruler_tasks

__all__ = [
    "AIME",
    "GPQA",
    "GSM8K",
    "MATH500",
    "RULER",
    "FileTask",
    "HumanEval",
    "Mathematics",
    "ruler_tasks",
]
