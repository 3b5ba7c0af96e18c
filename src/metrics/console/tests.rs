//! Tests of the progress display.

use super::*;

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn lines(&self) -> Vec<String> {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap().lines().map(Into::into).collect()
    }
}

#[test]
fn every_step_prints_a_line_without_an_interval() {
    let out = Shared::default();
    let console = Console::lines(out.clone(), Duration::ZERO, 1);
    let stage = console.start_stage("rl", 3, 1);
    stage.advance(1, 0, &[("reward", -0.25)]);
    stage.advance(1, 0, &[("reward", 0.5)]);
    stage.finish();
    let lines = out.lines();
    assert_eq!(lines.len(), 2);
    assert!(lines[0].starts_with("rl 2/3  reward -0.25  ") && lines[0].ends_with(" left"), "{}", lines[0]);
    assert_eq!(lines[1], "rl 3/3  reward 0.5");
}

/// A tick locked the stages, then the newest one. A step that printed a line locked them in the other order,
/// and the run hung.
#[test]
fn bug_a_tick_and_a_step_at_the_same_time_waited_for_each_other() {
    let console = Console::lines(std::io::sink(), Duration::ZERO, 1);
    let (done, ended) = std::sync::mpsc::channel();
    let ticking = console.clone();
    let steps = std::thread::spawn(move || {
        for number in 0..5000 {
            let stage = console.start_stage(&format!("stage {number}"), 20, 0);
            (0..20).for_each(|_| stage.advance(1, 0, &[]));
            stage.finish();
        }
    });
    std::thread::spawn(move || {
        while !steps.is_finished() {
            ticking.tick(Instant::now() + LINE_INTERVAL_MAX);
        }
        done.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(300)).expect("the stages end");
}

#[test]
fn an_interval_keeps_the_first_and_the_last_line_and_inner_stages_are_silent() {
    let out = Shared::default();
    let console = Console::lines(out.clone(), Duration::from_secs(3600), 1);
    let (stage, inner) = (console.start_stage("cold start", 500, 0), console.start_inner_stage("rollout", 8));
    for _ in 0..500 {
        stage.advance(1, 10, &[("loss", 1.0)]);
        inner.advance(1, 10, &[]);
    }
    let lines = out.lines();
    assert_eq!(lines.len(), 2);
    assert!(lines[0].starts_with("cold start 1/500  loss 1  "));
    assert!(lines[1].starts_with("cold start 500/500  loss 1  ") && lines[1].contains("tokens/s"));
}

#[test]
fn work_shows_its_tokens_before_its_first_piece_is_done_and_ends_once() {
    let out = Shared::default();
    let console = Console::lines(out.clone(), Duration::ZERO, 10);
    let work = console.start_item_stage("sampling", 4, 0);
    work.advance(0, 1200, &[]);
    console.tick(Instant::now() + LINE_INTERVAL_MAX);
    work.advance(3, 34, &[("reward", 0.5)]);
    work.advance(1, 4, &[("reward", 0.5)]);
    work.advance(0, 2, &[]);
    let lines = out.lines();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].starts_with("sampling 0/4  1,200 tokens  43 tokens/s"), "{}", lines[0]);
    assert!(lines[1].starts_with("sampling 4/4  reward 0.5  1,238 tokens  "), "{}", lines[1]);
    Console::lines(out.clone(), Duration::ZERO, 0).start_item_stage("silent", 1, 0).advance(1, 1, &[]);
    assert_eq!(out.lines().len(), 2);
}

/// Regression test: the stages within a step of several minutes were not shown in a log.
#[test]
fn a_log_gets_one_line_in_30_seconds_of_a_phase_within_a_step() {
    let out = Shared::default();
    let console = Console::lines(out.clone(), Duration::ZERO, 1);
    console.set_plan(&[("rl", 3, 1.0)]);
    let (steps, update) = (console.start_stage("rl", 3, 0), console.start_pass("update", 1000));
    let start = Instant::now();
    let seconds = |s| start + Duration::from_secs(s);
    (1..=10).for_each(|s| console.tick(seconds(s)));
    assert_eq!(out.lines(), ["rl 0/3: update 0/1000  0:04 so far"]);
    update.advance_tokens(254.6);
    (11..=95).for_each(|s| console.tick(seconds(s)));
    let lines = out.lines();
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert_eq!(lines[1], "rl 0/3: update 255/1000  8 tokens/s  1:34 left");
    update.finish();
    steps.advance(1, 10, &[]);
    let optimizer = console.start_inner_stage("optimizer", 0);
    console.tick(Instant::now() + LINE_INTERVAL_MAX);
    let line = out.lines().pop().unwrap();
    assert!(line.starts_with("rl 1/3: optimizer  0:28 so far") && line.ends_with(" left in all)"), "{line}");
    optimizer.finish();
    steps.finish();
    console.tick(seconds(500));
    assert_eq!(out.lines().len(), 6, "no stage is current");
}

#[test]
fn control_characters_never_reach_the_terminal() {
    let out = Shared::default();
    let console = Console::lines(out.clone(), Duration::ZERO, 1);
    console.start_stage("a\u{1b}[2J\n", 1, 0).advance(1, 0, &[("b\u{7}", 1.0)]);
    console.print("two\nlines \u{1b}]0;title\u{7}");
    let text = out.lines().join("|");
    assert_eq!(text, "a␛[2J␊ 1/1  b␇ 1|two|lines ␛]0;title␇");
}

#[test]
fn one_time_left_stands_for_all_stages() {
    let out = Shared::default();
    let console = Console::lines(out.clone(), Duration::ZERO, 1);
    console.set_plan(&[("cold start", 1, 1.0), ("rl", 1, 1.0)]);
    let (first, second) = (console.start_stage("cold start", 1, 0), console.start_stage("rl", 1, 0));
    first.advance(1, 0, &[]);
    second.advance(1, 0, &[]);
    let lines = out.lines();
    assert!(lines[0].ends_with(" left: rl"), "reinforcement learning has not started: {}", lines[0]);
    assert_eq!(lines[1].trim_end(), "rl 1/1");
}

/// Regression test: after the last step, the time left of the evaluation looked like that of the steps.
#[test]
fn after_the_last_step_the_time_left_is_that_of_the_evaluation() {
    let out = Shared::default();
    let console = Console::lines(out.clone(), Duration::ZERO, 1);
    console.set_plan(&[("rl", 2, 1.0), ("evaluation", 1, 1.0)]);
    let steps = console.start_stage("rl", 2, 0);
    (0..2).for_each(|_| steps.advance(1, 0, &[]));
    let lines = out.lines();
    assert!(lines[0].ends_with(" left") && lines[1].ends_with(" left: evaluation"), "{lines:?}");
}

/// Regression test: a stage was silent for 28 seconds, and for minutes while prompts were read.
#[test]
fn the_first_stage_of_a_name_prints_a_line_at_once_and_says_how_many_prompts_are_read() {
    let out = Shared::default();
    let console = Console::lines(out.clone(), Duration::ZERO, 1);
    let begin = Instant::now();
    for _ in 0..2 {
        let stage = console.start_inner_stage("rollout", 32);
        stage.set_note(Some("prompts read 9/32".to_owned()));
        stage.advance(0, 9, &[]);
        console.tick(begin + FIRST_LINE / 2);
        console.tick(begin + FIRST_LINE + Duration::from_secs(2));
        stage.set_note(None);
        stage.finish();
    }
    let lines = out.lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("rollout 0/32  prompts read 9/32  9 tokens"), "{lines:?}");
}
