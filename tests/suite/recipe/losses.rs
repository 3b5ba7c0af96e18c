//! Settings of one loss or advantage beside another.

use super::refused::mistake;

#[test]
fn keys_that_a_loss_or_an_advantage_does_not_go_with_are_refused() {
    let cases = [
        (
            "[policy.sapo]\ntemperature_positive = 2",
            "policy.sapo",
            "only policy.loss = \"sapo\" uses this table, and policy.loss is \"ppo\"",
        ),
        (
            "policy.loss = \"sapo\"\npolicy.vespo.power_positive = 1",
            "policy.vespo",
            "write \"vespo\", or remove [policy.vespo]",
        ),
        (
            "policy.loss = \"vespo\"\npolicy.correction.is = \"token\"",
            "policy.correction.is",
            "vespo has one ratio per sequence",
        ),
        (
            "policy.loss = \"clip_cov\"",
            "policy.old_logprob",
            "\"clip_cov\" selects tokens by their old log-probabilities before the first update",
        ),
        (
            "policy.loss = \"kl_cov\"\npolicy.old_logprob = \"rollout\"\npolicy.clip_cov.fraction = 0.1",
            "policy.clip_cov",
            "write \"clip_cov\", or remove [policy.clip_cov]",
        ),
        (
            "[policy.distill]",
            "policy.distill.system_prompt",
            "missing, and teacher = \"self\" is the policy under another system prompt; set the key",
        ),
        (
            "rollout.top_p = 0.9\npolicy.distill.system_prompt = \"x\"",
            "rollout.top_p",
            "policy.distill compares the whole vocabulary; write 1, or remove [policy.distill]",
        ),
        (
            "task.name = \"agent\"\ntask.command = [\"true\"]\npolicy.distill.system_prompt = \"x\"",
            "policy.distill.system_prompt",
            "an agent's program writes the system prompts",
        ),
        (
            "policy.advantage = \"rloo\"\n[policy.distill]\nsystem_prompt = \"x\"\npolicy_loss_coefficient = 0",
            "policy.advantage",
            "policy.distill.policy_loss_coefficient = 0 removes that loss; remove one of the two",
        ),
        (
            "policy.correction.is = \"token\"\n[policy.distill]\nsystem_prompt = \"x\"\npolicy_loss_coefficient = 0",
            "policy.correction.is",
            "only the policy loss reads this",
        ),
        (
            "policy.kl.place = \"reward\"\n[policy.distill]\nsystem_prompt = \"x\"\npolicy_loss_coefficient = 0",
            "policy.kl.place",
            "only the policy loss reads this",
        ),
        (
            "policy.overlong.buffer_tokens = 4\n[policy.distill]\nsystem_prompt = \"x\"\npolicy_loss_coefficient = 0",
            "policy.overlong.buffer_tokens",
            "only the policy loss reads this",
        ),
        ("policy.kl_cov.coefficient = 2", "policy.kl_cov", "write \"kl_cov\", or remove [policy.kl_cov]"),
        (
            "policy.loss = \"clip_cov\"\npolicy.old_logprob = \"rollout\"\npolicy.clip_cov.covariance_max = 1",
            "policy.clip_cov.covariance_max",
            "1 is not above the lower bound 1",
        ),
        (
            "[adapter]\n[train.optimizer]\nkind = \"muon\"",
            "train.optimizer.kind",
            "\"muon\" is for whole matrices, and an adapter trains their low-rank factors",
        ),
        (
            "task.name = \"command\"\ntask.command = [\"true\"]\npolicy.advantage = \"maxrl\"\npolicy.kl.place = \"reward\"",
            "policy.advantage",
            "the divergence is subtracted from rewards",
        ),
        (
            "task.name = \"command\"\ntask.command = [\"true\"]\npolicy.advantage = \"maxrl\"\npolicy.overlong.buffer_tokens = 4",
            "policy.advantage",
            "the penalty is subtracted from rewards",
        ),
    ];
    for (text, key, reason) in cases {
        let found = mistake(text, &[]);
        assert!(found.contains(&format!(" {key}: ")) && found.contains(reason), "{text}: {found}");
    }
}
