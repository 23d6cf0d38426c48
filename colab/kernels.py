# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The attention kernels, timed here
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/dms-jax/dms_jax/blob/main/colab/kernels.ipynb)
#
# Decode attention reads the pages of each row, and row lengths may differ widely; training
# attention applies DMS's mask in linear memory. Both have Pallas kernels for GPUs and TPUs and an
# XLA reference with the same signature. This notebook shows which implementation runs here and
# times it.

# %%
# @title Install: finds out where this runs { display-mode: "form" }
# Nothing is installed where dms_jax is there already (a checkout after `make install`).
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

SOURCE = "https://github.com/dms-jax/dms_jax"


class NotInstalled(Exception):
    def _render_traceback_(self):  # a notebook shows this text, not a traceback
        return [str(self)]


if shutil.which("nvidia-smi"):
    runtime = "cuda"
elif os.environ.get("TPU_ACCELERATOR_TYPE") or any(pathlib.Path("/dev").glob("accel*")):
    runtime = "tpu"
else:
    runtime = "cpu"
here = pathlib.Path.cwd().resolve()
checkout = here.parent
for uploaded in here.glob("dms_jax*.zip"):  # the repository's
    unpacked = here / "runs" / "unpacked"
    shutil.unpack_archive(uploaded, unpacked)
    checkout = next(unpacked.rglob("pyproject.toml"), here).parent
is_ours = (checkout / "dms_jax" / "__init__.py").is_file()
if is_ours:  # the models that the wheel leaves out
    os.environ.setdefault("DMS_JAX_ASSETS", str(checkout / "dms_jax" / "assets"))
if importlib.util.find_spec("dms_jax") is None:
    extras = ",".join(["plots", *([] if runtime == "cpu" else [runtime])])
    local = next(here.glob("dms_jax*.whl"), checkout if is_ours else None)
    what = f"{local}[{extras}]" if local else f"dms-jax[{extras}] @ git+{SOURCE}"
    print(f"Installing {what} for {runtime}: two minutes on Colab")
    packages = [what, "ipywidgets"]  # the second one draws progress bars
    pip = [sys.executable, "-m", "pip", "install", "-q", *packages]
    os.environ["GIT_TERMINAL_PROMPT"] = "0"  # git fails rather than ask for a password
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        raise NotInstalled(
            f"pip cannot install {what}:\n{done.stderr}"
            if local
            else f"pip cannot install from {SOURCE}: get the repository's zip there (Code, "
            f"Download ZIP) or from a checkout (git archive -o dms_jax.zip HEAD), upload it to "
            f"{here} and run this cell again."
        )

import jax

import dms_jax
from pallas_kernels import serving

print(f"dms_jax {dms_jax.__version__}, jax {jax.__version__}, {jax.devices()[0].device_kind}")
for served in serving():  # which kernels will serve, for a model with heads of 128
    print(served)

# %%
# @title Settings { run: "auto" }
ROWS = 16  # @param {type:"integer"}
CONTEXT = 2048  # @param {type:"integer"}
REPEATS = 5  # @param {type:"integer"}

# %%
import time

import jax.numpy as jnp
import numpy as np

from pallas_kernels import decode_attention, retrofit_attention

GROUP, DIM, PAGE = 4, 128, 64
dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def milliseconds(function, *arrays):
    """The median of a few calls after the first one, which compiles."""
    jax.block_until_ready(function(*arrays))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


# %% [markdown]
# ## Decoding reads only live tokens
# A row is one head of one sequence of one layer. With a kernel, fewer live tokens take fewer bytes
# and less time, and rows of uneven lengths cost as much as their mean, not their maximum. The XLA
# reference, used on a CPU, always computes over the whole table and gains nothing.

# %%
columns = CONTEXT // PAGE
keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (ROWS, GROUP, DIM), dtype)
k_pages, v_pages = (jax.random.normal(key, (ROWS * columns, PAGE, DIM), dtype) for key in keys[1:])
table = jnp.arange(ROWS * columns, dtype=jnp.int32).reshape(ROWS, columns)
decode = jax.jit(
    lambda lengths: decode_attention(q, k_pages, v_pages, table, lengths, scale=DIM**-0.5)
)
labels, times = [], []
for fewer in (1, 2, 4, 8):
    even = jnp.full(ROWS, CONTEXT // fewer, jnp.int32)
    labels.append(f"1/{fewer}" if fewer > 1 else "all")
    times.append(milliseconds(decode, even))
uneven = np.random.default_rng(0).uniform(0, 2, ROWS)
uneven = np.maximum(uneven / uneven.mean() * CONTEXT / 8, 1).clip(max=CONTEXT).astype(np.int32)
labels.append("1/8, uneven")
times.append(milliseconds(decode, jnp.asarray(uneven)))
for label, each in zip(labels, times, strict=True):
    print(f"{label:12} {each:8.3f} ms")

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
bars = axis.barh(labels[::-1], times[::-1], color="#2471a3")
axis.bar_label(bars, fmt=" %.3g")
axis.set(xlabel=f"ms, {ROWS} rows of up to {CONTEXT} tokens, {jax.devices()[0].device_kind}")
axis.margins(x=0.15)
plt.show()

# %% [markdown]
# ## Training with the mask of DMS
# Forward and backward; the bias of a key applies past the window.

# %%
shape = (1, CONTEXT // 4, 8, DIM)
q, k, v = (jax.random.normal(key, shape, dtype) for key in keys)
bias = -jnp.ones((1, 8, CONTEXT // 4), jnp.float32)


def loss(q, k, v, bias):
    out = retrofit_attention(q, k, v, bias, window=64, scale=DIM**-0.5)
    return jnp.square(out.astype(jnp.float32)).mean()


step = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
print(f"{milliseconds(step, q, k, v, bias):.2f} ms for {CONTEXT // 4} tokens, 8 heads")
