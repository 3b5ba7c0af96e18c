//! Conversations in a model's own chat template.
//!
//! Sampled tokens are kept: behind a sampled turn, only the text that the template adds there is encoded.
//! Where the template writes earlier turns in another way once messages follow, the whole prompt is encoded
//! again.

use super::render::turns;
use super::{ChatMl, THINK};
use crate::bad_input;
use crate::chat::template::{ChatTemplate, DATE, today};
use crate::chat::{NextTokens, PYTHON, function_name};
use crate::harmony::{MaskedTokens, Message, Role};
use crate::vocabulary::Vocabulary;
use anyhow::Result;
use regex::Regex;
use serde_json::{Map, Value, json};

/// The content type of a system message that declares functions. Its content is their JSON.
pub const DECLARATION: &str = "tools";
/// Stands within the words of control tokens that a text spells, so that they stay text. It is no character.
const GUARD: char = '\u{fdd0}';
/// Texts of the probe, which no template has.
const ASKED: &str = "QUESTION-7101";
const ANSWERED: &str = "ANSWER-7102";
const THOUGHT: &str = "THOUGHT-7103";
/// Forms of calls that templates of other models teach: a part of their text, and their name.
const OTHER_CALLS: [(&str, &str); 5] = [
    ("<function=", "Qwen3-Coder's XML"),
    ("<\u{ff5c}tool\u{2581}call", "DeepSeek's"),
    ("[TOOL_CALLS]", "Mistral's"),
    ("<|python_tag|>", "Llama's"),
    ("<tool_call>", "another text between <tool_call> tags"),
];

/// A model's chat templates as its files have them, and the variables that they read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TemplateSource {
    pub default: String,
    /// The template of conversations with tools, if it is another one.
    pub tool_use: Option<String>,
    /// The texts of special tokens: `bos_token` and others.
    pub variables: Map<String, Value>,
}

impl TemplateSource {
    /// Returns whether a template reads the variable or calls the function `name`.
    pub fn reads(&self, name: &str) -> bool {
        [Some(&self.default), self.tool_use.as_ref()].into_iter().flatten().any(|text| text.contains(name))
    }
}

/// A model's own template, and what a probe has found.
#[derive(Debug)]
pub(super) struct OwnTemplate {
    pub source: TemplateSource,
    default: ChatTemplate,
    tool_use: Option<ChatTemplate>,
    variables: Map<String, Value>,
    /// Finds control tokens in a text.
    control: Regex,
    /// The start of every turn of the assistant.
    header: String,
    /// The generation prompt: the header, and what is inserted before the first sampled token.
    start: String,
    /// The text of the token that ends the assistant's turns.
    end: String,
    end_token: u32,
    /// Whether a thought has its own key; otherwise it is a part of the content.
    has_thought_key: bool,
    facts: Vec<String>,
}

impl ChatMl {
    /// Returns the tokenizer of a model with its own template. `variables` are the recipe's; `__date` is the
    /// day that the template is told.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) for a template that cannot be compiled, or with which no
    /// conversation can be trained.
    pub fn with_template(
        vocabulary: Vocabulary,
        source_name: &str,
        source: &TemplateSource,
        variables: Map<String, Value>,
    ) -> Result<Self> {
        let invalid = |why: String| {
            bad_input!(
                "{source_name}: the chat template: {why}; mend the model's template, or use a copy without it"
            )
        };
        let compiled = |text: &String| ChatTemplate::new(text).map_err(invalid);
        let special = (0..vocabulary.vocab_size() as u32).filter(|&id| vocabulary.is_special(id));
        let words =
            special.filter_map(|id| Some(std::str::from_utf8(vocabulary.token_bytes(id)?).ok()?.to_owned()));
        let mut words: Vec<String> = words.filter(|word| !word.is_empty()).collect();
        if words.is_empty() {
            return Err(invalid("the tokenizer has no control token".into()));
        }
        // The longest of several that begin at one place is the token.
        words.sort_by_key(|word| std::cmp::Reverse(word.len()));
        let words: Vec<String> = words.iter().map(|word| regex::escape(word)).collect();
        let control = Regex::new(&words.join("|")).map_err(|error| invalid(error.to_string()))?;
        let mut all = source.variables.clone();
        all.extend(variables);
        all.entry(DATE).or_insert_with(|| today().into());
        let template = OwnTemplate {
            default: compiled(&source.default)?,
            tool_use: source.tool_use.as_ref().map(compiled).transpose()?,
            source: source.clone(),
            variables: all,
            control,
            header: String::new(),
            start: String::new(),
            end: String::new(),
            end_token: 0,
            has_thought_key: true,
            facts: vec![],
        };
        let thinking = source.reads(THINK[1]).then_some(true);
        let end_of_text = vocabulary.added_id("<|endoftext|>");
        let chat = Self { vocabulary, im_start: 0, im_end: 0, end_of_text, thinking, template: None };
        chat.probed(template).map_err(invalid)
    }

