"""The part of a layer that the backward pass recomputes.

    nothing             everything that the layer computed is kept
    all_but_products    outputs of attention and of matrix products are kept; only element-wise
                        work is recomputed
    all_but_attention   outputs of attention are kept
    everything          inputs of layers are kept

The less it recomputes, the more memory each token takes.
"""

from typing import Any, Literal

import jax

from dms_jax import sharding
from pallas_kernels.training.api import KEPT as ATTENTION_OUTPUTS

Remat = Literal["nothing", "all_but_products", "all_but_attention", "everything"]

_ATTENTION = jax.checkpoint_policies.save_only_these_names(ATTENTION_OUTPUTS)
# Policies of `jax.checkpoint`.
KEPT: dict[Remat, Any] = {
    "nothing": sharding.keeps_all_but_gathered,
    "all_but_products": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _ATTENTION
    ),
    "all_but_attention": _ATTENTION,
    "everything": jax.checkpoint_policies.nothing_saveable,
}
