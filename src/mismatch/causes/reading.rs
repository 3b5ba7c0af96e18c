//! Causes in the input tokens, and in the rows from which log-probs are read.

use super::Cause;
use super::variant::Shift;
use crate::mismatch::head::{self, HeadSettings};

pub(super) fn causes() -> Vec<Cause> {
    let mut causes = vec![Cause::in_forward(
        "double start token",
        "the row's first token was fed twice",
        "the first tokens of rows",
        |variant| variant.double_start_token = true,
    )];
    for (offset, moves_target, detail) in [
        (1, true, "each token has the value of the next token"),
        (1, false, "each token is looked up one row too late: in logits that have seen it"),
        (-1, true, "each token has the value of the previous token"),
        (
            -1,
            false,
            "each token is looked up one row too early: in logits that have not seen the token before it",
        ),
    ] {
        let shift = Some(Shift { offset, moves_target });
        let deciding_experiment = "a row of tokens that the model is sure of";
        causes.push(Cause::in_forward("off by one", detail, deciding_experiment, move |variant| {
            variant.shift = shift
        }));
    }
    causes.push(Cause::in_head(
        "bf16 logits",
        "the head's output is rounded before the softmax",
        head::TOP_LOG_PROBS,
        HeadSettings { bf16_logits: true, ..HeadSettings::default() },
    ));
    causes
}
