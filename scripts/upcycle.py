#!/usr/bin/env python3
"""Turns a dense Qwen2.5 folder into a GPT-OSS folder that computes the same: real weights with experts, routing and sinks.

    pip install torch safetensors transformers
    scripts/upcycle.py Qwen2.5-Coder-0.5B-Instruct OUT --noise 0.05 --router 0.05 --sinks mass
    rloss check-mismatch gsm8k --set model.path=OUT

Each expert is a copy of the layer's MLP. GPT-OSS's expert computes (up + 1) · gate · sigmoid(1.702 · gate), Qwen's MLP
up · gate · sigmoid(gate): so gate's weights are divided by 1.702, up has a bias of -1, down's weights are multiplied by 1.702,
and the clamp is too large to act. The weights of the chosen experts add up to 1, so equal copies give the dense MLP. All of it
is rounded to bf16 once.

--noise adds normal noise to each copy, of this share of the matrix's standard deviation: with equal copies routing would have
no effect. --router is the standard deviation of the router's weights. --sinks none makes sinks of -30, which take no mass;
`mass` spreads 0 to 3 over the heads, which takes attention away and so changes the model. Harmony's control tokens get free
ids of the vocabulary and the embeddings of their ChatML counterparts.

Their rows of the head would tie: the line break's is that of `<|message|>` too. --frame ROLLOUT.jsonl fits them, and that of
`final`, so that the result writes the dense model's answers within Harmony's frame. The file has trajectories of the dense
model, on any task:
    rloss rollout calculator --set model.path=Qwen2.5-Coder-0.5B-Instruct --out own     # own/trajectories/step-000001.jsonl

--compare ROWS.jsonl prints how far the result is from the dense model: log-probs of the rows' `question` and `answer`, both
computed by transformers in f32.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SWIGLU_ALPHA = 1.702
# Control token, and the ChatML token whose embedding it takes. A header ends with a line break in ChatML.
CONTROL_TOKENS = {
    "<|startoftext|>": None,
    "<|return|>": "<|im_end|>",
    "<|constrain|>": None,
    "<|channel|>": "<|im_start|>",
    "<|start|>": "<|im_start|>",
    "<|end|>": "<|im_end|>",
    "<|message|>": "\u010a",
    "<|call|>": "<|im_end|>",
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def encode_mxfp4(weights):
    """Encodes [experts, out, in]: blocks of 32 values, two to a byte, and a power of two for each block."""
    experts, out, width = weights.shape
    values = weights.reshape(experts, out, width // 32, 32)
    exponent = (torch.floor(torch.log2(values.abs().amax(-1).clamp(min=1e-30))) - 2).clamp(-127, 127)
    scaled = values / torch.exp2(exponent)[..., None]
    code = torch.bucketize(scaled.abs(), (E2M1[1:] + E2M1[:-1]) / 2).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).contiguous(), (exponent + 127).to(torch.uint8)


def free_ids(tokenizer):
    """Ids for the control tokens, after all that the tokenizer has."""
    used = max([*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])])
    return {name: used + 1 + at for at, name in enumerate(CONTROL_TOKENS)}


def harmony_tokens(trajectory, ids, known):
    """Returns a ChatML trajectory's tokens in Harmony's frame, and where the assistant's answer begins."""
    line, name = known["\u010a"], known["assistant"]
    tokens, begin, in_header = [], 0, False
    for token in trajectory["tokens"]:
        if token == known["<|im_start|>"]:
            tokens.append(ids["<|start|>"])
            in_header = True
        elif in_header and token == line:
            if tokens[-1] == name:
                begin = len(tokens)
                tokens += [ids["<|channel|>"], known["final"]]
            tokens.append(ids["<|message|>"])
            in_header = False
        elif token == known["<|im_end|>"]:
            tokens.append(ids["<|end|>"])
        elif token != line or tokens[-1] != ids["<|end|>"]:
            tokens.append(token)
    tokens[-1] = ids["<|return|>"]
    return tokens, begin


