//! The bodies of requests in JSON. Fields that are not here are ignored.

use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
pub struct SessionBody {
    pub session_id: String,
}

#[derive(Deserialize)]
pub struct ModelBody {
    pub model_id: String,
}

#[derive(Deserialize)]
pub struct LoraBody {
    pub rank: usize,
    pub seed: Option<i64>,
    #[serde(default = "yes")]
    pub train_unembed: bool,
    #[serde(default = "yes")]
    pub train_mlp: bool,
    #[serde(default = "yes")]
    pub train_attn: bool,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
pub struct CreateBody {
    pub session_id: String,
    pub model_seq_id: u64,
    pub base_model: String,
    #[serde(default)]
    pub user_metadata: Value,
    pub lora_config: Option<LoraBody>,
    #[serde(default)]
    pub optimizer_config: Value,
}

#[derive(Deserialize)]
pub struct StepBody {
    pub model_id: String,
    pub seq_id: Option<i64>,
    pub adam_params: AdamBody,
}

#[derive(Deserialize)]
pub struct AdamBody {
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    #[serde(default)]
    pub weight_decay: f64,
    #[serde(default)]
    pub grad_clip_norm: f64,
}

#[derive(Deserialize)]
pub struct SaveBody {
    pub model_id: String,
    pub seq_id: Option<i64>,
    pub path: Option<String>,
    pub sampling_session_seq_id: Option<u64>,
    #[serde(default)]
    pub overwrite: bool,
    pub ttl_seconds: Option<u64>,
    #[serde(default)]
    pub user_metadata: Value,
}

#[derive(Deserialize)]
pub struct LoadBody {
    pub path: String,
    pub optimizer: bool,
    pub session_id: Option<String>,
    pub model_seq_id: Option<u64>,
    pub model_id: Option<String>,
    pub seq_id: Option<i64>,
    #[serde(default)]
    pub user_metadata: Value,
}

#[derive(Deserialize)]
pub struct SamplingSessionBody {
    pub session_id: String,
    pub sampling_session_seq_id: u64,
    pub base_model: Option<String>,
    pub model_path: Option<String>,
}
