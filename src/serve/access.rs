//! Who may ask a server: requests to its own address that carry its token.

use super::api_error::ApiError;
use crate::http::{HttpRequest, Response};
use std::net::SocketAddr;

/// The address of a server, and the token that requests must carry.
pub(crate) struct Access {
    pub address: SocketAddr,
    /// `None` if everyone who reaches the address may ask.
    pub token: Option<String>,
}

impl Access {
    /// Refuses a request by its head: its origin, and `given`, its token. Everyone may ask for `/health`.
    pub fn check_head(&self, head: &HttpRequest, given: Option<&str>) -> Result<(), Response<'static>> {
        let is_open = head.method == "GET" && head.path_alone() == "/health";
        let checked = self.check_origin(head);
        let checked = checked.and_then(|()| if is_open { Ok(()) } else { self.check_token(given) });
        checked.map_err(|error| error.to_response())
    }

    /// Refuses requests to another host name, and requests from pages of other sites. Such a page could reach
    /// this server through a browser on this machine.
    fn check_origin(&self, request: &HttpRequest) -> Result<(), ApiError> {
        let address = &self.address;
        let port = address.port();
        let own = [address.to_string(), format!("localhost:{port}")];
        let is_own = |host: &str| own.iter().any(|own| own == host);
        if address.ip().is_loopback() && !request.host.as_deref().is_some_and(is_own) {
            return Err(ApiError::forbidden("this server answers only requests to its own address"));
        }
        let origin = request.origin.as_deref();
        if origin.is_some_and(|origin| !origin.strip_prefix("http://").is_some_and(is_own)) {
            return Err(ApiError::forbidden("this server does not answer pages of other sites"));
        }
        Ok(())
    }

    /// Refuses a request whose token, `given`, is not this server's.
    fn check_token(&self, given: Option<&str>) -> Result<(), ApiError> {
        let Some(token) = &self.token else { return Ok(()) };
        // Digests are compared, so the time of the comparison says nothing about the token.
        let digest = |text: &str| blake3::hash(text.trim().as_bytes());
        match given {
            Some(given) if digest(given) == digest(token) => Ok(()),
            _ => Err(ApiError::unauthorized("the request carries no valid token (Authorization: Bearer)")),
        }
    }
}

/// Returns the token that `request` carries.
pub(crate) fn bearer(request: &HttpRequest) -> Option<&str> {
    request.authorization.as_deref().and_then(|value| value.strip_prefix("Bearer "))
}
