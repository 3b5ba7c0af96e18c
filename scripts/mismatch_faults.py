"""Mistakes of engines, made on the side of transformers: the reference cases of `rloss check-mismatch --against`.

`FAULTS` has one maker a cause, under the name that docs/MISMATCH.md gives it. A maker takes a `Case` and returns how log-probs are
computed: `(model, conversation) -> list of log-probs, None where there is none`. The model is transformers' own: a maker
changes its weights, its configuration or a function of it, or what is fed and read.
"""

import copy
from dataclasses import dataclass
from random import Random

import torch
from transformers import PreTrainedModel
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen2 import modeling_qwen2

from make_fixtures import EAGER

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Ties go to the even one of these.
TIE = 1e-6 * (torch.arange(8) % 2)


def cast(model, dtype):
    """Weights in `dtype`; RoPE's frequencies stay f32, as from_pretrained leaves them."""
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    model.to(dtype)
    rotary.inv_freq = frequencies
    return model


@dataclass
class Case:
    """What a maker may draw from and change: its own copy of the healthy model, in f32."""

    rng: Random
    sizes: dict
    model: PreTrainedModel
    dtype: torch.dtype
    # Weights of an update before, made by `earlier`; the healthy model is then the later one.
    earlier: PreTrainedModel | None = None

    @property
    def family(self):
        return self.model.config.model_type

    def ready(self, model=None):
        """The model in the case's precision."""
        return cast(model or self.model, self.dtype).eval()

    def rebuilt(self, **sizes):
        """The same weights under another configuration."""
        config = type(self.model.config)(**({"tie_word_embeddings": False} | self.sizes | sizes), eos_token_id=2)
        model = type(self.model)._from_config(config, dtype=torch.float32, **EAGER)
        model.load_state_dict(self.model.state_dict())
        return model


def logits(model, tokens):
    """f32 logits by a head in f32, whatever the trunk's precision: [tokens, vocabulary]."""
    with torch.no_grad():
        hidden = model.model(torch.tensor(tokens)[None]).last_hidden_state[0]
        return hidden.float() @ model.lm_head.weight.float().T


def chosen(log_probs, tokens):
    """None, then what each row says of the token after it."""
    targets = torch.tensor(tokens[1:])
    found = log_probs[: len(targets)].gather(1, targets[:, None])[:, 0].tolist()
    return [None, *(None if value == float("-inf") else value for value in found)]


def plain(model, tokens):
    return chosen(logits(model, tokens).log_softmax(-1), tokens)


def weights(change):
    """A maker that changes named tensors: `change(case)` gives `(name, tensor) -> tensor or None`."""
    def make(case):
        of = change(case)
        with torch.no_grad():
            for name, tensor in case.model.named_parameters():
                changed = of(name, tensor)
                if changed is not None:
                    tensor.copy_(changed)
        return case.ready(), plain
    return make


def configuration(change):
    """A maker that changes the configuration: `change(case)` gives the other sizes."""
    return lambda case: (case.ready(case.rebuilt(**change(case))), plain)


def reading(read):
    """A maker that leaves the model alone: `read(case)` gives `(model, tokens) -> log-probs`."""
    return lambda case: (case.ready(), read(case))


def sinks(change):
    return weights(lambda case: lambda name, t: change(case, t) if name.endswith("sinks") else None)


