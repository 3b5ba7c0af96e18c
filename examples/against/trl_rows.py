"""Rows for `rloss check-mismatch --against` from TRL: a class to use in place of GRPOTrainer, with use_vllm=True.

Written from the source of TRL 1.16; not run inside it.
"""

import json

from trl import GRPOTrainer


class WritingTrainer(GRPOTrainer):
    def _generate(self, prompts):
        result = super()._generate(prompts)
        prompts, responses, masks, _, logprobs = result[:5]
        keys = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
        with open(f"rows-{self.accelerator.process_index}.jsonl", "a") as file:
            for row in zip(prompts, responses, masks or [None] * len(responses), logprobs):
                file.write(json.dumps(dict(zip(keys, row))) + "\n")
        return result
