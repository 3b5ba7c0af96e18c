//! The page's Content-Security-Policy. It has the SHA-256 of the page's own script and of its style. A
//! browser then uses no other script or style.

use base64::prelude::{BASE64_STANDARD, Engine};
use sha2::{Digest, Sha256};

/// Returns the policy of a page with this style and this script. `for_server`: whether the page may fetch
/// from its server.
pub(super) fn content_policy(style: &str, script: &str, for_server: bool) -> String {
    let source = |text: &str| format!("'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(text)));
    format!(
        "default-src 'none'; style-src {}; script-src {}; img-src data:; base-uri 'none'; form-action 'none'{}",
        source(style),
        source(script),
        if for_server { "; connect-src 'self'" } else { "" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_the_sha256_of_its_text() {
        let policy = content_policy("abc", "", false);
        assert!(
            policy.contains("style-src 'sha256-ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0='"),
            "{policy}"
        );
        assert!(
            policy.contains("script-src 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"),
            "{policy}"
        );
    }
}
