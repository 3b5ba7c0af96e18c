//! Sampled turns: well formed, malformed, random.

use super::*;
use rand::Rng;
use rand::seq::IndexedRandom;
use rloss::random::{Purpose, stream};

/// A turn written with special tokens spelled out.
fn turn(text: &str) -> ParsedCompletion {
    let tokenizer = embedded();
    parse_completion(&tokenizer, &encode_with_special(&tokenizer, text))
}

#[test]
fn calls_are_read_in_every_order() {
    for (text, channel, content_type) in [
        (" to=python<|channel|>analysis code<|message|>1<|call|>", Some("analysis"), Some("code")),
        ("<|channel|>commentary to=python code<|message|>1<|call|>", Some("commentary"), Some("code")),
        ("<|channel|>analysis code to=python<|message|>1<|call|>", Some("analysis"), Some("code")),
        ("<|channel|>analysis to=python<|message|>1<|call|>", Some("analysis"), None),
        (" to=python<|message|>1<|call|>", None, None),
    ] {
        let parsed = turn(text);
        assert_eq!((parsed.end, &parsed.error), (TurnEnd::Called, &None), "{text}");
        let [call] = &parsed.messages[..] else { panic!("{text}: {parsed:?}") };
        assert_eq!(call.recipient.as_deref(), Some("python"));
        assert_eq!(call.channel.as_deref(), channel, "{text}");
        assert_eq!(call.content_type.as_deref(), content_type, "{text}");
        assert_eq!(call.content, "1");
    }
}

#[test]
fn problems_are_named_and_keep_the_text() {
    use TurnError::*;
    let malformed = |text: &str| MalformedHeader { leftover: text.into() };
    let python = || "python".to_string();
    for (text, end, problem, messages) in [
        ("<|channel|>final<|message|>7<|return|>", TurnEnd::Returned, None, 1),
        (
            "<|channel|>analysis to=python code extra<|message|>x<|call|>",
            TurnEnd::Malformed,
            Some(malformed("extra")),
            1,
        ),
        ("<|channel|><|message|>x<|return|>", TurnEnd::Malformed, Some(malformed("<|channel|>")), 1),
        ("<|channel|><|message|>x<|end|>", TurnEnd::Truncated, Some(Truncated), 1),
        ("so<|message|>x<|return|>", TurnEnd::Malformed, Some(malformed("so")), 1),
        ("<|channel|>analysis to=<|message|>x<|call|>", TurnEnd::Malformed, Some(malformed("to=")), 1),
        (" to=user<|message|>x<|call|>", TurnEnd::Malformed, Some(malformed("to=user")), 1),
        (" to=a\u{a0}b<|message|>x<|call|>", TurnEnd::Malformed, Some(malformed("to=a\u{a0}b")), 1),
        ("<|channel|>analysis<|end|>", TurnEnd::Truncated, Some(Truncated), 1),
        ("<|return|>", TurnEnd::Malformed, Some(UnfinishedHeader), 1),
        ("<|channel|>final<|message|>7<|call|>", TurnEnd::Malformed, Some(CallWithoutRecipient), 1),
        (" to=python<|message|>7<|end|>", TurnEnd::Called, None, 1),
        (" to=python<|message|>7<|return|>", TurnEnd::Called, None, 1),
        ("<|channel|>analysis to=assistant<|message|>7<|return|>", TurnEnd::Returned, None, 1),
        (" to=python<|message|> \n<|call|>", TurnEnd::Malformed, Some(EmptyCall { recipient: python() }), 1),
        (" to=python<|message|>1<|message|>2<|call|>", TurnEnd::Malformed, Some(SpecialTokenInContent), 1),
        (
            "<|channel|>final<|message|>1<|start|>2<|return|>",
            TurnEnd::Returned,
            Some(SpecialTokenInContent),
            1,
        ),
        ("<|channel|>analysis<|message|>t<|end|>so", TurnEnd::Malformed, Some(TextAfterEnd), 2),
        ("<|channel|>final<|message|>t<|return|>so", TurnEnd::Malformed, Some(TextAfterEnd), 1),
        ("<|channel|>analysis<|message|>t<|end|>", TurnEnd::Truncated, Some(Truncated), 1),
        ("<|channel|>analysis<|message|>t", TurnEnd::Truncated, Some(Truncated), 1),
        ("<|channel|>ana", TurnEnd::Truncated, Some(Truncated), 1),
        ("", TurnEnd::Truncated, Some(Truncated), 0),
        (
            "<|channel|>analysis<|message|>t<|end|><|start|>user<|message|>yes<|end|>",
            TurnEnd::Malformed,
            Some(WrongAuthor { author: "user".into() }),
            2,
        ),
    ] {
        let parsed = turn(text);
        assert_eq!((parsed.end, parsed.messages.len()), (end, messages), "{text}: {parsed:?}");
        if problem.is_some() || end == TurnEnd::Returned {
            assert_eq!(parsed.error, problem, "{text}");
        }
        assert!(parsed.messages.iter().all(|m| m.role == Role::Assistant), "{text}");
        if let Some(problem) = parsed.error {
            assert!(problem.reply().starts_with("Error: ") && problem.reply().len() < 100);
        }
    }
}

