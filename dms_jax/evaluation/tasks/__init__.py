"""Tasks on local files of published data sets, answered in text or by likelihood."""

from dms_jax.evaluation.tasks.choices import (
    ARC,
    MMLU,
    PIQA,
    BoolQ,
    Choices,
    ChoiceTask,
    HellaSwag,
    WinoGrande,
)
from dms_jax.evaluation.tasks.code import CodeTask, HumanEval
from dms_jax.evaluation.tasks.files import FileTask
from dms_jax.evaluation.tasks.gpqa import GPQA
from dms_jax.evaluation.tasks.livecodebench import LiveCodeBench
from dms_jax.evaluation.tasks.maths import AIME, GSM8K, MATH500, Mathematics
from dms_jax.evaluation.tasks.ruler import RULER, ruler_tasks

__all__ = [
    "AIME",
    "ARC",
    "GPQA",
    "GSM8K",
    "MATH500",
    "MMLU",
    "PIQA",
    "RULER",
    "BoolQ",
    "ChoiceTask",
    "Choices",
    "CodeTask",
    "FileTask",
    "HellaSwag",
    "HumanEval",
    "LiveCodeBench",
    "Mathematics",
    "WinoGrande",
    "ruler_tasks",
]
