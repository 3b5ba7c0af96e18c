//! Causes in the input tokens, or in the choice of the rows whose log-probs are read.

use super::variant::Shift;
use super::{Cause, Change};
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
        (1, false, "each token is read one row too late, from logits computed after the token itself"),
        (-1, true, "each token has the value of the previous token"),
        (-1, false, "each token is read one row too early, from logits computed before the previous token"),
    ] {
        let shift = Some(Shift { offset, moves_target });
        let deciding_experiment = "a row of tokens that the model predicts with high probability";
        causes.push(Cause::in_forward("off by one", detail, deciding_experiment, move |variant| {
            variant.shift = shift
        }));
    }
    causes.push(Cause::new(
        "bf16 logits",
        "the head's output is rounded before the softmax",
        head::TOP_LOG_PROBS,
        Change::Head(HeadSettings { bf16_logits: true, ..HeadSettings::default() }),
    ));
    causes
}
