"""Times the decode step of transformers (PyTorch), for `decode_steps`: a process of its own."""

import time
from typing import Any

import numpy as np

from experiments.benchmarks.shapes import SHAPES, Shape


def time_transformers(shape: Shape, batch: int, context: int) -> dict[str, Any]:
    """Times transformers' decode step with a cache of so many tokens a sequence."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    fields = dict(SHAPES[shape])
    kind = fields.pop("model_type")
    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    make_config, make_model = classes[kind]
    torch.set_default_dtype(torch.bfloat16)
    settings = make_config(**fields, max_position_embeddings=131072)
    with torch.device("cuda"), torch.no_grad():
        model = make_model(settings).eval()
        cache = transformers.DynamicCache()
        size = (batch, fields["num_key_value_heads"], context, fields["head_dim"])
        for layer in range(fields["num_hidden_layers"]):
            cache.update(torch.randn(size), torch.randn(size), layer)
        token = torch.zeros((batch, 1), dtype=torch.long)
        times = []
        for step in range(13):
            torch.cuda.synchronize()
            start = time.perf_counter()
            position = torch.full((1,), context + step, dtype=torch.long)
            out = model(token, past_key_values=cache, cache_position=position, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    seconds = float(np.median(times[3:]))
    return dict(
        step_ms=1e3 * seconds,
        tokens_per_second=batch / seconds,
        versions=dict(torch=torch.__version__, transformers=transformers.__version__),
    )
