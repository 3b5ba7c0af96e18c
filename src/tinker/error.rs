//! Errors in the form that the Tinker SDK shows.

use crate::error::BadInput;
use crate::http::{Refusal, Response};
use crate::serve::ApiError;
use serde_json::json;

/// A request that is refused.
#[derive(Debug, Clone, PartialEq)]
pub struct TinkerError {
    pub status: &'static str,
    pub detail: String,
}

impl TinkerError {
    pub fn new(status: &'static str, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into() }
    }

    /// Returns the error of a request that cannot be answered as it is. The SDK raises it at once.
    pub fn invalid(detail: impl Into<String>) -> Self {
        Self::new("400 Bad Request", detail)
    }

    pub fn not_found(detail: impl Into<String>) -> Self {
        Self::new("404 Not Found", detail)
    }

    /// Returns the error of a full server. The SDK tries again for five minutes.
    pub fn busy(detail: impl Into<String>) -> Self {
        Self::new("429 Too Many Requests", detail)
    }

    /// Returns the error of a request that the server refused while it read it.
    pub fn refused(refusal: Refusal) -> Self {
        Self::new(refusal.status, refusal.message)
    }

    pub fn unauthorized() -> Self {
        Self::new("401 Unauthorized", "the request carries no X-API-Key; set TINKER_API_KEY")
    }

    pub fn internal(detail: impl Into<String>) -> Self {
        Self::new("500 Internal Server Error", detail)
    }

    /// Returns the error of a result that is not here. The SDK starts a sampling with status 410 again.
    pub fn unknown_request(id: &str) -> Self {
        let status = if id.contains(":sample:") { "410 Gone" } else { "404 Not Found" };
        Self::new(
            status,
            format!(
                "no request {id:?} is open; if the server was started again, load a saved path and go on"
            ),
        )
    }

    pub fn to_response(&self) -> Response<'static> {
        let body = json!({"detail": self.detail}).to_string();
        Response::whole(self.status, "application/json", body.into())
    }
}

impl From<ApiError> for TinkerError {
    fn from(error: ApiError) -> Self {
        Self::new(error.status, error.message)
    }
}

impl From<anyhow::Error> for TinkerError {
    fn from(error: anyhow::Error) -> Self {
        match error.downcast_ref::<BadInput>() {
            Some(_) => Self::invalid(format!("{error:#}")),
            None => Self::internal(format!("{error:#}")),
        }
    }
}
