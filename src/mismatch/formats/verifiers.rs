//! verifiers' `traces.jsonl`: messages as a tree of nodes, each with the tokens that it adds. Each leaf gives
//! one row.

use super::{RawRow, TokenTexts, parse};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Trace {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    parent: Option<usize>,
    #[serde(default)]
    token_ids: Vec<u64>,
    #[serde(default)]
    mask: Vec<bool>,
    /// One value for each token that `mask` marks as sampled.
    #[serde(default)]
    logprobs: Vec<f64>,
}

pub(super) fn rows(value: Value, _: &TokenTexts) -> Result<Vec<RawRow>, String> {
    let nodes = parse::<Trace>(value, "a trace of verifiers")?.nodes;
    if nodes.iter().all(|node| node.token_ids.is_empty()) {
        return Err("the nodes hold no token_ids; sample with a client that returns token ids".into());
    }
    for (index, node) in nodes.iter().enumerate() {
        if node.parent.is_some_and(|parent| parent >= index) {
            return Err(format!("the parent of node {index} is not before node {index}"));
        }
        let sampled_count = node.mask.iter().filter(|m| **m).count();
        if node.mask.len() != node.token_ids.len() || sampled_count != node.logprobs.len() {
            return Err(format!(
                "node {index}: {} token_ids, a mask of {} with {sampled_count} sampled, {} logprobs; they must agree",
                node.token_ids.len(),
                node.mask.len(),
                node.logprobs.len()
            ));
        }
    }
    let is_leaf = |index: &usize| nodes.iter().all(|node| node.parent != Some(*index));
    let row = |leaf: usize| {
        let mut path = vec![leaf];
        while let Some(parent) = path.last().and_then(|&at| nodes[at].parent) {
            path.push(parent);
        }
        let mut row = RawRow::default();
        for node in path.into_iter().rev().map(|index| &nodes[index]) {
            let mut values = node.logprobs.iter().copied();
            row.log_probs
                .extend(node.mask.iter().map(|&is_sampled| if is_sampled { values.next() } else { None }));
            row.tokens.extend_from_slice(&node.token_ids);
        }
        row
    };
    Ok((0..nodes.len()).filter(is_leaf).map(row).collect())
}