/// The prompt ended in the turn's opening; a model that samples it again still writes its own message.
#[test]
fn a_repeated_opening_is_the_turns_own_header() {
    let plain = turn("<|channel|>final<|message|>x<|return|>");
    assert_eq!((plain.end, &plain.error), (TurnEnd::Returned, &None));
    assert_eq!(turn("<|start|>assistant<|channel|>final<|message|>x<|return|>"), plain);

    let call = turn("<|start|>assistant to=python<|channel|>analysis<|message|>1<|call|>");
    assert_eq!((call.end, &call.error), (TurnEnd::Called, &None));
    assert_eq!(call.messages, [Message::call("python", "analysis", "1")]);

    let named = |author: &str| Some(TurnError::WrongAuthor { author: author.into() });
    for (text, problem) in [
        ("<|start|>user<|channel|>final<|message|>x<|return|>", named("user")),
        ("<|start|><|channel|>final<|message|>x<|return|>", named("")),
        // Once is a slip; more, or later, is no header.
        (
            "<|start|>assistant<|start|>assistant<|channel|>final<|message|>x<|return|>",
            Some(TurnError::MalformedHeader {
                leftover: "assistant<|start|>assistant<|channel|>final".into(),
            }),
        ),
        (
            "<|channel|>final<|start|>assistant<|message|>x<|return|>",
            Some(TurnError::MalformedHeader { leftover: "<|channel|>final<|start|>assistant".into() }),
        ),
    ] {
        let parsed = turn(text);
        assert_eq!((parsed.end, parsed.error), (TurnEnd::Malformed, problem), "{text}");
    }
}

/// A broken header costs its message, not the turn (openai-harmony's lenient parser).
#[test]
fn a_turn_goes_on_after_a_message_with_a_broken_header() {
    let answer = Message::assistant("final", "42");
    let end = "<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>";
    for (broken, kept) in [
        ("<|channel|>analysis the user wants a sum<|message|>hm", None),
        ("<|channel|>?? 2?<|message|>hm", None),
        ("so<|message|>hm", None),
        ("<|channel|>analysis<|channel|>final<|message|>hm", None),
        ("<|channel|>analysis hm", Some(Message::assistant("analysis", "hm"))),
        ("<|channel|>commentary?<|message|>hm", Some(Message::assistant("commentary?", "hm"))),
    ] {
        let parsed = turn(&format!("{broken}{end}"));
        assert_eq!((parsed.end, parsed.messages.len()), (TurnEnd::Returned, 2), "{broken}: {parsed:?}");
        assert_eq!(parsed.messages[1], answer, "{broken}");
        assert!(parsed.messages[0].content.ends_with("hm"), "{broken}: {parsed:?}");
        if let Some(kept) = kept {
            assert_eq!(parsed.messages[0], kept, "{broken}");
        }
    }
    let call = "<|channel|>commentary to=functions.add<|channel|>commentary json<|message|>{}<|call|>";
    let parsed = turn(call);
    assert_eq!(
        (parsed.end, parsed.messages[0].recipient.as_deref()),
        (TurnEnd::Called, Some("functions.add"))
    );
}

#[test]
fn a_malformed_turn_stays_what_it_was() {
    let tokenizer = embedded();
    let tokens = encode_with_special(&tokenizer, "<|channel|>final<|message|>7<|call|>more");
    let parsed = parse_completion(&tokenizer, &tokens);
    assert_eq!((parsed.end, parsed.error), (TurnEnd::Malformed, Some(TurnError::CallWithoutRecipient)));
}

#[test]
fn characters_may_span_tokens_and_bad_bytes_stay_visible() {
    let tokenizer = embedded();
    let mut tokens = encode_with_special(&tokenizer, "<|channel|>final<|message|>é😀<|return|>");
    assert_eq!(parse_completion(&tokenizer, &tokens).messages[0].content, "é😀");
    // Without its last byte the emoji is one replacement character, in all parsers.
    tokens.remove(tokens.len() - 2);
    let parsed = parse_completion(&tokenizer, &tokens);
    assert_eq!((parsed.end, parsed.error), (TurnEnd::Returned, Some(TurnError::InvalidUtf8)));
    assert_eq!(parsed.messages[0].content, "é\u{fffd}");
    let strict = parse(&tokenizer, Role::Assistant, ParseMode::Strict, &tokens).unwrap();
    assert_eq!(strict, parsed.messages);
    let mut call = encode_with_special(&tokenizer, " to=python<|message|>1<|call|>");
    call.insert(call.len() - 1, 16 + 0xff);
    let parsed = parse_completion(&tokenizer, &call);
    assert_eq!((parsed.end, parsed.error), (TurnEnd::Malformed, Some(TurnError::InvalidUtf8)));
}

