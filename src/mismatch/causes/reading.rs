//! Mistakes of the input tokens and of the rows that are read.

use super::Cause;
use crate::mismatch::head::{self, HeadSettings};

pub(super) fn causes() -> Vec<Cause> {
    let mut found = vec![Cause::in_forward(
        "double start token",
        "the row's first token was fed twice",
        "the first tokens of rows",
        |variant| variant.double_start = true,
    )];
    for (by, with_target, detail) in [
        (1, true, "each token has the value of the token +1"),
        (1, false, "each token is looked up in the row +1: logits that have seen it"),
        (-1, true, "each token has the value of the token -1"),
        (-1, false, "each token is looked up in the row -1: logits that have not seen the token before it"),
    ] {
        let shift = Some((by, with_target));
        let decides = "a row of known, sure tokens";
        found.push(Cause::in_forward("off by one", detail, decides, move |variant| variant.shift = shift));
    }
    found.push(Cause::in_head(
        "bf16 logits",
        "the head's output is rounded before the softmax",
        head::DISTINGUISHING_INPUT,
        HeadSettings { bf16_logits: true, ..HeadSettings::default() },
    ));
    found
}
