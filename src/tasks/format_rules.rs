//! The built-in formatting task. It asks for one line that follows one to three rules: in capitals, with a
//! given number of words, with a given prefix.
//!
//! Problems are generated, so nothing is downloaded. A hash of a problem's text decides whether it is held
//! out (about one in ten). Only the form of the line is graded, not its content. The demonstrations are noisy
//! on purpose: each rule is ignored in half of them. RL then selects among the demonstrated behaviours.

use super::arithmetic::draw_percent;
use super::generated_task::{GeneratedProblem, GeneratedTask};
use super::{Demonstration, Problem, Reward, TaskEntry, Transcript, VALIDATION_PROBLEMS};
use crate::harmony::Message;
use crate::trajectory::Outcome;
use anyhow::{Context, Result};
use rand::Rng;
use rand::seq::IndexedRandom;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "format_rules",
    meaning: "Generated requests for one line: in capitals, with a given number of words, with a given prefix. Checked by rules, without a tool.",
    reads_files: false,
    data: "",
    columns: &[],
    reward_min: -1.0,
    keys: &[],
    make: |_, _| Ok(Box::new(FormatRules::new(VALIDATION_PROBLEMS))),
};

/// Percentage of demonstrations that ignore a requested rule.
const IGNORED: u32 = 50;

/// Number of words in a line, with or without a rule.
const WORDS: RangeInclusive<usize> = 2..=6;

const ADJECTIVES: [&str; 24] = [
    "bad", "big", "blue", "bold", "calm", "cold", "dark", "deep", "dry", "fast", "good", "hot", "kind",
    "long", "new", "odd", "old", "red", "sad", "shy", "soft", "tall", "warm", "wet",
];
const NOUNS: [&str; 24] = [
    "ant", "bear", "bird", "boat", "cat", "city", "cow", "dog", "door", "farm", "fish", "fox", "hat", "hill",
    "king", "lake", "moon", "rain", "road", "sea", "ship", "sun", "tree", "wind",
];
/// Prefixes. Only `so` can also occur by chance, as the start of `soft`.
const PREFIXES: [&str; 8] = ["ah", "but", "look", "now", "oh", "so", "well", "yes"];

/// The required form of a line. An absent rule is not requested. At least one rule is requested.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
struct Rules {
    /// All letters are capitals.
    capitals: bool,
    /// Exactly this many words, separated by white space.
    words: Option<usize>,
    /// The first characters, case-sensitive.
    prefix: Option<String>,
}

impl Rules {
    /// Draws one of the seven sets of rules with equal probability, and the rules' parameters.
    fn draw(rng: &mut impl Rng) -> Self {
        let kinds = rng.random_range(1..8u8);
        let capitals = kinds & 1 != 0;
        let words = (kinds & 2 != 0).then(|| rng.random_range(WORDS));
        let prefix = (kinds & 4 != 0).then(|| with_capitals(pick(&PREFIXES, rng).to_owned(), capitals));
        Self { capitals, words, prefix }
    }

    /// Returns whether `line` follows every rule.
    fn are_followed_by(&self, line: &str) -> bool {
        (!self.capitals || (line.contains(char::is_uppercase) && !line.contains(char::is_lowercase)))
            && self.words.is_none_or(|n| line.split_whitespace().count() == n)
            && self.prefix.as_ref().is_none_or(|prefix| line.starts_with(prefix))
    }

    /// Drops each rule with probability [`IGNORED`] / 100.
    fn drop_some(&self, rng: &mut impl Rng) -> Self {
        let mut keep = || !draw_percent(rng, IGNORED);
        Self {
            capitals: self.capitals && keep(),
            words: self.words.filter(|_| keep()),
            prefix: self.prefix.clone().filter(|_| keep()),
        }
    }

    /// Returns a line of drawn words that follows these rules. Without the rule `capitals`, the drawn words
    /// are in lower case.
    fn line(&self, rng: &mut impl Rng) -> String {
        let count = self.words.unwrap_or_else(|| rng.random_range(WORDS));
        let words: Vec<&str> = (0..count).map(|index| self.word(index, rng)).collect();
        with_capitals(words.join(" "), self.capitals)
    }

    /// Returns word number `index` of a line: the prefix at index 0, if there is one, and a drawn word
    /// otherwise.
    fn word(&self, index: usize, rng: &mut impl Rng) -> &str {
        match &self.prefix {
            Some(prefix) if index == 0 => prefix,
            _ => pick(if rng.random() { &ADJECTIVES } else { &NOUNS }, rng),
        }
    }
}

