//! What the unmodified SDK sent, replayed.

use super::Server;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use prost::Message;
use rloss::tinker::wire::ForwardBackwardOutput;
use serde_json::Value;
use tempfile::TempDir;

/// Requests of the SDK, with the session of this server in place of the recorded one.
#[test]
fn what_the_sdk_sent_is_answered_as_it_was_recorded() {
    let text = include_str!("../../../fixtures/tinker.jsonl");
    let store = TempDir::new().unwrap();
    let server = Server::start(store.path(), &[]);
    let (mut recorded, mut own) = (String::new(), String::new());
    let mut checked = 0;
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let replace = |bytes: Vec<u8>| -> Vec<u8> {
            if recorded.is_empty() {
                return bytes;
            }
            let mut bytes = bytes;
            while let Some(at) = bytes.windows(32).position(|part| part == recorded.as_bytes()) {
                bytes[at..at + 32].copy_from_slice(own.as_bytes());
            }
            bytes
        };
        let field = |name: &str| row[name].as_str().unwrap();
        let decode = |name: &str| BASE64_STANDARD.decode(field(name)).unwrap();
        let path = String::from_utf8(replace(field("path").as_bytes().to_vec())).unwrap();
        let mut answer = server.ask(field("method"), &path, &replace(decode("body")));
        while answer.0 == 408 {
            answer = server.ask(field("method"), &path, &replace(decode("body")));
        }
        let (status, kind, body) = answer;
        assert_eq!(u64::from(status), row["status"].as_u64().unwrap(), "{path}");
        assert_eq!(kind, field("content_type"), "{path}");
        let expected = decode("answer");
        if path.ends_with("/create_session") {
            let id = |body: &[u8]| serde_json::from_slice::<Value>(body).unwrap()["session_id"].clone();
            recorded = id(&expected).as_str().unwrap().to_owned();
            own = id(&body).as_str().unwrap().to_owned();
        } else if let (Ok(Value::Object(found)), Ok(Value::Object(expected))) =
            (serde_json::from_slice::<Value>(&body), serde_json::from_slice::<Value>(&expected))
        {
            assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{path}");
        } else if let Ok(expected) = ForwardBackwardOutput::decode(&expected[..])
            && let Some(loss) = expected.metrics.get("loss:sum")
        {
            let found = ForwardBackwardOutput::decode(&body[..]).unwrap().metrics["loss:sum"];
            assert!((found - loss).abs() < 1e-2 * loss.abs().max(1.0), "{path}: {found} for {loss}");
            checked += 1;
        }
    }
    assert!(checked > 5, "{checked} passes");
}
