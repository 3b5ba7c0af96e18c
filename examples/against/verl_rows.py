"""Rows for `rloss check-mismatch --against` from verl: begin `_agent_loop_postprocess` with this.

The method is in verl/experimental/agent_loop/agent_loop.py (verl of January 2026). Set
actor_rollout_ref.rollout.calculate_log_probs=True. Written from verl's source; not run inside it.
"""

import json, os
keys = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
with open(f"/tmp/rows-{os.getpid()}.jsonl", "a") as file:
    file.write(json.dumps({key: getattr(output, key) for key in keys}) + "\n")