/// A request: a topic, which is not graded, and the rules for the answer.
#[derive(Debug, Clone)]
pub struct Request {
    topic: [&'static str; 2],
    rules: Rules,
}

impl Request {
    /// Returns the text, such as `Describe the old ship: in capitals, in 3 words, prefix YES.`
    fn text(&self) -> String {
        let Self { topic: [adjective, noun], rules } = self;
        let parts = [
            rules.capitals.then(|| "in capitals".to_owned()),
            rules.words.map(|n| format!("in {n} words")),
            rules.prefix.as_ref().map(|prefix| format!("prefix {prefix}")),
        ];
        let requested: Vec<String> = parts.into_iter().flatten().collect();
        format!("Describe the {adjective} {noun}: {}.", requested.join(", "))
    }

    /// Returns the id, such as `format_rules/old-ship/capitals/3/YES`. `-` means that a rule is absent.
    fn id(&self) -> String {
        let Self { topic: [adjective, noun], rules } = self;
        let capitals = if rules.capitals { "capitals" } else { "-" };
        let words = rules.words.map_or_else(|| "-".to_owned(), |n| n.to_string());
        let prefix = rules.prefix.as_deref().unwrap_or("-");
        format!("format_rules/{adjective}-{noun}/{capitals}/{words}/{prefix}")
    }
}

impl GeneratedProblem for Request {
    const NAME: &'static str = "format_rules";
    const USES_PYTHON: bool = false;

    fn draw(rng: &mut impl Rng) -> Self {
        Self { topic: [pick(&ADJECTIVES, rng), pick(&NOUNS, rng)], rules: Rules::draw(rng) }
    }

    /// Returns whether the request is in the held-out tenth, by the CRC-32 of its text.
    fn is_held_out(&self) -> bool {
        crc32fast::hash(self.text().as_bytes()).is_multiple_of(10)
    }

    fn problem(&self) -> Problem {
        let answer = serde_json::json!(self.rules);
        Problem { id: self.id(), messages: vec![Message::user(self.text())], answer }
    }

    /// Returns a noisy demonstration: some rules are followed, others ignored.
    fn demonstration(&self, rng: &mut impl Rng) -> Demonstration {
        let line = self.rules.drop_some(rng).line(rng);
        Demonstration { messages: vec![Message::user(self.text()), Message::assistant("final", line)] }
    }

