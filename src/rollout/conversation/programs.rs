//! Programs in an answer: they run, and their output is inserted into the same message.

use super::{Conversation, NextAction};
use crate::trajectory::{Outcome, Turn};

impl Conversation<'_> {
    /// Takes a program that has ended with the last token.
    pub(super) fn handle_program(&mut self, program: String) -> NextAction {
        if self.is_last_turn() || self.is_exhausted() {
            let outcome =
                if self.is_last_turn() { Outcome::TurnsExhausted } else { Outcome::TruncatedLength };
            self.close_turn(vec![]);
            return self.end(outcome);
        }
        self.turn.program = Some(program);
        NextAction::Call
    }

    /// Runs a program and inserts its output. The mask is false for the inserted tokens.
    pub(super) fn run_program(&mut self, program: &str) -> NextAction {
        let Some(interpreter) = self.rollout.interpreter else { return self.end(Outcome::TaskFailed) };
        let reply = interpreter.call(self.rollout.session(self.coordinates.index), program);
        self.tool_s += reply.seconds;
        self.calls_answered += 1;
        let answer = self.turn.parser.answer().unwrap_or_default();
        let start = answer.len();
        let text = self.rollout.form.output_text(answer, &reply.text);
        let tokens_left = self.rollout.context_tokens_max().saturating_sub(self.record.len());
        let inserted = match self.rollout.chat.vocabulary().encode_text(&text) {
            Ok(tokens) if tokens.len() < tokens_left => tokens,
            refused => {
                let outcome = if refused.is_ok() { Outcome::TruncatedLength } else { Outcome::Malformed };
                self.close_turn(vec![reply.outcome]);
                return self.end(outcome);
            }
        };
        for &token in &inserted {
            self.turn.parser.push(token);
        }
        let length = self.turn.parser.answer().map_or(0, <[u8]>::len);
        if let Some(scanner) = &mut self.turn.programs {
            scanner.skip(length);
        }
        self.turn.outputs.push((start, text));
        self.turns.push(Turn { start: self.turn.start, end: self.record.len(), calls: vec![reply.outcome] });
        self.record.insert(&inserted);
        self.turn.inserted = inserted;
        self.turn.start = self.record.len();
        NextAction::Sample
    }
}
