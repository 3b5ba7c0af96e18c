#!/usr/bin/env python3
"""Reference values from PyTorch and transformers for the tests, and a check of saved folders.

    scripts/make_fixtures.py                               writes tests/fixtures/ anew
    scripts/make_fixtures.py --check FOLDER [--rows FILE]  loads FOLDER in transformers, prints JSON

Needs torch, transformers 5 and safetensors. Everything runs in f32 on the CPU with eager attention and
eager experts: the default expert path refuses sizes that are no multiple of 16 bytes.

Each model folder in tests/fixtures/ holds what save_pretrained writes and
    rows.json             rows {"tokens", "mask"}; mask 1 = the token is predicted from those before it and counts
                          in the loss; loss = mean cross-entropy over all counted tokens of all rows;
                          logprobs, one a token (0 for the first); sgd_lr; in parity.py's cases also adamw
    expected.safetensors  by the names of the folder's tensors: logits.N [tokens, vocabulary] of row N; grad.NAME; sgd.NAME and, if asked for, adamw.NAME, the
                          weight after one step
"""

import argparse
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
CONFIGS = {"gpt_oss": GptOssConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}
ROUTER_MARGIN_MIN = 1e-5
# The gradient jumps where a gate or up value meets its clamp.
CLAMP_MARGIN_MIN = 3e-6
SGD_LR = 0.1

