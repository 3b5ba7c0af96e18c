//! Answers as public bug reports show them, in our own words and numbers. Each row names its source (tracker
//! and number) and the authority of its expectation.

use super::*;
use rloss::error::BadInput;
use rloss::tasks::answer::AnswerEquality;
use rloss::tasks::gsm8k::{Extraction, extract};

/// (reference, answer, whether they are equal, source, authority)
type Row = (&'static str, &'static str, bool, &'static str, &'static str);

const EXACT: &[Row] = &[
    ("033", "33", true, "verl 2446", "AIME"),
    ("16", "016", true, "NeMo-Skills 1074", "AIME"),
    ("000", "0", true, "verl 2446", "AIME"),
    ("100", "1", false, "NeMo-Skills 1074", "AIME"),
    ("010", "1", false, "NeMo-Skills 118", "AIME"),
    ("7", "+7", true, "open-instruct 1893", "Math-Verify"),
    ("-7", "+7", false, "open-instruct 1530", "arithmetic"),
    ("-3", "-3.0", true, "open-instruct 1893", "Math-Verify"),
    ("0", "-0", true, "open-instruct 1893", "Math-Verify"),
    ("1234", "1,234", true, "opencompass 2647", "verl math_dapo"),
    ("9500", "9{,}500", true, "opencompass 2647", "verl math_dapo"),
    ("12000", "12,\\!000", true, "reasoning-from-scratch 133", "verl math_dapo"),
    ("1,2", "12", false, "Math-Verify 14", "MATH"),
    ("29", "\\$29.00", true, "lm-evaluation-harness 3214", "Math-Verify"),
    ("15", "15\\text{ cm}^2", true, "sieval 26", "MATH"),
    ("15", "15 cm", true, "sieval 26", "verl math_dapo"),
    ("15", "15\\text{cm}", true, "sieval 26", "verl math_dapo"),
    ("15", "15\\,\\mathrm{cm}", true, "sieval 26", "Math-Verify"),
    ("8", "2^3", false, "reasoning-from-scratch 133", "MATH"),
    ("2", "2^3", false, "reasoning-from-scratch 133", "MATH"),
    ("12", "12 square units", true, "sieval 26", "verl math_dapo"),
    ("40", "40^\\circ", true, "sieval 26", "MATH"),
    ("40", "40°", true, "sieval 26", "mathematics"),
    ("40", "40 degrees", true, "sieval 26", "verl math_dapo"),
    ("13", "−13", false, "styxx 77", "arithmetic"),
    ("-13", "−13", true, "styxx 77", "arithmetic"),
    ("-13", "\u{2010}13", true, "styxx 77", "arithmetic"),
    ("1/2", "2/4", false, "Math-Verify 69", "MATH"),
    ("0.5", "1/2", true, "Math-Verify 2", "MATH"),
    ("1.5e3", "1500", false, "Math-Verify 69", "MATH"),
    ("\\boxed{42}", "42", true, "Skywork-OR1 16", "verl math_dapo"),
    ("98765432109876543210987", "98765432109876543210986", false, "hermes-agent 55314", "arithmetic"),
    ("2004", "2004 + 1", false, "Math-Verify 14", "MATH"),
];

