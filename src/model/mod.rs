//! GPT-OSS as pure maths over `ops`: configuration, weights, forward, KV cache.
