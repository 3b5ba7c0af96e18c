//! Refuses recipes that cannot train with expert parallelism (`parallel.experts = "by_expert"`).

use crate::dist::ExpertPlacement;
use crate::model::config::Config;
use crate::model::names::{ParameterSpec, parameter_specs, value_model_specs};
use crate::recipe::Plan;
use crate::run::startup::Trainables;

const KEY: &str = "parallel.experts";

/// Returns the mistakes of a recipe with `parallel.experts = "by_expert"`, each with its remedy.
pub(super) fn expert_mistakes(
    plan: &Plan,
    config: &Config,
    trained: &Trainables,
    on_gpu: bool,
) -> Vec<String> {
    if plan.recipe.parallel.experts != ExpertPlacement::ByExpert {
        return vec![];
    }
    let mut reasons = vec![];
    if !on_gpu {
        reasons.push(
            "expert parallelism in training needs GPUs; write \"gathered\", or device = \"cuda\"".to_owned(),
        );
    }
    let frozen = |specs: &[ParameterSpec], trainable: &[bool]| {
        let experts = specs.iter().zip(trainable).filter(|(spec, _)| spec.is_expert_parameter());
        let (trained, frozen): (Vec<_>, Vec<_>) = experts.partition(|(_, is_trained)| **is_trained);
        (trained.len(), frozen.first().map(|(spec, _)| spec.name.clone()))
    };
    let of_policy = frozen(&parameter_specs(config), &trained.policy);
    // The experts of a critic may be frozen together. Then each process has all of them.
    let of_critic = trained.critic.as_ref().map(|trainable| frozen(&value_model_specs(config), trainable));
    if trained.adapter.is_some() {
        let reason = "an adapter leaves the experts frozen, and each GPU holds all frozen experts; write \"gathered\", or remove [adapter]";
        reasons.push(reason.to_owned());
    } else if let Some(name) = of_policy.1 {
        reasons.push(format!("{name} is frozen, and each GPU holds all frozen experts; write \"gathered\", or remove its pattern from train.freeze"));
    } else if let Some((1.., Some(name))) = of_critic {
        reasons.push(format!("the critic's {name} is frozen, but other experts are not; write \"gathered\", or freeze all of its experts with critic.freeze"));
    }
    reasons.into_iter().map(|reason| plan.mistake(KEY, reason).to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::adapter::Lora;
    use crate::recipe::resolve;
    use crate::run::adapter::RunAdapter;
    use crate::run::memory::AdapterInput;
    use crate::run::source::ModelSource;
    use std::path::Path;

    /// Returns the mistakes of a run with the recipe `rest`. The parameters whose names have the word
    /// `frozen` are frozen.
    fn mistakes(rest: &str, frozen: &str, (has_adapter, on_gpu): (bool, bool)) -> Vec<String> {
        let shape = "hidden_size = 40\nintermediate_size = 24\nnum_local_experts = 8\n";
        let text = format!(
            "[model.architecture]\n{shape}[task]\nname = \"format_rules\"\n[rollout]\nturns_max = 1\n{rest}"
        );
        let plan = resolve(Path::new("a.toml"), &text, &[]).unwrap();
        let config = ModelSource::open(&plan.recipe).unwrap().config;
        let specs = parameter_specs(&config);
        let trainable: Vec<bool> = specs.iter().map(|spec| !spec.name.contains(frozen)).collect();
        let factors = AdapterInput { specs: vec![], trainable: vec![], after_cold_start: false };
        let lora = Lora { rank: 1, alpha: 1.0, rslora: false, targets: vec![] };
        let adapter = has_adapter.then_some(RunAdapter { lora, factors });
        let trained = Trainables { policy: trainable, critic: None, adapter };
        expert_mistakes(&plan, &config, &trained, on_gpu)
    }

    #[test]
    fn what_cannot_be_trained_by_expert_is_refused_with_a_remedy() {
        const BY_EXPERT: &str = "[parallel]\nexperts = \"by_expert\"\n";
        const NONE: &str = "no parameter";
        let good = mistakes(BY_EXPERT, NONE, (false, true));
        assert!(good.is_empty(), "{good:?}");
        assert!(mistakes("", "experts", (true, false)).is_empty());
        // An expert has 7.5 blocks of 8-bit moments.
        let of_8_bits = format!("{BY_EXPERT}[train.optimizer]\nkind = \"adamw_8bit\"\n");
        assert!(mistakes(&of_8_bits, NONE, (false, true)).is_empty());
        let cases = [
            (BY_EXPERT, NONE, (false, false), "device = \"cuda\""),
            (BY_EXPERT, "experts.down_proj_bias", (false, true), "experts.down_proj_bias is frozen"),
            (BY_EXPERT, NONE, (true, true), "remove [adapter]"),
        ];
        for (rest, frozen, run, message) in cases {
            let found = mistakes(rest, frozen, run);
            let [mistake] = &found[..] else { panic!("{message}: {found:?}") };
            assert!(mistake.contains(message) && mistake.contains("\"gathered\""), "{mistake}");
            assert!(mistake.contains("a.toml:") && mistake.contains("parallel.experts"), "{mistake}");
        }
    }
}