const EQUIVALENT: &[Row] = &[
    ("033", "33", true, "verl 2446", "Math-Verify"),
    ("x^4", "x⁴", true, "reasoning-from-scratch 99", "mathematics"),
    ("x^{12}-1", "x¹²−1", true, "reasoning-from-scratch 99", "mathematics"),
    ("x^4", "x4", false, "reasoning-from-scratch 99", "mathematics"),
    ("\\frac{1}{x}", "x⁻¹", true, "reasoning-from-scratch 99", "mathematics"),
    ("5^2+1", "5²+1", true, "libqalculate 373", "mathematics"),
    ("x_1+x_2", "x₁+x₂", true, "mXparser 281", "mathematics"),
    ("\\frac12", "½", true, "reasoning-from-scratch 99", "mathematics"),
    ("\\frac{11}{4}", "2¾", true, "reasoning-from-scratch 99", "mathematics"),
    ("2", "½", false, "reasoning-from-scratch 99", "mathematics"),
    ("\\frac{\\pi}{2}", "π⁄2", true, "Math-Verify 69", "mathematics"),
    ("3 \\cdot 4", "３×４", true, "styxx 77", "mathematics"),
    ("\\sqrt[3]{2}", "∛2", true, "reasoning-from-scratch 99", "mathematics"),
    ("\\alpha+\\Omega", "Ω+α", true, "reasoning-from-scratch 99", "mathematics"),
    ("\\lfloor x \\rfloor", "⌊x⌋", true, "reasoning-from-scratch 99", "mathematics"),
    ("-3", "−3", true, "rink-rs 43", "mathematics"),
    ("x \\ge -3", "x≥−3", true, "rink-rs 43", "mathematics"),
    ("\\mathbb{R}", "ℝ", true, "sympy 9624", "mathematics"),
    ("(-\\infty,\\infty)", "\\mathbb{R}", true, "sympy 9624", "Math-Verify"),
    ("x \\in \\mathbb{R}", "(-∞, ∞)", true, "sympy 9624", "mathematics"),
    ("\\mathbb{Z}", "ℝ", false, "sympy 9624", "Math-Verify"),
    ("(-\\infty,2)\\cup(2,\\infty)", "\\mathbb{R}\\setminus\\{2\\}", true, "Math-Verify 10", "Math-Verify"),
    ("\\mathbb{R}\\setminus\\{2\\}", "\\mathbb{R}\\setminus\\{3\\}", false, "Math-Verify 10", "Math-Verify"),
    ("(-\\infty, 0) \\cup (0, \\infty)", "ℝ∖{0}", true, "Math-Verify 10", "mathematics"),
    ("[1,3]", "[1,2]\\cup[2,3]", true, "ibex-lib 544", "Math-Verify"),
    ("[1,3]", "[1,2)\\cup(2,3]", false, "ibex-lib 544", "Math-Verify"),
    ("[1,2]\\cup[3,4]", "[3,4]\\cup[1,2]", true, "DoenetML 168", "Math-Verify"),
    ("\\{1,2,3,4\\}", "\\{1,3\\}\\cup\\{2,4\\}", true, "Math-Verify 60", "Math-Verify"),
    ("(1,3)", "(0,3)\\cap(1,5)", true, "freeCodeCamp 38754", "mathematics"),
    ("(2,\\infty)", "\\{x \\mid x > 2\\}", true, "khan-exercises 115214", "mathematics"),
    ("x > 2", "(2,\\infty)", true, "Math-Verify 71", "Math-Verify"),
    ("(2,\\infty)", "x > 2", false, "Math-Verify 71", "Math-Verify"),
    ("\\emptyset", "∅", true, "sieval 26", "mathematics"),
    ("0.004", "4e-3", true, "Math-Verify 69", "IEEE 754 decimal text"),
    ("120000", "1.2E+5", true, "Math-Verify 69", "IEEE 754 decimal text"),
    ("98765432109876543210987", "98765432109876543210988.0", false, "hermes-agent 55314", "arithmetic"),
    ("123456789.12", "123456789.123", false, "hermes-agent 55314", "Math-Verify"),
    ("2e-1", "-1+2e", true, "Math-Verify 69", "mathematics"),
    ("0.004", "4e3", false, "Math-Verify 69", "mathematics"),
    ("\\frac{1}{8}", "12.5\\%", true, "finchain 3", "Math-Verify"),
    ("50\\%", "50 percent", true, "finchain 3", "mathematics"),
    ("50\\%", "5\\%", false, "finchain 3", "Math-Verify"),
    ("\\frac{1}{2004!}", "\\frac{1}{2006!}", false, "Math-Verify 14", "mathematics"),
    ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}", false, "Math-Verify 14", "mathematics"),
    (
        "\\frac{2^{2005}+1}{3\\cdot2^{2006}}",
        "\\frac{1}{3\\cdot2^{2006}}",
        false,
        "Math-Verify 14",
        "mathematics",
    ),
    ("1-\\frac{1}{\\mathrm{e}}", "1+\\frac{1}{\\mathrm{e}}", false, "Math-Verify 14", "Math-Verify"),
    ("n=2,3,4", "n=1,2,3", false, "Math-Verify 14", "Math-Verify"),
    ("D=(0,1)", "D=(0,1.5)", false, "Math-Verify 14", "Math-Verify"),
    ("13", "\\text{13}", true, "Math-Verify 37", "Math-Verify"),
    ("2x+4y-3=0", "y=-\\frac12x+\\frac34", true, "Math-Verify 26", "Math-Verify"),
    ("3x-y+13=0", "3x+4y+14=0", false, "Math-Verify 60", "Math-Verify"),
    (
        "\\frac{x^2}{4}+\\frac{y^2}{3}=1",
        "\\frac{x^2}{16}+\\frac{y^2}{12}=1",
        false,
        "Math-Verify 40",
        "Math-Verify",
    ),
    ("e^{16}-1", "-1 + exp(16)", true, "Math-Verify 69", "mathematics"),
    ("14-i", "14.0 + -1.0i", true, "Math-Verify 69", "mathematics"),
    ("O(\\log\\log n)", "Theta(log log n)", false, "Math-Verify 69", "Math-Verify"),
    ("52_8", "528", false, "reasoning-from-scratch 133", "mathematics"),
    ("n=3k", "3", false, "sieval 26", "Math-Verify"),
    ("\\frac{1}{12}", "0.0833333333333333", true, "Math-Verify 2", "Math-Verify"),
    (
        "(\\begin{pmatrix}-\\frac74&-2\\\\4&\\frac14\\\\\\end{pmatrix})",
        "\\begin{bmatrix}-1.75&-2\\\\4&0.25\\end{bmatrix}",
        true,
        "Math-Verify 2",
        "Math-Verify",
    ),
    (
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "\\left(\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right)",
        true,
        "cortexjs.io 70",
        "Math-Verify",
    ),
    (
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}",
        false,
        "BOAC 982",
        "mathematics",
    ),
    ("5\\,\\text{cm}", "5cm", true, "sieval 26", "Math-Verify"),
    ("\\$5", "5 dollars", true, "sieval 26", "verl math_dapo"),
];

