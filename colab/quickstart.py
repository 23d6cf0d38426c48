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
# # A small KV cache in two minutes
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/dms-jax/dms_jax/blob/main/colab/quickstart.ipynb)
#
# The key-value cache of a language model grows with every token. Here one model answers the same
# problems with the whole cache and with a small one (its retrofit with Dynamic Memory
# Sparsification), side by side: tokens per second, tokens in the cache, and the tokens that each
# head keeps.
#
# The model, our own, has 11 million parameters and solves small problems step by step. Everything
# also runs on a CPU.

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
PROBLEMS = 8  # @param {type:"integer"}
LONGEST_ANSWER = 300  # @param {type:"integer"}
TEMPERATURE = 0.0  # @param {type:"number"}

# %% [markdown]
# ## Load
# Any Hugging Face directory or hub id of the Llama, Qwen or Mistral families works here. The second
# model is the first with an adapter, which declares its policy, so it needs no option.

# %%
from dms_jax import assets

assets.fetch("reasoner-11m", "reasoner-11m-dms")  # 23 MB, once
base = assets.path("reasoner-11m")
models = {
    "whole cache": dms_jax.load(base),
    "DMS": dms_jax.load(base, adapter=assets.path("reasoner-11m-dms")),
}
print(models["DMS"].policy)

# %% [markdown]
# ## Generate with both
# The first call compiles; the second one is timed.

# %%
import time

from dms_jax.data.tasks import WordChain

task = WordChain()
problems = [task.problem("test", index) for index in range(PROBLEMS)]
prompts = [problem.prompt for problem in problems]
sampling = dms_jax.Sampling(temperature=TEMPERATURE, max_new_tokens=LONGEST_ANSWER)
results = {}
for name, model in models.items():
    dms_jax.generate(model, prompts, sampling=sampling)
    start = time.perf_counter()
    results[name] = dms_jax.generate(model, prompts, sampling=sampling)
    seconds = time.perf_counter() - start
    usage = results[name].usage
    scores = [
        task.score(problem, text)
        for problem, text in zip(problems, results[name].texts, strict=True)
    ]
    print(
        f"{name:12} {usage.new_tokens / seconds:7,.0f} tokens/s  "
        f"{usage.peak_tokens / PROBLEMS:5.0f} tokens in the cache at the peak  "
        f"{sum(scores):.0f} of {PROBLEMS} right"
    )
example = scores.index(max(scores))  # the first that DMS has right
print(f"\n{prompts[example]}{results['DMS'].texts[example]}")

# %% [markdown]
# ## Tokens in the cache during an answer

# %%
import matplotlib.pyplot as plt
import numpy as np

from dms_jax.analysis import retention

tokens = models["DMS"].tokenizer.encode(prompts[example] + results["DMS"].texts[example])
found = retention(models["DMS"], np.array([tokens]))
live = found.live()[:, 0]  # layers, heads, tokens so far

figure, (growth, heads) = plt.subplots(
    1, 2, figsize=(11, 3.8), layout="constrained", width_ratios=(2, 1)
)
growth.plot(range(1, len(tokens) + 1), color="#222222")
growth.annotate("whole cache ", (len(tokens) * 0.6, len(tokens) * 0.66), ha="right")
growth.plot(range(1, len(tokens) + 1), live.mean((0, 1)), color="#c0392b")
growth.annotate("DMS", (len(tokens) * 0.8, live.mean((0, 1))[-1] + 8), color="#c0392b")
growth.set(xlabel="tokens so far", ylabel="tokens in the cache, mean of heads")
shown = heads.imshow(live[:, :, -1], cmap="viridis", aspect="auto")
heads.set(xlabel="KV head", ylabel="layer", xticks=range(live.shape[1]))
heads.set_title("tokens that each head holds", fontsize="medium")
figure.colorbar(shown, ax=heads)
plt.show()

# %% [markdown]
# ## Which tokens does each head keep?
# Move the slider to see the cache at an earlier token; click a cell for one head.

# %%
from IPython.display import HTML, display

from dms_jax.analysis import View, eviction_page, token_texts

page = eviction_page(
    token_texts(models["DMS"].tokenizer, tokens),
    [View.of(found)],
    title="Which tokens which heads evicted",
    note="reasoner-11m with its DMS adapter, on the problem above.",
)
source = page.replace("&", "&amp;").replace('"', "&quot;")
display(HTML(f'<div><iframe srcdoc="{source}" width="100%" height="600"></iframe></div>'))
