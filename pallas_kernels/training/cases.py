"""Named shapes of training attention, shared by tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingCase:
    """One problem: its shape, its mask and the distribution of its numbers.

    Attributes:
      bias: "soft" draws log-sigmoid biases, "hard" mixes about 0 and -40, "evicted" 0 and -inf.
      segments: mean length of the packed documents, 0 for one document.
      query_scale: factor on the random queries; 3 gives a peaked softmax.
      sinks: whether each query head has a sink.
      soft_cap: soft cap of the scores; None for none.
    """

    name: str
    B: int
    T: int
    H: int
    K: int
    D: int
    window: int
    dtype: str = "bfloat16"
    bias: str = "soft"
    segments: int = 0
    query_scale: float = 1.0
    sinks: bool = False
    soft_cap: float | None = None


CONTRACT = (
    TrainingCase("plain", 1, 512, 2, 1, 128, 64),
    TrainingCase("batch", 2, 256, 4, 1, 128, 64),
    TrainingCase("window_zero", 1, 256, 4, 1, 128, 0),
    TrainingCase("window_exceeds", 1, 256, 4, 1, 128, 5000),
    TrainingCase("peaked", 1, 256, 4, 1, 128, 100, bias="hard", query_scale=3.0),
    TrainingCase("evicted", 1, 256, 4, 1, 128, 64, bias="evicted"),
    TrainingCase("ragged", 1, 201, 4, 2, 128, 70),
    TrainingCase("one_token", 2, 1, 4, 2, 64, 3),
    TrainingCase("packed", 2, 300, 4, 2, 64, 40, segments=60),
    TrainingCase("one_group", 1, 130, 2, 2, 64, 33),
    TrainingCase("odd_group", 1, 130, 3, 1, 64, 33),
    TrainingCase("sixteen_groups", 1, 130, 16, 1, 64, 33),
    TrainingCase("dim_96", 1, 130, 4, 2, 96, 33),
    TrainingCase("dim_256", 1, 130, 2, 1, 256, 33),
    TrainingCase("dim_256_packed", 1, 300, 4, 2, 256, 33, segments=60),
    TrainingCase("dim_512", 1, 130, 2, 1, 512, 33),
    TrainingCase("float16", 1, 201, 4, 2, 128, 40, dtype="float16", segments=60),
    TrainingCase("float32", 1, 201, 4, 2, 64, 40, dtype="float32"),
    TrainingCase("float32_packed", 1, 201, 4, 2, 128, 40, dtype="float32", segments=50),
)

# All implementations support sinks; only XLA supports soft caps.
SINKS_AND_CAPS = (
    TrainingCase("sinks", 1, 130, 4, 2, 64, 33, sinks=True),
    TrainingCase("sinks_packed", 2, 200, 4, 1, 32, 33, bias="evicted", segments=40, sinks=True),
    TrainingCase("soft_cap", 1, 130, 4, 2, 64, 33, query_scale=3.0, soft_cap=1.5),
    TrainingCase("soft_cap_float32", 1, 201, 4, 2, 16, 40, "float32", segments=50, soft_cap=2.0),
    TrainingCase("both_float64", 1, 150, 4, 2, 16, 40, "float64", sinks=True, soft_cap=2.0),
)

# The heads of Llama-3.1-8B, one sequence: the shapes of the speed requirement.
BARS = (
    TrainingCase("llama_8k", 1, 8192, 32, 8, 128, 512),
    TrainingCase("llama_32k", 1, 32768, 32, 8, 128, 512),
)

# All timed shapes: also packed documents, other head dims and groups, short sequences.
SPEED = (
    *BARS,
    TrainingCase("packed_8k", 1, 8192, 32, 8, 128, 512, segments=2048),
    TrainingCase("short_batch", 8, 1024, 32, 8, 128, 256),
    TrainingCase("odd_group_8k", 1, 8192, 28, 4, 128, 512),
    TrainingCase("one_group_8k", 1, 8192, 16, 16, 128, 512),
    TrainingCase("dim_64_8k", 1, 8192, 32, 8, 64, 512),
    TrainingCase("dim_96_8k", 1, 8192, 32, 8, 96, 512),
    TrainingCase("dim_256_8k", 1, 8192, 16, 4, 256, 512),
)
