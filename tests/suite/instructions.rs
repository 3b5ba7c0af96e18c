//! The instruction checkers against the stored reference verdicts, and the composer.

use crate::data;
use rloss::error::BadInput;
use rloss::random::{Purpose, stream};
use rloss::tasks::instructions::compose::{ComposedPrompt, INSTRUCTION_CHARS_MAX, INSTRUCTIONS_MAX, compose};
use rloss::tasks::instructions::{IDS, Instruction, check_strictly};
use serde_json::Value;
use std::collections::BTreeMap;

/// Agreement that each file and all files together must reach.
const BAR: f64 = 0.995;

/// The published loose verdict: one of the eight [`loose_variants`] that follows is enough.
fn loose(instructions: &[Instruction], response: &str) -> Vec<bool> {
    let variants = loose_variants(response);
    let follows =
        |instruction| variants.iter().any(|v| check_strictly(std::slice::from_ref(instruction), v)[0]);
    instructions.iter().map(follows).collect()
}

/// The response; without its first line, its last line, both; and these four without asterisks. It forgives
/// introductions, closing remarks and Markdown emphasis.
fn loose_variants(response: &str) -> [String; 8] {
    // What Python's `str.strip` takes off.
    let strip = |text: &str| {
        text.trim_matches(|c: char| c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)).to_owned()
    };
    let after_first = response.split_once('\n').map_or("", |(_, rest)| rest);
    let without_last = |text: &str| text.rsplit_once('\n').map_or(String::new(), |(rest, _)| strip(rest));
    let cut = [response.to_owned(), strip(after_first), without_last(response), without_last(after_first)];
    let plain = cut.clone().map(|text| text.replace('*', ""));
    let ([a, b, c, d], [e, f, g, h]) = (cut, plain);
    [a, b, c, d, e, f, g, h]
}

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
    let folders = data::folders("ifeval");
    let outside = folders.iter().any(|folder| !folder.own);
    let rows: Vec<_> = folders.iter().flat_map(|folder| data::rows_of(&folder.path)).collect();
    let (mut files, mut ids) = (BTreeMap::<(String, &str), Tally>::new(), BTreeMap::<String, usize>::new());
    for (file, row) in rows.iter().filter(|(file, _)| file.starts_with("verdicts-")) {
        let parsed = instructions(row);
        let response = row["response"].as_str().expect("response");
        for (mode, verdicts) in
            [("strict", check_strictly(&parsed, response)), ("loose", loose(&parsed, response))]
        {
            for (i, verdict) in verdicts.into_iter().enumerate() {
                if row["unstable"].as_array().expect("unstable").contains(&Value::from(i)) {
                    continue;
                }
                let agrees = row[mode][i] == verdict;
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
    assert_eq!(files.len(), if outside { 6 } else { 2 }, "two outside files and our own, two modes");
    assert!(total.compared > if outside { 3000 } else { 100 } && total.share() >= BAR);
}

#[test]
fn every_row_of_the_validation_vectors_parses() {
    for folder in data::folders("ifeval") {
        let mut seen = std::collections::BTreeSet::new();
        for (_, row) in data::rows_of(&folder.path).iter().filter(|(file, _)| file == "input_data") {
            let ids = row["instruction_id_list"].as_array().unwrap();
            seen.extend(ids.iter().map(|id| id.as_str().unwrap().to_owned()));
            instructions(row);
        }
        assert_eq!(seen.iter().map(String::as_str).collect::<Vec<_>>(), IDS.split(' ').collect::<Vec<_>>());
    }
    for folder in data::folders("multi-if") {
        let mut turns = 0;
        for (_, row) in data::rows_of(&folder.path) {
            for turn in row["turns"].as_array().expect("turns") {
                instructions(turn);
                turns += 1;
            }
        }
        assert_eq!(turns, if folder.own { 4 * 3 } else { 896 * 3 + 13 * 2 });
    }
}

/// A clause of ordinary English without commas, capitals, rare letters or the composer's words.
const CLAUSE: &str = "we add the parts one by one and then look at what is left";

/// Ordinary English, enough to hold each common letter fifteen times and for the detector to be sure of it.
const PASSAGE: &str = "\
    this is how people usually work out such a question with their friends before they would write down \
    everything about which they have been thinking during the morning and it turns out that the most \
    common mistake is to lose one of the small steps on the way so a good student stops to look at each \
    of them again";

/// A sentence without commas in each language that the composer asks for.
const FOREIGN: [(&str, &str); 16] = [
    ("ar", "نجمع الأعداد واحدا بعد الآخر ثم ننظر إلى ما تبقى في النهاية"),
    ("bn", "আমরা একে একে সংখ্যাগুলো যোগ করি এবং তারপর দেখি কত বাকি আছে"),
    ("de", "wir zählen die Teile nacheinander zusammen und sehen dann was übrig bleibt"),
    ("es", "sumamos las partes una por una y luego miramos lo que queda al final"),
    ("fi", "laskemme osat yksi kerrallaan yhteen ja katsomme sitten mitä jää jäljelle"),
    ("fr", "nous ajoutons les parties une par une et nous regardons ensuite ce qui reste"),
    ("hi", "हम भागों को एक एक करके जोड़ते हैं और फिर देखते हैं कि क्या बचा है"),
    ("it", "sommiamo le parti una alla volta e poi guardiamo che cosa rimane alla fine"),
    ("ja", "部分を一つずつ足していき最後に何が残るかを見てみましょう"),
    ("ko", "우리는 부분을 하나씩 더하고 나서 무엇이 남는지 살펴봅니다"),
    ("pt", "somamos as partes uma por uma e depois olhamos para o que não foi usado"),
    ("ru", "мы складываем части одну за другой и потом смотрим что осталось"),
    ("sw", "tunaongeza sehemu moja baada ya nyingine kisha tunaangalia kilichobaki mwishoni"),
    ("th", "เรานำส่วนต่างๆ มาบวกกันทีละส่วนแล้วดูว่าเหลืออะไรอยู่บ้าง"),
    ("tr", "parçaları birer birer topluyoruz ve sonra geriye ne kaldığına bakıyoruz"),
    ("vi", "chúng ta cộng từng phần một rồi xem cuối cùng còn lại bao nhiêu"),
];

/// What a composed row asks for, by the last part of the id.
struct Asked<'a>(BTreeMap<&'a str, &'a Value>);

impl<'a> Asked<'a> {
    fn new(composed: &'a ComposedPrompt) -> Self {
        let short = composed.instruction_id_list.iter().map(|id| id.rsplit(':').next().unwrap());
        Self(short.zip(&composed.kwargs).collect())
    }

    fn asks(&self, id: &str) -> bool {
        self.0.contains_key(id)
    }

    /// The text or texts under `key`.
    fn texts(&self, id: &str, key: &str) -> Vec<&'a str> {
        match self.0.get(id).map(|kwargs| &kwargs[key]) {
            Some(Value::Array(list)) => list.iter().map(|v| v.as_str().unwrap()).collect(),
            Some(value) => vec![value.as_str().unwrap()],
            None => Vec::new(),
        }
    }

    fn count(&self, id: &str, key: &str) -> usize {
        self.0.get(id).map_or(0, |kwargs| kwargs[key].as_u64().unwrap() as usize)
    }

    /// The count when the relation is `at least`, otherwise 0.
    fn at_least(&self, id: &str, relation: &str, key: &str) -> usize {
        let low = self.0.get(id).is_some_and(|kwargs| kwargs[relation] == "at least");
        if low { self.count(id, key) } else { 0 }
    }

    /// A response that follows everything at once.
    fn response(&self) -> String {
        let code = self.texts("response_language", "language");
        let clause = FOREIGN.iter().find(|(known, _)| code == [*known]).map_or(CLAUSE, |(_, text)| text);
        let mut parts = vec![[clause, &self.inline(clause)].join(" ").trim().to_owned()];
        let heading = self.texts("multiple_sections", "section_spliter").concat();
        parts.extend((1..=self.count("multiple_sections", "num_sections")).map(|n| format!("{heading} {n}")));
        parts.extend(vec!["* 2 + 2".to_owned(); self.count("number_bullet_lists", "num_bullets")]);
        let mut paragraphs = vec![parts.join("\n")];
        let dividers = self.count("number_paragraphs", "num_paragraphs");
        let blanks = self.count("nth_paragraph_first_word", "num_paragraphs");
        let wanted = dividers.max(blanks).max(1 + usize::from(self.asks("two_responses")));
        paragraphs.resize(wanted, format!("{clause}!"));
        if let [word] = self.texts("nth_paragraph_first_word", "first_word")[..] {
            paragraphs[self.count("nth_paragraph_first_word", "nth_paragraph") - 1]
                .insert_str(0, &format!("{word} "));
        }
        let separator = match (dividers > 0, blanks > 0) {
            (true, _) => "\n***\n",
            (_, true) => "\n\n",
            _ => "\n******\n",
        };
        self.wrapped(paragraphs.join(separator), clause)
    }

    /// Whatever can stand within a paragraph.
    fn inline(&self, clause: &str) -> String {
        let mut parts = self.texts("existence", "keywords");
        let keyword = self.texts("frequency", "keyword");
        parts.extend(keyword.repeat(self.at_least("frequency", "relation", "frequency")));
        parts.extend(vec![clause; self.at_least("number_words", "relation", "num_words") / 10]);
        let long =
            ["letter_frequency", "english_capital", "english_lowercase"].iter().any(|id| self.asks(id));
        parts.extend(long.then_some(PASSAGE));
        let sentence = format!("{clause}.");
        parts.extend(vec![&*sentence; self.at_least("number_sentences", "relation", "num_sentences")]);
        parts.extend(vec![
            "TEN";
            self.at_least("capital_word_frequency", "capital_relation", "capital_frequency")
        ]);
        parts.extend(vec!["[1]"; self.count("number_placeholders", "num_placeholders")]);
        parts.extend(vec!["*2*"; self.count("number_highlighted_sections", "num_highlights")]);
        parts.extend(self.asks("title").then_some("<<3>>"));
        parts.join(" ")
    }

    /// `body` with what comes before, after and around it.
    fn wrapped(&self, body: String, clause: &str) -> String {
        let mut text: String =
            self.texts("repeat_prompt", "prompt_to_repeat").into_iter().map(|p| format!("{p}\n")).collect();
        text += &body;
        for marker in self.texts("postscript", "postscript_marker") {
            text += &format!("\n{marker} {clause}");
        }
        for phrase in self.texts("end_checker", "end_phrase") {
            text += &format!("\n{phrase}");
        }
        if self.asks("english_capital") {
            text = text.to_uppercase();
        } else if self.asks("english_lowercase") {
            text = text.to_lowercase();
        }
        if self.asks("json_format") {
            text = serde_json::to_string(&[text]).unwrap();
        }
        if self.asks("quotation") { format!("\"{text}\"") } else { text }
    }
}

/// With commas, a list and a number line: what a question may hold.
const QUESTION: &str = "Ann has 3 apples, Bob has 4.\n- How many, in total, do they have?  ";

#[test]
fn every_composed_set_can_be_followed_as_a_whole() {
    let (mut drawn, mut sizes) = (BTreeMap::<&str, usize>::new(), [0; INSTRUCTIONS_MAX + 1]);
    for index in 0..20_000 {
        let composed = compose(QUESTION, &mut stream(5, Purpose::Problem, &[index]));
        assert!(composed.prompt.starts_with(QUESTION.trim_end()), "{}", composed.prompt);
        let row = serde_json::to_value(&composed).unwrap();
        let parsed = instructions(&row);
        sizes[parsed.len()] += 1;
        let added = composed.prompt.chars().count() - QUESTION.trim_end().chars().count() - 1;
        assert!(added <= parsed.len() * (INSTRUCTION_CHARS_MAX + 1), "{}", composed.prompt);
        for id in &composed.instruction_id_list {
            *drawn.entry(id).or_default() += 1;
        }
        let response = Asked::new(&composed).response();
        let verdicts = check_strictly(&parsed, &response);
        assert!(verdicts.iter().all(|&v| v), "{row}\n{verdicts:?}\n{response}");
    }
    assert_eq!(drawn.len(), IDS.split(' ').count() - 1);
    assert!(drawn.values().all(|&n| n > 500), "every kind is common: {drawn:?}");
    assert!(sizes[0] == 0 && sizes[1..].iter().all(|&n| n > 6000), "every size is common: {sizes:?}");
}

#[test]
fn a_composed_set_is_not_followed_by_the_question_alone() {
    let followed = (0..2000)
        .filter(|&index| {
            let composed = compose("What is 2 + 2?", &mut stream(6, Purpose::Problem, &[index]));
            let parsed = instructions(&serde_json::to_value(&composed).unwrap());
            check_strictly(&parsed, "The answer is 4.").into_iter().all(|v| v)
        })
        .count();
    // Upper bounds and forbidden words are met by a short answer, and little else is.
    assert!((1..500).contains(&followed), "{followed} of 2000");
}

#[test]
fn a_composed_prompt_is_a_function_of_question_and_stream() {
    let draw = |seed, index| compose(QUESTION, &mut stream(seed, Purpose::Problem, &[index]));
    assert_eq!(draw(1, 2), draw(1, 2));
    assert!((0..20).any(|index| draw(1, index) != draw(2, index)));
}

#[test]
fn wrong_rows_are_refused_by_id_and_kwarg() {
    for (id, kwargs, parts) in [
        ("startend:quotes", "{}", &["startend:quotes", "startend:quotation"][..]),
        ("startend:quotation", r#"{"n": 1}"#, &["startend:quotation", "`n`"]),
        ("startend:quotation", "[]", &["startend:quotation", "object"]),
        (
            "length_constraints:number_words",
            r#"{"num_words": 5}"#,
            &["number_words", "`relation`", "missing"],
        ),
        (
            "length_constraints:number_words",
            r#"{"num_words": -5, "relation": "at least"}"#,
            &["`num_words`", "-5"],
        ),
        (
            "length_constraints:number_words",
            r#"{"num_words": 5, "relation": "at most"}"#,
            &["`relation`", "less than"],
        ),
        ("length_constraints:number_words", r#"{"num_word": 5}"#, &["`num_word`", "num_words, relation"]),
        ("keywords:existence", r#"{"keywords": []}"#, &["`keywords`", "list"]),
        ("keywords:existence", r#"{"keywords": ["a", 1]}"#, &["`keywords`", "list"]),
        ("keywords:frequency", r#"{"keyword": " ", "frequency": 1, "relation": "at least"}"#, &["`keyword`"]),
        (
            "keywords:letter_frequency",
            r#"{"letter": "ab", "let_frequency": 1, "let_relation": "at least"}"#,
            &["`letter`", "one character"],
        ),
        ("language:response_language", r#"{"language": "zh"}"#, &["`language`", "zh-cn"]),
        (
            "length_constraints:nth_paragraph_first_word",
            r#"{"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"}"#,
            &["`nth_paragraph`", "2"],
        ),
        ("combination:repeat_prompt", r#"{"prompt_to_repeat": null}"#, &["`prompt_to_repeat`", "missing"]),
    ] {
        let kwargs = serde_json::from_str(kwargs).unwrap();
        let error = Instruction::parse(id, &kwargs).expect_err(id);
        assert!(error.is::<BadInput>(), "{id}");
        assert!(parts.iter().all(|part| error.to_string().contains(part)), "{id} {kwargs}: {error}");
    }
    let nulls = serde_json::json!({ "num_words": 3.0, "relation": "less than", "keywords": null });
    assert!(
        Instruction::parse("length_constraints:number_words", &nulls).unwrap().is_followed_by("two words")
    );
    assert!(Instruction::parse("punctuation:no_comma", &Value::Null).is_ok());
}

/// Cases that the stored responses hardly touch, by the rules of the reference.
#[test]
fn quirks_of_the_reference_are_kept() {
    let follows =
        |id, kwargs: Value, response| Instruction::parse(id, &kwargs).unwrap().is_followed_by(response);
    let json = |response| follows("detectable_format:json_format", Value::Null, response);
    assert!(json("```json\n{\"a\": [1e999, \"\\ud800\"]}\n```") && json(" 3 "));
    // Deeper than any recursion limit.
    let deep = "[".repeat(10_000) + &"]".repeat(10_000);
    assert!(Instruction::parse("detectable_format:json_format", &Value::Null).unwrap().is_followed_by(&deep));
    assert!(!json("{'a': 1}") && !json("Here: {}") && !json("{\"a\": \"\n\"}"));
    let three = |response| {
        follows("length_constraints:number_paragraphs", serde_json::json!({"num_paragraphs": 3}), response)
    };
    assert!(three("a *** b\n***\nc ***") && !three("a *** *** b *** c"));
    let two = |response| follows("combination:two_responses", Value::Null, response);
    assert!(two("a ****** b") && !two("a ****** a") && !two("a ************ b") && two("******a******b"));
    let first = serde_json::json!({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"});
    let nth = |response| follows("length_constraints:nth_paragraph_first_word", first.clone(), response);
    assert!(nth("a\n\n'then, b") && !nth("a\n\n\n\nthen b") && !nth("a\n\nb"));
    let one = |response| {
        follows(
            "detectable_format:number_highlighted_sections",
            serde_json::json!({"num_highlights": 1}),
            response,
        )
    };
    assert!(one("*a*") && !one("* *") && one("**a**") && !one("*a\nb*"));
    let title = |response| follows("detectable_format:title", Value::Null, response);
    assert!(title("x <<a>>") && !title("<< >>") && !title("<<a\nb>>"));
    let end = |response| {
        follows("startend:end_checker", serde_json::json!({"end_phrase": " That's ALL. "}), response)
    };
    assert!(end("\"well. that's all.\" \n") && !end("that's all. bye"));
    let postscript = |marker, response| {
        follows("detectable_content:postscript", serde_json::json!({ "postscript_marker": marker }), response)
    };
    assert!(postscript("P.S.", "a p. s. b") && postscript("P.P.S", "p.p.sure") && !postscript("P.S.", "ps"));
    assert!(follows("change_case:english_capital", Value::Null, "AND THIS IS HOW WE DO IT HERE."));
    assert!(!follows("change_case:english_capital", Value::Null, "123"));
}

#[test]
fn loose_forgives_first_and_last_lines_and_asterisks() {
    let lower = Instruction::parse("change_case:english_lowercase", &Value::Null).unwrap();
    let all = [lower];
    let response = "Sure! Here it is:\nthis is the answer that you asked me for\nHope it helps";
    assert_eq!((check_strictly(&all, response), loose(&all, response)), (vec![false], vec![true]));
    assert_eq!(loose_variants("a\n*b*\nc")[3..], ["*b*", "a\nb\nc", "b\nc", "a\nb", "b"].map(str::to_owned));
    assert_eq!(loose_variants("a")[1..], ["", "", "", "a", "", "", ""].map(str::to_owned));
    // A blank response follows nothing, not even what forbids.
    let comma = [Instruction::parse("punctuation:no_comma", &Value::Null).unwrap()];
    assert_eq!((check_strictly(&comma, " \n"), loose(&comma, "")), (vec![false], vec![false]));
}