def sinks_per_kv_head(case):
    heads, kv = case.sizes["num_attention_heads"], case.sizes["num_key_value_heads"]
    group = heads // kv
    rule = case.rng.choice([lambda h: h // group, lambda h: h % kv, lambda h: h // group * group])
    order = [rule(h) for h in range(heads)]
    return lambda name, t: t[order] if name.endswith("sinks") else None


def sinks_of_another_layer(case):
    layers = case.model.model.layers
    by = case.rng.choice([1, len(layers) - 1])
    old = [layer.self_attn.sinks.detach().clone() for layer in layers]
    def change(name, _):
        if name.endswith("sinks"):
            return old[(int(name.split(".")[2]) + by) % len(layers)]
    return change


def no_factor(case):
    case.model.model.rotary_emb.attention_scaling = 1.0
    return case.ready(), plain


def other_ramp(case):
    rope = case.sizes["rope_parameters"]
    if case.rng.random() < 0.5:
        return configuration(lambda case: dict(rope_parameters=rope | dict(truncate=not rope["truncate"])))(case)
    rotary, size = case.model.model.rotary_emb, case.sizes["head_dim"]
    angles = rope["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
    rotary.inv_freq.copy_(angles / rope["factor"])
    return case.ready(), plain


def interleaved(case):
    """Neighbouring dimensions as pairs, by a rotation of our own in place of transformers'."""
    def rotate(x, cos, sin):
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    if case.family == "gpt_oss":
        return patched(modeling_gpt_oss, "_apply_rotary_emb", rotate)(case)
    def both(q, k, cos, sin):  # [batch, tokens, dimensions], each angle twice
        cos, sin = (table.chunk(2, -1)[0].unsqueeze(1) for table in (cos, sin))
        return rotate(q, cos, sin), rotate(k, cos, sin)
    return patched(modeling_qwen2, "apply_rotary_pos_emb", both)(case)


def patched(module, name, function):
    """A maker that replaces a function of a module of transformers' while the log-probs are computed."""
    def make(case):
        def read(model, tokens):
            old = getattr(module, name)
            setattr(module, name, function)
            try:
                return plain(model, tokens)
            finally:
                setattr(module, name, old)
        return case.ready(), read
    return make


def layer_types(case):
    return case.model.config.layer_types


def swapped(case):
    other = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    return dict(layer_types=[other[kind] for kind in layer_types(case)])


def of_experts(change):
    def make(case):
        for layer in case.model.model.layers:
            change(layer.mlp)
        return case.ready(), plain
    return make


def softmax_first(mlp):
    router = mlp.router
    def forward(hidden_states):
        scores = torch.nn.functional.linear(hidden_states, router.weight, router.bias)
        top, indices = scores.softmax(-1, dtype=scores.dtype).topk(router.top_k, -1)
        return scores, top, indices
    router.forward = forward


def no_bias(*endings):
    return weights(lambda case: lambda name, t: torch.zeros_like(t) if name.endswith(endings) else None)


def tied_head(case):
    with torch.no_grad():
        case.model.lm_head.weight.copy_(case.model.model.embed_tokens.weight)
    return case.ready(), plain


def double_start(model, tokens):
    return [None, *plain(model, [tokens[0], *tokens])[2:]]


def off_by_one(case):
    kind = case.rng.choice(["seen", "unseen", "next", "last"])
    def read(model, tokens):
        table = logits(model, tokens).log_softmax(-1)
        right = chosen(table, tokens)
        if kind == "next":  # the value of the token after
            return [None, *right[2:], None]
        if kind == "last":
            return [None, None, *right[1:-1]]
        if kind == "seen":  # looked up in the row of the token itself
            return [None, *chosen(table[1:], [0, *tokens[1:]])[1:]]
        return [None, None, *chosen(table[:-1], tokens[1:])[1:]]
    return read


def temperature(case):
    factor = case.rng.choice([0.5, 0.6, 0.7, 0.8, 0.9, 1.2, 1.5, 2.0])
    return lambda model, tokens: chosen((logits(model, tokens) / factor).log_softmax(-1), tokens)


def filtered(keep):
    """Log-probs over what a filter keeps; null where it keeps none."""
    def change(case):
        kept = keep(case.rng)
        def read(model, tokens):
            scores = logits(model, tokens)
            return chosen(scores.masked_fill(~kept(scores.softmax(-1)), float("-inf")).log_softmax(-1), tokens)
        return read
    return reading(change)


def top_p(rng):
    p = rng.choice([0.8, 0.9, 0.95])
    def kept(probabilities):
        sorted_, order = probabilities.sort(-1, descending=True)
        before = sorted_.cumsum(-1) - sorted_
        return torch.zeros_like(probabilities, dtype=torch.bool).scatter(-1, order, before < p)
    return kept


def top_k(rng):
    k = rng.choice([20, 40, 50, 100])
    return lambda probabilities: probabilities >= probabilities.topk(k, -1).values[:, -1:]


def min_p(rng):
    p = rng.choice([0.02, 0.05, 0.1])
    return lambda probabilities: probabilities >= p * probabilities.max(-1, keepdim=True).values


def bf16_logits(model, tokens):
    return chosen(logits(model, tokens).bfloat16().float().log_softmax(-1), tokens)


def mxfp4(case):
    """Blocks of 32 inputs; the scale of the OCP's formula, or the next where a value would be cut off."""
    cuts_off = case.rng.random() < 0.5
    def change(name, t):
        if not name.endswith(EXPERTS):
            return None
        blocks = t.transpose(1, 2).unflatten(-1, (-1, 32))
        highest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        scale = 2.0 ** (highest.log2().floor() - 2)
        if not cuts_off:
            scale = torch.where(highest > 6 * scale, 2 * scale, scale)
        magnitudes = (blocks.abs() / scale)[..., None]
        nearest = FP4[((magnitudes - FP4).abs() + TIE).argmin(-1)]
        return (nearest * blocks.sign() * scale).flatten(-2).transpose(1, 2)
    return change


def earlier(case):
    return case.ready(case.earlier), plain


FAULTS = {
    "sinks missing": sinks(lambda case, t: torch.full_like(t, float("-inf"))),
    "sinks loaded as 0": sinks(lambda case, t: torch.zeros_like(t)),
    "sinks per KV head": weights(sinks_per_kv_head),
    "sinks of another layer": weights(sinks_of_another_layer),
    "RoPE without YaRN": configuration(lambda case: dict(
        rope_parameters=dict(rope_type="default", rope_theta=case.sizes["rope_parameters"]["rope_theta"]))),
    "YaRN attention factor missing": no_factor,
    "other YaRN ramp": other_ramp,
    "other RoPE base": configuration(lambda case: dict(rope_parameters=case.sizes["rope_parameters"] | dict(
        rope_theta=case.rng.choice([b for b in (1e4, 1.5e5, 5e5, 1e6) if b != case.sizes["rope_parameters"]["rope_theta"]])))),
    "RoPE interleaved": interleaved,
    "full attention everywhere": configuration(
        lambda case: dict(layer_types=["full_attention"] * len(layer_types(case)))),
    "window off by one": configuration(
        lambda case: dict(sliding_window=case.sizes["sliding_window"] + case.rng.choice([-1, 1]))),
    "sliding and full layers swapped": configuration(swapped),
    "SwiGLU limit missing": of_experts(lambda mlp: setattr(mlp.experts, "limit", 1e30)),
    "SwiGLU alpha missing": of_experts(lambda mlp: setattr(mlp.experts, "alpha", 1.0)),
    "softmax before top-k": of_experts(softmax_first),
    "other RMS epsilon": configuration(lambda case: dict(rms_norm_eps=case.rng.choice([1e-6, 1e-4, 1e-3, 1e-3, 1e-3]))),
    "attention biases missing": no_bias("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"),
    "router bias missing": no_bias("router.bias"),
    "expert biases missing": no_bias("gate_up_proj_bias", "down_proj_bias"),
    "tied head": tied_head,
    "double start token": reading(lambda case: double_start),
    "off by one": reading(off_by_one),
    "another temperature": reading(temperature),
    "log-probs after top-p": filtered(top_p),
    "log-probs after top-k": filtered(top_k),
    "log-probs after min-p": filtered(min_p),
    "bf16 logits": reading(lambda case: bf16_logits),
    "bf16 weights": weights(lambda case: lambda name, t: t.bfloat16().float()),
    "MXFP4 weights": weights(mxfp4),
    "weights one update old": earlier,
}

# What only GPT-OSS has a place for.
GPT_OSS_ONLY = {
    name for name in FAULTS if name.startswith(("sinks", "full attention", "window", "sliding", "SwiGLU", "softmax"))
} | {"router bias missing", "expert biases missing", "MXFP4 weights"}


def healthy(case):
    return case.ready(), plain


def case_of(rng, sizes, model, dtype, earlier_model=None):
    """A case with its own copy of `model`."""
    return Case(rng, sizes, copy.deepcopy(model), dtype, copy.deepcopy(earlier_model))
