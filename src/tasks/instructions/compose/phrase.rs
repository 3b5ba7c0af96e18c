//! Arguments and wording of one drawn instruction.

use rand::Rng;
use rand::seq::{IndexedRandom, SliceRandom};
use serde_json::{Value, json};

/// Words that an answer to a maths question can use or omit. No word is part of another one.
const WORDS: &str = "answer balance because careful compare detail divide example finally group method \
                     number pattern reason result simple therefore total value verify";

/// Closing phrases. They have no comma, no word of [`WORDS`] and no rare letter.
const END_PHRASES: [&str; 4] =
    ["That is all.", "I hope this helps.", "And so we are done.", "Is there more I can do for you?"];

/// Languages with their codes.
const LANGUAGES: [(&str, &str); 16] = [
    ("ar", "Arabic"),
    ("bn", "Bengali"),
    ("de", "German"),
    ("es", "Spanish"),
    ("fi", "Finnish"),
    ("fr", "French"),
    ("hi", "Hindi"),
    ("it", "Italian"),
    ("ja", "Japanese"),
    ("ko", "Korean"),
    ("pt", "Portuguese"),
    ("ru", "Russian"),
    ("sw", "Swahili"),
    ("th", "Thai"),
    ("tr", "Turkish"),
    ("vi", "Vietnamese"),
];

/// Draws an instruction of the kind `id`. Returns its kwargs and a sentence that states the instruction.
pub(super) fn draw_instruction(id: &str, question: &str, rng: &mut impl Rng) -> (Value, String) {
    match id {
        "change_case:capital_word_frequency"
        | "length_constraints:number_sentences"
        | "length_constraints:number_words"
        | "keywords:frequency"
        | "keywords:letter_frequency" => draw_count(id, rng),
        "keywords:existence"
        | "keywords:forbidden_words"
        | "length_constraints:nth_paragraph_first_word"
        | "startend:end_checker"
        | "language:response_language" => draw_words(id, rng),
        "combination:repeat_prompt" => {
            let ask = "Before you answer, copy the question above word for word; write nothing ahead of the copy, and \
                       leave out everything after the question.";
            (json!({ "prompt_to_repeat": question.trim_end() }), ask.to_owned())
        }
        _ => draw_layout(id, rng),
    }
}

fn words() -> Vec<&'static str> {
    WORDS.split(' ').collect()
}

/// Returns one of two wordings at random.
fn either(rng: &mut impl Rng, first: String, second: String) -> String {
    if rng.random() { first } else { second }
}

/// Draws a relation. Returns its value as a kwarg, and its wording.
fn relation(rng: &mut impl Rng) -> (&'static str, &'static str) {
    if rng.random() { ("at least", "at least") } else { ("less than", "fewer than") }
}

/// Draws an instruction that bounds a count.
fn draw_count(id: &str, rng: &mut impl Rng) -> (Value, String) {
    let (relation, says) = relation(rng);
    let low = relation == "at least";
    match id {
        "change_case:capital_word_frequency" => {
            let n: u32 = rng.random_range(2..=8);
            let kwargs = json!({ "capital_frequency": n, "capital_relation": relation });
            (kwargs, format!("Write {says} {n} words entirely in capital letters."))
        }
        "length_constraints:number_sentences" => {
            let n: u32 = if low { rng.random_range(2..=10) } else { rng.random_range(6..=15) };
            let kwargs = json!({ "num_sentences": n, "relation": relation });
            let first = format!("Use {says} {n} sentences.");
            (kwargs, either(rng, first, format!("Your reply should have {says} {n} sentences.")))
        }
        "length_constraints:number_words" => {
            let n: u32 = if low { rng.random_range(3..=15) * 10 } else { rng.random_range(15..=30) * 10 };
            let kwargs = json!({ "num_words": n, "relation": relation });
            let first = format!("Keep to {says} {n} words.");
            (kwargs, either(rng, first, format!("The whole reply should run to {says} {n} words.")))
        }
        "keywords:frequency" => {
            let (n, word): (u32, _) = (rng.random_range(2..=4), *pick(&words(), rng));
            let kwargs = json!({ "keyword": word, "frequency": n, "relation": relation });
            (kwargs, format!("The word \"{word}\" should occur {says} {n} times."))
        }
        _ => {
            // Rare letters get an upper bound, because other instructions may require words with them.
            let letter =
                *pick(if low { &['a', 'e', 'n', 'o', 's', 't'] } else { &['j', 'q', 'x', 'z'] }, rng);
            let n: u32 = if low { rng.random_range(5..=15) } else { rng.random_range(3..=6) };
            let kwargs =
                json!({ "letter": letter.to_string(), "let_frequency": n, "let_relation": relation });
            (kwargs, format!("The letter {letter} should occur {says} {n} times."))
        }
    }
}

