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
# # Hyper-scaling: spend the saved memory
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/dms-jax/dms_jax/blob/main/colab/hyperscaling.ipynb)
#
# A smaller cache pays for longer answers, or for more chains of thought that vote. Here the shipped
# reasoning model (11 million parameters) and its DMS retrofit answer the same problems with several
# lengths and numbers of chains, and are compared at equal reads and at equal peak memory. One
# greedy chain of every length is always included, so that a gain is over the best plain decoding.

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
PROBLEMS = 16  # @param {type:"integer"}
LENGTHS = (192, 320)  # most new tokens of an answer
CHAINS = (1, 9)  # answers to each problem, which vote; odd, so that no two are a tie

# %%
from IPython.display import Markdown, display

from dms_jax import assets
from dms_jax.data.tasks import WordChain
from dms_jax.evaluation import System

assets.fetch("reasoner-11m", "reasoner-11m-dms")  # 23 MB, once
base = assets.path("reasoner-11m")
result = dms_jax.hyperscale(
    dms_jax.load(base),
    WordChain(),
    [
        System("whole cache", dms_jax.Vanilla()),
        System(
            "DMS",
            model=dms_jax.load(base, adapter=assets.path("reasoner-11m-dms")),
            compression_ratio=8,
        ),
    ],
    lengths=LENGTHS,
    chains=CHAINS,
    problems=PROBLEMS,
    out="runs/hyperscaling",  # the same call goes on after a stop
)
display(Markdown(result.table()))

# %% [markdown]
# L-W-CR@T stands for the most new tokens of an answer, the number of chains, the compression ratio
# and the temperature; @0 is greedy. Right answers are in percent: of `single` chains, by `vote`, by
# the likeliest chain (mean or sum over its tokens), and in any chain (`pass`, estimated from all
# sampled chains). A star marks points on the frontier: no point of the system with fewer reads, or
# a smaller peak, has a better vote.
#
# ## Frontiers
# Each point is a length and a number of chains. Higher is better, further left is cheaper; squares
# are greedy, and faint points are dominated by another point of the same system.

# %%
from IPython.display import Image

from dms_jax.analysis.hyperscaling_plot import hyperscaling_figure

path = pathlib.Path("runs/hyperscaling.png")
hyperscaling_figure(path, result, title="Word problems, a vote of the chains")
display(Image(path), Markdown(result.gains_table()))

# %% [markdown]
# Gains are averaged over the budgets that both systems cover, in points of accuracy, with one
# standard error. This model shows how the comparison works, not that votes pay: it was trained on
# solutions with wrong steps, so that sampled chains differ and votes correct them, but one greedy
# chain with the whole cache makes few errors and beats all votes. Results of other models:
# `experiments/results/CLAIMS.md` in the repository.
