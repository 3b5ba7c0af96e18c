#!/usr/bin/env python3
"""Times the update of one GRPO step of a random GPT-OSS model in PyTorch's FSDP2 on several CPU processes, over gloo.

    torchrun --nproc-per-node 2 scripts/peer_fsdp_step.py [--hidden N ...]

The shapes of `cargo bench --bench step`, which `mpirun -np 2` starts on as many processes. Parameters, gradients and
moments are sharded layer by layer (`fully_shard`), and gathered again for the backward. Each process takes its share of the
sequences; an update: forward and backward over all their tokens, the gradient's norm clipped, AdamW. There is no rollout.

Prints one JSON line: seconds of each update but the first.
"""

import json
import time

from peer_grpo_step import LEARNING_RATE, arguments, model_of, update


def main():
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.fsdp import fully_shard

    a = arguments()
    torch.set_num_threads(a.threads)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = model_of(transformers, a)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    a.prompts //= ranks
    torch.manual_seed(rank)
    seconds = []
    for _ in range(a.steps + 1):
        tokens = torch.randint(1, a.vocab, (a.prompts * a.samples, a.prompt_tokens + a.response_tokens))
        dist.barrier()
        begun = time.perf_counter()
        update(torch, model, optimizer, tokens, a)
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    if rank == 0:
        print(json.dumps({"peer": "fsdp2", "ranks": ranks, "update_s": seconds[1:]}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