/// Draws an instruction on words, phrases or the language.
fn draw_words(id: &str, rng: &mut impl Rng) -> (Value, String) {
    let mut words = words();
    words.shuffle(rng);
    let words = &words[..rng.random_range(1..=3)];
    let list = words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
    match id {
        "keywords:existence" => {
            let first = format!("Make use of each of these words: {list}.");
            (json!({ "keywords": words }), either(rng, first, format!("Your reply has to mention {list}.")))
        }
        "keywords:forbidden_words" => {
            let first = format!("Do without these words: {list}.");
            (json!({ "forbidden_words": words }), either(rng, first, format!("Never use {list}.")))
        }
        "length_constraints:nth_paragraph_first_word" => {
            let paragraphs: u32 = rng.random_range(2..=4);
            let (nth, word) = (rng.random_range(1..=paragraphs), words[0]);
            let kwargs = json!({ "num_paragraphs": paragraphs, "nth_paragraph": nth, "first_word": word });
            let ask = format!(
                "Write {paragraphs} paragraphs with one blank line between them and no other blank line; paragraph \
                 {nth} must begin with the word \"{word}\"."
            );
            (kwargs, ask)
        }
        "startend:end_checker" => {
            let phrase = *pick(&END_PHRASES, rng);
            (json!({ "end_phrase": phrase }), format!("The very last words must be: {phrase}"))
        }
        _ => {
            let (code, name) = *pick(&LANGUAGES, rng);
            let first = format!("Reply in {name} and in no other language.");
            (json!({ "language": code }), either(rng, first, format!("Write all of your reply in {name}.")))
        }
    }
}

/// Draws an instruction on layout, punctuation or case.
fn draw_layout(id: &str, rng: &mut impl Rng) -> (Value, String) {
    let n: u32 = rng.random_range(2..=4);
    let bare = |ask: &str| (json!({}), ask.to_owned());
    match id {
        "change_case:english_capital" => bare("Write in English and only in capital letters."),
        "change_case:english_lowercase" => {
            bare("Write in English and only in lowercase letters, without a single capital.")
        }
        "combination:two_responses" => {
            bare("Give two different answers with ****** between them and nowhere else.")
        }
        "detectable_format:json_format" => {
            bare("The whole reply must be valid JSON; a Markdown code fence around it is fine.")
        }
        "detectable_format:title" => {
            bare("Give your reply a title in double angle brackets, like <<a short title>>.")
        }
        "punctuation:no_comma" => bare("Do not use any comma."),
        "startend:quotation" => bare("Put the whole reply between double quotation marks."),
        "detectable_content:postscript" => {
            let marker = *pick(&["P.S.", "P.P.S"], rng);
            (
                json!({ "postscript_marker": marker }),
                format!("Close with a postscript that begins with {marker}"),
            )
        }
        "detectable_content:number_placeholders" => {
            let ask = format!("Include at least {n} placeholders in square brackets, like [name].");
            (json!({ "num_placeholders": n }), ask)
        }
        "detectable_format:multiple_sections" => {
            let word = *pick(&["Section", "SECTION", "Part"], rng);
            let ask = format!("Divide the reply into {n} sections headed {word} 1, {word} 2 and so on.");
            (json!({ "section_spliter": word, "num_sections": n }), ask)
        }
        "detectable_format:number_bullet_lists" => {
            let ask = format!(
                "Include exactly {n} Markdown bullet points, each on a line that begins with \"* \"."
            );
            (json!({ "num_bullets": n }), ask)
        }
        "detectable_format:number_highlighted_sections" => {
            let ask = format!("Emphasise at least {n} passages in Markdown, like *this passage*.");
            (json!({ "num_highlights": n }), ask)
        }
        _ => {
            let ask = format!("Write exactly {n} paragraphs with the Markdown divider *** between them.");
            (json!({ "num_paragraphs": n }), ask)
        }
    }
}

/// Returns a random member of a list that is not empty.
fn pick<'a, T>(list: &'a [T], rng: &mut impl Rng) -> &'a T {
    list.choose(rng).unwrap_or(&list[0])
}