    /// Renders a few conversations and learns from them how the template writes turns.
    fn probed(mut self, mut template: OwnTemplate) -> Result<Self, String> {
        let user = Message::user(ASKED);
        let answer = [user.clone(), Message::assistant("final", ANSWERED)];
        let render = |template: &OwnTemplate, messages: &[Message], generates| {
            template.render(messages, generates).map_err(|why| format!("of a short conversation: {why}"))
        };
        let asked = render(&template, &answer[..1], false)?;
        let prompt = render(&template, &answer[..1], true)?;
        let closed = render(&template, &answer, false)?;
        let common = common_length(&prompt, &closed);
        if !prompt.starts_with(&asked) || common <= asked.len() {
            return Err(
                "add_generation_prompt adds no start of the assistant's turn, so nothing can be sampled"
                    .into(),
            );
        }
        template.header = prompt[asked.len()..common].to_owned();
        template.start = prompt[asked.len()..].to_owned();
        let after = closed.rfind(ANSWERED).map(|at| &closed[at + ANSWERED.len()..]);
        let after = after.ok_or("it does not write the text of an answer")?;
        let end = template.control.find(after).filter(|found| after[..found.start()].trim().is_empty());
        let end = end.ok_or(
            "it ends an answer with no control token of the tokenizer, so a model cannot learn to stop",
        )?;
        template.end = end.as_str().to_owned();
        template.end_token =
            self.vocabulary.added_id(end.as_str()).ok_or("its end of an answer is no token")?;
        let thought = [user.clone(), Message::assistant("analysis", THOUGHT), answer[1].clone()];
        template.has_thought_key =
            render(&template, &thought, false).is_ok_and(|text| text.contains(THOUGHT));
        (self.im_end, self.template) = (template.end_token, Some(template.into()));
        let facts = self.facts(&thought, &prompt);
        if let Some(template) = self.template.as_mut().and_then(std::sync::Arc::get_mut) {
            template.facts = facts;
        }
        Ok(self)
    }