def fit_frame(args, embedding, head, ids, known):
    """Fits the rows of `head` [vocabulary, hidden] of the control tokens and of `final`, in place.

    The dense model reads its own answers within Harmony's frame; the model itself stays as it is.
    """
    from transformers import AutoModelForCausalLM

    rows = [json.loads(line) for line in args.frame.read_text().splitlines()]
    rows = [harmony_tokens(row, ids, known) for row in rows if row["outcome"] == "finished"]
    if not rows:
        raise SystemExit(f"{args.frame}: no trajectory has finished")
    model = AutoModelForCausalLM.from_pretrained(args.dense, dtype=torch.float32).eval().model
    table, weights = embedding.float(), head.float()
    fitted = torch.tensor([*ids.values(), *(known[name] for name in ("final", "<|im_start|>", "<|im_end|>", "<|endoftext|>"))])
    place = {token: at for at, token in enumerate(fitted.tolist())}
    states, others, targets = [], [], []
    with torch.no_grad():
        for tokens, begin in rows:
            hidden = model(inputs_embeds=table[tokens[:-1]][None]).last_hidden_state[0, begin - 1 :]
            logits = hidden @ weights.T
            logits[:, fitted] = -torch.inf
            states.append(hidden)
            others.append(logits.logsumexp(-1))
            targets.append(torch.tensor([place.get(token, -1) for token in tokens[begin:]]))
            print(f"the dense model has read {len(states)} of {len(rows)} answers", end="\r", flush=True)
    states, others, targets = (torch.cat(parts) for parts in (states, others, targets))
    is_fitted = targets >= 0
    found = torch.zeros(len(fitted), states.shape[1])
    found[place[ids["<|return|>"]]] = weights[known["<|im_end|>"]]
    found[place[known["final"]]] = weights[known["final"]]
    found.requires_grad_()
    optimizer = torch.optim.Adam([found], lr=1e-3)
    # At the frame's tokens the cross entropy; at the others the rows take nothing from the dense model's tokens. Each holds
    # by a margin of 5 nats, since noise, sinks and other prompts change the states.
    margin = torch.where(is_fitted, -5.0, 5.0)[:, None].expand(-1, len(fitted)).clone()
    margin[is_fitted] *= torch.nn.functional.one_hot(targets[is_fitted], len(fitted))
    for _ in range(2000):
        logits = states @ found.T + margin
        total = torch.logaddexp(logits.logsumexp(-1), others)
        wanted = logits[is_fitted].gather(1, targets[is_fitted, None])[:, 0]
        loss = (total[is_fitted] - wanted).mean() + (total - others)[~is_fitted].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rows of the head: {len(rows)} answers, {len(states)} tokens, loss {loss.item():.4f}")
    head[fitted] = found.detach().to(head.dtype)