MODELS = {
    "gpt_oss_yarn": dict(
        vocab_size=40, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
        max_position_embeddings=256,
        rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
                             truncate=False, original_max_position_embeddings=32),
    ),
    # Sizes that are no multiple of anything, another order of layers, a clamp that many values reach.
    "gpt_oss_plain": dict(
        vocab_size=37, hidden_size=36, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
        head_dim=6, intermediate_size=20, num_local_experts=5, num_experts_per_tok=3, sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=64, swiglu_limit=1.5,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
}
DENSE_MODELS = {
    "qwen2": dict(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, max_position_embeddings=64, rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
    # Five query heads a KV head, a head_dim of its own, odd sizes.
    "qwen2_tied": dict(
        vocab_size=37, hidden_size=36, num_hidden_layers=3, num_attention_heads=10, num_key_value_heads=2, head_dim=6,
        intermediate_size=51, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
}
QWEN3_MODELS = {
    # Heads wider than the hidden size, tied.
    "qwen3": dict(
        vocab_size=37, hidden_size=20, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=18,
        intermediate_size=27, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
    "qwen3_moe": dict(
        vocab_size=40, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
        intermediate_size=48, moe_intermediate_size=12, num_experts=5, num_experts_per_tok=3, norm_topk_prob=True,
        max_position_embeddings=64, rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
}
ROW_LENGTHS = [2, 17, 45]
# A long step too; its eps is not small beside gradients, so that a step of one near 0 is no matter of its rounded sign.
ADAMW = dict(lr=10.0, betas=(0.9, 0.99), eps=0.1, weight_decay=0.01)


def random_model(sizes, generator, family="gpt_oss"):
    """A model whose every tensor is random and matters."""
    # No pad token: nn.Embedding gives that row no gradient.
    config = CONFIGS[family](**({"tie_word_embeddings": False} | sizes), eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **EAGER)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(generator=generator)
            if name.endswith("norm.weight"):
                tensor.mul_(0.1).add_(1)
            elif name.endswith("sinks"):
                tensor.add_(1)
            elif "bias" in name:
                tensor.mul_(0.2)
            elif "experts" in name:  # [experts, in, out] in GPT-OSS, [experts, out, in] in Qwen3
                tensor.mul_(tensor.shape[1 if family == "gpt_oss" else 2] ** -0.5)
            elif "embed" not in name or config.tie_word_embeddings:  # [out, in]
                tensor.mul_(tensor.shape[1] ** -0.5)
    return model.eval()


def margins(model, tokens):
    """The smallest gap, over tokens and layers, between the last expert chosen and the first one left out; and the
    smallest distance of a gate or up value from its clamp."""
    clamp = float("inf")
    if model.config.model_type not in ("gpt_oss", "qwen3_moe"):
        return clamp, clamp

    def watch(experts):
        def apply_gate(gate_up):
            nonlocal clamp
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
            clamp = min(clamp, (gate - experts.limit).abs().min().item(), (up.abs() - experts.limit).abs().min().item())
            return type(experts)._apply_gate(experts, gate_up)

        experts._apply_gate = apply_gate

    clamped = [layer.mlp.experts for layer in model.model.layers if model.config.model_type == "gpt_oss"]
    for experts in clamped:
        watch(experts)
    with torch.no_grad():
        routers = model(tokens[None], output_router_logits=True).router_logits
    for experts in clamped:
        del experts._apply_gate
    k = model.config.num_experts_per_tok
    if k == model.config.num_local_experts:
        return float("inf"), clamp
    sorted_logits = torch.stack(routers).sort(descending=True).values
    return (sorted_logits[..., k - 1] - sorted_logits[..., k]).min().item(), clamp


def random_row(model, length, generator, redrawn):
    """Tokens whose routing and clamps no rounding error can change, and a mask with gaps. Counts the others in `redrawn`."""
    while True:
        tokens = torch.randint(model.config.vocab_size, (length,), generator=generator)
        router, clamp = margins(model, tokens)
        if router < ROUTER_MARGIN_MIN:
            redrawn["router"] += 1
        elif clamp < CLAMP_MARGIN_MIN:
            redrawn["clamp"] += 1
        else:
            break
    mask = (torch.rand(length, generator=generator) < 0.6).int()
    mask[0], mask[-1] = 0, 1
    return tokens, mask


def masked_loss(model, rows):
    """Logits and log-probabilities of each of `rows` (tokens, mask), and the mean cross-entropy over all counted tokens."""
    logits = [model(tokens[None]).logits[0] for tokens, _ in rows]
    logprobs = [
        row.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0] for row, (tokens, _) in zip(logits, rows)
    ]
    counted = sum(mask.sum() for _, mask in rows)
    loss = -sum((row * mask[1:]).sum() for row, (_, mask) in zip(logprobs, rows)) / counted
    return logits, logprobs, loss


def stored(tensors, family):
    """The tensors by the names of a folder: transformers holds all experts of Qwen3 in one, a folder each on its own."""
    found = {}
    for name, tensor in tensors:
        tensor = tensor.detach()
        stem, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj" and family == "qwen3_moe":
            for expert, (gate, up) in enumerate(matrix.chunk(2) for matrix in tensor):
                found[f"{stem}.experts.{expert}.gate_proj.weight"] = gate.clone()
                found[f"{stem}.experts.{expert}.up_proj.weight"] = up.clone()
        elif kind == "down_proj" and family == "qwen3_moe":
            found |= {f"{stem}.experts.{expert}.down_proj.weight": matrix.clone() for expert, matrix in enumerate(tensor)}
        else:
            found[name] = tensor.clone()
    return found


def write_model(folder, sizes, row_lengths, sgd_lr, generator, family="gpt_oss", adamw=None):
    """A random model and what PyTorch computes on it; returns how many rows were drawn again, by reason."""
    model = random_model(sizes, generator, family)
    model.save_pretrained(folder)

    redrawn = Counter()
    rows = [random_row(model, length, generator, redrawn) for length in row_lengths]
    logits, logprobs, loss = masked_loss(model, rows)
    loss.backward()

    expected = {f"logits.{i}": row.detach().contiguous() for i, row in enumerate(logits)}
    def named(kind, tensors):
        return {f"{kind}.{key}": tensor for key, tensor in stored(tensors, family).items()}

    expected |= named("grad", ((key, tensor.grad) for key, tensor in model.named_parameters()))
    before = {key: tensor.detach().clone() for key, tensor in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=sgd_lr).step()
    expected |= named("sgd", model.named_parameters())
    if adamw:
        with torch.no_grad():
            for key, tensor in model.named_parameters():
                tensor.copy_(before[key])
        torch.optim.AdamW(model.parameters(), **adamw).step()
        expected |= named("adamw", model.named_parameters())
    save_file(expected, folder / "expected.safetensors")
    content = {
        "rows": [{"tokens": tokens.tolist(), "mask": mask.tolist()} for tokens, mask in rows],
        "logprobs": [[0.0] + row.tolist() for row in logprobs],
        "loss": loss.item(),
        "sgd_lr": sgd_lr,
    }
    if adamw:
        content["adamw"] = adamw
    (folder / "rows.json").write_text(json.dumps(content) + "\n")
    return redrawn


def write_dense_models(generator):
    for name, sizes in DENSE_MODELS.items():
        write_model(FIXTURES / name, sizes, ROW_LENGTHS, SGD_LR, generator, "qwen2", ADAMW)


def write_qwen3_models(generator):
    for name, sizes in QWEN3_MODELS.items():
        write_model(FIXTURES / name, sizes, ROW_LENGTHS, SGD_LR, generator, name, ADAMW)


def write_traces(name, optimizer, starts_and_settings, generator):
    """Ten steps of a torch.optim optimizer on given gradients of many magnitudes, for each start and settings."""
    cases = []
    for start, settings in starts_and_settings:
        weight = (torch.randn(16, generator=generator) * start).requires_grad_()
        magnitudes = 10.0 ** torch.linspace(-6, 2, 16)
        case = {"settings": settings, "initial": weight.tolist(), "gradients": [], "weights": []}
        steps = optimizer([weight], **settings)
        for _ in range(10):
            weight.grad = torch.randn(16, generator=generator) * magnitudes
            steps.step()
            case["gradients"].append(weight.grad.tolist())
            case["weights"].append(weight.tolist())
        cases.append(case)
    (FIXTURES / name).write_text(json.dumps(cases) + "\n")


def write_adamw(generator):
    cases = (
        (1.0, dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)),
        (1.0, dict(lr=4e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)),
        # From 0, where the updates alone make the weights.
        (0.0, dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)),
    )
    write_traces("adamw.json", torch.optim.AdamW, cases, generator)


def write_sgd(generator):
    cases = (
        (1.0, dict(lr=0.1, momentum=0.0)),
        (1.0, dict(lr=0.1, momentum=0.9)),
        (0.0, dict(lr=0.003, momentum=0.99)),
    )
    write_traces("sgd.json", torch.optim.SGD, cases, generator)


def write_mxfp4(generator):
    """Packed experts [2, out 6, in 64], every nibble under every scale, with their values from the definition."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    experts, outputs, blocks = 2, 6, 2
    scales = torch.tensor([0, 1, 2, 64, 100, 120, 125, 126, 127, 128, 200, 252], dtype=torch.uint8)
    scales = scales.repeat(2).reshape(experts, outputs, blocks)
    packed = torch.zeros(experts, outputs, blocks, 16, dtype=torch.uint8)
    values = torch.zeros(experts, blocks * 32, outputs)
    for e in range(experts):
        for o in range(outputs):
            for b in range(blocks):
                nibbles = torch.cat([torch.randperm(16, generator=generator) for _ in range(2)]).tolist()
                for i, nibble in enumerate(nibbles):
                    packed[e, o, b, i // 2] |= nibble << (4 * (i % 2))
                    sign = -1.0 if nibble >= 8 else 1.0
                    values[e, b * 32 + i, o] = sign * magnitudes[nibble % 8] * 2.0 ** (int(scales[e, o, b]) - 127)
    assert torch.equal(values, convert_moe_packed_tensors(packed, scales, dtype=torch.float32))
    save_file({"blocks": packed, "scales": scales, "values": values}, FIXTURES / "mxfp4.safetensors")


def check(folder, rows):
    """Logits of each row of `rows` by transformers from `folder`, and the names it missed or did not expect."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **EAGER
    )
    model.eval()
    wrong = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    with torch.no_grad():
        logits = [model(torch.tensor(row["tokens"])[None]).logits[0].tolist() for row in rows]
    json.dump(wrong | {"logits": logits}, sys.stdout)
    print()
    return 1 if any(wrong.values()) else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", metavar="FOLDER", type=Path, help="load FOLDER in transformers, print logits")
    parser.add_argument("--rows", type=Path, help='JSON lines {"tokens": [...]} for --check; default: a short row')
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.check:
        lines = arguments.rows.read_text().splitlines() if arguments.rows else ['{"tokens": [1, 2, 3, 4, 5, 6, 7]}']
        return check(arguments.check, [json.loads(line) for line in lines if line.strip()])
    for name in MODELS | DENSE_MODELS | QWEN3_MODELS:
        shutil.rmtree(FIXTURES / name, ignore_errors=True)
    FIXTURES.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for name, sizes in MODELS.items():
        write_model(FIXTURES / name, sizes, ROW_LENGTHS, SGD_LR, generator)
    write_adamw(generator)
    write_mxfp4(generator)
    write_dense_models(torch.Generator().manual_seed(1))
    write_sgd(torch.Generator().manual_seed(2))
    write_qwen3_models(torch.Generator().manual_seed(3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