    /// Returns +1 for a finished `final` message that follows every rule, otherwise −1.
    fn reward(problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        let rules =
            Rules::deserialize(&problem.answer).with_context(|| format!("{}: no rules", problem.id))?;
        let success = transcript.outcome == Outcome::Finished
            && transcript.final_text().is_some_and(|line| rules.are_followed_by(line));
        Ok(Reward::new(if success { 1.0 } else { -1.0 }, success))
    }
}

fn pick(words: &[&'static str], rng: &mut impl Rng) -> &'static str {
    words.choose(rng).copied().unwrap_or_default()
}

fn with_capitals(text: String, capitals: bool) -> String {
    if capitals { text.to_uppercase() } else { text }
}

/// The task `format_rules`. It has a single turn. Requests have at most 61 bytes, demonstrated answers at
/// most 29.
pub type FormatRules = GeneratedTask<Request>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Purpose, stream};
    use crate::tasks::Task;
    use std::collections::HashSet;

    fn rules(capitals: bool, words: Option<usize>, prefix: Option<&str>) -> Rules {
        Rules { capitals, words, prefix: prefix.map(str::to_owned) }
    }

    #[test]
    fn the_reward_wants_every_rule_kept_in_a_finished_final_message() {
        let task = FormatRules::new(1);
        let reward = |rules: &Rules, channel: &str, line: &str, outcome| {
            let problem = Request { topic: ["old", "ship"], rules: rules.clone() }.problem();
            let messages = [Message::assistant(channel, line)];
            let transcript = Transcript::new(&messages, outcome);
            task.reward(&problem, &transcript).unwrap()
        };
        let all = rules(true, Some(3), Some("YES"));
        let (right, wrong) = (Reward::new(1.0, true), Reward::new(-1.0, false));
        assert_eq!(reward(&all, "final", "YES OLD SHIP", Outcome::Finished), right);
        assert_eq!(reward(&all, "final", "YES OLD SHIP", Outcome::TruncatedLength), wrong);
        assert_eq!(reward(&all, "analysis", "YES OLD SHIP", Outcome::Finished), wrong);
        for (rules, line, expected) in [
            (&all, "YESTERDAY'S SHIP, 7", &right),
            (&all, "YES OLD SHIp", &wrong),
            (&all, "YES OLD", &wrong),
            (&all, "YES OLD RED SHIP", &wrong),
            (&all, "OLD YES SHIP", &wrong),
            (&all, "", &wrong),
            (&rules(true, None, None), "7 + 7", &wrong),
            (&rules(true, None, None), "7 A", &right),
            (&rules(false, Some(2), None), "any  thing", &right),
            (&rules(false, Some(2), None), "anything", &wrong),
            (&rules(false, None, Some("yes")), "yes", &right),
            (&rules(false, None, Some("yes")), "YES", &wrong),
            (&rules(false, None, Some("yes")), " yes", &wrong),
        ] {
            assert_eq!(reward(rules, "final", line, Outcome::Finished), *expected, "{rules:?}: {line:?}");
        }
    }

    #[test]
    fn a_problem_of_another_task_is_an_error() {
        let problem = Problem { id: "other/1".into(), messages: vec![], answer: "7".into() };
        let transcript = Transcript::new(&[], Outcome::Finished);
        let error = FormatRules::new(1).reward(&problem, &transcript).unwrap_err();
        assert_eq!(error.to_string(), "other/1: no rules");
    }

    #[test]
    fn a_request_says_its_rules() {
        let request = |rules| Request { topic: ["old", "ship"], rules };
        let all = request(rules(true, Some(3), Some("YES")));
        assert_eq!(all.text(), "Describe the old ship: in capitals, in 3 words, prefix YES.");
        assert_eq!(all.id(), "format_rules/old-ship/capitals/3/YES");
        let one = request(rules(false, None, Some("yes")));
        assert_eq!(one.text(), "Describe the old ship: prefix yes.");
        assert_eq!(one.id(), "format_rules/old-ship/-/-/yes");
    }

    #[test]
    fn the_split_holds_out_a_tenth_and_training_never_sees_it() {
        let mut rng = stream(1, Purpose::Problem, &[]);
        let held = (0..100_000).filter(|_| Request::draw(&mut rng).is_held_out()).count();
        assert!((9_500..10_500).contains(&held), "{held}");
        let task = FormatRules::new(512);
        let problems = &task.validation_sets()[0].problems;
        let ids: HashSet<_> = problems.iter().map(|p| &p.id).collect();
        assert_eq!(ids.len(), 512);
        assert!((0..20_000).all(|i| !ids.contains(&task.training_problem(0, i).id)));
        let questions: HashSet<_> = problems.iter().map(|p| &p.messages[0].content).collect();
        let shown = |i| task.demonstration(0, i).unwrap().messages[0].content.clone();
        assert!((0..20_000).all(|i| !questions.contains(&shown(i))));
        assert_eq!(task.training_problem(3, 5), FormatRules::new(1).training_problem(3, 5));
        assert_ne!(task.training_problem(3, 5), task.training_problem(4, 5));
    }

    /// Returns the rules of a request, and the answer of its demonstration.
    fn demonstration(index: u64) -> (Rules, String) {
        let mut rng = stream(5, Purpose::Demonstration, &[index]);
        let request = Request::draw(&mut rng);
        let messages = request.demonstration(&mut rng).messages;
        (request.rules, messages[1].content.clone())
    }

    #[test]
    fn demonstrations_keep_each_rule_half_the_time() {
        let shown: Vec<_> = (0..40_000).map(demonstration).collect();
        let share = |requested: fn(&Rules) -> Option<Rules>| {
            let kept: Vec<_> = shown
                .iter()
                .filter_map(|(rules, line)| requested(rules).map(|r| r.are_followed_by(line)))
                .collect();
            assert!(kept.len() > 20_000, "asked for in four of seven requests: {}", kept.len());
            kept.iter().filter(|&&kept| kept).count() as f64 / kept.len() as f64
        };
        let near = |got: f64, want: f64| assert!((got - want).abs() < 0.015, "{got} against {want}");
        near(share(|r| r.capitals.then(|| Rules { capitals: true, ..Rules::default() })), 0.5);
        // One in five of the lines that ignore the number of words has this number by chance.
        near(share(|r| r.words.is_some().then(|| Rules { words: r.words, ..Rules::default() })), 0.6);
        near(
            share(|r| r.prefix.is_some().then(|| Rules { prefix: r.prefix.clone(), ..Rules::default() })),
            0.5,
        );
        // One rule: 1/2, 3/5, 1/2. Two rules: 3/10, 1/4, 3/10. All three: 3/20. The mean is over the seven
        // sets.
        let all = shown.iter().filter(|(rules, line)| rules.are_followed_by(line)).count();
        near(all as f64 / shown.len() as f64, 2.6 / 7.0);
    }
}
