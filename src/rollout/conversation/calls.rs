//! Tool calls at the end of a turn.

use super::{Conversation, NextAction, REPLY_FRAME_TOKENS};
use crate::chat::{Call, PYTHON, ToolForm};
use crate::harmony::{Message, TurnEnd};
use crate::interpreter::Interpreter;
use crate::tasks::clip_reply;
use crate::trajectory::{CallOutcome, Outcome};
use std::time::Instant;

impl<'a> Conversation<'a> {
    pub(super) fn handle_call(&mut self, end: TurnEnd) -> NextAction {
        if self.is_last_turn() || self.is_exhausted() {
            let (calls, outcome) = match end {
                TurnEnd::Called => (vec![], Outcome::TurnsExhausted),
                _ => (vec![CallOutcome::MalformedCall], Outcome::Malformed),
            };
            let outcome = if self.is_last_turn() { outcome } else { Outcome::TruncatedLength };
            self.close_turn(calls);
            return self.end(outcome);
        }
        let needs_thread = |call: &Call| match call {
            Call::Ready(message) => self.calls_python(message) || self.rollout.task.answers_calls(),
            Call::Malformed { .. } => false,
        };
        if self.turn.parser.calls().iter().any(needs_thread) { NextAction::Call } else { self.run_calls() }
    }

    /// Returns true when a call goes to the Python tool.
    fn calls_python(&self, call: &Message) -> bool {
        self.called_python().is_some() && call.recipient.as_deref() == Some(PYTHON)
    }

    /// Returns the Python tool, if the model uses it by calls.
    fn called_python(&self) -> Option<&'a dyn Interpreter> {
        self.rollout.interpreter.filter(|_| self.rollout.form == ToolForm::Call)
    }

    /// Answers the calls of this turn and blocks until the last reply. If the Python tool or the task may
    /// have to run something, this function is called on a tool thread.
    pub fn run_calls(&mut self) -> NextAction {
        if let Some(program) = self.turn.program.take() {
            return self.run_program(&program);
        }
        let (mut outcomes, mut replies) = (vec![], vec![]);
        // A task that answers a call reads the conversation up to that call, so `messages` gets calls and
        // replies one by one. `close_turn` adds the turn's messages again, and `insert` the replies, so both
        // are removed before.
        let before = self.messages.len();
        let mut ended = None;
        let mut chars_left = self.rollout.reply_chars_max;
        for (index, call) in self.turn.parser.calls().into_iter().enumerate() {
            if index > 0 {
                chars_left = chars_left.map(|chars| chars.saturating_sub(REPLY_FRAME_TOKENS));
            }
            if chars_left == Some(0) {
                ended = Some(Outcome::TruncatedLength);
                break;
            }
            let answer = match call {
                Call::Ready(call) => {
                    let name = call.recipient.clone().unwrap_or_default();
                    self.messages.push(call);
                    self.reply(&name).map(|(outcome, text)| (outcome, name, text))
                }
                Call::Malformed { recipient, reply } => {
                    let author = recipient.or_else(|| self.called_python().map(|_| PYTHON.to_string()));
                    let author = author.ok_or(Outcome::Malformed);
                    author.map(|author| (CallOutcome::MalformedCall, author, reply))
                }
            };
            match answer {
                Ok((outcome, author, text)) => {
                    // The first reply is as long as its tool allows.
                    let text = match chars_left {
                        Some(chars) if index > 0 => clip_reply(&text, chars),
                        _ => text,
                    };
                    chars_left = chars_left.map(|chars| chars.saturating_sub(text.chars().count()));
                    outcomes.push(outcome);
                    let reply = Message::tool(&author, None, text);
                    self.messages.push(reply.clone());
                    replies.push(reply);
                }
                Err(outcome) => {
                    if outcome == Outcome::Malformed {
                        outcomes.push(CallOutcome::MalformedCall);
                    }
                    ended = Some(outcome);
                    break;
                }
            }
        }
        self.messages.truncate(before);
        self.close_turn(outcomes);
        if let Some(outcome) = ended {
            return self.end(outcome);
        }
        let channel = self.messages.last().and_then(|message| message.channel.clone());
        replies.iter_mut().for_each(|reply| reply.channel.clone_from(&channel));
        self.insert(replies, Outcome::Malformed)
    }

    /// Answers the last message, a call to `name`. `Err` holds the outcome that ends the trajectory.
    fn reply(&mut self, name: &str) -> Result<(CallOutcome, String), Outcome> {
        let unknown = || (CallOutcome::UnknownRecipient, format!("Error: there is no tool named {name:?}."));
        let Some(call) = self.messages.last() else { return Ok(unknown()) };
        if let Some(interpreter) = self.called_python().filter(|_| name == PYTHON) {
            let reply = interpreter.call(self.rollout.session(self.coordinates.index), &call.content);
            self.tool_s += reply.seconds;
            self.calls_answered += 1;
            return Ok((reply.outcome, reply.text));
        }
        if !self.rollout.task.answers_calls() {
            return Ok(unknown());
        }
        let started = Instant::now();
        let reply = self.rollout.task.tool_reply(self.problem, &self.transcript(Outcome::Finished));
        self.tool_s += started.elapsed().as_secs_f64();
        match reply {
            Ok(Some(text)) => {
                self.calls_answered += 1;
                Ok((CallOutcome::Answered, text))
            }
            Ok(None) => Ok(unknown()),
            Err(_) => Err(Outcome::TaskFailed),
        }
    }
}