#[test]
fn lenient_parsing_saves_a_message_closed_in_its_header() {
    let tokenizer = embedded();
    let tokens = encode_with_special(&tokenizer, "<|channel|>final the answer<|return|>");
    assert!(parse(&tokenizer, Role::Assistant, ParseMode::Strict, &tokens).is_err());
    let saved = parse(&tokenizer, Role::Assistant, ParseMode::Lenient, &tokens).unwrap();
    assert_eq!(saved, [Message::assistant("final", "the answer")]);
    // The author being given, a repeated opening is taken for a recipient, as the reference does.
    let repeated =
        encode_with_special(&tokenizer, "<|start|>assistant<|channel|>final<|message|>x<|return|>");
    let parsed = parse(&tokenizer, Role::Assistant, ParseMode::Strict, &repeated).unwrap();
    assert_eq!(parsed, [Message::call("<|start|>assistant", "final", "x")]);
}

/// Random tokens, mostly control tokens and header words: no panic, and every turn ends in a defined way.
#[test]
fn random_turns_end_in_a_defined_state() {
    let tokenizer = embedded();
    let mut random = stream(3, Purpose::Sampling, &[1]);
    let mut ends = std::collections::BTreeMap::new();
    let pieces: Vec<Vec<u32>> = [
        "<|message|>",
        "<|channel|>analysis",
        " to=python",
        " to=",
        "\u{3000}",
        "<|call|>",
        "<|end|>",
        "<|start|>assistant",
    ]
    .iter()
    .map(|text| encode_with_special(&tokenizer, text))
    .collect();
    for _ in 0..30_000 {
        let mut tokens: Vec<u32> = Vec::new();
        for _ in 0..random.random_range(0..24) {
            match random.random_range(0..4) {
                0 => tokens.push(random.random_range(0..16)),
                1 => tokens.push(random.random_range(16..280)),
                _ => tokens.extend(pieces.choose(&mut random).unwrap()),
            }
        }
        let mut parser = TurnParser::new(&tokenizer);
        let mut over = None;
        for &token in &tokens {
            if let TurnStep::Ended(end) = parser.push(token) {
                over = Some(end);
                break;
            }
        }
        assert_eq!(parser.call().is_some(), over == Some(TurnEnd::Called));
        let parsed = parser.finish();
        assert_eq!(parsed.end, over.unwrap_or(TurnEnd::Truncated));
        match parsed.end {
            TurnEnd::Malformed | TurnEnd::Truncated => assert!(parsed.error.is_some()),
            TurnEnd::Called => {
                let call = parsed.messages.last().unwrap();
                assert!(call.recipient.as_deref().is_some_and(|name| !name.is_empty()));
                assert!(!call.content.trim().is_empty());
                let name = call.recipient.as_deref().unwrap();
                let reply = Message::tool(name, call.channel.as_deref(), "ok");
                assert!(tokenizer.render_message(&reply).is_ok(), "{reply:?}");
            }
            TurnEnd::Returned => assert!(!parsed.messages.is_empty()),
        }
        for message in &parsed.messages {
            assert_eq!(message.role, Role::Assistant);
            assert!(tokenizer.render_message(message).is_ok(), "{message:?}");
        }
        *ends.entry(format!("{:?}", parsed.end)).or_insert(0) += 1;
        for mode in [ParseMode::Strict, ParseMode::Lenient] {
            let _ = parse(&tokenizer, Role::Assistant, mode, &tokens);
        }
        parse_completion(&tokenizer, &tokens);
    }
    assert_eq!(ends.len(), 4, "{ends:?}");
}

#[test]
fn a_rendered_turn_is_read_back() {
    let tokenizer = embedded();
    let mut random = stream(5, Purpose::Sampling, &[2]);
    let opening = tokenizer.turn_start(Role::Assistant).unwrap();
    for round in 0..200 {
        let text: String = (0..random.random_range(1..20)).map(|_| random.random::<char>()).collect();
        let content = format!("x{text}");
        let last = match round % 2 {
            0 => Message {
                content_type: Some("code".into()),
                ..Message::call("python", "analysis", &*content)
            },
            _ => Message::assistant("final", &*content),
        };
        let messages = [Message::assistant("analysis", text), last];
        let rendered =
            tokenizer.render_conversation_for_training(&messages, RenderOptions::default()).unwrap();
        let sampled = rendered.tokens.strip_prefix(&opening[..]).unwrap();
        let parsed = parse_completion(&tokenizer, sampled);
        assert_eq!(parsed.messages, messages);
        assert_eq!(parsed.error, None);
        assert_eq!(parsed.end, if round % 2 == 0 { TurnEnd::Called } else { TurnEnd::Returned });
    }
}