def convert(args):
    source = safe_open(args.dense / "model.safetensors", "pt")
    config = json.loads((args.dense / "config.json").read_text())
    tokenizer = json.loads((args.dense / "tokenizer.json").read_text())
    if config["model_type"] != "qwen2":
        raise SystemExit(f"{args.dense}: model_type is {config['model_type']}; only qwen2 can be converted")
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    ids = free_ids(tokenizer)
    if max(ids.values()) >= config["vocab_size"]:
        raise SystemExit(f"{args.dense}: the vocabulary of {config['vocab_size']} has no free ids for the control tokens")
    known = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}

    args.out.mkdir(parents=True)
    weight_map = {}

    def write(name, tensors):
        tensors = {key: value.contiguous() for key, value in tensors.items()}
        save_file(tensors, args.out / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    embedding = source.get_tensor("model.embed_tokens.weight").clone()
    head = embedding.clone() if config["tie_word_embeddings"] else source.get_tensor("lm_head.weight").clone()
    for token, counterpart in CONTROL_TOKENS.items():
        if counterpart is not None:
            embedding[ids[token]] = embedding[known[counterpart]]
            head[ids[token]] = head[known[counterpart]]
    if args.frame:
        fit_frame(args, embedding, head, ids, known)
    write(
        "rest.safetensors",
        {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": source.get_tensor("model.norm.weight")},
    )
    del embedding, head
    random = torch.Generator().manual_seed(args.seed)
    for layer in range(layers):
        own = f"model.layers.{layer}."
        tensors = {own + name: source.get_tensor(own + name) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
        for name in ("q", "k", "v"):
            for kind in ("weight", "bias"):
                tensors[f"{own}self_attn.{name}_proj.{kind}"] = source.get_tensor(f"{own}self_attn.{name}_proj.{kind}")
        tensors[own + "self_attn.o_proj.weight"] = source.get_tensor(own + "self_attn.o_proj.weight")
        tensors[own + "self_attn.o_proj.bias"] = torch.zeros(hidden, dtype=torch.bfloat16)
        sinks = torch.full((heads,), -30.0)
        if args.sinks == "mass":
            sinks = torch.linspace(0, 3, heads)[torch.randperm(heads, generator=random)]
        tensors[own + "self_attn.sinks"] = sinks.bfloat16()
        router = torch.randn(args.experts, hidden, generator=random) * args.router
        tensors[own + "mlp.router.weight"] = router.bfloat16()
        tensors[own + "mlp.router.bias"] = torch.zeros(args.experts, dtype=torch.bfloat16)

        def copies(name, factor):
            weights = source.get_tensor(f"{own}mlp.{name}_proj.weight").float()
            noise = args.noise * weights.std()
            return torch.stack([(weights + noise * torch.randn(weights.shape, generator=random)) * factor for _ in range(args.experts)])

        # Rows of gate and up alternate.
        gate_up = torch.stack([copies("gate", 1 / SWIGLU_ALPHA), copies("up", 1)], 2).flatten(1, 2)
        down = copies("down", SWIGLU_ALPHA)
        bias = torch.zeros(args.experts, gate_up.shape[1])
        bias[:, 1::2] = -1
        experts = own + "mlp.experts."
        tensors[experts + "gate_up_proj_bias"] = bias.bfloat16()
        tensors[experts + "down_proj_bias"] = torch.zeros(args.experts, hidden, dtype=torch.bfloat16)
        for name, weights in (("gate_up_proj", gate_up), ("down_proj", down)):
            if args.mxfp4:
                tensors[experts + name + "_blocks"], tensors[experts + name + "_scales"] = encode_mxfp4(weights)
            else:
                tensors[experts + name] = weights.transpose(1, 2).bfloat16()
        write(f"layer-{layer:02d}.safetensors", tensors)
        print(f"layer {layer + 1} of {layers}", end="\r", flush=True)

    size = sum((args.out / name).stat().st_size for name in set(weight_map.values()))
    (args.out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    kinds = [f"{'sliding' if args.windows and layer % 2 == 0 else 'full'}_attention" for layer in range(layers)]
    written = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [ids["<|return|>"], ids["<|call|>"]],
        "pad_token_id": known["<|endoftext|>"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "layer_types": kinds,
        "max_position_embeddings": config["max_position_embeddings"],
        "num_attention_heads": heads,
        "num_key_value_heads": config["num_key_value_heads"],
        "num_hidden_layers": layers,
        "num_local_experts": args.experts,
        "num_experts_per_tok": args.active,
        "experts_per_token": args.active,
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_theta"],
        "rope_scaling": {"rope_type": "default"},
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "router_aux_loss_coef": 0.0,
        "sliding_window": 128,
        "swiglu_limit": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": config["vocab_size"],
        "dtype": "bfloat16",
    }
    if args.mxfp4:
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    (args.out / "config.json").write_text(json.dumps(written, indent=2))
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": number, "content": name, **special} for name, number in ids.items()]
    (args.out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (args.dense / name).exists():
            shutil.copy(args.dense / name, args.out)
    print(f"{args.out}: {size / 1e9:.1f} GB, {layers} layers, {args.experts} experts of which {args.active}")


def compare(args):
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.dense)
    rows = [json.loads(line) for line in args.compare.read_text().splitlines()[: args.rows]]
    texts = [tokenizer(row["question"] + "\n" + row["answer"], return_tensors="pt")["input_ids"] for row in rows]

    def log_probs(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            all_logits = [model(text).logits[0, :-1].log_softmax(-1) for text in texts]
        found = [logits.gather(1, text[0, 1:, None])[:, 0] for logits, text in zip(all_logits, texts)]
        return torch.cat(found), torch.cat([logits.argmax(-1) for logits in all_logits])

    (dense, likeliest), (own, own_likeliest) = log_probs(args.dense), log_probs(args.out)
    apart = (dense - own).abs()
    print(
        f"{len(apart)} tokens: log-probs differ by {apart.mean():.2e} nats in the mean, {apart.max():.2e} at most; "
        f"the likeliest token is the same at {(likeliest == own_likeliest).float().mean():.1%}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", type=Path, help="a Qwen2.5 folder with one model.safetensors")
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--active", type=int, default=2, help="experts of a token")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--router", type=float, default=0.05)
    parser.add_argument("--sinks", choices=["none", "mass"], default="none")
    parser.add_argument("--windows", action="store_true", help="windows of 128 in every other layer, as GPT-OSS has")
    parser.add_argument("--mxfp4", action="store_true", help="experts in MXFP4")
    parser.add_argument("--frame", type=Path, help="trajectories of the dense model, to fit Harmony's control tokens to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", type=Path, help="rows with `question` and `answer`")
    parser.add_argument("--rows", type=int, default=16, help="rows to compare")
    args = parser.parse_args()
    if not 0 < args.active <= args.experts:
        parser.error("--active must be between 1 and --experts")
    torch.manual_seed(args.seed)
    if args.out.exists():
        print(f"{args.out} exists: it is compared as it is")
    else:
        convert(args)
    if args.compare:
        compare(args)


if __name__ == "__main__":
    main()
