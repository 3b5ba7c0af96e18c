//! The proof that rollout and training are one forward, over 100,000 sampled tokens:
//! `cargo run --release --example one_forward [TOKENS]`. The tests of the same name take a tenth.

#[path = "../tests/suite/one_forward/cases.rs"]
mod cases;

use anyhow::{Context, Result, ensure};
use rloss::metrics::TextTable;
use rloss::ops::threads::Threads;

fn main() -> Result<()> {
    let tokens = match std::env::args().nth(1) {
        Some(text) => text.parse().with_context(|| format!("{text} is no number of tokens"))?,
        None => 100_000,
    };
    let threads = Threads::new(2)?;
    let header = ["case", "link", "tokens", "logprob_abs_diff_max", "bit_equal_fraction", "seconds"];
    let mut table = TextTable::new(header);
    let (mut sampled, mut broken) = (0, 0);
    for case in cases::cases() {
        if !case.is_here() {
            println!("left out: this processor has no {}", case.name);
            continue;
        }
        let begun = std::time::Instant::now();
        let links = case.links(&threads, case.tokens(tokens))?;
        sampled += links.last().map_or(0, |link| link.tokens);
        for (i, link) in links.iter().enumerate() {
            broken += usize::from(!link.is_bit_equal());
            let seconds = format!("{:.1}", begun.elapsed().as_secs_f64());
            table.add_row([
                if i == 0 { case.name } else { "" }.to_owned(),
                link.name.to_owned(),
                link.tokens.to_string(),
                link.logprob_abs_diff_max.to_string(),
                link.bit_equal_fraction().to_string(),
                if i == 0 { seconds } else { String::new() },
            ]);
        }
    }
    println!("{table}\n{sampled} sampled tokens, {broken} links broken");
    ensure!(broken == 0, "rollout and training differ");
    Ok(())
}
