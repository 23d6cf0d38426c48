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
# # Retrofit a model with DMS
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/dms-jax/dms_jax/blob/main/colab/retrofit.ipynb)
#
# A retrofit trains a pretrained model, with itself as the teacher, to decide which tokens to evict.
# Here stories260K, a Llama of 260,032 parameters, learns Dynamic Memory Sparsification on
# children's stories in about two minutes on a CPU; set your own checkpoint and text below.

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
DATA = ""  # @param {type:"string"}
# JSON lines or text; stories unless given.
RATIO = 8.0  # @param {type:"number"}
WINDOW = 32  # @param {type:"integer"}
STEPS_PER_RATIO = 12  # @param {type:"integer"}

# %% [markdown]
# ## Load
# With several devices, sequences and parameters are split over a mesh.

# %%
from dms_jax import assets

mesh = dms_jax.make_mesh(jax.device_count(), 1) if jax.device_count() in (2, 4) else None
base = dms_jax.load(MODEL or assets.path("stories260k"), mesh=mesh)
policy = dms_jax.DMS(window=WINDOW, source="adapter")
recipe = dms_jax.recipes.dms_quickstart(RATIO, steps_per_ratio=STEPS_PER_RATIO)
print(f"{recipe.total_steps(policy)} steps on {jax.device_count()} device(s)")

# %% [markdown]
# ## Train
# The bar shows the current loss and ratio; the curves below come from the log.

# %%
model = dms_jax.retrofit(
    base,
    policy,
    recipe=recipe,
    data=DATA or assets.stories("train"),
    out="runs/retrofit",
    mesh=mesh,
)

# %%
import json

import matplotlib.pyplot as plt

with open("runs/retrofit/log.jsonl", encoding="utf-8") as file:
    steps = [line for line in map(json.loads, file) if "compression_ratio" in line]
figure, (loss, ratio) = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
number = [line["step"] for line in steps]
loss.plot(number, [line["loss"] - line["compression_loss"] for line in steps], color="#c0392b")
loss.set(xlabel="step", ylabel="distance from the teacher, nats a token")
ratio.plot(number, [line["target_ratio"] for line in steps], color="#909497")
middle = steps[len(steps) // 2]
below = dict(xytext=(8, -14), textcoords="offset points", color="#5f6a6a")
ratio.annotate("aimed at", (middle["step"], middle["target_ratio"]), **below)
ratio.plot(number, [line["compression_ratio"] for line in steps], color="#c0392b")
ratio.annotate("reached", (number[-1] * 0.75, steps[-1]["compression_ratio"]), color="#c0392b")
ratio.set(xlabel="step", ylabel="compression ratio past the window")
plt.show()

# %% [markdown]
# ## Save, load, generate
# `save` writes a Hugging Face directory, with the policy in `config.json`.

# %%
dms_jax.save(model, policy, "runs/model-dms")
again = dms_jax.load("runs/model-dms")
assert again.policy == policy
out = dms_jax.generate(
    again,
    ["Once upon a time, there was a little dog who"],
    sampling=dms_jax.Sampling(temperature=0.7, top_p=0.9, max_new_tokens=200, seed=3),
    page_size=16,
    on_tokens=lambda update: print(update.text, end="", flush=True),
)
print(f"\n\n{out.usage.live_tokens:.0f} live tokens: {out.usage.compression_ratio:.1f} times fewer")
print(f"The newest {policy.window} always stay, so longer texts come closer to the ratio.")

# %% [markdown]
# ## Your own loop
# `model.transformer` is a Flax NNX module, so Flax's optimizer and transformations train it. This
# loop continues language modeling while the policy evicts; all its steps use one batch, so the
# model memorizes it.

# %%
import numpy as np
import optax
from flax import nnx

optimizer = nnx.Optimizer(again.transformer, optax.adam(1e-3), wrt=nnx.Param)


@nnx.jit
def step(transformer, optimizer, tokens):
    def loss(transformer):
        hidden = transformer(tokens, policy).hidden[:, :-1]
        logits = transformer.unembed(hidden)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradient = nnx.value_and_grad(loss)(transformer)
    optimizer.update(transformer, gradient)
    return value


story = again.tokenizer.encode(" ".join(assets.stories("valid")[:40]))
batch = np.reshape(story[: 8 * 256], (8, 256))
losses = [float(step(again.transformer, optimizer, batch)) for _ in range(20)]
print(f"{losses[0]:.2f} nats a token before, {losses[-1]:.2f} after {len(losses)} steps")
