"""What a loaded model's attention needs, found by running one token through it and looking, not by reading its config.

Every architecture names things its own way in its config; what its layers ask of the attention function is one
vocabulary. The same run shows whether the architecture can be served at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from swapserve.attention import AttentionCall
from swapserve.model_errors import UnsupportedModel


@dataclass(frozen=True)
class LayerFacts:
    """One layer's attention: head counts, head size, and its window (0: everything before)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int


@dataclass
class AttentionProbe:
    """Stands in for the KV pool and writes down what each layer asks for; a lone token attends to itself."""

    layers: dict[int, LayerFacts] = field(default_factory=dict)
    num_calls: int = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        self.num_calls += 1
        (_, num_heads, head_dim), num_kv_heads = query.shape, key.shape[1]
        if value.shape[-1] != head_dim or key.shape[-1] != head_dim:
            raise UnsupportedModel(
                f"its queries, keys and values have {head_dim}, {key.shape[-1]} and {value.shape[-1]} numbers a head: "
                "only one size for all three is supported"
            )
        self.layers[call.layer] = LayerFacts(num_heads, num_kv_heads, head_dim, call.window)
        return value.repeat_interleave(num_heads // num_kv_heads, dim=1)


def inspect_attention(
    decoder: torch.nn.Module, config: PreTrainedConfig, device: torch.device
) -> tuple[LayerFacts, ...]:
    """Each layer's facts, in order; raises `UnsupportedModel` for one whose layers are not all plain attention."""
    probe = AttentionProbe()
    run_one_token(decoder, device, probe)
    wanted = config.num_hidden_layers
    if sorted(probe.layers) != list(range(wanted)) or probe.num_calls != wanted:
        raise UnsupportedModel(
            f"{len(probe.layers)} of its {wanted} layers go through transformers' attention interface once each: "
            "only models whose every layer does are supported"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel("its layers share keys and values, which is not supported")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise UnsupportedModel("it attends in chunks (`chunked_attention`), which is not supported")
    return tuple(probe.layers[index] for index in range(wanted))


def run_one_token(module: torch.nn.Module, device: torch.device, probe: AttentionProbe) -> object:
    """The module's answer for a token at position 0: token 1, since 0 is often padding, whose embedding is zero."""
    one = torch.ones((1, 1), dtype=torch.int64, device=device)
    with torch.inference_mode():
        return module(input_ids=one, position_ids=one - 1, use_cache=False, swapserve_step=probe)


@dataclass(frozen=True)
class HeadRule:
    """What a model does to the language-model head's products to make logits of them."""

    scale: float = 1.0
    softcap: float = 0.0

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> HeadRule:
        """Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, Gemma 2 has a soft cap."""
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(scale, getattr(config, "final_logit_softcapping", None) or 0.0)

    def apply(self, products: Tensor) -> Tensor:
        """Float32 logits of the head's products, `[rows, vocab]`; may write to its argument."""
        logits = products.float()
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def check_head(model: PreTrainedModel, decoder: torch.nn.Module, rule: HeadRule, device: torch.device) -> None:
    """Compare our logits of one token with the model's own: an unknown rule is refused, not served wrong."""
    whole = run_one_token(model, device, AttentionProbe()).logits[0, -1].float()  # type: ignore[attr-defined]
    inner = run_one_token(decoder, device, AttentionProbe()).last_hidden_state[0]  # type: ignore[attr-defined]
    with torch.inference_mode():
        ours = rule.apply(model.get_output_embeddings()(inner))[-1]
    rounding = 1e-4 if model.dtype == torch.float32 else 2e-2
    if not torch.allclose(ours, whole, rtol=0.0, atol=rounding * float(whole.abs().max()), equal_nan=True):
        raise UnsupportedModel("its logits are not its head's products, scaled and capped: only those are supported")
