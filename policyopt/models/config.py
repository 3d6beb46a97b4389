"""What a decoder is: one frozen, hashable description, checked when it is made."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from policyopt.checks import one_of
from policyopt.models.grouped_matmul import BACKENDS
from policyopt.models.router import PRECISIONS, MoEConfig

REMAT = ('none', 'full', 'dots')
DTYPES = ('float32', 'bfloat16', 'float16', 'float64')
ATTENTION = ('auto', 'blocked', 'splash', 'cudnn', 'xla')


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Long-context scaling of rotary frequencies.

    Attributes:
      kind: 'linear' divides every frequency by `factor`; 'llama3' divides the slow ones only.
      factor: how many times longer than `original_length` the context may be.
      low: wavelengths above original_length / low are divided ('llama3').
      high: wavelengths below original_length / high are kept ('llama3').
      original_length: context length of pre-training ('llama3').
    """

    kind: str
    factor: float
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192

    def __post_init__(self):
        one_of('rope_scaling.kind', self.kind, ('linear', 'llama3'))
        if not self.factor > 0:
            raise ValueError(f'rope_scaling.factor={self.factor} must be above 0')
        if not 0 < self.low < self.high:
            raise ValueError(
                f'rope_scaling.low={self.low} must lie above 0 and below high={self.high}'
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama, Qwen2, Qwen3, Qwen3-MoE or Mixtral form.

    Attributes:
      vocab_size: rows of the embedding.
      embed_dim: width of the residual stream.
      num_layers, num_heads, num_kv_heads: as named; query heads share key heads in equal groups.
      head_dim: width of a head; 0 means embed_dim / num_heads.
      mlp_dim: inner width of a dense SwiGLU layer.
      moe: router of the mixture-of-experts layers; None where every layer is dense.
      expert_dim: inner width of one expert.
      moe_layers: which layers are mixtures of experts, increasing; None with `moe` means all.
      moe_backend: of the expert matmuls, by name; 'auto' is chosen by platform.
      shared_gate: the shared expert's output is scaled by a sigmoid gate of its own.
      tied: the head is the embedding; otherwise a matrix of its own.
      qkv_bias: biases on query, key and value projections (Qwen2).
      qk_norm: RMSNorm over each head's query and key before rotation (Qwen3).
      norm_eps: epsilon of every RMSNorm.
      rope_theta, rope_scaling: rotary base and long-context scaling.
      max_length: longest sequence the model was made for; informative.
      value_head: a scalar per token on the trunk (critic).
      reward_head: a scalar per row on the trunk (reward model).
      dtype: of activations and matmuls.
      param_dtype: of parameters.
      precision: of every matmul but the experts' (`moe.precision`); 'highest' is float32 proper
        where the hardware would round its inputs.
      remat: 'none' keeps every activation but those of norms, gating and attention's scores, 'dots'
        keeps the results of matmuls with weights, 'full' keeps layer inputs.
      attention: backend by name; 'auto' is chosen by platform.
      bos_id, pad_id: special tokens, kept with the checkpoint; None where it names none.
      eos_ids: every id that ends a text, likewise; () where the checkpoint names none.
      family: `model_type` to save as; '' chooses one from the features.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int = 0
    head_dim: int = 0
    moe: MoEConfig | None = None
    expert_dim: int = 0
    moe_layers: tuple[int, ...] | None = None
    moe_backend: str = 'auto'
    shared_gate: bool = False
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_length: int = 4096
    value_head: bool = False
    reward_head: bool = False
    dtype: str = 'float32'
    param_dtype: str = 'float32'
    precision: str = 'highest'
    remat: str = 'none'
    attention: str = 'auto'
    bos_id: int | None = None
    pad_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    family: str = ''

    def __post_init__(self):
        if not self.head_dim:
            object.__setattr__(self, 'head_dim', self.embed_dim // self.num_heads)
        for field in ('vocab_size', 'embed_dim', 'num_layers', 'num_heads', 'num_kv_heads'):
            if getattr(self, field) < 1:
                raise ValueError(f'{field}={getattr(self, field)} must be at least 1')
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f'num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}'
            )
        if self.head_dim % 2:
            raise ValueError(f'head_dim={self.head_dim} must be even for rotary embeddings')
        if 'dense' in self.kinds and self.mlp_dim < 1:
            raise ValueError(f'mlp_dim={self.mlp_dim} must be at least 1 for dense layers')
        self._check_moe()
        one_of('remat', self.remat, REMAT)
        one_of('attention', self.attention, ATTENTION)
        one_of('moe_backend', self.moe_backend, ('auto', *BACKENDS))
        one_of('dtype', self.dtype, DTYPES)
        one_of('param_dtype', self.param_dtype, DTYPES)
        one_of('precision', self.precision, PRECISIONS)

    def _check_moe(self):
        if self.moe is None:
            for field, default in (('moe_layers', None), ('expert_dim', 0), ('shared_gate', False)):
                if getattr(self, field) != default:
                    raise ValueError(f'{field}={getattr(self, field)!r} needs `moe`')
            return
        if self.expert_dim < 1:
            raise ValueError(f'expert_dim={self.expert_dim} must be at least 1 with `moe`')
        if self.shared_gate and not self.moe.shared_experts:
            raise ValueError('shared_gate=True needs moe.shared_experts')
        layers = self.moe_layers
        if layers is not None and (
            not layers
            or list(layers) != sorted(set(layers))
            or layers[0] < 0
            or layers[-1] >= self.num_layers
        ):
            raise ValueError(
                f'moe_layers={layers} must be increasing layer numbers below {self.num_layers}'
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer, 'dense' or 'moe'; routing's layer axis is the 'moe' ones in order."""
        if self.moe is None:
            return ('dense',) * self.num_layers
        if self.moe_layers is None:
            return ('moe',) * self.num_layers
        return tuple('moe' if i in self.moe_layers else 'dense' for i in range(self.num_layers))

    @property
    def lax_precision(self) -> jax.lax.Precision:
        """`precision` as jax takes it."""
        return jax.lax.Precision[self.precision.upper()]

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`dtype` as jax takes it."""
        return jnp.dtype(self.dtype)
