"""One process of a run of two, or a whole run: `python -m tests.training.one_of_two '{...}'`.

    {"out": directory of the run, "mesh": [data, model], "float64": true, "steps": 6, ...}

With "thread" the run is not in the main thread, so that no signal reaches it; "size" is the size of
tensor files; with "full" that process cannot write files of exports. Writes the losses, the norms
of the gradients and the exit to `out`-<process>.json.
"""

import errno
import functools
import json
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any


def main(told: dict[str, Any]) -> None:
    import jax

    from dms_jax import processes

    processes.connect()
    jax.config.update("jax_enable_x64", told.get("float64", False))
    import jax.numpy as jnp
    import numpy as np

    from dms_jax.checkpoint import saving
    from dms_jax.sharding import make_mesh
    from dms_jax.training import loop, retrofit
    from dms_jax.training.recipe import Stage
    from tests.training.tiny import EAGER, documents, language_model, recipe

    index = jax.process_index()
    records: list[dict[str, Any]] = []

    def on_step(record: dict[str, Any]) -> None:
        records.append(record)
        print(f"step {record['step']}", flush=True)
        if told.get("term") == [index, record["step"]]:
            os.kill(os.getpid(), signal.SIGTERM)
        if told.get("fail") == [index, record["step"]]:
            raise ValueError("a callback that fails")
        time.sleep(told.get("pause", 0.0))

    write = saving.write_tensors

    def write_tensors(tensors: Any, directory: pathlib.Path, most_bytes: int) -> None:
        if told.get("full") == index and "snapshots" in directory.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(tensors, directory, most_bytes)

    size = told.get("size", saving.MAX_SHARD_BYTES)
    loop.save = functools.partial(saving.save, max_shard_bytes=size)
    saving.write_tensors = write_tensors
    dtype = jnp.float64 if told.get("float64") else jnp.float32
    model = language_model(adapter=True, dtype=dtype, num_heads=8, num_kv_heads=4)
    ramp = Stage("ramp", told.get("steps", 4), 1e-3, 4.0, adapter_learning_rate=1e-2)
    mesh = make_mesh(*told["mesh"])
    ended = "done"
    try:
        result = retrofit(
            model,
            EAGER,
            recipe=recipe(
                ramp,
                batch_size=8,
                snapshots=tuple(told.get("snapshots", ())),
            ),
            data=documents(),
            mesh=mesh,
            out=told["out"],
            on_step=on_step,
            progress=False,
            checkpoint_every=told.get("every", 100),
        )
        del result
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
    report = pathlib.Path(f"{told['out']}-{index}.json")
    losses = [record["loss"] for record in records]
    norms = [record["grad_norm"] for record in records]
    report.write_text(json.dumps({"ended": ended, "losses": losses, "norms": norms}))
    assert np.isfinite(losses).all()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    if asked.get("thread"):
        thread = threading.Thread(target=main, args=(asked,))
        thread.start()
        thread.join()
    else:
        main(asked)
