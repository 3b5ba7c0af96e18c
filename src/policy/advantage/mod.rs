//! Advantages: how much better than expected a response, or one of its tokens, turned out.

mod group;
mod token;

pub use group::{GroupEstimator, group_advantages, informative_groups};
pub use token::{TokenAdvantages, gae, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, whiten};