#[test]
fn bug_exact_and_equivalent_read_answers_as_their_authorities_do() {
    let mut wrong = Vec::new();
    for (equality, rows) in [(AnswerEquality::Exact, EXACT), (AnswerEquality::Equivalent, EQUIVALENT)] {
        for (reference, answer, equal, source, authority) in rows {
            if equality.matches(reference, answer) != *equal {
                wrong.push(format!(
                    "{equality:?}: {reference} | {answer} | due {equal} | {source} | {authority}"
                ));
            }
            if let Some(reason) = equality.refusal(reference) {
                wrong.push(format!("{equality:?}: {reference} refused: {reason} | {source}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}\n{} wrong", wrong.join("\n"), wrong.len());
}

/// (text, number of `flexible`, number of `strict`, source). The authority of `flexible` is arithmetic, of
/// `strict` verl's pattern.
const GSM8K: &[(&str, Option<&str>, Option<&str>, &str)] = &[
    ("The total is 72, altogether.", Some("72"), None, "omlx 3484"),
    ("It earns 72, in total, so that much.", Some("72"), None, "HELM 4337"),
    ("#### ,", None, None, "omlx 3484"),
    ("#### -15", Some("-15"), Some("-15"), "open-instruct 1530"),
    ("#### +15", Some("15"), None, "open-instruct 1893"),
    ("#### −15", Some("-15"), None, "proeval 19"),
    ("#### $1,250.00", Some("1250"), None, "lm-evaluation-harness 3214"),
    ("#### 1,250.", Some("1250"), Some("1250"), "lm-evaluation-harness 3214"),
    ("\\boxed{\\$9{,}500}", Some("9500"), None, "opencompass 2647"),
    ("\\boxed{8,000}", Some("8000"), None, "opencompass 2647"),
    ("The profit is $70,000.", Some("70000"), None, "opencompass 2426"),
    ("#### 1,00,000", Some("100000"), Some("100000"), "omlx 3484"),
    ("Right: 122 + 294 = 416 ...(iii)\n\nFinal Answer: **416**", Some("416"), None, "Math-Verify 76"),
    ("#### 1/2", Some("0.5"), Some("1"), "matchspec 306"),
    ("\\boxed{1/2}", Some("0.5"), None, "matchspec 306"),
    ("\\boxed{\\frac{1}{3}}", Some("1/3"), None, "matchspec 306"),
    ("\\boxed{\\frac{84}{2}}", Some("42"), None, "matchspec 306"),
    ("\\boxed{- 1/2}", Some("-0.5"), None, "ai-agent-book 707"),
    ("The answer is -1/2", Some("-0.5"), None, "ai-agent-book 707"),
    ("#### $\\frac{1}{2}$", Some("0.5"), None, "verl 2762"),
    ("#### 2 1/2 cups", Some("2.5"), Some("2"), "verl 2762"),
    ("#### 2½", Some("2.5"), Some("2"), "verl 2762"),
    ("\\boxed{42}\n\n#### Notes\nI used 3 steps.", Some("42"), None, "ai-agent-book 699"),
    ("#### 42\n\n#### Notes\nI used 3 steps.", Some("42"), Some("42"), "ai-agent-book 699"),
    ("\\boxed{41}\n\n#### Final answer: 42", Some("42"), None, "ai-agent-book 699"),
    ("#### Final answer: **42** apples, in 3 days", Some("42"), None, "ai-agent-book 699"),
    ("#### Notes\nI used 3 steps.\n\\boxed{42}", Some("42"), None, "ai-agent-book 699"),
    ("#### 42 ####", Some("42"), Some("42"), "ai-agent-book 699"),
    ("#### 5 of the 12 boxes", Some("5"), Some("5"), "HELM 4341"),
    ("#### 42!", Some("42"), Some("42"), "HELM 4341"),
    ("#### 12 * 3 = 36", Some("36"), Some("12"), "finchain 3"),
    ("#### 25%", Some("25"), Some("25"), "finchain 3"),
    ("The final value is 13.20%", Some("13.2"), None, "finchain 3"),
    ("#### €50\nNote: 3 steps.", Some("50"), None, "lm-evaluation-harness 3214"),
    ("\\boxed{2, 3}", None, None, "post-training-experiments 49"),
    ("\\boxed{\\text{about } 60 \\text{ apples}}", Some("60"), None, "opencompass 2648"),
    ("\\boxed{10^3}", Some("1000"), None, "reasoning-from-scratch 133"),
    ("#### 007", Some("7"), Some("7"), "NeMo-Skills 1074"),
    ("#### -0", Some("0"), Some("0"), "open-instruct 1893"),
];

#[test]
fn bug_gsm8k_takes_no_part_of_a_number_and_no_heading() {
    let mut wrong = Vec::new();
    for (text, flexible, strict, source) in GSM8K {
        for (extraction, due) in [(Extraction::Flexible, flexible), (Extraction::Strict, strict)] {
            let number = extract(text, extraction).map(|number| number.to_string());
            if number.as_deref() != *due {
                wrong.push(format!("{extraction:?}: {text:?} gave {number:?}, due {due:?} | {source}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}\n{} wrong", wrong.join("\n"), wrong.len());
}

/// Builds the task on one training row.
fn task_on(
    folder: &Path,
    name: &str,
    answer: Option<AnswerEquality>,
    row: &str,
) -> anyhow::Result<Box<dyn Task>> {
    let (train, held_out) = (folder.join("train.jsonl"), folder.join("held-out.jsonl"));
    let sound = r###"{"problem": "sound", "question": "sound", "answer": "so #### 2"}"###;
    let sound = if name == "retool" { sound.replace("so #### ", "") } else { sound.to_owned() };
    std::fs::write(&train, format!("{}\n{row}\n", sound.replace("sound", "also sound"))).unwrap();
    std::fs::write(&held_out, sound).unwrap();
    let settings = TaskSettings {
        name: TaskName::from_name(name).unwrap(),
        train_file: Some(train),
        validation_file: Some(held_out),
        answer,
        ..Default::default()
    };
    build(&settings, &TaskContext::default())
}

/// (the row's `answer` as JSON; an answer that earns the reward, or none if the row is refused; ways; source)
const REFERENCES: &[(&str, Option<&str>, &[AnswerEquality], &str)] = &[
    ("98765432109876543210987", Some("98765432109876543210987"), BOTH, "hermes-agent 55314"),
    ("18446744073709551615", Some("18446744073709551615"), BOTH, "hermes-agent 55314"),
    ("2000000000000000.0", Some("2000000000000000"), BOTH, "fixjson 19"),
    ("42.0", Some("42"), BOTH, "fixjson 19"),
    ("-0.0", Some("0"), BOTH, "open-instruct 1893"),
    ("-0", Some("0"), BOTH, "open-instruct 1893"),
    ("1e-05", Some("0.00001"), BOTH, "fixjson 19"),
    ("1E3", Some("1000"), BOTH, "fixjson 19"),
    ("0.1", Some("0.1"), BOTH, "fixjson 19"),
    ("9.876543210987654e+22", None, BOTH, "hermes-agent 55314"),
    ("1.2345678901234568e+16", None, BOTH, "hermes-agent 55314"),
    ("\"98765432109876543210987\"", Some("98765432109876543210987"), BOTH, "hermes-agent 55314"),
    ("\"033\"", Some("33"), BOTH, "verl 2446"),
    ("\"\\\\boxed{5}\"", Some("5"), BOTH, "Skywork-OR1 16"),
    ("\"$\\\\boxed{5}$\"", Some("5"), BOTH, "Skywork-OR1 16"),
    ("\"\\\\frac{1}{2\"", None, BOTH, "open-r1 293"),
    ("\"$$\"", None, BOTH, "Open-Assistant 2438"),
    ("\"\\\\%\"", None, &[AnswerEquality::Exact], "Open-Assistant 2438"),
    ("\"nan\"", None, BOTH, "QA-Eval 1"),
    ("null", None, BOTH, "QA-Eval 1"),
    ("\"not found\"", None, BOTH, "open-r1 509"),
    ("[5]", None, BOTH, "open-r1 55"),
    ("true", None, BOTH, "open-r1 55"),
    ("\"1/0\"", None, &[AnswerEquality::Equivalent], "open-r1 566"),
    ("\"1/0\"", Some("1/0"), &[AnswerEquality::Exact], "open-r1 566"),
    ("\"x^\"", None, &[AnswerEquality::Equivalent], "open-r1 566"),
    ("\"x^\"", Some("x^"), &[AnswerEquality::Exact], "open-r1 566"),
    ("\"\\\\begin{cases} x & y \\\\end{cases}\"", None, &[AnswerEquality::Equivalent], "X-R1 53"),
    (
        "\"\\\\begin{vmatrix}1&2\\\\\\\\3&4\\\\end{vmatrix}\"",
        None,
        &[AnswerEquality::Equivalent],
        "cortexjs.io 70",
    ),
    ("\"June 20\"", Some("June 20"), BOTH, "open-r1 503"),
    ("\"\\\\text{Monday}\"", Some("\\text{Monday}"), BOTH, "open-r1 503"),
    ("\"(C)\"", Some("(C)"), BOTH, "open-r1 503"),
    ("\"Yes, always!\"", Some("Yes, always!"), BOTH, "open-r1 503"),
    ("\"答案\"", Some("答案"), BOTH, "X-R1 53"),
    ("\"[1,2)\"", Some("[1,2)"), BOTH, "Math-Verify 71"),
    ("\"\\\\{1, 2\\\\}\"", Some("\\{1,2\\}"), BOTH, "sieval 26"),
    ("\"x^2+1\"", Some("x^2+1"), BOTH, "open-r1 566"),
];
const BOTH: &[AnswerEquality] = &[AnswerEquality::Exact, AnswerEquality::Equivalent];

#[test]
fn bug_a_reference_is_exact_or_its_row_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for (reference, answer, ways, source) in REFERENCES {
        let row = format!("{{\"problem\": \"p\", \"answer\": {reference}}}");
        for &way in *ways {
            match (task_on(folder.path(), "retool", Some(way), &row), answer) {
                (Ok(task), Some(answer)) => {
                    let mut problems = (0..2).map(|i| task.training_problem(0, i));
                    let problem =
                        problems.find(|problem| problem.messages[0].content.starts_with("p\n")).unwrap();
                    for (said, due) in
                        [(format!("\\boxed{{{answer}}}"), true), ("\\boxed{7 + 7 j}".into(), false)]
                    {
                        let messages = [Message::assistant("final", said)];
                        let said = Transcript::new(&messages, Outcome::Finished);
                        if task.reward(&problem, &said).unwrap().success != due {
                            wrong.push(format!("{way:?}: {reference}: {answer} due {due} | {source}"));
                        }
                    }
                }
                (Err(error), None) => {
                    let text = error.to_string();
                    let named = ["train.jsonl", "row 2", "`answer`", "Correct or delete"];
                    if !error.is::<BadInput>() || named.iter().any(|part| !text.contains(part)) {
                        wrong.push(format!("{way:?}: {reference}: {text} | {source}"));
                    }
                }
                (Ok(_), None) => wrong.push(format!("{way:?}: {reference} is not refused | {source}")),
                (Err(error), Some(_)) => wrong.push(format!("{way:?}: {reference}: {error} | {source}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}\n{} wrong", wrong.join("\n"), wrong.len());
}

/// (end of the row's `answer`, number of the reference or none if the row is refused, source)
const GSM8K_REFERENCES: &[(&str, Option<&str>, &str)] = &[
    ("#### 1,234", Some("1234"), "omlx 3484"),
    ("#### -3", Some("-3"), "proeval 19"),
    ("#### +15", Some("15"), "proeval 19"),
    ("#### $18", Some("18"), "lm-evaluation-harness 3214"),
    ("#### 25%", Some("25"), "finchain 3"),
    ("#### 033", Some("33"), "verl 2446"),
    ("#### 5 dollars", Some("5"), "lm-evaluation-harness 3214"),
    ("#### 98765432109876543210987", Some("98765432109876543210987"), "hermes-agent 55314"),
    ("#### two", None, "open-r1 293"),
    ("#### ", None, "open-r1 293"),
    ("#### nan", None, "QA-Eval 1"),
    ("#### 1, 2", None, "post-training-experiments 49"),
    ("#### 3 or 4", None, "post-training-experiments 49"),
    ("#### 1/0", None, "open-r1 293"),
    ("42", None, "open-r1 503"),
];

#[test]
fn bug_a_gsm8k_reference_is_a_number_or_its_row_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (answer, number, source) in GSM8K_REFERENCES {
        let row = format!("{{\"question\": \"p\", \"answer\": \"so {answer}\"}}");
        match (task_on(folder.path(), "gsm8k", None, &row), number) {
            (Ok(task), Some(number)) => {
                let mut problems = (0..2).map(|i| task.training_problem(0, i));
                let problem = problems.find(|problem| problem.messages[0].content.starts_with("p ")).unwrap();
                assert_eq!(problem.answer.as_str(), Some(*number), "{answer} | {source}");
            }
            (Err(error), None) => {
                let text = error.to_string();
                assert!(error.is::<BadInput>() && text.contains("row 2: `answer`"), "{text} | {source}");
            }
            (built, _) => panic!("{answer}: due {number:?}, refused: {} | {source}", built.is_err()),
        }
    }
}
