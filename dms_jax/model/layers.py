"""The parts of a layer: linear maps, RMS normalisation, the gated feed-forward, its experts.

A module here is a set of parameters and a pure call. Parameters of the layers are stacked on a
leading axis of length L; `jax.lax.scan` (or a dynamic index) passes each call its own slice, so a
call never sees the L axis. Each parameter has its logical axes as metadata (`axes`), from which
`dms_jax.sharding` derives its sharding.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dms_jax import sharding
from dms_jax.config import ModelConfig
from dms_jax.policies.values import AdapterShape
from pallas_kernels import grouped_product

Stack = tuple[int, ...]  # (L,) for parameters of layers, () for other parameters


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`, over the last `len(inputs)` dimensions of x.

    Kernels are drawn with a standard deviation of gain / sqrt(inputs): inputs of variance 1 give
    outputs of variance gain^2. Biases start at zero.
    """

    def __init__(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        stack: Stack = (),
        bias: bool = False,
        gain: float = 1.0,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        layers = ("layers",) * len(stack)
        shape = (*stack, *inputs.values(), *outputs.values())
        deviation = gain / math.sqrt(math.prod(inputs.values()))
        kernel = deviation * jax.random.normal(rngs.params(), shape, dtype)
        self.num_inputs = len(inputs)
        self.kernel = nnx.Param(kernel, axes=(*layers, *inputs, *outputs))
        self.bias = (
            nnx.Param(jnp.zeros((*stack, *outputs.values()), dtype), axes=(*layers, *outputs))
            if bias
            else None
        )

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        kernel = self.kernel[...].astype(x.dtype)
        y = product(lambda x: contract(x, kernel, self.num_inputs), x, self.num_inputs)
        if self.bias is None:
            return y
        bias = self.bias[...].astype(x.dtype)
        if x.shape[1] == 1 or sharding.has_mesh():  # split axes cannot be joined
            return y + bias
        # cuBLAS adds a vector inside the product. XLA first broadcasts a bias of several axes to a
        # matrix, which takes 50 of 3,360 ms for 64 prompts of 8,192 tokens (1.5B, H200). In a step
        # that matrix is small, and with a vector XLA would copy the layer's weights.
        return (y.reshape(*y.shape[: y.ndim - bias.ndim], -1) + bias.reshape(-1)).reshape(y.shape)

    @property
    def matrix(self) -> Float[Array, "..."]:
        """The matrix by which inputs are multiplied, including any update."""
        return self.kernel[...]


def product(
    multiply: Callable[[jax.Array], jax.Array], x: Float[Array, "..."], inputs: int = 1
) -> jax.Array:
    """Returns `multiply(x)`, products of a matrix with the vectors of x, of `inputs` axes each.

    XLA multiplies a single vector of a narrow type itself, although a library is faster: 17 times
    on a CPU (1536 x 8960 in bfloat16: 53 ms, against 3 for two vectors), and also for attention's
    matrices on an H200. So a single vector is padded with a zero vector.
    """
    if math.prod(x.shape[: x.ndim - inputs]) > 1 or jnp.finfo(x.dtype).bits > 16:
        return multiply(x)
    return multiply(jnp.concatenate([x, jnp.zeros_like(x)]))[:1]


# The most vectors whose product with a long matrix is summed in halves; the widest such matrix.
_FEW_VECTORS, _NARROW = 64, 2048


def contract(
    x: Float[Array, "..."], kernel: Float[Array, "..."], inputs: int
) -> Float[Array, "..."]:
    """Returns `jnp.tensordot(x, kernel, inputs)`.

    cuBLAS splits a matrix by columns, so a long and narrow one occupies few multiprocessors.
    Summing two halves of its rows occupies twice as many. On an H200, 8960 x 1536 in bfloat16 takes
    15.0 us instead of 20.2 for one vector, 15.8 instead of 21.8 for 32, and the same for 256.
    """
    length, width = kernel.shape[0], math.prod(kernel.shape[inputs:])
    few = math.prod(x.shape[: x.ndim - inputs]) <= _FEW_VECTORS and jnp.finfo(x.dtype).bits <= 16
    long = inputs == 1 and 4 * width <= length and length % 2 == 0
    if not (few and long and width <= _NARROW) or sharding.has_mesh():
        return jnp.tensordot(x, kernel, axes=inputs)
    halves = jnp.einsum(
        "...hn,hnm->h...m",
        x.reshape(*x.shape[:-1], 2, length // 2),
        kernel.reshape(2, length // 2, width),
        preferred_element_type=jnp.float32,
    )
    return halves.sum(0).astype(x.dtype).reshape(*x.shape[:-1], *kernel.shape[1:])


def residual_gain(config: ModelConfig) -> float:
    """Returns the gain of a layer's residual outputs: 2 L of them sum to variance 1."""
    return 1 / math.sqrt(2 * config.num_layers)


# The most elements of a one-hot matrix in memory at a time.
_ONE_HOT_ELEMENTS = 2**28
# Tokens whose rows are summed together before they are added to a table.
_BLOCK = 1024


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(
    table: Float[Array, "V columns"], tokens: Int[Array, "B T"], width: int
) -> Float[Array, "B T E"]:
    """Returns the rows of an embedding table, whose columns may be split over devices.

    Inside `shard_map` over `data` and `sequence`, with E / N columns each, the N devices look up
    all tokens in their columns and exchange the parts: this moves hidden states, never the table.

    The gradient of the table is accumulated in at least float32 and in a fixed order, unlike a
    scatter of the rows: by a product with a one-hot matrix, and on GPUs block by block (1.1 ms
    instead of 15.7 for 16,384 tokens of Llama-3.2-1B on an H200).

    Args:
      table: the table, or its columns on this device.
      tokens: token ids.
      width: E, the number of columns of the whole table.
    """
    if table.shape[1] == width:
        return table.at[tokens].get(mode="clip")
    parts = table.at[_gather_tokens(tokens)].get(mode="clip")
    return jax.lax.all_to_all(parts, sharding.shard_axes(), split_axis=0, concat_axis=2, tiled=True)


def _gather_tokens(tokens: Int[Array, "B T"]) -> Int[Array, "all T"]:
    return jax.lax.all_gather(tokens, sharding.shard_axes(), axis=0, tiled=True)


def _look_up_forward(table, tokens, width):
    # The backward pass needs only the table's shape and dtype.
    residuals = (tokens, jnp.zeros((table.shape[0], 0), table.dtype))
    return look_up(table, tokens, width), (*residuals, jnp.zeros((0, table.shape[1])))


def _look_up_backward(width, residuals, gradient):
    tokens, rows, columns = residuals
    if columns.shape[1] != width:
        gradient = jax.lax.all_to_all(
            gradient, sharding.shard_axes(), split_axis=2, concat_axis=0, tiled=True
        )
        tokens = _gather_tokens(tokens)
    return _sum_of_rows(tokens, gradient, rows.shape[0]).astype(rows.dtype), None


def _sum_of_rows(
    tokens: Int[Array, "B T"], gradient: Float[Array, "B T columns"], size: int
) -> Float[Array, "V columns"]:
    """Returns the sum of the rows of each token, in at least float32."""
    if not tokens.size:
        wide = jnp.promote_types(gradient.dtype, jnp.float32)
        return jnp.zeros((size, gradient.shape[-1]), wide)
    product = functools.partial(_sum_by_product, size=size)
    blocks = functools.partial(_sum_by_blocks, size=size)
    return jax.lax.platform_dependent(tokens, gradient, cuda=blocks, default=product)


def _sum_by_blocks(
    tokens: Int[Array, "B T"], gradient: Float[Array, "B T columns"], size: int
) -> Float[Array, "V columns"]:
    """Sums by blocks of tokens.

    Rows of equal tokens are summed by a product as wide as the block, and the first of them adds
    the sum to its row of the table.
    """
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    block = min(_BLOCK, tokens.size)
    extra = -tokens.size % block
    # Pad with an invalid token, whose sum is dropped.
    tokens = jnp.pad(tokens.reshape(-1), (0, extra), constant_values=size).reshape(-1, block)
    rows = gradient.reshape(-1, gradient.shape[-1])
    rows = jnp.pad(rows, ((0, extra), (0, 0))).reshape(-1, block, rows.shape[-1])

    def add(table, xs):
        tokens, rows = xs
        same = tokens[:, None] == tokens[None, :]
        sums = jnp.einsum(
            "ij,jE->iE",
            same.astype(rows.dtype),
            rows,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=wide,
        )
        # Tokens that are not the first of their kind point past the table, each to a different row.
        index = jnp.arange(block, dtype=tokens.dtype)
        place = jnp.where(jnp.argmax(same, axis=1) == index, tokens, size + index)
        sums += table.at[place].get(mode="fill", fill_value=0, unique_indices=True)
        return table.at[place].set(sums, mode="drop", unique_indices=True), None

    return jax.lax.scan(add, jnp.zeros((size, rows.shape[-1]), wide), (tokens, rows))[0]


def _sum_by_product(
    tokens: Int[Array, "B T"], gradient: Float[Array, "B T columns"], size: int
) -> Float[Array, "V columns"]:
    """Sums by a product with a one-hot matrix."""
    wide = jnp.promote_types(gradient.dtype, jnp.float32)

    def part(tokens, gradient):
        chosen = jax.nn.one_hot(tokens, size, dtype=gradient.dtype)
        return jnp.einsum(
            "BTV,BTE->VE",
            chosen,
            gradient,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=wide,
        )

    batch, length = tokens.shape
    pieces = math.ceil(batch * length * size / _ONE_HOT_ELEMENTS)
    if pieces == 1:
        return part(tokens, gradient)
    chunk = math.ceil(length / pieces)
    # Pad with an invalid token, whose one-hot row is zero.
    extra = -length % chunk
    tokens = jnp.pad(tokens, ((0, 0), (0, extra)), constant_values=-1)
    gradient = jnp.pad(gradient, ((0, 0), (0, extra), (0, 0)))
    chunks = jax.tree.map(
        lambda x: jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0), (tokens, gradient)
    )
    total, _ = jax.lax.scan(
        lambda total, xs: (total + part(*xs), None),
        jnp.zeros((size, gradient.shape[-1]), wide),
        chunks,
    )
    return total


look_up.defvjp(_look_up_forward, _look_up_backward)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last dimensions, statistics in >= float32.

    With an offset (Gemma) it multiplies by 1 + scale, before rounding.
    """

    def __init__(
        self,
        dims: dict[str, int],
        epsilon: float,
        *,
        stack: Stack = (),
        offset: bool = False,
        dtype: Any = jnp.float32,
    ):
        self.epsilon, self.offset = epsilon, offset
        make = jnp.zeros if offset else jnp.ones
        self.scale = nnx.Param(
            make((*stack, *dims.values()), dtype), axes=(*("layers",) * len(stack), *dims)
        )
        self.num_dims = len(dims)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        axes = tuple(range(-self.num_dims, 0))
        return rms_norm(x, self.scale[...], self.epsilon, axes=axes, offset=self.offset)


def rms_norm(
    x: Float[Array, "*rows n"],
    scale: Float[Array, "*some n"],
    epsilon: float,
    *,
    axes: tuple[int, ...] = (-1,),
    offset: bool = False,
) -> Float[Array, "*rows n"]:
    """Divides by the root of the mean square of the last dimensions, and multiplies by a scale."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axes, keepdims=True) + epsilon)
    if offset:
        return (wide * (1 + scale.astype(wide.dtype))).astype(x.dtype)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


@jax.custom_vjp
def gated(gate_up: Float[Array, "*rows 2 F"]) -> Float[Array, "*rows F"]:
    """Returns silu(gate) * up.

    The gradient is computed in at least float32, elementwise over both halves at once. Gradients of
    two indexed halves would be padded with zeros and summed, which takes a GPU twice the time of
    its memory traffic.
    """
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]


def _gated_forward(gate_up):
    return gated(gate_up), gate_up


def _gated_backward(gate_up, gradient):
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    own = gate_up.astype(wide)
    other = jnp.flip(own, -2)
    of_gate = jax.lax.broadcasted_iota(jnp.int32, own.shape, own.ndim - 2) == 0
    gate, up = jnp.where(of_gate, own, other), jnp.where(of_gate, other, own)
    share = jax.nn.sigmoid(gate)
    slope = jnp.where(of_gate, up * (1 + gate * (1 - share)), gate)
    return ((gradient[..., None, :].astype(wide) * share * slope).astype(gate_up.dtype),)


gated.defvjp(_gated_forward, _gated_backward)


def activate(gate_up: Float[Array, "*rows 2 F"], activation: str) -> Float[Array, "*rows F"]:
    """Returns the product of activated gate and up (`ModelConfig.activation`)."""
    if activation == "silu":
        return gated(gate_up)
    gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


class MLP(nnx.Module):
    """The gated feed-forward: down(activation(gate(x)) * up(x)).

    Gate and up have one fused matrix [E, 2, F]: one matrix product instead of two.
    """

    def __init__(self, config: ModelConfig, *, stack: Stack, dtype: Any, rngs: nnx.Rngs):
        embed, mlp = {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
        options: dict[str, Any] = dict(stack=stack, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.activation = config.activation
        self.gate_up_proj = Linear(embed, {"gate_up": 2} | mlp, **options)
        self.down_proj = Linear(mlp, embed, gain=residual_gain(config), **options)

    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        return self.down_proj(activate(self.gate_up_proj(x), self.activation))


class GroupedLinear(nnx.Module):
    """The matrices and biases of a linear map for each of X experts."""

    def __init__(
        self,
        experts: int,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        stack: Stack,
        bias: bool,
        gain: float = 1.0,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        axes = (*("layers",) * len(stack), "experts")
        shape = (*stack, experts)
        deviation = gain / math.sqrt(math.prod(inputs.values()))
        sizes = (*inputs.values(), *outputs.values())
        kernel = deviation * jax.random.normal(rngs.params(), (*shape, *sizes), dtype)
        self.kernel = nnx.Param(kernel, axes=(*axes, *inputs, *outputs))
        self.bias = (
            nnx.Param(jnp.zeros((*shape, *outputs.values()), dtype), axes=(*axes, *outputs))
            if bias
            else None
        )

    def matrices(self, dtype: Any) -> "ExpertMatrices":
        """Returns the matrices and biases in a type."""
        bias = None if self.bias is None else self.bias[...].astype(dtype)
        return ExpertMatrices(self.kernel[...].astype(dtype), bias)


class Routed(NamedTuple):
    """Sums over tokens, from which the balance of a router's load is computed.

    Attributes:
      tokens: number of tokens routed to each expert.
      probabilities: sum of each expert's probabilities, of a softmax over all experts.
    """

    tokens: Float[Array, "*L X"]
    probabilities: Float[Array, "*L X"]


class ExpertMatrices(NamedTuple):
    """Matrices of experts, and their biases if they have any."""

    kernel: Float[Array, "X ..."]
    bias: Float[Array, "X ..."] | None


# The most sequences of a step that computes every expert for every token. A step of few tokens
# takes as long as reading its matrices; an H200 computes 165 products of bfloat16 numbers in the
# time of reading one.
MOST_OF_A_STEP = 128


class ExpertMLP(nnx.Module):
    """A mixture of gated feed-forward experts; each token goes to a few of them (`Experts`).

        y = sum over the experts j of the token's largest router logits of w_j expert_j(x)

    No token is dropped. Experts are split over the mesh axis `experts`, and each expert over
    `model`: every device computes its experts' part for its tokens, and the parts are summed.
    """

    def __init__(self, config: ModelConfig, *, stack: Stack, dtype: Any, rngs: nnx.Rngs):
        assert config.experts is not None
        self.experts, self.activation = config.experts, config.activation
        embed, mlp = {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
        options: dict[str, Any] = dict(stack=stack, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        count = self.experts.count
        self.router = Linear(embed, {"routes": count}, **options)
        self.gate_up_proj = GroupedLinear(count, embed, {"gate_up": 2} | mlp, **options)
        self.down_proj = GroupedLinear(count, mlp, embed, gain=residual_gain(config), **options)

    def route(self, x: Float[Array, "B T E"]) -> tuple[Float[Array, "B T n"], Int[Array, "B T n"]]:
        """Returns the weights and the numbers of each token's experts."""
        logits = self._logits(x)
        if self.experts.normalized:
            best, chosen = jax.lax.top_k(logits, self.experts.per_token)
            return jax.nn.softmax(best, axis=-1), chosen
        best, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.experts.per_token)
        return best, chosen

    def routed(self, x: Float[Array, "B T E"], counted: Bool[Array, "B T"]) -> "Routed":
        """Returns the router's load statistics over the tokens that count."""
        _, chosen = self.route(x)
        counted = counted[..., None]
        probabilities = jnp.where(counted, jax.nn.softmax(self._logits(x), axis=-1), 0).sum((0, 1))
        tokens = jnp.zeros_like(probabilities).at[chosen].add(counted.astype(probabilities.dtype))
        return Routed(tokens, probabilities)

    def _logits(self, x: Float[Array, "B T E"]) -> Float[Array, "B T X"]:
        logits = self.router(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        weights, chosen = self.route(x)
        matrices = [proj.matrices(x.dtype) for proj in (self.gate_up_proj, self.down_proj)]
        mix = functools.partial(mix_experts, self.activation)
        if not sharding.has_mesh():
            return mix(x, weights, chosen, *matrices)
        return _mix_sharded(mix, x, weights, chosen, *matrices)


def _mix_sharded(mix, x, weights, chosen, gate_up, down) -> Float[Array, "B T E"]:
    """Runs `mix_experts` per shard: of tokens, of experts, and of each expert."""
    data, _ = sharding.row_axes(x.shape[0], 1)
    tokens = PartitionSpec(data)
    axes = ("experts", "embed", "gate_up", "mlp")
    experts, embed, gates, mlp = sharding.parameter_partition(axes, gate_up.kernel.shape)

    def of(matrices: ExpertMatrices, *axes: sharding.Axes | None) -> Any:
        """Returns the partition of matrices and biases (which lack the input axis)."""
        biases = PartitionSpec(axes[0], *axes[2:])
        spec: Any = ExpertMatrices(PartitionSpec(*axes), biases)  # pyright: ignore
        return spec if matrices.bias is not None else spec._replace(bias=None)

    mapped = jax.shard_map(
        functools.partial(mix, experts_over=experts, mlp_over=mlp),
        in_specs=(
            *(tokens, tokens, tokens),
            of(gate_up, experts, embed, gates, mlp),
            of(down, experts, mlp, embed),
        ),
        out_specs=tokens,
        axis_names=sharding.free_axes(),
        check_vma=False,
    )
    return mapped(x, weights, chosen, gate_up, down)


def mix_experts(
    activation: str,
    x: Float[Array, "B T E"],
    weights: Float[Array, "B T n"],
    chosen: Int[Array, "B T n"],
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    *,
    experts_over: sharding.Axes | None = None,
    mlp_over: sharding.Axes | None = None,
) -> Float[Array, "B T E"]:
    """Returns the weighted sum of each token's experts.

    Args:
      activation: see `ModelConfig`.
      x: the tokens.
      weights, chosen: the weights and the indices of each token's experts.
      gate_up, down: the experts' matrices, [X, E, 2, F] and [X, F, E], or this shard's of them.
      experts_over, mlp_over: the mesh axes that split X and F, inside `shard_map`.
    """
    if experts_over is not None:
        chosen = chosen - jax.lax.axis_index(experts_over) * len(down.kernel)
    if mlp_over is not None and down.bias is not None:  # only one part of the sum adds the bias
        first = jax.lax.axis_index(mlp_over) == 0
        down = down._replace(bias=jnp.where(first, down.bias, 0))
    tokens, flat = x.reshape(-1, x.shape[-1]), (-1, weights.shape[-1])
    few = x.shape[1] == 1 and len(tokens) <= MOST_OF_A_STEP
    given = (tokens, weights.reshape(flat), chosen.reshape(flat), gate_up, down)
    own = functools.partial(_own_experts, activation)
    if few and math.prod(chosen.shape) >= len(down.kernel):
        y = jax.lax.platform_dependent(
            *given, cuda=functools.partial(_every_expert, activation), default=own
        )
    else:
        y = own(*given)
    if over := sharding.together(experts_over, mlp_over):
        y = jax.lax.psum(y, over)
    return y.astype(x.dtype).reshape(x.shape)


def _own_experts(activation, x, weights, chosen, gate_up, down) -> Float[Array, "N E"]:
    """Computes each token's experts: its rows, sorted by expert, times the matrices of their group.

    Rows of experts on other devices (indices below 0, or X and more) come last and are not
    computed.
    """
    count, per_token = len(down.kernel), chosen.shape[1]
    flat = chosen.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)
    order = jnp.argsort(flat, stable=True)
    expert = flat[order]
    counts = jnp.zeros(count, jnp.int32).at[flat].add(1, mode="drop")

    def multiply(rows, matrices):
        kernel, bias = matrices
        y = grouped_product(rows, kernel.reshape(*kernel.shape[:2], -1), counts)
        y = y.reshape(len(rows), *kernel.shape[2:])
        if bias is None:
            return y
        # Rows of experts on other devices stay zero.
        return y + bias.at[expert].get(mode="fill", fill_value=0)

    hidden = activate(multiply(x[order // per_token], gate_up), activation)
    outputs = multiply(hidden, down)[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return (weights[..., None] * outputs).sum(1)


def _every_expert(activation, x, weights, chosen, gate_up, down) -> Float[Array, "N E"]:
    """Computes every expert for every token, with weight 0 for experts not chosen by a token.

    Two products read all matrices once, in place.
    """
    count, _, *outputs = gate_up.kernel.shape
    every = jnp.arange(count, dtype=chosen.dtype)
    chosen = chosen[..., None] == every
    weights = (weights[..., None] * chosen).sum(1)  # [N, X]
    # With an expert axis in both operands this is a batched product, and cuBLAS reads the matrices
    # in place. Otherwise XLA would transpose them first.
    hidden = jnp.einsum(
        "XNE,XEF->XNF",
        jnp.broadcast_to(x, (count, *x.shape)),
        gate_up.kernel.reshape(*gate_up.kernel.shape[:2], -1),
    )
    hidden = hidden.reshape(*hidden.shape[:2], *outputs)
    if gate_up.bias is not None:
        hidden = hidden + gate_up.bias[:, None]
    hidden = jnp.swapaxes(activate(hidden, activation), 0, 1)  # [N, X, F]
    hidden = jnp.where(chosen.any(1)[..., None], weights[..., None] * hidden, 0).astype(x.dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.tensordot(hidden, down.kernel, axes=2, preferred_element_type=wide)
    return y if down.bias is None else y + weights.astype(wide) @ down.bias.astype(wide)


class Adapter(nnx.Module):
    """One decision logit per KV head from the residual stream: `proj(norm(x))`.

    This is the separate head that NVIDIA's recipe trains (`dms_proj_alpha_norm`, `dms_proj_alpha`).
    It starts at zero, so an untrained adapter decides nothing. It is computed in at least float32,
    because its output is compared with a threshold.

    With hidden units there are two layers, `proj(gelu(hidden(norm(x))))`; `late` is a second
    projection to a logit per KV head.
    """

    def __init__(
        self,
        config: ModelConfig,
        shape: AdapterShape = AdapterShape(),  # noqa: B008 (it is immutable)
        *,
        stack: Stack,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.shape = shape
        embed = {"embed": config.hidden_size}
        self.norm = RMSNorm(embed, config.rms_norm_eps, stack=stack, dtype=dtype)
        inputs, heads = embed, {"decisions": config.num_kv_heads}
        options: dict[str, Any] = dict(stack=stack, dtype=dtype, rngs=rngs)
        units = {"adapter": shape.hidden} if shape.hidden else None
        self.hidden = None if units is None else Linear(inputs, units, bias=True, **options)
        inputs = inputs if units is None else units
        bias = shape.bias or config.qkv_bias
        self.proj = Linear(inputs, heads, bias=bias, gain=0.0, **options)
        self.late = Linear(inputs, heads, gain=0.0, **options) if shape.late else None

    def __call__(
        self, residual: Float[Array, "B T E"]
    ) -> tuple[Float[Array, "B K T"], Float[Array, "B K T"] | None]:
        """Returns the logits, and the late logits if there are any."""
        x = self.norm(residual.astype(jnp.promote_types(residual.dtype, jnp.float32)))
        if self.hidden is not None:
            x = jax.nn.gelu(self.hidden(x))
        late = None if self.late is None else _logits(self.late, x)
        return _logits(self.proj, x), late


def _logits(projection: Linear, x: Float[Array, "B T n"]) -> Float[Array, "B K T"]:
    """Returns a projection's output by KV head.

    In a decode step this is a multiply and a sum: for a float32 product of few columns cuBLAS
    launches two kernels per layer, which take 0.57 ms of a step of 3.1 ms (256 lanes, 1.5B, H200).
    """
    if x.shape[1] > 1:
        return jnp.swapaxes(projection(x), 1, 2)
    y = (x * projection.kernel[...].astype(x.dtype).T).sum(-1)
    if projection.bias is not None:
        y += projection.bias[...].astype(x.dtype)
    return y[..., None]