    /// Returns what `check` shows of the template.
    fn facts(&self, thought: &[Message], prompt: &str) -> Vec<String> {
        let short = |text: &str| text.chars().take(400).collect::<String>();
        let mut facts = vec![format!("a prompt is {:?}", short(prompt))];
        let function = json!([{"type": "function", "function": {"name": "add", "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]);
        let declared = Message {
            content_type: Some(DECLARATION.into()),
            ..Message::new(Role::System, function.to_string())
        };
        let called = [declared, thought[0].clone(), Message::call("add", "commentary", "{\"a\": 1}")];
        let reply = Message::tool("add", Some("commentary"), ANSWERED);
        let mut keeps =
            |what: &str, before: &[Message], next: &[Message]| match self.render_next(before, next) {
                Ok(NextTokens::Appended(_)) => facts.push(format!("{what}: the tokens before are kept")),
                Ok(NextTokens::Rewritten { from, .. }) => {
                    facts.push(format!(
                        "{what}: the template rewrites what stands before, from {from:?}; a new part begins"
                    ));
                }
                Err(error) => facts.push(format!("{what}: {error:#}")),
            };
        keeps("after a tool's reply", &called, &[reply]);
        keeps("after a user's next message", thought, &[Message::user(ASKED)]);
        facts.extend(self.call_problem(&called).map(|problem| format!("calls: {problem}")));
        facts
    }

    /// Returns what is wrong if the template does not write calls in the form that is read here.
    fn call_problem(&self, called: &[Message]) -> Option<String> {
        let template = self.template.as_ref()?;
        if !template.source.reads("tools") {
            return Some("the template has no place for functions, so the model is not told of them".into());
        }
        let text = match template.render(called, false) {
            Ok(text) => text,
            Err(why) => return Some(format!("the template refuses them: {why}")),
        };
        let turn = text.rsplit_once(template.header.as_str()).map_or("", |(_, turn)| turn);
        let inserted = template.start.strip_prefix(&template.header).unwrap_or_default();
        let mut parser = self.turn_parser();
        for token in self.encode(turn.strip_prefix(inserted).unwrap_or(turn)).ok()? {
            parser.push(token);
        }
        if parser.finish().iter().any(|message| message.recipient.as_deref() == Some("add")) {
            return None;
        }
        let known = OTHER_CALLS.iter().find(|(part, _)| turn.contains(part));
        let known = known.map_or("another form", |(_, name)| name);
        let shown: String = turn.split(template.end.as_str()).next()?.chars().take(120).collect();
        Some(format!(
            "the template teaches {known}: {shown:?}; what is read is JSON between <tool_call> and </tool_call>, so \
             calls in that form are text"
        ))
    }

    /// Returns what `check` shows of a model's own template; nothing without one.
    pub fn template_facts(&self) -> &[String] {
        self.template.as_ref().map_or(&[], |template| &template.facts)
    }

    /// Encodes a rendered text. A control token that a message spells is text.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let Some(template) = &self.template else { return self.vocabulary.encode_text(text) };
        let (mut tokens, mut done) = (vec![], 0);
        let ordinary = |text: &str| self.vocabulary.encode_text(&text.replace(GUARD, ""));
        for found in template.control.find_iter(text) {
            tokens.extend(ordinary(&text[done..found.start()])?);
            tokens.extend(self.vocabulary.added_id(found.as_str()));
            done = found.end();
        }
        tokens.extend(ordinary(&text[done..])?);
        Ok(tokens)
    }

    /// Renders what follows a sampled turn, the last of `before`.
    pub(super) fn template_continuation(
        &self,
        template: &OwnTemplate,
        before: &[Message],
        messages: &[Message],
    ) -> Result<NextTokens> {
        let whole = template.text(&[before, messages].concat(), true)?;
        let closed = template.text(before, false)?;
        let end = closed.rfind(&template.end).map_or(closed.len(), |at| at + template.end.len());
        if whole.starts_with(&closed[..end]) {
            return Ok(NextTokens::Appended(self.encode(&whole[end..])?));
        }
        // Qwen3's template writes an empty thought in the last turn alone. It was not sampled.
        let turn = turns(before).last().map_or(0, <[Message]>::len);
        let open = template.text(&before[..before.len() - turn], false)?;
        let turn = |text: &str| {
            let start =
                open.len() + text.strip_prefix(&open)?.find(&template.header)? + template.header.len();
            let end = start + text[start..].find(&template.end)?;
            Some((without_empty_thought(&text[start..end]).to_owned(), end + template.end.len()))
        };
        match (turn(&closed), turn(&whole)) {
            (Some((sampled, _)), Some((again, end))) if sampled == again => {
                Ok(NextTokens::Appended(self.encode(&whole[end..])?))
            }
            _ => {
                let from = whole[common_length(&closed, &whole)..].chars().take(40).collect();
                Ok(NextTokens::Rewritten { tokens: self.encode(&whole)?, from })
            }
        }
    }

    /// Renders a conversation for training: the mask covers each turn of the assistant and its end.
    pub(super) fn template_training(
        &self,
        template: &OwnTemplate,
        messages: &[Message],
    ) -> Result<MaskedTokens> {
        let text = template.text(messages, false)?;
        let mut out = MaskedTokens { tokens: vec![], mask: vec![] };
        let mut push = |text: &str, is_trained: bool| -> Result<()> {
            out.tokens.extend(self.encode(text)?);
            out.mask.resize(out.tokens.len(), is_trained);
            Ok(())
        };
        let mut rest = text.as_str();
        let answers =
            turns(messages).filter(|turn| turn.iter().all(|message| message.role == Role::Assistant));
        let answers: Vec<&[Message]> = answers.collect();
        if text.matches(template.header.as_str()).count() != answers.len() {
            return Err(bad_input!(
                "the model's chat template writes {} turns of the assistant for {}; give each answer a turn of its own",
                text.matches(template.header.as_str()).count(),
                answers.len()
            ));
        }
        for turn in answers {
            let at = rest.find(&template.header).unwrap_or(rest.len());
            let is_inserted = rest[at..].starts_with(&template.start);
            let start = at + if is_inserted { template.start.len() } else { template.header.len() };
            push(&rest[..start], false)?;
            let end =
                rest[start..].find(&template.end).map_or(rest.len(), |end| start + end + template.end.len());
            push(&rest[start..end], turn.iter().all(|message| !message.no_loss))?;
            rest = &rest[end..];
        }
        // No line break follows the last turn.
        if !rest.trim().is_empty() {
            push(rest, false)?;
        }
        Ok(out)
    }
}

impl OwnTemplate {
    /// Returns whether a sampled turn begins within a thought.
    pub fn begins_in_thought(&self) -> bool {
        let [open, close] = THINK.map(|tag| self.start.rfind(tag));
        open > close
    }

    pub(super) fn text(&self, messages: &[Message], generates: bool) -> Result<String> {
        self.render(messages, generates).map_err(|why| bad_input!("the model's chat template: {why}"))
    }

    fn render(&self, messages: &[Message], generates: bool) -> Result<String, String> {
        let (mut list, mut tools) = (vec![], vec![]);
        for turn in turns(messages) {
            match turn {
                [first, ..] if first.role == Role::Assistant => list.push(self.answer(turn)?),
                [declared] if declared.content_type.as_deref() == Some(DECLARATION) => {
                    let declared: Vec<Value> = serde_json::from_str(&declared.content).unwrap_or_default();
                    tools.extend(declared);
                }
                others => {
                    for message in others {
                        let role = if message.role == Role::Developer { Role::System } else { message.role };
                        let mut value =
                            json!({"role": role.name(), "content": self.guarded(&message.content)?});
                        if let Some(name) = message.name.as_deref() {
                            value["name"] = function_name(name).into();
                        }
                        list.push(value);
                    }
                }
            }
        }
        let template = self.tool_use.as_ref().filter(|_| !tools.is_empty()).unwrap_or(&self.default);
        template.render(&list, &tools, generates, &self.variables)
    }

    /// Returns a turn of the assistant in OpenAI's form.
    fn answer(&self, turn: &[Message]) -> Result<Value, String> {
        let joined = |is: fn(&&Message) -> bool| {
            let texts: Vec<&str> = turn.iter().filter(is).map(|message| message.content.as_str()).collect();
            self.guarded(&texts.join("\n"))
        };
        let thought = joined(|message| message.is_thought())?;
        let mut content = joined(|message| message.recipient.is_none() && !message.is_thought())?;
        let mut value = json!({"role": "assistant"});
        if !thought.is_empty() && self.has_thought_key {
            value["reasoning_content"] = thought.into();
        } else if !thought.is_empty() {
            content = format!("{}\n{thought}\n{}\n\n{content}", THINK[0], THINK[1]);
        }
        value["content"] = content.into();
        let calls = turn.iter().filter_map(|message| Some((message.recipient.as_deref()?, &message.content)));
        let call = |(recipient, content): (&str, &String)| {
            let arguments = match recipient {
                PYTHON => json!({"code": self.guarded(content)?}),
                _ => {
                    let guarded = self.guarded(content)?;
                    serde_json::from_str(&guarded).unwrap_or(guarded.into())
                }
            };
            Ok(
                json!({"type": "function", "function": {"name": function_name(recipient), "arguments": arguments}}),
            )
        };
        let calls: Vec<Value> = calls.map(call).collect::<Result<_, String>>()?;
        if !calls.is_empty() {
            value["tool_calls"] = calls.into();
        }
        Ok(value)
    }

    /// Returns a text in which no control token is spelled: each has a guard after its first character.
    fn guarded(&self, text: &str) -> Result<String, String> {
        if text.contains(GUARD) {
            return Err("a message has U+FDD0, which is no character; remove it".into());
        }
        let guard = |found: &regex::Captures| {
            let mut word = found[0].chars();
            word.next().into_iter().chain([GUARD]).chain(word).collect::<String>()
        };
        Ok(self.control.replace_all(text, guard).into_owned())
    }
}

/// Returns the bytes that two texts have in common at their start.
fn common_length(a: &str, b: &str) -> usize {
    let common = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    a.floor_char_boundary(common)
}

/// Returns a turn without an empty thought at its start.
fn without_empty_thought(turn: &str) -> &str {
    let after = turn.strip_prefix(THINK[0]).and_then(|rest| rest.trim_start().strip_prefix(THINK[1]));
    after.map_or(turn, |after| after.trim_start_matches('\n'))
}
