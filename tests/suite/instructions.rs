//! The instruction checkers against the stored reference verdicts, and the composer.

use crate::data;
use rloss::tasks::instructions::{IDS, Instruction, loose, strict};
use serde_json::Value;
use std::collections::BTreeMap;

/// Agreement that each file and all files together must reach.
const BAR: f64 = 0.995;

#[derive(Default)]
struct Tally {
    agreed: usize,
    compared: usize,
}

impl Tally {
    fn add(&mut self, agrees: bool) {
        self.agreed += usize::from(agrees);
        self.compared += 1;
    }

    fn share(&self) -> f64 {
        self.agreed as f64 / self.compared as f64
    }
}

fn instructions(row: &Value) -> Vec<Instruction> {
    let ids = row["instruction_id_list"].as_array().expect("instruction_id_list");
    let kwargs = row["kwargs"].as_array().expect("kwargs");
    assert_eq!(ids.len(), kwargs.len(), "{row}");
    ids.iter()
        .zip(kwargs)
        .map(|(id, k)| Instruction::parse(id.as_str().unwrap(), k).unwrap_or_else(|e| panic!("{row}: {e}")))
        .collect()
}

#[test]
fn ifeval_vectors_agree() {
    let Some(rows) = data::jsonl_rows("ifeval") else { return };
    let (mut files, mut ids) = (BTreeMap::<(String, &str), Tally>::new(), BTreeMap::<String, usize>::new());
    for (file, row) in rows.iter().filter(|(file, _)| file.starts_with("verdicts-")) {
        let parsed = instructions(row);
        let response = row["response"].as_str().expect("response");
        for (mode, verdicts) in [("strict", strict(&parsed, response)), ("loose", loose(&parsed, response))] {
            for (i, verdict) in verdicts.into_iter().enumerate() {
                if row["unstable"].as_array().expect("unstable").contains(&Value::from(i)) {
                    continue;
                }
                let agrees = row[mode][i] == Value::from(verdict);
                files.entry((file.clone(), mode)).or_default().add(agrees);
                if !agrees {
                    let id = row["instruction_id_list"][i].as_str().expect("id");
                    *ids.entry(id.to_owned()).or_default() += 1;
                    println!(
                        "{file} key {} {id} {mode}: {} in the reference, {verdict} here",
                        row["key"], row[mode][i]
                    );
                }
            }
        }
    }
    println!("disagreements by instruction: {ids:?}");
    let mut total = Tally::default();
    for ((file, mode), tally) in &files {
        println!("{file} {mode}: {} of {}, {:.4}", tally.agreed, tally.compared, tally.share());
        assert!(tally.share() >= BAR, "{file} {mode}");
        total.agreed += tally.agreed;
        total.compared += tally.compared;
    }
    println!("all: {} of {}, {:.4}", total.agreed, total.compared, total.share());
    assert_eq!(files.len(), 4, "two files, two modes");
    assert!(total.compared > 3000 && total.share() >= BAR);
}

#[test]
fn every_row_of_the_validation_vectors_parses() {
    let Some(rows) = data::jsonl_rows("ifeval") else { return };
    let mut seen = std::collections::BTreeSet::new();
    for (_, row) in rows.iter().filter(|(file, _)| file == "input_data") {
        seen.extend(
            row["instruction_id_list"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()),
        );
        instructions(row);
    }
    assert_eq!(seen.iter().map(String::as_str).collect::<Vec<_>>(), IDS);
    let mut turns = 0;
    for (_, row) in data::jsonl_rows("multi-if").unwrap() {
        for turn in row["turns"].as_array().expect("turns") {
            instructions(turn);
            turns += 1;
        }
    }
    assert_eq!(turns, 896 * 3 + 13 * 2);
}
