//! Words that the field has better ones for do not come back: neither as identifiers nor in text.

use std::fs;
use std::path::{Path, PathBuf};

/// Where a word is not used any more, the word, and the field's. A word may be right elsewhere: `Most` is a limit in
/// `spec`, and letters are what names are made of there.
const REPLACED: &[(&[&str], &str, &str)] = &[
    (&["crates/dataplane", "lab/sim/src/world"], "Letter", "ThreadMessage, Message"),
    (&["crates/dataplane", "lab/sim/src/world"], "letters", "messages"),
    (&["crates/dataplane", "lab/sim/src/world"], "Letters", "Messages"),
    (&["crates/dataplane", "crates/completion", "extras/preload", "docs"], "bell", "doorbell"),
    (&["crates"], "Bell", "Doorbell"),
    (&["crates"], "has_rung", "is_signaled"),
    (&["crates"], "Board", "SchedulerClient"),
    (&["crates/dataplane"], "board", "scheduler_client"),
    (&["crates/dataplane"], "Ask", "PendingRequest"),
    (&["crates/engine", "crates/dataplane"], "Lent", "SubmitContext"),
    (&["crates/engine", "crates/dataplane"], "Most", "TransferLimits"),
    (&["crates"], "is_deaf", "needs_kick_rearm"),
    (&["crates"], "DROWSY_NS", "IDLE_BEFORE_NOTIFY_NS"),
    (&["crates"], "put_drowsy_to_sleep", "rearm_idle_queues"),
    (&["crates"], "listen_to_sleepers", "arm_pending_kicks"),
    (&["crates", "docs"], "latch", "mark_broken"),
    (&["crates", "docs"], "latched", "broken"),
    (&["crates/dataplane"], "let_go", "detach_queue"),
    (&["crates"], "free_stuck", "unblock_stuck_iothreads"),
    (&["crates"], "lock_soon", "lock_with_retry"),
    (&["crates"], "claim_soon", "open_exclusive_with_retry"),
    (&["crates"], "tell_all_broken", "report_broken_queues"),
    (&["crates"], "LeftOut", "SkippedVms"),
    (&["crates"], "Pressed", "Overloaded"),
    (&["crates"], "NOBODY_READS", "EXIT_SIGPIPE"),
    (&["crates"], "while_it_is_read", "catch_broken_pipe"),
    (&["crates"], "is_unread", "is_broken_pipe"),
    (&["crates/dataplane"], "granted", "start_scheduled, to_start"),
    (&["crates/dataplane"], "Granted", "StartScheduled"),
    (&["crates/dataplane"], "fn told", "unreported"),
    (&["crates/dataplane"], "complete_raw", "complete_entry"),
    (&["crates/dataplane"], "go_on", "start_rest"),
    (&["crates/dataplane"], "LONGEST", "MAX_PART_BYTES"),
    (&["docs"], "rooms", "crates"),
];

/// Sources and documents below `path`; measured results are not text that anybody writes.
fn files(path: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if path.file_name().is_none_or(|name| name != "results") {
                files(&path, found);
            }
        } else if path.extension().is_some_and(|e| e == "rs" || e == "md" || e == "toml") {
            found.push(path);
        }
    }
}

/// Where `word` stands by itself in `text`.
fn lines_with<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.lines().enumerate().filter_map(move |(number, line)| {
        let alone = |(at, _): (usize, &str)| {
            !line[..at].ends_with(is_part) && !line[at + word.len()..].starts_with(is_part)
        };
        line.match_indices(word).any(alone).then_some(number + 1)
    })
}

#[test]
fn replaced_words_are_not_used() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = Vec::new();
    for (places, word, better) in REPLACED {
        let expand = |place: &&'static str| match *place {
            "crates" => vec!["crates", "extras", "lab"],
            place => vec![place],
        };
        for place in places.iter().flat_map(expand) {
            let mut paths = Vec::new();
            files(&root.join(place), &mut paths);
            assert!(!paths.is_empty(), "{place} has no files");
            for path in paths.iter().filter(|path| !path.ends_with("tests/it/dictionary.rs")) {
                let text = fs::read_to_string(path).unwrap();
                let path = path.strip_prefix(&root).unwrap().display();
                let say = |line| format!("{path}:{line}: {word}, better: {better}");
                found.extend(lines_with(&text, word).map(say));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// As in all of the field's code, constants that bound something are `MIN_` and `MAX_`.
#[test]
fn bounds_are_named_min_and_max() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut paths = Vec::new();
    ["crates", "extras", "lab"].iter().for_each(|place| files(&root.join(place), &mut paths));
    let mut found = Vec::new();
    for path in paths.iter().filter(|path| !path.ends_with("tests/it/dictionary.rs")) {
        let text = fs::read_to_string(path).unwrap();
        let is_one = |line: &&str| ["const LEAST", "const MOST"].iter().any(|it| line.contains(it));
        found.extend(text.lines().filter(is_one).map(|line| format!("{}: {line}", path.display())));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn word_is_found_by_itself_alone() {
    let text = "a bell\nbells\nthe_bell\nbell, and bell\n";
    assert_eq!(lines_with(text, "bell").collect::<Vec<_>>(), [1, 4]);
}
