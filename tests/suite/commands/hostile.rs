//! What others hand over, meant to harm: run folders with links, and files whose content is chosen to exhaust
//! or deceive.

use super::first_hour::Follower;
use super::*;
use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::time::Instant;

/// Runs what must be refused in a line that is not long, and returns what it said.
fn refused(command: &mut Command, words: &[&str]) -> String {
    let said = super::refused(command, words);
    assert!(said.len() < 4096, "{} bytes", said.len());
    said
}

/// Every file below `folder` with its bytes.
fn tree(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(tree(&path)),
            false => drop(found.insert(path.clone(), fs::read(&path).unwrap())),
        }
    }
    found
}

/// `.lock` was created through a link and emptied what it led to; metrics, trajectories, events and
/// evaluations were written through links.
#[test]
fn nothing_is_written_through_a_link_in_a_run_folder() {
    let (place, [out, victim]) = scratch(["run", "victim"]);
    fs::create_dir_all(victim.join("folder")).unwrap();
    fs::write(victim.join("file"), "precious\n").unwrap();
    let metrics = ["logging.tensorboard=true", "train.steps=1"];
    // A folder without a run yet.
    fs::create_dir(&out).unwrap();
    for (name, target) in [(".lock", "file"), ("trajectories", "folder"), ("tensorboard", "folder")] {
        symlink(victim.join(target), out.join(name)).unwrap();
        refused(&mut small(&out, &metrics), &[&format!("run/{name}: is a symbolic link")]);
        fs::remove_file(out.join(name)).unwrap();
    }
    done(&mut small(&out, &metrics));
    // One with a run, which is gone on with. What is there is put aside.
    fs::copy(out.join("metrics.jsonl"), victim.join("metrics.jsonl")).unwrap();
    let before = tree(&victim);
    let step = fs::read_dir(out.join("trajectories")).unwrap().next().unwrap().unwrap().file_name();
    let step = format!("trajectories/{}", step.to_str().unwrap());
    for (name, target) in [
        (".lock", "file"),
        ("metrics.jsonl", "metrics.jsonl"),
        ("trajectories", "folder"),
        (&step, "file"),
        ("tensorboard", "folder"),
        ("tensorboard/rl", "folder"),
        ("checkpoints", "folder"),
    ] {
        let aside = place.path().join("aside");
        fs::rename(out.join(name), &aside).unwrap();
        symlink(victim.join(target), out.join(name)).unwrap();
        let said = output(&mut resumed(&out, &["logging.tensorboard=true", "train.steps=2"]));
        assert_eq!(said.code, Some(2), "{name}: {}", said.stderr);
        fs::remove_file(out.join(name)).unwrap();
        fs::rename(&aside, out.join(name)).unwrap();
    }
    // Evaluations beside the checkpoints.
    symlink(victim.join("folder"), out.join("eval")).unwrap();
    refused(rloss().arg("eval").arg(&out), &["run/eval: is a symbolic link"]);
    fs::remove_file(out.join("eval")).unwrap();
    fs::create_dir(out.join("eval")).unwrap();
    let inner = out.join("eval").join(checkpoints(&out).pop().unwrap());
    symlink(victim.join("folder"), &inner).unwrap();
    refused(rloss().arg("eval").arg(&out), &["is a symbolic link"]);
    assert_eq!(tree(&victim), before);
    // A link that the user names, and links to what is not written, stay allowed.
    fs::remove_dir_all(out.join("eval")).unwrap();
    symlink(out.join("checkpoints"), out.join("mine")).unwrap();
    symlink(&out, place.path().join("latest")).unwrap();
    done(&mut resumed(&place.path().join("latest"), &["logging.tensorboard=true", "train.steps=2"]));
}

/// A model folder without weights.
fn without_weights(place: &Path) -> PathBuf {
    let model = place.join("model");
    copy_model(&first_checkpoint(warm_model()), &model);
    fs::remove_file(model.join("model.safetensors")).unwrap();
    model
}

fn check(model: &Path) -> Command {
    let mut command = rloss();
    command.args(["check", "quickstart", "--set", &model_path(model)]);
    command
}

fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// Every absent name was told, 10 MB of them.
#[test]
fn an_index_of_absent_shards_is_told_in_a_short_line() {
    let place = TempDir::new().unwrap();
    let model = without_weights(place.path());
    let entries: Vec<String> =
        (0..500_000).map(|i| format!("\"t{i}\":\"model-{i:06}.safetensors\"")).collect();
    let index = format!("{{\"weight_map\":{{{}}}}}", entries.join(","));
    fs::write(model.join("model.safetensors.index.json"), index).unwrap();
    refused(&mut check(&model), &["model-000000.safetensors", "and 499984 more; fetch these files"]);
}

/// They took ten seconds.
#[test]
fn a_header_of_600_000_empty_tensors_is_refused_at_once() {
    let place = TempDir::new().unwrap();
    let model = without_weights(place.path());
    let entry = |i| format!("\"t{i}\":{{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}");
    let header = format!("{{{}}}", (0..600_000).map(entry).collect::<Vec<_>>().join(","));
    fs::write(model.join("model.safetensors"), safetensors(&header, &[])).unwrap();
    let begun = Instant::now();
    refused(&mut check(&model), &["model.safetensors", "more than 200000 tensors"]);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

/// The last one of the two was taken, and other readers take the first.
#[test]
fn a_header_that_names_a_tensor_twice_is_refused() {
    let place = TempDir::new().unwrap();
    let model = without_weights(place.path());
    let entry = |dtype| {
        format!("\"model.norm.weight\":{{\"dtype\":\"{dtype}\",\"shape\":[2],\"data_offsets\":[0,4]}}")
    };
    let header = format!("{{{},{}}}", entry("F16"), entry("BF16"));
    fs::write(model.join("model.safetensors"), safetensors(&header, &[0; 4])).unwrap();
    refused(&mut check(&model), &["it names \"model.norm.weight\" twice"]);
}

/// Its escape sequences reached the terminal.
#[test]
fn report_shows_the_escapes_of_a_path() {
    let (_place, [run]) = scratch(["r\u{1b}[2Jn"]);
    fs::create_dir(&run).unwrap();
    fs::write(run.join("metrics.jsonl"), "").unwrap();
    let said = done(rloss().arg("report").arg(&run)).stdout;
    assert!(!said.contains('\u{1b}'), "{said}");
    assert!(run.join("report.html").is_file());
}

/// An amount of memory in a process's status.
pub(super) fn kib(status: &str, name: &str) -> Option<u64> {
    status.lines().find_map(|line| line.strip_prefix(name))?.trim().trim_end_matches(" kB").parse().ok()
}

/// Resident memory of a process in MiB, and its threads.
fn taken(pid: u32) -> (u64, usize) {
    let status = text_of(format!("/proc/{pid}/status"));
    let kib = kib(&status, "VmRSS:").unwrap();
    (kib >> 10, fs::read_dir(format!("/proc/{pid}/task")).unwrap().count())
}

/// A length of 2^64 - 1 ended the server, a body that never came blocked everybody, one of 1.5 GiB stayed in
/// memory, and every idle connection kept a thread.
#[test]
fn a_followed_page_is_served_whatever_else_is_asked() {
    let mut follower = Follower::start("0");
    let pid = follower.0.id();
    let (host, path) = follower.place();
    let (host, path) = (host.to_owned(), path);
    let served = || {
        let begun = Instant::now();
        let page = follower.ask(&format!("GET {path}state HTTP/1.1\r\nHost: {host}"));
        assert!(page.starts_with("HTTP/1.1 200"), "{page}");
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    };
    let open = |text: &str| {
        let mut stream = TcpStream::connect(&host).unwrap();
        // One that the server has closed takes no more.
        let _ = stream.write_all(text.as_bytes());
        stream
    };
    served();
    let (idle, _) = taken(pid);
    let head = format!("POST {path} HTTP/1.1\r\nHost: {host}\r\n");
    let huge = format!("{head}Content-Length: 18446744073709551615\r\n\r\n");
    let attacks: [&dyn Fn() -> TcpStream; 6] = [
        &|| open(&huge),
        &|| open(&format!("{head}Content-Length: 1000\r\n\r\n")),
        &|| open(&format!("{head}Transfer-Encoding: chunked\r\n\r\nffffffff\r\n")),
        &|| open("GET / HT"),
        &|| open(&format!("{head}X: {}\r\n", "x".repeat(1 << 20))),
        &|| open(""),
    ];
    let mut kept = vec![];
    for round in 0..60 {
        kept.extend(attacks.iter().map(|attack| attack()));
        if round % 10 == 0 {
            served();
        }
        // Descriptors are few where the test runs.
        kept.drain(..kept.len().saturating_sub(300));
    }
    served();
    // A body as long as is taken.
    let mut stream = open(&format!("{head}Content-Length: 1610612736\r\n\r\n"));
    let piece = vec![0; 1 << 20];
    let sent = (0..1536).take_while(|_| stream.write_all(&piece).is_ok()).count();
    assert!(sent < 64, "{sent} MiB of a body were taken");
    served();
    let (now, threads) = taken(pid);
    assert!(now < idle + 64 && threads < 160, "{idle} and {now} MiB, {threads} threads");
    drop(kept);
    assert!(follower.0.try_wait().unwrap().is_none(), "it goes on");
}

/// A file of 6.5 KB took all memory, and so did one with a text of 50 MB to put before every other.
#[test]
fn a_tokenizer_that_lengthens_every_text_is_refused_within_a_second() {
    let place = TempDir::new().unwrap();
    let model = without_weights(place.path());
    let file = model.join("tokenizer.json");
    let whole: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let replace = |from: char, to: char| {
        let content = to.to_string().repeat(100);
        serde_json::json!({"type": "Replace", "pattern": {"String": from.to_string()}, "content": content})
    };
    let letters: Vec<char> = "abcdefghi".chars().collect();
    let steps: Vec<_> = letters.windows(2).map(|pair| replace(pair[0], pair[1])).collect();
    let prepend = serde_json::json!({"type": "Prepend", "prepend": "x".repeat(50 << 20)});
    for normalizer in [serde_json::json!({"type": "Sequence", "normalizers": steps}), prepend] {
        let mut hostile = whole.clone();
        hostile["normalizer"] = normalizer;
        fs::write(&file, hostile.to_string()).unwrap();
        let begun = Instant::now();
        let mut child = check(&model).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut peak_mib = 0;
        while child.try_wait().unwrap().is_none() {
            let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
            peak_mib = peak_mib.max(kib(&status, "VmHWM:").unwrap_or(0) >> 10);
            std::thread::sleep(Duration::from_millis(1));
        }
        let said = Ended::from(child.wait_with_output().unwrap());
        assert_eq!(said.code, Some(2), "{}", said.stderr);
        assert_has(&said.stderr, &["byte-level BPE"]);
        assert!(peak_mib < 256, "{peak_mib} MiB");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}

/// What a task's program had started went on after a SIGKILL.
#[test]
fn children_of_a_tasks_program_end_with_a_killed_run() {
    let (_place, [recipe]) = scratch(["mine.toml"]);
    let command = "command = [\"sh\", \"-c\", \"sleep 987.651 & exec sleep 987.652\"]";
    fs::write(&recipe, format!("[task]\nname = \"command\"\n{command}\ncommand_timeout_s = 600.0\n"))
        .unwrap();
    // Whether a process runs whose whole command is this.
    let runs = |command: &str| {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        processes
            .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
            .any(|found| found == format!("{}\0", command.replace(' ', "\0")).as_bytes())
    };
    let wait = |what: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !what() && begun.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(what(), "in vain");
    };
    let mut run = rloss().arg("check").arg(&recipe).stderr(Stdio::null()).spawn().unwrap();
    wait(&|| runs("sleep 987.651") && runs("sleep 987.652"));
    // The watcher starts a moment after the program.
    std::thread::sleep(Duration::from_millis(500));
    run.kill().unwrap();
    run.wait().unwrap();
    wait(&|| !runs("sleep 987.651") && !runs("sleep 987.652"));
}
