//! OpenAI's error objects.

use super::JSON;
use crate::http::Response;
use serde_json::{Value, json};

/// An error of a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    /// Status code and phrase.
    pub status: &'static str,
    kind: &'static str,
    pub message: String,
    /// The field that is wrong.
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: &'static str, kind: &'static str, code: Option<&'static str>, message: String) -> Self {
        Self { status, kind, message, param: None, code }
    }

    /// Returns the error of an invalid field `param`, or of an invalid body if `param` is `None`.
    pub fn invalid(param: Option<&str>, message: String) -> Self {
        let error = Self::new("400 Bad Request", "invalid_request_error", None, message);
        Self { param: param.map(str::to_owned), ..error }
    }

    /// Returns the error of a prompt that does not fit.
    pub fn too_long(param: &str, message: String) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::invalid(Some(param), message) }
    }

    /// Returns the error of a request that is refused with `status`.
    pub fn refused(status: &'static str, message: &str) -> Self {
        let kind = if status.starts_with('5') { "server_error" } else { "invalid_request_error" };
        Self::new(status, kind, None, message.to_owned())
    }

    pub fn not_found(message: String) -> Self {
        Self::new("404 Not Found", "invalid_request_error", None, message)
    }

    pub fn model_not_found(message: String) -> Self {
        let error = Self::new("404 Not Found", "invalid_request_error", Some("model_not_found"), message);
        Self { param: Some("model".to_owned()), ..error }
    }

    pub fn forbidden(message: &str) -> Self {
        Self::new("403 Forbidden", "permission_error", None, message.to_owned())
    }

    pub fn unauthorized(message: &str) -> Self {
        let code = Some("invalid_api_key");
        Self::new("401 Unauthorized", "authentication_error", code, message.to_owned())
    }

    /// Returns the error of a full queue.
    pub fn full(message: String) -> Self {
        Self::new("429 Too Many Requests", "rate_limit_error", Some("rate_limit_exceeded"), message)
    }

    pub fn internal(message: &str) -> Self {
        Self::new("500 Internal Server Error", "server_error", None, message.to_owned())
    }

    /// Returns the error of a server that is stopping.
    pub fn ending() -> Self {
        Self::new("503 Service Unavailable", "server_error", None, "the server is stopping".to_owned())
    }

    pub fn to_response(&self) -> Response<'static> {
        Response::whole(self.status, JSON, self.to_json().to_string().into())
    }

    pub fn to_json(&self) -> Value {
        let Self { kind, message, param, code, .. } = self;
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }
}
