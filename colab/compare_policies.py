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
# # Which policy for which budget?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/dms-jax/dms_jax/blob/main/colab/compare_policies.ipynb)
#
# Compares four training-free policies on one checkpoint and one text: added loss against tokens
# kept, both measured by decoding from the paged cache. Then estimates what a smaller cache gains on
# your card. The notebook `retrofit` trains a policy.

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
MODEL = ""  # @param {type:"string"}
# A hub id or a directory; stories260K unless given.
SEQUENCES = 8  # @param {type:"integer"}
LENGTH = 384  # @param {type:"integer"}
RATIOS = (2, 4, 8)

# %%
import numpy as np

from dms_jax import assets

model = dms_jax.load(MODEL or assets.path("stories260k"))
stream = [token for story in assets.stories("valid") for token in model.tokenizer.encode(story)]
held_out = np.reshape(stream[: SEQUENCES * LENGTH], (SEQUENCES, LENGTH)).tolist()


def measure(policy):
    """Nats a token of each sequence, and the tokens in the cache at the peak."""
    scores = dms_jax.score(model, held_out, policy=policy, page_size=16)
    losses = np.array([-score.logprobs.mean() for score in scores])
    return losses, np.mean([score.usage.peak_tokens for score in scores])


dense, dense_peak = measure(dms_jax.Vanilla())
families = {
    "StreamingLLM": lambda budget: dms_jax.StreamingLLM(budget=budget),
    "TOVA": lambda budget: dms_jax.TOVA(budget=budget),
    "H2O": lambda budget: dms_jax.H2O(budget=budget),
    "SnapKV": lambda budget: dms_jax.SnapKV(budget=budget, window=16, interval=16),
}
curves = {name: [] for name in families}
for name, make in families.items():
    for ratio in RATIOS:
        losses, peak = measure(make(LENGTH // ratio))
        gap = losses - dense
        error = gap.std(ddof=1) / np.sqrt(len(gap))
        curves[name].append((dense_peak / peak, gap.mean(), error))
        print(f"{name:13} {peak:4.0f} of {dense_peak:.0f} tokens: {gap.mean():+.4f} ± {error:.4f}")

# %%
import matplotlib.pyplot as plt

from dms_jax.analysis.hyperscaling_plot import label_heights

figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
ends, colours = [], []
for points in curves.values():
    fewer, gaps, errors = zip(*sorted(points), strict=True)
    line = axis.errorbar(fewer, gaps, errors, marker="o", capsize=2)
    ends.append((fewer[-1], gaps[-1]))
    colours.append(line[0].get_color())
low, high = axis.get_ylim()
edge = max(x for x, _ in ends) * 1.04  # the names stand in a column, on the right of all lines
heights = label_heights(ends, 0.06 * (high - low), log=False)
for name, colour, end, height in zip(curves, colours, ends, heights, strict=True):
    axis.annotate(
        name,
        end,
        (edge, height),
        color=colour,
        va="center",
        arrowprops=dict(arrowstyle="-", color=colour, linestyle=":", shrinkA=0, shrinkB=4),
    )
axis.axhline(0, color="#909497", linewidth=0.8)
axis.set(xlabel="times fewer tokens at the peak", ylabel="nats a token above the whole cache")
axis.set_xlim(right=edge * 1.2)
plt.show()

# %% [markdown]
# ## Step time on this card
# The least time of a decode step of Llama-3.1-8B's shape, by the data sheet: weights and live cache
# read once. Unknown cards count as an L4.

# %%
from dms_jax.analysis import latency
from dms_jax.devices import DEVICES, data_sheet

kind = jax.devices()[0].device_kind
device = data_sheet(kind)
if device is None:
    kind, device = "NVIDIA L4", DEVICES["l4"]
llama = dms_jax.ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
)
lengths = [1024 * 2**power for power in range(6)]
figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
for ratio in (1, 2, 4, 8):
    steps = [
        1e3 * latency.step(llama, device, tokens=each, batch=8, compression_ratio=ratio).seconds
        for each in lengths
    ]
    (line,) = axis.plot(lengths, steps, marker="o")
    name = "   all tokens" if ratio == 1 else f"   {ratio}x fewer"
    axis.annotate(name, (lengths[-1], steps[-1]), color=line.get_color(), va="center")
axis.set(xlabel="tokens of each of 8 sequences", ylabel=f"ms a step at least, {kind}")
axis.set_ylim(bottom=0)
axis.set_xscale("log", base=2)
axis.set_xticks(lengths, [f"{each:,}" for each in lengths])
axis.margins(x=0.15)
plt.show()
